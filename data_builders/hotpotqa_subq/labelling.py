"""Sample labelling: one question and its annotations become records (RAS, section C.3 and Algorithm 1)."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from tripletune.data_builders.datasets.kinds import YES_NO
from tripletune.data_builders.hotpotqa_subq.annotations import Teacher, TripleFile, mentions
from tripletune.data_builders.hotpotqa_subq.questions import DropReason, Question, UnlabelledQuestion
from tripletune.models.data.records import Action, Record, Step, normalize_answer
from tripletune.models.data.triples import Triple
from tripletune.models.llm import RepliesPending

FirstSubquery = Literal["main_question", "generated"]
# Two letters stand in many texts by chance: MuSiQue lists "NO" as an alias of Norway.
_SHORTEST_ALIAS = 3
PROMPT_FOLDER = Path(__file__).parents[1] / "prompts"
# Parts of the mix by reader: questions in the paper, the first ones of Self-RAG's training data.
PARTS = {"asqa": 3_897, "arc_easy": 2_147}


@dataclass(frozen=True)
class LabelOptions:
    """Choices of sample labelling.

    Attributes:
        first_subquery: "main_question": q_0 is the main question, as in the paper; "generated": it is the first
            generated sub-query, as in the authors' code.
        distractors: Unrelated passages of the question whose triples join those of each kept document, as a
            retriever with k > 1 would bring them. The paper has none; a small model trained without them takes any
            longer list for sufficient (docs/data.md).
        triple_file: Triples of those passages.
        seed: Seed of their choice.
    """

    first_subquery: FirstSubquery = "main_question"
    distractors: int = 0
    triple_file: TripleFile | None = None
    seed: int = 0


async def label_question(
    question: Question, teacher: Teacher, direct_answer: bool, options: LabelOptions | None = None
) -> list[Record]:
    """Label one question (Algorithm 1).

    With n kept documents there are n + 1 planning records: after i steps the label is `[SUBQ] q_i`, after all of them
    `[SUFFICIENT]`. Algorithm 1 as printed starts at i = 1, but table 4 needs the record with an empty history: it
    counts 71,676 SUBQ for 45,722 SUFFICIENT labels and 0.8 sub-queries in a history on average. With that record
    this means 1.57 documents a question and 0.75 steps a record; without it 2.57 documents, where HotpotQA has two
    supporting paragraphs, and 1.66 steps.

    Args:
        question: The question.
        teacher: Says which documents help, what to ask of each and which facts it holds.
        direct_answer: Whether the base model answers the question without retrieval. Then there is one
            `[NO_RETRIEVAL]` record for planning and one for answering, and no other (line 7).
        options: Choices of sample labelling.

    Returns:
        The planning records in order, then the answering record.

    Raises:
        UnlabelledQuestion: there is no helpful document, one of them has no sub-query or no triples, or a sub-query
            would give away the answer.
    """
    options = options or LabelOptions()
    if direct_answer:
        return [_record(question, name, Action.NO_RETRIEVAL) for name in ("plan0", "answer")]
    if not question.supporting:
        raise UnlabelledQuestion(DropReason.NO_SUPPORT)
    documents = await teacher.helpful_documents(question)
    if not documents:
        raise UnlabelledQuestion(DropReason.NO_HELPFUL)
    subqueries, facts = await _annotations(question, teacher, documents)
    if len(subqueries) != len(documents):
        raise UnlabelledQuestion(DropReason.NO_SUBQUERY, f"{len(subqueries)} for {len(documents)} documents")
    if options.first_subquery == "main_question":
        subqueries = [question.question, *subqueries[1:]]
    for subquery in subqueries:
        if gives_away_answer(subquery, question):
            raise UnlabelledQuestion(DropReason.ANSWER_IN_SUBQUERY, subquery)

    records: list[Record] = []
    history: tuple[Step, ...] = ()
    for document, subquery, found in zip(documents, subqueries, facts):
        records.append(_record(question, f"plan{len(records)}", Action.SUBQ, history, subquery))
        if isinstance(found, BaseException):
            raise found
        triples = tuple(dict.fromkeys(found))
        if not triples:
            raise UnlabelledQuestion(DropReason.NO_TRIPLES, question.passages[document].title)
        history = (*history, _step(question, subquery, document, triples, documents, options))
    records.append(_record(question, f"plan{len(records)}", Action.SUFFICIENT, history))
    records.append(_record(question, "answer", Action.SUFFICIENT, history))
    return records


async def _annotations(
    question: Question, teacher: Teacher, documents: list[int]
) -> tuple[list[str], list[list[Triple] | UnlabelledQuestion]]:
    """Sub-queries and triples, asked for side by side: triples need the documents alone.

    What the teacher can't say is raised in an order that does not depend on which reply came first, so that the
    reasons in the card are the same in every build: first what ends the build or waits, then the sub-queries; the
    triples' reasons are handed back.
    """
    calls: list[Coroutine[Any, Any, Any]] = [teacher.subqueries(question, documents)]
    calls += [teacher.triples(question, number) for number in documents]
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, (UnlabelledQuestion, RepliesPending)):
            raise result
    for result in results:
        if isinstance(result, RepliesPending):
            raise result
    subqueries, *facts = results
    if isinstance(subqueries, BaseException):
        raise subqueries
    return cast(list[str], subqueries), cast(list[list[Triple] | UnlabelledQuestion], facts)


def _step(
    question: Question,
    subquery: str,
    document: int,
    triples: tuple[Triple, ...],
    documents: Sequence[int],
    options: LabelOptions,
) -> Step:
    """A step of the history: the kept document, among distractors if the options ask for them."""
    shown = [(document, triples)]
    if options.distractors and options.triple_file is not None:
        chance = random.Random(f"{options.seed} {question.id} {subquery}")
        others = [number for number in range(len(question.passages)) if number not in documents]
        for number in chance.sample(others, len(others)):
            if len(shown) > options.distractors:
                break
            found = tuple(options.triple_file.of(question.passages[number]))
            if found:
                shown.append((number, found))
        chance.shuffle(shown)
    facts = dict.fromkeys(triple for _, group in shown for triple in group)
    return Step(subquery, tuple(facts), "\n".join(question.passages[number].content for number, _ in shown))


def gives_away_answer(subquery: str, question: Question) -> bool:
    """Whether a sub-query holds a gold answer that the question itself does not hold.

    Yes and no are no names to give away; aliases of one or two letters are passed over.
    """
    for position, answer in enumerate(question.answers):
        normal = normalize_answer(answer)
        if normal in YES_NO or (position and len(normal) < _SHORTEST_ALIAS):
            continue
        if mentions(subquery, answer) and not mentions(question.question, answer):
            return True
    return False


def _record(question: Question, name: str, action: Action, steps: tuple[Step, ...] = (), subquery: str = "") -> Record:
    return Record(
        id=f"{question.source}:{question.id}:{name}",
        question_id=question.id,
        task="answering" if name == "answer" else "planning",
        question=question.question,
        action=action,
        steps=steps,
        subquery=subquery,
        answers=question.answers,
        source=question.source,
    )


class PartTeacher:
    """Labels the questions of a part of the mix, ASQA or ARC-Easy, which RAS adds to HotpotQA-SUBQ (sections 4.1, C.4).

    What the paper leaves open is decided so:

    - **Answering records alone.** Table 4 counts the parts in the answering column, and appendix C.4 names them as a
      reason why there are more answering records than `[SUFFICIENT]` and `[NO_RETRIEVAL]` labels together. So a
      question gives one answering record and no planning record.
    - **History.** Without triples the record is one of direct answering: no step, `[NO_RETRIEVAL]`. With triples it has
      one step: q_0 is the question itself and the triples are those of all its passages, as in figure 25.
    - **The question** is put to the model with the words of its task at evaluation (the roles of table 5): the files
      `prompts/asqa.md` and `prompts/arc_easy.md`. The sub-query is the bare question, as in retrieval.
    - **Which questions.** The first ones of the file, as many as asked for (`PARTS`). Fewer in the file are taken as
      they are, and the card says how many are missing.

    Args:
        reader: A key of `PARTS`.
        triple_file: JSON lines `{"title", "text", "triples"}` of the questions' passages (ASQA's knowledge, or the
            passages in Self-RAG's output); None leaves every history empty.
        issues: Counts malformed triples of that file.

    Attributes:
        name: As the card calls it.
    """

    def __init__(self, reader: str, triple_file: str | None, issues: Counter[str] | None = None) -> None:
        self._template = (PROMPT_FOLDER / f"{reader}.md").read_text(encoding="utf-8").strip()
        self._triples = TripleFile(triple_file, issues) if triple_file else None
        given = f"triples of {Path(triple_file).name}" if triple_file else "no triples"
        self.name = f"gold answers, {given}"

    def records(self, question: Question) -> list[Record]:
        """The one answering record of a question."""
        step = self._step(question)
        return [
            Record(
                id=f"{question.source}:{question.id}:answer",
                question_id=question.id,
                task="answering",
                question=self._template.replace("{question}", question.question),
                action=Action.SUFFICIENT if step else Action.NO_RETRIEVAL,
                steps=(step,) if step else (),
                answers=question.answers,
                source=question.source,
            )
        ]

    def _step(self, question: Question) -> Step | None:
        found = [(p, self._triples.of(p)) for p in question.passages] if self._triples else []
        covered = [(passage, triples) for passage, triples in found if triples]
        if not covered:
            return None
        facts = dict.fromkeys(triple for _, triples in covered for triple in triples)
        return Step(question.question, tuple(facts), "\n".join(passage.content for passage, _ in covered))
