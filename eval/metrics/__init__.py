"""Metrics, found by their place: every public function here or in a module of this folder is a metric of that name.

A new one is one file: `def NAME(prediction: str, answers: Sequence[str]) -> float`, whose docstring begins with the
sentence that tables print about it. Then a task's YAML can name it. The gold answers have all aliases, and none is
blank. One whose second argument is `short_answers` gets ASQA's instead, the aliases of one reading each; one whose
second argument is `supporting`, the final ranking of passages (`eval/rescore.py:final_ranking`) and the ids that it
should hold. One with a `k` is named for each of `CUTS`: `recall@5`.

Here are the papers' metrics; each gives 0 to 1, and 0 for an empty prediction. Names keep rules apart that papers mix
up: `f1` is plain token F1 (RAS, eq. 10-12), `f1_hotpotqa` the official rule of HotpotQA and 2WikiMultiHopQA;
`golden_match` normalises both sides (RAS, eq. 9), `match_raw` is Self-RAG's case-sensitive test.
"""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from tripletune.eval.metrics._labels import has_label
from tripletune.models.data.records import normalize_answer

# Places of a ranking that are scored.
CUTS = (2, 5, 10, 15)
_CLOSED_ANSWERS = {"yes", "no", "noanswer"}
# TriviaQA's script takes these for spaces, where SQuAD's leaves punctuation out.
_TRIVIAQA_SPACES = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " "))


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """The answer equals a gold answer, case, articles and punctuation aside (SQuAD's rule)."""
    normal = normalize_answer(prediction)
    return float(any(normal == normalize_answer(answer) for answer in answers))


def accuracy(prediction: str, answers: Sequence[str]) -> float:
    """The answer is the gold label, case and punctuation aside (RAS, eq. 13).

    For multiple choice and fact checks: the choice "A" normalises to "a", never to nothing.
    """
    # Normalisation keeps a text of nothing but articles as it is, so "A." would differ from "A" while "B." is "B".
    return exact_match(_bare(prediction), [_bare(answer) for answer in answers])


def label_accuracy(prediction: str, answers: Sequence[str]) -> float:
    """The label that the answer gives, in a sentence or alone, is the gold one; a refusal gives none.

    A label is yes or no, true or false, the letter of a choice, or a name. What is called the answer counts, else what
    stands in front; where the reply names several and calls none the answer, it is wrong. Labels are words ("cannot"
    holds no "no"), and clauses that refuse are passed over. A gold answer that is a refusal is matched by one in any
    words that stands beside no label.
    """
    return float(any(accuracy(prediction, [answer]) or has_label(prediction, answer) for answer in answers))


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Overlap of answer and gold answer in words, the best over aliases (RAS, eq. 10-12; MuSiQue's rule)."""
    tokens = normalize_answer(prediction).split()
    return max(_token_f1(tokens, normalize_answer(answer).split()) for answer in answers)


def f1_hotpotqa(prediction: str, answers: Sequence[str]) -> float:
    """As f1, but 0 when only one side is yes or no (official HotpotQA and 2Wiki rule).

    A prediction that is not equal to the gold answer scores 0 as soon as one of them is yes, no or noanswer, so
    "Yes, both are American" gets nothing for the gold answer "yes".
    """
    normal, best = normalize_answer(prediction), 0.0
    for gold in map(normalize_answer, answers):
        if normal == gold or not {normal, gold} & _CLOSED_ANSWERS:
            best = max(best, _token_f1(normal.split(), gold.split()))
    return best


def exact_match_triviaqa(prediction: str, answers: Sequence[str]) -> float:
    """The answer equals a gold answer by TriviaQA's official rule, in which punctuation separates words."""
    return exact_match(_spaced(prediction), [_spaced(answer) for answer in answers])


def f1_triviaqa(prediction: str, answers: Sequence[str]) -> float:
    """Overlap in words by TriviaQA's official rule, in which punctuation separates words."""
    return f1(_spaced(prediction), [_spaced(answer) for answer in answers])


def golden_match(prediction: str, answers: Sequence[str]) -> float:
    """A gold answer occurs in the answer, case, articles and punctuation aside (RAS, eq. 9).

    A substring test, as in the paper, which a refusal or a list of guesses can pass ("cannot" holds "no"): it is not
    for letters, nor for yes and no.
    """
    normal = normalize_answer(prediction)
    return float(any(normalize_answer(answer) in normal for answer in answers))


def match_raw(prediction: str, answers: Sequence[str]) -> float:
    """A gold answer occurs in the answer exactly as written (Self-RAG's match)."""
    return float(any(answer in prediction for answer in answers))


def str_em(prediction: str, short_answers: Sequence[Sequence[str]]) -> float:
    """Share of the readings of the question with a short answer that occurs in the answer (ASQA's STR-EM)."""
    normal = normalize_answer(prediction)
    found = [any(normalize_answer(alias) in normal for alias in reading) for reading in short_answers]
    return sum(found) / len(found)


def rouge_lsum(prediction: str, answers: Sequence[str]) -> float:
    """ROUGE-Lsum, F-measure with stemming, against the closest gold answer (ASQA's ROUGE-L).

    Sentences come from sentencex; the official script takes NLTK's, whose model can't be bundled.
    """
    return _best("rougeLsum", _lines(prediction), [_lines(answer) for answer in answers])


def rouge_l(prediction: str, answers: Sequence[str]) -> float:
    """ROUGE-L of the whole answer, F-measure with stemming, against the closest gold answer."""
    return _best("rougeL", prediction, answers)


def recall(ranking: Sequence[str], supporting: Collection[str], k: int | None = None) -> float:
    """Share of the supporting passages that stand in the first k places of the final ranking."""
    return len(set(supporting).intersection(ranking[:k])) / len(set(supporting))


def precision(ranking: Sequence[str], supporting: Collection[str], k: int) -> float:
    """Share of the first k places of the final ranking that hold a supporting passage; a place may be empty."""
    return len(set(supporting).intersection(ranking[:k])) / k


def ndcg(ranking: Sequence[str], supporting: Collection[str], k: int) -> float:
    """Gain (1 / log2(place + 1)) in the first k places of the final ranking, as a share of the best possible."""
    gains = [1 / math.log2(place + 1) for place in range(1, k + 1)]
    found = sum(gain for gain, passage in zip(gains, ranking) if passage in supporting)
    return found / sum(gains[: len(set(supporting))])


def mrr(ranking: Sequence[str], supporting: Collection[str]) -> float:
    """One over the place of the first supporting passage in the final ranking; 0 where there is none."""
    return next((1 / place for place, passage in enumerate(ranking, 1) if passage in supporting), 0.0)


def _spaced(text: str) -> str:
    spaced = text.translate(_TRIVIAQA_SPACES)
    return spaced if spaced.strip() else text


def _bare(label: str) -> str:
    bare = label.strip(string.punctuation + string.whitespace)
    # What is left may be blank all the same: a control character such as the unit separator.
    return bare if bare.strip() else label


def _token_f1(prediction: list[str], gold: list[str]) -> float:
    common = sum((Counter(prediction) & Counter(gold)).values())
    if not common:
        return 0.0
    precision, recall = common / len(prediction), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def _best(kind: str, prediction: str, answers: Sequence[str]) -> float:
    return max(float(_scorer(kind).score(answer, prediction)[kind].fmeasure) for answer in answers)


@lru_cache(maxsize=2)
def _scorer(kind: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # imports nltk, which takes a while

    return RougeScorer([kind], use_stemmer=True)


def _lines(text: str) -> str:
    from tripletune.rag.retrievers import split_sentences

    return "\n".join(split_sentences(text))
