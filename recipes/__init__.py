"""The programs people launch; their YAML files are in recipes/configs."""

if __name__ == "recipes":
    raise ImportError("import tripletune.recipes: by its short name it is another module with other classes")
