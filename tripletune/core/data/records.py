"""The structured record of a sample, from which prompts are made (RAS, sections 3.4 and C.3).

Records are stored as one JSON object per line, with the same keys in every row, so that Arrow reads any shard:

    {"id", "question_id", "task", "question", "steps": [{"query", "triples": [[s, p, o]], "text"}],
     "action", "subquery", "answers", "source"}

`core.data.rendering` turns it into text, for training and for inference alike.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import string
import unicodedata
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, cast

from tripletune.core.data.fields import checked, name_field, text_field
from tripletune.core.data.triples import Triple, triples_from_json
from tripletune.core.data.words import UNSPACED
from tripletune.core.files import JSON

Task = Literal["planning", "answering"]
# The label of tokens that are not learned.
IGNORED = -100
TASKS: tuple[Task, ...] = ("planning", "answering")
_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")
# Answers that a text may hold by chance.
YES_NO = ("yes", "no")
# The corpus file in a folder of passages; the fields that cite a passage, and their maximum length; length of a label.
CORPUS, SOURCE, _LONGEST, _LABEL = "corpus.jsonl", ("document", "page", "heading"), 1000, 60
# Size of the part of a JSON-lines file that one process reads at a time.
PART_BYTES = 2**21
_LAYOUT = {
    **dict.fromkeys(("id", "question_id", "task", "question", "action", "subquery?", "source?", "rejected?"), str),
    **{"answers?": [str], "steps?": [{}]},
}
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Action(StrEnum):
    """The planner's three decisions; the values are the interface strings of the paper."""

    SUBQ = "[SUBQ]"
    SUFFICIENT = "[SUFFICIENT]"
    NO_RETRIEVAL = "[NO_RETRIEVAL]"


def one_line(text: str) -> str:
    """Replace line breaks by spaces, so that a text stays on one line of a prompt."""
    return text if text.splitlines() in ([text], []) else " ".join(text.split())


@dataclass(frozen=True, slots=True)
class Step:
    """One round of retrieval: the sub-query q_i, the triples g_i and the text that the triples come from."""

    query: str
    triples: tuple[Triple, ...] = ()
    text: str = ""

    def to_json(self) -> dict[str, Any]:
        """The step as it is stored."""
        return {"query": self.query, "triples": [triple.as_list() for triple in self.triples], "text": self.text}

    @classmethod
    def from_json(cls, row: dict[str, Any], where: str = "step") -> Step:
        """Read a stored step; `where` opens every error message."""
        found = checked(row, where, {"query": str, "triples?": list, "text?": str})
        return cls(found["query"], triples_from_json(found.get("triples", ()), where), found.get("text", ""))


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Everything the model may see: task, main question and the history of steps.

    `graph_of`: other steps whose graph replaces the graph of the history, as a control of the graph token.
    """

    task: Task
    question: str
    steps: tuple[Step, ...] = ()
    graph_of: tuple[Step, ...] | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """A training or evaluation sample.

    Attributes:
        question_id: Shared by all records of one question, which are always in the same split.
        steps: The history (q_0, g_0), ..., (q_i, g_i).
        action: In a planning record, the action to learn. In an answering record, `NO_RETRIEVAL` if the question is
            answered without retrieval, else `SUFFICIENT`.
        subquery: The text after `[SUBQ]` of a planning label, else empty.
        answers: The gold answer, which is learned, then its aliases.
        rejected: In a preference pair, the worse label.
    """

    id: str
    question_id: str
    task: Task
    question: str
    action: Action
    steps: tuple[Step, ...] = ()
    subquery: str = ""
    answers: tuple[str, ...] = field(default=())
    source: str = ""
    rejected: str = ""

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"record {self.id!r}: task {self.task!r} is not one of {', '.join(TASKS)}")
        if not self.question.strip():
            raise ValueError(f"record {self.id!r}: the question is empty")
        if self.task == "planning" and (self.action is Action.SUBQ) != bool(self.subquery.strip()):
            raise ValueError(
                f"record {self.id!r}: action {self.action.value} with sub-query {self.subquery!r}: "
                "a [SUBQ] label needs a sub-query; any other label must have an empty sub-query"
            )
        if self.task == "answering" and not (self.answers and self.answers[0].strip()):
            raise ValueError(f"record {self.id!r}: an answering record needs a gold answer")

    @property
    def input(self) -> ModelInput:
        """The part of the record that the model may see."""
        return ModelInput(self.task, self.question, self.steps)

    @property
    def label(self) -> str:
        """The text to be learned."""
        if self.task == "answering":
            return self.answers[0]
        return one_line(f"{self.action.value} {self.subquery}".strip())

    def to_json(self) -> dict[str, Any]:
        """The row as it is stored."""
        return {
            "id": self.id,
            "question_id": self.question_id,
            "task": self.task,
            "question": self.question,
            "steps": [step.to_json() for step in self.steps],
            "action": self.action.value,
            "subquery": self.subquery,
            "answers": list(self.answers),
            "source": self.source,
            **({"rejected": self.rejected} if self.rejected else {}),
        }

    @classmethod
    def from_json(cls, row: dict[str, Any], where: str = "record") -> Record:
        """Read a stored row; `where` (file and line) opens every error message."""
        found = checked(row, where, _LAYOUT)
        action, answers, rows = found.pop("action"), found.pop("answers", ()), found.pop("steps", ())
        if action not in list(Action):
            raise ValueError(f"{where}: action {action!r} is not one of {', '.join(Action)}")
        steps = tuple(Step.from_json(row, f"{where}: step {number}") for number, row in enumerate(rows, 1))
        try:
            return cls(action=Action(action), steps=steps, answers=tuple(answers), **found)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def normalize_answer(text: str) -> str:
    """Lower-case, drop ASCII punctuation and the articles a, an, the, and fold white space (as SQuAD and HotpotQA do).

    A text with only articles or punctuation (the choice "A", the band "The The", the answer "!") keeps these, since an
    empty gold answer would match every prediction.
    """
    lowered = text.lower()
    bare = lowered.translate(_PUNCTUATION)
    normal = " ".join(_ARTICLES.sub(" ", bare).split())
    return normal or " ".join(bare.split()) or " ".join(lowered.split())


def mentions(text: str, phrase: str) -> bool:
    """Whether a text holds a phrase as whole words, after answer normalisation of both; see `UNSPACED`."""
    # In scripts without spaces, each character counts as a word.
    text, phrase = (" ".join(UNSPACED.sub(r" \g<0> ", normalize_answer(one)).split()) for one in (text, phrase))
    return f" {phrase} " in f" {text} "


def read_jsonl(
    path: str | Path, partial: bool = False, stretch: tuple[int, int, int | None] = (1, 0, None)
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Stream a JSON-lines file as `("file:line", object)` pairs; blank lines are skipped.

    Args:
        partial: Skip a last line without a line break, which a killed program leaves.
        stretch: The number of the first line to read, the byte at which it begins, and how many lines to read.
    """
    path = Path(path)
    if not path.is_file():
        what = "a folder" if path.is_dir() else "a pipe or device"
        raise FileNotFoundError(f"{path} is {what}; give a file" if path.exists() else f"no such file: {path}")
    # Read as bytes: a text file is decoded in blocks, and an error would name the wrong line.
    first, begin, count = stretch
    with open_rows(path) as lines:
        lines.seek(begin)
        for number, line in enumerate(islice(lines, count), first):
            if not line.strip() or (partial and not line.endswith(b"\n")):
                continue
            where = f"{path}:{number}"
            try:
                row = json_value(line)
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8 text ({error.reason}); is this a binary file?") from None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: not valid JSON ({error})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected a JSON object, found {type(row).__name__}")
            yield where, row


