"""IRCoT's thoughts: the facts that the passages state, then the question that is still open, or the answer."""

from __future__ import annotations

from collections.abc import Sequence

from tripletune.data_builders.world.oracle import WorldOracle
from tripletune.data_builders.world.oracles.ppr import keep
from tripletune.models.llm import Message


def think(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The next thought; in other words when it was there before."""
    passages, _, rest = messages[-1]["content"].partition("\n\nQuestion: ")
    text, *thoughts = rest.split("\n")
    question = oracle.question(text)
    missing = [hop for hop in oracle.hops(question) if not hop.stands_in(passages)]
    if not missing:
        return f"So the answer is: {question.answer}"
    return next((query for query in missing[0].queries if query not in thoughts), missing[0].queries[0])


REPLIES = {"think": think, "filter": keep}
