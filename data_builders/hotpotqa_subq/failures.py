"""Searches that failed, as loops produce them: a step that brought another article's facts, and the question again.

In RAS, appendix C, every step of a history is a success, so the number of steps says when to stop. Here a share of the
searches fails first; the label after a failed one asks again.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

from tripletune.data_builders.datasets.kinds import facts_name
from tripletune.data_builders.hotpotqa_subq import Found, names_to_find
from tripletune.models.data.questions import Annotation, Question, Teacher, UnlabelledQuestion
from tripletune.models.data.records import YES_NO, Passage, mentions, normalize_answer
from tripletune.models.data.triples import Triple

# Of one sub-query; RAS searches five times at most.
_MOST_FAILURES = 2
# Questions of each source whose supporting articles fail for others.
POOL = 200


@dataclass
class FailedSearches:
    """Draws what failed searches brought; see `label_question`.

    Args:
        share: Share of the searches that fail; of those that follow a failed one too, but no third time.
        split_of: The split of a question's text: facts of other questions come from the same split.
        triples_of: Triples of a question's other passages, which fail first.
    """

    share: float
    passages: int
    split_of: Callable[[str], str]
    seed: int = 0
    triples_of: Callable[[Passage], list[Triple]] | None = None
    _articles: dict[tuple[str, str], list[Found]] = field(default_factory=lambda: defaultdict(list))

    async def collect(self, questions: Iterator[Question], teacher: Teacher) -> None:
        """Take the supporting articles of the first questions of a source, for use where `triples_of` has none."""
        for question in islice(questions, POOL):
            try:
                kept = await teacher.annotate(question)
            except UnlabelledQuestion:
                continue
            articles = self._articles[question.source, self.split_of(question.question)]
            articles += [(question.passages[one.document], one.triples) for one in kept if one.triples]

    def draw(self, question: Question, kept: list[Annotation], sought: Annotation) -> list[list[Found]]:
        """What each failed search for a document brought, before the one that found it; often nothing.

        Facts of the question's own other passages come first, then those of other questions, with a predicate that is
        sought too where there is one. None names what the question is after.
        """
        chance = random.Random(f"{self.seed} {question.id} {sought.document} failed")
        failures = 0
        while failures < _MOST_FAILURES and chance.random() < self.share:
            failures += 1
        if not failures:
            return []
        needed = {*question.supporting, *(one.document for one in kept)}
        own = [passage for number, passage in enumerate(question.passages) if number not in needed]
        chance.shuffle(own)
        covered = ((passage, triples) for passage in own if self.triples_of and (triples := self.triples_of(passage)))
        articles = self._articles[question.source, self.split_of(question.question)]
        others = chance.sample(articles, len(articles))
        predicates = {triple.predicate for triple in sought.triples}
        others.sort(key=lambda found: predicates.isdisjoint(triple.predicate for triple in found[1]))
        gold = {triple for one in kept for triple in one.triples}
        names = [
            name
            for name in (*names_to_find(question), *question.answers)
            if normalize_answer(name) not in YES_NO and not mentions(question.question, name)
        ]
        found = chain(covered, others)
        useless = (one for one in found if gold.isdisjoint(one[1]) and not facts_name(one[1], names))
        return list(filter(None, (list(islice(useless, self.passages)) for _ in range(failures))))
