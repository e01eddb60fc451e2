"""The programs people launch; their YAML files are in recipes/configs."""
