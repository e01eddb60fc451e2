"""Models: the Graph-LLM with its processor, decoding on this machine, loading, adapters, losses and attention."""

if __name__ == "models":
    raise ImportError("import the package as tripletune.models; as models it would be loaded a second time")
