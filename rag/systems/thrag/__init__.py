"""TH-RAG: select topics, then subtopics of a graph, and read their sentences (sections 3.2 and 3.3, algorithm 2).

Where the paper leaves a choice: chunks are the passages of the corpus, so that all systems read the same texts
(`tripletune data adapt` cuts long documents as the paper does); a selected label that is not in the list is dropped and
counted; if a list has no more labels than must be selected, all are taken without a call; a prompt shows at most
`most_labels` labels, those closest to the question; if nothing was selected, all sentences are compared; a sentence
follows the title of its passage, which explains pronouns (`titles=no`: the bare sentence, as in the paper); a sentence
that is not in its passage is replaced by its triple; "1-hop neighbours" are the edges of the selected entities, as in
the authors' code (`hops=2` adds the edges of their neighbours).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

from tripletune.core.calls import SetupError, UnusableReply
from tripletune.core.concurrency import all_of
from tripletune.core.data.records import Step, one_line
from tripletune.core.files import file_digest
from tripletune.core.options import setting
from tripletune.llm.question_client import QuestionClient, load_prompts
from tripletune.llm.reading.labels import read_labels
from tripletune.rag import Trace
from tripletune.rag.chat_generator import COMMON_READER, bare_answer, finish, prompt_files, show_passages
from tripletune.rag.evidence import Found
from tripletune.rag.search.embedding import Embedder
from tripletune.rag.search.retrievers import Retrieved, fact_lines, highest_scored, passages_of_hits
from tripletune.rag.search.triple_index import entity_key
from tripletune.rag.systems import AnswerOptions, System, Tools, client_of, corpus_retriever, need
from tripletune.rag.systems.thrag.building import EXTRACT, given_graph, graph_of
from tripletune.rag.systems.thrag.topic_graph import TopicGraph

Kind = Literal["topics", "subtopics"]
# Number of best sentences whose passages form the ranking that is scored.
_RANKED = 30
# What a repair turn says about an unreadable selection.
_LABELS_ADVICE = 'write {"topics": ["…", …]} or {"subtopics": ["…", …]}'
_NAMES = (EXTRACT, "thrag_topics", "thrag_subtopics", "thrag_answer", "thrag_answer_long", *COMMON_READER)

_own_prompt_digests = prompt_files(*_NAMES, names=_NAMES)


@dataclass(frozen=True, slots=True)
class ThragOptions(AnswerOptions):
    """Settings of a run; the defaults are the paper's (section 4.4)."""

    sentences: int = setting(30, 'K1, sentences to read; 0: "w/o triplets" (table 7)', at_least=0)
    chunks: int = setting(5, 'K2, best sentences whose passages are read; 0: "w/o chunks" (table 7)', at_least=0)
    chunks_by: Literal["sentences", "passages"] = setting(
        "sentences",
        "what K2 counts: the best sentences (section 3.3), or the distinct passages of the read sentences (the "
        "authors' code, and the tokens of table 6)",
    )
    titles: bool = setting(True, "compare and show a sentence after its passage's title; no: the bare sentence (paper)")
    show_triples: bool = setting(False, "show each sentence with its triple, which says who a pronoun is")
    statements: str | None = setting(
        None, "file of triples with sentences and labels, as `data adapt` writes it; none: the model extracts them"
    )
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
        """Return problems that concern several settings, all at once."""
        problems = AnswerOptions.check(self)
        if not self.sentences and not self.chunks:
            problems.append("sentences and chunks are both 0: set one of them above 0")
        if self.min_topics > self.max_topics:
            problems.append("min_topics is greater than max_topics")
        if self.min_subtopics > self.max_subtopics:
            problems.append("min_subtopics is greater than max_subtopics")
        return problems


