"""Labels and refusals in replies: a label is yes or no, true or false, the letter of a choice, or a name."""

from __future__ import annotations

import re

from tripletune.core.data.answers import normalize_answer
from tripletune.llm.refusals import is_refusal, without_refusals

# Chat models write "The answer is (B)." where a trained model writes "B".
_SAID = r"(?:answer|choice|option|label|statement|claim)(?: is| would be|:)*[\s:*_\"'(]*"
_CALLED = re.compile(rf"\b{_SAID}\Z", re.IGNORECASE)
_ANSWERED = re.compile(r"\banswer(?: is| would be|[\s*_]*:)[\s:*_\"'(]*\Z", re.IGNORECASE)
_DENIED = re.compile(r"(?:\b(?:not|nor|neither|than|except)|n't)(?: option| choice)?[\s*_\"'(]+\Z", re.IGNORECASE)
_LISTED = re.compile(r"\W*(?:\b(?:or|and|nor)\b)?\W*", re.IGNORECASE)
# "A" and "I" are also words: a bare A counts before punctuation, "is", "or", "and" or the end, and in "A - ..." first.
_LETTER = re.compile(
    rf"(?i:\b{_SAID})(?P<a>[A-HJ])\b|\((?P<b>[A-HJ])\)|\b(?P<c>[B-HJ])\b"
    r"|\b(?P<d>A)(?=[).:,/*_\"']| (?:is|or|and)\b|\s*\Z)"
    r"|\A[\s*_\"'(]*(?P<e>A)(?=\s*[\n(;=\]]|\s+[-\u2013\u2014]|\s*[\u2013\u2014]| (?:because|since|as)\b)"
)
_TRUTH = re.compile(
    r"(?P<false>(?:\bnot|n't|\bnever)(?: \w+)? true|\b(?:untrue|false|incorrect))\b"
    r"|(?P<true>(?:\bnot|n't) false|\b(?:true|correct))\b",
    re.IGNORECASE,
)
_YES = re.compile(
    r"\b(?:(?P<yes>yes)|(?P<no>no)(?! (?:changes?|differences?|information|evidence|mention|details?|reports?|other"
    r"|such|more|longer|specific|direct|clear|further|additional)\b))\b",
    re.IGNORECASE,
)
# "Google. The articles name no other company." and "I think it is Google, but I am not sure." give an answer.
_NAMES = re.compile(
    r"\W*(?!(?:i|we|you|there|this|none|nothing|sorry|unfortunately|apologies|well|based|the (?:passage|article|context"
    r"|text|information|document|fact|question|evidence)s?)\b)(?:\S+ ){0,3}\S+[.!]\s"
    r"|\W*(?:i (?:think|believe|guess)|probably|perhaps|maybe|it(?: is|'s)|likely)\b[^.]*\b(?:but|though|although)\b",
    re.IGNORECASE,
)
_CONCLUDES = re.compile(r"\banswer(?: is|[\s*_]*:)[\s*_]*\w", re.IGNORECASE)
_DECIDES = re.compile(r"\W*(?:yes|no)\b\s*(?:[.,;:!]|\Z)", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")


def refuses(reply: str) -> bool:
    """Whether a reply, of any length, only says that there is no answer.

    In a long reply, the first or the last sentence must refuse. "No, the articles do not mention it" is the label "no".
    """
    rest = without_refusals(reply)
    if rest == reply or _labels(rest, _YES) or _labels(rest, _TRUTH) or _CONCLUDES.search(rest):
        return False
    sentences = _SENTENCE.split(reply.strip())
    if (named := _NAMES.match(reply)) and without_refusals(named[0]) == named[0]:
        return False
    return is_refusal(reply) or any(without_refusals(one) != one for one in (sentences[0], sentences[-1]))


def has_label(reply: str, gold: str) -> bool:
    """Whether a reply gives the gold label, or refuses if the gold answer is a refusal."""
    if is_refusal(gold):
        return refuses(reply)
    gold, rest = gold.strip(), without_refusals(reply)
    for pattern in (_YES, _TRUTH):
        if gold.lower() in pattern.groupindex:
            return _labels(rest, pattern) == {gold.lower()}
    if re.fullmatch("[A-J]", gold):
        return _labels(rest, _LETTER) == {gold}
    # Neither "No. Google says yes to none of it." nor "Google, Apple or Meta" gives the name Google as its answer.
    name = re.compile(rf"(?<!not )(?<!\w){re.escape(normalize_answer(gold))}(?!\w)")
    said = [] if _DECIDES.match(rest) else [normalize_answer(one) for one in _SENTENCE.split(rest)]
    return any(name.search(one) and not re.search(r"\b(?<!whether )or\b", name.sub("", one)) for one in said)


def _labels(text: str, pattern: re.Pattern[str]) -> set[str]:
    """The label of a text: the last label that it calls its answer, or the label at its start; else all its labels."""
    found, end = list[tuple[str, str, bool]](), 0
    for match in pattern.finditer(text):
        group = str(match.lastgroup)
        label, start = (match[group], match.start(group)) if pattern is _LETTER else (group, match.start())
        if not _DENIED.search(before := text[:start]):
            listed = bool(found) and label != found[-1][0] and bool(_LISTED.fullmatch(text, end, match.start()))
            if listed:
                found[-1] = (*found[-1][:2], True)
            found.append((label, before, listed))
        end = match.end()
    single = [(label, before) for label, before, listed in found if not listed]
    answered = [label for label, before in single if _ANSWERED.search(before)]
    front = [label for label, before in single if not before.strip(" \t\n*_\"'(")]
    called = [label for label, before in single if _CALLED.search(before)]
    # "B. Option A is wrong" is B, and "True stories are told; the claim is false" is false.
    first = front or called[:1] if pattern is _LETTER else called[:1] or front
    return set(answered[-1:] or first) or {label for label, *_ in found}
