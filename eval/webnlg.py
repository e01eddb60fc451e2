"""The four measures of WebNLG's text-to-RDF scorer (Castro Ferreira et al., 2020), so that published figures compare.

Of two triples each field is a span of words, labelled by its place. What the candidate shares with the reference, the
longest common runs of words first, says where the candidate's spans lie. SemEval 2013's measures count them:

| measure | a span is right when |
|---|---|
| `strict` | boundaries and label are the reference's |
| `exact` | boundaries are, whatever the label |
| `partial` | as `exact`; half where spans overlap |
| `type` | the label is the reference's and the spans overlap |

The reference and candidate triples of a text are paired so that the mean F1 of the four measures is highest; one
without partner scores 0. A figure is the mean over pairs. The rules, odd ones too, are those of `Evaluation_script.py`
in github.com/WebNLG/WebNLG-Text-to-triples at 2beba09 with nervaluate 0.1; words are split without its sentence model.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from tripletune.models.data.triples import Triple

MEASURES = ("strict", "exact", "partial", "type")
SUBJECT, PREDICATE, OBJECT = range(3)
_CAMEL = re.compile(r"([a-z])([A-Z])")
_BRACKET = re.compile(r"\A(.*?)\s\(.*?\)\Z")
_MARKS = f"[{re.escape(string.punctuation)}]"
# What is no word: of a reference, of a candidate, and of either where fields are compared crosswise.
_NO_WORD = {"reference": rf"\A{_MARKS}+\Z", "candidate": rf"\A{_MARKS}\Z", "crosswise": _MARKS}

# (label, first word, last word); words of reference and candidate are numbered together.
Span = tuple[int, int, int]
# The run of words that a word was matched in, and of a candidate's word its place in the reference; -1: beside a run.
Mark = tuple[int, int] | None


def webnlg_scores(gold: Sequence[Triple], predicted: Sequence[Triple]) -> dict[str, list[float]]:
    """Sums over the pairs of a text of precision, recall and F1, by measure; `max(len(gold), len(predicted))` pairs."""
    if not gold or not predicted:
        return {measure: [0.0, 0.0, 0.0] for measure in MEASURES}
    references, candidates = [_fields(triple) for triple in gold], [_fields(triple) for triple in predicted]
    scores = np.array([[pair_scores(one, other) for other in candidates] for one in references])
    return dict(zip(MEASURES, scores[assignment(scores[..., 2].mean(axis=2))].sum(axis=0).tolist()))


def assignment(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the pairing with the largest sum of weights."""
    # Imported here: it takes longer than all of `tripletune eval --help`.
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(weights, maximize=True)


def pair_scores(reference: Sequence[str], candidate: Sequence[str]) -> list[tuple[float, float, float]]:
    """Precision, recall and F1 by measure of two triples, whose fields are normalised."""
    trues, found = _spans_of(reference, candidate)
    counts = np.array(list(_counts(trues, found))).sum(axis=0)
    overlapped, spurious, missed = counts[-3:]
    actual, possible = overlapped + spurious, overlapped + missed
    return [precision_recall_f1(right, actual, possible) if right else (0.0, 0.0, 0.0) for right in counts[:4]]


def precision_recall_f1(matches: float, predicted: float, gold: float) -> tuple[float, float, float]:
    """Precision, recall and F1 of one text; all 1 when there is nothing to find and nothing was found."""
    if not predicted and not gold:
        return 1.0, 1.0, 1.0
    precision = matches / predicted if predicted else 0.0
    recall = matches / gold if gold else 0.0
    return precision, recall, 2 * precision * recall / (precision + recall) if matches else 0.0


def _counts(trues: Sequence[Span], found: Sequence[Span]) -> Iterator[tuple[float, ...]]:
    """Of each span what it adds to the measures, and whether it overlaps, is spurious or is missed."""
    met: list[Span] = []
    for span in found:
        if span in trues:
            met.append(span)
            yield 1, 1, 1, 1, 1, 0, 0
            continue
        for true in trues:
            if span[1:] == true[1:]:
                met.append(true)
                yield 0, 1, 1, 0, 1, 0, 0
                break
            if max(span[1], true[1]) <= min(span[2], true[2]) and true not in met:
                met.append(true)
                yield 0, 0, 0.5, float(span[0] == true[0]), 1, 0, 0
                break
        else:
            yield 0, 0, 0, 0, 0, 1, 0
    yield 0, 0, 0, 0, 0, 0, sum(true not in met for true in trues)


