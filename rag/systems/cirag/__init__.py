"""CIRAG: iterative retrieval that builds a chain of triples."""
