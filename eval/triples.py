"""Scores of a text-to-triples model (RAS, section D.1): ROUGE, triple matching at three strictnesses, and grounding.

| level | two triples are the same when |
|---|---|
| `exact` | all three fields are the same text |
| `normalised` | they are, case, articles, punctuation and the form of the predicate aside |
| `soft` | the cosine of each of the three fields reaches its threshold (`THRESHOLDS`) |

Matches are one-to-one. Micro scores add up matches over all texts; macro scores are the mean over texts. A text without
facts scores 1 if nothing is predicted, else 0. A failed text scores 0. Intervals draw texts.

ROUGE compares the reply as it was written with the gold triples in RAS's format, as the paper does; the word for "no
facts" counts as an empty reply. It counts markers as words and ignores letters outside a to z and 0 to 9, so use it
only to compare with the paper.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from tripletune.eval.statistics import bootstrap_ratio
from tripletune.models.data.pairs import ExtractionPair, predicate_words, read_replies, read_reply
from tripletune.models.data.triples import Triple
from tripletune.models.data.words import words

# Texts to vectors, one row each, of any length; `rag.embedding.Embedder.encode` is one.
Embedder = Callable[[list[str]], np.ndarray]
Vectors = Mapping[str, np.ndarray]
Key = tuple[str, str, str]

_DIGITS = re.compile(r"\d+")
_ARTICLES = frozenset(("a", "an", "the"))
_AUXILIARIES = frozenset(("is", "are", "was", "were", "be", "been", "has", "have", "had"))
ROUGE = ("rouge1", "rouge2", "rougeL")
LEVELS = ("exact", "normalised", "soft")
FIELDS = ("subject", "predicate", "object")
# Texts whose fields are embedded together: bounds memory, and is enough to fill an embedder's batches.
_CHUNK = 256
_LONGEST_ROUGE = 20_000
# The cosines from which on two fields mean the same, for subjects and objects, and for predicates. Names need more:
# "University of Copenhagen" and "University of Oslo" have 0.73 in all-MiniLM-L6-v2, "born in" and "birth place" 0.68,
# "birth place" and "death place" 0.57. None tells "Norway" from "Sweden" (0.80), so the soft level is to be read beside
# the normalised one.
THRESHOLDS = {"entity": 0.75, "predicate": 0.6}


@dataclass(frozen=True, slots=True)
class Prediction:
    """A model's raw replies to a text, or to its pieces in order; none at all is never right, even without facts."""

    pair: ExtractionPair
    replies: Sequence[str]
    failed: bool = False


def score_extractions(predictions: Iterable[Prediction], embed: Embedder | None = None) -> dict[str, Any]:
    """Score replies; see `score_rows` and `summarise_extractions`."""
    return summarise_extractions(score_rows(predictions, embed))


def score_rows(predictions: Iterable[Prediction], embed: Embedder | None = None) -> Iterator[dict[str, Any]]:
    """Score replies one by one, in their order; a row is JSON, and without `embed` has no soft level.

    Levels have matches, predicted and gold triples; fields, the gold triples that have this field right.
    """
    stream = iter(predictions)
    while chunk := list(islice(stream, _CHUNK)):
        replies = [read_replies(prediction.replies) for prediction in chunk]
        vectors = None
        if embed is not None:
            triples = [t for one, reply in zip(chunk, replies) for t in (*one.pair.triples, *reply.triples)]
            vectors = field_vectors(triples, embed)
        for prediction, reply in zip(chunk, replies):
            faults = {"malformed_triples": reply.malformed, "malformed": reply.is_malformed}
            yield _score(prediction, reply.triples, vectors) | faults | _rouge_of(prediction)


