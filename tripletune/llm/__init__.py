"""Calls of language models: backends, the ledger that keeps every call, its clients, and the reading of replies."""
