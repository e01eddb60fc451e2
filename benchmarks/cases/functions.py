"""How many functions of this project things pass on their way; fewer are easier to follow.

Counted are distinct functions of files in this repository, outside tests/ and benchmarks/, when all imports are done.
"""

from __future__ import annotations

import asyncio
import inspect
import shutil
import sys
import tempfile
import threading
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from benchmarks.cases.llm import _fixed_server
from benchmarks.cases.training import _CONFIGS, _pass_settings, _task, _tripletune
from benchmarks.harness import ENCODER, MODEL, Options, Result, quiet
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.models.options import setting

ROOT = Path(__file__).resolve().parents[2]
ROOMS = tuple(f"{ROOT}/{room}/" for room in ("models", "rag", "data_builders", "eval", "train", "recipes"))
LINKS = f"{ROOT}/tripletune/"
# Where a question's loop begins, and where its result is written.
_LOOP, _WRITTEN = "rag/systems/ras.py:_run", "eval/results.py:ResultLog.append"


@dataclass(frozen=True)
class FunctionsOptions(Options):
    """Options of `functions`."""

    model: str = setting(MODEL, "language model: hub id, folder or pypi:package")
    encoder: str = setting(ENCODER, "sentence encoder")


def functions(options: FunctionsOptions) -> Result:
    """Distinct project functions: a record from file to loss, a teacher call to the ledger, a RAS question.

    A record: reading, tokenising, batch, loss. A call: from `LLMTeacher.triples` to its checked reply, against a
    server on this machine. A question: `tripletune eval run --system ras` from where its loop begins until its result
    is written. The JSON names them all.
    """
    quiet()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        write_world(WorldOptions(options.seed, 8, 0, 1, common_knowledge=0, one_hop=0), scratch / "world")
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
    rows, names = [], {}
    for name, (found, goal, without) in ways.items():
        own = [one for one in found if not (without and one.startswith("models/"))]
        files = len({one.partition(":")[0] for one in own})
        rows.append({"name": name, "functions": len(own), "with_models": len(found), "files": files, "goal": goal})
        names[name] = found
    columns = {
        "way": ("name", "{}"), "functions": ("functions", "{}"), "files": ("files", "{}"),
        "at most": ("goal", "{}"), "with models/": ("with_models", "{}"),
    }  # fmt: skip
    return Result("distinct project functions", columns, rows, [], {"names": names})


class _Calls:
    """Names of the project functions that are called in a `with` block, in all threads.

    Args:
        begin: The function whose first call begins the second section.
        end: The function whose first return ends it.

    Attributes:
        sections: Names in the order of first calls: before `begin`, from there to `end`, after it.
    """

    def __init__(self, begin: str = "", end: str = "") -> None:
        self._marks = [("call", begin), ("return", end)]
        self.sections: list[dict[str, None]] = [{}]

    def __enter__(self) -> _Calls:
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        path = code.co_filename.replace(LINKS, f"{ROOT}/")
        # Neither comprehensions nor bodies of classes and modules.
        if code.co_name.startswith("<") or not code.co_flags & inspect.CO_OPTIMIZED or not path.startswith(ROOMS):
            return
        name = f"{path.removeprefix(f'{ROOT}/')}:{code.co_qualname}"
        section = len(self.sections) - 1
        reached = section < 2 and self._marks[section] == (event, name)
        if reached and event == "call":
            self.sections.append({})
        if event == "call":
            self.sections[-1].setdefault(name)
        if reached and event == "return":
            self.sections.append({})


def _record(options: FunctionsOptions, scratch: Path) -> list[str]:
    from tripletune.train.run import make_rows

    world = f"{scratch}/world/train"
    _tripletune("build", "subq", "--source", f"hotpotqa:{world}.jsonl:{world}.teacher.jsonl", "--split-name", "train",
                "--output", scratch / "records")  # fmt: skip
    settings = _pass_settings(scratch, options.seed, 2) | {
        "model.base": options.model, "model.encoder": options.encoder, "data.train": str(scratch / "records"),
        "data.max_train_records": 4,
    }  # fmt: skip
    # The first time imports what the second one needs.
    for number in range(2):
        task = _task(
            "ras", _CONFIGS / "smollm2_135m_ras_cpu.yaml", {**settings, "output_dir": f"{scratch}/run{number}"}
        )
        shutil.rmtree(f"{scratch}/run{number}", ignore_errors=True)
        calls = _Calls()
        with calls if number else nullcontext():
            make_rows(task)
            batch = task.collator()([task.train[0]])
            task.model(**batch)
    return list(calls.sections[0])


def _call(scratch: Path) -> list[str]:
    from tripletune.data_builders.hotpotqa_subq.questions import Question
    from tripletune.data_builders.hotpotqa_subq.teacher import LLMTeacher
    from tripletune.models.data.records import Passage
    from tripletune.models.llm.options import LLMOptions, open_client

    async def ask(url: str) -> list[str]:
        options = LLMOptions(model="fixed", url=url, ledger=str(scratch / "calls.sqlite"))
        async with open_client(options) as client:
            teacher = LLMTeacher(client)
            # The first call imports what the second one needs.
            for name in ("Ada", "Ben"):
                passage = Passage(name, f"{name} lives in London.", "")
                question = Question(name, "Where?", ("London",), (passage,), (0,), "bridge", "made")
                calls = _Calls()
                with calls if name == "Ben" else nullcontext():
                    await teacher.triples(question, 0)
            return list(calls.sections[0])

    with _fixed_server(0.01, '{"triples": [["Ben", "lives in", "London"]]}') as url:
        return asyncio.run(ask(url))


def _question(options: FunctionsOptions, scratch: Path) -> tuple[list[str], list[str]]:
    from tripletune.eval.__main__ import main

    test = f"{scratch}/world/test"
    for number in range(2):
        calls = _Calls(_LOOP, _WRITTEN)
        with redirect_stdout(sys.stderr), calls if number else nullcontext():
            main([
                "run", "--system", "ras", "--task", "hotpotqa", "--data", f"{test}.jsonl", "--corpus",
                f"{test}.corpus.jsonl", "--triples", f"{test}.triples.jsonl", "--index", f"{scratch}/index",
                "--model", options.model, "--untrained", "--max-plan-tokens", "8", "--max-answer-tokens", "8",
                "--max-rounds", "2",                 "--output", f"{scratch}/eval{number}",
            ])  # fmt: skip
    before, question, _ = calls.sections
    return list(before), list(question)
