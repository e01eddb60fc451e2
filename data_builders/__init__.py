"""Build training records from benchmark files and a teacher."""

if __name__ == "data_builders":
    raise ImportError("import it as tripletune.data_builders; under its short name it would be loaded twice")
