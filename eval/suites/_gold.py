"""The supporting passages that `--gold` names, for recall in a corpus and for systems that read gold passages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tripletune.core.data.passages import Passage, read_corpus
from tripletune.core.data.questions import Question
from tripletune.data_builders.readers import with_linked_passages
from tripletune.eval import Task, context_links, task_questions
from tripletune.rag.results import ResultRow
from tripletune.rag.triple_store import gold_links_in_file

logger = logging.getLogger(__name__)
# Ids of the supporting passages in a corpus, by question.
GoldLinks = Mapping[str, frozenset[str]]


def read_gold_links(path: str, questions: Sequence[str]) -> GoldLinks:
    """The links of a file of gold, which must have some of these questions; a file of another split has none.

    Questions without a link are only reported, since a corpus may lack passages of some questions.
    """
    gold = gold_links_in_file(path)
    without = [name for name in questions if name not in gold]
    if len(without) == len(questions):
        raise ValueError(f"--gold {path} has no links of these questions: is it the file of another split?")
    if without:
        logger.warning("%s: %d questions have no gold link, so the recall is over the others", path, len(without))
    return gold


def links_of_contexts(read_questions: Callable[[], Iterator[Question]], corpus: str) -> GoldLinks:
    """The gold links of a corpus, by the content of the supporting passages that came with the questions.

    Warns of questions whose supporting passages the corpus lacks, since their recall is left out.

    Args:
        read_questions: Streams the questions from the start, each time it is called.
    """
    unplaced: set[str] = set()

    def placed() -> Iterator[Question]:
        """The questions whose supporting passages are in the corpus, or that name none; the others go to `unplaced`."""
        for item in with_linked_passages(read_questions, corpus):
            if isinstance(item, Question):
                yield item
            else:
                unplaced.add(item.id)

    links = context_links(placed(), Path(corpus))
    if unplaced:
        example = next(question for question in read_questions() if question.id in unplaced)
        names = ", ".join(map(repr, example.links))
        logger.warning(
            "%d questions have no recall, since a supporting passage is neither an id nor the title of exactly one "
            "passage in %s, for example one of question %r: %s", len(unplaced), corpus, example.id, names,
        )  # fmt: skip
    return links


def linked_passages(
    gold: GoldLinks, path: str, corpus: str | Path, questions: Sequence[str]
) -> tuple[GoldLinks, dict[str, Passage]]:
    """The links of these questions whose passages a corpus has, and these passages by id.

    Only these are kept in memory, since a corpus may have millions. A question with a passage that the corpus lacks has
    no link, since its full recall would be impossible; this is reported. If no passage is found, the links are those of
    another corpus, and every recall would be 0.

    Args:
        path: The file of the links, for the error.
    """
    of_questions = {name: gold[name] for name in questions if name in gold}
    ids: set[str] = set().union(*of_questions.values())
    passages = {passage.id: passage for passage in read_corpus(corpus) if passage.id in ids}
    if ids and not passages:
        raise ValueError(f"--gold {path} has no passage of {corpus}: give the links of this corpus")
    links = {name: linked for name, linked in of_questions.items() if passages.keys() >= linked}
    if len(links) < len(of_questions):
        question = next(name for name in of_questions if name not in links)
        example = min(of_questions[question] - passages.keys())
        logger.warning(
            "%d questions have no recall, since --gold %s names passages for them that %s lacks, for example %r for "
            "question %r", len(of_questions) - len(links), path, corpus, example, question,
        )  # fmt: skip
    return links, passages


def warn_of_unknown_passages(rows: Iterable[ResultRow], task: Task, data: str, corpus: str | None) -> None:
    """Warn of found passages whose ids no passage of the corpus has, since recall takes them for wrong ones.

    Only questions with gold passages are looked at. The corpus is read only if they have found passages.

    Args:
        data: The file of the questions, whose contexts are the corpus if there is no other.
    """
    question_of: dict[str, str] = {}  # id of a found passage -> the first question that found it
    for row in rows:
        if row.supporting:
            for found in row.trace.passage_rounds:
                for passage_id in found:
                    question_of.setdefault(passage_id, row.id)
    if not question_of:
        return
    total = len(question_of)
    for passage in read_corpus(corpus) if corpus else _passages_of_contexts(task, data):
        question_of.pop(passage.id, None)
    if question_of:
        example, question = next(iter(question_of.items()))
        logger.warning(
            "%d of %d found passages are not in %s, for example %r of question %r; recall counts them as wrong. "
            "Ids must be those of the corpus; if it has none, make passages of its titles and texts, without ids",
            len(question_of), total, corpus or f"the contexts of {data}", example, question,
        )  # fmt: skip


def _passages_of_contexts(task: Task, data: str) -> Iterator[Passage]:
    """The passages that came with the questions; one of several contexts comes repeatedly."""
    for question in task_questions(task, data):
        yield from question.passages
