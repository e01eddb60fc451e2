"""When two triples match: by normalised fields, by the similarity of their fields, or field by field when aligned.

`eval/triples.py` makes scores of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tripletune.core.data.pairs import predicate_words
from tripletune.core.data.triples import Triple
from tripletune.core.data.words import words

# Function from texts to vectors, one row per text, of any length; for example `rag.search.embedding.Embedder.encode`.
Embedder = Callable[[list[str]], np.ndarray]
# Unit vector of each field's text.
Vectors = Mapping[str, np.ndarray]
# Subject, predicate and object as texts: normalised, or as an embedder reads them.
FieldTexts = tuple[str, str, str]

_DIGITS = re.compile(r"\d+")
_ARTICLES = frozenset(("a", "an", "the"))
_AUXILIARIES = frozenset(("is", "are", "was", "were", "be", "been", "has", "have", "had"))
# Smallest cosines at which two entities, or two predicates, match. Entities need a larger cosine: in all-MiniLM-L6-v2,
# "University of Copenhagen" and "University of Oslo" have 0.73, "born in" and "birth place" 0.68, "birth place" and
# "death place" 0.57. No threshold tells "Norway" from "Sweden" (0.80), so read the soft level beside the normalised.
THRESHOLDS = {"entity": 0.75, "predicate": 0.6}


def normalize_entity(text: str) -> str:
    """A name or text for comparison: its words (`core.data.words`) without case, punctuation and articles.

    A name of articles only keeps them ("The The"); a name without letters keeps its characters ("!!!").
    """
    all_words = words(text)
    without_articles = [word for word in all_words if word not in _ARTICLES]
    return " ".join(without_articles or all_words or text.split())


def normalize_predicate(predicate: str) -> str:
    """A predicate for comparison: words without leading auxiliaries, joined without spaces.

    So `birthPlace`, "birth place", "Birthplace" and "has birth place" are equal. Auxiliaries stay in a predicate
    that has no other words ("is").
    """
    words = normalize_entity(predicate_words(predicate)).split()
    for start, word in enumerate(words):
        if word not in _AUXILIARIES:
            return "".join(words[start:])
    return "".join(words)


def normalize_triple(triple: Triple) -> FieldTexts:
    """A triple for comparison at the normalised level, on which two spellings of a fact are equal."""
    return normalize_entity(triple.subject), normalize_predicate(triple.predicate), normalize_entity(triple.object)


def is_grounded(name: str, text_words: str) -> bool:
    """Whether a name occurs in a text as whole words; the text is normalised, with a space at both ends."""
    return f" {normalize_entity(name)} " in text_words


def field_vectors(triples: Sequence[Triple], embed: Embedder) -> Vectors:
    """Unit vectors of the fields of many triples; each distinct text is embedded once."""
    distinct: set[str] = set()
    for triple in triples:
        distinct.update(spoken_fields(triple))
    if not distinct:
        return {}
    texts = sorted(distinct)
    vectors = np.asarray(embed(texts), dtype=np.float64)
    # A vector of zeros stays one.
    return {text: vector / (np.linalg.norm(vector) or 1.0) for text, vector in zip(texts, vectors, strict=True)}


def field_similarities(predicted: Sequence[Triple], gold: Sequence[Triple], vectors: Vectors) -> np.ndarray:
    """Cosines between the fields of all pairs of a predicted and a gold triple, shape (3, predicted, gold).

    Fields that are equal after normalisation have cosine 1. Fields with different numbers have 0, since an embedder
    gives 1958 and 1959 nearly the same vector.
    """
    cosines = np.zeros((3, len(predicted), len(gold)))
    predicted_texts = list(map(spoken_fields, predicted))
    gold_texts = list(map(spoken_fields, gold))
    predicted_keys = list(map(normalize_triple, predicted))
    gold_keys = list(map(normalize_triple, gold))
    for field, i, j in np.ndindex(cosines.shape):
        text, gold_text = predicted_texts[i][field], gold_texts[j][field]
        if predicted_keys[i][field] == gold_keys[j][field]:
            cosines[field, i, j] = 1.0
        elif _numbers_in(text) == _numbers_in(gold_text):
            cosines[field, i, j] = vectors[text] @ vectors[gold_text]
    return cosines


def spoken_fields(triple: Triple) -> FieldTexts:
    """The fields for the embedder: in lower case, with predicates as words."""
    return triple.subject.casefold(), predicate_words(triple.predicate).casefold(), triple.object.casefold()


def soft_matches(similarities: np.ndarray) -> int:
    """The largest number of one-to-one pairs of predicted and gold triples that agree in all three fields.

    The mean of the fields does not count, since a triple with one wrong field states another fact. Cosines have the
    shape (3, predicted, gold).
    """
    if not similarities.size:
        return 0
    least = np.array([THRESHOLDS["entity"], THRESHOLDS["predicate"], THRESHOLDS["entity"]])
    fits = np.all(similarities >= least[:, None, None], axis=0)
    return int(fits[_best_pairing(fits)].sum())


class RightFields(NamedTuple):
    """Numbers of gold triples whose subject, whose predicate, and whose object is right in the aligned triple."""

    subject: int
    predicate: int
    object: int


def aligned_fields(predicted: Sequence[FieldTexts], gold: Sequence[FieldTexts]) -> RightFields:
    """Count the gold triples whose subject, whose predicate, and whose object is right in the aligned triple.

    The alignment is one-to-one and has the most equal fields; ties are resolved by the most equal triples.
    """
    if not predicted or not gold:
        return RightFields(0, 0, 0)
    # Shape (predicted, gold, 3); as objects, because arrays of texts drop NUL characters at the end.
    equal = np.array(predicted, dtype=object)[:, None] == np.array(gold, dtype=object)[None]
    # A triple that is equal as a whole counts half a field more, which breaks ties.
    weights = equal.sum(axis=2) + equal.all(axis=2) * 0.5
    return RightFields(*equal[_best_pairing(weights)].sum(axis=0).tolist())


def _best_pairing(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the pairing with the largest sum of weights, each row and column at most once.

    The two arrays have the shape (pairs,); together they are an index of `weights`.
    """
    # The import takes longer than all of `tripletune eval --help`.
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(weights, maximize=True)


def _numbers_in(text: str) -> list[str]:
    """The numbers in a text, sorted, without leading zeros."""
    return sorted(number.lstrip("0") for number in _DIGITS.findall(text))
