"""Measure what TH-RAG reads of a HotpotQA file without a language model: by passages or windows, K2 and titles."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple, get_args

from benchmarks import ENCODER, Options, Result, Row, hide_progress_of_libraries
from tripletune.core.calls import Completion, LLMClient, Message, Sampling
from tripletune.core.data.contexts import context_passages
from tripletune.core.data.passages import Passage
from tripletune.core.data.pieces import about_tokens, windows
from tripletune.core.files import json_line
from tripletune.core.options import setting
from tripletune.core.rows import required_text, source_rows
from tripletune.eval.statistics import GAP, SCORE, bootstrap_mean
from tripletune.eval.suites import interval_cells
from tripletune.rag.answering import open_tools
from tripletune.rag.system_options import SystemOptions
from tripletune.rag.systems import find_system
from tripletune.rag.systems.thrag import ThragOptions

Cut = Literal["passages", "windows", "windows, overlap"]
Order = Literal["file", "shuffled"]
ChunksBy = Literal["sentences", "passages"]


@dataclass(frozen=True)
class EvidenceOptions(Options):
    """Options of `evidence`."""

    data: str = setting("", "question file in HotpotQA's layout; the contexts of the questions are the corpus")
    questions: int = setting(100, "number of questions", at_least=1)
    skip: int = setting(0, "questions of the file to skip first", at_least=0)
    window: int = setting(1200, "maximum tokens of a window, of four characters each", at_least=1)
    overlap: int = setting(100, "maximum tokens that a window repeats", at_least=0)


class _AskedQuestion(NamedTuple):
    """A question and the sentences that it needs, by their passage's title."""

    question: str
    gold: tuple[str, ...]


class _Source(NamedTuple):
    """Questions, and the passages of their contexts with their sentences."""

    questions: list[_AskedQuestion]
    passages: dict[Passage, list[str]]


class _ReadScores(NamedTuple):
    """What was read for a question.

    Attributes:
        among: All gold sentences are among the K1 sentences.
        in_chunks: All are in the chunks that are read.
        read: Each is in one of both.
        chunks: Number of chunks that are read.
        words: Words of sentences and chunks.
    """

    among: bool
    in_chunks: bool
    read: bool
    chunks: int
    words: int


class _Chunk(NamedTuple):
    """A passage or window, and the sentences that a graph of it would have."""

    passage: Passage
    sentences: list[str]


@dataclass(frozen=True)
class _Way:
    """How the corpus is cut, and which options of `thrag` read it."""

    cut: Cut
    order: Order
    titles: bool
    chunks_by: ChunksBy
    chunks: int = 5

    @property
    def row(self) -> Row:
        """The cells that name the way, by the heads of the table."""
        return {
            "chunks": self.cut,
            "order": "" if self.cut == "passages" else self.order,
            "title": "yes" if self.titles else "no",
            "K2": f"{self.chunks} {'sentences' if self.chunks_by == 'sentences' else 'chunks'}",
        }


class _NoAnswer(LLMClient):
    """Answers nothing, since only what is read is scored."""

    model = "none"

    async def chat(
        self, messages: Sequence[Message], *, role: str, sampling: Sampling | None = None, question_id: str = ""
    ) -> Completion:
        """The same reply to every call, which no figure uses."""
        return Completion("none")


def evidence(options: EvidenceOptions) -> Result:
    """Measure for how many questions TH-RAG reads all gold sentences, without a language model.

    Each sentence of the corpus stands for a triple, and all sentences are compared (no traversal), with K1 = 30 and
    K2 = 5. A sentence is read if it is one of the K1 or stands in a chunk that is read.
    """
    hide_progress_of_libraries()
    source = _read_source(options)
    rows = []
    first: list[_ReadScores] = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, way in enumerate(_all_ways()):
            chunks = _cut_into_chunks(source, way, options)
            read = asyncio.run(_read_with_thrag(source.questions, chunks, way, Path(scratch) / str(number)))
            first = first or read
            rows.append({**way.row, "calls": len(chunks), **_mean_cells(read, first)})
    return Result(
        f"questions whose gold sentences are all read; {len(source.questions)} questions, "
        f"{len(source.passages)} passages",
        "chunks order title K2 calls among_30 in_chunks read more_than_first chunks_read words",
        rows,
        [
            "Percent of the questions, with 95 % bootstrap intervals. calls: number of chunks; extraction makes a call "
            "for each. among_30: all gold sentences are among the K1; in_chunks: all are in the chunks that are read; "
            "read: each is in one of both; more_than_first: the difference to the first row. words: mean words of "
            "sentences and chunks in the prompt.",
        ],
    )


def _all_ways() -> Iterable[_Way]:
    """All ways; the passages of windows have no titles that `thrag` could compare."""
    for titles in (True, False):
        for chunks_by in get_args(ChunksBy):
            yield _Way("passages", "file", titles, chunks_by)
    # About as many words as the windows of five sentences have.
    yield _Way("passages", "file", True, "passages", 20)
    cuts: tuple[Cut, ...] = ("windows", "windows, overlap")
    for cut in cuts:
        for order in get_args(Order):
            for chunks_by in get_args(ChunksBy):
                yield _Way(cut, order, False, chunks_by)