async def thrag(question: str, search: str, tools: Tools, options: ThragOptions) -> Trace:
    """Answer one question with TH-RAG (algorithm 2); see `System.run`.

    The model selects topics and subtopics of the corpus's graph, the sentences of their triples are ranked by the
    question, and one call answers from the best sentences and their passages.
    """
    trace = Trace(question, stop_reason="single_pass")
    prompts = load_prompts(_NAMES, options.prompts)
    reranker = need(tools.reranker, "reranker", "thrag")
    passages = corpus_retriever(tools, "thrag").passages
    llm = client_of("thrag", tools, trace, prompts, options.repairs)
    graph = await _graph_of_corpus(llm, tools, options)
    # The calls and seconds to build the graph do not count for a question.
    trace.details["index"] = graph.spent
    trace.cached = dict(graph.cached)
    if graph.unreadable:
        trace.details["index_unreadable"] = graph.unreadable
        trace.details["unreadable"] = dict(graph.unreadable_examples)
    started = time.perf_counter()
    # Section 3.2: topics, then subtopics, then the sentences of their triples.
    subtopics: list[str] = []
    if options.traversal:
        subtopics = await _select_subtopics(search, graph, llm, reranker, options, trace)
    statements = await asyncio.to_thread(graph.sentences, subtopics, options.hops)
    # Section 3.3: the sentences closest to the question, and the passages of the best of them.
    sentences = list(statements)
    if sentences:
        scores = await (graph.kept or reranker).scores(search, sentences)
        sentences = highest_scored(sentences, scores, max(options.sentences, options.chunks, _RANKED))
    positions = [statements[sentence].position for sentence in sentences]
    if options.chunks_by == "passages":
        best_positions = list(dict.fromkeys(positions))[: options.chunks]
    else:
        best_positions = list(dict.fromkeys(positions[: options.chunks]))
    hits = [Retrieved(passages[position], 1 / rank, position) for rank, position in enumerate(best_positions, 1)]
    read_sentences = sentences[: options.sentences]
    triples = tuple(statements[sentence].triple for sentence in read_sentences)
    shown = read_sentences
    if options.show_triples:
        shown = [f"{sentence} ({fact})" for sentence, fact in zip(read_sentences, fact_lines(triples), strict=True)]
    trace.add_step(Step(search, triples), hits)
    trace.details["ranking"] = [passages[position].id for position in dict.fromkeys(positions[:_RANKED])]
    for line, position in zip(shown, positions):  # there are more positions than lines
        trace.origins[line] = [passages[position].id]

    evidence = []
    if options.sentences:
        evidence.append("Sentences:\n" + ("\n".join(shown) or "(nothing was found)"))
    if options.chunks:
        evidence.append(show_passages(passages_of_hits(hits)))
    prompt = "thrag_answer" if options.answer == "short" else "thrag_answer_long"
    chat = prompts.chat(prompt, "\n\n".join([*evidence, f"Question: {one_line(question)}"]))

    async def answer() -> str:
        """Ask for the answer from the sentences and passages."""
        reply = await llm.chat(chat, role="thrag.answer", sampling=llm.for_answer(options))
        return bare_answer(reply.text, options.answer == "long")

    await finish(trace, options, llm, Found([passages_of_hits(hits)], [shown]), answer)
    trace.seconds = time.perf_counter() - started
    return trace


async def _graph_of_corpus(llm: QuestionClient, tools: Tools, options: ThragOptions) -> TopicGraph:
    """The graph of the whole corpus, which all questions share: from the file `statements`, or extracted by a model.

    The first question makes it; the others wait for it.
    """
    passages = corpus_retriever(tools, "thrag").passages
    if not options.statements:
        chat_model = need(tools.llm, "llm", "thrag")
        extraction = llm.up_to(options.max_extraction_tokens)
        return await graph_of(
            chat_model, passages, llm.prompts, extraction, options.repairs, options.titles, tools.keep, tools.names
        )
    try:
        return await asyncio.to_thread(
            given_graph, options.statements, passages, options.titles, tools.keep, tools.names
        )
    except (ValueError, OSError) as error:
        # Every question would meet this error.
        raise SetupError(str(error)) from error


