"""One reader per benchmark; each reader yields `Question` objects from the official files.

A reader is a module of this package with a function

    read_questions(location, issues, source) -> Iterator[Question | Dropped]

and has the module's name, so a new benchmark is one new file. A module is imported when its reader is first used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from tripletune.core.data.passages import Passage, read_corpus
from tripletune.core.data.questions import Dropped, DropReason, Issues, Question, Questions
from tripletune.core.options import not_one_of
from tripletune.core.plugins import load_from, names_in


class Reader(Protocol):
    """The `read_questions` function of a reader module."""

    def __call__(self, location: str, issues: Issues = None, source: str = ...) -> Questions:
        """Stream the questions of a benchmark.

        Args:
            location: A local file (.json array, .jsonl or .parquet), a local folder, or a hub id `owner/name`,
                optionally with `@configuration` and `#split`.
            issues: Counts warnings that drop no question, such as supporting facts out of range.
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


def linked(questions: Callable[[], Iterable[Question | Dropped]], corpus: str | None) -> Questions:
    """The questions, with the corpus passages that their `links` name, in two passes over the questions.

    A link is an id of the corpus, or else a title that only one passage has.
    """
    wanted = {name for one in questions() if isinstance(one, Question) for name in one.links}
    if wanted and not corpus:
        raise ValueError(
            f"a question names supporting passages of a corpus, such as {min(wanted)!r}: give this corpus with --corpus"
        )
    ids, titles = dict[str, Passage](), defaultdict[str, list[Passage]](list)
    for passage in read_corpus(str(corpus)) if wanted else ():
        if passage.id in wanted:
            ids[passage.id] = passage
        if passage.title in wanted:
            titles[passage.title].append(passage)
    found = {title: several[0] for title, several in titles.items() if len(several) == 1} | ids
    for one in questions():
        if isinstance(one, Question) and one.links:
            if not found.keys() >= {*one.links}:
                yield Dropped(one.id, DropReason.SUPPORT_NOT_IN_CONTEXT)
                continue
            passages, count = (*one.passages, *map(found.__getitem__, one.links)), len(one.passages)
            one = replace(one, passages=passages, supporting=tuple(range(count, len(passages))), links=())
        yield one
