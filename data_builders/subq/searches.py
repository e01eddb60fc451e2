"""Searches of a question's history: gold documents, failed searches before them, or what a real retriever brings.

A `Searcher` says which sub-queries a planner asks and what each search shows. In RAS (appendix C) every search shows
the document that the sub-query asks for (`GoldSearches`), so the number of steps alone says when to stop.
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tripletune.core.data.answers import YES_NO, facts_name, mentions, normalize_name
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import Annotation, DropReason, Question, Teacher, UnlabelledQuestion
from tripletune.core.data.triples import Triple

if TYPE_CHECKING:
    from tripletune.rag.search.retrievers import Retriever

TriplesOf = Callable[[Passage], list[Triple]]
# Failed searches per sub-query, and searches per question (RAS, section 4.1).
_MOST_FAILURES = 2
_MOST_SEARCHES = 5
# Questions per source whose supporting passages serve as failed searches of other questions.
POOL = 200
# The brackets of a title such as "Waterloo (1970 film)".
BRACKETED = re.compile(r"\s*\([^()]*\)")


class PassageTriples(NamedTuple):
    """A passage that a search shows, and its triples."""

    passage: Passage
    triples: list[Triple]


class Search(NamedTuple):
    """One step of a history.

    Attributes:
        query: The sub-query.
        shown: What its search brings.
        is_retry: Whether the search before it failed, so that it asks for the same document again.
    """

    query: str
    shown: list[PassageTriples]
    is_retry: bool = False


class Searcher(Protocol):
    """Makes the searches of a question's history."""

    async def searches(self, question: Question, kept: list[Annotation]) -> list[Search]:
        """The searches for the documents that the teacher kept, in order; `kept` is not empty."""
        ...


@dataclass
class GoldSearches:
    """Each search shows the document that its sub-query asks for, maybe after failed searches.

    Args:
        distractors: Number of the question's other passages that each search also shows, like a retriever with k > 1.
        triples_of: The triples of a passage, for distractors.
        failures: Draws failed searches before the successful one. The paper has none.
    """

    distractors: int = 0
    triples_of: TriplesOf | None = None
    seed: int = 0
    failures: FailedSearches | None = None

    async def searches(self, question: Question, kept: list[Annotation]) -> list[Search]:
        """See `Searcher`; after a failed search the sub-query has another wording, as many times as there are some.

        The loop ends at a repeated query, so no wording is asked twice in a history.
        """
        helpful = {annotation.document for annotation in kept}
        others = [number for number in range(len(question.passages)) if number not in helpful]
        asked = {normalize_name(annotation.subquery) for annotation in kept}
        searches: list[Search] = []
        for annotation in kept:
            passage = question.passages[annotation.document]
            shown = [PassageTriples(passage, annotation.triples)]
            if self.distractors and self.triples_of is not None:
                chance = random.Random(f"{self.seed} {question.id} {annotation.subquery}")
                drawn = [question.passages[number] for number in chance.sample(others, len(others))]
                shown += islice(passages_and_triples(drawn, self.triples_of), self.distractors)
                chance.shuffle(shown)
            wordings = [text for text in wordings_of(annotation, passage) if normalize_name(text) not in asked]
            failed = self.failures.draw(question, kept, annotation) if self.failures else []
            queries = [annotation.subquery, *wordings]
            results = [*failed[: len(wordings)], shown]
            # Wordings that are left need no search.
            for number, (query, result) in enumerate(zip(queries, results)):
                searches.append(Search(query, result, is_retry=number > 0))
                asked.add(normalize_name(query))
        return searches