async def _select_subtopics(
    question: str, graph: TopicGraph, llm: QuestionClient, reranker: Embedder, options: ThragOptions, trace: Trace
) -> list[str]:
    """Topic-based graph traversal (section 3.2): one call selects topics, then one call per topic selects subtopics.

    Returns:
        The selected subtopics of all topics, each once, in the order of the selections.
    """

    async def choose(kind: Kind, labels: Sequence[str], topic: str = "") -> _Selection:
        """The labels that the model selects, in its order; selected labels that are not listed are counted.

        No call is made where there is nothing to select. More labels than `most_labels` are first ranked by the
        question.
        """
        least, most = options.min_topics, options.max_topics
        if kind == "subtopics":
            least, most = options.min_subtopics, options.max_subtopics
        if len(labels) > options.most_labels:
            trace.tally(f"shortlisted_{kind}")
            labels = highest_scored(labels, await reranker.scores(question, labels), options.most_labels)
        if len(labels) <= least:
            # "Select 9 to 9" has one right reply, so no call is made.
            trace.tally(f"{kind}_taken_without_a_call")
            return _Selection(list(labels))
        listed = "\n".join(f"- {label}" for label in labels)
        user = f"{kind.capitalize()}:\n{listed}\n\nSelect {least} to {min(most, len(labels))}."
        if topic:
            user = f"Topic: {topic}\n\n{user}"
        label_of = {entity_key(label): label for label in labels}

        def read(reply: str) -> list[str]:
            """The names in a reply, at least one of which is listed."""
            names = read_labels(reply, allowed=labels, advice=_LABELS_ADVICE)
            if names and not any(entity_key(name) in label_of for name in names):
                raise UnusableReply(
                    "none_listed", f"None of these {kind} is in the list: copy them as they stand there."
                )
            return names

        try:
            user = f"{user}\n\nQuestion: {one_line(question)}"
            selected = await llm.ask(kind, user, read, options.max_selection_tokens)
        except UnusableReply as error:
            trace.tally(f"{kind}.{error.reason}")
            return _Selection([], error.reply)
        chosen: dict[str, None] = {}
        not_listed = 0
        for name in selected:
            label = label_of.get(entity_key(name))
            if label is None:
                not_listed += 1
            else:
                chosen[label] = None
        trace.tally(f"{kind}_not_listed", not_listed)
        return _Selection(list(chosen)[:most])

    topics = await choose("topics", graph.topics)
    _note_selection(topics, "topics", "Topics", trace)
    selections = await all_of(choose("subtopics", graph.subtopics(topic), topic) for topic in topics.labels)
    subtopics: dict[str, list[str]] = {}
    for topic, selection in zip(topics.labels, selections):
        _note_selection(selection, "subtopics", f"Subtopics of {topic}", trace)
        subtopics[topic] = selection.labels
    trace.details["selected"] = subtopics
    return list(dict.fromkeys(chain.from_iterable(subtopics.values())))


class _Selection(NamedTuple):
    """Labels that were selected, and the reply if it was unreadable."""

    labels: list[str]
    unreadable: str = ""


def _note_selection(selection: _Selection, kind: Kind, heading: str, trace: Trace) -> None:
    """Record in the trace what was selected, or the reply that could not be read, as an action."""
    if selection.unreadable:
        trace.malformed += 1
        trace.add_action(selection.unreadable, None)
    else:
        trace.add_action(f"{heading}: {', '.join(selection.labels) or '(none)'}", kind)


def _digests_of_files(options: ThragOptions) -> dict[str, str]:
    """Digests of the prompts and of the file of statements."""
    digests = dict(_own_prompt_digests(options))
    if options.statements:
        digests["statements"] = file_digest(options.statements)
    return digests


SYSTEM = System(
    name="thrag",
    run=thrag,
    needs_reranker=lambda options: True,
    options=ThragOptions,
    model="llm",
    files=_digests_of_files,
    own_triples=True,
)
