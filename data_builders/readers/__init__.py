"""One reader a benchmark; each yields `Question` objects from the official files.

A reader is a module of this package with a function

    read_questions(location, issues, source) -> Iterator[Question | Dropped]

and is known by the module's name, so a new benchmark is one new file. Modules are imported when they are asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from tripletune.models.data.questions import Dropped, Question
from tripletune.models.options import not_one_of
from tripletune.models.program import load_from, names_in


class Reader(Protocol):
    """The `read_questions` function of a reader module."""

    def __call__(
        self, location: str, issues: Counter[str] | None = None, source: str = ...
    ) -> Iterator[Question | Dropped]:
        """Stream the questions of a benchmark.

        Args:
            location: A local file (.json array, .jsonl or .parquet), a local folder, or a hub id `owner/name`,
                optionally with `@configuration` and `#split`.
            issues: Counts warnings that cost no question, such as supporting facts out of range.
            source: The data set name written into the questions.
        """


def names_with(function: str) -> list[str]:
    """Names of the readers that have this function, sorted."""
    return [name for name in names_in(__name__) if hasattr(load_from(__name__, name, "reader"), function)]


def get_reader(name: str) -> Reader:
    """The reader called `name`."""
    module = load_from(__name__, name, "reader")
    if not hasattr(module, "read_questions"):
        raise ValueError(not_one_of("question reader", name, names_with("read_questions")))
    return module.read_questions