@dataclass
class FailedSearches:
    """Draws failed searches: a step with another passage's facts, before the sub-query is asked in other words.

    Args:
        share: Share of searches drawn to fail, once or twice in a row.
        passages: Number of passages that a failed search shows.
        split_of: Returns the split of a question's text; facts of other questions come from the same split.
        triples_of: Returns the triples of a passage; the question's other passages are drawn first.
    """

    share: float
    passages: int
    split_of: Callable[[str], str]
    seed: int = 0
    triples_of: TriplesOf | None = None
    # By source and split.
    _of_others: dict[tuple[str, str], list[PassageTriples]] = field(default_factory=lambda: defaultdict(list))

    async def collect(self, questions: Iterator[Question], teacher: Teacher) -> None:
        """Collect the supporting passages of a source's first questions, for failed searches of other questions.

        They are kept by split, so that a training history never shows a passage that a validation question is about. A
        question that can't be labelled is reported when it is labelled itself.
        """
        for question in islice(questions, POOL):
            with suppress(UnlabelledQuestion):
                kept = await teacher.annotate(question)
                facts_of_others = self._of_others[question.source, self.split_of(question.question)]
                for annotation in kept:
                    if annotation.triples:
                        facts_of_others.append(
                            PassageTriples(question.passages[annotation.document], annotation.triples)
                        )

    def draw(self, question: Question, kept: list[Annotation], sought: Annotation) -> list[list[PassageTriples]]:
        """Return what each failed search for a document shows, without names that the question asks for.

        Facts of the question's other passages come first, then facts of other questions, preferably with a predicate of
        the document.
        """
        chance = random.Random(f"{self.seed} {question.id} {sought.document} failed")
        failures = 0
        while failures < _MOST_FAILURES and chance.random() < self.share:
            failures += 1
        if not failures:
            return []
        useless = self.useless_facts(question, kept, sought, chance)
        shown = [list(islice(useless, self.passages)) for _ in range(failures)]
        return [facts for facts in shown if facts]

    def useless_facts(
        self, question: Question, kept: list[Annotation], sought: Annotation, chance: random.Random
    ) -> Iterator[PassageTriples]:
        """Facts that neither repeat a gold triple nor name what the question asks for, the most confusing ones first.

        With such a name, the failed search would not have failed, or would give the answer away. The question's other
        passages are what its search would really bring; of other questions, facts with a predicate that was asked for
        look most like an answer. Annotated trajectories show them beside the gold facts (`trajectories.annotated`).
        """
        needed = {*question.supporting, *(annotation.document for annotation in kept)}
        own = [passage for number, passage in enumerate(question.passages) if number not in needed]
        chance.shuffle(own)
        facts_of_others = self._of_others[question.source, self.split_of(question.question)]
        others = chance.sample(facts_of_others, len(facts_of_others))
        predicates = {triple.predicate for triple in sought.triples}
        others.sort(key=lambda facts: predicates.isdisjoint(triple.predicate for triple in facts.triples))
        gold: set[Triple] = set()
        for annotation in kept:
            gold.update(annotation.triples)
        names = _names_to_withhold(question)
        own_facts = passages_and_triples(own, self.triples_of) if self.triples_of else iter(())
        for facts in chain(own_facts, others):
            if gold.isdisjoint(facts.triples) and not facts_name(facts.triples, names):
                yield facts


def _names_to_withhold(question: Question) -> list[str]:
    """Answers, and names on the way to them, that a failed search must not show: the question does not name them."""
    names = [*names_to_find(question), *question.answers]
    telling = [name for name in names if normalize_name(name) not in YES_NO]
    return [name for name in telling if not mentions(question.question, name)]


