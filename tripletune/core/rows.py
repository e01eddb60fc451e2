"""Read rows of benchmark files in any format, and the fields that most benchmarks share.

A reader of a benchmark (`docs/guide/extend.md`) calls `source_rows` for the rows, then `required_text`,
`required_name`, `gold_answers` and `question_id` for their fields (others: `core.data.fields`; passages of a question:
`core.data.contexts`). Every error names file and line.

A JSON array, JSON lines, Parquet, CSV, a local folder or a hub data set is read one row at a time. So memory use does
not depend on the size of the file, even for HotpotQA, whose file is an array of 540 MB in one line.

Tested in `tests/data_builders/test_readers.py`.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tripletune.core.data.arrays import array_opening, array_rows
from tripletune.core.data.fields import given, name_field, name_list, shown, text_field, unfolded
from tripletune.core.data.jsonl import check_copies, check_nothing_unread, check_shards, open_rows, stored_rows
from tripletune.core.files import JSON, file_digest
from tripletune.core.hub import check_not_a_missing_folder, files_of_split

Row = dict[str, Any]
_TABLE = re.compile(r"\.[ct]sv(\.gz)?$", re.IGNORECASE)


def source_rows(location: str) -> Iterator[tuple[str, Row]]:
    """Stream the rows of a benchmark, each after its place for error messages.

    Args:
        location: A local file (JSON array, JSON lines, Parquet, CSV or TSV, also with gzip), a folder, or a hub id
            `owner/name`, optionally with `@configuration` and `#split`.

    Yields:
        `(where, row)`; `where` is "file:line", or "file:row number" if there are no lines.

    Raises:
        FileNotFoundError: There is no such file, and the location is no hub id.
        ValueError: A row can't be read, or is not an object.
    """
    path = Path(location)
    if path.is_file():
        yield from file_rows(path)
    elif path.exists() and not path.is_dir():
        raise FileNotFoundError(f"{location} is a pipe or device, which can't be read twice: write it into a file")
    elif path.is_dir() or is_hub_name(location):
        yield from open_dataset(location, streaming=True).rows()
    else:
        raise FileNotFoundError(f"no such file: {location}")


def file_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Stream the rows of a local file in any format, each after its place; see `source_rows`."""
    opening = array_opening(path)
    if opening:
        yield from array_rows(path, opening)
    elif _TABLE.search(path.name):
        yield from _table_rows(path)
    else:
        yield from stored_rows(path)


def rows_of_split(path: str | Path, split: str | None = None) -> Iterator[tuple[str, Row]]:
    """Stream the rows of a local file in any format, or of one split of a folder of shards, each after its place."""
    if Path(path).is_file():
        return file_rows(Path(path))
    return stored_rows(path, split)


def is_in_one_part(path: Path) -> bool:
    """Whether a local file can only be read from its beginning: an array, or a table (cells hold line breaks)."""
    return path.is_file() and bool(_TABLE.search(path.name) or array_opening(path))


