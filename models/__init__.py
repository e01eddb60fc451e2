"""Triples, graphs, text embeddings, the Graph-LLM and its processor: the bottom of the house, imports no sibling."""

if __name__ == "models":
    raise ImportError("import it as tripletune.models; under its short name it would be loaded twice")
