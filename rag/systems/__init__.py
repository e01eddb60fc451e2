"""Question answering systems: one module each."""
