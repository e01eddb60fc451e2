"""Read whether known facts answer a question (GEAR)."""

from __future__ import annotations

import re
from typing import NamedTuple

from tripletune.core.calls import UnusableReply
from tripletune.llm.reading.lines import lines_of, plain_text
from tripletune.llm.reply_json import json_values

_VERDICT = re.compile(
    r"\banswerable\b[\"'*_]*[ \t]*(?:[?:=–—-][ \t\"'*_]*)+(yes|no|true|false|partial(?:ly)?|partly|not)\b[\"'*_.,]*",
    re.IGNORECASE,
)
_FIRST_WORD = re.compile(r"(yes|no|partial(?:ly)?|partly)\b[.,:;!*_]*\s*", re.IGNORECASE)
_NOT_ANSWERABLE = re.compile(
    r"\b(?:not|un)[ -]?answerable\b|\b(?:can ?not|can't|can not) (?:yet )?be answered\b", re.IGNORECASE
)
_IS_ANSWERABLE = re.compile(r"\bis answerable\b|\bcan (?:now )?be answered\b", re.IGNORECASE)


class AnswerableVerdict(NamedTuple):
    """Whether the facts answer the question, and the reason that the model gives."""

    is_answerable: bool
    reason: str


def answerable_verdict(reply: str) -> AnswerableVerdict:
    """Read whether facts answer a question (GEAR, eq. 6); "partially" means no.

    Raises:
        UnusableReply: "no_verdict", or "two_verdicts" if the reply says yes and no.
    """
    for value in json_values(reply, dict):
        values = {str(key).lower(): item for key, item in value.items()}
        if str(values.get("answerable")).lower() in ("true", "false", "yes", "no", "partially", "partly"):
            reason = values.get("why") or values.get("reason") or ""
            return AnswerableVerdict(str(values["answerable"]).lower() in ("true", "yes"), str(reason))
    text = plain_text(reply)
    named = list(_VERDICT.finditer(text))
    said = {match[1].lower() in ("yes", "true") for match in named}
    if len(said) > 1:
        raise UnusableReply("two_verdicts", 'Write only one line "Answerable: Yes" or "Answerable: No".')
    if named:
        return AnswerableVerdict(said.pop(), _reason_after_verdict(text[named[-1].end() :]))
    lines = lines_of(text)
    first = _FIRST_WORD.match(lines[0].text) if lines else None
    if first:
        rest = [lines[0].text[first.end() :], *(line.text for line in lines[1:])]
        return AnswerableVerdict(first[1].lower() == "yes", _reason_after_verdict("\n".join(rest)))
    if _NOT_ANSWERABLE.search(text):
        return AnswerableVerdict(False, _text_of_lines(text))
    if _IS_ANSWERABLE.search(text):
        return AnswerableVerdict(True, _text_of_lines(text))
    raise UnusableReply("no_verdict", 'Begin with the line "Answerable: Yes" or "Answerable: No".')


def _reason_after_verdict(text: str) -> str:
    """What follows a verdict, without the marks that closed it."""
    return _text_of_lines(text.lstrip(" \t\n*_,.:;-–—"))


def _text_of_lines(text: str) -> str:
    """What the lines of a text say, without their decoration, on one line."""
    return " ".join(line.text for line in lines_of(text) if line.text)