@dataclass
class RealSearches:
    """Makes the searches of a history as the loop of RAS does: each step shows what a retriever brings.

    A sub-query asks for the first document not found yet, in a wording not asked yet, since the loop ends at a repeated
    query. If no other wording or no round is left, the step shows the document itself, found or not.

    Args:
        retriever: Searches the corpus.
        triples_of: Returns the triples of a passage of the corpus.
        top_k: Passages per search.
        share: Share of the searches with another wording left whose helpful documents are removed.

    Attributes:
        outcomes: Counts of the searches by outcome, of each question whose records are not written yet.
        searched: Number of searches.
        found: Number of searches that brought a helpful document.
    """

    retriever: Retriever
    triples_of: TriplesOf
    top_k: int
    share: float
    seed: int
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    searched: int = 0
    found: int = 0

    async def searches(self, question: Question, kept: list[Annotation]) -> list[Search]:
        """See `Searcher`; each kept document is found or shown in the end.

        A document that the last chance does not find is shown all the same, since the labels after it need its facts.
        Such searches, and those that failed, are counted for the card.
        """
        gold = {question.passages[annotation.document].key: annotation for annotation in kept}
        chance = random.Random(f"{self.seed} {question.id} failed")
        outcomes = self.outcomes[f"{question.source}:{question.id}"] = Counter()
        pending = list(gold)
        asked: set[str] = set()
        searches: list[Search] = []
        failed_before = False
        while pending:
            sought = gold[pending[0]]
            document = question.passages[sought.document]
            wordings = [text for text in wordings_of(sought, document) if normalize_name(text) not in asked]
            if not wordings:
                raise UnlabelledQuestion(DropReason.COPIED_QUESTION, sought.subquery)
            query = wordings[0]
            asked.add(normalize_name(query))
            # Each pending document needs one more round, so the rounds are used up when these fill the limit.
            is_last_chance = len(wordings) < 2 or len(searches) + len(pending) >= _MOST_SEARCHES
            hides_helpful = not is_last_chance and chance.random() < self.share
            passages = await self._retrieve_passages(query, gold, hides_helpful)
            outcome = "searches that found a helpful document"
            if hides_helpful:
                outcome = "searches without the helpful documents"
            if is_last_chance and pending[0] not in passages:
                outcome = "searches that show a document they did not find"
                passages = {pending[0]: document} | passages
            shown = dict(islice(passages.items(), self.top_k))
            facts = []
            for key, passage in shown.items():
                own_triples = gold[key].triples if key in gold else []
                facts.append(PassageTriples(passage, self.triples_of(passage) or own_triples))
            searches.append(Search(query, facts, is_retry=failed_before))
            failed_before = shown.keys().isdisjoint(pending)
            if failed_before and not hides_helpful:
                outcome = "searches that failed"
            outcomes[outcome] += 1
            pending = [key for key in pending if key not in shown]
        return searches

    async def _retrieve_passages(
        self, query: str, gold: dict[str, Annotation], hides_helpful: bool
    ) -> dict[str, Passage]:
        """The passages that a query finds by their keys, without the helpful ones if these are to be hidden.

        As many more are retrieved as are hidden, so that a failed search shows as many passages as another. Searches
        are counted, and those that found something helpful.
        """
        hidden = gold if hides_helpful else {}
        hits = await self.retriever.retrieve(query, self.top_k + len(hidden))
        passages = {hit.passage.key: hit.passage for hit in hits if hit.passage.key not in hidden}
        self.searched += 1
        self.found += not gold.keys().isdisjoint(passages)
        return passages

    def refuse_useless_corpus(self) -> None:
        """Raise `ValueError` if no search brought a helpful document: the corpus is then probably another one's."""
        if self.searched and not self.found:
            raise ValueError(
                "no search found a helpful passage: does --corpus belong to these questions, and has it their passages?"
            )


def passages_and_triples(passages: Sequence[Passage], triples_of: TriplesOf) -> Iterator[PassageTriples]:
    """The passages that have triples, looked up one after the other."""
    for passage in passages:
        triples = triples_of(passage)
        if triples:
            yield PassageTriples(passage, triples)


def names_to_find(question: Question) -> list[str]:
    """Names on the way to the answer, from the hops' answers, the supporting passages and the gold evidence."""
    names = [hop.answer for hop in question.hops]
    names += [BRACKETED.sub("", question.passages[number].title) for number in question.supporting]
    for evidence in question.evidences:
        names += [evidence.subject, evidence.object]
    return names


def wordings_of(sought: Annotation, document: Passage) -> list[str]:
    """Distinct ways to ask for a document; one asks for its title or a subject of its triples, if another names it.

    A name that no other wording has would tell the planner what it has not read yet.
    """
    wordings = [text for text in (sought.subquery, sought.reworded) if text]
    for name in (BRACKETED.sub("", document.title), *(triple.subject for triple in sought.triples)):
        if any(mentions(text, name) for text in wordings):
            wordings.append(f"What is known about {name}?")
            break
    # Of wordings that differ in case or punctuation, the last one stays.
    return list({normalize_name(text): text for text in wordings}.values())
