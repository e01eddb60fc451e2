"""Text-to-triples pairs."""
