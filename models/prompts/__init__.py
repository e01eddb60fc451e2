"""What a model is told: instructions as files, and the renderer of records."""
