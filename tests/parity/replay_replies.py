"""Read the recorded replies of ledgers with two versions of the parsers, and print the readings that differ.

    python tests/parity/replay_replies.py OLD_TREE LEDGER.jsonl ...

`OLD_TREE` is a checkout of another commit (`git worktree add OLD_TREE COMMIT`), which is only read; the ledgers are
exports of `tripletune ledger export`. No model is called: the state that a reply is read with (open clues, listed
labels, the passage) is taken from its prompt. Both versions read the same replies in a process of their own.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

UNREADABLE = "unreadable"
_CLUE = re.compile(r"^\[(\d+)\] ([^|\n]+) \| ([^|\n]+) \| ([^|\n]+)$", re.MULTILINE)
Reader = Callable[[str, str], Any]


def main(old_tree: str, ledgers: list[str]) -> None:
    """Compare the readings of two trees, and print each one that changed and the counts by role."""
    old = readings_of(old_tree, ledgers)
    new = readings_of(str(Path(__file__).parents[2]), ledgers)
    replies: Counter[str] = Counter()
    changed: Counter[str] = Counter()
    for row, other in zip(old, new):
        replies[row["role"]] += 1
        if row["reading"] != other["reading"]:
            changed[row["role"]] += 1
            print(f"\n## {row['role']} in {row['ledger']}\nasked: {row['asked']}\nreply: {row['reply']}")
            print(f"was:   {json.dumps(row['reading'], ensure_ascii=False)}")
            print(f"now:   {json.dumps(other['reading'], ensure_ascii=False)}")
    print("\n| role | replies | readings that changed |\n|---|---|---|")
    for role, count in sorted(replies.items()):
        print(f"| {role} | {count} | {changed[role]} |")


def readings_of(tree: str, ledgers: list[str]) -> list[dict[str, Any]]:
    """The readings of all distinct replies by the parsers of a tree."""
    command = [sys.executable, __file__, "--read", *map(os.path.abspath, ledgers)]
    output = subprocess.run(
        command,
        cwd=tree,
        env=os.environ | {"PYTHONPATH": tree, "PYTHONDONTWRITEBYTECODE": "1"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [json.loads(line) for line in output.splitlines()]


def print_readings(ledgers: list[str]) -> None:
    """Print a line of JSON per role and distinct reply, read by the tree on the path."""
    read_before: set[tuple[str, str, str]] = set()
    for ledger in ledgers:
        for line in Path(ledger).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            asked = row["messages"][-1]["content"]
            for role in dict.fromkeys(role for role, _ in row["uses"]):
                key = (role, asked, row["text"])
                if key not in read_before:
                    read_before.add(key)
                    reading = read(role, asked, row["text"])
                    print(json.dumps({
                        "role": role, "ledger": Path(ledger).stem, "asked": asked[-200:], "reply": row["text"],
                        "reading": reading,
                    }))  # fmt: skip


def read(role: str, asked: str, reply: str) -> Any:
    """What the parsers of the tree on the path make of a reply."""
    reader = READERS.get(role.removesuffix(".repair"), _answer)
    try:
        return reader(asked, reply)
    except ValueError as error:
        if type(error).__name__ != "UnusableReply":
            raise
        return UNREADABLE


def _module(*names: str) -> Any:
    """The first of several modules that the tree on the path has."""
    for name in names:
        try:
            return import_module(f"tripletune.{name}")
        except ModuleNotFoundError:
            pass
    raise ModuleNotFoundError(f"none of {', '.join(names)}")


def _function(module: Any, *names: str) -> Callable[..., Any]:
    """The first of several functions that a module has."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def _answer(asked: str, reply: str) -> Any:
    """The answer in a reply."""
    return _module("rag.chat_generator").bare_answer(reply)


def _plan(asked: str, reply: str) -> Any:
    """The action and sub-query of a planner's reply."""
    try:
        plan = _module("llm.reading.plans").read_plan(reply)
    except ModuleNotFoundError:  # before chat models' plans had a reader of their own
        chat = _module("rag.chat_generator")
        plan = _module("models.data.rendering").parse_plan(chat._LABEL.sub("", chat._own(reply)).strip())
    return [plan.action.value, plan.subquery] if plan.action else UNREADABLE


