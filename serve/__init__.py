"""Systems behind an HTTP server with OpenAI's API and a page to ask and watch: `tripletune serve`."""

if __name__ == "serve":
    raise ImportError("import it as tripletune.serve; under its short name it would be loaded twice")
