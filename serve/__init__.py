"""The systems behind an HTTP server that speaks OpenAI's API, with one page to ask and to watch: `tripletune serve`."""

if __name__ == "serve":
    raise ImportError("import tripletune.serve: by its short name it is another module with other classes")
