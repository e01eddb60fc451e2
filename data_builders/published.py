"""Published data that need no teacher: RAS's own training data, ExplaGraphs, and files of other projects.

**RAS** (hub data set `pat-jj/ras_train_data`, `train_data.jsonl`). A row is `{"input", "label", "graphs"}` with the
finished prompt in `input` (figures 9-13):

    <instruction>

    [SUBQ] q_0
    Retrieved Graph Information: ['(S> s| P> p| O> o)', "(S> s| P> p| O> o's)"]
    ...
    Question: Q

Without history it is `Question: Q`, or `[NO_RETRIEVAL]` and `Question: Q`, or the bare question. The task is
read from the instruction, else from the label; the question's id is a hash of its normalised text. Planning rows have
no answers, steps no text; repeated triples of a step are kept once. `graphs`, the same triples, is not read.

**ExplaGraphs** (Saha et al., 2021), the graph task G-Retriever reports on: does argument 2 support argument 1? The file
is tab-separated `arg1, arg2, label, graph`, the graph written `(s; p; o)(s; p; o)`. A row becomes one answering record
whose only step holds the graph. G-Retriever (He et al., 2024) splits the 2,766 rows at random 60/20/20; so does
`split_names`, with a seed of its own, hence the test rows are not the same ones as theirs.

**Corpora, triples and questions of other projects** as files that this one reads (`tripletune data adapt`):

| rows | where they come from | become |
|---|---|---|
| `{"docs": [{"passage", "extracted_triples"}]}` | HippoRAG's OpenIE files | triples of passages, for `--triples` |
| `{"title", "text"}`, an array | HippoRAG's corpora | passages |
| `{"id", "contents"}` | FlashRAG's wiki-18 | passages; the first line of `contents` is the title |
| `{"title", "body"}` | MultiHop-RAG's articles | passages, in pieces |
| `{"corpus_name", "context"}` | GraphRAG-Bench's texts | passages, in pieces |
| `{"input", "context", "meta"}` | UltraDomain's questions | the passages of their texts, in pieces |
| `{"answer_id", …}` and `--aliases` | 2WikiMultiHopQA | the rows with `answer_aliases`, as its script v1.1 scores |
"""

from __future__ import annotations

import ast
import csv
import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tripletune.data_builders.readers._rows import Row, required_text, source_rows, whole_object
from tripletune.models.data.fields import checked, given, name_field, name_list, shown, text_field
from tripletune.models.data.records import Action, Record, Step, normalize_answer, read_jsonl
from tripletune.models.data.rendering import parse_plan
from tripletune.models.data.triples import Triple, parse_triples
from tripletune.models.files import check_new, json_line, new_file, read_text
from tripletune.models.options import setting
from tripletune.rag.extractor import split_passage

HUB_ID = "pat-jj/ras_train_data"
REPEATED_TRIPLES = "triples that repeat another of their step, kept once"
MALFORMED_TRIPLES = "malformed triples, left out"
_SOURCE = "ras_released"
_GRAPH = "Retrieved Graph Information:"
_BODY = re.compile(r"^(?:\[SUBQ\]\s|Question: |\[NO_RETRIEVAL\]\s*Question: )", re.MULTILINE)
_SUBQ = re.compile(r"\[SUBQ\]\s+")
# Of the list of triples belongs all up to the next step or the question.
_NEXT = re.compile(r"\n\s*(?=\[SUBQ\]\s|Question: )")


class MalformedRow(ValueError):
    """A row of the released data that cannot be read; the message is in the words of the data set card."""


def read_released(location: str, drops: Counter[str], issues: Counter[str]) -> Iterator[Record]:
    """Stream the records of the released data."""
    # The number makes an id unique: the data has rows that say the same.
    for number, (_, row) in enumerate(source_rows(location), 1):
        try:
            yield released_record(row, number, issues)
        except MalformedRow as error:
            drops[str(error)] += 1


def released_record(row: Row, number: int, issues: Counter[str]) -> Record:
    """Row `number` as a record."""
    text, label = row.get("input"), row.get("label")
    if not isinstance(text, str) or not isinstance(label, str) or not text.strip() or not label.strip():
        raise MalformedRow("input or label is missing, empty or no text")
    instruction, body = _split_instruction(text.replace("\r\n", "\n"))
    steps, question = _parse_body(body, issues)
    plan = parse_plan(" ".join(label.split()))
    role = re.search(r"\b(planner|answerer)\b", instruction)
    planning = role.group() == "planner" if role else plan.action is not None
    if planning and plan.action is None:
        raise MalformedRow("the label of a planning row is no action")
    answering = Action.SUFFICIENT if steps else Action.NO_RETRIEVAL
    identity = hashlib.blake2b(normalize_answer(question).encode(), digest_size=8).hexdigest()
    return Record(
        id=f"{_SOURCE}:{number}:{'plan' if planning else 'answer'}",
        question_id=f"{_SOURCE}-{identity}",
        task="planning" if planning else "answering",
        question=question,
        action=plan.action if planning and plan.action else answering,
        steps=steps,
        subquery=plan.subquery if planning else "",
        answers=() if planning else (label.strip(),),
        source=_SOURCE,
    )


