"""One reader a benchmark; each yields `Question` objects from the official files.

A reader is a module of this package with a function

    read_questions(location, issues, source) -> Iterator[Question | Dropped]

and is known by the module's name, so a new benchmark is one new file. Modules are imported when they are asked for.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterator
from typing import Protocol, cast

from tripletune.data_builders.hotpotqa_subq.questions import Dropped, Question


class Reader(Protocol):
    """The `read_questions` function of a reader module."""

    def __call__(
        self, location: str, issues: Counter[str] | None = None, source: str = ...
    ) -> Iterator[Question | Dropped]:
        """Stream the questions of a benchmark.

        Args:
            location: A local file (.json array, .jsonl or .parquet), a local folder, or a hub id `owner/name`,
                optionally with `@configuration` and `#split`.
            issues: Counts oddities that cost no question, such as supporting facts out of range.
            source: The data set name written into the questions.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: a row does not have the benchmark's layout; the message has file and line.
        """
        ...


def reader_names() -> list[str]:
    """Names of the question readers, sorted."""
    modules = (module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    return sorted(name for name in modules if hasattr(_module(name), "read_questions"))


def get_reader(name: str) -> Reader:
    """The reader called `name`.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    known = {module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")}
    function = getattr(_module(name), "read_questions", None) if name in known else None
    if function is None:
        raise ValueError(f"there is no question reader {name!r}; the readers are {', '.join(reader_names())}")
    return cast(Reader, function)


def _module(name: str) -> object:
    return importlib.import_module(f"{__name__}.{name}")
