"""Lines of a reply without their decoration: bullets, numbers, labels, bold type, code fences."""

from __future__ import annotations

import re
from typing import NamedTuple

from tripletune.llm.reply_json import without_thoughts

# Labels that models put before a line, by what follows them.
_REPLY_LABELS = ("reply", "response", "output", "result")
_PLAN_LABELS = ("plan", "action", "decision", "next action", "next step")
ANSWER_LABELS = ("answer", "final answer", "short answer", "the answer")
_THOUGHT_LABELS = ("thought", "next thought")
QUESTION_LABELS = (
    "question", "next question", "new question", "follow-up question", "query", "next query", "new query",
    "search query", "search", "sub-query", "subquery", "sub-question", "follow up", "follow-up", "follow up question",
)  # fmt: skip
_LIST_LABELS = (
    "triples", "triple", "clues", "clue", "facts", "fact", "new facts", "rows", "row", "topics", "subtopics",
)  # fmt: skip
_VERDICT_LABELS = ("answerable", "verdict")
# What follows these labels explains the reply and is not part of it.
COMMENT_LABELS = (
    "reasoning", "reason", "explanation", "note", "analysis", "rationale", "why", "comment", "because",
    "intermediate answer",
)  # fmt: skip
_LABELS = (
    *_REPLY_LABELS, *_PLAN_LABELS, *ANSWER_LABELS, *_THOUGHT_LABELS, *QUESTION_LABELS, *_LIST_LABELS,
    *_VERDICT_LABELS, *COMMENT_LABELS,
)  # fmt: skip

_FENCE = re.compile(r"^[ \t]*(?:`{3,}|~{3,})[\w-]*[ \t]*$")
_EMPHASIS = re.compile(r"(\*{2,3}|_{2,3}|`+)(?=\S)(.+?)(?<=\S)\1")
_WHOLE_EMPHASIS = re.compile(r"([*_])(?=[^\s*_])([^*_]+)(?<=\S)\1")
_BULLET = re.compile(r"(?:[•·‣▪◦●]\s*|[-*+–—>]\s+|#{1,6}\s+|\d{1,3}[.)]\s+)")
_NUMBER = re.compile(r"(?:\[(\d{1,3})\][ \t]*[:.)]?|\((\d{1,3})\)[ \t]*[:.]?|(\d{1,3}):(?=\s))[ \t]*")
_LABEL = re.compile(
    rf"({'|'.join(sorted(_LABELS, key=len, reverse=True))})(?: \d{{1,2}})?[ \t]*(?::|：|[ \t][-–—][ \t])[ \t]*",
    re.IGNORECASE,
)
# A period that may belong to its word: "U.S.", "J.", "Jr."; it need not end a sentence.
ABBREVIATION = re.compile(r"\b(?:\w|Jr|Sr|Inc|Ltd|Co|St|Mrs?|Ms|Dr|No|Vol|vs)\.\Z")
QUOTES = {'"': '"', "“": "”", "«": "»", "'": "'", "‘": "’", "„": "“"}


class Line(NamedTuple):
    """A line of a reply without its decoration.

    Attributes:
        text: What the line says.
        number: The digits of its number, as in `[2]`, `(2)` or `2:`; "" without; `2.` numbers the lines of a list.
        label: Its label in lower case, as in `**Answer:** x`; "" without label.
    """

    text: str
    number: str = ""
    label: str = ""


def lines_of(reply: str) -> list[Line]:
    """The lines of a reply that say something, without thoughts, code fences, bullets, numbers, labels and bold type.

    A label alone on its line, as in "Triples:", is kept as a line without text.
    """
    lines = []
    for raw in without_thoughts(reply).splitlines():
        if not _FENCE.match(raw):
            line = read_line(raw)
            if line.text or line.label:
                lines.append(line)
    return lines


def read_line(raw: str) -> Line:
    """Take the decoration off one line; see `Line`."""
    text = without_emphasis(raw)
    number = label = ""
    while True:
        before = text
        # A bullet, a number and a label may stand in any order, as in `- **1.** Query: x`.
        text = _BULLET.sub("", text, count=1) if _BULLET.match(text) else text
        numbered = _NUMBER.match(text)
        if numbered:  # in `1. [2] x` the second number is the model's own
            number = next(digits for digits in numbered.groups() if digits)
            text = text[numbered.end() :]
        labelled = _LABEL.match(text)
        if labelled and not label:
            label = labelled[1].lower()
            text = text[labelled.end() :]
        text = without_emphasis(text)
        if text == before:
            return Line(text, number, label)


def without_emphasis(text: str) -> str:
    """A line without bold type, italics of the whole line, and backticks; single stars inside a line are text."""
    text = text.strip()
    while True:
        before = text
        text = _EMPHASIS.sub(r"\2", text)
        whole = _WHOLE_EMPHASIS.fullmatch(text)
        text = whole[2] if whole else text
        # A reply that was cut off may lack the closing stars.
        text = text.removeprefix("**").removesuffix("**").strip()
        if text == before:
            return text


def unquoted(text: str) -> str:
    """A text without one pair of quotation marks around all of it; quotation marks inside stay."""
    text = text.strip()
    if len(text) > 2 and QUOTES.get(text[0]) == text[-1] and text[-1] not in text[1:-1] and text[0] not in text[1:-1]:
        return text[1:-1].strip()
    return text
