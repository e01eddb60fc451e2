"""GEAR's reader, its verdict and the next question, from the passages and facts that it is shown."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tripletune.data_builders.world.oracle import GoldHop, WorldOracle
from tripletune.models.data.triples import Triple
from tripletune.models.llm import Message


def read(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The gold facts that the passages state, and that were not found before."""
    passages, _, text = messages[-1]["content"].rpartition("Question: ")
    passages, _, facts = passages.partition("\n\nFacts found before:\n")
    known = _facts(facts)
    hops = oracle.hops_of(text)
    found = [hop.triple for hop in hops if hop.stands_in(passages) and hop.triple not in known]
    return "\n".join(json.dumps(triple.as_list(), ensure_ascii=False) for triple in found) or "NONE"


def reason(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """Whether the facts hold every gold fact."""
    facts, _, text = messages[-1]["content"].partition("\n\nQuestion: ")
    if missing := _missing(oracle, facts, text):
        fact = missing[0].triple
        return f"Answerable: No\nWhy: The {fact.predicate} of {fact.subject} is missing."
    return f"Answerable: Yes\nAnswer: {oracle.question(text).answer}"


def rewrite(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The sub-query of the first missing fact."""
    facts, _, rest = messages[-1]["content"].partition("\n\nQuestion: ")
    return _missing(oracle, facts, rest.partition("\n\nReason: ")[0])[0].queries[0]


def _missing(oracle: WorldOracle, facts: str, text: str) -> list[GoldHop]:
    known = _facts(facts)
    return [hop for hop in oracle.hops_of(text) if hop.triple not in known]


def _facts(text: str) -> set[Triple]:
    return {Triple(*json.loads(line)) for line in text.splitlines() if line.startswith("[")}


REPLIES = {"read": read, "reason": reason, "rewrite": rewrite}
