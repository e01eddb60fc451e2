"""Benchmark files and a teacher become training records."""

if __name__ == "data_builders":
    raise ImportError("import tripletune.data_builders: by its short name it is another module with other classes")