def _table_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Stream the rows of a CSV or TSV file; every cell is text, since a type could only be guessed ("007").

    Raises:
        ValueError: A row has not as many cells as the header, or the file is not UTF-8.
    """
    delimiter = "\t" if ".tsv" in path.name.lower() else ","
    with open_rows(path) as raw, io.TextIOWrapper(cast(Any, raw), encoding="utf-8-sig", newline="") as file:
        table = csv.DictReader(file, delimiter=delimiter, strict=True)
        try:
            for row in table:
                # Cells that a row lacks are None, cells beyond the header have the name None.
                if None in row or None in row.values():
                    raise ValueError(f"{path}:{table.line_num}: the row has not as many cells as the header")
                yield f"{path}:{table.line_num}", row
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text ({error.reason}); save the table as UTF-8") from None
        except csv.Error as error:
            raise ValueError(f"{path}:{table.line_num}: not a table of comma-separated values ({error})") from None


def is_hub_name(location: str) -> bool:
    """Whether a location is `owner/name` and not a path.

    A file that exists wins. A name with an ending is a path too, so that a mistyped file is not looked for on the hub.
    """
    path = Path(location)
    looks_like_path = location.startswith((".", "/", "~")) or bool(path.suffix)
    is_path = looks_like_path or path.exists()
    return location.count("/") == 1 and not is_path


@dataclass(frozen=True)
class DataSet:
    """One split of a data set of the hub, or of a folder with the same layout.

    Files of rows are read here, like any other file: `datasets` would give the columns of a JSON or CSV file types, and
    make "7" or 7 of "007", 1000.0 of "1e3", and times of texts that look like dates.

    Attributes:
        location: The folder or hub id, for error messages.
        files: The split's files on this machine, by their names or addresses; empty if only `datasets` reads them.
        library: The data set as `datasets` reads it, if there are no files.
    """

    location: str
    files: Mapping[str, Path]
    library: Any = None

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Stream the rows, each after its place for error messages.

        A file of the hub lies in a cache under a name that tells nobody anything, so its address stands in its place.
        """
        for name, file in self.files.items():
            for where, row in file_rows(file):
                yield name + where.removeprefix(str(file)), row
        for number, row in enumerate(self.library or (), 1):
            yield f"{self.location}:row {number}", row

    @property
    def content(self) -> list[str] | str:
        """Digests of the files, or the fingerprint of the library."""
        if self.files:
            return [file_digest(file) for file in self.files.values()]
        return str(self.library._fingerprint)


def open_dataset(location: str, split: str = "train", streaming: bool = False) -> DataSet:
    """Find a data set of the hub, or a folder with the same layout, with the library `datasets`.

    Args:
        location: `NAME[@configuration][#split]`.
        split: The split to open where the location names none.
        streaming: Read formats that only the library reads row by row, without a copy on disk.
    """
    import datasets

    name, _, named_split = location.partition("#")
    name, _, configuration = name.partition("@")
    if not Path(name).is_dir():
        check_not_a_missing_folder(name)
    wanted = named_split or split
    try:
        files = files_of_split(datasets.load_dataset_builder(name, configuration or None), wanted)
        if files:
            check_shards([file.rpartition("/")[2] for file in files], location)
            if Path(name).is_dir():
                check_nothing_unread(list(files.values()), list(files.values()))
                check_copies(files.values())
            return DataSet(location, files)
        library = datasets.load_dataset(name, configuration or None, split=wanted, streaming=streaming)
        return DataSet(location, {}, library)
    except (RuntimeError, ValueError, OSError) as error:
        # Errors of the hub say what is wrong; those of a local folder take it for a data set of the library's own.
        is_of_hub = not isinstance(error, RuntimeError) and not Path(name).is_dir()
        if is_of_hub:
            raise
        raise ValueError(
            f"{location}: not a data set of files ({error}); name the files themselves, or cut documents into passages "
            "with `tripletune build passages`"
        ) from None


def whole_object(location: str) -> Row | None:
    """The one JSON object that a `.json` file holds; None for any other file."""
    path = Path(location)
    if path.suffix != ".json" or not path.is_file():
        return None
    # `source_rows` reports unreadable files with the place of the error.
    with path.open(encoding="utf-8-sig") as file, suppress(ValueError, RecursionError):
        # A file that starts with an array may be large, so it is not read here.
        if file.read(1) != "{":
            return None
        first_line = "{" + file.readline()
        if first_line.rstrip().endswith("}") and file.read(1).strip() == "{":
            # JSON lines in spite of the name, as KILT's knowledge source of 35 GB.
            return None
        file.seek(0)
        return dict(JSON.decode(file.read()))
    return None


def required_text(row: Mapping[str, Any], where: str, *names: str) -> str:
    """The text of the first named field that is present.

    Raises:
        ValueError: All named fields are absent or blank, or the value is not text. The message starts with `where`.
    """
    text = text_field(row, where, *names).strip()
    if not text:
        raise _absent_field_error(row, where, names)
    return text


def required_name(row: Mapping[str, Any], where: str, *names: str) -> str:
    """An id, a title or a label that must be present: like `required_text`, but a number becomes text."""
    name = name_field(row, where, *names).strip()
    if not name:
        raise _absent_field_error(row, where, names)
    return name


