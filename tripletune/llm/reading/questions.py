"""Read the next question to search (GEAR)."""

from __future__ import annotations

import re

from tripletune.llm.reading.lines import COMMENT_LABELS, QUESTION_LABELS, lines_of, unquoted

_INTRODUCTION = re.compile(
    r"(?:sure|okay|ok|certainly|of course|here(?:'s| is| are)|the (?:next|following|rewritten|new)|based on|to find"
    r"|i (?:will|would)|let me|let us|let's|we (?:still )?need)\b[^?]*",
    re.IGNORECASE,
)


def next_question(reply: str) -> str:
    """Read the question of a reply: the line labelled so, else the first line that asks, else the first line.

    Introductions ("Here is the question to search for.") and quotation marks are no part of it; "" for an empty reply.
    """
    lines = [line for line in lines_of(reply) if line.label not in COMMENT_LABELS]
    labelled = [line.text for line in lines if line.label in QUESTION_LABELS and line.text]
    if labelled:
        return unquoted(labelled[0])
    texts = [line.text for line in lines if line.text and not line.text.endswith(":")]
    own = [text for text in texts if not _INTRODUCTION.fullmatch(text)] or texts
    if not own:
        return ""
    return unquoted(own[0])
