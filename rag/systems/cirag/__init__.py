"""CIRAG: iterative retrieval that builds a chain of triples; `loop.py` is the algorithm."""

from tripletune.rag.systems.cirag.loop import SYSTEM

__all__ = ["SYSTEM"]
