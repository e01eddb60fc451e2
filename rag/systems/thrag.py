"""TH-RAG: select topics, then subtopics of a graph, and read their sentences (sections 3.2 and 3.3, algorithm 2).

Where the paper leaves a choice: chunks are the passages of the corpus, so that all systems read the same texts
(`tripletune data adapt` cuts long documents as the paper does); a selected label that is not in the list is dropped and
counted; a prompt shows at most `most_labels` labels, those closest to the question; if nothing was selected, all
sentences are compared; a sentence follows the title of its passage, which explains pronouns; a sentence that is not in
its passage is replaced by its triple; "1-hop neighbours" are the edges of the selected entities, as in the authors'
code (`hops=2` adds the edges of their neighbours).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from tripletune.core.calls import LLMClient, UnusableReply
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import Step, one_line
from tripletune.core.data.triples import Triple, triple_of
from tripletune.core.options import setting
from tripletune.llm.concurrency import all_of, in_workers
from tripletune.llm.question_client import PromptSet, QuestionClient, load_prompts
from tripletune.llm.reply_json import find_json, json_values
from tripletune.rag import Trace
from tripletune.rag.chat_generator import READER, Found, bare_answer, finish, prompt_files, show_passages
from tripletune.rag.extractor import ask_of_passage
from tripletune.rag.search.embedding import Embedder
from tripletune.rag.search.index import PassageStore
from tripletune.rag.search.retrievers import Retrieved, top
from tripletune.rag.search.text_index import KeptTexts
from tripletune.rag.search.triple_index import entity_key
from tripletune.rag.systems import AnswerOptions, System, Tools, client_of, need

logger = logging.getLogger(__name__)

_EXTRACT = "thrag_extract"
# Number of best sentences whose passages form the ranking that is scored.
_RANKED = 30
# Maximum passages in progress; the client has a separate limit for calls.
_AT_ONCE = 32
_NAMES = (_EXTRACT, "thrag_topics", "thrag_subtopics", "thrag_answer", "thrag_answer_long", READER)
_FORM = (
    'write a JSON list of {"triple": [subject, relation, object], "sentence": "…", "subject": {"subtopic": "…", '
    '"main_topic": "…"}, "object": {"subtopic": "…", "main_topic": "…"}} and nothing else'
)
_BUILT: WeakKeyDictionary[LLMClient, dict[str, asyncio.Task[TopicGraph]]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class ThragOptions(AnswerOptions):
    """Settings of a run; the defaults are the paper's (section 4.4)."""

    sentences: int = setting(30, 'K1, sentences to read; 0: "w/o triplets" (table 7)', at_least=0)
    chunks: int = setting(5, 'K2, best sentences whose passages are read; 0: "w/o chunks" (table 7)', at_least=0)
    traversal: bool = setting(True, 'no: compare the question with all sentences ("w/o traversal", table 7)')
    hops: int = setting(1, "maximum hops from a subtopic's entities to a triple", at_least=1)
    min_topics: int = setting(5, "minimum topics that the model is asked to select", at_least=1)
    max_topics: int = setting(10, "maximum topics to select", at_least=1)
    min_subtopics: int = setting(10, "minimum subtopics per topic that the model is asked to select", at_least=1)
    max_subtopics: int = setting(25, "maximum subtopics to select per topic", at_least=1)
    most_labels: int = setting(1000, "maximum labels in a prompt", at_least=1)
    repairs: int = setting(1, "maximum repair turns for an unusable reply; 0 in the paper", at_least=0)
    prompts: str | None = setting(None, "folder of custom prompts: any of thrag_*.md")
    max_extraction_tokens: int = setting(4096, "maximum tokens of a reply with a passage's triples", at_least=1)
    max_selection_tokens: int = setting(512, "maximum tokens of a reply with selected labels", at_least=1)

    def check(self) -> list[str]:
        """Return problems that concern several settings."""
        found = [] if self.sentences or self.chunks else ["sentences and chunks are both 0: set one of them above 0"]
        for name in ("topics", "subtopics"):
            if getattr(self, f"min_{name}") > getattr(self, f"max_{name}"):
                found.append(f"min_{name} is greater than max_{name}")
        return found


