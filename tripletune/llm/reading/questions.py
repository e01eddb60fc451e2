"""Read the next question to search (GEAR)."""

from __future__ import annotations

import re

from tripletune.llm.reading.lines import COMMENT_LABELS, QUESTION_LABELS, lines_of, unquoted, without_emphasis
from tripletune.llm.refusals import asks_nothing
from tripletune.llm.reply_json import json_values

_INTRODUCTION = re.compile(
    r"(?:sure|okay|ok|certainly|of course|here(?:'s| is| are)|the (?:next|following|rewritten|new)|based on|to find"
    r"|i (?:will|would)|let me|let us|let's|we (?:still )?need)\b[^?]*",
    re.IGNORECASE,
)


# The introduction may stand on the question's line: "My next question would be: x", 'I would search for "x?"'.
_ANNOUNCES = re.compile(r"[^?:]{0,60}\b(?:question|query|search|ask)\b[^?:]{0,20}[:：]\s*(?=\S)", re.IGNORECASE)
_ASKS_IN_QUOTES = re.compile(
    r"(?:i|let|we|search|next)\b[^?\"“]{0,60}(?:search|ask|query|question|look)[^?\"“]{0,20}[\"“]([^\"”]+\?)[\"”]\W*",
    re.IGNORECASE,
)


def next_question(reply: str) -> str:
    """Read the question of a reply: the line labelled so, else the first line that asks, else the first line.

    Introductions ("Here is the question to search for.") and quotation marks are no part of it; "" for an empty reply.
    """
    for value in json_values(reply, dict):
        named = [str(field) for name, field in value.items() if str(name).lower() in QUESTION_LABELS and field]
        if named:
            return " ".join(named[0].split())
    lines = [line for line in lines_of(reply) if line.label not in COMMENT_LABELS]
    labelled = [line.text for line in lines if line.label in QUESTION_LABELS and line.text]
    if labelled:
        return unquoted(labelled[0])
    texts = [line.text for line in lines if line.text and not line.text.endswith(":")]
    own = [text for text in texts if not _INTRODUCTION.fullmatch(text)] or texts
    if not own:
        return ""
    quoted = _ASKS_IN_QUOTES.fullmatch(own[0])
    if quoted:
        return quoted[1]
    if asks_nothing(own[0]):
        return own[0]
    announced = _ANNOUNCES.match(own[0])
    question = own[0][announced.end() :] if announced else own[0]
    return unquoted(without_emphasis(question))
