"""Triples, graphs, text embeddings, the Graph-LLM and its processor: the bottom of the house, imports no sibling."""

if __name__ == "models":
    raise ImportError("import tripletune.models: by its short name it is another module with other classes")
