import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli import run, write_lines
from tripletune.core.data.records import Action, Record, Step, read_records
from tripletune.core.data.triples import Triple
from tripletune.data_builders.datasets.inspect import troubles
from tripletune.data_builders.published import MALFORMED_TRIPLES, MalformedRow, read_released, released_record

PLANNER = (
    "You are a planner to say what is next.\nOutput [NO_RETRIEVAL] if no search is needed.\n"
    "Output [SUBQ] with an subquery if it is.\nOutput [SUFFICIENT] if all is known.\n"
)
ANSWERER = (
    "You are a answerer given a question.\nEach [SUBQ] is a subquery.\n[NO_RETRIEVAL] means no search was needed.\n"
    'The main question starts with "Question: ". Please answer it.\n'
)


def released(record):
    """Our record in the form of the released data: the test's own writer."""
    text = ANSWERER if record.task == "answering" else PLANNER
    text += "\n"
    for step in record.steps:
        triples = [f"(S> {t.subject}| P> {t.predicate}| O> {t.object})" for t in step.triples]
        text += f"[SUBQ] {step.query}\nRetrieved Graph Information: {triples}\n"
    return {"input": f"{text}Question: {record.question}", "label": record.label, "graphs": []}


def comparable(record):
    """What the released form keeps of a record."""
    answers = record.answers[:1] if record.task == "answering" else ()
    return record.task, record.question, record.action, record.subquery, record.steps, answers


def read_one(row, issues=None):
    return released_record(row, 1, Counter() if issues is None else issues)


