"""Retrieval and the loops that use the models."""