def _decomposition(asked: str, reply: str) -> Any:
    """The clues in T2RAG's first reply, as texts."""
    t2rag = _module("rag.systems.t2rag")
    arguments = [reply]
    if "question" in inspect.signature(t2rag.first_clues).parameters:
        arguments.append(asked.removeprefix("Question: "))
    return list(map(str, t2rag.first_clues(*arguments)))


def _resolution(asked: str, reply: str) -> Any:
    """The clues after T2RAG's reply, beginning with those that the prompt shows."""
    t2rag = _module("rag.systems.t2rag")
    shown = asked.partition("\n\nPropositions:\n")[0]
    clues = [t2rag.Clue(int(number), fields) for number, *fields in _CLUE.findall(shown)]
    clues.sort(key=lambda clue: clue.number)
    if hasattr(t2rag, "field_rows"):
        rows, _ = t2rag.field_rows(reply)
    else:
        rows = t2rag.triple_rows(reply)
    _function(t2rag, "fill_clues", "update")(clues, rows)
    return list(map(str, clues))


def _facts(asked: str, reply: str) -> Any:
    """The new facts in GEAR's reply."""
    gear = _module("rag.systems.gear")
    found = _function(gear, "read_facts", "find_triples")(reply)
    return [triple.as_list() for triple in found.triples]


def _verdict(asked: str, reply: str) -> Any:
    """Whether GEAR takes the facts as enough."""
    verdict = _function(_module("rag.systems.gear"), "answerable_verdict", "_read_verdict")(reply)
    if isinstance(verdict, re.Match):
        return verdict[1].lower() == "yes"
    return verdict.is_answerable


def _question(asked: str, reply: str) -> Any:
    """GEAR's next question."""
    return _function(_module("rag.systems.gear"), "next_question", "read_query")(reply)


def _thought(asked: str, reply: str) -> Any:
    """The query, answer and text of a thought of IRCoT."""
    read = _function(_module("rag.systems.ircot"), "_read_thought", "_read")
    move = read(_module("llm.reply_json", "models.llm.replies").without_thoughts(reply))
    return [move.query, move.answer, move.text]


def _labels(asked: str, reply: str) -> Any:
    """The listed labels that TH-RAG chooses; all names of a repair turn, which has no list."""
    listed = re.findall(r"^- (.+)$", asked, re.MULTILINE)
    thrag = _module("rag.systems.thrag")
    if hasattr(thrag, "read_labels"):
        names = thrag.read_labels(reply, listed or [""], "")
    else:
        names = thrag._read_labels(reply)
    if not listed:  # a repair turn, whose list stands in an earlier turn
        return names
    label_of = {thrag.entity_key(label): label for label in listed}
    chosen = [label_of[thrag.entity_key(name)] for name in names if thrag.entity_key(name) in label_of]
    return list(dict.fromkeys(chosen))


def _statements(asked: str, reply: str) -> Any:
    """The triples and sentences in TH-RAG's reply."""
    passages = _module("core.data.passages", "models.data.passages", "models.data")
    title, _, text = asked.removeprefix("Title: ").partition("\nText: ")
    building = _module("rag.systems.thrag.building", "rag.systems.thrag")
    statements = building.read_statements(reply, passages.Passage(title, text), 0, Counter())
    return [[*statement.triple.as_list(), statement.sentence] for statement in statements]


READERS: dict[str, Reader] = {
    "ras.plan": _plan,
    "t2rag.decompose": _decomposition,
    "t2rag.resolve": _resolution,
    "gear.read": _facts,
    "gear.reason": _verdict,
    "gear.rewrite": _question,
    "ircot.think": _thought,
    "thrag.topics": _labels,
    "thrag.subtopics": _labels,
    "thrag.extract": _statements,
}

if __name__ == "__main__":
    if sys.argv[1] == "--read":
        print_readings(sys.argv[2:])
    else:
        main(sys.argv[1], sys.argv[2:])
