"""Triples, graphs, text embeddings, the Graph-LLM and its processor: the bottom of the house, imports no sibling."""
