"""Triples, records, pairs, trajectories and passages."""
