"""How sure an answer is, and the reply "I don't know" instead of an answer that is less sure than a user wants.

Three measures, each from 0 to 1: what the model says of its own tokens ("probability"), what it answers when it is
asked again with chance ("agreement"), and what it read ("support"). None of them is a probability of being right until
it was compared with right answers: `tripletune eval report` does that (calibration, risk and coverage).
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from tripletune.core.calls import SAMPLE_SEED, CallError
from tripletune.core.data.answers import YES_NO, normalize_answer, normalize_name
from tripletune.llm.question_client import CALLS
from tripletune.rag import Trace
from tripletune.rag.evidence import Evidence

if TYPE_CHECKING:
    from tripletune.rag.systems import AnswerOptions

PROBABILITY, AGREEMENT, SUPPORT = "probability", "agreement", "support"
# Measures by name, in the words of tables.
MEASURES = {
    PROBABILITY: "geometric mean of the probabilities of the answer's tokens",
    AGREEMENT: "share of sampled answers that equal the answer",
    SUPPORT: "largest share of the answer's words in one fact or passage that was read",
}
ABSTENTION = "I don't know"
# Details of a trace that are costs.
_COSTS = ("tokens", "calls", "read")
# Digits that are kept: on other hardware the last digits of a sum of 32-bit numbers differ.
_DIGITS = 4


async def note_confidence(
    trace: Trace, options: AnswerOptions, evidence: Evidence, answer: Callable[[], Awaitable[str]]
) -> None:
    """Add the measures of the answer in a trace to `trace.confidence`, and withhold an answer that is not sure enough.

    The log-probabilities are in the trace already, since `Trace.count` notes them.

    Args:
        evidence: What the answer's reader saw.
        answer: Asks for the answer again.
    """
    if options.answer_samples:
        await _note_agreement(trace, options.answer_samples, answer)
    support = support_of(trace.answer, [*evidence.facts, *(passage.content for passage in evidence.passages)])
    if support is not None:
        trace.confidence[SUPPORT] = round(support, _DIGITS)
    if options.abstain is not None:
        _withhold_if_unsure(trace, options.abstain, options.confidence)


async def _note_agreement(trace: Trace, samples: int, answer: Callable[[], Awaitable[str]]) -> None:
    """Ask for the answer again with seeds, at temperature 1, and note how many replies are the same answer.

    The calls count as the question's. Where the answer comes from the loop itself (IRCoT's last thought), asking again
    makes no call, and the agreement is not known.
    """
    calls = trace.calls
    # What a system notes of its answer is that of the answer, not of a sample; only the cost is that of both.
    confidence = dict(trace.confidence)
    tallies = dict(trace.tallies)
    details = {name: copy.copy(value) for name, value in trace.details.items() if name not in _COSTS}
    normalized = normalize_answer(trace.answer)
    equal = 0
    for seed in range(samples):
        token = SAMPLE_SEED.set(seed)
        try:
            equal += normalize_answer(await answer()) == normalized
        finally:
            SAMPLE_SEED.reset(token)
    trace.confidence = confidence
    trace.details |= details
    paid = {name: count for name, count in trace.tallies.items() if name.startswith(CALLS)}
    trace.tallies = tallies | paid
    if trace.calls > calls:
        trace.confidence[AGREEMENT] = round(equal / samples, _DIGITS)


def support_of(answer: str, texts: Iterable[str]) -> float | None:
    """The largest share of an answer's distinct words that one text has; 1 if a text names the answer.

    None for yes and no, which no fact names, and for an empty answer.
    """
    words = set(normalize_name(answer).split())
    if not words or words <= set(YES_NO):
        return None
    best = 0.0
    for text in texts:
        common = words.intersection(normalize_name(text).split())
        best = max(best, len(common) / len(words))
    return best


def _withhold_if_unsure(trace: Trace, least: float, measure: str) -> None:
    """Replace an answer that is less sure than `least` by "I don't know"; the trace keeps what was withheld.

    An answer without support, because it is yes or no, is given: nothing speaks against it.

    Raises:
        CallError: The measure is not known, so that an answer can be neither given nor withheld.
    """
    measured = trace.confidence.get(measure)
    if measured is None and measure != SUPPORT and trace.answer:
        raise CallError(f"abstain {least:g}: the {measure} of this answer is not known. {_ADVICE_WITHOUT[measure]}")
    if measured is not None and measured < least:
        trace.withheld = trace.answer
        trace.answer = ABSTENTION


_ADVICE_WITHOUT = {
    PROBABILITY: "The model's server, or a ledger of an earlier version, gives no log-probabilities, or the answer is "
    "a part of a longer reply: set confidence to support, or to agreement with answer_samples, for example 5",
    AGREEMENT: "The answer comes from the loop's own last reply, which is not sampled again: set confidence to support",
}
