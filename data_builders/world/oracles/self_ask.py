"""Self-Ask's follow-up questions: the sub-query of the first hop without an intermediate answer, or the answer."""

from __future__ import annotations

from collections.abc import Sequence

from tripletune.data_builders.world.oracle import WorldOracle
from tripletune.models.llm import Message


def follow_up(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The next follow-up question; in other words when its answer was none."""
    first, *rest = messages[-1]["content"].splitlines()
    question = oracle.question(first.removeprefix("Question: "))
    queries = [line.removeprefix("Follow up: ") for line in rest[0::2]]
    answers = [line.removeprefix("Intermediate answer: ") for line in rest[1::2]]
    for hop in oracle.hops(question):
        if (hop.triple.object, True) not in [(answer, query in hop.queries) for query, answer in zip(queries, answers)]:
            return f"Follow up: {next((query for query in hop.queries if query not in queries), hop.queries[0])}"
    return f"So the final answer is: {question.answer}"


REPLIES = {"follow_up": follow_up}
