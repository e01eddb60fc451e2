import json

import pytest

from tests.cli import write_lines
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import Step
from tripletune.core.data.triples import Triple
from tripletune.rag import Trace
from tripletune.rag.results import read_result_rows
from tripletune.rag.search.retrievers import Retrieved


@pytest.fixture
def row():
    trace = Trace("Q?", "q1", answer="a", stop_reason="sufficient", details={"tokens": {"x.read": [3, 1]}})
    trace.add_step(Step("q", (Triple("a", "b", "c"),)), [Retrieved(Passage("t", "x"), 1.0)])
    trace.add_action("[SUBQ] q", None)
    row = {
        "id": "q1", "question": "Q?", "type": "", "answers": ["a"], "prediction": "a", "scores": {"f1": 1, "odd": 0.5},
        "supporting": [], "supporting_recall": None, "error": "", "trace": trace.to_json(),
    }  # fmt: skip
    return json.loads(json.dumps(row))


def test_a_row_is_read_as_it_was_written(tmp_path, row):
    path = write_lines(tmp_path / "results.jsonl", [row])
    assert list(read_result_rows(path)) == [(f"{path}:1", row)]
    short = write_lines(tmp_path / "short.jsonl", [{"id": "q1", "scores": {}}])
    assert len(list(read_result_rows(short, "scores"))) == 1


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((), "id", "the row lacks id"),
        (("id",), 7, "id must be text, found 7"),
        (("id",), None, "id must be text, found null"),
        (("scores",), 0.5, "scores must be an object, found 0.5"),
        (("scores", "f1"), "1", "scores.f1 must be a finite number"),
        (("scores", "f1"), 10**400, "scores.f1 must be a finite number"),
        (("scores", "f1"), 7, "score f1 is 7, but scores are from 0 to 1"),
        (("type",), 7, "type must be text"),
        (("answers",), "a", "answers must be a list"),
        (("supporting",), 7, "supporting must be a list"),
        (("trace",), None, "trace must be an object, found null"),
        (("trace",), "steps", "trace lacks steps"),
        (("trace", "details"), [], "trace.details must be an object"),
        (("trace", "details", "tokens", "x.read"), 3, "trace.details.tokens.x.read must be a list"),
        (("trace", "steps"), "text", "trace.steps must be a list"),
        (("trace", "steps", 0, "passages", 0, "id"), 7, r"trace.steps\[0\].passages\[0\].id must be text, found 7"),
        (("trace", "tallies"), {"calls.x": "1"}, "trace.tallies.calls.x must be a whole number"),
    ],
)
def test_a_damaged_row_is_one_line_with_its_place(tmp_path, row, place, value, message):
    part = row
    for name in place[:-1]:
        part = part[name]
    if "lacks" in message:
        del (part[place[-1]] if place else part)[value]
    else:
        part[place[-1]] = value
    path = write_lines(tmp_path / "results.jsonl", [row])
    with pytest.raises(ValueError, match=rf"results\.jsonl:1: {message}"):
        list(read_result_rows(path))
