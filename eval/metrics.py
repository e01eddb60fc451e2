"""Answer metrics; each takes one prediction and all gold answers (the first and its aliases), and gives 0 to 1.

Names keep rules apart that papers mix up: `f1` is plain token F1 (RAS, eq. 10-12), `f1_hotpotqa` the official rule of
HotpotQA and 2WikiMultiHopQA; `golden_match` normalises both sides (RAS, eq. 9), `match_raw` is Self-RAG's
case-sensitive test. An empty prediction scores 0 everywhere: refusals stay in the denominator.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tripletune.models.data.records import normalize_answer

_CLOSED_ANSWERS = ("yes", "no", "noanswer")


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 when prediction and some gold answer are equal after normalisation (SQuAD's rule).

    Args:
        prediction: The model's answer.
        answers: Gold answers; blank ones are passed over.

    Raises:
        TypeError: `answers` is a string, which would be compared letter by letter.
        ValueError: there is no gold answer.
    """
    normal = normalize_answer(prediction)
    return float(any(normal == normalize_answer(answer) for answer in _checked(answers)))


def accuracy(prediction: str, answers: Sequence[str]) -> float:
    """1 when the prediction is the label after normalisation (RAS, eq. 13); for multiple choice and fact checks.

    Args:
        prediction: The model's answer.
        answers: The gold label; the choice "A" normalises to "a", never to nothing.

    Raises:
        TypeError: `answers` is a string.
        ValueError: there is no gold answer.
    """
    # Normalisation keeps a text of nothing but articles as it is, so "A." would differ from "A" while "B." is "B".
    return exact_match(_bare(prediction), [_bare(answer) for answer in _checked(answers)])


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Token F1 over normalised tokens (RAS, eq. 10-12), the best over the gold answers (MuSiQue's rule for aliases).

    Args:
        prediction: The model's answer.
        answers: Gold answers.

    Raises:
        TypeError: `answers` is a string.
        ValueError: there is no gold answer.
    """
    tokens = normalize_answer(prediction).split()
    return max(_token_f1(tokens, normalize_answer(answer).split()) for answer in _checked(answers))


def f1_hotpotqa(prediction: str, answers: Sequence[str]) -> float:
    """Token F1 by the official HotpotQA and 2WikiMultiHopQA rule.

    A prediction that is not equal to the gold answer scores 0 as soon as one of them is yes, no or noanswer, so
    "Yes, both are American" gets nothing for the gold answer "yes".

    Args:
        prediction: The model's answer.
        answers: Gold answers.

    Raises:
        TypeError: `answers` is a string.
        ValueError: there is no gold answer.
    """
    normal = normalize_answer(prediction)
    best = 0.0
    for gold in map(normalize_answer, _checked(answers)):
        if normal != gold and (normal in _CLOSED_ANSWERS or gold in _CLOSED_ANSWERS):
            continue
        best = max(best, _token_f1(normal.split(), gold.split()))
    return best


def golden_match(prediction: str, answers: Sequence[str]) -> float:
    """1 when some gold answer occurs in the prediction, both normalised (RAS, eq. 9).

    A substring test, as in the paper: it is not for answers of one letter.

    Args:
        prediction: The model's answer.
        answers: Gold answers.

    Raises:
        TypeError: `answers` is a string.
        ValueError: there is no gold answer.
    """
    normal = normalize_answer(prediction)
    return float(any(normalize_answer(answer) in normal for answer in _checked(answers)))


def match_raw(prediction: str, answers: Sequence[str]) -> float:
    """1 when some gold answer occurs in the prediction as it is written (Self-RAG's `match`, case-sensitive).

    Args:
        prediction: The model's answer.
        answers: Gold answers.

    Raises:
        TypeError: `answers` is a string.
        ValueError: there is no gold answer.
    """
    return float(any(answer in prediction for answer in _checked(answers)))


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric with the sentence that tables print about it."""

    score: Callable[[str, Sequence[str]], float]
    explanation: str


METRICS: dict[str, Metric] = {
    "exact_match": Metric(exact_match, "the answer equals a gold answer, case, articles and punctuation aside"),
    "accuracy": Metric(accuracy, "the answer is the gold label, case and punctuation aside"),
    "f1": Metric(f1, "overlap of answer and gold answer in words, the best over aliases"),
    "f1_hotpotqa": Metric(
        f1_hotpotqa, "as f1, but 0 when only one side is yes or no (official HotpotQA and 2Wiki rule)"
    ),
    "golden_match": Metric(golden_match, "a gold answer occurs in the answer, case, articles and punctuation aside"),
    "match_raw": Metric(match_raw, "a gold answer occurs in the answer exactly as written (Self-RAG's match)"),
}


def score_answer(prediction: str, answers: Sequence[str], metrics: Sequence[str]) -> dict[str, float]:
    """Score one prediction with several metrics.

    Raises:
        ValueError: a metric is unknown, or there is no gold answer.
    """
    unknown = [name for name in metrics if name not in METRICS]
    if unknown:
        raise ValueError(f"metric {unknown[0]!r} is not one of {', '.join(METRICS)}")
    return {name: METRICS[name].score(prediction, answers) for name in metrics}


def _checked(answers: Sequence[str]) -> list[str]:
    if isinstance(answers, str):
        raise TypeError(f"gold answers are the string {answers!r}: give a list of answers, or it is read by letters")
    # A blank alias would occur in every prediction.
    filled = [answer for answer in answers if answer.strip()]
    if not filled:
        raise ValueError(f"gold answers are {list(answers)!r}: a metric needs one that is not blank")
    return filled


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
