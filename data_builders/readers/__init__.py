"""One reader a benchmark; each yields `Question` objects from the official files."""