def row_parts(row: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """A row of `score_rows` as numerators and denominators, by score; sums of both make the score of a data set."""
    parts: dict[str, tuple[float, float]] = {}
    for level in (level for level in LEVELS if level in row):
        matches, predicted, gold = row[level]
        micro = ((matches, predicted), (matches, gold), (2 * matches, predicted + gold))
        macro = (0.0, 0.0, 0.0) if row.get("failed") else precision_recall_f1(matches, predicted, gold)
        names = ("precision", "recall", "f1")
        parts |= {f"{level}/micro/{name}": part for name, part in zip(names, micro)}
        parts |= {f"{level}/macro/{name}": (score, 1.0) for name, score in zip(names, macro)}
    parts |= {f"accuracy/{field}": (row[field], row["normalised"][2]) for field in FIELDS}
    parts["malformed_output"] = (float(row["malformed"]), 1.0)
    parts["malformed_triples"] = (row["malformed_triples"], row["malformed_triples"] + row["predicted"])
    parts["groundedness"] = (row["grounded"], row["entities"])
    parts |= {name: (row[name], 1.0) for name in ROUGE}
    return parts


def summarise_extractions(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Scores of a data set from rows of `score_rows`, nested by the names of `row_parts`."""
    parts = [row_parts(row) for row in rows]
    summary: dict[str, Any] = {"texts": len(parts)}
    for name in parts[0] if parts else ():
        *families, last = name.split("/")
        place = summary
        for family in families:
            place = place.setdefault(family, {})
        place[last] = bootstrap_ratio(*zip(*(part[name] for part in parts)))
    if "soft" in summary:
        summary["soft"]["thresholds"] = THRESHOLDS
    return summary


def rouge_scores(reply: str, gold: str) -> dict[str, float]:
    """ROUGE-1, -2 and -L F-measures (Lin, 2004; Google's `rouge-score`, no stemming); 1 when both are empty.

    A reply ten times longer than any target, as of a looping model, is cut at 20,000 characters.
    """
    if not reply.strip() and not gold.strip():
        return dict.fromkeys(ROUGE, 1.0)
    from rouge_score.rouge_scorer import RougeScorer  # imports nltk, which takes a while

    scores = RougeScorer(list(ROUGE), use_stemmer=False).score(gold, reply[:_LONGEST_ROUGE])
    return {name: float(scores[name].fmeasure) for name in ROUGE}


def _score(prediction: Prediction, found: Sequence[Triple], vectors: Vectors | None) -> dict[str, Any]:
    pair = prediction.pair
    predicted, gold = list(dict.fromkeys(found)), list(dict.fromkeys(pair.triples))
    # One triple for each normalised form, so that a triple in two spellings is not counted twice.
    forms = {normalize_triple(triple): triple for triple in reversed(predicted)}
    gold_forms = {normalize_triple(triple): triple for triple in reversed(gold)}
    row: dict[str, Any] = {"id": pair.id, "failed": prediction.failed}
    row |= {"gold": len(gold), "predicted": len(predicted)}
    row["exact"] = [len(set(predicted) & set(gold)), len(predicted), len(gold)]
    row["normalised"] = [len(forms.keys() & gold_forms.keys()), len(forms), len(gold_forms)]
    if vectors is not None:
        similar = similarities(list(forms.values()), list(gold_forms.values()), vectors)
        row["soft"] = [soft_matches(similar), len(forms), len(gold_forms)]
    row |= dict(zip(FIELDS, aligned_fields(list(forms), list(gold_forms))))
    names = {name for triple in predicted for name in (triple.subject, triple.object)}
    words = f" {normalize_entity(pair.source_text)} "
    return row | {"entities": len(names), "grounded": sum(grounded(name, words) for name in names)}


def _rouge_of(prediction: Prediction) -> dict[str, float]:
    if prediction.failed:
        return dict.fromkeys(ROUGE, 0.0)
    # A reply that says "no facts" in a word is the empty one of the gold triples.
    read = ((text, read_reply(text)) for text in prediction.replies)
    written = "\n".join(text for text, reply in read if reply.triples or reply.is_malformed)
    return rouge_scores(written, prediction.pair.target)


def normalize_entity(text: str) -> str:
    """A name or text for comparison: its words (`models.data.words`) without case, punctuation and articles.

    A name of nothing but articles keeps them ("The The"), one without letters its characters ("!!!").
    """
    found = words(text)
    return " ".join([word for word in found if word not in _ARTICLES] or found or text.split())


def normalize_predicate(predicate: str) -> str:
    """A predicate for comparison: words without leading auxiliaries, joined without spaces.

    So `birthPlace`, "birth place", "Birthplace" and "has birth place" are one. A predicate of nothing but auxiliaries
    ("is") keeps them.
    """
    words = normalize_entity(predicate_words(predicate)).split()
    start = next((number for number, word in enumerate(words) if word not in _AUXILIARIES), 0)
    return "".join(words[start:])


def normalize_triple(triple: Triple) -> Key:
    """A triple for comparison at the normalised level."""
    return normalize_entity(triple.subject), normalize_predicate(triple.predicate), normalize_entity(triple.object)


def grounded(name: str, text_words: str) -> bool:
    """Whether a name occurs in a text as whole words; the text is normalised and fenced by spaces: " ada was born "."""
    return f" {normalize_entity(name)} " in text_words


def field_vectors(triples: Sequence[Triple], embed: Embedder) -> Vectors:
    """Vectors of length one of the fields of many triples, each distinct text embedded once."""
    texts = sorted({text for triple in triples for text in spoken_fields(triple)})
    vectors = np.asarray(embed(texts), dtype=np.float64) if texts else ()
    return {text: vector / (np.linalg.norm(vector) or 1.0) for text, vector in zip(texts, vectors)}


def similarities(predicted: Sequence[Triple], gold: Sequence[Triple], vectors: Vectors) -> np.ndarray:
    """Cosines of the fields of every two triples, shape (3, predicted, gold).

    Fields that are equal after normalisation have 1. Fields with different numbers have 0: to an embedder 1958 and
    1959 are nearly one.
    """
    result = np.zeros((3, len(predicted), len(gold)))
    left, right = [spoken_fields(t) for t in predicted], [spoken_fields(t) for t in gold]
    first, second = [normalize_triple(t) for t in predicted], [normalize_triple(t) for t in gold]
    for field, i, j in np.ndindex(result.shape):
        one, other = left[i][field], right[j][field]
        if first[i][field] == second[j][field]:
            result[field, i, j] = 1.0
        elif _numbers(one) == _numbers(other):
            result[field, i, j] = vectors[one] @ vectors[other]
    return result


def spoken_fields(triple: Triple) -> tuple[str, str, str]:
    """The fields for the embedder: lower case, predicates as words."""
    return triple.subject.casefold(), predicate_words(triple.predicate).casefold(), triple.object.casefold()


def soft_matches(similarities: np.ndarray) -> int:
    """The largest number of one-to-one pairs of predicted and gold triples that agree in all three fields.

    Not in their mean, since a triple with one wrong field states another fact. Cosines have the shape (3, predicted,
    gold).
    """
    if not similarities.size:
        return 0
    least = np.array([THRESHOLDS[kind] for kind in ("entity", "predicate", "entity")])
    fits = np.all(similarities >= least[:, None, None], axis=0)
    return int(fits[_assignment(fits)].sum())


def aligned_fields(predicted: Sequence[Key], gold: Sequence[Key]) -> tuple[int, int, int]:
    """The number of gold triples whose subject, predicate and object are right in their aligned triple.

    The alignment is one-to-one with the most equal fields, then the most equal triples.
    """
    if not predicted or not gold:
        return 0, 0, 0
    equal = np.array([[[a == b for a, b in zip(one, other)] for other in gold] for one in predicted])
    weight = equal.sum(axis=2) + equal.all(axis=2) * 0.5
    subject, predicate, object_ = equal[_assignment(weight)].sum(axis=0)
    return int(subject), int(predicate), int(object_)


def precision_recall_f1(matches: float, predicted: float, gold: float) -> tuple[float, float, float]:
    """Precision, recall and F1 of one text; all 1 when there is nothing to find and nothing was found."""
    if not predicted and not gold:
        return 1.0, 1.0, 1.0
    precision = matches / predicted if predicted else 0.0
    recall = matches / gold if gold else 0.0
    return precision, recall, 2 * precision * recall / (precision + recall) if matches else 0.0


def _assignment(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the pairing with the largest sum of weights."""
    # Imported here: it takes longer than all of `tripletune eval --help`.
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(weights, maximize=True)


def _numbers(text: str) -> list[str]:
    return sorted(number.lstrip("0") for number in _DIGITS.findall(text))
