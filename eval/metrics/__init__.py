"""Metrics, found by their place: every public function in this module or folder is a metric with the function's name.

A new metric is one file with `def NAME(prediction: str, answers: Sequence[str]) -> float`, whose docstring begins with
the sentence that tables print. Then a task's YAML can name the metric. The gold answers include all aliases, and none
is blank. A metric whose second argument is `short_answers` gets ASQA's short answers instead (for each reading of the
question, its aliases). A metric whose second argument is `supporting` gets the final ranking of passages
(`eval/rescore.py:final_ranking`) and the ids of the supporting passages. A metric with an argument `k` has one name for
each of `CUTS`, such as `recall@5`.

The metrics of the papers are here. Each returns 0 to 1, and 0 for an empty prediction. Different rules that papers call
by one name have different names: `f1` is plain token F1 (RAS, eq. 10-12), and `f1_hotpotqa` is the official rule of
HotpotQA and 2WikiMultiHopQA; `golden_match` normalises both sides (RAS, eq. 9), and `match_raw` is Self-RAG's
case-sensitive test.

The metrics of answers are for English, as in the official scripts: a, an and the are articles, only ASCII punctuation
is dropped, and words stand between spaces. In other languages with spaces, articles and other punctuation count. In
scripts without spaces (Chinese, Japanese, Thai), an answer is one word, so `f1` is all or nothing; `rouge_l` and
`rouge_lsum` compare characters there. `match_raw` and the metrics of rankings fit all languages. `label_accuracy` finds
English labels and refusals only.
"""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Literal

from tripletune.core.data.answers import normalize_answer
from tripletune.eval.metrics._labels import has_label
from tripletune.eval.rouge import rouge_scorer

# Kinds of ROUGE by their names in `rouge-score`: over the whole text, or over its lines.
RougeKind = Literal["rougeL", "rougeLsum"]
# The values of `k` at which rankings are scored.
CUTS = (2, 5, 10, 15)
_CLOSED_ANSWERS = {"yes", "no", "noanswer"}
# TriviaQA's script replaces these with spaces; SQuAD's script removes punctuation.
_TRIVIAQA_SPACES = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " "))


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """The answer equals a gold answer, ignoring case, articles and punctuation (SQuAD's rule)."""
    normal = normalize_answer(prediction)
    return float(any(normal == normalize_answer(answer) for answer in answers))


def accuracy(prediction: str, answers: Sequence[str]) -> float:
    """The answer is the gold label, ignoring case and punctuation (RAS, eq. 13).

    For multiple choice and fact checks: the choice "A" normalises to "a", never to an empty text.
    """
    # Answer normalisation does not change a text of articles only, so "A." would differ from "A", unlike "B." and "B".
    return exact_match(_without_outer_punctuation(prediction), list(map(_without_outer_punctuation, answers)))


