"""Questions and the corpus they are answered from, by the IRCoT procedure (CIRAG, sections 4.1 and B.1).

A number of questions is drawn from a benchmark file, and all paragraphs of the drawn questions, supporting or not,
make one corpus. Each paragraph stands in it once; copies that differ in their spaces or in how characters are encoded
are one. A passage's id is made of its content alone, so it is the same in every corpus. The gold links say which
passages support a question, for the recall of retrieval.

    tripletune build corpus --reader hotpotqa --train train.json --evaluation dev.json --output runs/hotpotqa

writes `<split>.jsonl` (the drawn questions, as they stand in the benchmark's file), `<split>.corpus.jsonl`,
`<split>.gold.jsonl` and, last, `corpus.json`. The paper draws 1,000 questions a split; the same options give the same
bytes.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from tripletune.data_builders.datasets.lookup import SeenTable
from tripletune.data_builders.datasets.progress import progress
from tripletune.data_builders.hotpotqa_subq.questions import DropReason, Question
from tripletune.data_builders.readers import get_reader, reader_names
from tripletune.data_builders.readers._rows import Row, read_rows
from tripletune.models.files import file_digest, write_json
from tripletune.rag.triples.store import passage_key

logger = logging.getLogger(__name__)

MANIFEST = "corpus.json"
SPLITS = ("train", "evaluation")


@dataclass(frozen=True, slots=True)
class CorpusOptions:
    """What to build.

    Attributes:
        reader: Reader of the benchmark's files.
        train: The benchmark's own training file; None: no such split.
        evaluation: The file to draw evaluation questions from, usually the development set.
        train_count: Questions to draw for training; 0 takes all.
        evaluation_count: Questions to draw for evaluation; 0 takes all.
        seed: Seed of the draws.

    Raises:
        ValueError: there is no file, or a value makes no sense.
    """

    reader: str
    train: str | None = None
    evaluation: str | None = None
    train_count: int = 1000
    evaluation_count: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if not (self.train or self.evaluation):
            problems.append("there is no file to draw from: name --train, --evaluation or both")
        for name in ("train_count", "evaluation_count"):
            if getattr(self, name) < 0:
                problems.append(f"{name} is {getattr(self, name)}: it must be 0 (all) or more")
        if problems:
            raise ValueError("; ".join(problems))

    def file(self, split: str) -> str | None:
        """The file of a split."""
        found: str | None = getattr(self, split)
        return found

    def count(self, split: str) -> int:
        """The questions to draw for a split; 0 means all."""
        return int(getattr(self, f"{split}_count"))


def build_corpus(options: CorpusOptions, output: str | Path) -> dict[str, Any]:
    """Draw questions and write their corpora.

    Every file is replaced as a whole and the manifest comes last, so a folder with a manifest is complete.

    Args:
        options: What to build.
        output: The folder; made when it is missing.

    Returns:
        The manifest: options, and what was counted in each split.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a row is malformed, a file has fewer usable questions than are to be drawn, or it would be written
            over.
        NotADirectoryError: the output folder is a file.
    """
    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"the output folder {folder} is a file: name another folder")
    splits = [split for split in SPLITS if options.file(split)]
    _spare_the_input(options, splits, folder)
    # Both are drawn before anything is written.
    drawn = {split: _draw(options, split) for split in splits}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    manifest: dict[str, Any] = {"options": asdict(options), "splits": {}}
    in_train: set[str] = set()
    for split in splits:
        positions, counts = drawn[split]
        manifest["splits"][split] = counts | _write(options, split, positions, folder, in_train)
        logger.info("%s: %s", split, json.dumps(manifest["splits"][split]))
    if shared := manifest["splits"].get("evaluation", {}).get("also_in_train"):
        logger.warning("%d evaluation questions are training questions too: draw them from another file", shared)
    write_json(folder / MANIFEST, manifest)
    return manifest


def ensure_corpus(options: CorpusOptions, output: str | Path) -> dict[str, Any]:
    """`build_corpus`, unless the folder holds what these options and files give.

    Raises:
        ValueError: the folder holds a corpus of other options or files, which results may depend on, or no corpus of
            ours.
    """
    path = Path(output) / MANIFEST
    if not path.is_file():
        return build_corpus(options, output)
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        files = [(split["file"], split["sha256"]) for split in found["splits"].values()]
        is_ours = isinstance(found["options"], dict)
    except (ValueError, KeyError, TypeError, AttributeError):
        is_ours = False
    if not is_ours:
        raise ValueError(f"{path} was not written by data_builders.corpus, or is damaged: name another folder")
    wanted = asdict(options)
    changed = [f"{name} was {found['options'].get(name)!r} and is {wanted[name]!r}"
               for name in wanted if found["options"].get(name) != wanted[name]]  # fmt: skip
    changed += [f"{file} has changed" for file, digest in files if digest and file_digest(file) != digest]
    if changed:
        raise ValueError(f"{output} holds a corpus that was drawn otherwise: {'; '.join(changed)}. Name another folder")
    return found


def _draw(options: CorpusOptions, split: str) -> tuple[set[int] | None, dict[str, Any]]:
    """Numbers of the drawn questions among the usable ones (None for all of them), and what was counted."""
    location, count = str(options.file(split)), options.count(split)
    drops: Counter[str] = Counter()
    usable = sum(1 for _ in _usable(options.reader, location, drops))
    if usable < max(count, 1):
        left_out = f" ({', '.join(f'{reason}: {n}' for reason, n in drops.items())})" if drops else ""
        raise ValueError(
            f"{location}: {count or 'some'} questions are to be drawn and {usable} can be used{left_out}: "
            f"ask for fewer (--{split}-count), or for all with 0"
        )
    counts = {
        "file": location,
        "sha256": file_digest(location) if Path(location).is_file() else None,
        "usable": usable,
        "left_out": dict(drops),
    }
    # A source of chance for each split, so that a file added later leaves the other draw alone.
    numbers = random.Random(f"{options.seed}/{split}").sample(range(usable), count) if count else None
    return (None if numbers is None else set(numbers)), counts


def _usable(reader: str, location: str, drops: Counter[str]) -> Iterator[tuple[Row, Question]]:
    """Rows with their questions: answerable, with supporting passages, each id once."""
    questions = get_reader(reader)(location)
    with SeenTable() as seen:
        for (where, row), item in zip(read_rows(location), questions, strict=True):
            if not isinstance(item, Question):
                drops[str(item.reason)] += 1
            elif item.id not in (row.get("_id"), row.get("id")):
                raise ValueError(
                    f"{where}: reader {reader!r} does not give one question a row, so it can't be used here"
                )
            elif not any(item.passages[index].text.strip() for index in item.supporting):
                drops[str(DropReason.NO_SUPPORT)] += 1
            elif seen.first("id", item.id) is not None:
                drops[str(DropReason.REPEATED_ID)] += 1
            else:
                yield row, item


def _names(split: str) -> list[str]:
    """Files of a split: questions, corpus, gold links."""
    return [f"{split}.jsonl", f"{split}.corpus.jsonl", f"{split}.gold.jsonl"]


def _spare_the_input(options: CorpusOptions, splits: Sequence[str], folder: Path) -> None:
    written = {(folder / name).resolve() for split in splits for name in (*_names(split), MANIFEST)}
    for split in splits:
        if Path(str(options.file(split))).resolve() in written:
            raise ValueError(
                f"{options.file(split)} would be written over by what is drawn from it: name another folder"
            )


def _write(
    options: CorpusOptions, split: str, drawn: set[int] | None, folder: Path, in_train: set[str]
) -> dict[str, int]:
    """Write a split; ids of training questions are put into `in_train`, which those of evaluation are held against."""
    counts = Counter[str](questions=0, passages=0, copies=0, without_text=0, supporting=0)
    if split == "evaluation" and in_train:
        counts["also_in_train"] = 0
    names = _names(split)
    scratch = [folder / f"{name}.tmp" for name in names]
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("w", encoding="utf-8", newline="\n")) for path in scratch]
        seen = stack.enter_context(SeenTable())
        usable = _usable(options.reader, str(options.file(split)), Counter())
        for number, (row, question) in enumerate(progress(usable, split)):
            if drawn is None or number in drawn:
                _write_question(row, question, files, seen, counts)
                if split == "train":
                    in_train.add(question.id)
                elif question.id in in_train:
                    counts["also_in_train"] += 1
    for path, name in zip(scratch, names):
        os.replace(path, folder / name)
    return dict(counts)


def _write_question(
    row: Row, question: Question, files: Sequence[IO[str]], seen: SeenTable, counts: Counter[str]
) -> None:
    questions, corpus, gold = files
    ids: list[str] = []
    for passage in question.passages:
        name = passage_key(passage.title, passage.text) if passage.text.strip() else ""
        ids.append(name)
        if not name:
            counts["without_text"] += 1
        elif seen.first("passage", name) is None:
            counts["passages"] += 1
            _line(corpus, {"id": name, "title": passage.title, "text": passage.text})
        else:
            counts["copies"] += 1
    supporting = list(dict.fromkeys(ids[index] for index in question.supporting if ids[index]))
    counts["questions"] += 1
    counts["supporting"] += len(supporting)
    _line(questions, row)
    _line(gold, {"question_id": question.id, "passages": supporting})


def _line(file: IO[str], row: Row) -> None:
    file.write(json.dumps(row, ensure_ascii=False) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; bad input ends it with one line and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="tripletune build corpus",
        description="Draw questions of a benchmark and build the corpus they are answered from.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--reader", required=True, choices=reader_names(), help="reader of the benchmark's files")
    add("--train", metavar="FILE", help="the benchmark's training file (or hub id)")
    add("--evaluation", metavar="FILE", help="the file to draw evaluation questions from, usually the development set")
    add("--train-count", type=int, default=1000, help="questions to draw for training; 0: all")
    add("--evaluation-count", type=int, default=1000, help="questions to draw for evaluation; 0: all")
    add("--seed", type=int, default=0, help="seed of the draws")
    add("--output", required=True, metavar="DIR", help="folder for the files")
    values = vars(parser.parse_args(arguments))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    output = values.pop("output")
    try:
        build_corpus(CorpusOptions(**values), output)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
