"""Rows of benchmark files, whatever they are stored in, and the layout HotpotQA and 2WikiMultiHopQA share.

Reads a JSON array, JSON lines, Parquet, a local folder or a hub data set, one row at a time: memory use does not
depend on the size of the file, also for the 540 MB one-line array HotpotQA is published as.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tripletune.models.data.questions import Question
from tripletune.models.data.records import Passage, shown, stored_rows, whole_characters

_CHUNK = 1 << 18
# One question with its context takes some ten kilobytes; a value this long is a broken file, not a row.
_LONGEST_ROW = 1 << 26
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")

Row = dict[str, Any]


def source_rows(location: str) -> Iterator[tuple[str, Row]]:
    """Stream `(where, row)` pairs; `where` is file and line, or file and row number where there are no lines."""
    path = Path(location)
    if path.is_file():
        with path.open("rb") as file:
            is_array = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
        yield from _array_rows(path) if is_array and path.suffix != ".parquet" else stored_rows(path)
    elif path.exists() and not path.is_dir():
        raise FileNotFoundError(f"{location} is a pipe or device; write it into a file: files are read more than once")
    elif path.is_dir() or (location.count("/") == 1 and not location.startswith((".", "/", "~")) and not path.suffix):
        yield from _dataset_rows(location)
    else:
        raise FileNotFoundError(f"no such file: {location}")


def whole_object(location: str) -> Row | None:
    """The one JSON object that a `.json` file holds; None for any other file."""
    path = Path(location)
    if path.suffix == ".json" and path.is_file():
        # What can't be read, `source_rows` reports with its place.
        with path.open(encoding="utf-8-sig") as file, suppress(json.JSONDecodeError, UnicodeDecodeError):
            # A large array is not read for this.
            return dict(json.loads("{" + file.read())) if file.read(1) == "{" else None
    return None


def own_passages(row: Row) -> tuple[Passage, ...]:
    """The passages retrieved for a question, best first: `ctxs` (Self-RAG's files), `docs` (ALCE's)."""
    found = row.get("ctxs") or row.get("docs") or ()
    texts = [(str(one.get("title") or ""), str(one.get("text") or "")) for one in found if isinstance(one, dict)]
    return tuple(Passage(title, text) for title, text in texts if text.strip())


def required_text(row: Row, keys: tuple[str, ...], where: str) -> str:
    """The first of `keys` that the row has, a non-empty string."""
    for key in keys:
        value = row.get(key)
        if isinstance(value, str) and value.strip():
            return value.strip()
        if key in row:
            raise ValueError(f"{where}: {key!r} must be a non-empty string; it is {value!r}")
    raise ValueError(f"{where}: the row has no {' or '.join(map(repr, keys))}; it has {', '.join(row) or 'nothing'}")


def gold_answers(row: Row, where: str) -> tuple[str, ...]:
    """The answer and its aliases (`answer_aliases`, where the row has them), distinct."""
    answer = row.get("answer")
    if answer is not None and not isinstance(answer, str):
        raise ValueError(f"{where}: 'answer' must be text; it is {shown(answer)}")
    if not answer or not answer.strip():
        raise ValueError(
            f"{where}: the row has no gold answer; test files are published without answers and cannot give training "
            "records, use the train or development file"
        )
    aliases = row.get("answer_aliases") or ()
    if not isinstance(aliases, (list, tuple)) or not all(isinstance(alias, str) for alias in aliases):
        raise ValueError(f"{where}: 'answer_aliases' must be a list of strings; it is {aliases!r}")
    names = (name.strip() for name in (answer, *aliases))
    return tuple(dict.fromkeys(name for name in names if name))


def title_key(title: str) -> str:
    """A title as it is compared: HTML entities resolved, NFKC, spaces folded, case ignored."""
    return " ".join(unicodedata.normalize("NFKC", html.unescape(title)).split()).casefold()


def find_passage(title: str, passages: Sequence[Passage]) -> int | None:
    """Index of the first passage with this title, else of the first whose title compares equal; None without either.

    Exact first, since titles of one context can differ in case alone ("Douglas MacLean", "Douglas Maclean").
    """
    titles = [passage.title for passage in passages]
    if title in titles:
        return titles.index(title)
    key = title_key(title)
    return next((index for index, other in enumerate(titles) if title_key(other) == key), None)


def context_passages(value: object, where: str) -> tuple[tuple[Passage, ...], tuple[int, ...]]:
    """Passages and their numbers of sentences, from `[[title, [sentences]]]` or `{"title": [], "sentences": [[]]}`."""
    value = as_list(value, "title", "sentences")
    problem = f"{where}: 'context' must be a list of [title, [sentences]] or {{'title': [], 'sentences': [[]]}}"
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{problem}; it is {type(value).__name__}")
    passages, lengths = [], []
    for entry in value:
        if not isinstance(entry, (list, tuple)) or len(entry) != 2 or not isinstance(entry[0], str):
            raise ValueError(f"{problem}; one entry is {shown(entry)}")
        title, sentences = entry
        if not isinstance(sentences, (list, tuple)) or not all(isinstance(sentence, str) for sentence in sentences):
            raise ValueError(f"{problem}; the sentences of {title!r} are {shown(sentences)}")
        passages.append(Passage(title, " ".join(sentence.strip() for sentence in sentences if sentence.strip())))
        lengths.append(len(sentences))
    return tuple(passages), tuple(lengths)


def supporting_passages(
    value: object, passages: tuple[Passage, ...], lengths: tuple[int, ...], where: str
) -> tuple[tuple[int, ...] | None, int]:
    """The passages that supporting facts name.

    Args:
        value: `[[title, index]]` or `{"title": [], "sent_id": []}`; None for a row without facts.

    Returns:
        Distinct passage indices in order of their first fact, or None when a title is not among the passages; and
        the number of facts whose sentence index is out of range. Such a fact still names its passage.
    """
    facts = as_list(value, "title", "sent_id")
    problem = f"{where}: 'supporting_facts' must be a list of [title, sentence index]"
    if not isinstance(facts, (list, tuple, type(None))):
        raise ValueError(f"{problem}; it is {type(facts).__name__}")
    found: dict[int | None, None] = {}
    out_of_range = 0
    for fact in facts or ():
        well_formed = isinstance(fact, (list, tuple)) and len(fact) == 2
        if not well_formed or not isinstance(fact[0], str) or not isinstance(fact[1], int):
            raise ValueError(f"{problem}; one entry is {shown(fact)}")
        index = find_passage(fact[0], passages)
        found[index] = None
        out_of_range += index is not None and not 0 <= fact[1] < lengths[index]
    named = tuple(index for index in found if index is not None)
    return (named if len(named) == len(found) else None), out_of_range


def as_list(value: object, *names: str) -> object:
    """A list of rows from a dictionary of columns, or from either as JSON text, as some hub copies store it."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return value
    if isinstance(value, dict) and names:
        columns = [value.get(name) or () for name in names]
        if all(isinstance(column, (list, tuple)) for column in columns):
            return list(zip(*columns))
    return value