def is_packed(path: Path) -> bool:
    """Whether a file is compressed with gzip."""
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def unpacked(path: Path) -> IO[bytes]:
    """Open a file as bytes, and decompress it if it is compressed with gzip."""
    return cast(IO[bytes], gzip.open(path) if is_packed(path) else path.open("rb"))


@contextmanager
def open_rows(path: Path) -> Iterator[IO[bytes]]:
    """Open a file of rows with `unpacked`; a damaged gzip file is a `ValueError`."""
    try:
        with unpacked(path) as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: the gzip file is damaged or cut off ({error})") from None


def json_value(line: bytes) -> Any:
    """Read one JSON value, with or without byte-order mark; unpaired surrogates become U+FFFD.

    Text that was cut inside an emoji has an unpaired surrogate (`\\ud83d`), which no tokenizer reads.
    """
    value = JSON.decode(line.decode("utf-8-sig"))
    return whole_characters(value) if _HALF_CHARACTER.search(line) else value


def whole_characters(value: Any) -> Any:
    """Replace unpaired surrogates in a text or JSON value by U+FFFD; see `json_value`."""
    if not isinstance(value, str):
        return json.loads(whole_characters(json.dumps(value, ensure_ascii=False)))
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def record_files(path: str | Path, split: str | None = None) -> list[Path]:
    """The record shards under `path`: the file itself, or `<split>*.jsonl` / `<split>*.parquet` of a folder.

    If the folder has `train.jsonl` or `train-00000.jsonl`, then `train_small-00000.jsonl` is not part of split `train`.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"no such file or folder: {path}")
    stem = split or ""
    files = sorted(file for ending in ("jsonl", "parquet") for file in path.glob(f"{stem}*.{ending}"))
    if not files:
        found = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
        raise FileNotFoundError(
            f"{path} holds no {stem}*.jsonl or {stem}*.parquet shards of records (it holds {found})"
        )
    exact = re.compile(rf"{re.escape(stem)}(-\d+)?(-of-\d+)?\.\w+")
    return [file for file in files if exact.fullmatch(file.name)] or files


def stored_rows(path: str | Path, split: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Stream the rows of a file, or of one split of a folder, as `("file:line", row)`, in file order."""
    for file in record_files(path, split):
        yield from _parquet_rows(file) if file.suffix == ".parquet" else read_jsonl(file)


