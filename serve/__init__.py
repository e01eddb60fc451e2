"""Serve systems over HTTP, with OpenAI's API and a page that shows every step: `tripletune serve`."""

if __name__ == "serve":
    raise ImportError("import the package as tripletune.serve; as serve it would be loaded a second time")
