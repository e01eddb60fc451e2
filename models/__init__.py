"""Triples, graphs, text embeddings, the Graph-LLM and its processor; this lowest layer imports no sibling package."""

if __name__ == "models":
    raise ImportError("import the package as tripletune.models; as models it would be loaded a second time")
