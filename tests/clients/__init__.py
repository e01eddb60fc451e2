"""Ask a running `tripletune serve` with real clients, each in an environment of its own: `python -m tests.clients`.

`scripts/` has a script for each client, which `__main__.py` runs. A script needs the client's package alone.
"""
