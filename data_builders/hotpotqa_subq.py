"""HotpotQA-SUBQ: benchmark questions and a teacher become planning and answering records (RAS, Algorithm 1).

    python -m data_builders.hotpotqa_subq \\
        --source hotpotqa:hotpot_train.jsonl:teacher.jsonl \\
        --source musique:musique_train.jsonl:triples.jsonl \\
        --source two_wiki:2wiki_train.json --output data/subq

The result is a folder for `datasets.load_dataset`, with a card that puts its numbers beside the paper's table 4.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_builders.annotations import KnowsDirectAnswers, Teacher, TripleFile
from data_builders.card import BuildFacts, Statistics, file_digest, write_card
from data_builders.direct_answer import DirectAnswerTest, is_correct, read_answers, store_answers
from data_builders.labelling import FirstSubquery, LabelOptions, label_question
from data_builders.questions import Dropped, DropReason, Question, UnlabelledQuestion
from data_builders.shards import (
    FORMATS,
    SPLIT_NAME,
    Format,
    ShardWriter,
    check_output,
    check_shard_options,
    replaced_folder,
)
from data_builders.sources import OpenSource, Source, open_sources
from models.normalize import normalize_answer
from models.records import Record

logger = logging.getLogger(__name__)


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
    format: Format = "jsonl"
    shard_size: int = 50_000
    overwrite: bool = False
    direct_answer_model: str | None = None
    direct_answers: str | None = None
    batch_size: int = 8
    max_new_tokens: int = 16
    concurrency: int = 64
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        check_shard_options(self.format, self.shard_size)
        if self.distractors < 0 or (self.distractors and not self.triple_file):
            raise ValueError(
                f"distractors {self.distractors}: it must be 0, or greater with a triple file (--triple-file) that "
                "holds the triples of unrelated passages"
            )
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation fraction {self.validation_fraction}: it must be at least 0 and below 1")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit {self.limit}: it must be at least 1")
        if self.concurrency < 1:
            raise ValueError(f"concurrency {self.concurrency}: it must be at least 1")
        if self.split_name is not None and not SPLIT_NAME.fullmatch(self.split_name):
            raise ValueError(f"split name {self.split_name!r}: use letters, digits, underscores and single dots")

    def split_of(self, question: str) -> str:
        """The split of a question.

        It hangs on the normalised question text and the seed alone, so all records of a question, and questions with
        the same words under different ids, are on one side, in every build.
        """
        if self.split_name:
            return self.split_name
        digest = hashlib.blake2b(f"{self.seed}\n{normalize_answer(question)}".encode(), digest_size=8).digest()
        return "validation" if int.from_bytes(digest) < self.validation_fraction * 2**64 else "train"


def build(sources: list[Source], options: BuildOptions) -> dict[str, Any]:
    """Build the data set folder.

    Args:
        sources: Benchmark files, each with its annotations.
        options: Options of the build.

    Returns:
        The statistics that are also in `statistics.json`.

    Raises:
        FileNotFoundError: an input file is missing.
        FileExistsError: the output folder is taken.
        ValueError: an input file is malformed, or no question at all could be labelled.
    """
    check_output(options.output, options.overwrite)
    opened = open_sources(sources)
    answers = _direct_answers(opened, options)
    with replaced_folder(options.output, options.overwrite) as folder:
        statistics = Statistics(options.tokenizer)
        asyncio.run(_write_records(opened, answers, options, folder, statistics))
        if not statistics.to_json()["records"]:
            found = [f"{o.source.name}: {n} x {reason}" for o in opened for reason, n in o.drops.items()]
            raise ValueError(f"no question could be labelled ({'; '.join(found) or 'the input files hold none'})")
        write_card(folder, _facts(opened, options), statistics, options.format)
    for one in opened:
        logger.info("%s: %d questions labelled, %d left out", one.source.name, one.labelled, one.drops.total())
    return statistics.to_json()


def _direct_answers(opened: list[OpenSource], options: BuildOptions) -> dict[str, str] | None:
    """Stored answers of the base model by question id, completed by a pass over the questions; None without a test."""
    path = _answers_file(options)
    if path is None:
        return None
    if options.direct_answer_model is None:
        return read_answers(path)
    test = DirectAnswerTest(options.direct_answer_model, options.batch_size, options.max_new_tokens)
    questions = (
        (question.id, question.question)
        for one in opened
        for question in one.questions(options.limit)
        if isinstance(question, Question)
    )
    written = store_answers(tqdm(questions, "direct answers", unit=" questions", disable=None), test, path)
    logger.info("%d new direct answers in %s", written, path)
    return read_answers(path, options.direct_answer_model)


def _answers_file(options: BuildOptions) -> str | None:
    if options.direct_answers is None and options.direct_answer_model is not None:
        return f"{options.output.rstrip('/')}.direct_answers.jsonl"
    return options.direct_answers


async def _write_records(
    opened: list[OpenSource],
    answers: dict[str, str] | None,
    options: BuildOptions,
    folder: Path,
    statistics: Statistics,
) -> None:
    seen: set[bytes] = set()
    triple_file = TripleFile(options.triple_file) if options.distractors and options.triple_file else None
    label_options = LabelOptions(options.first_subquery, options.distractors, triple_file, options.seed)
    with ExitStack() as stack:
        writers: dict[str, ShardWriter] = {}
        for one in opened:
            rows = tqdm(one.questions(options.limit, one.issues), one.source.name, unit=" questions", disable=None)
            questions = _usable(iter(rows), one, seen)
            while batch := list(islice(questions, options.concurrency)):
                direct = [_passes(question, one.teacher, answers) for question in batch]
                labelled = await asyncio.gather(
                    *(_label(question, one.teacher, passes, label_options) for question, passes in zip(batch, direct))
                )
                for question, records in zip(batch, labelled):
                    if isinstance(records, DropReason):
                        one.drops[records.value] += 1
                        continue
                    one.labelled += 1
                    split = options.split_of(question.question)
                    if split not in writers:
                        writer = ShardWriter(folder, split, options.format, options.shard_size)
                        writers[split] = stack.enter_context(writer)
                    for record in records:
                        writers[split].write(record)
                        statistics.add(record, split)


def _usable(rows: Iterator[Question | Dropped], one: OpenSource, seen: set[bytes]) -> Iterator[Question]:
    for row in rows:
        digest = hashlib.blake2b(row.id.encode(), digest_size=12).digest()
        if isinstance(row, Dropped):
            one.drops[row.reason.value] += 1
        elif digest in seen:
            one.drops[DropReason.REPEATED_ID.value] += 1
        else:
            seen.add(digest)
            yield row


async def _label(
    question: Question, teacher: Teacher, direct: bool, options: LabelOptions
) -> list[Record] | DropReason:
    try:
        return await label_question(question, teacher, direct, options)
    except UnlabelledQuestion as error:
        logger.debug("%s %s left out: %s", question.source, question.id, error)
        return error.reason


def _passes(question: Question, teacher: Teacher, answers: dict[str, str] | None) -> bool:
    if isinstance(teacher, KnowsDirectAnswers) and teacher.answers_directly(question):
        return True
    if answers is None:
        return False
    if question.id not in answers:
        raise ValueError(
            f"the stored direct answers have none for question {question.id!r} of {question.source}; "
            "add --direct-answer-model to complete the file"
        )
    return is_correct(answers[question.id], question.answers)


def _facts(opened: list[OpenSource], options: BuildOptions) -> BuildFacts:
    files = {path for one in opened for path in (one.source.location, one.source.annotations)} | {
        _answers_file(options),
        options.triple_file,
    }
    notes = []
    if options.direct_answer_model is None and options.direct_answers is None:
        notes.append(
            "The direct-answer test was not run (no `--direct-answer-model`): only questions that their annotation "
            "marks as direct are labelled [NO_RETRIEVAL]."
        )
    return BuildFacts(
        title="HotpotQA-SUBQ records",
        summary="Planning and answering records for triple-based iterative retrieval, labelled as in RAS, appendix C.",
        teachers={one.source.name: one.teacher.name for one in opened},
        drops={one.source.name: dict(one.drops) for one in opened if one.drops},
        questions={one.source.name: one.labelled for one in opened},
        issues={f"{one.source.name}: {what}": n for one in opened for what, n in one.issues.items() if n},
        files={path: file_digest(path) for path in sorted(filter(None, files)) if Path(path).is_file()},
        options=asdict(options),
        notes=notes,
    )


def main(arguments: list[str] | None = None) -> None:
    """The command line; bad input ends it with one line and exit code 2."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    parser = _parser()
    values = vars(parser.parse_args(arguments))
    try:
        sources = [Source.parse(text) for text in values.pop("source")]
        build(sources, BuildOptions(**values))
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data_builders.hotpotqa_subq",
        description="Build HotpotQA-SUBQ records from benchmark files and a teacher's annotations.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--source", action="append", required=True, metavar="[NAME=]READER:FILE[:ANNOTATIONS]",
        help="a benchmark file (.json, .jsonl, .parquet, or a hub id owner/name[@configuration][#split]) with its "
        "reader (hotpotqa, musique, two_wiki, ...) and annotations: recorded teacher replies, or a triple file for "
        "musique; repeat it for several")  # fmt: skip
    add("--output", required=True, help="folder of the data set")
    add("--first-subquery", choices=("main_question", "generated"), default="main_question",
        help="q_0: the main question (the paper) or the first generated sub-query (the authors' code)")  # fmt: skip
    add("--distractors", type=int, default=0, metavar="N", help="let the triples of N unrelated passages of the "
        "question join each step, as retrieval would bring them (the paper: none)")  # fmt: skip
    add("--triple-file", metavar="FILE", help="triples of those passages: JSON lines of title, text, triples")
    split = parser.add_mutually_exclusive_group()
    split.add_argument("--validation-fraction", type=float, default=0.05, help="share of the questions for validation")
    split.add_argument("--split-name", help="put everything into one split of this name instead")
    add("--seed", type=int, default=0, help="seed of the split")
    add("--limit", type=int, help="read only the first questions of each source")
    add("--format", choices=FORMATS, default="jsonl", help="format of the shards")
    add("--shard-size", type=int, default=50_000, help="records in a shard")
    add("--overwrite", action="store_true", help="replace a data set in the output folder")
    add("--direct-answer-model", help="base model of the direct-answer test: hub id, folder or pypi:package; "
        "without it and without stored answers there is no test")  # fmt: skip
    add("--direct-answers", help="JSON lines {question_id, answer} where the test's answers are kept and taken from; "
        "<output>.direct_answers.jsonl where a model is given and this is not")  # fmt: skip
    add("--batch-size", type=int, default=8, help="questions at a time in the direct-answer test")
    add("--max-new-tokens", type=int, default=16, help="longest answer in the direct-answer test, in tokens")
    add("--concurrency", type=int, default=64, help="questions a teacher works on at a time")
    add("--tokenizer", help="count the card's tokens with this model's tokenizer instead of counting words")
    return parser


if __name__ == "__main__":
    main()