def _read_source(options: EvidenceOptions) -> _Source:
    """The questions of the file, and each passage of their contexts once."""
    source = _Source([], {})
    for where, row in islice(source_rows(options.data), options.skip, options.skip + options.questions):
        sentences_of = {}
        passages, _ = context_passages(row["context"], where)
        for passage, (title, sentences) in zip(passages, row["context"], strict=True):
            stripped = [sentence.strip() for sentence in sentences]
            sentences_of[title] = stripped
            source.passages.setdefault(passage, [sentence for sentence in stripped if sentence])
        gold = []
        for title, index in row["supporting_facts"]:
            if index < len(sentences_of.get(title, ())):
                gold.append(sentences_of[title][index])
        source.questions.append(_AskedQuestion(required_text(row, where, "question"), tuple(gold)))
    if not source.questions:
        raise ValueError(f"data: {options.data} has no questions after the first {options.skip}: lower --skip")
    return source


def _cut_into_chunks(source: _Source, way: _Way, options: EvidenceOptions) -> list[_Chunk]:
    """The corpus in the chunks of a way, each with the sentences that it has whole."""
    if way.cut == "passages":
        return [_Chunk(passage, sentences) for passage, sentences in source.passages.items()]
    passages = list(source.passages)
    if way.order == "shuffled":
        random.Random(options.seed).shuffle(passages)
    overlap = options.overlap if way.cut == "windows, overlap" else 0
    contents = [(passage.title, passage.text) for passage in passages]
    chunks = []
    for number, window in enumerate(windows(contents, options.window, overlap, about_tokens)):
        inside = []
        for member in window.passages:
            inside += [sentence for sentence in source.passages[passages[member]] if sentence in window.text]
        chunks.append(_Chunk(Passage("", window.text, f"window-{number:05}"), inside))
    return chunks


async def _read_with_thrag(
    questions: Sequence[_AskedQuestion], chunks: Sequence[_Chunk], way: _Way, folder: Path
) -> list[_ReadScores]:
    """Run `thrag` on the questions, and score what it shows.

    Corpus, statements and index are written into `folder`, which must be new.
    """
    folder.mkdir()
    sentences: list[str] = []
    corpus, statements = folder / "corpus.jsonl", folder / "statements.jsonl"
    with corpus.open("w", encoding="utf-8") as file, statements.open("w", encoding="utf-8") as facts:
        for chunk in chunks:
            triples = []
            for sentence in chunk.sentences:
                # The object of the triple is the sentence's number, by which it is found in the trace.
                triples.append({"triple": ["sentence", "number", str(len(sentences))], "sentence": sentence})
                sentences.append(sentence)
            row = {"title": chunk.passage.title, "text": chunk.passage.text, "id": chunk.passage.id}
            file.write(json_line(row))
            facts.write(json_line({**row, "statements": triples}))
    loop = ThragOptions(
        statements=str(statements), traversal=False, titles=way.titles, chunks_by=way.chunks_by, chunks=way.chunks
    )
    system = find_system("thrag")
    tools = open_tools(SystemOptions(encoder=ENCODER), system, loop, corpus, folder / "index", llm=_NoAnswer())
    # The ways compare the same sentences, whose vectors the encoder keeps in memory.
    tools = replace(tools, keep=None)
    read = []
    for number, asked in enumerate(questions):
        trace = await system.run(asked.question, asked.question, replace(tools, question_id=str(number)), loop)
        (step,) = trace.steps
        shown = {sentences[int(position)] for _, _, position in step.triples}
        texts = [passage.text for passage in trace.found.values()]
        read.append(_score_question(asked, shown, texts))
    return read


def _score_question(asked: _AskedQuestion, shown: Collection[str], texts: Sequence[str]) -> _ReadScores:
    """What of a question's gold sentences is among the shown sentences and in the texts of chunks."""
    everything = "\n".join(texts)
    among = [sentence in shown for sentence in asked.gold]
    inside = [sentence in everything for sentence in asked.gold]
    words = sum(len(text.split()) for text in (*shown, *texts))
    return _ReadScores(all(among), all(inside), all(map(max, among, inside)), len(texts), words)


def _mean_cells(read: Sequence[_ReadScores], first: Sequence[_ReadScores]) -> Row:
    """The means over the questions; `first` has those of the first way, to which each question is compared."""
    columns: dict[str, list[float]] = {
        "among_30": [scores.among for scores in read],
        "in_chunks": [scores.in_chunks for scores in read],
        "read": [scores.read for scores in read],
        "more_than_first": [scores.read - other.read for scores, other in zip(read, first, strict=True)],
    }
    cells: Row = {}
    for name, values in columns.items():
        interval = bootstrap_mean(values, GAP if name == "more_than_first" else SCORE)
        mean, low_to_high = interval_cells(interval)
        cells[name] = f"{mean} ({low_to_high})"
        cells[f"{name}_interval"] = interval
    cells["chunks_read"] = round(fmean([scores.chunks for scores in read]), 1)
    cells["words"] = round(fmean([scores.words for scores in read]))
    return cells
