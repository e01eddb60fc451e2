"""Read rows of benchmark files in any format, and the layout that HotpotQA and 2WikiMultiHopQA share.

A JSON array, JSON lines, Parquet, a local folder or a hub data set is read one row at a time. So memory use does not
depend on the size of the file, even for HotpotQA, whose file is an array of 540 MB in one line.
"""

from __future__ import annotations

import hashlib
import html
import io
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from tripletune.core.data.fields import checked, given, name_field, name_list, shown, text_field, unfolded
from tripletune.core.data.jsonl import open_rows, stored_rows, whole_characters
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import Question
from tripletune.core.files import JSON

_CHUNK = 1 << 18
# A question with its context takes about ten kilobytes; a value of this length is a broken file, not a row.
_LONGEST_ROW = 1 << 26
# The text before the first row of an array, which may be a value of an object: `{"version": 1, "data": [`.
_ARRAY = re.compile(rb'(?:\xef\xbb\xbf)?\s*(?:\{(?:\s*"\w+"\s*:\s*(?:"[^"\\]*"|[\w.]+)\s*,)*\s*"data"\s*:\s*)?\[')
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")

Row = dict[str, Any]


def source_rows(location: str) -> Iterator[tuple[str, Row]]:
    """Stream `(where, row)` pairs; `where` is file and line, or file and row number if there are no lines."""
    path = Path(location)
    if opening := array_opening(path):
        yield from _array_rows(path, opening)
    elif path.is_file():
        yield from stored_rows(path)
    elif path.exists() and not path.is_dir():
        raise FileNotFoundError(f"{location} is a pipe or device, which can't be read twice: write it into a file")
    elif path.is_dir() or is_hub_name(location):
        for number, row in enumerate(open_dataset(location, streaming=True), 1):
            yield f"{location}:row {number}", row
    else:
        raise FileNotFoundError(f"no such file: {location}")


def array_opening(path: Path) -> str:
    """The text before the first row of a file with a JSON array; empty for other files."""
    if not path.is_file():
        return ""
    with open_rows(path) as file:
        opening = _ARRAY.match(file.read(4096))
    return opening[0].decode() if opening else ""


def is_hub_name(location: str) -> bool:
    """Whether a location is `owner/name` and not a path."""
    is_path = Path(location).exists() or location.startswith((".", "/", "~")) or Path(location).suffix
    return location.count("/") == 1 and not is_path


def whole_object(location: str) -> Row | None:
    """The one JSON object that a `.json` file holds; None for any other file."""
    path = Path(location)
    if path.suffix == ".json" and path.is_file():
        # `source_rows` reports unreadable files with the place of the error.
        with path.open(encoding="utf-8-sig") as file, suppress(ValueError, RecursionError):
            # A file that starts with an array is not read here.
            return dict(JSON.decode("{" + file.read())) if file.read(1) == "{" else None
    return None


def own_passages(row: Row, where: str) -> tuple[Passage, ...]:
    """The passages of a question, best first, from `context`, `ctxs` (Self-RAG's files) or `docs` (ALCE's files)."""
    # The context of an UltraDomain row is not a list but the text of a book.
    names = ["context"] if isinstance(row.get("context"), list) else ["ctxs", "docs"]
    named = checked(row, where, {f"{name}?": [dict] for name in names})
    own = ("title", "text", "id") if "context" in named else ("title", "text")
    rows = ({name: one.get(name) for name in own} for one in next(filter(None, named.values()), ()))
    return tuple(passage for one in rows if (passage := Passage.from_json(one, where)).text)


def required_text(row: Row, keys: tuple[str, ...], where: str, read: Callable[..., str] = text_field) -> str:
    """The value of the first of `keys` that the row has, which must be a non-empty string."""
    if found := read(row, where, *keys).strip():
        return found
    if key := next((key for key in keys if key in row), None):
        raise ValueError(f"{where}: {key!r} must be a non-empty string; it is {row[key]!r}")
    raise ValueError(f"{where}: the row has no {' or '.join(map(repr, keys))}; it has {', '.join(row) or 'no fields'}")


def question_id(row: Row, where: str, question: str, *keys: str) -> str:
    """The id of a question, or else a hash of its text, so that its place in the file does not matter."""
    return name_field(row, where, *keys) or hashlib.blake2b(question.encode(), digest_size=8).hexdigest()


