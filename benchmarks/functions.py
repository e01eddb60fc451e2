"""How many functions of this project things pass on their way; fewer are easier to follow.

Counted are distinct functions of files in this repository, outside tests/ and benchmarks/, when all imports are done.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType

from benchmarks import ENCODER, MODEL, Options, Result, quiet
from benchmarks.training import RAS, one_pass, open_task, records
from tripletune.data_builders.world.build import WorldOptions, write_world

ROOT = Path(__file__).resolve().parents[1]
ROOMS = tuple(f"{ROOT}/{room}/" for room in ("models", "rag", "data_builders", "eval", "train", "recipes"))
# Where a question's loop begins, and where its result is written.
_LOOP, _WRITTEN = "rag/systems/ras.py:ras", "eval/results.py:ResultLog.append"


def functions(options: Options) -> Result:
    """Distinct project functions: a record from file to loss, a teacher call to the ledger, a RAS question.

    A record: reading, tokenising, batch, loss. A call: from `LLMTeacher.triples` to its checked reply, against a
    server on this machine. A question: `tripletune eval run --system ras` from where its loop begins until its result
    is written. The JSON names them all.
    """
    quiet()
    with tempfile.TemporaryDirectory() as scratch:
        record = _record(options, scratch)
        call = _call(scratch)
        before, question = _question(options, scratch)
    # A question's goal leaves out what generates its replies and loads the model.
    ways = {
        "a record from file to loss": (record, 40, False),
        "a teacher call from builder to ledger": (call, 35, False),
        "a RAS question, without models/": (question, 33, True),
        "what happens before its loop, without models/": (before, 60, True),
    }
    rows = []
    for name, (calls, goal, without) in ways.items():
        found = dict.fromkeys(calls)
        own = [one for one in found if not (without and one.startswith("models/"))]
        files = len({one.partition(":")[0] for one in own})
        rows.append({"name": name, "functions": len(own), "files": files, "at_most": goal, "with_models": len(found)})
    names = {name: list(dict.fromkeys(calls)) for name, (calls, _, _) in ways.items()}
    return Result("distinct project functions", "name functions files at_most with_models", rows, [], {"names": names})


@contextmanager
def _counted(names: list[str]) -> Iterator[None]:
    """Adds the name of each project function to `names` when it is called, in all threads."""

    def called(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        path = code.co_filename.replace(f"{ROOT}/tripletune/", f"{ROOT}/")
        # Neither comprehensions nor bodies of classes and modules.
        named = not code.co_name.startswith("<") and code.co_flags & inspect.CO_OPTIMIZED
        if event == "call" and named and path.startswith(ROOMS):
            names.append(f"{path.removeprefix(f'{ROOT}/')}:{code.co_qualname}")

    threading.setprofile(called)
    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _record(options: Options, scratch: str) -> list[str]:
    settings = one_pass(scratch, options.seed, 2) | {
        "model.base": MODEL, "model.encoder": ENCODER, "data.max_train_records": 4,
        "data.train": records(options.seed, 8, scratch),
    }  # fmt: skip
    # The first time imports what the second one needs.
    for names in ([], []):
        task = open_task("ras", RAS, settings)
        shutil.rmtree(f"{scratch}/run")
        with _counted(names):
            rows = task.rows(task.sources[0], task.cache)
            batch = task.collator()([rows[0]])
            task.model(**batch)
    return names


def _call(scratch: str) -> list[str]:
    from tripletune.data_builders.hotpotqa_subq import Question
    from tripletune.data_builders.hotpotqa_subq.teacher import LLMTeacher
    from tripletune.models.data.records import Passage
    from tripletune.models.llm.backends import LLMOptions, open_client

    async def ask(url: str) -> list[str]:
        async with open_client(LLMOptions(model="fixed", url=url, ledger=f"{scratch}/calls.sqlite")) as client:
            teacher = LLMTeacher(client)
            # The first call imports what the second one needs.
            for name, names in (("Ada", []), ("Ben", [])):
                passage = Passage(name, f"{name} lives in London.", "")
                question = Question(name, "Where?", ("London",), (passage,), (0,), "bridge", "made")
                with _counted(names):
                    await teacher.triples(question, 0)
            return names

    with ThreadingHTTPServer(("127.0.0.1", 0), _FixedReply) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            return asyncio.run(ask(f"http://127.0.0.1:{server.server_port}/v1"))
        finally:
            server.shutdown()


class _FixedReply(BaseHTTPRequestHandler):
    """A server that gives every chat the same reply."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": '{"triples": [["Ben", "lives in", "London"]]}'}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        reply = {"id": "fixed", "object": "chat.completion", "created": 1, "model": "fixed", "choices": [choice]}
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _question(options: Options, scratch: str) -> tuple[list[str], list[str]]:
    from tripletune.eval.__main__ import main

    exam = f"{scratch}/exam"
    write_world(WorldOptions(options.seed, 8, 0, 1, common_knowledge=0, one_hop=0), exam)
    for name, names in (("first", []), ("second", [])):
        with redirect_stdout(sys.stderr), _counted(names):
            main([
                "run", "--system", "ras", "--task", "hotpotqa", "--data", f"{exam}/test.jsonl", "--corpus",
                f"{exam}/test.corpus.jsonl", "--triples", f"{exam}/test.triples.jsonl", "--index", f"{scratch}/index",
                "--model", MODEL, "--untrained", "--max-plan-tokens", "8", "--max-answer-tokens", "8",
                "--max-rounds", "2", "--output", f"{scratch}/{name}",
            ])  # fmt: skip
    begin = names.index(_LOOP)
    return names[:begin], names[begin : names.index(_WRITTEN, begin) + 1]
