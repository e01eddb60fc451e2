"""Trajectories of CIRAG's integrator without a model: the gold steps of MuSiQue and 2WikiMultiHopQA as its decisions.

A benchmark's annotation says which passage a step reads, what the step finds there, and what the next step asks. Round
t of a trajectory shows the facts of the t-th passage among facts that do not help. Its core triples are those that name
what the step finds, and its query is the next step's; the first round searches for the question itself, as the loop
does. The thought has fixed words. The rows differ from a teacher's only in the name of their model.

Tested in `tests/data_builders/trajectories/test_annotated.py`.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from tripletune.core.calls import Message
from tripletune.core.data.answers import mentions, normalize_answer
from tripletune.core.data.pairs import Trajectory
from tripletune.core.data.questions import Annotation, DropReason, Question, Teacher, UnlabelledQuestion
from tripletune.core.data.triples import Triple
from tripletune.core.files import PROMPTS, read_prompt
from tripletune.data_builders.datasets.lookup import SeenTable
from tripletune.data_builders.datasets.split import split_of
from tripletune.data_builders.subq import labelled_documents
from tripletune.data_builders.subq.annotations import open_teacher
from tripletune.data_builders.subq.evidences import place_evidences
from tripletune.data_builders.subq.options import Source, check_names, usable_questions
from tripletune.data_builders.subq.searches import FailedSearches
from tripletune.data_builders.trajectories.options import TrajectoryOptions
from tripletune.data_builders.trajectories.runs import QuestionRun
from tripletune.data_builders.world.oracle import facts_in_sentences
from tripletune.rag.systems.cirag import CiragOptions
from tripletune.rag.systems.cirag.integration import (
    INTEGRATE_ROLE,
    INTEGRATION_PROMPT,
    Decision,
    Round,
    decision_text,
    messages_of,
)

# Readers whose questions say what each step finds.
READERS = ("musique", "two_wiki", "qa")
# The beginning of a trajectory's `model`, by which card and training tell it from a teacher's.
ANNOTATED = "annotated: "


class _Opened(NamedTuple):
    """A benchmark file, its annotations, and where candidates that do not help come from."""

    source: Source
    teacher: Teacher
    failures: FailedSearches


class AnnotatedRuns:
    """Reads the runs that a benchmark's annotations describe.

    Args:
        drops: Counts the questions that are left out, by reason.

    Attributes:
        teachers: What labelled each source, for the card.
        issues: Warnings about what was read, with how often.
        files: The input files.
    """

    def __init__(self, options: TrajectoryOptions, drops: Counter[str]) -> None:
        """Open the annotations of all sources, so that a wrong one is found before rows are written."""
        self._options = options
        self._drops = drops
        self._prompt = read_prompt(options.prompt or PROMPTS / "systems" / f"{INTEGRATION_PROMPT}.md")
        self._most_candidates = CiragOptions().candidates
        self.issues: Counter[str] = Counter()
        self.files: list[str] = []
        self._opened: list[_Opened] = []
        sources = [Source.parse(text) for text in options.source]
        check_names(sources)
        split = partial(split_of, seed=options.seed, validation_fraction=options.validation_fraction)
        for source in sources:
            if source.reader not in READERS:
                raise ValueError(
                    f"source {source.text}: {source.reader} has no annotation of what each step finds; use "
                    f"{', '.join(READERS)}, or let a teacher run: `tripletune eval run`, then --results"
                )
            teacher = open_teacher(source.reader, source.annotations, self.issues)
            triples_of = teacher.triples_of
            failures = FailedSearches(0.0, options.distractors, split, options.seed, triples_of)
            self._opened.append(_Opened(source, teacher, failures))
            self.files += [file for file in (source.location, source.annotations) if file]
        self.teachers = {source.name: teacher.name for source, teacher, _ in self._opened}

    def read(self) -> Iterator[QuestionRun]:
        """Stream the runs, one per question that can be labelled.

        A file of triples that had none of the passages is refused at the end, when all look-ups are known.
        """
        options = self._options
        with SeenTable() as seen:
            for source, teacher, failures in self._opened:
                if options.distractors:
                    # Rows that can't be used are counted below, when all questions are read.
                    questions = (row for row in source.rows(None, None, None) if isinstance(row, Question))
                    asyncio.run(failures.collect(questions, teacher))
                for question in usable_questions(source, seen, self._drops, self.issues):
                    try:
                        trajectory = self._trajectory(question, teacher, failures)
                    except UnlabelledQuestion as error:
                        self._drops[error.reason.value] += 1
                        continue
                    split = split_of(question.question, options.seed, options.validation_fraction)
                    yield QuestionRun(question.id, len(trajectory.messages), [trajectory], split)
                if teacher.triples_of:
                    teacher.triples_of.refuse_useless_file()

    def _trajectory(self, question: Question, teacher: Teacher, failures: FailedSearches) -> Trajectory:
        """The trajectory of a question.

        Raises:
            UnlabelledQuestion: The annotation does not say what each step finds, or the facts do not hold it.
        """
        found_in = _names_by_document(question)
        kept = asyncio.run(labelled_documents(question, teacher, "main_question"))
        queries = [annotation.subquery for annotation in kept]
        if len({normalize_answer(query) for query in queries}) < len(queries):
            raise UnlabelledQuestion(DropReason.COPIED_QUESTION)
        rounds: list[Round] = []
        for annotation, next_query in zip(kept, [*queries[1:], ""], strict=True):
            core = _core_triples(annotation.triples, found_in[annotation.document], annotation.subquery)
            if not core:
                title = question.passages[annotation.document].title
                reason = DropReason.ANSWER_NOT_IN_FACTS if annotation.triples else DropReason.NO_TRIPLES
                raise UnlabelledQuestion(reason, title)
            conclusion = f"With what was kept before, the query can be answered: {question.answers[0]}."
            if next_query:
                conclusion = f"Still missing: {next_query}"
            decision = Decision(f"{facts_in_sentences(core)}{conclusion}", tuple(core), next_query)
            candidates = self._candidates(question, kept, annotation, core, failures)
            rounds.append(Round(candidates, decision))
        *history, last = rounds
        messages = messages_of(self._prompt, question.question, last.candidates, history)
        final: Message = {"role": "assistant", "content": decision_text(last.decision)}
        turns = (*messages, final)
        return Trajectory(
            id=f"{question.id}:0",
            question_id=question.id,
            role=INTEGRATE_ROLE,
            model=f"{ANNOTATED}{teacher.name}",
            messages=turns,
            learned=tuple(turn["role"] == "assistant" for turn in turns),
        )

    def _candidates(
        self,
        question: Question,
        kept: list[Annotation],
        annotation: Annotation,
        core: Sequence[Triple],
        failures: FailedSearches,
    ) -> tuple[Triple, ...]:
        """The facts that a round shows, in random order: those of its passage, and those of passages of no use.

        As many as the loop shows (`CiragOptions.candidates`), of which the core triples are never left out.
        """
        chance = random.Random(f"{self._options.seed} {question.id} {annotation.document} candidates")
        facts = [*core, *annotation.triples]
        useless = failures.useless_facts(question, kept, annotation, chance)
        for shown in islice(useless, self._options.distractors):
            facts += shown.triples
        candidates = list(dict.fromkeys(facts))[: max(self._most_candidates, len(core))]
        chance.shuffle(candidates)
        return tuple(candidates)


def _names_by_document(question: Question) -> dict[int, list[str]]:
    """What the steps find in each passage: answers of hops, or objects of evidence triples.

    Raises:
        UnlabelledQuestion: The question has neither, or an evidence triple fits no passage.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for hop in question.hops:
        names[hop.passage_index].append(hop.answer)
    if not question.hops:
        for document, evidence in zip(place_evidences(question), question.evidences, strict=True):
            names[document].append(evidence.object)
    return names


def _core_triples(triples: Sequence[Triple], names: Sequence[str], query: str) -> list[Triple]:
    """The triples that name what a step finds; empty if one of the names is in none of them.

    A passage may name the same thing in many facts. Those count that also name something of the query, or else those
    with the name as object, or else all.
    """
    core: dict[Triple, None] = {}
    for name in names:
        naming = [triple for triple in triples if mentions(" ".join(triple.as_list()), name)]
        if not naming:
            return []
        linked = [triple for triple in naming if mentions(query, triple.subject) or mentions(query, triple.object)]
        as_object = [triple for triple in naming if mentions(triple.object, name)]
        core.update(dict.fromkeys(linked or as_object or naming))
    return list(core)