def gold_answers(row: Row, where: str, keys: tuple[str, ...] = ("answer",)) -> tuple[str, ...]:
    """The distinct answers of a row: its answer or answers, and its `answer_aliases`.

    A list may be stored as text. Under "answer", only a list of strings counts as a list: "[1999]" is an answer.
    """
    found: list[str] = []
    for key in (next((key for key in keys if given(row, key) is not None), keys[-1]), "answer_aliases"):
        value = unfolded(written := row.get(key))
        if isinstance(written, str) and key == "answer":
            value = value if isinstance(value, list) and all(isinstance(one, str) for one in value) else written
        elif isinstance(value, str) and value.strip().startswith("["):
            raise ValueError(f"{where}: {key!r} looks like a list that was cut off; it is {shown(value)}")
        elif isinstance(value, dict):  # TriviaQA
            value = [value.get("value"), *name_list(value, where, "aliases")]
        found += name_list({key: value}, where, key)
        if not found:
            raise ValueError(
                f"{where}: the row has no gold answer ({', '.join(keys)}; it has {', '.join(row)}). Test files are "
                "published without answers: use the train or development file"
            )
    return tuple(dict.fromkeys(found))


def title_key(title: str) -> str:
    """A title for comparison: HTML entities resolved, NFKC, spaces folded, case folded."""
    return " ".join(unicodedata.normalize("NFKC", html.unescape(title)).split()).casefold()


def find_passage(title: str, passages: Sequence[Passage]) -> int | None:
    """Index of the first passage with this title, else of the first with an equal `title_key`; None without either."""
    titles = [passage.title for passage in passages]
    # Titles of one context may differ only in case ("Douglas MacLean", "Douglas Maclean").
    if title in titles:
        return titles.index(title)
    key = title_key(title)
    return next((index for index, other in enumerate(titles) if title_key(other) == key), None)


def context_passages(value: object, where: str) -> tuple[tuple[Passage, ...], tuple[int, ...]]:
    """Passages and their numbers of sentences, from `[[title, [sentences]]]`, columns or objects."""
    passages, lengths = [], []
    columns = {"title": str, "sentences": [str]}
    for entry in _objects(as_list(value, ("title",), ("sentences",)), where, "context", columns):
        sentences = (sentence.strip() for sentence in entry["sentences"])
        passages.append(Passage(entry["title"], " ".join(filter(None, sentences))))
        lengths.append(len(entry["sentences"]))
    return tuple(passages), tuple(lengths)


def supporting_passages(
    value: object, passages: tuple[Passage, ...], lengths: tuple[int, ...], where: str
) -> tuple[tuple[int, ...] | None, int]:
    """Indices of the passages that supporting facts name, in order of their first fact; None if one is missing.

    The second value counts facts whose sentence index is out of range; such a fact still names its passage.
    """
    facts = as_list([] if value is None else value, ("title",), ("sent_id", "sent_idx"))
    found: dict[int | None, None] = {}
    out_of_range = 0
    for fact in _objects(facts, where, "supporting_facts", {"title": str, "sentence index": int}):
        index = find_passage(fact["title"], passages)
        found[index] = None
        out_of_range += index is not None and not 0 <= fact["sentence index"] < lengths[index]
    named = tuple(index for index in found if index is not None)
    return (named if len(named) == len(found) else None), out_of_range


def _objects(rows: object, where: str, name: str, columns: dict[str, Any]) -> list[Row]:
    """Check the rows and return them as objects with these columns."""
    if isinstance(rows, (list, tuple)):
        rows = [dict(zip(columns, row)) if isinstance(row, (list, tuple)) else row for row in rows]
    return checked({name: rows}, where, {name: [columns]})[name]


def as_list(value: object, *names: tuple[str, ...]) -> object:
    """A list of rows, from columns or objects with these `names` or from rows, also as text; else the value itself."""
    value = unfolded(value)
    if isinstance(value, dict):
        columns = _picked(value, names) or [None]
        whole = all(isinstance(one, list) for one in columns) and len(set(map(len, columns))) == 1
        return list(zip(*columns)) if whole else value
    if isinstance(value, list):
        return [_picked(one, names) or one if isinstance(one, dict) else one for one in value]
    return value


def _picked(value: Row, names: tuple[tuple[str, ...], ...]) -> list[Any] | None:
    """The values under these names, or None if a name is missing."""
    keys = [next((name for name in known if name in value), None) for known in names]
    return None if None in keys else [value[str(key)] for key in keys]


def open_dataset(location: str, split: str = "train", streaming: bool = False) -> Any:
    """Open a data set of the hub, or a folder with the same layout, from `NAME[@configuration][#split]`."""
    import datasets

    name, _, own = location.partition("#")
    name, _, configuration = name.partition("@")
    try:
        return datasets.load_dataset(name, configuration or None, split=own or split, streaming=streaming)
    except (RuntimeError, ValueError, OSError) as error:
        if not isinstance(error, RuntimeError) and not Path(name).is_dir():
            raise
        raise ValueError(
            f"{location}: not a data set of files ({error}); name the files themselves, or cut documents into passages "
            "with `tripletune build passages`"
        ) from None


