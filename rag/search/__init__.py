"""Search: encoders, indexes of passages and of triples, and the retrievers that read them."""
