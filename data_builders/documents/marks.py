"""Superscripts, subscripts, marks of notes and formulas as plain text that keeps numbers and names apart.

`10<sup>6</sup>` is "10^6", never "106", and the mark of a note after "1987" is left out. Formulas are written in one
line, as people type them: "(a+b)/2", "sqrt(x)", "x_1^2".
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_SIGNS = "*†‡§¶#↑↩↵^"
# What stands in the mark of a note: numbers, letters or signs, also several of them.
_MARK = re.compile(
    rf"(?:[\[(]?(?:(?:note|nb|n\.|fn)\s?)?(?:\d{{1,3}}|[a-zA-Z]|[ivx]{{1,5}}|[{_SIGNS}]+\ufe0e?)[\])]?(?:\s?[,;–-]\s?)?\s?)+"
)
_BRACKETED = re.compile(r"(?:\[[^\[\]]{1,12}\]\s?)+")
_ONLY_SIGNS = re.compile(rf"[{_SIGNS}\s\ufe0e]+")
_NOTE_KINDS = re.compile(r"\b(?:doc-)?(?:noteref|footnote-ref(?:erence)?|footnoteref|citation-reference|backlink)\b")
# Ordinals and titles whose end people raise: 19th, XIXe, Mme, No.
_ABBREVIATION = re.compile(
    r"(?:.*[^\W_])?(?:(?:\d|\b[IVXLC]+)(?:st|nd|rd|th|er|re|ère|e?me|ème|es|os|as)|"
    r"(?<!\d)(?:\d{1,2}|[IVXLC]+)[deoa]|"
    r"\b(?:M(?:me|lle|gr|r|rs)s?|Dr|[nN]os?|S(?:te|t)|Ph\.?D)\.?)",
    re.DOTALL,
)
# Notes, or the institutes of an author.
_SEVERAL = re.compile(r"\d{1,3}(?:\s?[,;–-]\s?\d{1,3})+")
_TRADEMARK = re.compile("TM|SM|®|©|™|℠")
# Invisible operators of MathML.
_INVISIBLE = str.maketrans({"\u2061": "", "\u2062": " ", "\u2063": ",", "\u2064": "+"})
_SIMPLE = re.compile(r"[^\W_]*|[+\-−]?\d+(?:[.,]\d+)?|\W")


def says_note(kinds: str) -> bool:
    """Whether roles or classes of an element say that it is the mark of a note, or the link back to it."""
    return bool(_NOTE_KINDS.search(kinds))


def is_note(before: str, text: str, is_marked: bool, is_linked: bool) -> bool:
    """Whether a superscript or link is the mark of a note.

    Args:
        before: The text before it.
        is_marked: Whether its role or class says so.
        is_linked: Whether it is a link within a page.
    """
    if not text or not _MARK.fullmatch(text):
        return False
    if is_marked or (is_linked and _ONLY_SIGNS.fullmatch(text)):
        return True
    # "see section 3" has a space before its link.
    return is_linked and bool(before) and not before[-1].isspace() and before[-1] not in "([{"


def superscript(before: str, text: str) -> str:
    """A raised text as it is to be written after the text before it.

    The first case that fits decides: bracketed numbers and signs are notes wherever they stand, and a text after a
    space, bracket or slash is no exponent. Guarded by tests/data_builders/test_markup.py.
    """
    if not text or _BRACKETED.fullmatch(text) or _ONLY_SIGNS.fullmatch(text):
        return ""
    if not before or before[-1].isspace() or before[-1] in "([{/⁄":
        # A fraction, an isotope, or text that is small only.
        return text
    if before[-1].isalpha() and (_TRADEMARK.fullmatch(text) or _SEVERAL.fullmatch(text)):
        return ""
    if _ABBREVIATION.fullmatch(f"{before.split()[-1]}{text}"):
        return text
    if before[-1] in ".,;:!?”’\"')]»…" and _MARK.fullmatch(text):
        # Only a note stands behind the end of a sentence.
        return ""
    return f"^{_as_one_term(text)}"


def subscript(before: str, text: str) -> str:
    """A lowered text as it is to be written after the text before it: H2O, but 101_2."""
    if text and before and before[-1].isdecimal() and text[0].isalnum():
        return f"_{_as_one_term(text)}"
    return text


def split_fraction(pieces: list[str], place: int) -> None:
    """Separate a number from a fraction that is a superscript, a slash and the subscript at this place of the pieces.

    `2<sup>1</sup>/<sub>3</sub>` is "2 1/3", where `superscript` has written "2^1". The three pieces before the place
    are then the number, the superscript and the slash.
    """
    if place >= 3 and pieces[place - 1].strip() in ("/", "⁄"):
        raised = re.fullmatch(r"\^(\d{1,2})", pieces[place - 2])
        if raised and pieces[place - 3][-1:].isdecimal():
            pieces[place - 2] = f" {raised[1]}"


def formula(tag: str, children: Sequence[str]) -> str:
    """An element of a formula in one line.

    Args:
        tag: The element as MathML names it.
        children: The texts of its children, in MathML's order.
    """
    texts = [child.translate(_INVISIBLE) for child in children]
    first, second, third = [*texts, "", "", ""][:3]
    if tag in ("msup", "mover") and second.strip():
        return f"{_as_one_term(first)}^{_as_one_term(second)}"
    if tag in ("msub", "munder") and second.strip():
        return f"{_as_one_term(first)}_{_as_one_term(second)}"
    if tag in ("msubsup", "munderover"):
        below = f"_{_as_one_term(second)}" if second.strip() else ""
        above = f"^{_as_one_term(third)}" if third.strip() else ""
        return f"{_as_one_term(first)}{below}{above}"
    if tag == "mfrac":
        return f"{_as_one_term(first)}/{_as_one_term(second)}"
    if tag == "mroot":
        return f"root({second}, {first})"
    if tag == "msqrt":
        return f"sqrt({''.join(texts)})"
    if tag == "mtr":
        return f"{' '.join(texts)}; "
    text = "".join(texts)
    if tag == "mo" and text.strip() in ("/", "^", "_"):
        return text.strip()
    return text


def _as_one_term(text: str) -> str:
    """A term, in brackets if it is not a single number or name, so that "1/(a + b)" keeps its meaning on one line."""
    text = text.strip()
    if _SIMPLE.fullmatch(text) or (text.startswith("(") and text.endswith(")")):
        return text
    return f"({text})"
