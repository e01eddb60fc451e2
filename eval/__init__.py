"""Tasks, metrics, the harness and the statistics behind its tables."""
