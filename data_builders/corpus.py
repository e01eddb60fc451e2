"""Questions and their corpus, by the IRCoT procedure (CIRAG, sections 4.1 and B.1).

All paragraphs of the questions drawn from a benchmark file, supporting or not, make one corpus. Each paragraph is in it
once, and copies may differ in spaces and character encoding. The gold links say which passages support a question, for
the recall of retrieval.

    tripletune build corpus --reader hotpotqa --train train.json --evaluation dev.json --output runs/hotpotqa

writes `<split>.jsonl` (the drawn questions, as they stand in the benchmark's file), `<split>.corpus.jsonl`,
`<split>.gold.jsonl` and `corpus.json`. The paper draws 1,000 questions per split; the same options give the same bytes.
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
from typing import IO, Any

from tripletune.data_builders.datasets import SeenTable
from tripletune.data_builders.readers import get_reader
from tripletune.data_builders.readers._rows import Row, source_rows
from tripletune.models.data.fields import name_field
from tripletune.models.data.questions import DropReason, Question
from tripletune.models.data.records import Passage
from tripletune.models.files import file_digest, json_line, new_folder, write_json
from tripletune.models.options import CheckedOptions, setting
from tripletune.models.program import CommandParser, add_arguments, from_arguments, progress, run_program

logger = logging.getLogger(__name__)

MANIFEST = "corpus.json"
SPLITS = ("train", "evaluation")


@dataclass(frozen=True)
class CorpusOptions(CheckedOptions):
    """What to build."""

    reader: str = field(metadata={"help": "reader of the benchmark's files: hotpotqa, musique, two_wiki, ..."})
    train: str | None = setting(None, "the benchmark's training file or hub id; none: no training split")
    evaluation: str | None = setting(
        None, "file to draw evaluation questions from, usually the development set; none: no evaluation split"
    )
    train_count: int = setting(1000, "questions to draw for training; 0: all", at_least=0)
    evaluation_count: int = setting(1000, "questions to draw for evaluation; 0: all", at_least=0)
    seed: int = setting(0, "seed of the draws")

    def check(self) -> list[str]:
        """Problems of several values."""
        return [] if self.train or self.evaluation else ["name --train, --evaluation or both: the files to draw from"]

    def files(self) -> dict[str, str]:
        """The file of each given split."""
        return {split: file for split in SPLITS if (file := getattr(self, split))}


def build_corpus(options: CorpusOptions, output: str | Path, overwrite: bool = False) -> dict[str, Any]:
    """Draw questions and write their corpora; returns the manifest."""
    made = [MANIFEST, *(f"{split}.*jsonl" for split in SPLITS)]
    files = options.files()
    manifest: dict[str, Any] = {"options": asdict(options), "splits": {}}
    in_train: set[str] = set()
    with new_folder(output, made, overwrite, [file for file in files.values() if Path(file).exists()]) as folder:
        drawn = {split: _draw(options, split, file) for split, file in files.items()}
        for split, (positions, counts) in drawn.items():
            manifest["splits"][split] = counts | _write(options, split, positions, folder, in_train)
            logger.info("%s: %s", split, json.dumps(manifest["splits"][split]))
        write_json(folder / MANIFEST, manifest)
    if shared := manifest["splits"].get("evaluation", {}).get("also_in_train"):
        logger.warning("%d evaluation questions are training questions too: draw them from another file", shared)
    return manifest


def _draw(options: CorpusOptions, split: str, location: str) -> tuple[set[int] | None, dict[str, Any]]:
    """Indices of the drawn questions among the usable ones (None for all), and counts."""
    count = getattr(options, f"{split}_count")
    drops = Counter[str]()
    usable = sum(1 for _ in _usable(options.reader, location, drops))
    if usable < max(count, 1):
        left_out = f" ({', '.join(f'{reason}: {n}' for reason, n in drops.items())})" if drops else ""
        raise ValueError(
            f"{location}: {count or 'some'} questions are to be drawn and {usable} can be used{left_out}: "
            f"ask for fewer (--{split}-count), or for all with 0"
        )
    digest = file_digest(location) if Path(location).is_file() else None
    # A source of chance for each split, so that a file added later leaves the other draw alone.
    numbers = set(random.Random(f"{options.seed}/{split}").sample(range(usable), count)) if count else None
    return numbers, {"file": location, "sha256": digest, "usable": usable, "left_out": dict(drops)}


def _usable(reader: str, location: str, drops: Counter[str]) -> Iterator[tuple[Row, Question]]:
    """Rows with their questions: answerable, with supporting passages, each id once."""
    questions = get_reader(reader)(location)
    with SeenTable() as seen:
        for (where, row), item in zip(source_rows(location), questions, strict=True):
            if not isinstance(item, Question):
                drops[str(item.reason)] += 1
            elif item.id not in (name_field(row, where, "_id"), name_field(row, where, "id")):
                raise ValueError(
                    f"{where}: reader {reader!r} does not give one question a row, so it can't be used here"
                )
            elif not any(item.passages[index].text.strip() for index in item.supporting):
                drops[str(DropReason.NO_SUPPORT)] += 1
            elif seen.first("id", item.id) is not None:
                drops[str(DropReason.REPEATED_ID)] += 1
            else:
                yield row, item


def _write(
    options: CorpusOptions, split: str, drawn: set[int] | None, folder: Path, in_train: set[str]
) -> dict[str, int]:
    """Write a split; ids of training questions go into `in_train`, to find evaluation questions among them."""
    counts = Counter[str](questions=0, passages=0, copies=0, without_text=0, supporting=0)
    if split == "evaluation" and in_train:
        counts["also_in_train"] = 0
    with ExitStack() as stack:
        questions, corpus, gold = (
            stack.enter_context((folder / f"{split}{ending}").open("w", encoding="utf-8", newline="\n"))
            for ending in (".jsonl", ".corpus.jsonl", ".gold.jsonl")
        )
        seen = stack.enter_context(SeenTable())
        usable = progress(_usable(options.reader, options.files()[split], Counter()), split)
        for row, question in (one for number, one in enumerate(usable) if drawn is None or number in drawn):
            ids = [_write_passage(passage, corpus, seen, counts) for passage in question.passages]
            supporting = list(dict.fromkeys(ids[index] for index in question.supporting if ids[index]))
            questions.write(json_line(row))
            gold.write(json_line({"question_id": question.id, "passages": supporting}))
            counts["questions"] += 1
            counts["supporting"] += len(supporting)
            if split == "train":
                in_train.add(question.id)
            elif question.id in in_train:
                counts["also_in_train"] += 1
    return dict(counts)


def _write_passage(passage: Passage, corpus: IO[str], seen: SeenTable, counts: Counter[str]) -> str:
    """The passage's id in the corpus, which has it once; "" without text."""
    if not passage.text.strip():
        counts["without_text"] += 1
        return ""
    first = seen.first("passage", passage.key, passage.id)
    if first is None:
        counts["passages"] += 1
        corpus.write(json_line({"id": passage.id, "title": passage.title, "text": passage.text}))
    else:
        counts["copies"] += 1
    return first or passage.id


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; bad input ends it with one line and exit code 2."""
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
        build_corpus(from_arguments(CorpusOptions, parsed), parsed.output, parsed.overwrite)

    return run_program(program)


if __name__ == "__main__":
    sys.exit(main())
