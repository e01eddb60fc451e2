"""TH-RAG: topics, then subtopics of a graph are selected, and their sentences read (sections 3.2 and 3.3, algorithm 2).

Where the paper leaves a choice: chunks are the passages of the corpus, so that all systems read the same
(`tripletune data adapt` cuts long documents as the paper does); a selected label that is not in the list is dropped
and counted; of a list with more than `most_labels` those closest to the question are shown; where nothing was selected
all sentences are compared; a sentence stands after the title of its passage, without which "she" has no name.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tripletune.models.data.records import Step, one_line
from tripletune.models.llm.question_client import QuestionClient, load_prompts
from tripletune.models.llm.replies import UnusableReply, all_of, find_json
from tripletune.models.options import CheckedOptions, setting
from tripletune.rag import Trace
from tripletune.rag.chat_generator import bare_answer, prompt_files, show_passages
from tripletune.rag.graph import Compare
from tripletune.rag.retrievers import Retrieved, top
from tripletune.rag.systems import System, Tools, client_of, need
from tripletune.rag.systems.thrag.graph import EXTRACTION, Statement, TopicGraph, graph_of
from tripletune.rag.triple_index import entity_key

# Sentences whose passages are the ranking that is scored.
_RANKED = 30
_NAMES = (EXTRACTION, "thrag_topics", "thrag_subtopics", "thrag_answer", "thrag_answer_long")


@dataclass(frozen=True, slots=True)
class ThragOptions(CheckedOptions):
    """Settings of a run; the defaults are the paper's (section 4.4)."""

    sentences: int = setting(30, 'K1, sentences that are read; 0 is "w/o triplets" (table 7)', at_least=0)
    chunks: int = setting(5, 'K2, best sentences whose passages are read; 0 is "w/o chunks" (table 7)', at_least=0)
    traversal: bool = setting(True, 'no compares the question with all sentences ("w/o traversal", table 7)')
    hops: int = setting(1, "how far triples lead from a subtopic's entities; 2 takes their neighbours' too", at_least=1)
    min_topics: int = setting(5, "fewest topics that the model is asked for", at_least=1)
    max_topics: int = setting(10, "most topics", at_least=1)
    min_subtopics: int = setting(10, "fewest subtopics of a topic that the model is asked for", at_least=1)
    max_subtopics: int = setting(25, "most subtopics of a topic", at_least=1)
    most_labels: int = setting(1000, "most labels that a prompt lists", at_least=1)
    answer: Literal["short", "long"] = setting("short", "long answers in paragraphs, as for UltraDomain")
    repairs: int = setting(1, "most repair turns for a reply that can't be used; the paper has none", at_least=0)
    prompts: str | None = setting(None, "folder of custom prompts: any of thrag_*.md")
    max_extraction_tokens: int = setting(4096, "longest reply with the triples of a passage", at_least=1)
    max_selection_tokens: int = setting(512, "longest reply with selected labels", at_least=1)
    max_answer_tokens: int = setting(100, "longest answer; a long one needs more", at_least=1)

    def check(self) -> list[str]:
        """What `setting` can't say."""
        found = [] if self.sentences or self.chunks else ["sentences and chunks are both 0: nothing would be read"]
        for name in ("topics", "subtopics"):
            if getattr(self, f"min_{name}") > getattr(self, f"max_{name}"):
                found.append(f"min_{name} is greater than max_{name}")
        return found


async def thrag(question: str, search: str, tools: Tools, options: ThragOptions) -> Trace:
    """Answer one question with TH-RAG (algorithm 2); see `System.run`."""
    trace = Trace(question, stop_reason="single_pass")
    prompts, similarity = load_prompts(_NAMES, options.prompts), need(tools, "reranker", "thrag").scores
    llm = client_of("thrag", tools, trace, prompts, options.repairs)
    client, passages = need(tools, "llm", "thrag"), need(tools, "retriever", "thrag").passages
    graph = await graph_of(client, passages, prompts, llm.up_to(options.max_extraction_tokens), options.repairs)
    # Building the graph is no cost of a question, in calls as in seconds.
    trace.details["index"], trace.cached = graph.spent, {**graph.cached}
    started = time.perf_counter()
    rows = list(range(len(graph.statements)))
    if options.traversal:
        subtopics = await _Selection(question, llm, similarity, options, trace).subtopics(graph)
        rows = graph.candidates(subtopics, options.hops) or rows
    # Triples of one sentence are read once.
    statement: dict[str, Statement] = {}
    for one in (graph.statements[row] for row in rows):
        statement.setdefault(f"[{passages[one.position].title}] {one.sentence}", one)
    texts = list(statement)
    ranked = top(texts, await similarity(search, texts) if texts else [], len(texts))
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
    reply = await llm.chat(chat, role="thrag.answer", sampling=llm.up_to(options.max_answer_tokens))
    trace.answer = bare_answer(reply.text) if options.answer == "short" else reply.text.strip()
    trace.seconds = time.perf_counter() - started
    return trace


class _Selection:
    """Topic-based graph traversal (section 3.2): a call for the topics, then one for each topic's subtopics."""

    def __init__(
        self, question: str, llm: QuestionClient, similarity: Compare, options: ThragOptions, trace: Trace
    ) -> None:
        self.question, self.llm, self.similarity = question, llm, similarity
        self.options, self.trace = options, trace

    async def subtopics(self, graph: TopicGraph) -> list[str]:
        """The selected subtopics of all selected topics, each once."""
        topics = await self.choose("topics", graph.topics)
        chosen = await all_of(self.choose("subtopics", graph.subtopics(topic), topic) for topic in topics)
        self.trace.details["selected"] = dict(zip(topics, chosen))
        return list(dict.fromkeys(label for labels in chosen for label in labels))

    async def choose(self, kind: str, labels: Sequence[str], topic: str = "") -> list[str]:
        """The labels that the model selects, in its order; those that are not in the list are counted."""
        options, limit = self.options, self.options.most_labels
        least, most = (getattr(options, f"{end}_{kind}") for end in ("min", "max"))
        if len(labels) > limit:
            self.trace.tally(f"shortlisted_{kind}")
            labels = top(labels, await self.similarity(self.question, labels), limit)
        listed = "\n".join(f"- {label}" for label in labels)
        about = f"Topic: {topic}\n\n" if topic else ""
        user = f"{about}{kind.capitalize()}:\n{listed}\n\nSelect {min(least, len(labels))} to {min(most, len(labels))}."
        user = f"{user}\n\nQuestion: {one_line(self.question)}"
        try:
            names = await self.llm.ask(kind, user, _read_labels, options.max_selection_tokens)
        except UnusableReply as error:
            self.trace.tally(f"{kind}.{error.reason}")
            return []
        known = {entity_key(label): label for label in labels}
        chosen = list(dict.fromkeys(known[entity_key(name)] for name in names if entity_key(name) in known))
        self.trace.tally(f"{kind}_not_listed", sum(entity_key(name) not in known for name in names))
        return chosen[:most]


def _read_labels(text: str) -> list[str]:
    value = find_json(text, dict, list, advice='write {"topics": ["…", …]} or {"subtopics": ["…", …]}')
    if isinstance(value, dict):
        value = next((one for one in value.values() if isinstance(one, list)), [])
    return [label for label in value if isinstance(label, str)]


SYSTEM = System(
    name="thrag",
    run=thrag,
    needs_reranker=lambda options: True,
    options=ThragOptions,
    model="llm",
    files=prompt_files(*_NAMES, names=_NAMES),
)
