"""TH-RAG's graph: topics, their subtopics, the entities under these, and the triples between entities (section 3.1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count
from typing import NamedTuple

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from tripletune.core.data.triples import Triple
from tripletune.rag.search.text_index import KeptTexts
from tripletune.rag.search.triple_index import entity_key


class Labels(NamedTuple):
    """The labels of an entity: a subtopic, and the topic above it."""

    subtopic: str
    topic: str


class EntityKeys(NamedTuple):
    """The keys (`entity_key`) of the two ends of a triple."""

    subject: str
    object: str


@dataclass(frozen=True, slots=True)
class Statement:
    """A triple with its sentence in the passage at `position`; `labels` are those of subject and object.

    An end without labels is in no subtopic.
    """

    triple: Triple
    sentence: str
    labels: tuple[Labels, Labels]
    position: int = -1

    @property
    def entities(self) -> EntityKeys:
        """The nodes of subject and object: names that differ only in case or articles are one node."""
        return EntityKeys(entity_key(self.triple.subject), entity_key(self.triple.object))


class TopicGraph:
    """The graph of a corpus. Labels and names that differ only in case or articles are one node.

    Attributes:
        topics: The topics as they were first written, in order of appearance.
        texts: The text of each triple in prompts: its sentence after the title of its passage.
        kept: The vectors of `texts`.
        spent: By role, calls, prompt tokens and reply tokens of extraction.
        cached: The part of `spent` that the ledger answered.
        unreadable: By role, how many of these replies could not be read.
        unreadable_examples: By role, the reason and the beginning of one of them.
    """

    def __init__(self, statements: Iterable[Statement]) -> None:
        self.statements = list(statements)
        self.texts: list[str] = []
        self.kept: KeptTexts | None = None
        self.spent: dict[str, list[int]] = {}
        self.cached: dict[str, list[int]] = {}
        self.unreadable: dict[str, int] = {}
        self.unreadable_examples: dict[str, list[str]] = {}
        # Labels as they were first written; keys are those of `entity_key`, as in the following three.
        self._labels: dict[str, str] = {}
        # Subtopics by topic, entities by subtopic, rows of triples by entity; all in order of appearance.
        self._subtopics: dict[str, dict[str, None]] = {}
        self._entities: dict[str, dict[str, None]] = {}
        self._rows: dict[str, list[int]] = {}
        for row, statement in enumerate(self.statements):
            for entity, labels in zip(statement.entities, statement.labels, strict=True):
                self._rows.setdefault(entity, []).append(row)
                if not all(labels):
                    continue
                subtopic, topic = entity_key(labels.subtopic), entity_key(labels.topic)
                self._labels.setdefault(subtopic, labels.subtopic)
                self._labels.setdefault(topic, labels.topic)
                self._subtopics.setdefault(topic, {})[subtopic] = None
                self._entities.setdefault(subtopic, {})[entity] = None
        self.topics = [self._labels[topic] for topic in self._subtopics]

    def subtopics(self, topic: str) -> list[str]:
        """The subtopics of a topic, in order of appearance."""
        return [self._labels[subtopic] for subtopic in self._subtopics.get(entity_key(topic), ())]

    def candidates(self, subtopics: Iterable[str], hops: int) -> list[int]:
        """Rows of the triples of all entities under subtopics, and of entities less than `hops` steps away."""
        entities: set[str] = set()
        for subtopic in subtopics:
            entities.update(self._entities.get(entity_key(subtopic), ()))
        rows = self._rows_of(entities)
        for _ in range(hops - 1):
            entities = set()
            for row in rows:
                entities.update(self.statements[row].entities)
            rows = self._rows_of(entities)
        return sorted(rows)

    def _rows_of(self, entities: Iterable[str]) -> set[int]:
        """Rows of the triples that name one of the entities."""
        rows: set[int] = set()
        for entity in entities:
            rows.update(self._rows[entity])
        return rows

    def sentences(self, subtopics: Iterable[str], hops: int) -> dict[str, Statement]:
        """The texts of `candidates` (or of all triples if there are none), each with its first triple."""
        statements: dict[str, Statement] = {}
        for row in self.candidates(subtopics, hops) or range(len(self.statements)):
            statements.setdefault(self.texts[row], self.statements[row])
        return statements

    def statistics(self) -> dict[str, int | float]:
        """Count nodes and edges by kind, and connected components with the largest one's share (tables 4 and 14).

        `triples` are the statements of the corpus; `entity_pairs`, which the paper's tables count, are the distinct
        pairs of entities that they connect, in either direction.
        """
        below_topics = sum(map(len, self._subtopics.values()))
        below_subtopics = sum(map(len, self._entities.values()))
        pairs = {frozenset(statement.entities) for statement in self.statements}
        nodes = len(self._subtopics) + len(self._entities) + len(self._rows)
        edges = np.fromiter(chain.from_iterable(self._numbered_edges()), np.int64).reshape(-1, 2).T
        adjacency = coo_array((np.ones(edges.shape[1]), edges), (nodes, nodes))
        components, component_of_node = connected_components(adjacency, directed=False)
        return {
            "topics": len(self._subtopics),
            "subtopics": len(self._entities),
            "entities": len(self._rows),
            "topic_subtopic_edges": below_topics,
            "subtopic_entity_edges": below_subtopics,
            "triples": len(self.statements),
            "entity_pairs": len(pairs),
            "nodes": nodes,
            "edges": below_topics + below_subtopics + len(pairs),
            "components": components,
            "largest_share": np.bincount(component_of_node, minlength=1).max() / max(1, nodes),
        }

    def _numbered_edges(self) -> Iterator[tuple[int, int]]:
        """Yield all edges as pairs of numbers: topics are numbered first, then subtopics, then entities.

        The numbers are those of one graph of all nodes, whose figures are logged and compared with the paper's.
        """
        numbers = count()
        topics = dict(zip(self._subtopics, numbers))
        subtopics = dict(zip(self._entities, numbers))
        entities = dict(zip(self._rows, numbers))
        for topic, below in self._subtopics.items():
            for subtopic in below:
                yield topics[topic], subtopics[subtopic]
        for subtopic, members in self._entities.items():
            for entity in members:
                yield subtopics[subtopic], entities[entity]
        for statement in self.statements:
            subject, object_ = statement.entities
            yield entities[subject], entities[object_]
