"""RAS's plans and answers on a chat model, from the triples of its steps."""

from __future__ import annotations

from collections.abc import Sequence

from tripletune.data_builders.world.oracle import GoldHop, WorldOracle
from tripletune.data_builders.world.questions import WorldQuestion
from tripletune.models.data.triples import parse_triples
from tripletune.models.llm import Message
from tripletune.rag.chat_generator import REFUSAL


def plan(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The first sub-query whose fact was not found, in other words when it was asked before; else that it suffices."""
    question, missing = _missing(oracle, messages)
    asked = messages[-1]["content"].splitlines()
    if missing:
        query = next((one for one in missing[0].queries if f"[SUBQ] {one}" not in asked), missing[0].queries[0])
        return f"[SUBQ] {query}"
    return "[SUFFICIENT]" if oracle.hops(question) else "[NO_RETRIEVAL]"


def answer(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The answer, where every gold fact was found."""
    question, missing = _missing(oracle, messages)
    return REFUSAL if missing else question.answer


def _missing(oracle: WorldOracle, messages: Sequence[Message]) -> tuple[WorldQuestion, list[GoldHop]]:
    *lines, last = messages[-1]["content"].splitlines()
    found = {triple for line in lines for triple in parse_triples(line).triples}
    question = oracle.question(last.removeprefix("Question: "))
    return question, [hop for hop in oracle.hops(question) if hop.triple not in found]


REPLIES = {"plan": plan, "answer": answer}
