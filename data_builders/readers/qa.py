"""Read the plain format of questions with answers: custom questions, PopQA, TriviaQA and similar files.

    {"id", "question", "answers", "supporting": [title or id, ...], "context": [{"id", "title", "text"}, ...],
     "steps": [{"question", "passage": title or id, "triples": [[s, p, o]], "answer"}]}

Only the question is required; a question without an answer can be asked but not scored. `supporting` and `steps` name
passages of `context` or else of a corpus (`with_linked_passages`). A step without `passage` has the supporting passage
of its number, or else its own triples with an optional `text`. The lines of a `.txt` file are questions.

PopQA (Mallen et al., 2022): `{"id", "question", "possible_answers"}`, where copies store the answers as text. TriviaQA
(Joshi et al., 2017): the hub's `{"question_id", "question", "answer": {"value", "aliases"}}`. FlashRAG's files
of all sets: `{"id", "question", "golden_answers"}`. GraphRAG-Bench: `{"id", "source", "question", "answer",
"question_type"}`; its novels share ids, so the id of a question begins with its source. UltraDomain: `{"_id", "input",
"answers"}`. The gold answers may also have the names of other evaluation tools, such as `ground_truth`, `reference` or
`expected_answer`; RAGAS's `contexts` are texts without titles. `tripletune data adapt` makes a corpus of the texts of
GraphRAG-Bench and UltraDomain. `ctxs` and `top_contexts` (Self-RAG's files) and `docs` (ALCE's files) also hold a
question's passages, best first, and `paragraphs` those of MuSiQue's layout, with marks of the supporting ones.

KILT (Petroni et al., 2021): `{"id", "input", "output": [{"answer", "provenance": [{"wikipedia_id",
"start_paragraph_id", "end_paragraph_id"}]}]}`. Its provenance names paragraphs of the corpus that `data adapt` makes of
the knowledge source; each output is evidence enough, so the supporting passages are those of the first that has some.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tripletune.core.data.contexts import find_passage, own_passages
from tripletune.core.data.fields import checked, given, name_field, name_list, shown, unfolded
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import Hop, Issues, Question, Questions
from tripletune.core.data.triples import Triple, triples_from_json
from tripletune.core.files import read_text
from tripletune.core.rows import Row, gold_answers, question_id, required_text, source_rows
from tripletune.data_builders.readers.musique import MarkedParagraphs, marked_paragraphs

# The last of these are names of other evaluation tools: RAGAS, DeepEval, LangSmith, OpenAI's evals.
_GOLD = (
    "possible_answers", "golden_answers", "answers", "answer", "gold_answers", "gold_answer", "gold", "ground_truth",
    "ground_truths", "reference", "references", "reference_answer", "reference_answers", "expected_answer",
    "expected_answers", "expected_output", "expected", "correct_answer", "correct_answers", "ideal", "target",
    "targets",
)  # fmt: skip


def read_questions(location: str, issues: Issues = None, source: str = "qa") -> Questions:
    """Stream the questions; see `data_builders.readers.Reader` for arguments and errors."""
    rows = _lines_as_rows(location) if location.endswith(".txt") else source_rows(location)
    for where, row in rows:
        yield read_question(row, where, source)


def _lines_as_rows(location: str) -> Iterator[tuple[str, Row]]:
    """The distinct lines of a text file as rows, each at its first place; blank lines are skipped."""
    seen = {""}
    lines = read_text(location).removeprefix("\ufeff").split("\n")
    for number, line in enumerate(lines, 1):
        question = line.strip()
        if question not in seen:
            seen.add(question)
            yield f"{location}:{number}", {"question": question}


def read_question(row: Row, where: str, source: str = "qa") -> Question:
    """The question of a row; every error message starts with `where`.

    Names of passages, in `supporting` and in steps, become indices here if the row holds the passages. If it lacks one
    of them, the names go into `links`, and `with_linked_passages` finds them in a corpus and appends them to the
    passages: the indices of hops count on it. Passages that a step states itself are in no corpus and never linked.

    Args:
        row: A row of a file in one of the layouts that the module lists.
        where: "file:line", for errors.
        source: The name of the data set, written into the question.

    Raises:
        ValueError: A field is missing or of another type, or a step has neither triples nor a passage.
    """
    question = required_text(row, where, "question", "input", "query", "user_input")
    identity = question_id(row, where, question, "id", "question_id", "_id")
    novel = name_field(row, where, "source")
    if "question_type" in row and novel:
        # GraphRAG-Bench, whose novels share ids.
        identity = f"{novel}:{identity}"
    answers = gold_answers(row, where, *_GOLD) if given(row, *_GOLD) is not None else ()
    supporting_names = name_list(row, where, "supporting")
    if isinstance(row.get("output"), list):
        kilt = _kilt_output(row, where)
        answers = answers or kilt.answers
        supporting_names = supporting_names or kilt.paragraphs
    steps = _read_steps(row, where, supporting_names)
    paragraphs = MarkedParagraphs((), {}, ())
    if given(row, "paragraphs") is not None:
        paragraphs = marked_paragraphs(row, where)
    passages = paragraphs.passages + own_passages(row, where)
    passages += tuple(step.own_passage for step in steps if step.own_passage)

    passage_names = dict.fromkeys([*supporting_names, *(step.passage_name for step in steps)])
    index_of: dict[str, int] = {}
    for name in passage_names:
        index = _index_of(name, passages)
        if index is not None:
            index_of[name] = index
    links: tuple[str, ...] = ()
    supporting = tuple(dict.fromkeys(index_of.values())) or paragraphs.supporting
    if len(index_of) < len(passage_names):
        # Not all are in the row, so `with_linked_passages` takes them from the corpus, and appends them to the row's
        # passages; but what a step itself states is in no corpus.
        own_names = [step.passage_name for step in steps if step.own_passage]
        links = tuple(name for name in passage_names if name not in own_names)
        supporting = tuple(index_of[name] for name in own_names)
        index_of |= {name: len(passages) + number for number, name in enumerate(links)}
    hops = [Hop(step.question, step.answer, index_of[step.passage_name], step.triples) for step in steps]
    return Question(
        id=identity,
        question=question,
        answers=answers,
        passages=passages,
        supporting=supporting,
        type=name_field(row, where, "question_type", "type"),
        source=source,
        hops=tuple(hops),
        links=links,
    )


class _KiltOutput(NamedTuple):
    """The distinct answers of a row of KILT, and the ids of the paragraphs of the first output with provenance."""

    answers: tuple[str, ...]
    paragraphs: list[str]


def _kilt_output(row: Row, where: str) -> _KiltOutput:
    """The answers and supporting paragraphs of a row of KILT; an output may have one, the other or both."""
    answers = []
    paragraphs: list[str] = []
    layout = {"output": [{"provenance?": [{"start_paragraph_id?": int, "end_paragraph_id?": int}]}]}
    for output in checked(row, where, layout)["output"]:
        answers.append(name_field(output, where, "answer").strip())
        named: list[str] = []
        for evidence in output.get("provenance") or ():
            page = name_field(evidence, where, "wikipedia_id")
            first = evidence.get("start_paragraph_id")
            # Entity linking and slot filling name pages alone, so no paragraph is known to support the answer.
            if page and first is not None:
                last = max(first, evidence.get("end_paragraph_id") or first)
                named += [f"{page}_{number}" for number in range(first, last + 1)]
        paragraphs = paragraphs or list(dict.fromkeys(named))
    return _KiltOutput(tuple(dict.fromkeys(answer for answer in answers if answer)), paragraphs)


class _Step(NamedTuple):
    """A step of a question.

    Attributes:
        passage_name: Id or title of its passage; "step N" where the step has its own.
        own_passage: The passage made of the step's own text and facts, if it names none.
    """

    question: str
    answer: str
    triples: tuple[Triple, ...]
    passage_name: str
    own_passage: Passage | None


def _read_steps(row: Row, where: str, supporting_names: Sequence[str]) -> list[_Step]:
    """The steps of a row; a step without a passage takes the supporting passage of its number."""
    steps = []
    stored_steps = unfolded(given(row, "steps")) or ()
    if not isinstance(stored_steps, list | tuple):
        raise ValueError(f"{where}: steps must be a list, found {shown(stored_steps)}")
    for number, stored in enumerate(stored_steps):
        default_name = supporting_names[number] if number < len(supporting_names) else ""
        steps.append(_read_step(stored, where, default_name, own_name=f"step {number}"))
    return steps


def _read_step(stored: Row, where: str, default_name: str, own_name: str) -> _Step:
    """A step as a file holds it, which is checked here; it needs a passage to which its sub-query leads.

    This is the passage that the step names, else the supporting passage with its number (`default_name`). A step that
    only has triples gets a passage of its own (`own_name`), so that these triples have a place.
    """
    fields = checked(stored, f"{where}: steps", {"question": str, "passage?": str, "answer?": str, "text?": str})
    passage_name = fields.get("passage") or default_name
    own_passage = None
    triples: tuple[Triple, ...] = ()
    if given(stored, "triples") is not None:
        triples = triples_from_json(stored["triples"], where)
    if not passage_name:
        if not triples:
            raise ValueError(
                f"{where}: the step {shown(stored)} has no triples and no passage, and no supporting passage has its "
                "number"
            )
        passage_name = own_name
        own_passage = Passage("", fields.get("text", ""), own_name)
    return _Step(fields["question"], fields.get("answer", ""), triples, passage_name, own_passage)


def _index_of(name: str, passages: Sequence[Passage]) -> int | None:
    """The index of the passage with this id, or else with this title; None if there is none."""
    ids = [passage.id for passage in passages]
    if name in ids:
        return ids.index(name)
    return find_passage(name, passages)
