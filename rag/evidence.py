"""The evidence for a question's last call, and the part of it that fits a budget.

A loop finds evidence round by round. The last rounds search for what the first ones lacked, so a budget that keeps the
first passages drops what the loop was for. Here every round keeps its best.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple, TypeVar

from tripletune.core.data.passages import Passage
from tripletune.rag import Trace

T = TypeVar("T")
_BYTES_PER_TOKEN = 4


class Evidence(NamedTuple):
    """What a prompt shows: distinct passages, and distinct facts of one line each, in the order found."""

    passages: list[Passage]
    facts: list[str]

    @property
    def size(self) -> int:
        """Number of passages and facts."""
        return len(self.passages) + len(self.facts)


@dataclass(frozen=True, slots=True)
class Found:
    """Evidence that a system found for its last call, by round, best first in each round.

    Attributes:
        passages: Rounds of passages. A system that ranks its passages at the end has one round.
        facts: Rounds of facts that the passages state, such as triples; each is one line of a prompt.
    """

    passages: Sequence[Sequence[Passage]] = ()
    facts: Sequence[Sequence[str]] = ()

    def everything(self) -> Evidence:
        """All evidence, each passage and fact once, in the order found."""
        facts: dict[str, None] = {}
        for facts_of_round in self.facts:
            facts |= dict.fromkeys(facts_of_round)
        return Evidence(distinct_passages(self.passages), list(facts))

    def within(self, tokens: int) -> Evidence:
        """The part that fits a budget of tokens (4 bytes each): facts up to half of the budget, then passages.

        Bytes are counted, so that all systems get the same room whatever model reads it. The best facts and passages of
        each round come first (`by_worth`), but what is kept stays in the order in which it was found. If no passage
        fits, the beginning of the best one is kept.

        Args:
            tokens: The budget, `reader_tokens`.
        """
        everything = self.everything()
        room = _BYTES_PER_TOKEN * tokens
        fact_sizes = [(fact, len(fact.encode())) for fact in by_worth(self.facts)]
        kept_facts = _keys_that_fit(fact_sizes, room // 2)
        facts = [fact for fact in everything.facts if fact in kept_facts]
        room -= sum(len(fact.encode()) for fact in facts)

        ranked_passages = by_worth(self.passages)
        passage_sizes = [(passage.id, len(passage.content.encode())) for passage in ranked_passages]
        kept_ids = _keys_that_fit(passage_sizes, room)
        passages = [passage for passage in everything.passages if passage.id in kept_ids]
        if ranked_passages and not passages:
            # Every passage is longer than the budget: keep the beginning of the best.
            best = ranked_passages[0]
            beginning = best.text.encode()[:room].decode(errors="ignore")
            passages = [replace(best, text=beginning)]
        return Evidence(passages, facts)


def passages_by_round(trace: Trace) -> list[list[Passage]]:
    """The passages of each search of a question, best first; a stored trace has only their ids."""
    rounds = []
    for step in trace.steps:
        rounds.append([trace.found[hit["id"]] for hit in step.passages])
    return rounds


def by_worth(rounds: Sequence[Sequence[T]]) -> list[T]:
    """The best of each round, then the second of each, and so on; among equals, the last round comes first.

    An item that was found in several rounds comes several times.
    """
    ordered: list[T] = []
    for items_of_rank in zip_longest(*reversed(rounds)):
        ordered += [item for item in items_of_rank if item is not None]
    return ordered


def distinct_passages(rounds: Sequence[Sequence[Passage]]) -> list[Passage]:
    """Each passage once, in the order found; passages are the same if their ids are."""
    passages: dict[str, Passage] = {}
    for passages_of_round in rounds:
        for passage in passages_of_round:
            passages.setdefault(passage.id, passage)
    return list(passages.values())


def best_passages(rounds: Sequence[Sequence[Passage]], count: int) -> list[Passage]:
    """At most `count` distinct passages, chosen by worth, in the order found."""
    kept = dict.fromkeys(passage.id for passage in by_worth(rounds))
    kept_ids = set(list(kept)[:count])
    return [passage for passage in distinct_passages(rounds) if passage.id in kept_ids]


def _keys_that_fit(sizes: Iterable[tuple[str, int]], room: int) -> set[str]:
    """The keys of items that fit into `room` bytes, best first; an item that is too long makes way for shorter ones.

    Args:
        sizes: Key and bytes of each item, in the order of worth; repeated keys count once.
    """
    kept: set[str] = set()
    for key, size in sizes:
        if key not in kept and size <= room:
            kept.add(key)
            room -= size
    return kept
