"""ExplaGraphs (Saha et al., 2021), the graph task G-Retriever reports on: does argument 2 support argument 1?

The file is tab-separated `arg1, arg2, label, graph`, the graph written `(s; p; o)(s; p; o)`. A row becomes one
answering record whose only step holds the graph. G-Retriever (He et al., 2024) splits the 2,766 rows at random
60/20/20; so does `split_names`, with a seed of its own, hence the test rows are not the same ones as theirs.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tripletune.models.data.records import Action, Record, Step
from tripletune.models.data.triples import Triple

LABELS = ("support", "counter")
SPLITS = {"train": 0.6, "validation": 0.2, "test": 0.2}
MALFORMED = "malformed triples in graphs"
_BETWEEN_TRIPLES = re.compile(r"\)\s*,?\s*\(")


def read_explagraphs(path: str | Path, issues: Counter[str] | None = None) -> Iterator[Record]:
    """Stream the rows of an ExplaGraphs file as answering records, in file order.

    Args:
        path: The tab-separated file; a header line is recognised by its word "label".
        issues: Counts malformed triples, which are left out without their neighbours.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line does not have four columns, or its label is unknown; the message has file and line.
    """
    issues = Counter() if issues is None else issues
    for number, columns in _lines(path):
        where = f"{path}:{number}"
        first, second, label, graph = columns
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
            question=stance_question(first, second),
            action=Action.SUFFICIENT,
            steps=(Step("How are the two arguments connected?", triples),),
            answers=(label,),
            source="explagraphs",
        )


def stance_question(first: str, second: str) -> str:
    """The question put to the model about two arguments."""
    return f"Argument 1: {first} Argument 2: {second} Does argument 2 support or counter argument 1?"


def parse_graph(text: str) -> tuple[tuple[Triple, ...], int]:
    """Read `(s; p; o)(s; p; o)`.

    Names may hold brackets: only a closing bracket that another opening one follows ends a triple.

    Returns:
        The distinct triples in order, and the number of malformed ones.
    """
    text = text.strip()
    if not text:
        return (), 0
    triples, malformed = [], 0
    for part in _BETWEEN_TRIPLES.split(text.removeprefix("(").removesuffix(")")):
        try:
            triples.append(Triple(*part.split(";")))
        except (TypeError, ValueError):
            malformed += 1
    return tuple(dict.fromkeys(triples)), malformed


def split_names(count: int, seed: int = 0) -> list[str]:
    """Split `count` rows at random 60/20/20 into train, validation and test.

    Returns:
        The split of each row, in file order; it depends on `count` and `seed` alone.
    """
    train, validation = round(count * SPLITS["train"]), round(count * SPLITS["validation"])
    names = ["train"] * train + ["validation"] * validation
    names += ["test"] * (count - len(names))
    random.Random(seed).shuffle(names)
    return names


def _lines(path: str | Path) -> Iterator[tuple[int, list[str]]]:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                columns = [_unquoted(column.strip()) for column in line.rstrip("\r\n").split("\t")]
                if len(columns) != 4:
                    raise ValueError(f"{path}:{number}: expected 4 tab-separated columns, found {len(columns)}")
                if columns[2] == "label":
                    continue
                yield number, columns
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}:{number + 1}: not UTF-8 text ({error.reason}); is this a binary file?") from None


def _unquoted(column: str) -> str:
    # Written by a CSV writer: a column with quotation marks is wrapped in a pair and has its own ones doubled.
    if len(column) > 1 and column[0] == column[-1] == '"' and '"' not in column[1:-1].replace('""', ""):
        return column[1:-1].replace('""', '"')
    return column