def stored_parts(path: str | Path, split: str | None = None) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
    """Like `stored_rows`, in independent parts: about 2 MiB of lines, or one row group of Parquet."""
    for file in record_files(path, split):
        if file.suffix == ".parquet":
            import pyarrow.parquet as pq

            about, rows = pq.ParquetFile(file).metadata, 0
            for group in range(about.num_row_groups):
                yield _parquet_rows(file, [group], rows)
                rows += about.row_group(group).num_rows
        elif is_packed(file):
            yield read_jsonl(file)
        else:
            yield from (read_jsonl(file, stretch=stretch) for stretch in _stretches(file))


def _stretches(file: Path) -> Iterator[tuple[int, int, int]]:
    first, begin, end, number = 1, 0, 0, 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            end += len(line)
            if end - begin >= PART_BYTES:
                yield first, begin, number + 1 - first
                first, begin = number + 1, end
    if end > begin:
        yield first, begin, number + 1 - first


def _parquet_rows(file: Path, groups: list[int] | None = None, number: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow.parquet as pq

    try:
        for batch in pq.ParquetFile(file).iter_batches(batch_size=512, row_groups=groups):
            for row in batch.to_pylist():
                number += 1
                yield f"{file}:row {number}", row
    except (ValueError, OSError) as error:
        raise ValueError(f"{file}: not a readable Parquet file ({error})") from None


def read_records(path: str | Path, split: str | None = None) -> Iterator[Record]:
    """Stream the records of a file, or of one split of a folder; see `stored_rows`."""
    for where, row in stored_rows(path, split):
        yield Record.from_json(row, where)


@dataclass(frozen=True, slots=True)
class Passage:
    """A unit of retrieval. `id` comes from the corpus, or else depends only on title and text.

    `source` holds document, page and heading for citations, if the corpus has them.
    """

    title: str
    text: str
    id: str = ""
    source: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not self.id:
            object.__setattr__(self, "id", passage_id(self.title, self.text))

    @classmethod
    def from_json(cls, row: dict[str, Any], where: str) -> Passage:
        """Read a row of a corpus or of triples; `where` (file and line) opens every error message."""
        title, text = name_field(row, where, "title"), text_field(row, where, "text")
        # In some corpora these fields hold something else, for example a whole document.
        named = {name: row[name] for name in SOURCE if isinstance(row.get(name), (str, int))}
        source = {name: value for name, value in named.items() if 0 < len(str(value)) < _LONGEST}
        return cls(title, text, name_field(row, where, "id", "_id"), source)

    @property
    def label(self) -> str:
        """A short name to show: the title, or the first words of the text."""
        words = " ".join(self.text[:_LABEL].split())
        return self.title or (f"{words.rpartition(' ')[0] or words}…" if len(self.text) > _LABEL else words)

    @property
    def content(self) -> str:
        """Title and text as one string, which is indexed and shown to readers."""
        return f"{self.title}\n{self.text}" if self.title else self.text

    @property
    def key(self) -> str:
        """The passage's key in stores of triples: a digest of title and text after NFKC, without white space.

        `id` can't be the key, because a corpus may set it.
        """
        return passage_id(*("".join(unicodedata.normalize("NFKC", part).split()) for part in (self.title, self.text)))


def passage_id(title: str, text: str) -> str:
    """A digest of a passage's content, as sixteen hexadecimal digits."""
    return hashlib.blake2b(f"{title}\n{text}".encode(), digest_size=8).hexdigest()


def corpus_file(path: str | Path) -> Path:
    """The JSON-lines file of a corpus: the path itself, or the file in a folder of `tripletune build passages`."""
    path = Path(path)
    if path.is_dir() and not (path / CORPUS).is_file():
        raise FileNotFoundError(
            f"{path} is a folder without {CORPUS}: give a file, or turn documents into passages with `tripletune build "
            f"passages --documents {path} --output DIR`"
        )
    return path / CORPUS if path.is_dir() else path


def passages_by_key(path: str | Path, keys: Collection[str]) -> dict[str, Passage]:
    """The first passage of a corpus with each of some `Passage.key`."""
    found: dict[str, Passage] = {}
    for passage in read_corpus(path) if keys else ():
        if (key := passage.key) in keys:
            found.setdefault(key, passage)
    return found


def read_corpus(path: str | Path, blank_texts: bool = False) -> Iterator[Passage]:
    """Stream a corpus; a line without "text" is an error, and so is an empty or null text unless `blank_texts`."""
    empty, path = True, corpus_file(path)
    for where, row in read_jsonl(path):
        passage = Passage.from_json(row, where)
        if not passage.text and ("text" not in row or not blank_texts):
            raise ValueError(f'{where}: a passage needs a non-empty "text"; the line has {", ".join(row) or "nothing"}')
        empty = False
        yield passage
    if empty:
        raise ValueError(f'{path}: the corpus is empty; it needs at least one line {{"title": …, "text": …}}')
