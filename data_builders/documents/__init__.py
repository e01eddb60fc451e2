"""Cut custom documents into passages."""
