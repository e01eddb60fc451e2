"""Passages that a benchmark prints beside its questions, and the supporting facts that name some of them.

`own_passages` reads any of the layouts. `context_passages` and `supporting_passages` read the one that HotpotQA and
2WikiMultiHopQA share, in which facts count the sentences of a passage.

Tested in `tests/data_builders/test_readers.py`.
"""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple

from tripletune.core.data.fields import checked, given, unfolded
from tripletune.core.data.passages import Passage

Row = dict[str, Any]


def own_passages(row: Row, where: str, blank_texts: bool = False) -> tuple[Passage, ...]:
    """The passages of a question, best first: `context(s)`, `ctxs` or `top_contexts` (Self-RAG), `docs` (ALCE).

    Each is an object with `text` and an optional `title`, and in `context` an optional `id`, or a text alone (RAGAS);
    or `context` has HotpotQA's layout `[[title, [sentences]]]`. Those without text are left out unless `blank_texts`,
    since T2RAG's files name documents without their sentences.
    """
    if _has_sentences(row.get("context")):
        passages_of_context, _ = context_passages(row["context"], where)
        return tuple(passage for passage in passages_of_context if passage.text or blank_texts)
    # The context of an UltraDomain row is not a list but the text of a book.
    if isinstance(row.get("context"), list):
        names = ["context"]
        fields = ["title", "text", "id"]
    elif isinstance(row.get("contexts"), list):
        names = ["contexts"]
        fields = ["title", "text"]
    else:
        names = ["ctxs", "top_contexts", "docs"]
        # The ids of these files are those of another corpus, and may repeat.
        fields = ["title", "text"]
    as_objects = {name: _texts_as_objects(row.get(name)) for name in names}
    lists = checked(as_objects, where, {f"{name}?": [dict] for name in names})
    passages = []
    for entry in given(lists, *names) or ():
        passage = Passage.from_json({field: entry.get(field) for field in fields}, where)
        if passage.text or blank_texts:
            passages.append(passage)
    return tuple(passages)


def _texts_as_objects(entries: object) -> object:
    """A list in which each text is an object with this text; what is no list is left for the caller's check."""
    if not isinstance(entries, list):
        return entries
    objects = []
    for entry in entries:
        objects.append({"text": entry} if isinstance(entry, str) else entry)
    return objects


def _has_sentences(context: object) -> bool:
    """Whether a context has HotpotQA's layout, as rows, objects or columns, not that of passages with a text.

    The first entry decides; `context_passages` checks them all.
    """
    context = unfolded(context)
    if isinstance(context, dict):
        return "sentences" in context
    if not isinstance(context, list) or not context:
        return False
    first = context[0]
    if isinstance(first, dict):
        return "sentences" in first
    return isinstance(first, list | tuple)


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
    for index, other in enumerate(titles):
        if title_key(other) == key:
            return index
    return None


class Context(NamedTuple):
    """The passages of a question, and the number of sentences of each, by which supporting facts count."""

    passages: tuple[Passage, ...]
    lengths: tuple[int, ...]


def context_passages(value: object, where: str) -> Context:
    """Read a context: `[[title, [sentences]]]`, columns or objects.

    Blank sentences are counted, since the facts count them, but not written.
    """
    passages = []
    lengths = []
    columns = {"title": str, "sentences": [str]}
    for entry in _checked_objects(as_list(value, ("title",), ("sentences",)), where, "context", columns):
        sentences = [sentence.strip() for sentence in entry["sentences"]]
        text = " ".join(sentence for sentence in sentences if sentence)
        passages.append(Passage(entry["title"], text))
        lengths.append(len(sentences))
    return Context(tuple(passages), tuple(lengths))


class Support(NamedTuple):
    """What the supporting facts of a question name.

    Attributes:
        passages: Indices of the passages, in order of their first fact; None if a fact names a passage that the
            context does not have.
        out_of_range: Number of facts with a sentence index that their passage does not have. Such a fact still names
            its passage.
    """

    passages: tuple[int, ...] | None
    out_of_range: int


def supporting_passages(value: object, passages: Sequence[Passage], lengths: Sequence[int], where: str) -> Support:
    """Read supporting facts: `[[title, sentence index]]`, columns or objects.

    All facts are read even if one names no passage, so that indices out of range are counted alike in all rows.

    Args:
        value: The row's facts; None for a row without facts.
        passages, lengths: What `context_passages` returned for the row.
    """
    facts = [] if value is None else as_list(value, ("title",), ("sent_id", "sent_idx"))
    indices: list[int] = []
    out_of_range = 0
    is_complete = True
    for fact in _checked_objects(facts, where, "supporting_facts", {"title": str, "sentence index": int}):
        index = find_passage(fact["title"], passages)
        if index is None:
            is_complete = False
            continue
        if not 0 <= fact["sentence index"] < lengths[index]:
            out_of_range += 1
        if index not in indices:
            indices.append(index)
    if not is_complete:
        return Support(None, out_of_range)
    return Support(tuple(indices), out_of_range)


def _checked_objects(rows: object, where: str, name: str, columns: dict[str, Any]) -> list[Row]:
    """Check the rows, which may be lists of values or objects, and return them as objects with these columns."""
    if isinstance(rows, (list, tuple)):
        objects = []
        for row in rows:
            if isinstance(row, (list, tuple)):
                # The check below reports a row with fewer values; more values are not used.
                row = dict(zip(columns, row, strict=False))
            objects.append(row)
        rows = objects
    return checked({name: rows}, where, {name: [columns]})[name]


def as_list(value: object, *columns: tuple[str, ...]) -> object:
    """A list of rows from what a benchmark stores as rows, as objects or as columns; else the value itself.

    What has none of these layouts is returned, because the caller's check names the faulty field and its value.

    Args:
        value: `[[a, b]]`, `[{"x": a, "y": b}]` or `{"x": [a], "y": [b]}`, also as text.
        columns: The names under which each column may be stored: `(("title",), ("sent_id", "sent_idx"))`.
    """
    value = unfolded(value)
    if isinstance(value, dict):
        lists = _values_of_columns(value, columns)
        if lists is None or not all(isinstance(values, list) for values in lists):
            return value
        have_one_length = len(set(map(len, lists))) == 1
        if not have_one_length:
            return value
        return list(zip(*lists, strict=True))
    if isinstance(value, list):
        rows = []
        for row in value:
            cells = _values_of_columns(row, columns) if isinstance(row, dict) else None
            rows.append(row if cells is None else cells)
        return rows
    return value


def _values_of_columns(values: Row, columns: tuple[tuple[str, ...], ...]) -> list[Any] | None:
    """The value of each column, or None if a column is missing; the first of its names that is there counts."""
    picked = []
    for names in columns:
        present = [name for name in names if name in values]
        if not present:
            return None
        picked.append(values[present[0]])
    return picked
