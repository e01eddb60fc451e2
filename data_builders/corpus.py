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
from typing import IO, Any

from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.data.fields import name_field
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import DropReason, Question
from tripletune.core.files import file_digest, json_line, new_folder, write_json
from tripletune.core.options import CheckedOptions, setting
from tripletune.core.program import progress, run_program
from tripletune.core.rows import Row, source_rows
from tripletune.data_builders.datasets import SeenTable
from tripletune.data_builders.readers import get_reader

logger = logging.getLogger(__name__)

MANIFEST = "corpus.json"
SPLITS = ("train", "evaluation")


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
        return [] if self.train or self.evaluation else ["no file to draw from: name --train, --evaluation or both"]

    def files(self) -> dict[str, str]:
        """The file of each given split."""
        return {split: file for split in SPLITS if (file := getattr(self, split))}


def build_corpus(options: CorpusOptions, output: str | Path, overwrite: bool = False) -> dict[str, Any]:
    """Draw questions, write their corpora, and return the manifest."""
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
        logger.warning("%d evaluation questions are also training questions: draw them from another file", shared)
    return manifest


def _draw(options: CorpusOptions, split: str, location: str) -> tuple[set[int] | None, dict[str, Any]]:
    """Return the indices of the drawn questions among the usable ones (None for all), and counts."""
    count = getattr(options, f"{split}_count")
    drops = Counter[str]()
    usable = sum(1 for _ in _usable(options.reader, location, drops))
    if usable < max(count, 1):
        left_out = f" ({', '.join(f'{reason}: {n}' for reason, n in drops.items())})" if drops else ""
        raise ValueError(
            f"{location}: cannot draw {count or 'any'} questions, since only {usable} can be used{left_out}: "
            f"lower --{split}-count, or set it to 0 to draw all"
        )
    digest = file_digest(location) if Path(location).is_file() else None
    # Each split has its own random generator, so that a file added later does not change the other draw.
    numbers = set(random.Random(f"{options.seed}/{split}").sample(range(usable), count)) if count else None
    return numbers, {"file": location, "sha256": digest, "usable": usable, "left_out": dict(drops)}


def _usable(reader: str, location: str, drops: Counter[str]) -> Iterator[tuple[Row, Question]]:
    """Yield rows and questions that are answerable and have supporting passages, each id once."""
    questions = get_reader(reader)(location)
    with SeenTable() as seen:
        for (where, row), item in zip(source_rows(location), questions, strict=True):
            if not isinstance(item, Question):
                drops[str(item.reason)] += 1
            elif item.id not in (name_field(row, where, "_id"), name_field(row, where, "id")):
                raise ValueError(
                    f"{where}: reader {reader!r} does not give one question per row, so it can't be used here"
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
    """Write a passage unless the corpus has it, and return its id in the corpus; "" for a passage without text."""
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
        build_corpus(from_arguments(CorpusOptions, parsed), parsed.output, parsed.overwrite)

    return run_program(program)


if __name__ == "__main__":
    sys.exit(main())
