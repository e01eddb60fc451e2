"""Options of a HotpotQA-SUBQ build, checked together; `data_builders.subq_cli` says what each one means."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tripletune.data_builders.datasets.writer import Format, split_name_problems, split_of
from tripletune.data_builders.hotpotqa_subq.labelling import FirstSubquery
from tripletune.data_builders.hotpotqa_subq.teacher import SHOWN, Shown
from tripletune.data_builders.text_to_triples.mixing import PARTS

OnCallError = Literal["stop", "drop"]
ON_CALL_ERROR: tuple[OnCallError, ...] = ("stop", "drop")
_SHARD = re.compile(r"(\d+)/(\d+)")


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build; the command line shows what each one means."""

    output: str
    first_subquery: FirstSubquery = "main_question"
    distractors: int = 0
    triple_file: str | None = None
    validation_fraction: float = 0.05
    split_name: str | None = None
    seed: int = 0
    limit: int | None = None
    asqa_count: int = PARTS["asqa"].count
    arc_easy_count: int = PARTS["arc_easy"].count
    format: Format = "jsonl"
    shard_size: int = 50_000
    overwrite: bool = False
    direct_answer_model: str | None = None
    direct_answers: str | None = None
    batch_size: int = 8
    max_new_tokens: int = 16
    concurrency: int = 64
    tokenizer: str | None = None
    shard: str | None = None
    prompts: str | None = None
    triples_from: str = "teacher"
    show_documents: Shown = "supporting"
    on_call_error: OnCallError = "stop"

    def __post_init__(self) -> None:
        if self.shard_size < 1:
            raise ValueError(f"shard size {self.shard_size}: it must be at least 1")
        if self.distractors < 0 or (self.distractors and not self.triple_file):
            raise ValueError(
                f"distractors {self.distractors}: it must be 0, or greater with a triple file (--triple-file) that "
                "holds the triples of unrelated passages"
            )
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation fraction {self.validation_fraction}: it must be at least 0 and below 1")
        for name, number in (
            ("limit", self.limit),
            ("asqa_count", self.asqa_count),
            ("arc_easy_count", self.arc_easy_count),
        ):
            if number is not None and number < 1:
                raise ValueError(f"{name} {number}: it must be at least 1")
        if self.concurrency < 1:
            raise ValueError(f"concurrency {self.concurrency}: it must be at least 1")
        if found := split_name_problems(self.split_name):
            raise ValueError("; ".join(found))
        for name, value, known in (
            ("show_documents", self.show_documents, SHOWN),
            ("on_call_error", self.on_call_error, ON_CALL_ERROR),
        ):
            if value not in known:
                raise ValueError(f"{name} {value!r} is not one of {', '.join(known)}")
        self.shard_numbers()

    def part_counts(self) -> dict[str, int]:
        """Questions of each part of the mix, by reader."""
        return {"asqa": self.asqa_count, "arc_easy": self.arc_easy_count}

    def split_of(self, question: str) -> str:
        """The split of a question; see `data_builders.shards.split_of`."""
        return self.split_name or split_of(question, self.seed, self.validation_fraction)

    def shard_numbers(self) -> tuple[int, int]:
        """This process's number, from 0, and the number of processes.

        Raises:
            ValueError: `shard` is not of the form i/n with 0 <= i < n.
        """
        if self.shard is None:
            return 0, 1
        match = _SHARD.fullmatch(self.shard)
        if not match or int(match[1]) >= int(match[2]):
            raise ValueError(f"shard {self.shard!r}: write it as i/n with i from 0 to n - 1, for example 0/4")
        return int(match[1]), int(match[2])

    def is_mine(self, position: int) -> bool:
        """Whether this process labels the row at this place of its source."""
        number, count = self.shard_numbers()
        return position % count == number


def answers_file(options: BuildOptions) -> str | None:
    """Where the direct answers are kept; None without the test."""
    if options.direct_answers is None and options.direct_answer_model is not None:
        return f"{options.output.rstrip('/')}.direct_answers.jsonl"
    return options.direct_answers
