"""Replies of a mock server to the prompts of `LLMTeacher`, from recorded teacher replies; some are wrong at first.

The server imports `reply`; SUBQ_TEACHER names the recorded replies, SUBQ_QUESTIONS the questions, SUBQ_WRONG the share
of calls whose first reply is wrong. Which replies are wrong hangs on the prompt alone.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.data_builders.rows import read_lines
from tripletune.data_builders.hotpotqa_subq.teacher import FILTER_ROLE, QUERY_ROLE, TRIPLES_ROLE, load_subq_prompts
from tripletune.data_builders.readers._rows import find_passage, title_key
from tripletune.models.data.records import Passage
from tripletune.models.llm import Completion
from tripletune.models.llm.replies import REPAIR_ROLE

_NUMBERED = re.compile(r"^\[(\d+)\] (.*)$", re.MULTILINE)
_DOCUMENT = re.compile(r"^Document: (.*)$", re.MULTILINE)


@functools.cache
def recorded() -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Rows of the teacher by question text, and one row with the triples of every document."""
    teacher = {row["_id"]: row for row in read_lines(os.environ["SUBQ_TEACHER"])}
    triples = {title: facts for row in teacher.values() for title, facts in row["triples"].items()}
    questions = {
        " ".join(row["question"].split()): teacher[row["_id"]] for row in read_lines(os.environ["SUBQ_QUESTIONS"])
    }
    return questions, {"triples": triples}


def reply(body: dict[str, Any]) -> str:
    """The reply to a request of the OpenAI layout."""
    contents = [message["content"] for message in body["messages"]]
    roles = dict(zip(load_subq_prompts().texts.values(), (FILTER_ROLE, QUERY_ROLE, TRIPLES_ROLE)))
    role = roles[contents[0]]
    by_question, facts = recorded()
    first = contents[1].split("\n", 1)[0]
    row = facts if role == TRIPLES_ROLE else by_question[first.split(": ", 1)[1]]
    right = recorded_reply(row, role, contents)
    chance = random.Random(contents[1])
    if "Your last reply can't be used" in contents[-1] or chance.random() >= float(os.environ.get("SUBQ_WRONG", "0")):
        return right
    return chance.choice([right[: len(right) // 2], wrong(role), "I am not sure."])


def wrong(role: str) -> str:
    """A reply of the right form that the checks turn down."""
    if role == FILTER_ROLE:
        return json.dumps({"documents": [17], "answerable": True})
    if role == QUERY_ROLE:
        return json.dumps({"question": "Who is it? And where?"})
    return json.dumps({"triples": []})


class RecordedClient:
    """An `LLMClient` over recorded replies: the path of a teacher LLM without a model."""

    model = "recorded"

    def __init__(self, path: str | Path) -> None:
        self.rows = {row["_id"]: row for row in read_lines(path)}

    async def chat(self, messages: Any, *, role: str, sampling: Any = None, question_id: str = "") -> Completion:
        row = self.rows.get(question_id, {})
        return Completion(recorded_reply(row, role, [message["content"] for message in messages]))

    async def close(self) -> None:
        pass


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
    exact = [value for other, value in values.items() if " ".join(other.split()) == title]
    alike = [value for other, value in values.items() if title_key(other) == title_key(title)]
    return (exact or alike or [None])[0]
