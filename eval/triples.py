"""Score a text-to-triples model (RAS, section D.1): ROUGE, triple matching at three levels, and grounding.

| level | two triples match if |
|---|---|
| `exact` | all three fields are the same text |
| `normalised` | all three fields are equal, ignoring case, articles, punctuation and the form of the predicate |
| `soft` | the cosine of each of the three fields reaches its threshold (`THRESHOLDS`) |

Matches are one-to-one. Micro scores add up matches over all texts; macro scores are the mean over texts. A text without
facts scores 1 if nothing is predicted, else 0. A failed text scores 0. Intervals draw texts.

ROUGE compares the raw reply with the gold triples in RAS's format, as the paper does; the word for "no facts" counts as
an empty reply. ROUGE counts markers as words and ignores all characters except a to z and 0 to 9, so use it only to
compare with the paper.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from tripletune.core.data.pairs import ExtractionPair, predicate_words
from tripletune.core.data.triples import Triple
from tripletune.core.data.words import words
from tripletune.eval.statistics import bootstrap_ratio
from tripletune.llm.reply_triples import read_reply

# Function from texts to vectors, one row per text, of any length; for example `rag.embedding.Embedder.encode`.
Embedder = Callable[[list[str]], np.ndarray]
Vectors = Mapping[str, np.ndarray]
Key = tuple[str, str, str]

_DIGITS = re.compile(r"\d+")
_ARTICLES = frozenset(("a", "an", "the"))
_AUXILIARIES = frozenset(("is", "are", "was", "were", "be", "been", "has", "have", "had"))
ROUGE = ("rouge1", "rouge2", "rougeL")
LEVELS = ("exact", "normalised", "soft")
FIELDS = ("subject", "predicate", "object")
# Texts whose fields are embedded together: few enough for memory, and enough to fill an embedder's batches.
_CHUNK = 256
_LONGEST_ROUGE = 20_000
# Smallest cosines at which two entities, or two predicates, match. Entities need a larger cosine: in all-MiniLM-L6-v2,
# "University of Copenhagen" and "University of Oslo" have 0.73, "born in" and "birth place" 0.68, "birth place" and
# "death place" 0.57. No threshold tells "Norway" from "Sweden" (0.80), so read the soft level beside the normalised.
THRESHOLDS = {"entity": 0.75, "predicate": 0.6}


@dataclass(frozen=True, slots=True)
class Prediction:
    """A model's raw replies to a text or to its pieces in order; without replies all scores are 0."""

    pair: ExtractionPair
    replies: Sequence[str]
    failed: bool = False


def score_extractions(predictions: Iterable[Prediction], embed: Embedder | None = None) -> dict[str, Any]:
    """Score replies; see `score_rows` and `summarise_extractions`."""
    return summarise_extractions(score_rows(predictions, embed))


def score_rows(predictions: Iterable[Prediction], embed: Embedder | None = None) -> Iterator[dict[str, Any]]:
    """Score replies one by one, in order; a row is JSON, and without `embed` it has no soft level.

    A level has numbers of matches, predicted and gold triples. Each field holds the number of gold triples in
    which this field was predicted correctly.
    """
    stream = iter(predictions)
    while chunk := list(islice(stream, _CHUNK)):
        replies = [read_reply(*prediction.replies) for prediction in chunk]
        vectors = None
        if embed is not None:
            triples = [t for one, reply in zip(chunk, replies) for t in (*one.pair.triples, *reply.triples)]
            vectors = field_vectors(triples, embed)
        for prediction, reply in zip(chunk, replies):
            faults = {"malformed_triples": reply.malformed, "malformed": reply.is_malformed}
            yield _score(prediction, reply.triples, vectors) | faults | _rouge_of(prediction)