def require_fields(row: Mapping[str, Any], where: str, *names: str) -> None:
    """Refuse a row without one of the fields that a benchmark's own layout has, and name the reader of such files.

    Copies of a benchmark often keep its questions and answers alone.

    Raises:
        ValueError: A field is absent or null; the message starts with `where`.
    """
    for name in names:
        if row.get(name) is None:
            raise ValueError(
                f"{where}: the row lacks {name}; it has {', '.join(row)}: if the file holds only questions and "
                "answers, `qa` reads it (eval run --task qa, build subq --source qa:FILE)"
            )


def _absent_field_error(row: Mapping[str, Any], where: str, names: Sequence[str]) -> ValueError:
    """The error for a row in which all named fields are absent or blank.

    A field that is there but blank is named with its value; else the row's fields are, among which the right one is.
    """
    for name in names:
        if name in row:
            return ValueError(f"{where}: {name!r} must be a non-empty string; it is {row[name]!r}")
    wanted = " or ".join(map(repr, names))
    hint = ""
    if "question_text" in row and "answers_objects" in row:
        hint = ": rows of IRCoT, which the reader ircot and the tasks ircot_… read"
    return ValueError(f"{where}: the row has no {wanted}; it has {', '.join(row) or 'no fields'}{hint}")


def question_id(row: Mapping[str, Any], where: str, question: str, *names: str) -> str:
    """The id of a question in the first named field that is present, or else a hash of its text.

    The hash does not depend on the question's place in the file, so two copies of a file give the same ids.
    """
    identity = name_field(row, where, *names)
    if identity:
        return identity
    return hashlib.blake2b(question.encode(), digest_size=8).hexdigest()


def gold_answers(row: Mapping[str, Any], where: str, *names: str) -> tuple[str, ...]:
    """The distinct gold answers of a row, then its `answer_aliases`.

    Args:
        names: The fields that may hold the answer or answers, of which the first present one is read (default:
            "answer"). A list may be stored as text; under "answer" only a list of strings counts as a list, because
            "[1999]" is an answer. Answers may also be joined by bars, as in T2RAG's PopQA ("politician|pol"). An object
            `{"value", "aliases"}` (TriviaQA) or `{"text": [...]}` (SQuAD) is read too.

    Raises:
        ValueError: The row has no gold answer, as in a benchmark's test file.
    """
    names = names or ("answer",)
    present = [name for name in names if given(row, name) is not None]
    first_present = present[0] if present else names[-1]
    answers = _answers_in(row, where, first_present)
    if not answers:
        raise ValueError(
            f"{where}: the row has no gold answer ({', '.join(names)}; it has {', '.join(row)}). Test files are "
            "published without answers: use the train or development file"
        )
    answers += _answers_in(row, where, "answer_aliases")
    return tuple(dict.fromkeys(answers))


def _answers_in(row: Mapping[str, Any], where: str, name: str) -> list[str]:
    """The answers in one field; see `gold_answers`.

    The order of the cases matters: "answer" alone may be a text in brackets, and a text in brackets that could not be
    read was a list (`tests/eval/test_plain_questions.py`).
    """
    stored = row.get(name)
    value = unfolded(stored)
    if isinstance(stored, str) and name == "answer":
        is_list_of_texts = isinstance(value, list) and all(isinstance(answer, str) for answer in value)
        if not is_list_of_texts:
            value = stored
    elif isinstance(value, str) and value.strip().startswith("["):
        raise ValueError(f"{where}: {name!r} looks like a list that was cut off; it is {shown(value)}")
    elif isinstance(value, dict) and isinstance(value.get("text"), list):  # SQuAD
        value = value["text"]
    elif isinstance(value, dict):  # TriviaQA
        value = [value.get("value"), *name_list(value, where, "aliases")]
    if isinstance(value, str) and "|" in value:
        value = [answer.strip() for answer in value.split("|") if answer.strip()] or value
    return name_list({name: value}, where, name)
