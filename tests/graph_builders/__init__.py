"""Files that real graph builders write, read by `data adapt`, and our exports, read by others.

    python -m tests.graph_builders --output FOLDER       # about ten minutes, most of them for installing

Each package is installed in an environment of its own, gets four small texts and scripted replies, and writes its files
with its own code. Not part of the tests, since it needs a package index.
"""