def row_parts(row: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Numerator and denominator of each score of a `score_rows` row; their sums give the scores of a data set."""
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
    """ROUGE-1, -2 and -L F-measures (Lin, 2004; Google's `rouge-score`, no stemming); 1 if both texts are empty.

    An overlong reply, as a model that repeats itself writes, is cut at 20,000 characters, ten times any target.
    """
    if not reply.strip() and not gold.strip():
        return dict.fromkeys(ROUGE, 1.0)
    from rouge_score.rouge_scorer import RougeScorer  # imports nltk, which takes a while

    scores = RougeScorer(list(ROUGE), use_stemmer=False).score(gold, reply[:_LONGEST_ROUGE])
    return {name: float(scores[name].fmeasure) for name in ROUGE}


def _score(prediction: Prediction, found: Sequence[Triple], vectors: Vectors | None) -> dict[str, Any]:
    pair = prediction.pair
    predicted, gold = list(dict.fromkeys(found)), list(dict.fromkeys(pair.triples))
    # One triple per normalised form, so that a triple in two spellings is not counted twice.
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
    # The word for "no facts" counts as an empty reply, like an empty list of gold triples.
    read = ((text, read_reply(text)) for text in prediction.replies)
    written = "\n".join(text for text, reply in read if reply.triples or reply.is_malformed)
    return rouge_scores(written, prediction.pair.target)


def normalize_entity(text: str) -> str:
    """A name or text for comparison: its words (`core.data.words`) without case, punctuation and articles.

    A name of articles only keeps them ("The The"); a name without letters keeps its characters ("!!!").
    """
    found = words(text)
    return " ".join([word for word in found if word not in _ARTICLES] or found or text.split())


def normalize_predicate(predicate: str) -> str:
    """A predicate for comparison: words without leading auxiliaries, joined without spaces.

    So `birthPlace`, "birth place", "Birthplace" and "has birth place" are equal. Auxiliaries stay in a predicate
    that has no other words ("is").
    """
    words = normalize_entity(predicate_words(predicate)).split()
    start = next((number for number, word in enumerate(words) if word not in _AUXILIARIES), 0)
    return "".join(words[start:])


def normalize_triple(triple: Triple) -> Key:
    """A triple for comparison at the normalised level."""
    return normalize_entity(triple.subject), normalize_predicate(triple.predicate), normalize_entity(triple.object)


def grounded(name: str, text_words: str) -> bool:
    """Whether a name occurs in a text as whole words; the text is normalised, with a space at both ends."""
    return f" {normalize_entity(name)} " in text_words


def field_vectors(triples: Sequence[Triple], embed: Embedder) -> Vectors:
    """Unit vectors of the fields of many triples; each distinct text is embedded once."""
    texts = sorted({text for triple in triples for text in spoken_fields(triple)})
    vectors = np.asarray(embed(texts), dtype=np.float64) if texts else ()
    return {text: vector / (np.linalg.norm(vector) or 1.0) for text, vector in zip(texts, vectors)}


def similarities(predicted: Sequence[Triple], gold: Sequence[Triple], vectors: Vectors) -> np.ndarray:
    """Cosines between the fields of all pairs of a predicted and a gold triple, shape (3, predicted, gold).

    Fields that are equal after normalisation have cosine 1. Fields with different numbers have 0, since an embedder
    gives 1958 and 1959 nearly the same vector.
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
    """The fields for the embedder: in lower case, with predicates as words."""
    return triple.subject.casefold(), predicate_words(triple.predicate).casefold(), triple.object.casefold()


def soft_matches(similarities: np.ndarray) -> int:
    """The largest number of one-to-one pairs of predicted and gold triples that agree in all three fields.

    The mean of the fields does not count, since a triple with one wrong field states another fact. Cosines have the
    shape (3, predicted, gold).
    """
    if not similarities.size:
        return 0
    least = np.array([THRESHOLDS[kind] for kind in ("entity", "predicate", "entity")])
    fits = np.all(similarities >= least[:, None, None], axis=0)
    return int(fits[_assignment(fits)].sum())


def aligned_fields(predicted: Sequence[Key], gold: Sequence[Key]) -> tuple[int, int, int]:
    """Count the gold triples whose subject, whose predicate, and whose object is right in the aligned triple.

    The alignment is one-to-one and has the most equal fields; ties are resolved by the most equal triples.
    """
    if not predicted or not gold:
        return 0, 0, 0
    equal = np.array([[[a == b for a, b in zip(one, other)] for other in gold] for one in predicted])
    weight = equal.sum(axis=2) + equal.all(axis=2) * 0.5
    subject, predicate, object_ = equal[_assignment(weight)].sum(axis=0)
    return int(subject), int(predicate), int(object_)


def precision_recall_f1(matches: float, predicted: float, gold: float) -> tuple[float, float, float]:
    """Precision, recall and F1 of one text; all 1 if there are neither gold nor predicted triples."""
    if not predicted and not gold:
        return 1.0, 1.0, 1.0
    precision = matches / predicted if predicted else 0.0
    recall = matches / gold if gold else 0.0
    return precision, recall, 2 * precision * recall / (precision + recall) if matches else 0.0


def _assignment(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the pairing with the largest sum of weights."""
    # The import takes longer than all of `tripletune eval --help`.
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(weights, maximize=True)


def _numbers(text: str) -> list[str]:
    return sorted(number.lstrip("0") for number in _DIGITS.findall(text))
