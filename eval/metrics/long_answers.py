"""Scores of long answers, as the scripts of ASQA (Stelmakh et al., 2022) and of GraphRAG-Bench compute them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tripletune.models.data.records import normalize_answer


def str_em(prediction: str, short_answers: Sequence[Sequence[str]]) -> float:
    """Share of the readings of the question with a short answer that occurs in the answer (ASQA's STR-EM)."""
    normal = normalize_answer(prediction)
    found = [any(normalize_answer(alias) in normal for alias in reading) for reading in short_answers]
    return sum(found) / len(found)


def rouge_lsum(prediction: str, answers: Sequence[str]) -> float:
    """ROUGE-Lsum, F-measure with stemming, against the closest gold answer (ASQA's ROUGE-L).

    Sentences are those of sentencex; the official script takes NLTK's, whose model can't be bundled.
    """
    return _best("rougeLsum", _lines(prediction), [_lines(answer) for answer in answers])


def rouge_l(prediction: str, answers: Sequence[str]) -> float:
    """ROUGE-L of the whole answer, F-measure with stemming, against the closest gold answer."""
    return _best("rougeL", prediction, answers)


def _best(kind: str, prediction: str, answers: Sequence[str]) -> float:
    return max(float(_scorer(kind).score(answer, prediction)[kind].fmeasure) for answer in answers)


@lru_cache(maxsize=2)
def _scorer(kind: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # imports nltk, which takes a while

    return RougeScorer([kind], use_stemmer=True)


def _lines(text: str) -> str:
    from tripletune.rag.retrievers import split_sentences

    return "\n".join(split_sentences(text))
