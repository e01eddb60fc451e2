"""Write the documents of a fictional company from a table (`company.yaml`), and record the calls of a teacher.

    python examples/make.py documents      # documents/: twenty files
    python examples/make.py record         # teacher.jsonl.gz: every call of the recipe, with its reply

The teacher is a server on this machine that answers from the table, but only with facts of the sentences in the prompt.
A recorded call holds its prompt: after a change of prompts, run `record` again.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from company import DOCUMENTS, HOME, write_documents
from teacher import Teacher

from tripletune.core.config import load_config
from tripletune.recipes.own_documents import OwnDocumentsConfig, own_documents_steps

RECORDED = HOME / "teacher.jsonl.gz"


class Handler(BaseHTTPRequestHandler):
    """Chat completions as OpenAI's API has them, with about four characters per token."""

    teacher = Teacher()

    def do_POST(self) -> None:
        """Answer a request with the teacher's reply to its messages; `http.server` calls this."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = self.teacher.reply(body["messages"])
        prompt_tokens = sum(len(message["content"]) for message in body["messages"]) // 4
        completion_tokens = len(text) // 4 + 1
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        data = json.dumps({"object": "chat.completion", "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Print nothing: the programs that call show their own progress."""


def record() -> None:
    """Run the recipe's chat model steps and the notebook's last step with the teacher, and save its calls."""
    # All calls of a step come at once.
    ThreadingHTTPServer.request_queue_size = 256
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    with tempfile.TemporaryDirectory() as scratch:
        home = f"{scratch}/road"
        for command in road(home, url):
            _, *words = command.split()
            if words[0] in ("build", "rag"):
                run_tripletune(words)
        ledger = f"{home}/ledger.sqlite"
        where = f"--corpus {home}/passages --triples {home}/triples.sqlite --top-k 1 --first-query generated"
        llm = f"openai:tarnbeck-teacher@{url}"
        run_tripletune(["ask", two_hop_question(home), *where.split(), "--llm", llm, "--teacher-ledger", ledger])
        calls = Path(scratch) / "calls.jsonl"
        run_tripletune(["ledger", "export", ledger, "--output", str(calls)])
        write_recorded(calls)
    server.shutdown()


def run_tripletune(words: list[str]) -> None:
    """Run a command of `tripletune` in a process of its own; an error ends the recording."""
    subprocess.run([sys.executable, "-m", "tripletune", *words], check=True)


def two_hop_question(home: str) -> str:
    """The exam's first question with two hops."""
    lines = Path(home, "questions/test.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines:
        row = json.loads(line)
        if row["type"] == "2-hop":
            return str(row["question"])
    raise ValueError("the exam has no question with two hops")


def write_recorded(calls: Path) -> None:
    """Write the exported calls by their keys and without times, so that the file changes only with the calls."""
    rows = []
    for line in calls.read_text(encoding="utf-8").splitlines():
        rows.append(json.loads(line) | {"seconds": 0.0, "time": "2026-01-01T00:00:00+00:00"})
    rows.sort(key=lambda row: row["key"])
    text = ""
    for row in rows:
        text += json.dumps(row, ensure_ascii=False) + "\n"
    RECORDED.write_bytes(gzip.compress(text.encode(), mtime=0))


def road(output: str, url: str = "http://127.0.0.1:9/v1", calls: str | None = None) -> list[str]:
    """The recipe's commands for these documents.

    Args:
        output: The folder of the run.
        url: The teacher's server; by default a port on which nobody answers, as recorded calls need none.
        calls: The file of recorded calls, if there is no server.
    """
    settings = {
        "output_dir": output,
        "documents": [str(DOCUMENTS)],
        "llm": f"openai:tarnbeck-teacher@{url}",
        "calls": calls,
    }
    config = load_config(OwnDocumentsConfig, HOME.parent / "recipes/configs/example_documents.yaml", settings)
    return [step.command for step in own_documents_steps(config)]


if __name__ == "__main__":
    {"documents": write_documents, "record": record}[sys.argv[1]]()