async def thrag(question: str, search: str, tools: Tools, options: ThragOptions) -> Trace:
    """Answer one question with TH-RAG (algorithm 2); see `System.run`."""
    trace = Trace(question, stop_reason="single_pass")
    prompts, reranker = load_prompts(_NAMES, options.prompts), need(tools, "reranker", "thrag")
    llm = client_of("thrag", tools, trace, prompts, options.repairs)
    client, passages = need(tools, "llm", "thrag"), need(tools, "retriever", "thrag").passages
    extraction = llm.up_to(options.max_extraction_tokens)
    graph = await graph_of(client, passages, prompts, extraction, options.repairs, tools.keep)
    # The calls and seconds to build the graph do not count for a question.
    trace.details["index"], trace.cached = graph.spent, {**graph.cached}
    started = time.perf_counter()
    subtopics = await _select(question, graph, llm, reranker, options, trace) if options.traversal else []
    statement = await asyncio.to_thread(graph.sentences, subtopics, options.hops)
    texts = list(statement)
    most = max(options.sentences, options.chunks, _RANKED)
    ranked = top(texts, await (graph.kept or reranker).scores(search, texts) if texts else [], most)
    kept = ranked[: options.sentences]
    best = dict.fromkeys(statement[text].position for text in ranked[: options.chunks])
    hits = [Retrieved(passages[position], 1 / rank, position) for rank, position in enumerate(best, 1)]
    trace.add_step(Step(search, tuple(statement[text].triple for text in kept)), hits)
    positions = dict.fromkeys(statement[text].position for text in ranked[:_RANKED])
    trace.details["ranking"] = [passages[position].id for position in positions]

    parts = ["Sentences:\n" + ("\n".join(kept) or "(nothing was found)")] if options.sentences else []
    parts += [show_passages(hit.passage for hit in hits)] if options.chunks else []
    name = "thrag_answer" if options.answer == "short" else "thrag_answer_long"
    chat = prompts.chat(name, "\n\n".join([*parts, f"Question: {one_line(question)}"]))

    async def own() -> str:
        reply = await llm.chat(chat, role="thrag.answer", sampling=llm.up_to(options.max_answer_tokens))
        return bare_answer(reply.text, options.answer == "long")

    trace.origins |= {text: [passages[statement[text].position].id] for text in kept}
    await finish(trace, options, llm, Found([hit.passage for hit in hits], kept), own)
    trace.seconds = time.perf_counter() - started
    return trace


async def _select(
    question: str, graph: TopicGraph, llm: QuestionClient, reranker: Embedder, options: ThragOptions, trace: Trace
) -> list[str]:
    """Topic-based graph traversal (section 3.2): one call selects topics, then one call per topic selects subtopics."""

    async def choose(kind: str, labels: Sequence[str], topic: str = "") -> list[str]:
        """Return the labels that the model selects, in its order; selected labels that are not listed are counted."""
        least, most = (getattr(options, f"{end}_{kind}") for end in ("min", "max"))
        if len(labels) > options.most_labels:
            trace.tally(f"shortlisted_{kind}")
            labels = top(labels, await reranker.scores(question, labels), options.most_labels)
        listed = "\n".join(f"- {label}" for label in labels)
        about = f"Topic: {topic}\n\n" if topic else ""
        user = f"{about}{kind.capitalize()}:\n{listed}\n\nSelect {min(least, len(labels))} to {min(most, len(labels))}."
        user = f"{user}\n\nQuestion: {one_line(question)}"
        try:
            names = await llm.ask(kind, user, _read_labels, options.max_selection_tokens)
        except UnusableReply as error:
            trace.tally(f"{kind}.{error.reason}")
            return []
        known = {entity_key(label): label for label in labels}
        chosen = list(dict.fromkeys(known[entity_key(name)] for name in names if entity_key(name) in known))
        trace.tally(f"{kind}_not_listed", sum(entity_key(name) not in known for name in names))
        return chosen[:most]

    topics = await choose("topics", graph.topics)
    chosen = await all_of(choose("subtopics", graph.subtopics(topic), topic) for topic in topics)
    trace.details["selected"] = dict(zip(topics, chosen))
    return list(dict.fromkeys(label for labels in chosen for label in labels))


def _read_labels(text: str) -> list[str]:
    value = find_json(text, dict, list, advice='write {"topics": ["…", …]} or {"subtopics": ["…", …]}')
    if isinstance(value, dict):
        value = next((one for one in value.values() if isinstance(one, list)), [])
    value = [next(iter(one.values()), None) if isinstance(one, dict) else one for one in value]
    return [str(label) for label in value if isinstance(label, str | int | float)]


@dataclass(frozen=True, slots=True)
class Statement:
    """A triple with its sentence in the passage at `position`; `labels`: subtopic and topic of subject and object."""

    triple: Triple
    sentence: str
    labels: tuple[tuple[str, str], tuple[str, str]]
    position: int = -1


