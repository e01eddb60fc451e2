"""Install clients of OpenAI's API, ask `tripletune serve` with each of them, and print what works.

    python -m tests.clients --output FOLDER                 # about ten minutes, most of them for installing
    python -m tests.clients --output FOLDER --only langchain

The server runs over two passages, and its chat model is a mock that answers at once. A line that is not as the table in
`docs/guide/serve.md` says begins with FAIL, and the exit code is then 1. Environments are kept in FOLDER, so a second
run is short; newer versions come with a new folder. The AI SDK needs node and npm.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.llm.server import MockServer, texts

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).resolve().parents[2]
# The packages of each client; torch is pinned where a package asks for it, since an open requirement pulls in CUDA.
PYTHON = {
    "openai": ["openai"],
    "instructor": ["instructor"],
    "langchain": ["langchain-openai"],
    "llamaindex": ["llama-index-llms-openai-like"],
    "litellm": ["litellm"],
    "pydantic_ai": ["pydantic-ai-slim[openai]"],
    "openai_agents": ["openai-agents"],
    "llm": ["llm"],
    "lm_eval": ["lm-eval[api]", "torch==2.13.0"],
}
NODE = {"ai_sdk": ["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"]}
PASSAGES = [
    {"title": "Glass Harbour", "text": "A novel by Ida Morn.", "triples": [["Glass Harbour", "author", "Ida Morn"]]},
    {"title": "Ida Morn", "text": "Born in Velsund.", "triples": [["Ida Morn", "birthplace", "Velsund"]]},
]


def main() -> int:
    """Run from a command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=Path, help="folder for environments")
    parser.add_argument("--only", choices=[*PYTHON, *NODE], help="run one client")
    options = parser.parse_args()
    home = options.output.resolve()
    home.mkdir(parents=True, exist_ok=True)
    failures = 0
    with MockServer(reply) as model, server(home, model.url) as url:
        for name in [options.only] if options.only else [*PYTHON, *NODE]:
            command = python_command(home, name) if name in PYTHON else node_command(home, name)
            print(f"== {name}", flush=True)
            environment = {**os.environ, "OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{url}/v1", "HOME": str(home)}
            environment.pop("PYTHONPATH", None)
            done = subprocess.run([*command, f"{url}/v1"], cwd=home, env=environment, timeout=600, check=False)
            failures += done.returncode != 0
    return int(failures > 0)


def reply(body: dict) -> str:
    """What the chat model says: plans until Ida Morn's birthplace is shown, the answer, or the answer as an object."""
    system, *_ = texts(body)
    text = texts(body)[-1]
    if "Schema:" in text:
        return json.dumps({"town": "Velsund"})
    if not system.startswith("You plan"):
        return "Velsund"
    if "Glass Harbour" not in text:
        return "[SUBQ] a question that no passage answers"
    return "[SUFFICIENT]" if "birthplace" in text else "[SUBQ] Where was Ida Morn born?"


@contextmanager
def server(home: Path, model: str) -> Iterator[str]:
    """The URL of a server over the passages; it ends with the block."""
    corpus = home / "passages.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in PASSAGES), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["--llm", f"openai:m@{model}", "--corpus", str(corpus), "--triples", str(corpus), "--top-k", "1"]
    command = [sys.executable, "-m", "tripletune", "serve", *words, "--systems", "ras,standard", "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    url = f"http://127.0.0.1:{port}"
    with (home / "server.log").open("w") as log:
        running = subprocess.Popen(command, stderr=log, env=environment)
    try:
        while running.poll() is None and not _is_ready(url):
            time.sleep(0.2)
        if running.poll() is not None:
            raise RuntimeError(f"the server has ended: {(home / 'server.log').read_text()}")
        yield url
    finally:
        running.terminate()
        running.wait(30)


def _is_ready(url: str) -> bool:
    """Whether the server answers, and its models are loaded."""
    try:
        with urllib.request.urlopen(f"{url}/readyz") as response:
            return bool(response.status == 200)
    except OSError:
        return False


def python_command(home: Path, name: str) -> list[str]:
    """The command of a script for Python, after its client is installed."""
    folder = home / name
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PYTHON[name]], check=True)
    return [str(python), str(SCRIPTS / f"with_{name}.py")]


def node_command(home: Path, name: str) -> list[str]:
    """The command of a script for node, after its packages are installed beside a copy of it."""
    folder = home / name
    if not folder.exists():
        folder.mkdir()
        subprocess.run(["npm", "install", "--silent", "--prefix", str(folder), *NODE[name]], check=True)
    script = folder / f"with_{name}.mjs"
    script.write_text((SCRIPTS / script.name).read_text(encoding="utf-8"), encoding="utf-8")
    return ["node", str(script)]


if __name__ == "__main__":
    sys.exit(main())
