"""Replies to the prompts of `LLMTeacher`, from recorded teacher replies; some are wrong at first."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cli import read_lines, write_lines
from tests.fakes import Asked, Client
from tripletune.core.data.contexts import find_passage, title_key
from tripletune.core.data.passages import Passage
from tripletune.data_builders.subq.teacher import FILTER_ROLE, QUERY_ROLE, TRIPLES_ROLE, load_subq_prompts
from tripletune.data_builders.world.build import WorldOptions, generate_world
from tripletune.llm.replies import REPAIR_ROLE

_NUMBERED = re.compile(r"^\[(\d+)\] (.*)$", re.MULTILINE)
_DOCUMENT = re.compile(r"^Document: (.*)$", re.MULTILINE)


class WorldTeacher:
    """Writes `questions.jsonl` and `teacher.jsonl` of a world into a folder, and replies as recorded there.

    A share `wrong` of the calls has a wrong first reply; which ones hangs on the prompt alone.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        world = generate_world(WorldOptions(validation=0, test=0, common_knowledge=0.0, **options), "train")
        teacher = {row["_id"]: row for row in world.teacher_rows()}
        write_lines(folder / "questions.jsonl", world.question_rows())
        write_lines(folder / "teacher.jsonl", teacher.values())
        self.wrong = 0.0
        self.rows = {" ".join(row["question"].split()): teacher[row["_id"]] for row in world.question_rows()}
        self.triples = {title: facts for row in teacher.values() for title, facts in row["triples"].items()}

    def reply(self, body: dict[str, Any]) -> str:
        """The reply to a request of the OpenAI layout."""
        contents = [message["content"] for message in body["messages"]]
        roles = dict(zip(load_subq_prompts().texts.values(), (FILTER_ROLE, QUERY_ROLE, TRIPLES_ROLE)))
        role, first = roles[contents[0]], contents[1].split("\n", 1)[0]
        row = {"triples": self.triples} if role == TRIPLES_ROLE else self.rows[first.split(": ", 1)[1]]
        right = recorded_reply(row, role, contents)
        chance = random.Random(contents[1])
        if "Your last reply can't be used" in contents[-1] or chance.random() >= self.wrong:
            return right
        return chance.choice([right[: len(right) // 2], wrong(role), "I am not sure."])


def wrong(role: str) -> str:
    """A reply of the right form that the checks turn down."""
    if role == FILTER_ROLE:
        return json.dumps({"documents": [17], "answerable": True})
    if role == QUERY_ROLE:
        return json.dumps({"question": "Who is it? And where?"})
    return json.dumps({"triples": []})


def recorded_client(path: str | Path) -> Client:
    """An `LLMClient` over recorded replies: the path of a teacher LLM without a model."""
    rows = {row["_id"]: row for row in read_lines(path)}

    def answer(asked: Asked) -> str:
        contents = [message["content"] for message in asked.messages]
        return recorded_reply(rows.get(asked.question_id, {}), asked.role, contents)

    return Client(answer=answer)


def recorded_reply(row: dict[str, Any], role: str, contents: Sequence[str]) -> str:
    """The reply to one prompt that a recorded row stands for; what is not recorded is an empty reply."""
    prompt, role = contents[1], role.removesuffix(REPAIR_ROLE)
    if role == FILTER_ROLE:
        shown = [title for _, title in _NUMBERED.findall(prompt)]
        passages = [Passage(title, "x") for title in shown]
        # 0 stands for a title that is not shown: there is no such document.
        found = [find_passage(" ".join(title.split()), passages) for title in row.get("helpful", [])]
        numbers = [0 if place is None else place + 1 for place in found]
        return json.dumps({"documents": list(dict.fromkeys(numbers)), "answerable": True})
    document = _DOCUMENT.search(prompt)
    title = document.group(1) if document else ""
    if role == QUERY_ROLE:
        asked = {entry["title"]: entry["question"] for entry in row.get("subqueries", [])}
        return json.dumps({"question": _of(asked, title) or ""}, ensure_ascii=False)
    return json.dumps({"triples": _of(row.get("triples", {}), title) or []}, ensure_ascii=False)


def _of(values: dict[str, Any], title: str) -> Any:
    """The value of a title: under the title itself, else under one that `title_key` takes for the same; else None."""
    exact = [value for other, value in values.items() if " ".join(other.split()) == title]
    alike = [value for other, value in values.items() if title_key(other) == title_key(title)]
    return (exact or alike or [None])[0]
