"""Make the records of HotpotQA-SUBQ from questions and a teacher's annotations (RAS, Algorithm 1)."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Literal

from tripletune.core.data.questions import Annotation, DropReason, Question, Teacher, UnlabelledQuestion
from tripletune.core.data.records import YES_NO, Action, Passage, Record, Step, Task, mentions, normalize_answer
from tripletune.core.data.triples import Triple
from tripletune.data_builders.datasets.kinds import facts_name
from tripletune.rag.search.retrievers import Retriever

FirstSubquery = Literal["main_question", "generated"]
Shown = Literal["supporting", "all"]
Found = tuple[Passage, list[Triple]]
# The steps of a history: a sub-query, what its search brings, and whether it follows a failed search.
Searches = list[tuple[str, list[Found], bool]]
# Ending of the id of a record whose last search failed.
AGAIN = "-again"
# Many texts contain two-letter aliases by chance: MuSiQue lists "NO" as an alias of Norway.
_SHORTEST_ALIAS = 3
# Failed searches per sub-query, and searches per question (RAS, section 4.1).
_MOST_FAILURES, _MOST_SEARCHES = 2, 5
# Questions per source whose supporting articles serve as failed searches of other questions.
POOL = 200
# The brackets of a title such as "Waterloo (1970 film)".
BRACKETED = re.compile(r"\s*\([^()]*\)")


async def label_question(
    question: Question,
    teacher: Teacher,
    direct_answer: bool = False,
    first_subquery: FirstSubquery = "main_question",
    distractors: int = 0,
    triples_of: Callable[[Passage], list[Triple]] | None = None,
    seed: int = 0,
    failures: Callable[[Question, list[Annotation], Annotation], list[list[Found]]] | None = None,
    search: Callable[[Question, list[Annotation]], Awaitable[Searches]] | None = None,
) -> list[Record]:
    """Return the planning records of one question in order, then its answering record (Algorithm 1).

    With n kept documents there are n + 1 planning records: after i < n steps the label is `[SUBQ] q_i`, after n steps
    `[SUFFICIENT]`. Algorithm 1 as printed starts at i = 1, but table 4 (1.57 SUBQ labels per SUFFICIENT label) needs
    the record with an empty history.

    Args:
        direct_answer: Whether the base model answers without retrieval. Then the question has one `[NO_RETRIEVAL]`
            record for planning and one for answering (line 7).
        first_subquery: See `options.BuildOptions`, also for `distractors`, which stand for a retriever with k > 1.
        failures: Draws the failed searches before the successful search for a document, at most one per other wording:
            the label after a failed search asks in other words. The paper has no failed searches.
        search: Makes real searches, instead of histories with the kept documents; see `RealSearches`.
    """
    if direct_answer:
        return [record_of(question, name, Action.NO_RETRIEVAL) for name in ("plan0", "answer")]
    kept = await _kept(question, teacher, first_subquery)
    others = [n for n in range(len(question.passages)) if n not in [one.document for one in kept]]
    steps: Searches = []
    used = {normalize_answer(one.subquery) for one in kept}
    for one in kept:
        document, subquery, found, _ = one
        if not found:
            raise UnlabelledQuestion(DropReason.NO_TRIPLES, question.passages[document].title)
        shown = [(question.passages[document], found)]
        if distractors and triples_of is not None:
            chance = random.Random(f"{seed} {question.id} {subquery}")
            drawn = (question.passages[number] for number in chance.sample(others, len(others)))
            covered = ((passage, triples) for passage in drawn if (triples := triples_of(passage)))
            shown += islice(covered, distractors)
            chance.shuffle(shown)
        other = [text for text in _wordings(one, question.passages[document]) if normalize_answer(text) not in used]
        searches = [*(failures(question, kept, one) if failures else [])[: len(other)], shown]
        steps += [(text, brought, n > 0) for n, (text, brought) in enumerate(zip([subquery, *other], searches))]
        used |= {normalize_answer(text) for text, *_ in steps}
    records: list[Record] = []
    history: tuple[Step, ...] = ()
    for asked, brought, again in await search(question, kept) if search else steps:
        name = f"plan{len(records)}{AGAIN if again else ''}"
        records.append(record_of(question, name, Action.SUBQ, history, asked))
        history = (*history, step_of(asked, brought))
    records.append(record_of(question, f"plan{len(records)}", Action.SUFFICIENT, history))
    records.append(record_of(question, "answer", Action.SUFFICIENT, history))
    return records


async def _kept(question: Question, teacher: Teacher, first_subquery: FirstSubquery) -> list[Annotation]:
    """The helpful documents with their sub-query labels."""
    if not question.supporting:
        raise UnlabelledQuestion(DropReason.NO_SUPPORT)
    kept = await teacher.annotate(question)
    if not kept:
        raise UnlabelledQuestion(DropReason.NO_HELPFUL)
    first = kept[0]
    if first_subquery == "main_question":
        first = first._replace(subquery=question.question, reworded=first.subquery)
    # Before the first search, the sub-query may name only what the question names.
    found = [name for name in names_to_find(question) if not mentions(question.question, name)]
    if first.reworded in ("", first.subquery) or any(mentions(first.reworded, name) for name in found):
        first = first._replace(reworded=question.question)
    kept = [first, *kept[1:]]
    for one in kept:
        if gives_away_answer(one.subquery, question):
            raise UnlabelledQuestion(DropReason.ANSWER_IN_SUBQUERY, one.subquery)
    return [one._replace(reworded="") if gives_away_answer(one.reworded, question) else one for one in kept]


def names_to_find(question: Question) -> list[str]:
    """Names on the way to the answer, from the hops' answers, the supporting passages and the gold evidence."""
    return [
        *(hop.answer for hop in question.hops),
        *(BRACKETED.sub("", question.passages[number].title) for number in question.supporting),
        *(name for evidence in question.evidences for name in (evidence.subject, evidence.object)),
    ]


