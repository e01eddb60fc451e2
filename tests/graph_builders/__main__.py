"""Make the files, read them, write them again and read that with the packages; print what differs from the facts."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.cli import read_lines
from tests.graph_builders.facts import TRIPLES

HERE = Path(__file__).parent
# Builder, its packages, the script that lets it write, and what `data adapt` is given.
BUILDERS = (
    ("lightrag", ["lightrag-hku==1.5.7"], "lightrag_hku.py", ""),
    ("graphrag", ["graphrag==3.3.0"], "graphrag.py", "output"),
    ("llamaindex", ["llama-index-core==0.14.25"], "llama_index_core.py", ""),
    ("langchain", ["langchain-experimental==0.4.2", "langchain-community==0.4.2", "json-repair"],
     "langchain_experimental.py", "graph.jsonl"),
    ("rdf", ["rdflib==7.6.0"], "rdflib_7.py", "graph.nt"),
)  # fmt: skip
READERS = ["llama-index-core==0.14.25", "networkx==3.6.1", "rdflib==7.6.0"]
FACTS = sorted(list(triple) for triples in TRIPLES.values() for triple in triples)


def python_with(folder, packages):
    """The interpreter of an environment with these packages."""
    program = folder / "bin" / "python"
    complete = folder / "complete"  # an installation that was stopped is made again
    if not complete.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([program, "-m", "pip", "install", "--quiet", *packages], check=True)
        complete.touch()
    return program


def run_outside(program, script, folder):
    """Run a script in another environment; return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONPATH"] = str(HERE)
    command = [program, HERE / "made_by" / script, folder]
    return subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout


def tripletune(*words):
    """Run a command of `tripletune`; an error ends this program."""
    subprocess.run([sys.executable, "-m", "tripletune", *map(str, words)], check=True)


def main():
    """Run all builders and readers from a command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True, type=Path, help="folder for environments and files")
    home = parser.parse_args().output.resolve()
    home.mkdir(parents=True, exist_ok=True)
    for name, packages, script, given in BUILDERS:
        made = home / name
        if not made.exists():
            run_outside(python_with(home / f"{name}.environment", packages), script, made)
        adapted = home / f"{name}.jsonl"
        tripletune("data", "adapt", "--from", name, made / given, "--output", adapted)
        found = sorted(triple for row in read_lines(adapted) for triple in row["triples"])
        same = sum(triple in FACTS for triple in found)
        print(f"{name}: {len(found)} of {len(FACTS)} triples, {same} as the reply had them")
    source = home / "lightrag.jsonl"
    for form, file in (("graphml", "graph.graphml"), ("ntriples", "graph.nt"), ("csv", "graph.csv")):
        words = ("--corpus", source, "--store", source, "--format", form, "--output", home / "exported" / file)
        tripletune("rag", "export", *words)
    program = python_with(home / "readers.environment", READERS)
    for reader, facts in json.loads(run_outside(program, "read_back.py", home / "exported")).items():
        print(f"{reader}: {len(facts)} of {len(FACTS)} triples read back, all equal: {facts == FACTS}")


if __name__ == "__main__":
    main()