class TopicGraph:
    """The graph of a corpus. Labels and names that differ only in case or articles are one node.

    Attributes:
        topics: The topics as they were first written, in order of appearance.
        texts: The text of each triple in prompts: its sentence after the title of its passage.
        kept: The vectors of `texts`.
        spent: By role, calls, prompt tokens and reply tokens of extraction; `cached`: those answered by the ledger.
    """

    def __init__(self, statements: Iterable[Statement]) -> None:
        self.statements = list(statements)
        self.texts: list[str] = []
        self.kept: KeptTexts | None = None
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

    def candidates(self, subtopics: Iterable[str], hops: int) -> list[int]:
        """Rows of the triples of all entities under subtopics, and of entities less than `hops` steps away."""
        entities = {entity for one in subtopics for entity in self._members.get(entity_key(one), ())}
        rows = {row for entity in entities for row in self._edges[entity]}
        for _ in range(hops - 1):
            entities = {entity_key(name) for row in rows for name in self.statements[row].triple.as_list()[::2]}
            rows = {row for entity in entities for row in self._edges[entity]}
        return sorted(rows)

    def sentences(self, subtopics: Iterable[str], hops: int) -> dict[str, Statement]:
        """The texts of `candidates` (or of all triples if there are none), each with its first triple."""
        found: dict[str, Statement] = {}
        for row in self.candidates(subtopics, hops) or range(len(self.statements)):
            found.setdefault(self.texts[row], self.statements[row])
        return found

    def statistics(self) -> dict[str, int | float]:
        """Count nodes and edges by kind, and connected components with the largest one's share (tables 4 and 14)."""
        numbers = count()
        tops, lows, ends = ({name: next(numbers) for name in one} for one in (self._under, self._members, self._edges))
        pairs = chain(
            ((tops[high], lows[low]) for high, under in self._under.items() for low in under),
            ((lows[low], ends[name]) for low, names in self._members.items() for name in names),
            ([ends[entity_key(name)] for name in one.triple.as_list()[::2]] for one in self.statements),
        )
        edges = np.fromiter(chain.from_iterable(pairs), np.int64).reshape(-1, 2).T
        size = next(numbers)
        parts, part = connected_components(coo_array((np.ones(edges.shape[1]), edges), (size, size)), directed=False)
        return {
            "topics": len(self._under),
            "subtopics": len(self._members),
            "entities": len(self._edges),
            "topic_subtopic_edges": sum(map(len, self._under.values())),
            "subtopic_entity_edges": sum(map(len, self._members.values())),
            "triples": len(self.statements),
            "components": parts,
            "largest_share": np.bincount(part, minlength=1).max() / max(1, size),
        }


async def graph_of(llm: LLMClient, passages: PassageStore, prompts: PromptSet, sampling: Any, *how: Any) -> TopicGraph:
    """The graph of a corpus, built once per process with one call per passage; the ledger stores the replies."""
    tasks = _BUILT.setdefault(llm, {})
    key = f"{passages.sha256} {prompts.digests()[_EXTRACT]} {sampling} {how[:1]}"
    task = tasks.get(key)
    # A failure is kept, too, since it ends the run or waits for a batch, unless the system stays open.
    open_still = task and task.done() and not getattr(llm, "ends_run", True)
    if task is None or (open_still and (task.cancelled() or task.exception())):
        task = tasks[key] = asyncio.create_task(_build(llm, passages, prompts, sampling, *how))
    return await asyncio.shield(task)


async def _build(
    llm: LLMClient, passages: PassageStore, prompts: PromptSet, sampling: Any, repairs: int, keep: Any
) -> TopicGraph:
    issues: Counter[str] = Counter()
    costs = Trace("")
    client = QuestionClient(llm, costs, sampling=sampling, system="thrag", prompts=prompts, repairs=repairs)

    async def extract(position: int, passage: Passage) -> list[Statement]:
        user = f"Title: {passage.title}\nText: {passage.text}"
        read = lambda text: read_statements(text, passage, position, issues)  # noqa: E731
        return await ask_of_passage(client, "extract", user, read, sampling.max_tokens, issues) or []

    left, titles, found, failed = enumerate(passages), list[str](), dict[int, list[Statement]](), list[Exception]()

    async def work() -> None:
        for position, passage in left:
            titles.append(passage.title)
            if not position % 256:
                gc.freeze()  # or garbage collections would block the event loop
            try:
                found[position] = await extract(position, passage)
            except Exception as error:  # raised after all calls, so that a batch holds all of them
                failed.append(error)

    def build() -> tuple[TopicGraph, dict[str, Any]]:
        graph = TopicGraph(one for _, group in sorted(found.items()) for one in group)
        graph.texts = [f"[{titles[one.position]}] {one.sentence}" for one in graph.statements]
        graph.kept = keep(graph.texts) if keep and graph.texts else None
        return graph, {**graph.statistics(), **+issues}

    await in_workers(work, _AT_ONCE)
    if failed:
        raise failed[0]
    graph, figures = await asyncio.to_thread(build)
    tokens = costs.details.get("tokens", {})
    graph.spent = {role: [costs.tallies[f"calls.{role}"], *counts] for role, counts in tokens.items()}
    graph.cached = costs.cached
    logger.info("TH-RAG graph: %s", ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    return graph


def read_statements(text: str, passage: Passage, position: int, issues: Counter[str]) -> list[Statement]:
    """Read the triples of an extraction reply, even if it is cut off; malformed triples are counted."""
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
    """Subtopic and topic of the subject or object of a triple; "" if missing."""
    given = row.get(end)
    names = ("subtopic", "main_topic")
    texts = [given.get(name) if isinstance(given, dict) else None for name in names]
    subtopic, topic = (" ".join(text.split()) if isinstance(text, str) else "" for text in texts)
    return subtopic, topic


SYSTEM = System(
    name="thrag",
    run=thrag,
    needs_reranker=lambda options: True,
    options=ThragOptions,
    model="llm",
    files=prompt_files(*_NAMES, names=_NAMES),
)
