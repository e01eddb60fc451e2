"""Triples of passages: the stores and the extraction."""
