"""Read an answer: in a box, after a phrase, or the first text that is neither a remark nor an explanation."""

from __future__ import annotations

import re

from tripletune.llm.reading.lines import (
    ABBREVIATION,
    ANSWER_LABELS,
    COMMENT_LABELS,
    FENCE,
    THOUGHT_LABELS,
    plain_text,
    read_line,
    unquoted,
    without_emphasis,
)
from tripletune.llm.reply_json import json_values

_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_ANSWER_TAG = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.IGNORECASE | re.DOTALL)
ANSWER_PHRASE = re.compile(
    r"(?:\b(?:so|thus|therefore|hence),?[ \t]+)?\bthe[ \t]+(?:final |short |correct )?answer[ \t*_]*"
    r"(?:is|would be|must be)[ \t*_]*:?[ \t*_]*"
    r"|\b(?:so|thus|therefore|hence),?[ \t]+the[ \t]+(?:final |short |correct )?answer[ \t*_]*:[ \t*_]*",
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
_LATEX_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\s*\{([^{}]*)\}")
# An explanation after the answer: "Maine (it is half of New England)", "Maine – because it is the largest".
_EXPLANATION = re.compile(
    r"\s*(?:[(\[]|\s[–—-]\s)(?:it|they|he|she|this|that|because|since|as (?:stated|given|the)|see|according to|based on"
    r"|which|who|(?:from|in) (?:the )?passages?)\b.*\Z",
    re.DOTALL,
)


def marked_answer(text: str) -> str | None:
    r"""The answer in `\boxed{…}` or `<answer>`; None if the text has neither."""
    marks = _BOXED.findall(text) or _ANSWER_TAG.findall(text)
    return marks[-1].strip() if marks else None


def phrased_answer(text: str) -> str | None:
    """The answer in "So the answer is: X." or "The answer is X."; None if the text has no such sentence."""
    text = plain_text(text)
    phrases = list(ANSWER_PHRASE.finditer(text))
    if not phrases:
        return None
    rest = text[phrases[-1].end() :].splitlines()
    answer = without_emphasis(rest[0].rstrip("*_` \t")) if rest else ""
    return unquoted(without_period(answer)) or None


def without_period(text: str) -> str:
    """A text without its final period, unless that belongs to an abbreviation such as "U.S." or "Jr."."""
    if text.endswith(".") and not ABBREVIATION.search(text):
        return text[:-1].rstrip()
    return text


def json_answer(text: str) -> str | None:
    """The answer in `{"answer": "x"}`; None if no or several objects have one."""
    answers = []
    for value in json_values(text, dict):
        answers += [str(field) for name, field in value.items() if str(name).lower() in ANSWER_LABELS]
    return answers[0] if len(answers) == 1 else None


def without_explanation(answer: str) -> str:
    """An answer without LaTeX's marks of text and without an explanation behind it."""
    return _EXPLANATION.sub("", _LATEX_TEXT.sub(r"\1", answer)) or answer


def unlabelled_answer(text: str) -> str:
    """The answer of a reply without "Answer:": its first block that is no remark, without an explanation below it.

    A reply of remarks alone keeps the last one, since it may be the answer. A second line that does not explain is
    kept, as a long answer has several lines.
    """
    blocks = [block.strip() for block in re.split(r"\n\s*\n", FENCE.sub("", text)) if block.strip()]
    while len(blocks) > 1 and _is_remark(blocks[0]):
        blocks = blocks[1:]
    if not blocks:
        return ""
    lines = blocks[0].splitlines()
    if len(lines) > 1 and _EXPLAINS.match(read_line(lines[1]).text or lines[1].strip("*_ ")):
        return lines[0]
    return blocks[0]


def _is_remark(block: str) -> bool:
    """Whether a block announces or explains the answer, as "Sure, here it is" and "Reason: x" do."""
    return bool(_REMARK.fullmatch(block)) or read_line(block).label in (*COMMENT_LABELS, *THOUGHT_LABELS)
