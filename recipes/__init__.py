"""The programs that users launch; their YAML files are in recipes/configs."""

if __name__ == "recipes":
    raise ImportError("import it as tripletune.recipes; under its short name it would be loaded twice")
