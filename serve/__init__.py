"""Systems behind an HTTP server with OpenAI's API and a page to ask and watch: `tripletune serve`."""

if __name__ == "serve":
    raise ImportError("import tripletune.serve: by its short name it is another module with other classes")
