"""The Graph-LLM: graph encoder, projector and language model (RAS, sections 3.2 and 3.3)."""
