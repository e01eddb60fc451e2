"""Replies of a mock server to the prompts of `LLMTeacher`, from recorded teacher replies; some are wrong at first.

The server imports `reply`; SUBQ_TEACHER names the recorded replies, SUBQ_QUESTIONS the questions, SUBQ_WRONG the share
of calls whose first reply is wrong, SUBQ_BODIES a file for the request bodies. Which replies are wrong hangs on the
prompt alone.
"""

from __future__ import annotations

import functools
import json
import os
import random
from pathlib import Path
from typing import Any

from tripletune.data_builders.hotpotqa_subq.recorded_client import recorded_reply
from tripletune.data_builders.hotpotqa_subq.teacher import FILTER_ROLE, QUERY_ROLE, TRIPLES_ROLE, Prompts


def rows(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


@functools.cache
def recorded() -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Rows of the teacher by question text, and one row with the triples of every document."""
    teacher = {row["_id"]: row for row in rows(os.environ["SUBQ_TEACHER"])}
    triples = {title: facts for row in teacher.values() for title, facts in row["triples"].items()}
    questions = {" ".join(row["question"].split()): teacher[row["_id"]] for row in rows(os.environ["SUBQ_QUESTIONS"])}
    return questions, {"triples": triples}


def reply(body: dict[str, Any]) -> str:
    """The reply to a request of the OpenAI layout."""
    if "SUBQ_BODIES" in os.environ:
        with Path(os.environ["SUBQ_BODIES"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(body) + "\n")
    contents = [message["content"] for message in body["messages"]]
    prompts = Prompts.load()
    role = {prompts.filter: FILTER_ROLE, prompts.query: QUERY_ROLE, prompts.triples: TRIPLES_ROLE}[contents[0]]
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
