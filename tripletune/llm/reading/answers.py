"""Read an answer: in a box, after a phrase, or the first text that is neither a remark nor an explanation."""

from __future__ import annotations

import re

from tripletune.llm.reading.lines import ABBREVIATION, read_line, unquoted, without_emphasis

_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_ANSWER_TAG = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.IGNORECASE | re.DOTALL)
ANSWER_PHRASE = re.compile(
    r"(?:\b(?:so|thus|therefore|hence),?[ \t]+)?\bthe[ \t]+(?:final |short |correct )?answer[ \t*_]*"
    r"(?:is|would be|must be)[ \t*_]*:?[ \t*_]*",
    re.IGNORECASE,
)
_REMARK = re.compile(
    r"(?:sure|okay|ok|certainly|of course|let me|let us|let's|here(?:'s| is)|based on|looking at|first"
    r"|i (?:will|need))\b.*",
    re.IGNORECASE | re.DOTALL,
)
_EXPLAINS = re.compile(
    r"(?:because|since|this is|this was|that is|explanation|reason|note|according to|as stated"
    r"|the (?:passages?|facts?|text|triples?))\b",
    re.IGNORECASE,
)


def marked_answer(text: str) -> str | None:
    r"""The answer in `\boxed{…}` or `<answer>`; None if the text has neither."""
    marks = _BOXED.findall(text) or _ANSWER_TAG.findall(text)
    return marks[-1].strip() if marks else None


def phrased_answer(text: str) -> str | None:
    """The answer in "So the answer is: X." or "The answer is X."; None if the text has no such sentence."""
    phrases = list(ANSWER_PHRASE.finditer(text))
    if not phrases:
        return None
    rest = text[phrases[-1].end() :].splitlines()
    answer = without_emphasis(rest[0].rstrip("*_` \t")) if rest else ""
    return unquoted(_without_period(answer)) or None


def _without_period(text: str) -> str:
    """A text without its final period, unless that belongs to an abbreviation such as "U.S." or "Jr."."""
    if text.endswith(".") and not ABBREVIATION.search(text):
        return text[:-1].rstrip()
    return text


def unlabelled_answer(text: str) -> str:
    """The answer of a reply without "Answer:": its first block that is no remark, without an explanation below it."""
    blocks = [block.strip() for block in re.split(r"\n\s*\n", text) if block.strip()]
    while len(blocks) > 1 and _REMARK.fullmatch(blocks[0]):
        blocks = blocks[1:]
    if not blocks:
        return ""
    lines = blocks[0].splitlines()
    if len(lines) > 1 and _EXPLAINS.match(read_line(lines[1]).text or lines[1].strip("*_ ")):
        return lines[0]
    return blocks[0]