def _dataset_rows(location: str) -> Iterator[tuple[str, Row]]:
    import datasets

    name, _, split = location.partition("#")
    name, _, configuration = name.partition("@")
    try:
        stream = datasets.load_dataset(name, configuration or None, split=split or "train", streaming=True)
    except RuntimeError as error:
        raise ValueError(f"{location}: not a data set of files ({error}); name the files themselves") from None
    for number, row in enumerate(stream, 1):
        yield f"{location}:row {number}", row


def _array_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Walk over a JSON array with a window of the file, decoding one element at a time."""
    decoder, text, line = json.JSONDecoder(), "", 1
    try:
        with path.open(encoding="utf-8-sig") as file:

            def mark() -> str:
                """Pass over white space; the character after it, or nothing at the end."""
                nonlocal text, line
                while not (rest := text.lstrip()) and (more := file.read(_CHUNK)):
                    line += text.count("\n")
                    text = more
                line += text.count("\n", 0, len(text) - len(rest))
                text = rest
                return text[:1]

            mark()  # the opening bracket, which `source_rows` has seen
            text = text[1:]
            while mark() != "]":
                if not text:
                    raise ValueError(f"{path}:{line}: the file ends inside its JSON array; is the download complete?")
                try:
                    row, end = decoder.raw_decode(text)
                except json.JSONDecodeError as error:
                    more = file.read(max(_CHUNK, len(text))) if len(text) < _LONGEST_ROW else ""
                    if not more:
                        at = f"{path}:{line + text.count(chr(10), 0, error.pos)}"
                        raise ValueError(f"{at}: not valid JSON ({error.msg})") from None
                    text += more
                    continue
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
            if mark():
                raise ValueError(f"{path}:{line}: not valid JSON (text after the array)")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason}); is this a binary file?") from None


NO_ANSWER = "rows without an answer, passed over"
_INPUT = re.compile(r"## Input:\s*")
_PARAGRAPH = re.compile(r"<paragraph>(.*?)</paragraph>\s*(\[Relevant\]|\[Irrelevant\])?", re.DOTALL)
# Named one by one: an answer may hold square brackets of its own.
_REFLECTION = re.compile(
    r"\[(?:Retrieval|No Retrieval|Continue to Use Evidence|Relevant|Irrelevant|Fully supported|Partially supported|"
    r"No support / Contradictory|Utility:[1-5])\]"
)


def is_self_rag(row: Row) -> bool:
    """Whether a row has this layout."""
    return "instruction" in row and "output" in row


def self_rag_question(row: Row, where: str, source: str) -> Question | None:
    """The question of a row, its answer and the passages that were called relevant; None when the answer is empty."""
    instruction, output = required_text(row, ("instruction",), where), required_text(row, ("output",), where)
    more = row.get("input")
    parts = _INPUT.split(f"{instruction}\n## Input:\n{more}" if isinstance(more, str) and more.strip() else instruction)
    question = " ".join(parts[-1].split())
    answer = " ".join(_REFLECTION.sub(" ", _PARAGRAPH.sub(" ", output)).split())
    if not question or not answer:
        return None
    passages = tuple(dict.fromkeys(_passages(output)))
    identity = row.get("id")
    if not isinstance(identity, str) or not identity:
        identity = hashlib.blake2b(question.encode(), digest_size=8).hexdigest()
    return Question(identity, question, (answer,), passages, tuple(range(len(passages))), "", source)


def _passages(output: str) -> Iterator[Passage]:
    for text, verdict in _PARAGRAPH.findall(output):
        title, newline, body = text.strip().partition("\n")
        if verdict != "[Irrelevant]" and (body if newline else title).strip():
            yield Passage(title.strip(), body.strip()) if newline else Passage("", title.strip())
