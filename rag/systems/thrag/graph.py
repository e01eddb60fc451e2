"""TH-RAG's graph of three levels: topics, subtopics, entities, with a sentence on every triple (algorithm 1)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from tripletune.models.data.records import Passage
from tripletune.models.data.triples import Triple
from tripletune.models.llm import LLMClient
from tripletune.models.llm.question_client import PromptSet, QuestionClient
from tripletune.models.llm.replies import UnusableReply, all_of, json_values, triple_of
from tripletune.rag import Trace
from tripletune.rag.extractor import ask_of_passage
from tripletune.rag.index import PassageStore
from tripletune.rag.triple_index import entity_key

logger = logging.getLogger(__name__)

EXTRACTION = "thrag_extract"
_FORM = (
    'write a JSON list of {"triple": [subject, relation, object], "sentence": "…", "subject": {"subtopic": "…", '
    '"main_topic": "…"}, "object": {"subtopic": "…", "main_topic": "…"}} and nothing else'
)
_BUILT: WeakKeyDictionary[LLMClient, dict[str, asyncio.Task[TopicGraph]]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Statement:
    """A triple as the passage at `position` and a sentence of it state it.

    `labels` are subtopic and topic of the subject and of the object.
    """

    triple: Triple
    sentence: str
    labels: tuple[tuple[str, str], tuple[str, str]]
    position: int = -1


class TopicGraph:
    """The graph of a corpus. Labels and names that differ in case or articles alone are one node.

    Attributes:
        statements: All triples of the corpus, by row.
        topics: The topics as they were first written, in order of appearance.
        spent: Calls, tokens read and written of extraction, by role; `cached`, those that were not sent.
    """

    def __init__(self, statements: Iterable[Statement]) -> None:
        self.statements = list(statements)
        self.spent: dict[str, list[int]] = {}
        self.cached: dict[str, list[int]] = {}
        self._labels: dict[str, str] = {}
        self._under: dict[str, dict[str, None]] = {}
        self._members: dict[str, dict[str, None]] = {}
        self._edges: dict[str, list[int]] = {}
        for row, one in enumerate(self.statements):
            for name, (subtopic, topic) in zip((one.triple.subject, one.triple.object), one.labels):
                entity, low, high = entity_key(name), entity_key(subtopic), entity_key(topic)
                self._labels.setdefault(low, subtopic)
                self._labels.setdefault(high, topic)
                self._under.setdefault(high, {})[low] = None
                self._members.setdefault(low, {})[entity] = None
                self._edges.setdefault(entity, []).append(row)
        self.topics = [self._labels[topic] for topic in self._under]

    def subtopics(self, topic: str) -> list[str]:
        """The subtopics of a topic, in order of appearance."""
        return [self._labels[one] for one in self._under.get(entity_key(topic), ())]

    def candidates(self, subtopics: Iterable[str], hops: int = 1) -> list[int]:
        """Rows of all triples of the entities under subtopics, and of those less than `hops` steps away from these."""
        entities = {entity for one in subtopics for entity in self._members.get(entity_key(one), ())}
        rows = {row for entity in entities for row in self._edges[entity]}
        for _ in range(hops - 1):
            entities = {entity_key(name) for row in rows for name in self.statements[row].triple.as_list()[::2]}
            rows = {row for entity in entities for row in self._edges[entity]}
        return sorted(rows)

    def statistics(self) -> dict[str, int | float]:
        """Nodes and edges by kind, connected parts, and the share of nodes in the largest (tables 4 and 14)."""
        import networkx as nx

        graph = nx.Graph()
        graph.add_edges_from((("t", high), ("s", low)) for high, lows in self._under.items() for low in lows)
        graph.add_edges_from((("s", low), ("e", name)) for low, names in self._members.items() for name in names)
        ends = [[("e", entity_key(name)) for name in one.triple.as_list()[::2]] for one in self.statements]
        graph.add_edges_from(ends)
        parts = [len(part) for part in nx.connected_components(graph)]
        return {
            "topics": len(self._under),
            "subtopics": len(self._members),
            "entities": len(self._edges),
            "topic_subtopic_edges": sum(map(len, self._under.values())),
            "subtopic_entity_edges": sum(map(len, self._members.values())),
            "triples": len(self.statements),
            "components": len(parts),
            "largest_share": max(parts, default=0) / max(1, len(graph)),
        }


async def graph_of(
    llm: LLMClient, passages: PassageStore, prompts: PromptSet, sampling: Any, repairs: int
) -> TopicGraph:
    """The graph of a corpus, built once a process with a call for each passage; the ledger keeps the replies."""
    tasks = _BUILT.setdefault(llm, {})
    key = f"{passages.sha256} {prompts.digests()[EXTRACTION]} {sampling}"
    if key not in tasks:  # a failure stays, too: the run ends by it, or waits for a batch
        tasks[key] = asyncio.create_task(_build(llm, passages, prompts, sampling, repairs))
    return await asyncio.shield(tasks[key])


async def _build(llm: LLMClient, passages: PassageStore, prompts: PromptSet, sampling: Any, repairs: int) -> TopicGraph:
    issues: Counter[str] = Counter()
    costs = Trace("")
    client = QuestionClient(llm, costs)

    async def extract(position: int, passage: Passage) -> list[Statement]:
        chat = prompts.chat(EXTRACTION, f"Title: {passage.title}\nText: {passage.text}")
        read = lambda text: read_statements(text, passage, position, issues)  # noqa: E731
        return await ask_of_passage(client, chat, read, "thrag.extract", sampling, repairs, issues) or []

    found = await all_of(extract(position, passage) for position, passage in enumerate(passages))
    graph = TopicGraph(one for group in found for one in group)
    tokens = costs.details.get("tokens", {})
    graph.spent = {role: [costs.tallies[f"calls.{role}"], *counts] for role, counts in tokens.items()}
    graph.cached = costs.cached
    figures = {**graph.statistics(), **+issues}
    logger.info("TH-RAG graph: %s", ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    return graph


def read_statements(text: str, passage: Passage, position: int, issues: Counter[str]) -> list[Statement]:
    """The triples of an extraction reply, also of one that is cut off; the others are counted."""
    values = json_values(text)
    if not values:
        raise UnusableReply("no_json", f"There is no JSON in the reply; {_FORM}.")
    rows = [row for value in values for row in (value if isinstance(value, list) else value.get("triples", [value]))]
    plain, found = " ".join(passage.text.split()), []
    for row in rows:
        triple = triple_of(row.get("triple")) if isinstance(row, dict) else None
        labels = [_label(row, end) for end in ("subject", "object")] if triple else []
        if triple is None or not all(all(pair) for pair in labels):
            issues["extract.malformed"] += 1
            continue
        sentence = " ".join(str(row.get("sentence") or "").split())
        if not sentence or sentence not in plain:
            issues["extract.sentence_not_in_text"] += 1
            sentence = " ".join(triple.as_list())
        found.append(Statement(triple, sentence, (labels[0], labels[1]), position))
    return found


def _label(row: Mapping[str, Any], end: str) -> tuple[str, str]:
    """Subtopic and topic of one end of a triple; empty where it has none."""
    given = row.get(end)
    names = ("subtopic", "main_topic")
    texts = [given.get(name) if isinstance(given, dict) else None for name in names]
    subtopic, topic = (" ".join(text.split()) if isinstance(text, str) else "" for text in texts)
    return subtopic, topic
