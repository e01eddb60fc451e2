"""Questions about speed and size: `python -m benchmarks CASE`."""