def label_accuracy(prediction: str, answers: Sequence[str]) -> float:
    """The label in the answer, alone or in a sentence, is the gold label; a refusal has no label.

    A label is yes or no, true or false, the letter of a choice, or a name. The label that the reply calls its answer
    counts, or else the label at the start. A reply with several labels, none called the answer, is wrong. Labels are
    whole words ("cannot" has no label "no"), and refusing clauses are ignored. If the gold answer is a refusal, any
    refusal without a label is right.
    """
    return float(any(accuracy(prediction, [answer]) or has_label(prediction, answer) for answer in answers))


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Word overlap of answer and gold answer, the best over aliases (RAS, eq. 10-12; MuSiQue's rule)."""
    tokens = normalize_answer(prediction).split()
    return max(_token_f1(tokens, normalize_answer(answer).split()) for answer in answers)


def f1_hotpotqa(prediction: str, answers: Sequence[str]) -> float:
    """Like f1, but 0 if only one side is yes or no (official HotpotQA and 2Wiki rule).

    If the prediction or the gold answer is yes, no or noanswer and they differ, the score is 0. So "Yes, both are
    American" scores 0 for the gold answer "yes".
    """
    normal = normalize_answer(prediction)
    best = 0.0
    for answer in answers:
        gold = normalize_answer(answer)
        has_closed_answer = normal in _CLOSED_ANSWERS or gold in _CLOSED_ANSWERS
        if normal == gold or not has_closed_answer:
            best = max(best, _token_f1(normal.split(), gold.split()))
    return best


def exact_match_triviaqa(prediction: str, answers: Sequence[str]) -> float:
    """The answer equals a gold answer by TriviaQA's official rule, in which punctuation separates words."""
    return exact_match(_spaces_for_punctuation(prediction), list(map(_spaces_for_punctuation, answers)))


def f1_triviaqa(prediction: str, answers: Sequence[str]) -> float:
    """Word overlap by TriviaQA's official rule, in which punctuation separates words."""
    return f1(_spaces_for_punctuation(prediction), list(map(_spaces_for_punctuation, answers)))


def golden_match(prediction: str, answers: Sequence[str]) -> float:
    """A gold answer occurs in the answer, ignoring case, articles and punctuation (RAS, eq. 9).

    This is a substring test, as in the paper. A refusal or a list of guesses can pass it ("cannot" contains "no"), so
    it does not fit gold answers that are letters, yes or no.
    """
    normal = normalize_answer(prediction)
    return float(any(normalize_answer(answer) in normal for answer in answers))


def match_raw(prediction: str, answers: Sequence[str]) -> float:
    """A gold answer occurs in the answer exactly as written (Self-RAG's match)."""
    return float(any(answer in prediction for answer in answers))


def str_em(prediction: str, short_answers: Sequence[Sequence[str]]) -> float:
    """Share of the question's readings whose short answer occurs in the answer (ASQA's STR-EM)."""
    normal = normalize_answer(prediction)
    answered = 0
    for aliases in short_answers:
        answered += any(normalize_answer(alias) in normal for alias in aliases)
    return answered / len(short_answers)


def rouge_lsum(prediction: str, answers: Sequence[str]) -> float:
    """ROUGE-Lsum, F-measure with stemming, against the closest gold answer (ASQA's ROUGE-L).

    sentencex splits the sentences; the official script uses NLTK, whose model can't be bundled.
    """
    return _best_rouge("rougeLsum", _sentence_lines(prediction), list(map(_sentence_lines, answers)))


def rouge_l(prediction: str, answers: Sequence[str]) -> float:
    """ROUGE-L of the whole answer, F-measure with stemming of English, against the closest gold answer."""
    return _best_rouge("rougeL", prediction, answers)


def recall(ranking: Sequence[str], supporting: Collection[str], k: int | None = None) -> float:
    """Share of the supporting passages that are in the first k places of the final ranking."""
    return len(set(supporting).intersection(ranking[:k])) / len(set(supporting))


def precision(ranking: Sequence[str], supporting: Collection[str], k: int) -> float:
    """Share of the first k places of the final ranking that have a supporting passage; empty places count."""
    return len(set(supporting).intersection(ranking[:k])) / k


def retrieval_f1(ranking: Sequence[str], supporting: Collection[str], k: int | None = None) -> float:
    """F1 of the first k places of the final ranking and the supporting passages (TH-RAG, table 3)."""
    ranked = set(ranking[:k])
    common = len(ranked.intersection(supporting))
    return 2 * common / (len(ranked) + len(set(supporting)))


def ndcg(ranking: Sequence[str], supporting: Collection[str], k: int) -> float:
    """Gain (1 / log2(place + 1)) in the first k places of the final ranking, as a share of the best possible."""
    gains = [1 / math.log2(place + 1) for place in range(1, k + 1)]
    # The ranking may be shorter or longer than the places that count.
    gained = sum(gain for gain, passage in zip(gains, ranking) if passage in supporting)
    # The best possible ranking starts with all supporting passages.
    best = sum(gains[: len(set(supporting))])
    return gained / best


def mrr(ranking: Sequence[str], supporting: Collection[str]) -> float:
    """One over the place of the first supporting passage in the final ranking; 0 if no place has one."""
    for place, passage in enumerate(ranking, 1):
        if passage in supporting:
            return 1 / place
    return 0.0


def _spaces_for_punctuation(text: str) -> str:
    """A text with spaces for punctuation; a text of punctuation only stays, since a blank gold answer fits all."""
    spaced = text.translate(_TRIVIAQA_SPACES)
    return spaced if spaced.strip() else text


def _without_outer_punctuation(label: str) -> str:
    """A label without punctuation around it; a label of punctuation only stays, since a blank gold label fits all."""
    bare = label.strip(string.punctuation + string.whitespace)
    # What is left may be a control character, such as the unit separator, which `str.strip` counts as a space.
    return bare if bare.strip() else label


def _token_f1(prediction: list[str], gold: list[str]) -> float:
    """F1 of two bags of words; a word that both have several times counts as often as the rarer side has it."""
    common = sum((Counter(prediction) & Counter(gold)).values())
    if not common:
        return 0.0
    precision = common / len(prediction)
    recall = common / len(gold)
    return 2 * precision * recall / (precision + recall)


def _best_rouge(kind: RougeKind, prediction: str, answers: Sequence[str]) -> float:
    """The F-measure of ROUGE against the closest gold answer, since each gold answer alone is right."""
    scorer = rouge_scorer((kind,), stems=True)
    return max(float(scorer.score(answer, prediction)[kind].fmeasure) for answer in answers)


def _sentence_lines(text: str) -> str:
    """A text with one sentence per line, which is how ROUGE-Lsum wants it."""
    from tripletune.rag.search.retrievers import split_sentences

    return "\n".join(split_sentences(text))
