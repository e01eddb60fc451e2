"""From a reply's text to what a caller needs: one repair turn for a reply that can't be used, and JSON inside prose.

A repair is a chat with the bad reply and what is wrong with it. It is a call of its own in the ledger, under the role
with `.repair` at its end, so that its cost shows.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tripletune.models.llm.client import LLMClient, Message, Sampling

T = TypeVar("T")
PROMPTS = Path(__file__).parent / "prompts"
REPAIR_ROLE = ".repair"
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n`]*\n(.*?)(?:^[ \t]*\1|\Z)", re.MULTILINE | re.DOTALL)
_KINDS: dict[type[Any], tuple[str, str]] = {dict: ("object", "{"), list: ("array", "[")}
_BRACKET = re.compile(r"[\[{]")
# Where a chat template writes the opening tag, the reply has the closing one alone.
_THOUGHT = re.compile(r"\A(?:(?!<think).)*?</think(?:ing)?>|<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.DOTALL)


class UnusableReply(ValueError):
    """A reply that a parser turned down.

    Args:
        reason: A short name to count by, for example "index_out_of_range".
        explanation: What is wrong, in a sentence for the model that wrote it.

    Attributes:
        repairs: Repair turns that were tried.
    """

    def __init__(self, reason: str, explanation: str) -> None:
        super().__init__(f"{reason}: {explanation}")
        self.reason, self.explanation = reason, explanation
        self.repairs = 0


async def ask(
    client: LLMClient,
    messages: Sequence[Message],
    parse: Callable[[str], T],
    *,
    role: str,
    sampling: Sampling | None = None,
    question_id: str = "",
    repairs: int = 1,
    repaired: Counter[str] | None = None,
) -> T:
    """Ask a model and parse its reply; a reply that can't be used is sent back with what is wrong.

    Args:
        client: The model.
        messages: The chat.
        parse: Turns the reply's text into a value, or raises `UnusableReply`.
        role: As in `LLMClient.chat`.
        sampling: As in `LLMClient.chat`.
        question_id: As in `LLMClient.chat`.
        repairs: Most repair turns.
        repaired: Counts the reasons of replies for which a repair turn was needed, whether it helped or not.

    Returns:
        What `parse` made of the first reply it took.

    Raises:
        UnusableReply: no reply could be used; that of the last one, with the repairs tried in `repairs`.
        CallError: as in `LLMClient.chat`.
        RepliesPending: as in `LLMClient.chat`.
    """
    if repairs < 0:
        raise ValueError(f"repairs {repairs}: it must be 0 or more")
    turns, tried = list(messages), 0
    while True:
        name = role + REPAIR_ROLE if tried else role
        completion = await client.chat(turns, role=name, sampling=sampling, question_id=question_id)
        try:
            return parse(completion.text)
        except UnusableReply as error:
            error.repairs = tried
            if tried == repairs:
                raise
            if repaired is not None:
                repaired[error.reason] += 1
            turns = repair_turns(turns, completion.text, error.explanation)
            tried += 1


def repair_turns(messages: Sequence[Message], reply: str, explanation: str) -> list[Message]:
    """The chat that asks for a better reply.

    Args:
        messages: The chat so far; its last turn is the user's.
        reply: The reply that can't be used.
        explanation: What is wrong with it.
    """
    request = _repair_prompt().replace("{explanation}", explanation)
    if reply.strip():
        return [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": request}]
    # No service takes an empty turn, and not every chat template two user turns in a row.
    last = messages[-1]
    return [*messages[:-1], {"role": last["role"], "content": f"{last['content']}\n\n{request}"}]


def without_thoughts(text: str) -> str:
    """A reply without what stands between `<think>` tags, or before a closing tag that was never opened."""
    return _THOUGHT.sub("", text)


def find_json(text: str, *kinds: type[Any]) -> Any:
    """The JSON object or array of a reply that may have code fences and prose around it.

    A value inside another does not count: in `[{"a": 1}]` there is an array and no object. Where several values are
    of the right kind, one in a code fence goes before one outside, and a later one before an earlier: models think
    first and answer last. Text between `<think>` tags is passed over.

    Args:
        text: The reply.
        kinds: `dict`, `list` or both; nothing means both.

    Returns:
        The parsed value.

    Raises:
        UnusableReply: there is none ("no_json"), or it is cut off or malformed ("bad_json").
    """
    wanted = kinds or (dict, list)
    text = without_thoughts(text)
    parts = [match.group(2) for match in _FENCE.finditer(text)]
    for part in (*reversed(parts), text):
        found = [value for value in _values(part) if isinstance(value, wanted)]
        if found:
            return found[-1]
    name = " or ".join(_KINDS[kind][0] for kind in wanted)
    if any(_KINDS[kind][1] in text for kind in wanted):
        raise UnusableReply("bad_json", f"the JSON {name} in it is cut off or malformed.")
    raise UnusableReply("no_json", f"there is no JSON {name} in it.")


def json_values(text: str, *kinds: type[Any]) -> list[Any]:
    """All JSON objects and arrays of a text that do not stand inside another, from left to right.

    Args:
        text: Any text; what stands between them is passed over.
        kinds: `dict`, `list` or both; nothing means both.
    """
    return [value for value in _values(text) if isinstance(value, kinds or (dict, list))]


def _values(text: str) -> list[Any]:
    """The outermost objects and arrays of a text, from left to right."""
    # Not strict: models put raw line breaks into strings.
    decoder = json.JSONDecoder(parse_constant=_no_constant, strict=False)
    found, position = [], 0
    while bracket := _BRACKET.search(text, position):
        start = bracket.start()
        try:
            value, position = decoder.raw_decode(text, start)
            found.append(value)
        except RecursionError:
            # A thousand brackets in a row are a model that loops; trying each of them takes long.
            break
        except ValueError:
            position = start + 1
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def repair_digest() -> dict[str, str]:
    """SHA-256 of the prompt of a repair turn, by its file, for cards of what was made with it."""
    return {"models/llm/prompts/repair.md": hashlib.sha256(_repair_prompt().encode()).hexdigest()}


@lru_cache(maxsize=1)
def _repair_prompt() -> str:
    return (PROMPTS / "repair.md").read_text(encoding="utf-8").strip()
