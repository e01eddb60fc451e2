"""Build TH-RAG's graph of a corpus: one call per passage extracts its triples with topics (section 3.1)."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from tripletune.core.calls import LLMClient, Sampling, UnusableReply
from tripletune.core.concurrency import in_workers
from tripletune.core.data.fields import checked
from tripletune.core.data.jsonl import read_jsonl
from tripletune.core.data.passages import Passage
from tripletune.core.data.triples import triple_of
from tripletune.llm.question_client import UNREADABLE, PromptSet, QuestionClient, ask_of_passage
from tripletune.llm.reply_json import json_values
from tripletune.rag import Trace
from tripletune.rag.search.index import PassageStore
from tripletune.rag.search.text_index import KeptTexts
from tripletune.rag.systems.thrag.topic_graph import Labels, Statement, TopicGraph
from tripletune.rag.triples.names import EntityNames

logger = logging.getLogger(__name__)
EXTRACT = "thrag_extract"
_ONE_READER = threading.Lock()
Keep = Callable[[Sequence[str]], KeptTexts]
# Maximum passages in progress; the client has a separate limit for calls.
_AT_ONCE = 32
# Passages between two times at which new objects are excluded from garbage collections.
_FREEZE_EVERY = 256
_FORM = (
    'write a JSON list of {"triple": [subject, relation, object], "sentence": "…", "subject": {"subtopic": "…", '
    '"main_topic": "…"}, "object": {"subtopic": "…", "main_topic": "…"}} and nothing else'
)
# The graphs that a client builds or has built, by corpus, prompt and sampling.
_BUILT: WeakKeyDictionary[LLMClient, dict[str, asyncio.Task[TopicGraph]]] = WeakKeyDictionary()


def given_graph(path: str, passages: PassageStore, titles: bool, keep: Keep | None, names: EntityNames) -> TopicGraph:
    """The graph of statements that another program extracted, read once per process; see `graph_of`.

    Args:
        path: JSON lines of passages with their `statements`, as `data adapt` writes them.
    """
    with _ONE_READER:  # the first questions ask at the same time
        return _given_graph(path, os.stat(path).st_mtime_ns, passages, titles, keep, names)


@lru_cache(maxsize=2)
def _given_graph(
    path: str, changed: int, passages: PassageStore, titles: bool, keep: Keep | None, names: EntityNames
) -> TopicGraph:
    """The graph of a file of statements; `changed` is the time of its last change, for the cache.

    Passages are found by id, or else by title and text, so a file that another program wrote needs no ids.

    Raises:
        ValueError: No statement is of a passage of the corpus.
    """
    replies: dict[str, str] = {}
    for where, row in read_jsonl(path):
        passage = Passage.from_json(row, where)
        # A passage may have no statements: that another program's extraction failed is counted below.
        statements = json.dumps(checked(row, where, {"statements?": list}).get("statements", []))
        replies[passage.key] = statements
        if row.get("id"):
            replies[passage.id] = statements
    issues: Counter[str] = Counter()
    statements_of_corpus: list[Statement] = []
    shown_titles: list[str] = []
    for position, passage in enumerate(passages):
        shown_titles.append(_title_of(passage) if titles else "")
        reply = replies.get(passage.id) or replies.get(passage.key)
        if reply is None:
            issues["passages_without_statements"] += 1
        else:
            statements_of_corpus += read_statements(reply, passage, position, issues)
    if not statements_of_corpus:
        raise ValueError(f"statements {path}: it has no statement of a passage of the corpus: is it another corpus's?")
    graph = _graph_of_statements(statements_of_corpus, shown_titles, keep, names)
    _log_figures(graph, issues)
    return graph


def _graph_of_statements(
    statements: Iterable[Statement], titles: Sequence[str], keep: Keep | None, names: EntityNames
) -> TopicGraph:
    """The graph of statements; `titles` are those of all passages by position, "" for none."""
    statements = list(statements)
    names.log_use((statement.triple for statement in statements), "TH-RAG graph")
    renamed = []
    for statement in statements:
        (triple,) = names.of([statement.triple])
        renamed.append(replace(statement, triple=triple))
    graph = TopicGraph(renamed)
    for statement in graph.statements:
        title = titles[statement.position]
        graph.texts.append(f"[{title}] {statement.sentence}" if title else statement.sentence)
    if keep and graph.texts:
        graph.kept = keep(graph.texts)
    return graph


def _log_figures(graph: TopicGraph, issues: Counter[str]) -> None:
    """Log the graph's statistics, which the paper's tables have, and the faults of replies that are not 0."""
    figures = {**graph.statistics(), **+issues}
    logger.info("TH-RAG graph: %s", ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))


async def graph_of(
    llm: LLMClient,
    passages: PassageStore,
    prompts: PromptSet,
    sampling: Sampling,
    repairs: int,
    titles: bool,
    keep: Keep | None,
    names: EntityNames,
) -> TopicGraph:
    """The graph of a corpus, built once per process; the ledger stores the replies.

    Args:
        repairs: Maximum repair turns per passage.
        titles: Whether a sentence stands after the title of its passage.
        keep: Opens vectors of the graph's sentences; None: they are computed for each question.
        names: Names of entities that replace others.
    """
    tasks = _BUILT.setdefault(llm, {})
    key = f"{passages.sha256} {prompts.digests()[EXTRACT]} {sampling} {repairs} {titles} {names.digest}"
    task = tasks.get(key)
    if task is None or (_has_failed(task) and not getattr(llm, "ends_run", True)):
        # In a run a failure is kept, too, since it ends the run or waits for a batch. A system that stays open tries
        # again.
        extraction = _Extraction(llm, passages, prompts, sampling, repairs, titles)
        task = tasks[key] = asyncio.create_task(_read_corpus_into_graph(extraction, keep, names))
    return await asyncio.shield(task)


def _has_failed(task: asyncio.Task[TopicGraph]) -> bool:
    """Whether a build has ended with an error, or was cancelled with the question that began it."""
    return task.done() and (task.cancelled() or task.exception() is not None)


async def _read_corpus_into_graph(extraction: _Extraction, keep: Keep | None, names: EntityNames) -> TopicGraph:
    """Read the whole corpus, then build its graph; an error of a call is raised after all calls were made."""
    await in_workers(extraction.read_passages, _AT_ONCE)
    if extraction.failures:
        raise extraction.failures[0]
    # This runs in a thread, because it takes seconds for a large corpus.
    graph = await asyncio.to_thread(extraction.graph, keep, names)
    unreadable = {f"{UNREADABLE}{role}": count for role, count in graph.unreadable.items()}
    await asyncio.to_thread(_log_figures, graph, extraction.issues + Counter(unreadable))
    if not graph.statements:
        logger.warning(
            "TH-RAG graph: no triple could be read from the corpus, so every question is answered without evidence; "
            "take another model, or another prompt (--set prompts=FOLDER with %s.md)",
            EXTRACT,
        )
    return graph


class _Extraction:
    """The calls that read a corpus.

    Args:
        llm: The chat model.
        passages: The corpus.
        prompts: The prompt of the role `thrag.extract`.
        sampling: How replies are drawn, with their maximum tokens.
        repairs: Maximum repair turns for an unreadable reply.
        titles: Whether the texts of triples begin with the title of their passage.

    Attributes:
        issues: Faults of replies by kind.
        failures: Errors of calls, which are raised after all calls, so that a batch holds all of them.
    """

    def __init__(
        self,
        llm: LLMClient,
        passages: PassageStore,
        prompts: PromptSet,
        sampling: Sampling,
        repairs: int,
        titles: bool,
    ) -> None:
        self._shows_titles = titles
        self.issues: Counter[str] = Counter()
        self.failures: list[Exception] = []
        self._costs = Trace("")
        self._limit = sampling.max_tokens
        self._client = QuestionClient(
            llm, self._costs, sampling=sampling, system="thrag", prompts=prompts, repairs=repairs
        )
        # All workers take passages from one iterator.
        self._left: Iterator[tuple[int, Passage]] = enumerate(passages)
        self._titles: list[str] = []
        self._statements: dict[int, list[Statement]] = {}

    async def read_passages(self) -> None:
        """Read passages until none is left, into `_statements`; several workers run at once and share one iterator."""
        for position, passage in self._left:
            self._titles.append(_title_of(passage) if self._shows_titles else "")
            if position % _FREEZE_EVERY == 0:
                gc.freeze()  # or garbage collections would block the event loop
            try:
                self._statements[position] = await self._statements_of_passage(position, passage)
            except Exception as error:
                self.failures.append(error)

    async def _statements_of_passage(self, position: int, passage: Passage) -> list[Statement]:
        """The statements of a passage; none if no reply can be used, which is counted in `issues`."""

        def read(text: str) -> list[Statement]:
            """The statements of a reply about this passage; a list without any usable row is no list of no facts."""
            malformed_before = self.issues["extract.malformed"]
            statements = read_statements(text, passage, position, self.issues)
            if not statements and self.issues["extract.malformed"] > malformed_before:
                raise UnusableReply("no_triples", f"Nothing in the reply is a triple of three texts; {_FORM}.")
            return statements

        user = f"Title: {passage.title}\nText: {passage.text}"
        statements = await ask_of_passage(self._client, "extract", user, read, self._limit, self.issues)
        return statements or []

    def graph(self, keep: Keep | None, names: EntityNames) -> TopicGraph:
        """The graph of all passages, in the order of the corpus, whatever the order of the replies."""
        in_order = [statements for _, statements in sorted(self._statements.items())]
        graph = _graph_of_statements(chain.from_iterable(in_order), self._titles, keep, names)
        tokens = self._costs.details.get("tokens", {})
        graph.spent = {role: [self._costs.tallies[f"calls.{role}"], *counts] for role, counts in tokens.items()}
        graph.cached = self._costs.cached
        graph.unreadable_examples = self._costs.details.get("unreadable", {})
        # A role that has an example has a count, too.
        graph.unreadable = {role: self._costs.tallies[f"{UNREADABLE}{role}"] for role in graph.unreadable_examples}
        return graph


def read_statements(text: str, passage: Passage, position: int, issues: Counter[str]) -> list[Statement]:
    """Read the triples of an extraction reply, even if it is cut off; malformed triples are counted in `issues`.

    A sentence that does not stand in the passage is replaced by the words of its triple, since sentences are shown as
    quotations.

    Args:
        text: The reply.
        passage: The passage that it is about.
        position: The passage's place in the corpus.
        issues: Counts faults by kind.

    Raises:
        UnusableReply: The reply has no JSON.
    """
    values = json_values(text)
    if not values:
        raise UnusableReply("no_json", f"There is no JSON in the reply; {_FORM}.")
    rows: list[Any] = []
    for value in values:
        # A list of triples, an object that holds the list, or an object per triple.
        rows += value if isinstance(value, list) else value.get("triples", [value])
    passage_text = " ".join(passage.text.split())
    statements = []
    last_is_piece = False
    for row in rows:
        is_piece = not isinstance(row, dict) or "triple" not in row
        # The pieces of a row that was cut off follow each other, and count once.
        counts_as_row = not (is_piece and last_is_piece)
        last_is_piece = is_piece
        triple = None if is_piece else triple_of(row["triple"])
        if triple is None:
            issues["extract.malformed"] += counts_as_row
            continue
        labels = (_labels_of(row, "subject"), _labels_of(row, "object"))
        # An end without labels, often a date or a number, is in no subtopic, but its triple keeps the sentence.
        issues["extract.unlabelled_end"] += sum(not all(labels_of_end) for labels_of_end in labels)
        written = row.get("sentence") or ""
        # Some models copy several sentences for a triple.
        copies = written if isinstance(written, list) else [written]
        sentences = [copied_sentence(" ".join(str(copy).split()), passage_text) for copy in copies]
        sentence = " ".join(filter(None, sentences))
        if not sentence:
            issues["extract.sentence_not_in_text"] += 1
            sentence = " ".join(triple.as_list())
        statements.append(Statement(triple, sentence, labels, position))
    return statements


def _title_of(passage: Passage) -> str:
    """The title of a passage; "" where it is only the name of the file that the passage is from."""
    document = str((passage.source or {}).get("document", ""))
    return "" if passage.title == document else passage.title


def copied_sentence(sentence: str, passage_text: str) -> str:
    """The text's own words for a sentence that a model copied, maybe with tidied spaces, dashes and quotation marks.

    Letters and digits are compared in their order; "" if the text does not hold them.
    """
    if not sentence or sentence in passage_text:
        return sentence
    wanted, _ = letters_of(sentence)
    letters, places = letters_of(passage_text)
    start = letters.find(wanted) if wanted else -1
    if start < 0:
        return ""
    first, end = places[start], places[start + len(wanted) - 1] + 1
    # The marks around the sentence belong to it.
    while first > 0 and passage_text[first - 1] in "\"'“‘`(":
        first -= 1
    while end < len(passage_text) and passage_text[end] in ".!?\"'”’)":
        end += 1
    return passage_text[first:end]


class Letters(NamedTuple):
    """The letters and digits of a text without their case, and the place of each in the text."""

    text: str
    places: list[int]


def letters_of(text: str) -> Letters:
    """The letters and digits of a text, by which a copied sentence is found; a letter may fold into two ("ß")."""
    letters = []
    places = []
    for place, character in enumerate(text):
        if character.isalnum():
            folded = character.casefold()
            letters.append(folded)
            places += [place] * len(folded)
    return Letters("".join(letters), places)


def _labels_of(row: Mapping[str, Any], end: str) -> Labels:
    """The labels of the subject or object of a triple; "" for a label that is missing."""
    labels = row.get(end)
    if not isinstance(labels, dict):
        return Labels("", "")
    return Labels(_text_of(labels, "subtopic"), _text_of(labels, "main_topic"))


def _text_of(values: Mapping[str, Any], name: str) -> str:
    """A text of a JSON object on one line; "" if it is missing or no text."""
    text = values.get(name)
    return " ".join(text.split()) if isinstance(text, str) else ""
