"""ReAct's actions: a search for the first fact that no observation states, or the answer."""

from __future__ import annotations

from collections.abc import Sequence

from tripletune.data_builders.world.oracle import WorldOracle
from tripletune.models.llm import Message


def act(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The next thought and action."""
    users = [turn["content"] for turn in messages if turn["role"] == "user"]
    said = "\n".join(turn["content"] for turn in messages if turn["role"] == "assistant")
    question = oracle.question(users[0].removeprefix("Question: "))
    missing = [hop for hop in oracle.hops(question) if not hop.stands_in("\n\n".join(users[1:]))]
    if not missing:
        return f"Thought: I know everything that is needed.\nAction: Finish[{question.answer}]"
    fact = missing[0].triple
    query = next((query for query in missing[0].queries if f"[{query}]" not in said), missing[0].queries[0])
    return f"Thought: I need the {fact.predicate} of {fact.subject}.\nAction: Search[{query}]"


REPLIES = {"act": act}
