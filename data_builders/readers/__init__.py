"""One reader per benchmark; each reader yields `Question` objects from the official files.

A reader is a module of this package with a function

    read_questions(location, issues, source) -> Iterator[Question | Dropped]

and has the module's name, so a new benchmark is one new file. A module is imported when its reader is first used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from tripletune.core.data.passages import passages_by_name
from tripletune.core.data.questions import Dropped, DropReason, Issues, Question, Questions
from tripletune.core.options import not_one_of
from tripletune.core.plugins import load_from, names_in


class Reader(Protocol):
    """The `read_questions` function of a reader module."""

    def __call__(self, location: str, issues: Issues = None, source: str = ...) -> Questions:
        """Stream the questions of a benchmark.

        Args:
            location: A local file (JSON array, JSON lines, Parquet, CSV or TSV), a folder, or a hub id `owner/name`,
                optionally with `@configuration` and `#split`.
            issues: Counts warnings that drop no question, such as supporting facts out of range.
            source: The data set name written into the questions.
        """


def names_with(function: str) -> list[str]:
    """Names of the readers that have this function, sorted.

    All readers are imported for it, so it is for errors and help only.
    """
    names = []
    for name in names_in(__name__):
        if hasattr(load_from(__name__, name, "reader"), function):
            names.append(name)
    return names


def get_reader(name: str) -> Reader:
    """The `read_questions` of the reader called `name`.

    Raises:
        ValueError: There is no such reader, or it reads pairs instead of questions.
    """
    module = load_from(__name__, name, "reader")
    if not hasattr(module, "read_questions"):
        raise ValueError(not_one_of("question reader", name, names_with("read_questions")))
    return module.read_questions


def with_linked_passages(questions: Callable[[], Iterable[Question | Dropped]], corpus: str | None) -> Questions:
    """The questions, with the corpus passages that their `links` name, in two passes over the questions.

    A link is an id of the corpus, or else a title that only one passage has. A question with another link is dropped.

    Args:
        questions: Returns the questions from the start; it is called twice.
        corpus: The corpus file; a `ValueError` if a question has links and there is none.
    """
    links: set[str] = set()
    for question in questions():
        if isinstance(question, Question):
            links.update(question.links)
    if links and not corpus:
        raise ValueError(
            f"a question names supporting passages of a corpus, such as {min(links)!r}: give this corpus with --corpus"
        )
    passages = passages_by_name(str(corpus), links)
    for question in questions():
        if not isinstance(question, Question) or not question.links:
            yield question
        elif not passages.keys() >= set(question.links):
            yield Dropped(question.id, DropReason.SUPPORT_NOT_IN_CONTEXT)
        else:
            own = question.passages
            supporting = question.supporting + tuple(range(len(own), len(own) + len(question.links)))
            linked_passages = tuple(passages[link] for link in question.links)
            yield replace(question, passages=own + linked_passages, supporting=supporting, links=())
