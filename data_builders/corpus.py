"""Draw questions and build their corpus by the IRCoT procedure (CIRAG, sections 4.1 and B.1).

The corpus holds all paragraphs of the questions that are drawn from a benchmark file, supporting or not. Copies that
differ only in spaces or character encoding are stored once. The gold links name the passages that support a question,
to measure the recall of retrieval.

    tripletune build corpus --reader hotpotqa --train train.json --evaluation dev.json --output runs/hotpotqa

writes `<split>.jsonl` (the drawn questions, as they stand in the benchmark's file), `<split>.corpus.jsonl`,
`<split>.gold.jsonl` and `corpus.json`. The paper draws 1,000 questions per split. The same options give the same bytes.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypedDict, get_args

from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import DropReason, Question
from tripletune.core.files import file_digest, json_line, new_folder, write_json
from tripletune.core.options import CheckedOptions, setting
from tripletune.core.program import progress, run_program
from tripletune.core.rows import Row, source_rows
from tripletune.data_builders.datasets.lookup import SeenTable
from tripletune.data_builders.readers import get_reader

logger = logging.getLogger(__name__)

MANIFEST = "corpus.json"
Split = Literal["train", "evaluation"]
SPLITS = get_args(Split)


class Manifest(TypedDict):
    """The content of `corpus.json`.

    Attributes:
        options: The values of `CorpusOptions`.
        splits: Of each split its file, the digest of the file, and counts of questions and passages.
    """

    options: dict[str, Any]
    splits: dict[Split, dict[str, Any]]


@dataclass(frozen=True)
class CorpusOptions(CheckedOptions):
    """What to build."""

    reader: str = field(metadata={"help": "reader of the benchmark's files: hotpotqa, musique, two_wiki, ..."})
    train: str | None = setting(None, "training file or hub id of the benchmark (default: no training split)")
    evaluation: str | None = setting(
        None, "file of the evaluation questions, usually the development set (default: no evaluation split)"
    )
    train_count: int = setting(1000, "questions to draw for training; 0 draws all", at_least=0)
    evaluation_count: int = setting(1000, "questions to draw for evaluation; 0 draws all", at_least=0)
    seed: int = setting(0, "seed of the draws")

    def check(self) -> list[str]:
        """The problem that no file is named."""
        if self.train or self.evaluation:
            return []
        return ["no file to draw from: name --train, --evaluation or both"]

    def files(self) -> dict[Split, str]:
        """The file of each given split."""
        files: dict[Split, str | None] = {"train": self.train, "evaluation": self.evaluation}
        return {split: file for split, file in files.items() if file}

    def count(self, split: Split) -> int:
        """The number of questions to draw for a split; 0: all."""
        return self.train_count if split == "train" else self.evaluation_count


def build_corpus(options: CorpusOptions, output: str | Path, overwrite: bool = False) -> Manifest:
    """Draw questions, write their corpora, and return the manifest.

    A question that is in both splits is only warned about: which file to change is the user's choice.
    """
    names = [MANIFEST, *(f"{split}.*jsonl" for split in SPLITS)]
    files = options.files()
    manifest: Manifest = {"options": asdict(options), "splits": {}}
    train_ids: set[str] = set()
    with new_folder(output, names, overwrite, [file for file in files.values() if Path(file).exists()]) as folder:
        # All draws come first, so that a file with too few questions ends the build before anything is written.
        draws = {split: _draw_questions(options, split, file) for split, file in files.items()}
        for split, draw in draws.items():
            manifest["splits"][split] = draw.facts | _write_split(options, split, draw.numbers, folder, train_ids)
            logger.info("%s: %s", split, json.dumps(manifest["splits"][split]))
        write_json(folder / MANIFEST, manifest)
    shared = manifest["splits"].get("evaluation", {}).get("also_in_train")
    if shared:
        logger.warning("%d evaluation questions are also training questions: draw them from another file", shared)
    return manifest


class _UsableQuestion(NamedTuple):
    """A question with the row that it was read from: drawn questions are written as the benchmark has them."""

    row: Row
    question: Question


class _Draw(NamedTuple):
    """The questions of a split.

    Attributes:
        numbers: Numbers of the drawn questions among the usable ones, from 0; None: all.
        facts: Facts for the manifest: the file, its digest, and how many questions it has.
    """

    numbers: set[int] | None
    facts: dict[str, Any]


def _draw_questions(options: CorpusOptions, split: Split, location: str) -> _Draw:
    """Draw the questions of a split; a `ValueError` if the file has too few.

    The file is read once to count the usable questions, and a second time to write those that were drawn, so that a
    large benchmark is never in memory.
    """
    count = options.count(split)
    drops: Counter[str] = Counter()
    usable = sum(1 for _ in _usable_questions(options.reader, location, drops))
    if usable < max(count, 1):
        reasons = ", ".join(f"{reason}: {number}" for reason, number in drops.items())
        left_out = f" ({reasons})" if drops else ""
        raise ValueError(
            f"{location}: cannot draw {count or 'any'} questions, since only {usable} can be used{left_out}: "
            f"lower --{split}-count, or set it to 0 to draw all"
        )
    digest = file_digest(location) if Path(location).is_file() else None
    numbers = None
    if count:
        # Each split has its own random generator, so that a file added later does not change the other draw.
        numbers = set(random.Random(f"{options.seed}/{split}").sample(range(usable), count))
    return _Draw(numbers, {"file": location, "sha256": digest, "usable": usable, "left_out": dict(drops)})


def _usable_questions(reader: str, location: str, drops: Counter[str]) -> Iterator[_UsableQuestion]:
    """Yield the questions that are answerable and have supporting passages, each id once.

    `drops` counts the others by their `DropReason`.
    """
    questions = iter(get_reader(reader)(location))
    needed = "`build corpus` needs a reader that gives one question or `Dropped` per row, in the order of the rows"
    with SeenTable() as seen:
        for where, row in source_rows(location):
            question = next(questions, None)
            if question is None:
                raise ValueError(f"{where}: reader {reader!r} gives no question for this row: {needed}")
            if not isinstance(question, Question):
                drops[str(question.reason)] += 1
            elif not _holds(row, question.id):
                raise ValueError(
                    f"{where}: no field of this row is the id of the question that reader {reader!r} gives, "
                    f"{question.id!r}: {needed}, with the row's own id"
                )
            elif not any(question.passages[index].text.strip() for index in question.supporting):
                drops[str(DropReason.NO_SUPPORT)] += 1
            elif not seen.add_if_new("id", question.id):
                drops[str(DropReason.REPEATED_ID)] += 1
            else:
                yield _UsableQuestion(row, question)
    if next(questions, None) is not None:
        raise ValueError(f"{location}: reader {reader!r} gives more questions than the file has rows: {needed}")


def _holds(row: Row, identity: str) -> bool:
    """Whether a field of a row is the id of a question, whatever its name, so that the question is of this row."""
    return any(str(value).strip() == identity for value in row.values())


def _write_split(
    options: CorpusOptions, split: Split, drawn: set[int] | None, folder: Path, train_ids: set[str]
) -> dict[str, int]:
    """Write the three files of a split and return its counts; ids of training questions are added to `train_ids`.

    Passages of drawn questions alone are in the corpus (IRCoT's procedure).

    Args:
        drawn: Numbers of the drawn questions among the usable ones; None: all.
        train_ids: Takes the ids of training questions, to find evaluation questions among them.
    """
    counts: Counter[str] = Counter(questions=0, passages=0, copies=0, without_text=0, supporting=0)
    if split == "evaluation" and train_ids:
        counts["also_in_train"] = 0
    with ExitStack() as stack:

        def open_file(ending: str) -> IO[str]:
            """Open a file of the split, closed with the others."""
            file = (folder / f"{split}{ending}").open("w", encoding="utf-8", newline="\n")
            return stack.enter_context(file)

        questions = open_file(".jsonl")
        corpus = open_file(".corpus.jsonl")
        gold = open_file(".gold.jsonl")
        seen = stack.enter_context(SeenTable())
        usable = progress(_usable_questions(options.reader, options.files()[split], Counter()), split)
        for number, (row, question) in enumerate(usable):
            if drawn is not None and number not in drawn:
                continue
            ids = [_write_passage(passage, corpus, seen, counts) for passage in question.passages]
            supporting = list(dict.fromkeys(ids[index] for index in question.supporting if ids[index]))
            questions.write(json_line(row))
            gold.write(json_line({"question_id": question.id, "passages": supporting}))
            counts["questions"] += 1
            counts["supporting"] += len(supporting)
            if split == "train":
                train_ids.add(question.id)
            elif question.id in train_ids:
                counts["also_in_train"] += 1
    return dict(counts)


def _write_passage(passage: Passage, corpus: IO[str], seen: SeenTable, counts: Counter[str]) -> str:
    """Write a passage unless the corpus has it, and return its id in the corpus; "" for a passage without text."""
    if not passage.text.strip():
        counts["without_text"] += 1
        return ""
    first_id = seen.get_or_add("passage", passage.key, passage.id)
    if first_id is not None:
        counts["copies"] += 1
        return first_id
    counts["passages"] += 1
    corpus.write(json_line({"id": passage.id, "title": passage.title, "text": passage.text}))
    return passage.id


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; bad input prints one line and gives exit code 2."""
    parser = CommandParser(
        prog="tripletune build corpus",
        description="Draw questions from a benchmark and build the corpus that answers them.",
        example="tripletune build corpus --reader hotpotqa --train train.json --output runs/hotpotqa",
    )
    add_arguments(parser, CorpusOptions)
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the files")
    parser.add_argument("--overwrite", action="store_true", help="replace a corpus in the output folder")
    parsed = parser.parse_args(arguments)

    def program() -> None:
        """Build the corpus of the command line."""
        build_corpus(from_arguments(CorpusOptions, parsed), parsed.output, parsed.overwrite)

    return run_program(program)


if __name__ == "__main__":
    sys.exit(main())
