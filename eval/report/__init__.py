"""Reports of finished evaluations."""
