"""Labels and refusals in replies: a label is yes or no, true or false, the letter of a choice, or a name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tripletune.core.data.answers import normalize_answer
from tripletune.llm.refusals import is_refusal, without_refusals

# Chat models write "The answer is (B)." where a trained model writes "B". `_CALLED` is the text before a label that the
# reply calls an answer or a claim, and `_ANSWERED` only the text before one that it calls the answer.
_SAID = r"(?:answer|choice|option|label|statement|claim)(?: is| would be|:)*[\s:*_\"'(]*"
_CALLED = re.compile(rf"\b{_SAID}\Z", re.IGNORECASE)
_ANSWERED = re.compile(r"\banswer(?: is| would be|[\s*_]*:)[\s:*_\"'(]*\Z", re.IGNORECASE)
# The text before a label that the reply rules out: "not (B)", "rather than option C".
_DENIED = re.compile(r"(?:\b(?:not|nor|neither|than|except)|n't)(?: option| choice)?[\s*_\"'(]+\Z", re.IGNORECASE)
# The text between two labels of a list: "A, B or C".
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


@dataclass(slots=True)
class _Mention:
    """A label in a reply.

    Attributes:
        label: The letter, or the name of the pattern's group, such as "yes".
        before: All text before the label.
        listed: The label is one of several in a list ("A, B or C"), so it is no answer.
    """

    label: str
    before: str
    listed: bool = False


def refuses(reply: str) -> bool:
    """Whether a reply, of any length, only says that there is no answer.

    A reply that also gives a label or a name, or calls something its answer, does not refuse. In a long reply, the
    first or the last sentence must refuse, since a sentence in between may only say what one passage lacks. "No, the
    articles do not mention it" is the label "no".
    """
    unrefused = without_refusals(reply)
    if unrefused == reply:
        return False
    if _decided_labels(unrefused, _YES) or _decided_labels(unrefused, _TRUTH) or _CONCLUDES.search(unrefused):
        return False
    named = _NAMES.match(reply)
    if named and not _has_refusing_clause(named[0]):
        return False
    if is_refusal(reply):
        return True
    sentences = _SENTENCE.split(reply.strip())
    return _has_refusing_clause(sentences[0]) or _has_refusing_clause(sentences[-1])


def _has_refusing_clause(text: str) -> bool:
    """Whether a part of a text only refuses to answer, beside which another part may name a label."""
    return without_refusals(text) != text


def has_label(reply: str, gold: str) -> bool:
    """Whether a reply gives the gold label, or refuses if the gold answer is a refusal.

    The form of the gold answer says what a label is: one of the words yes, no, true and false, a letter, or a name.
    """
    if is_refusal(gold):
        return refuses(reply)
    gold = gold.strip()
    unrefused = without_refusals(reply)
    for pattern in (_YES, _TRUTH):
        if gold.lower() in pattern.groupindex:
            return _decided_labels(unrefused, pattern) == {gold.lower()}
    if re.fullmatch("[A-J]", gold):
        return _decided_labels(unrefused, _LETTER) == {gold}
    return _gives_name(unrefused, gold)


def _gives_name(reply: str, gold: str) -> bool:
    """Whether a sentence of a reply gives a name as its answer.

    Neither "No. Google says yes to none of it." nor "Google, Apple or Meta" gives the name Google.
    """
    if _DECIDES.match(reply):
        return False
    name = re.compile(rf"(?<!not )(?<!\w){re.escape(normalize_answer(gold))}(?!\w)")
    for sentence in _SENTENCE.split(reply):
        said = normalize_answer(sentence)
        offers_choice = re.search(r"\b(?<!whether )or\b", name.sub("", said))
        if name.search(said) and not offers_choice:
            return True
    return False


def _decided_labels(text: str, pattern: re.Pattern[str]) -> set[str]:
    """The label of a text: the last label that it calls its answer, or the label at its start; else all its labels.

    The last one counts since a model may weigh several before it concludes. All labels of an undecided text equal no
    single gold label, so such a text is wrong.
    """
    mentions = _label_mentions(text, pattern)
    alone = [mention for mention in mentions if not mention.listed]
    answered = [mention.label for mention in alone if _ANSWERED.search(mention.before)]
    if answered:
        return {answered[-1]}
    at_start = [mention.label for mention in alone if not mention.before.strip(" \t\n*_\"'(")]
    called = [mention.label for mention in alone if _CALLED.search(mention.before)]
    # "B. Option A is wrong" is B, and "True stories are told; the claim is false" is false.
    by_rank = [*at_start, *called] if pattern is _LETTER else [*called, *at_start]
    if by_rank:
        return {by_rank[0]}
    return {mention.label for mention in mentions}


def _label_mentions(text: str, pattern: re.Pattern[str]) -> list[_Mention]:
    """The labels of a text in order, without those that it rules out ("not A"); those of a list are marked as `listed`.

    Args:
        text: An answer.
        pattern: Finds labels: each is a named group, or (`_LETTER`) the text of a group.
    """
    mentions: list[_Mention] = []
    end = 0
    for match in pattern.finditer(text):
        group = str(match.lastgroup)
        # The groups of `_LETTER` only number its ways to write a letter; those of the others are the labels.
        if pattern is _LETTER:
            mention = _Mention(match[group], text[: match.start(group)])
        else:
            mention = _Mention(group, text[: match.start()])
        if not _DENIED.search(mention.before):
            last = mentions[-1] if mentions else None
            if last and last.label != mention.label and _LISTED.fullmatch(text, end, match.start()):
                last.listed = True
                mention.listed = True
            mentions.append(mention)
        end = match.end()
    return mentions