def _spans_of(reference: Sequence[str], candidate: Sequence[str]) -> tuple[list[Span], list[Span]]:
    """The spans of both triples; where two fields share no word with theirs, the fields are tried crosswise."""
    fields: list[_Field] = []
    for place in range(3):
        words = _words(reference[place], "reference"), _words(candidate[place], "candidate")
        fields.append(_field(_match(*words), place, place, sum(field.length for field in fields)))
    for first, last in ((SUBJECT, OBJECT), (SUBJECT, PREDICATE), (PREDICATE, OBJECT)):
        if fields[first].matches or fields[last].matches:
            continue
        one, other = (
            _match(_words(reference[a], "crosswise"), _words(candidate[b], "crosswise"))
            for a, b in ((first, last), (last, first))
        )
        left = _field(one, first, last, fields[SUBJECT].length if first else 0)
        between = fields[PREDICATE].length if last - first == 2 else 0
        right = _field(other, last, first, (fields[SUBJECT].length if first else 0) + left.length + between)
        if left.matches or right.matches:
            fields[first], fields[last] = left, right
            if last - first == 2:
                # The script measures the predicate by the words of the object.
                fields[PREDICATE] = _field(other, PREDICATE, PREDICATE, left.length)
            break
    return [span for field in fields for span in field.true], [span for field in fields for span in field.found]


class _Field(NamedTuple):
    """Spans of a field, how many words they number, and whether any word matched."""

    true: list[Span]
    found: list[Span]
    length: int
    matches: bool


def _field(marks: tuple[list[Mark], list[Mark]], true_label: int, label: int, base: int) -> _Field:
    matches = any(marks[1])
    true, found, length = _lay_out(*marks)
    placed, other = [(true_label, base + a, base + b) for a, b in true], [(label, base + a, base + b) for a, b in found]
    return _Field(placed, other, length, matches)


def _match(reference: list[str], candidate: list[str]) -> tuple[list[Mark], list[Mark]]:
    """Mark the longest runs of words that both have, the candidate's first one first."""
    left: list[Mark] = [None] * len(reference)
    right: list[Mark] = [None] * len(candidate)
    size, run = len(candidate), 1
    while size:
        starts = product(range(len(candidate) - size + 1), range(len(reference) - size + 1))
        for mine, its in starts:
            words, others = slice(mine, mine + size), slice(its, its + size)
            if candidate[words] == reference[others] and not any(right[words]) and not any(left[others]):
                left[others] = right[words] = [(run, its + step) for step in range(size)]
                run += 1
                break
        else:
            size -= 1
    return left, right


def _lay_out(reference: list[Mark], candidate: list[Mark]) -> tuple[list[Any], list[Any], int]:
    """Spans of a field's reference and candidate, and how many words they number; marks words beside a run."""
    if not any(candidate):
        if not reference:
            return [], [(0, len(candidate) - 1)], len(candidate)
        true = [(0, len(reference) - 1)]
        if not candidate:
            return true, [], 1
        words = len(reference) + len(candidate)
        return true, [(len(reference), words - 1)], words
    places = [place for place, mark in enumerate(candidate) if mark]
    first, last = places[0], places[-1]
    # Words before the reference's first one, or behind its last one, are part of the run beside them.
    opens = candidate[first] is not None and candidate[first][1] == 0  # type: ignore[index]
    closes = (
        bool(reference) and reference[-1] is not None and candidate[-1] is None and candidate[last] == reference[-1]
    )
    before, after, loose = list[Any](), list[Any](), list[Any]()
    run = 1
    for place, mark in enumerate(list(candidate)):
        if mark:
            run += 1
        elif (place < first and opens) or (place > last and closes):
            near = candidate[first if place < first else last]
            candidate[place] = (near[0], -1)  # type: ignore[index]
            (before if place < first else after).append(("run", near[0]))  # type: ignore[index]
        else:
            loose.append(("loose", run))
    whole = [*before, *(mark and ("run", mark[0]) for mark in reference), *after, *loose]
    return [(len(before), len(before) + len(reference) - 1)], list(_stretches(whole)), len(whole)


def _stretches(keys: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Stretches of equal keys. Behind one, each word without a key gives it again, a word longer, as in the script."""
    current, begin = None, 0
    for place, key in enumerate(keys):
        if key is None:
            if current is not None:
                yield begin, place - 1
            continue
        if key != current:
            if current is not None:
                yield begin, place - 1
            current, begin = key, place
        if place == len(keys) - 1:
            yield begin, place


def _fields(triple: Triple) -> tuple[str, str, str]:
    """The fields as words in lower case, without a bracket at the object's end."""
    subject, predicate, last = (
        " ".join(_CAMEL.sub(r"\1 \2", field).replace("_", " ").lower().split()) for field in triple.as_list()
    )
    return subject, predicate, _BRACKET.sub(r"\1", last)


@cache
def _tokenizer() -> Any:
    from nltk.tokenize import NLTKWordTokenizer  # comes with rouge-score

    return NLTKWordTokenizer()


@lru_cache(maxsize=4096)
def _words(text: str, kind: str) -> list[str]:
    return [word.lower() for word in _tokenizer().tokenize(text) if not re.search(_NO_WORD[kind], word)]