LINES = st.text(st.characters(blacklist_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=12)
WORDS = LINES.map(lambda text: " ".join(text.split())).filter(bool)
# What the interface itself is made of can't be told from a name when nothing escapes it.
PLAIN = WORDS.filter(lambda text: not any(mark in text for mark in ("[", "Question:", "Retrieved")))
NAMES = WORDS.filter(
    lambda text: not any(mark in text.replace(" ", "") for mark in ("(S>", "|P>", "|O>")) and text[-1] != "|"
)
TRIPLES = st.lists(st.builds(Triple, NAMES, NAMES, NAMES), max_size=4, unique=True).map(tuple)
STEPS = st.lists(st.builds(Step, PLAIN, TRIPLES), max_size=3).map(tuple)


@st.composite
def some_records(draw):
    steps, question = draw(STEPS), draw(PLAIN)
    task = draw(st.sampled_from(["planning", "answering"]))
    action = draw(st.sampled_from(Action)) if task == "planning" else Action.NO_RETRIEVAL
    if task == "answering" and steps:
        action = Action.SUFFICIENT
    subquery = draw(PLAIN) if task == "planning" and action is Action.SUBQ else ""
    answers = (draw(WORDS),) if task == "answering" else ()
    return Record("r", "q", task, question, action, steps, subquery, answers)


@settings(deadline=None)
@given(some_records())
def test_a_record_comes_back_from_the_released_form(record):
    issues: Counter[str] = Counter()
    assert comparable(read_one(released(record), issues)) == comparable(record)
    assert not +issues


@settings(deadline=None)
@given(st.text(), st.text())
def test_any_row_is_read_or_refused(text, label):
    try:
        record = read_one({"input": text, "label": label})
    except MalformedRow:
        return
    assert record.question
    assert record.label


STEP = "[SUBQ] Who?\nRetrieved Graph Information: {}\n"


@pytest.mark.parametrize(
    ("body", "question", "queries"),
    [
        ("Question: Why?", "Why?", []),
        ("[NO_RETRIEVAL]\nQuestion: Why?", "Why?", []),
        ("Why?", "Why?", []),
        ("Question: Read this.\n\n## Input:\n\nI love pizza.", "Read this.\n\n## Input:\n\nI love pizza.", []),
        (STEP.format("[]") + "Question: Is it\nQuestion: so?", "Is it\nQuestion: so?", ["Who?"]),
        (STEP.format("[]") * 2 + "\nQuestion: Why?", "Why?", ["Who?", "Who?"]),
        ("[SUBQ] Who\nor what?\nRetrieved Graph Information: []\nQuestion: Why?", "Why?", ["Who or what?"]),
    ],
)
@pytest.mark.parametrize("instruction", [PLANNER + "\n", ANSWERER + "\n", ANSWERER.replace("\n", "\n\n"), PLANNER])
def test_histories_and_questions_of_every_layout(instruction, body, question, queries):
    if instruction in (PLANNER, ANSWERER.replace("\n", "\n\n")) and not body.startswith(("Question", "[")):
        pytest.skip("a bare question is told from the instruction by the one blank line between them")
    record = read_one({"input": instruction + body, "label": "[SUFFICIENT]", "graphs": []})
    assert record.question == question
    assert [step.query for step in record.steps] == queries
    assert record.task == ("planning" if "planner" in instruction else "answering")


def test_rows_without_an_instruction_are_told_by_their_label():
    assert read_one({"input": "Question: Why?", "label": "[NO_RETRIEVAL]"}).task == "planning"
    assert read_one({"input": "Question: Why?", "label": "42"}).task == "answering"
    step = STEP.format("['(S> a| P> b| O> c)']")
    record = read_one({"input": f"{step}\n\nQuestion: Why?", "label": "[SUBQ] And\n then?"})
    assert (record.subquery, len(record.steps)) == ("And then?", 1)


@pytest.mark.parametrize(
    ("printed", "names", "malformed"),
    [
        ("""['(S> a| P> b| O> c)', "(S> a's| P> b| O> c (d), e)"]""", ["a c", "a's c (d), e"], 0),
        (r"""['(S> AC\\DC| P> b| O> c\nd)']""", ["AC\\DC c d"], 0),
        # Cut off in the middle, as in figure 10: the whole ones still count.
        ("['(S> a| P> b| O> c)', '(S> d| P> e| O> f)', '(S> g| P> h", ["a c", "d f"], 1),
        ("['(S> a| P> b| O> c', '(S> d| P> e f)', '(S> g| P> h| O> i)']", ["a c", "g i"], 1),
        ("['(S> a| P> b| O> c (x', 'y)']", ["a c (x"], 1),
        ("", [], 0),
        ("[1, 2]", [], 1),
    ],
)
def test_triples_cost_no_neighbour(printed, names, malformed):
    issues: Counter[str] = Counter()
    text = f"{PLANNER}\n{STEP.format(printed)}Question: Why?"
    (step,) = read_one({"input": text, "label": "[SUFFICIENT]"}, issues).steps
    assert [f"{triple.subject} {triple.object}" for triple in step.triples] == names
    assert issues[MALFORMED_TRIPLES] == malformed


NO_TEXT, NO_ACTION = "input or label is missing, empty or not text", "the label of a planning row is not an action"
BAD_INPUTS = [
    ("\nQuestion: ", "no question in the input"),
    ("\n" + STEP.format("[]"), "no question in the input"),
    ("\n[SUBQ] Who?\nQuestion: Why?", "a step without sub-query or graph information"),
    ("\n" + STEP.format("[]").replace("Who?", "") + "Question: Why?", "a step without sub-query or graph information"),
]
BAD = [
    ('{"input": "Question: Why?"}', NO_TEXT),
    ('{"input": ["Why?"], "label": "a"}', NO_TEXT),
    *((json.dumps({"input": PLANNER + body, "label": "[SUFFICIENT]"}), reason) for body, reason in BAD_INPUTS),
    *((json.dumps({"input": PLANNER + "\nQuestion: Why?", "label": label}), NO_ACTION) for label in ("So.", "[SUBQ]")),
]


def test_bad_rows_are_counted_by_reason_and_line(tmp_path):
    good = json.dumps(released(Record("r", "q", "planning", "Why?", Action.NO_RETRIEVAL)))
    path = tmp_path / "train_data.jsonl"
    path.write_text("\n".join([good, "", *(line for line, _ in BAD), good]) + "\n", encoding="utf-8")
    drops: Counter[str] = Counter()
    found = list(read_released(str(path), drops, Counter()))
    assert [record.id for record in found] == ["ras_released:1:plan", f"ras_released:{len(BAD) + 2}:plan"]
    assert len({record.question_id for record in found}) == 1
    assert drops == Counter(reason for _, reason in BAD)


def test_command_writes_a_data_set(tmp_path):
    step = Step("Who?", (Triple("a", "b", "c"),))
    rows = []
    for number in range(40):
        question = f"Why {number}?"
        rows.append(released(Record("r", "q", "planning", question, Action.SUBQ, (), "Who?")))
        rows.append(released(Record("r", "q", "planning", question, Action.SUFFICIENT, (step,))))
        rows.append(released(Record("r", "q", "answering", question, Action.SUFFICIENT, (step,), answers=("c",))))
    rows.append({"input": PLANNER + "\nQuestion: Why?", "label": "nothing", "graphs": []})
    path, output = write_lines(tmp_path / "train_data.jsonl", rows), tmp_path / "out"
    out = run("data", "released", "--input", path, "--output", output, "--validation-fraction", 0.3).out
    assert "rows left out: the label of a planning row is not an action 1" in out
    assert list(troubles(output)) == []
    assert {len(list(read_records(output, split))) > 0 for split in ("train", "validation")} == {True}
    assert sum(1 for _ in read_records(output)) == 120
    card = (output / "README.md").read_text(encoding="utf-8")
    assert "the label of a planning row is not an action | 1 |" in card


def test_opposite_labels_of_one_prompt_are_counted_and_can_be_dropped(tmp_path, capsys):
    step = Step("Who?", (Triple("a", "b", "c"),))

    def plan(question, action, subquery="", steps=()):
        return released(Record("x", "q", "planning", question, action, steps, subquery=subquery))

    rows = [
        plan("Both?", Action.NO_RETRIEVAL),
        plan("Both?", Action.SUBQ, "Who?"),
        plan("Both?", Action.SUFFICIENT, steps=(step,)),
        plan("Search?", Action.SUBQ, "Who?"),
        plan("Known?", Action.NO_RETRIEVAL),
    ]
    source = write_lines(tmp_path / "train_data.jsonl", rows)
    arguments = ["data", "released", "--input", str(source), "--split-name", "train"]
    said = run(*arguments, "--output", str(tmp_path / "kept")).out
    assert "1 questions whose first plan is [NO_RETRIEVAL] in one row and [SUBQ] in another" in said
    assert len(list(read_records(tmp_path / "kept"))) == 5
    card = (tmp_path / "kept" / "README.md").read_text()
    assert "| ras_released | - | 3 |" in card
    run(*arguments, "--output", str(tmp_path / "dropped"), "--contradictions", "drop")
    kept = [(record.question, record.action) for record in read_records(tmp_path / "dropped")]
    assert kept == [("Both?", Action.NO_RETRIEVAL), ("Search?", Action.SUBQ), ("Known?", Action.NO_RETRIEVAL)]
