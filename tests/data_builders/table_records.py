"""Five records of every kind, for the tests of counts and cards."""

from tripletune.data_builders.datasets.stats import Statistics
from tripletune.models.data.records import Action, Record, Step
from tripletune.models.data.triples import Triple

STEP = Step("q", (Triple("a", "r", "b"), Triple("a", "s", "c"), Triple("a", "r", "b")))
OTHER = Step("p", (Triple("b", "r", "the Answer"),))


def records() -> list[Record]:
    return [
        Record("1", "q", "planning", "Why?", Action.SUBQ, (), "Who is it?", source="x"),
        Record("2", "q", "planning", "Why?", Action.SUFFICIENT, (STEP, OTHER), source="x"),
        Record("3", "q", "answering", "Why?", Action.SUFFICIENT, (STEP, OTHER), answers=("answer",), source="x"),
        Record("4", "p", "answering", "Why?", Action.SUFFICIENT, (STEP,), answers=("Yes",), source="x"),
        Record("5", "o", "answering", "Why?", Action.NO_RETRIEVAL, (), answers=("a b c",), source="y"),
    ]


def counted_records() -> dict:
    counts = Statistics()
    for record in records():
        counts.add(record, "validation" if record.question_id == "o" else "train")
    return counts.to_json()
