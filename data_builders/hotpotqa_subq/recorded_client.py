"""The `annotations` client: answers the prompts of `LLMTeacher` from a file of recorded teacher replies.

With it the whole path of a teacher LLM runs without any model: prompts, checks, repairs and labelling. The records it
gives are those of `RecordedTeacher` on the same file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tripletune.data_builders.datasets.lookup import JsonlIndex
from tripletune.data_builders.hotpotqa_subq.annotations import RecordedTeacher
from tripletune.data_builders.hotpotqa_subq.questions import Question
from tripletune.data_builders.hotpotqa_subq.teacher import FILTER_ROLE, QUERY_ROLE, TRIPLES_ROLE
from tripletune.data_builders.readers._rows import title_key
from tripletune.models.llm.client import CallError, Message, Sampling
from tripletune.models.llm.replies import REPAIR_ROLE
from tripletune.models.local.generation import Completion

_NUMBERED = re.compile(r"^\[(\d+)\] (.*)$", re.MULTILINE)
_DOCUMENT = re.compile(r"^Document: (.*)$", re.MULTILINE)


class RecordedClient:
    """An `LLMClient` over recorded replies; questions are found by id, documents by the title in the prompt.

    What is not recorded is answered as a teacher would answer it: no documents, an empty question, no triples. So it
    is checked, sent back and left out like any other reply.

    Args:
        path: As for `RecordedTeacher`.

    Attributes:
        model: "annotations:" and the file's name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is malformed, or two lines annotate the same question.
    """

    def __init__(self, path: str | Path) -> None:
        self.model = f"annotations:{Path(path).name}"
        # It checks every line.
        self._teacher = RecordedTeacher(path)
        self._index = JsonlIndex(path, lambda _, row: [str(row.get("_id", row.get("id")))])

    async def chat(
        self, messages: Sequence[Message], *, role: str, sampling: Sampling | None = None, question_id: str = ""
    ) -> Completion:
        """Reply to a prompt of `LLMTeacher`.

        Raises:
            CallError: the role is none of a teacher's.
        """
        found = self._index.get(question_id)
        row: dict[str, Any] = found[1] if found else {}
        return Completion(recorded_reply(row, role, [message["content"] for message in messages]))

    def answers_directly(self, question: Question) -> bool:
        """Whether the recorded row has `"direct": true`."""
        return self._teacher.answers_directly(question)

    async def close(self) -> None:
        """Nothing is held open."""


def recorded_reply(row: dict[str, Any], role: str, contents: Sequence[str]) -> str:
    """The reply to one prompt that a recorded row stands for.

    Args:
        row: A line of the file of recorded replies; empty when there is none for the question.
        role: One of `data_builders.llm_teacher.ROLES`.
        contents: The texts of the chat. In a repair turn the first user's text counts.

    Raises:
        CallError: the role is none of a teacher's.
    """
    prompt, role = contents[1] if len(contents) > 1 else contents[0], role.removesuffix(REPAIR_ROLE)
    if role == FILTER_ROLE:
        shown = [(int(number), title) for number, title in _NUMBERED.findall(prompt)]
        numbers = [_number(shown, title) for title in row.get("helpful", [])]
        # 0 stands for a title that is not shown: there is no such document.
        return json.dumps({"documents": list(dict.fromkeys(n or 0 for n in numbers)), "answerable": True})
    document = _DOCUMENT.search(prompt)
    title = document.group(1) if document else ""
    if role == QUERY_ROLE:
        asked = {entry["title"]: entry["question"] for entry in row.get("subqueries", [])}
        return json.dumps({"question": _of(asked, title) or ""}, ensure_ascii=False)
    if role == TRIPLES_ROLE:
        return json.dumps({"triples": _of(row.get("triples", {}), title) or []}, ensure_ascii=False)
    raise CallError(f"recorded replies hold none for calls of the role {role!r}")


def _number(shown: Sequence[tuple[int, str]], title: str) -> int | None:
    exact = [number for number, other in shown if other == " ".join(title.split())]
    alike = [number for number, other in shown if title_key(other) == title_key(title)]
    return next(iter([*exact, *alike]), None)


def _of(values: dict[str, Any], title: str) -> Any:
    exact = [value for other, value in values.items() if " ".join(other.split()) == title]
    alike = [value for other, value in values.items() if title_key(other) == title_key(title)]
    return (exact or alike or [None])[0]
