"""Where a call of a language model is answered: one module per backend."""