def _split_instruction(text: str) -> tuple[str, str]:
    """Instruction and body; no line of an instruction begins as a body does."""
    start = _BODY.search(text)
    if start is not None:
        return text[: start.start()], text[start.start() :]
    # A bare question stands behind a blank line, and may hold blank lines itself.
    head, blank, rest = text.lstrip("\n").partition("\n\n")
    return (head, rest) if blank else (text, "")


def _parse_body(body: str, issues: Counter[str]) -> tuple[tuple[Step, ...], str]:
    steps: list[Step] = []
    body = body.removeprefix(Action.NO_RETRIEVAL.value).lstrip()
    while opening := _SUBQ.match(body):
        query, graph, rest = body[opening.end() :].partition(_GRAPH)
        query = " ".join(query.split())
        following = _NEXT.search(rest)
        if not graph or not query or _NEXT.search(body[: body.find(_GRAPH)], opening.end()):
            raise MalformedRow("a step without sub-query or graph information")
        if following is None:
            raise MalformedRow("no question in the input")
        steps.append(Step(query, _read_triples(rest[: following.start()], issues)))
        body = rest[following.end() :]
    question = body.removeprefix("Question:").strip()
    if not question:
        raise MalformedRow("no question in the input")
    return tuple(steps), question


def _read_triples(text: str, issues: Counter[str]) -> tuple[Triple, ...]:
    """The triples of a printed list, read one by one; when it is broken, those that can be read from its text."""
    try:
        items = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        items = None
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        items = [text]
    found: list[Triple] = []
    for item in items:
        # Backslashes are no escapes there, and a line break inside a name is a space.
        folded = " ".join(item.split()).replace("\\", "\\\\")
        # The authors' code split the list at "), ", so a last bracket may be missing.
        parsed = parse_triples(folded if folded.endswith((")", "]")) else f"{folded})")
        found += parsed.triples
        issues[MALFORMED_TRIPLES] += parsed.malformed or bool(folded and not parsed.triples)
    distinct = tuple(dict.fromkeys(found))
    issues[REPEATED_TRIPLES] += len(found) - len(distinct)
    return distinct


LABELS = ("support", "counter")
MALFORMED = "malformed triples in graphs"
_BETWEEN_TRIPLES = re.compile(r"\)\s*,?\s*\(")


def read_explagraphs(path: str | Path, issues: Counter[str]) -> Iterator[Record]:
    """Stream the rows of an ExplaGraphs file as answering records, in file order."""
    for number, line in enumerate(read_text(path).removeprefix("\ufeff").split("\n"), 1):
        if not line.strip():
            continue
        # By itself: an open quotation mark does not take in the lines after it.
        (columns,), where = csv.reader([line], delimiter="\t"), f"{path}:{number}"
        if len(columns) != 4:
            raise ValueError(f"{where}: expected 4 tab-separated columns, found {len(columns)}")
        first, second, label, graph = map(str.strip, columns)
        if label == "label":
            continue
        if label not in LABELS:
            raise ValueError(f"{where}: the label is {label!r}; it must be {' or '.join(LABELS)}")
        if not first or not second:
            raise ValueError(f"{where}: an argument is empty")
        triples, malformed = parse_graph(graph)
        issues[MALFORMED] += malformed
        yield Record(
            id=f"explagraphs:{number}:answer",
            question_id=f"explagraphs-{number}",
            task="answering",
            question=f"Argument 1: {first} Argument 2: {second} Does argument 2 support or counter argument 1?",
            action=Action.SUFFICIENT,
            steps=(Step("How are the two arguments connected?", triples),),
            answers=(label,),
            source="explagraphs",
        )


def parse_graph(text: str) -> tuple[tuple[Triple, ...], int]:
    """Read `(s; p; o)(s; p; o)`.

    Names may hold brackets: only a closing bracket that another opening one follows ends a triple.

    Returns:
        The distinct triples in order, and the number of malformed ones.
    """
    text = text.strip()
    triples, malformed = [], 0
    for part in _BETWEEN_TRIPLES.split(text.removeprefix("(").removesuffix(")")) if text else ():
        try:
            triples.append(Triple(*part.split(";")))
        except (TypeError, ValueError):
            malformed += 1
    return tuple(dict.fromkeys(triples)), malformed


def split_names(count: int, seed: int = 0) -> list[str]:
    """Split `count` rows at random 60/20/20 into train, validation and test."""
    names = ["train"] * round(count * 0.6) + ["validation"] * round(count * 0.2)
    names += ["test"] * (count - len(names))
    random.Random(seed).shuffle(names)
    return names


