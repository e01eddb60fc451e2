"""Search over passages."""
