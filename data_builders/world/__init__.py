"""A fictional world whose questions no model has seen."""
