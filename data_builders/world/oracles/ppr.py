"""The filter of the PageRank system: which of the facts shown the question needs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tripletune.data_builders.world.oracle import WorldOracle
from tripletune.models.llm import Message
from tripletune.rag.retrievers import verbalise


def keep(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The numbers of the gold facts."""
    facts, _, text = messages[-1]["content"].rpartition("\n\nQuestion: ")
    wanted = {verbalise(hop.triple) for hop in oracle.hops_of(text)}
    lines = facts.splitlines()[1:]
    return json.dumps([n for n, line in enumerate(lines, 1) if line.partition(". ")[2] in wanted])


REPLIES = {"filter": keep}
