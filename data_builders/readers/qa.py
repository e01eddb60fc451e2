"""Read the plain format of questions with answers: custom questions, PopQA, TriviaQA and similar files.

    {"id", "question", "answers", "supporting": [title or id, ...], "context": [{"id", "title", "text"}, ...],
     "steps": [{"question", "passage": title or id, "triples": [[s, p, o]], "answer"}]}

Only the question is required; a question without an answer can be asked but not scored. `supporting` and `steps` name
passages of `context` or else of a corpus (`linked`). A step without `passage` has the supporting passage of its number,
or else its own triples with an optional `text`. The lines of a `.txt` file are questions.

PopQA (Mallen et al., 2022): `{"id", "question", "possible_answers"}`, where copies store the answers as text. TriviaQA
(Joshi et al., 2017): the hub's `{"question_id", "question", "answer": {"value", "aliases"}}`. FlashRAG's files
of all sets: `{"id", "question", "golden_answers"}`. GraphRAG-Bench: `{"id", "source", "question", "answer",
"question_type"}`; its novels share ids, so the id of a question begins with its source. UltraDomain: `{"_id", "input",
"answers"}`. `tripletune data adapt` makes a corpus of the texts of GraphRAG-Bench and UltraDomain. `ctxs` (Self-RAG's
files) and `docs` (ALCE's files) also hold a question's passages, best first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tripletune.core.data.fields import checked, given, name_field, name_list, shown
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import Hop, Issues, Question, Questions
from tripletune.core.data.triples import triples_from_json
from tripletune.core.files import read_text
from tripletune.core.rows import (
    Row,
    find_passage,
    gold_answers,
    own_passages,
    question_id,
    required_text,
    source_rows,
)

_GOLD = ("possible_answers", "golden_answers", "answers", "answer")


def read_questions(location: str, issues: Issues = None, source: str = "qa") -> Questions:
    """Stream the questions; see `data_builders.readers.Reader` for arguments and errors."""
    rows = source_rows(location)
    if location.endswith(".txt"):
        first = dict[str, int]()  # a question that repeats is read once
        for number, line in enumerate(read_text(location).removeprefix("\ufeff").split("\n"), 1):
            first.setdefault(line.strip(), number)
        rows = ((f"{location}:{number}", {"question": line}) for line, number in first.items() if line)
    for where, row in rows:
        yield read_question(row, where, source)


def read_question(row: Row, where: str, source: str = "qa") -> Question:
    """The question of a row; every error message starts with `where`."""
    question = required_text(row, ("question", "input"), where)
    identity = question_id(row, where, question, "id", "question_id", "_id")
    kind, novel = name_field(row, where, "question_type", "type"), name_field(row, where, "source")
    identity = f"{novel}:{identity}" if "question_type" in row and novel else identity
    answers = gold_answers(row, where, _GOLD) if given(row, *_GOLD) is not None else ()
    passages, names = own_passages(row, where), name_list(row, where, "supporting")
    steps = [_step(step, where, number, names) for number, step in enumerate(given(row, "steps") or ())]
    passages += tuple(own for *_, own in steps if own)
    wanted = dict.fromkeys([*names, *(name for name, *_ in steps)])
    found = {name: place for name in wanted if (place := _place(name, passages)) is not None}
    links = tuple(wanted) if len(found) < len(wanted) else ()
    index = {name: len(passages) + number for number, name in enumerate(links)} or found
    hops = tuple(replace(hop, passage_index=index[name]) for name, hop, _ in steps)
    supporting = () if links else tuple(dict.fromkeys(found.values()))
    return Question(identity, question, answers, passages, supporting, kind, source, hops=hops, links=links)


def _step(step: Any, where: str, number: int, supporting: Sequence[str]) -> tuple[str, Hop, Passage | None]:
    """A step, the name of its passage, and the passage made of the step's own text and facts, if it has them."""
    layout = dict.fromkeys(("question", "passage?", "answer?", "text?"), str)
    found = checked(step, f"{where}: steps", layout)
    name = found.get("passage") or "".join(supporting[number : number + 1])
    triples = triples_from_json(step["triples"] if given(step, "triples") is not None else (), where)
    if not name and not triples:
        raise ValueError(
            f"{where}: the step {shown(step)} has no triples and no passage, and no supporting passage has its number"
        )
    own = None if name else Passage("", found.get("text", ""), f"step {number}")
    return name or f"step {number}", Hop(found["question"], found.get("answer", ""), -1, tuple(triples)), own


def _place(name: str, passages: Sequence[Passage]) -> int | None:
    """The index of the passage with this id, or else with this title."""
    ids = [passage.id for passage in passages]
    return ids.index(name) if name in ids else find_passage(name, passages)
