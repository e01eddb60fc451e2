"""Lines of a reply without their decoration: bullets, numbers, labels, bold type, code fences."""

from __future__ import annotations

import re
from typing import NamedTuple

from tripletune.llm.reply_json import without_thoughts

# Labels that models put before a line, by what follows them.
REPLY_LABELS = ("reply", "response", "output", "result")
_PLAN_LABELS = ("plan", "action", "decision", "next action", "next step")
ANSWER_LABELS = ("answer", "final answer", "short answer", "the answer")
THOUGHT_LABELS = ("thought", "next thought")
QUESTION_LABELS: tuple[str, ...] = (
    "q", "question", "next question", "new question", "follow-up question", "query", "next query", "new query",
    "search query", "search", "sub-query", "subquery", "sub-question", "follow up", "follow-up", "follow up question",
)  # fmt: skip
_OTHER_WORDS = ("reworded", "rewritten", "rephrased", "reformulated", "revised", "refined", "updated", "final")
for _word in _OTHER_WORDS:
    QUESTION_LABELS += (f"{_word} question", f"{_word} query", f"{_word} search query")
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
    *REPLY_LABELS, *_PLAN_LABELS, *ANSWER_LABELS, *THOUGHT_LABELS, *QUESTION_LABELS, *_LIST_LABELS,
    *_VERDICT_LABELS, *COMMENT_LABELS,
)  # fmt: skip

FENCE = re.compile(r"^[ \t]*(?:`{3,}|~{3,})[\w-]*[ \t]*$", re.MULTILINE)
_EMPHASIS = re.compile(r"(\*{2,3}|_{2,3}|`+)(?=\S)(.+?)(?<=\S)\1")
_WHOLE_EMPHASIS = re.compile(r"([*_])(?=[^\s*_])([^*_]+)(?<=\S)\1")
# Italics of some words: "*Hamlet* is a play", "*Thought 3:* x"; other stars belong to names ("M*A*S*H").
_ITALICS = re.compile(r"(?<!\w)([*_])(?=[\w\"'“(])([^*_]+)(?<=[\w.,:;?!\"'”)])\1(?!\w)")
_BULLET = re.compile(r"(?:[•·‣▪◦●→➜⇒➤►▶✅✔☑👉]\ufe0f?\s*|[-*+–—>]\s+|#{1,6}\s+|\d{1,3}[.)]\s+)")
_NUMBER = re.compile(r"(?:\[(\d{1,3})\][ \t]*[:.)]?|\((\d{1,3})\)[ \t]*[:.]?|(\d{1,3}):(?=\s))[ \t]*")
_LABEL = re.compile(
    rf"({'|'.join(sorted(_LABELS, key=len, reverse=True))})(?: \d{{1,2}})?[ \t]*(?::|：|[ \t][-–—][ \t])[ \t]*",
    re.IGNORECASE,
)
# A period that may belong to its word: "U.S.", "J.", "Jr."; it need not end a sentence.
ABBREVIATION = re.compile(r"\b(?:\w|Jr|Sr|Inc|Ltd|Co|St|Mrs?|Ms|Dr|No|Vol|vs)\.\Z")
QUOTES = {'"': '"', "“": "”", "«": "»", "'": "'", "‘": "’", "„": "“"}
# Models copy the form of a placeholder: "<the question>", "[the question]".
_AROUND = QUOTES | {"<": ">", "[": "]", "(": ")", "{": "}"}
_LABEL_OF_TAG = {re.sub("[ -]", "", label): label for label in _LABELS}
_TAGGED = re.compile(r"<([a-z _-]+)>[ \t]*(.*?)\s*</\1>", re.IGNORECASE | re.DOTALL)


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


def plain_text(reply: str) -> str:
    """A reply without thoughts, and with tags as labels: `<plan>x</plan>` says the same as `Plan: x`."""

    def as_label(match: re.Match[str]) -> str:
        """A tag and its text as a labelled line; tags that are no label of a reply stay."""
        label = _LABEL_OF_TAG.get(re.sub("[ _-]", "", match[1].lower()))
        return f"\n{label}: {match[2]}\n" if label else match[0]

    return _TAGGED.sub(as_label, without_thoughts(reply))


def lines_of(reply: str) -> list[Line]:
    """The lines of a reply that say something, without thoughts, code fences, bullets, numbers, labels and bold type.

    A label alone on its line, as in "Triples:", is kept as a line without text.
    """
    lines = []
    for raw in plain_text(reply).splitlines():
        if not FENCE.match(raw):
            line = read_line(raw)
            if line.text or line.label:
                lines.append(line)
    return lines


def read_line(raw: str) -> Line:
    """Take the decoration off one line; see `Line`.

    Each turn takes off at most one bullet, number and label, until a turn changes nothing. The first label counts: a
    second one, as in "Answer: Note: x", is taken as text, so the loop ends.
    """
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
    """A line without bold type, italics and backticks; other stars are text.

    Marks may stand inside others, so this repeats until nothing changes; each change makes the text shorter.
    """
    text = text.strip()
    while True:
        before = text
        text = _ITALICS.sub(r"\2", _EMPHASIS.sub(r"\2", text))
        whole = _WHOLE_EMPHASIS.fullmatch(text)
        text = whole[2] if whole else text
        # A reply that was cut off may lack the closing stars.
        text = text.removeprefix("**").removesuffix("**").strip()
        if text == before:
            return text


def answer_line(text: str) -> str:
    """An answer of one line without its decoration; a number before a colon may begin a title ("300: Rise of …")."""
    while True:
        before = text
        text = unquoted(without_emphasis(text))
        text = _BULLET.sub("", text, count=1) if _BULLET.match(text) else text
        labelled = _LABEL.match(text)
        if labelled and labelled[1].lower() in (*ANSWER_LABELS, *REPLY_LABELS):
            text = text[labelled.end() :]
        if text == before:
            return text


def unquoted(text: str, brackets: bool = True) -> str:
    """A text without one pair of quotation marks around all of it; those inside stay.

    In `"Hamlet" and "Macbeth"` the first and the last mark are no pair, so a pair counts only if neither of its marks
    stands between the two.

    Args:
        brackets: Whether brackets count like quotation marks. They do not in fields of triples, whose names may be
            written in brackets.
    """
    text = text.strip()
    pairs = _AROUND if brackets else QUOTES
    # A pair with nothing in it is text.
    if len(text) <= 2 or pairs.get(text[0]) != text[-1]:
        return text
    inner = text[1:-1]
    if text[0] in inner or text[-1] in inner:
        return text
    return inner.strip()
