"""Make the records of HotpotQA-SUBQ from questions and a teacher's annotations (RAS, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from tripletune.core.data.answers import YES_NO, mentions, normalize_name
from tripletune.core.data.questions import Annotation, DropReason, Question, Teacher, UnlabelledQuestion
from tripletune.core.data.records import Action, Record, Step, Task
from tripletune.data_builders.subq.searches import GoldSearches, PassageTriples, Searcher, names_to_find

FirstSubquery = Literal["main_question", "generated"]
Shown = Literal["supporting", "all"]
# Ending of the id of a record whose last search failed.
AGAIN = "-again"
# Many texts contain two-letter aliases by chance: MuSiQue lists "NO" as an alias of Norway.
_SHORTEST_ALIAS = 3


async def label_question(
    question: Question,
    teacher: Teacher,
    direct_answer: bool = False,
    first_subquery: FirstSubquery = "main_question",
    searcher: Searcher | None = None,
) -> list[Record]:
    """Return the planning records of one question in order, then its answering record (Algorithm 1).

    With n searches there are n + 1 planning records: after i < n steps the label is `[SUBQ] q_i`, after n steps
    `[SUFFICIENT]`. Algorithm 1 as printed starts at i = 1, but table 4 (1.57 SUBQ labels per SUFFICIENT label) needs
    the record with an empty history.

    Args:
        direct_answer: Whether the base model answers without retrieval. Then the question has one `[NO_RETRIEVAL]`
            record for planning and one for answering (line 7).
        first_subquery: See `options.BuildOptions`.
        searcher: Makes the searches of the history; by default each one shows the document that it asks for.
    """
    if direct_answer:
        return [record_of(question, name, Action.NO_RETRIEVAL) for name in ("plan0", "answer")]
    kept = await labelled_documents(question, teacher, first_subquery)
    for annotation in kept:
        if not annotation.triples:
            raise UnlabelledQuestion(DropReason.NO_TRIPLES, question.passages[annotation.document].title)
    searches = await (searcher or GoldSearches()).searches(question, kept)
    records: list[Record] = []
    history: tuple[Step, ...] = ()
    for search in searches:
        name = f"plan{len(records)}"
        if search.is_retry:
            name += AGAIN
        records.append(record_of(question, name, Action.SUBQ, history, search.query))
        history = (*history, step_of(search.query, search.shown))
    records.append(record_of(question, f"plan{len(records)}", Action.SUFFICIENT, history))
    records.append(record_of(question, "answer", Action.SUFFICIENT, history))
    return records


async def labelled_documents(question: Question, teacher: Teacher, first_subquery: FirstSubquery) -> list[Annotation]:
    """The teacher's annotations of the helpful documents, with the sub-queries as they become labels.

    Raises:
        UnlabelledQuestion: No document is helpful, or a label would give the answer away.

    The first label is the main question (the paper), so the teacher's own first sub-query becomes its other wording. It
    is used only if it names nothing that the question does not, because before the first search a planner has read
    nothing else.
    """
    if not question.supporting:
        raise UnlabelledQuestion(DropReason.NO_SUPPORT)
    kept = await teacher.annotate(question)
    if not kept:
        raise UnlabelledQuestion(DropReason.NO_HELPFUL)
    first = kept[0]
    if first_subquery == "main_question":
        first = first._replace(subquery=question.question, reworded=first.subquery)
    # Before the first search, the sub-query may name only what the question names.
    names = [name for name in names_to_find(question) if not mentions(question.question, name)]
    is_same = first.reworded in ("", first.subquery)
    if is_same or any(mentions(first.reworded, name) for name in names):
        first = first._replace(reworded=question.question)
    checked = []
    for annotation in [first, *kept[1:]]:
        if gives_away_answer(annotation.subquery, question):
            raise UnlabelledQuestion(DropReason.ANSWER_IN_SUBQUERY, annotation.subquery)
        if gives_away_answer(annotation.reworded, question):
            annotation = annotation._replace(reworded="")
        checked.append(annotation)
    return checked


def step_of(subquery: str, shown: Iterable[PassageTriples]) -> Step:
    """A step of the history: the query, and the distinct triples of its passages."""
    triples = []
    texts = []
    for facts in shown:
        triples += facts.triples
        texts.append(facts.passage.content)
    return Step(subquery, tuple(dict.fromkeys(triples)), "\n".join(texts))


def gives_away_answer(subquery: str, question: Question) -> bool:
    """Whether a sub-query names a gold answer, except yes, no and short aliases, that the question does not name.

    Such a label would teach a planner to write the answer before it was found.
    """
    for position, answer in enumerate(question.answers):
        normal = normalize_name(answer)
        is_short_alias = position > 0 and len(normal) < _SHORTEST_ALIAS
        if normal in YES_NO or is_short_alias:
            continue
        if mentions(subquery, answer) and not mentions(question.question, answer):
            return True
    return False


def record_of(
    question: Question, name: str, action: Action, steps: tuple[Step, ...] = (), subquery: str = ""
) -> Record:
    """A record of a question, with an id that ends in a name such as "plan0" or "answer".

    The name decides the task. Ids of stored data sets have this form, and rebuilt data sets must get the same ones.
    """
    task: Task = "answering" if name == "answer" else "planning"
    return Record(
        id=f"{question.source}:{question.id}:{name}",
        question_id=question.id,
        task=task,
        question=question.question,
        action=action,
        steps=steps,
        subquery=subquery,
        answers=question.answers,
        source=question.source,
    )
