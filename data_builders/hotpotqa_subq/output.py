"""The files of a HotpotQA-SUBQ build besides its card: shards by split, left-out questions, the order of a shard."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from tripletune.data_builders.datasets.kinds.records import KIND as RECORDS
from tripletune.data_builders.datasets.writer import DatasetWriter, FolderOptions
from tripletune.data_builders.hotpotqa_subq.dropped import DroppedQuestion, DroppedWriter
from tripletune.data_builders.hotpotqa_subq.options import BuildOptions
from tripletune.data_builders.hotpotqa_subq.questions import Question, UnlabelledQuestion
from tripletune.models.data.records import Record

# Where each labelled question of a shard stands in the input.
ORDER = "order.tsv"


class SubqOutput:
    """Writes questions in the order of the input; a context manager.

    Args:
        folder: An existing folder.
        options: Format and split of the records. A process of several (`--shard`) also writes `order.tsv`: where each
            labelled question stands in the input.

    Attributes:
        statistics: Counts the records.
    """

    def __init__(self, folder: Path, options: BuildOptions) -> None:
        target = FolderOptions(str(folder / "shards"), options.format, options.shard_size, tokenizer=options.tokenizer)
        self._dataset = DatasetWriter(folder, RECORDS, target)
        self.statistics = self._dataset.statistics
        self._folder, self._options = folder, options
        self._stack = ExitStack()
        self._stack.callback(self._dataset.close)
        self._dropped = DroppedWriter(folder)
        self._order: IO[str] | None = None

    def __enter__(self) -> SubqOutput:
        self._stack.enter_context(self._dropped)
        if self._options.shard is not None:
            self._order = self._stack.enter_context((self._folder / ORDER).open("w", encoding="utf-8"))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def write(self, source: int, position: int, question: Question, records: list[Record]) -> None:
        """Write the records of one question.

        Args:
            source: The number of its source, from 0.
            position: Its place there, from 0.
            question: The question.
            records: Its records.
        """
        split = self._options.split_of(question.question)
        for record in records:
            self._dataset.write(record, split)
        if self._order is not None:
            self._order.write(f"{source}\t{position}\t{split}\t{len(records)}\n")

    def drop(self, source: str, position: int, question: Question, error: UnlabelledQuestion) -> None:
        """Write down that a teacher could not label a question.

        Args:
            source: The name of its source.
            position: Its place there, from 0.
            question: The question.
            error: Why.
        """
        self._dropped.add(DroppedQuestion.of(source, position, question, error))

    def examples(self) -> dict[str, list[dict[str, Any]]]:
        """Some of the questions that were left out, by reason."""
        return self._dropped.examples()