def _array_rows(path: Path, opening: str) -> Iterator[tuple[str, Row]]:
    """Decode a JSON array after its `opening` element by element, with a window of the file in memory."""
    text, line = "", 1 + opening.count("\n")
    try:
        with open_rows(path) as raw, io.TextIOWrapper(cast(Any, raw), encoding="utf-8", newline="") as file:

            def mark() -> str:
                """Skip white space and return the next character, or "" at the end."""
                nonlocal text, line
                while not (rest := text.lstrip()) and (more := file.read(_CHUNK)):
                    line += text.count("\n")
                    text = more
                line += text.count("\n", 0, len(text) - len(rest))
                text = rest
                return text[:1]

            file.read(len(opening))
            while mark() != "]":
                if not text:
                    raise ValueError(f"{path}:{line}: the file ends inside its JSON array; is the download complete?")
                try:
                    row, end = JSON.raw_decode(text)
                except json.JSONDecodeError as error:
                    more = file.read(max(_CHUNK, len(text))) if len(text) < _LONGEST_ROW else ""
                    if not more:
                        at = f"{path}:{line + text.count(chr(10), 0, error.pos)}"
                        raise ValueError(f"{at}: not valid JSON ({error.msg})") from None
                    text += more
                    continue
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path}:{line}: not valid JSON ({error})") from None
                if not isinstance(row, dict):
                    raise ValueError(f"{path}:{line}: expected a JSON object, found {type(row).__name__}")
                yield f"{path}:{line}", whole_characters(row) if _HALF_CHARACTER.search(text, 0, end) else row
                line += text.count("\n", 0, end)
                text = text[end:]
                if mark() == ",":
                    text = text[1:]
                elif text[:1] not in ("]", ""):
                    raise ValueError(f"{path}:{line}: not valid JSON (expected ',' or ']', found {text[0]!r})")
            text = text[1:]
            if mark() == "}" and "{" in opening:
                text = text[1:]
            if mark():
                raise ValueError(f"{path}:{line}: not valid JSON (text after the array)")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason}); is this a binary file?") from None


NO_ANSWER = "rows without an answer, skipped"
_INPUT = re.compile(r"## Input:\s*")
_PARAGRAPH = re.compile(r"<paragraph>(.*?)</paragraph>\s*(\[Relevant\]|\[Irrelevant\])?", re.DOTALL)
# Each token is listed, since an answer may contain square brackets.
_REFLECTION = re.compile(
    r"\[(?:Retrieval|No Retrieval|Continue to Use Evidence|Relevant|Irrelevant|Fully supported|Partially supported|"
    r"No support / Contradictory|Utility:[1-5])\]"
)


def part_questions(
    rows: Iterable[tuple[str, Row]],
    part: str,
    read: Callable[[Row, str, str], Question | None],
    issues: Counter[str],
    source: str,
) -> Iterator[Question]:
    """The questions of a part of RAS's mix, from the benchmark's rows through `read`, or from Self-RAG's file."""
    for where, row in rows:
        if not {"instruction", "output"} <= row.keys():
            question = read(row, where, source)
        elif row.get("dataset_name", part) == part:
            question = _self_rag_question(row, where, source)
        else:
            continue
        issues[NO_ANSWER] += question is None
        if question is not None:
            yield question


def _self_rag_question(row: Row, where: str, source: str) -> Question | None:
    """The question of a row, with answer and relevant passages; None if question or answer is empty."""
    instruction, output = required_text(row, ("instruction",), where), required_text(row, ("output",), where)
    more = row.get("input")
    parts = _INPUT.split(f"{instruction}\n## Input:\n{more}" if isinstance(more, str) and more.strip() else instruction)
    question = " ".join(parts[-1].split())
    answer = " ".join(_REFLECTION.sub(" ", _PARAGRAPH.sub(" ", output)).split())
    if not question or not answer:
        return None
    passages = tuple(dict.fromkeys(_passages(output)))
    known, search = tuple(range(len(passages))), question.partition(" A: ")[0]  # without choices
    return Question(
        question_id(row, where, question, "id"), question, (answer,), passages, known, "", source, search=search
    )


def _passages(output: str) -> Iterator[Passage]:
    for text, verdict in _PARAGRAPH.findall(output):
        title, newline, body = text.strip().partition("\n")
        if verdict != "[Irrelevant]" and (body if newline else title).strip():
            yield Passage(title.strip(), body.strip()) if newline else Passage("", title.strip())
