"""When two triples count as the same: exactly, after normalisation, or by the similarity of their embeddings."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tripletune.models.data.pairs import predicate_words
from tripletune.models.data.triples import Triple

# Texts to vectors, one row each, of any length; `rag.retrieval.load_embedder` gives one.
Embedder = Callable[[list[str]], np.ndarray]
Key = tuple[str, str, str]

# Fields of a triple, in order, that are names.
_IS_NAME = (True, False, True)
_WORD = re.compile(r"\w+")
_DIGITS = re.compile(r"\d+")
_ARTICLES = frozenset(("a", "an", "the"))
_AUXILIARIES = frozenset(("is", "are", "was", "were", "be", "been", "has", "have", "had"))


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The cosines from which on two fields mean the same; stated with every soft score.

    Names need more than predicates: "University of Copenhagen" and "University of Oslo" have 0.73 in all-MiniLM-L6-v2,
    "born in" and "birth place" 0.68, "birth place" and "death place" 0.57. No threshold tells "Norway" from "Sweden"
    (0.80), so the soft level is to be read beside the normalised one.

    Attributes:
        entity: For subjects and objects.
        predicate: For predicates.

    Raises:
        ValueError: one is not above 0 and at most 1.
    """

    entity: float = 0.75
    predicate: float = 0.6

    def __post_init__(self) -> None:
        for name in ("entity", "predicate"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} threshold {getattr(self, name)}: it must be above 0 and at most 1")


def entity_words(text: str) -> list[str]:
    """The words of a name or a text: Unicode forms, case, punctuation and articles aside.

    A name of nothing but articles keeps them ("The The"), one without letters its characters ("!!!").
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    words = _words(folded)
    return [word for word in words if word not in _ARTICLES] or words or folded.split()


def normalize_entity(name: str) -> str:
    """A subject or object as it is compared: its `entity_words`, joined by spaces."""
    return " ".join(entity_words(name))


def normalize_predicate(predicate: str) -> str:
    """A predicate as it is compared: words without auxiliaries in front, joined without spaces.

    So `birthPlace`, "birth place", "Birthplace" and "has birth place" are one. A predicate of nothing but auxiliaries
    ("is") keeps them.
    """
    words = entity_words(predicate_words(predicate))
    start = next((number for number, word in enumerate(words) if word not in _AUXILIARIES), 0)
    return "".join(words[start:])


def normalize_triple(triple: Triple) -> Key:
    """A triple as it is compared at the normalised level."""
    return normalize_entity(triple.subject), normalize_predicate(triple.predicate), normalize_entity(triple.object)


def grounded(name: str, text_words: str) -> bool:
    """Whether a name occurs in a text as whole words.

    Args:
        name: The name.
        text_words: The text's `entity_words`, joined and fenced by spaces: " ada lovelace was born ".
    """
    return f" {normalize_entity(name)} " in text_words


class FieldVectors:
    """Vectors of length one of the fields of many triples, each distinct text embedded once.

    Args:
        triples: All triples that will be compared.
        embed: The embedder.

    Raises:
        ValueError: the embedder does not give one vector a text.
    """

    def __init__(self, triples: Sequence[Triple], embed: Embedder) -> None:
        texts = sorted({text for triple in triples for text in spoken_fields(triple)})
        vectors = np.asarray(embed(texts), dtype=np.float64) if texts else np.zeros((0, 1))
        if vectors.ndim != 2 or len(vectors) != len(texts):
            raise ValueError(f"the embedder gave an array of shape {vectors.shape} for {len(texts)} texts")
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        self._vectors = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
        self._rows: Mapping[str, int] = {text: row for row, text in enumerate(texts)}

    def similarities(self, predicted: Sequence[Triple], gold: Sequence[Triple]) -> np.ndarray:
        """Cosines of the fields of every two triples, shape (3, predicted, gold).

        Fields that are equal after normalisation have 1. Fields with different numbers have 0: to an embedder 1958 and
        1959 are nearly one.
        """
        result = np.ones((3, len(predicted), len(gold)))
        left, right = [spoken_fields(t) for t in predicted], [spoken_fields(t) for t in gold]
        first, second = [normalize_triple(t) for t in predicted], [normalize_triple(t) for t in gold]
        for field in range(3):
            a = self._vectors[[self._rows[fields[field]] for fields in left]]
            b = self._vectors[[self._rows[fields[field]] for fields in right]]
            cosines = a @ b.T
            for i, j in np.ndindex(cosines.shape):
                if first[i][field] == second[j][field]:
                    cosines[i, j] = 1.0
                elif _numbers(left[i][field]) != _numbers(right[j][field]):
                    cosines[i, j] = 0.0
            result[field] = cosines
        return result


def spoken_fields(triple: Triple) -> tuple[str, str, str]:
    """The fields as they are embedded: lower case, predicates as words."""
    return triple.subject.casefold(), predicate_words(triple.predicate).casefold(), triple.object.casefold()


def soft_matches(similarities: np.ndarray, thresholds: Thresholds) -> int:
    """The largest number of one-to-one pairs of predicted and gold triples of which all three fields mean the same.

    All three, and not their mean, since a triple with one wrong field states another fact.

    Args:
        similarities: Cosines of the fields, shape (3, predicted, gold).
        thresholds: Smallest cosines.
    """
    if not similarities.size:
        return 0
    least = np.array([thresholds.entity if is_name else thresholds.predicate for is_name in _IS_NAME])
    fits = np.all(similarities >= least[:, None, None], axis=0)
    rows, columns = _assignment(fits)
    return int(fits[rows, columns].sum())


def aligned_fields(predicted: Sequence[Key], gold: Sequence[Key]) -> tuple[int, int, int]:
    """How many gold triples have their subject, predicate and object right in the triple they are aligned with.

    The alignment is one-to-one and has the most equal fields in all; among equals, one that has whole triples right.

    Args:
        predicted: Normalised triples.
        gold: Normalised triples.
    """
    if not predicted or not gold:
        return 0, 0, 0
    equal = np.array([[[a == b for a, b in zip(one, other)] for other in gold] for one in predicted])
    weight = equal.sum(axis=2) + equal.all(axis=2) * 0.5
    rows, columns = _assignment(weight)
    subject, predicate, object_ = equal[rows, columns].sum(axis=0)
    return int(subject), int(predicate), int(object_)


def _words(text: str) -> list[str]:
    """Runs of letters and digits, each with the marks behind it.

    To `\\w` the vowel signs of Hindi or Thai are no letters, so names that differ in one alone would be the same.
    """
    if text.isascii():
        return _WORD.findall(text)
    kept, inside = [], False
    for character in text:
        is_mark = unicodedata.category(character).startswith("M")
        inside = character.isalnum() or character == "_" or (inside and is_mark)
        kept.append(character if inside else " ")
    return "".join(kept).split()


def _numbers(text: str) -> list[str]:
    return sorted(number.lstrip("0") for number in _DIGITS.findall(text))


def _assignment(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the pairing with the largest sum of weights."""
    # Imported here: it takes longer than all of `tripletune eval --help`.
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(weights, maximize=True)
    return rows, columns
