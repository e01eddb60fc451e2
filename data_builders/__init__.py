"""Benchmark files and a teacher become training records."""