_ALIASES = ("aliases", "demonyms")
_TEXTS = ("contents", "body", "context", "text", "passage")
_NO_PHRASE = re.compile("[^A-Za-z0-9 ]")


@dataclass(frozen=True)
class AdaptOptions:
    """Options of `tripletune data adapt`."""

    input: str = field(metadata={"help": "the file: JSON lines, a JSON array or object, or Parquet; or a hub id"})
    output: str = field(metadata={"help": "the JSON lines to write; a file that is there is replaced"})
    aliases: str | None = setting(None, "2WikiMultiHopQA's id_aliases.json, for its questions")
    piece_limit: int = setting(
        4800, "characters; longer articles and books are cut between sentences (about 1,200 tokens)", at_least=1
    )
    piece_overlap: int = setting(
        400, "most characters that a piece repeats from the one before (about 100 tokens)", at_least=0
    )


def adapt_rows(options: AdaptOptions) -> Counter[str]:
    """Adapt a file; see the module.

    Returns:
        Counts of what was written; of triples the graph too, as HippoRAG counts it: names in lower case, of letters
        and digits alone, make its nodes, predicates its relations.
    """
    check_new(options.output, [options.input, *([options.aliases] if options.aliases else [])])
    counts, aliases = Counter[str](), None
    if options.aliases:
        # 2WikiMultiHopQA counts a country's demonyms among its names.
        aliases = {
            required_text(row, ("Q_id",), where): [name for key in _ALIASES for name in name_list(row, where, key)]
            for where, row in read_jsonl(options.aliases)
        }
        if not aliases:
            raise ValueError(f"{options.aliases}: the file holds no row")
    seen: set[int] = set()
    graph: dict[str, set[Any]] = {"nodes": set(), "relations": set(), "distinct triples": set()}
    with new_file(options.output) as scratch, scratch.open("w", encoding="utf-8") as file:
        for where, row in _adaptable(options.input):
            for made in _adapted(row, where, aliases, options, seen):
                if aliases is None and not made["text"].strip():
                    counts["rows without text, left out"] += 1
                    continue
                counts["passages" if aliases is None else "rows"] += 1
                for fields in made.get("triples", ()):
                    counts["triples"] += 1
                    if isinstance(fields, list) and len(fields) == 3:
                        subject, predicate, last = (_NO_PHRASE.sub(" ", str(name).lower()).strip() for name in fields)
                        graph["nodes"] |= {subject, last}
                        graph["relations"].add(predicate)
                        graph["distinct triples"].add((subject, predicate, last))
                counts["questions with aliases"] += "answer_aliases" in made
                file.write(json_line(made))
        if not counts["rows"] + counts["passages"]:
            raise ValueError(f"{options.input}: the file holds no row{' with a text' if counts else ''}")
    return +(counts + Counter({name: len(found) for name, found in graph.items()}))


def _adaptable(location: str) -> Iterator[tuple[str, Row]]:
    whole = whole_object(location)
    if whole is None or "data" in whole:
        yield from source_rows(location)
        return
    rows = checked(whole, location, {"docs?": [{}]}).get("docs", [whole])
    yield from ((f"{location}: {number}", row) for number, row in enumerate(rows, 1))


def _adapted(
    row: Row, where: str, aliases: Mapping[str, list[str]] | None, options: AdaptOptions, seen: set[int]
) -> Iterator[Row]:
    if aliases is not None:
        known = aliases.get(name_field(row, where, "answer_id"), [])
        yield row | ({"answer_aliases": known} if known else {})
        return
    made: Row = {"title": name_field(row, where, "title")}
    if identity := name_field(row, where, "id", "_id"):
        made["id"] = identity
    key = next((key for key in _TEXTS if key in row), "")
    text = text_field(row, where, key).strip()
    if key in ("body", "context"):
        meta = row.get("meta") if isinstance(row.get("meta"), dict) else {}
        title = name_field(row, where, "corpus_name", "title") or name_field(meta or {}, where, "title")
        # UltraDomain repeats a book with each question on it.
        if (known_text := hash((title, text))) not in seen or not text:
            seen.add(known_text)
            pieces = split_passage(text, options.piece_limit, options.piece_overlap) or [""]
            yield from ({"title": title, "text": piece} for piece in pieces)
        return
    if key == "contents" or (key == "passage" and "title" not in row):
        head, _, rest = text.partition("\n")
        if rest:
            made["title"], text = head.strip() if key == "passage" else head.strip().strip('"'), rest.strip()
    if not key:
        raise ValueError(f"{where}: the row has no layout that is known; it has {', '.join(row) or 'nothing'}")
    made["text"] = text
    if "extracted_triples" in row or "triples" in row:
        made["triples"] = given(row, "extracted_triples", "triples") or []
        if not isinstance(made["triples"], list):
            raise ValueError(f"{where}: the triples must be a list, found {shown(made['triples'])}")
    yield made