def step_of(subquery: str, shown: Iterable[Found]) -> Step:
    """A step of the history: the query, and the distinct triples of its passages."""
    passages, triples = [*zip(*shown)] or ((), ())
    return Step(subquery, tuple(dict.fromkeys(chain(*triples))), "\n".join(one.content for one in passages))


def gives_away_answer(subquery: str, question: Question) -> bool:
    """Whether a sub-query names a gold answer, except yes, no and short aliases, that the question does not name."""
    return any(
        mentions(subquery, answer) and not mentions(question.question, answer)
        for position, answer in enumerate(question.answers)
        if (normal := normalize_answer(answer)) not in YES_NO and (not position or len(normal) >= _SHORTEST_ALIAS)
    )


def record_of(
    question: Question, name: str, action: Action, steps: tuple[Step, ...] = (), subquery: str = ""
) -> Record:
    """A record of a question, with an id that ends in a name such as "plan0" or "answer"."""
    names = f"{question.source}:{question.id}:{name}", question.id
    task: Task = "answering" if name == "answer" else "planning"
    return Record(*names, task, question.question, action, steps, subquery, question.answers, question.source)


@dataclass
class FailedSearches:
    """Draws failed searches: a step with another article's facts, before the sub-query is asked in other words.

    In RAS, appendix C, every step of a history is a success, so the number of steps alone says when to stop.

    Args:
        share: Share of searches drawn to fail, once or twice in a row; `label_question` needs a wording for each.
        split_of: Returns the split of a question's text; facts of other questions come from the same split.
        triples_of: Returns the triples of a passage; the question's other passages are drawn first.
    """

    share: float
    passages: int
    split_of: Callable[[str], str]
    seed: int = 0
    triples_of: Callable[[Passage], list[Triple]] | None = None
    _articles: dict[tuple[str, str], list[Found]] = field(default_factory=lambda: defaultdict(list))

    async def collect(self, questions: Iterator[Question], teacher: Teacher) -> None:
        """Collect the supporting articles of a source's first questions, for failed searches of other questions."""
        for question in islice(questions, POOL):
            with suppress(UnlabelledQuestion):
                kept = await teacher.annotate(question)
                articles = self._articles[question.source, self.split_of(question.question)]
                articles += [(question.passages[one.document], one.triples) for one in kept if one.triples]

    def draw(self, question: Question, kept: list[Annotation], sought: Annotation) -> list[list[Found]]:
        """Return the facts of each failed search for a document, without names that the question asks for.

        Facts of the question's other passages come first, then facts of other questions, preferably with a predicate of
        the document.
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
        names = [one for one in (*names_to_find(question), *question.answers) if normalize_answer(one) not in YES_NO]
        names = [one for one in names if not mentions(question.question, one)]
        found = chain(covered, others)
        useless = (one for one in found if gold.isdisjoint(one[1]) and not facts_name(one[1], names))
        return list(filter(None, (list(islice(useless, self.passages)) for _ in range(failures))))


@dataclass
class RealSearches:
    """Makes the searches of a history as the loop of RAS does: each step shows what a retriever brings.

    A sub-query asks for the first document not found yet, in a wording not asked yet, since the loop ends at a repeated
    query. If no other wording or no round is left, the step shows the document itself, found or not.

    Args:
        share: Share of the searches with another wording left whose helpful documents are removed.

    Attributes:
        outcomes: Counts of the searches by outcome, of each question whose records are not written yet.
        searched, found: Number of searches, and of those that brought a helpful document.
    """

    retriever: Retriever
    triples_of: Callable[[Passage], list[Triple]]
    top_k: int
    share: float
    seed: int
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    searched: int = 0
    found: int = 0

    async def search(self, question: Question, kept: list[Annotation]) -> Searches:
        """The sub-queries with what their searches brought, until each kept document was found or shown."""
        gold = {question.passages[one.document].key: one for one in kept}
        own = {key: one.triples for key, one in gold.items()}
        chance = random.Random(f"{self.seed} {question.id} failed")
        pending, steps, asked, failed = list(gold), Searches(), set[str](), False
        counts = self.outcomes[f"{question.source}:{question.id}"] = Counter()
        while pending:
            document = question.passages[gold[pending[0]].document]
            wordings = [one for one in _wordings(gold[pending[0]], document) if normalize_answer(one) not in asked]
            if not wordings:
                raise UnlabelledQuestion(DropReason.COPIED_QUESTION, gold[pending[0]].subquery)
            query = wordings[0]
            asked.add(normalize_answer(query))
            last = len(wordings) < 2 or len(steps) + len(pending) >= _MOST_SEARCHES
            hidden = gold if not last and chance.random() < self.share else {}
            hits = await self.retriever.retrieve(query, self.top_k + len(hidden))
            brought = {hit.passage.key: hit.passage for hit in hits if hit.passage.key not in hidden}
            self.searched += 1
            self.found += not gold.keys().isdisjoint(brought)
            outcome = "searches without the helpful documents" if hidden else "searches that found a helpful document"
            if last and pending[0] not in brought:
                outcome, brought = "searches that show a document they did not find", {pending[0]: document} | brought
            shown = dict(islice(brought.items(), self.top_k))
            steps.append(
                (query, [(one, self.triples_of(one) or own.get(key, [])) for key, one in shown.items()], failed)
            )
            failed = shown.keys().isdisjoint(pending)
            counts["searches that failed" if failed and not hidden else outcome] += 1
            pending = [key for key in pending if key not in shown]
        return steps

    def check(self) -> None:
        """Raise `ValueError` if no search brought a helpful document."""
        if self.searched and not self.found:
            raise ValueError(
                "no search found a helpful passage: does --corpus belong to these questions, and has it their passages?"
            )


def _wordings(sought: Annotation, document: Passage) -> list[str]:
    """Distinct ways to ask for a document; one asks for its title or a subject of its triples, if another names it."""
    wordings = list(filter(None, (sought.subquery, sought.reworded)))
    names = BRACKETED.sub("", document.title), *(one.subject for one in sought.triples)
    named = (name for name in names if any(mentions(one, name) for one in wordings))
    wordings += [f"What is known about {name}?" for name in islice(named, 1)]
    return [*{normalize_answer(one): one for one in wordings}.values()]
