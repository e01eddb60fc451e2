"""Texts of answers as metrics and loops compare them: without case, punctuation and articles."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable

from tripletune.core.data.triples import Triple
from tripletune.core.data.words import UNSPACED, one_form

# Answers that a text may hold by chance.
YES_NO = ("yes", "no")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ARTICLE_WORDS = ("a", "an", "the")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Separates facts that are searched as one text: no name contains the separator, so no match spans two facts.
_BETWEEN_FACTS = " \ue000 "
# Signs of Word and of typesetters by what people type.
SIGNS = str.maketrans(dict.fromkeys("’‘ʼʻ′‛", "'") | dict.fromkeys("“”„‟″", '"') | dict.fromkeys("‐‑‒–—−", "-"))


def normalize_answer(text: str) -> str:
    """Lower-case, drop ASCII punctuation and the articles a, an, the, and fold white space (as SQuAD and HotpotQA do).

    A text with only articles or punctuation (the choice "A", the band "The The", the answer "!") keeps these, since an
    empty gold answer would match every prediction.
    """
    lowered = text.lower()
    bare = lowered.translate(_PUNCTUATION)
    normal = " ".join(_ARTICLES.sub(" ", bare).split())
    return normal or " ".join(bare.split()) or " ".join(lowered.split())


def one_spelling(text: str) -> str:
    """A text with typed apostrophes, quotation marks and hyphens, and with its letters in one Unicode form.

    For checks that compare names from several sources. Metrics keep to the official scripts.
    """
    if text.isascii():
        return text
    return one_form(text).translate(SIGNS)


def normalize_name(text: str) -> str:
    """`normalize_answer` of the one spelling of a name: "O’Neil" and "O'Neil", "Zoë" in NFC and NFD are the same.

    The last word stays: no name ends in an article, so "Hepatitis A" and "Xi An" are not "Hepatitis" and "Xi".
    """
    normal = normalize_answer(one_spelling(text))
    *earlier, last = with_articles(text).split() or [""]
    if earlier and last in _ARTICLE_WORDS and not ends_in_article(normal):
        return f"{normal} {last}"
    return normal


def with_articles(text: str) -> str:
    """What `normalize_name` makes of a text, but with all articles."""
    return " ".join(one_spelling(text).lower().translate(_PUNCTUATION).split())


def ends_in_article(name: str) -> bool:
    """Whether the last word of a normalised name could be read as an article; a text with it keeps its articles."""
    return name.endswith(tuple(f" {word}" for word in _ARTICLE_WORDS))


def mentions(text: str, phrase: str) -> bool:
    """Whether a text holds a phrase as whole words, after `normalize_name` of both; see `UNSPACED`."""
    name = normalize_name(phrase)
    normal_text = with_articles(text) if ends_in_article(name) else normalize_name(text)
    return f" {_with_spaced_characters(name)} " in f" {_with_spaced_characters(normal_text)} "


def facts_name(facts: Iterable[Triple], names: Iterable[str]) -> bool:
    """Whether a fact contains one of the names as whole words, after answer normalisation."""
    text = _BETWEEN_FACTS.join(" ".join(fact.as_list()) for fact in facts)
    return any(mentions(text, name) for name in names)


def _with_spaced_characters(text: str) -> str:
    """A normalised text in which each character of scripts without spaces is a word."""
    return " ".join(UNSPACED.sub(r" \g<0> ", text).split())
