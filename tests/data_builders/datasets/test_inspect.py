"""`tripletune data stats|validate|peek` on every kind of row."""

import json

import pytest

from tests.cli import run, write_lines
from tests.data_builders.rows import PAIRS, RECORDS, ROWS, write_rows
from tripletune.core.data.pairs import ExtractionPair
from tripletune.core.data.records import Action, Record, Step
from tripletune.core.data.rendering import load_instructions, render
from tripletune.core.data.triples import Triple
from tripletune.data_builders.datasets.inspect import dataset_files, find_rows, kind_of, mermaid, row_text, troubles
from tripletune.data_builders.datasets.kinds import KINDS


def record(identity, question_id, question):
    return Record(identity, question_id, "planning", question, Action.SUFFICIENT)


@pytest.fixture(params=["jsonl", "parquet"])
def folder(tmp_path, request):
    return write_rows(
        tmp_path / "data", "records", {"train": RECORDS[:3], "validation": RECORDS[3:]}, format=request.param
    )


@pytest.mark.parametrize("kind", ROWS)
def test_the_first_row_says_the_kind(tmp_path, kind):
    splits = {"train": ROWS[kind][:-1], "validation": ROWS[kind][-1:]}
    folder = write_rows(tmp_path / "data", kind, splits)
    assert kind_of(folder) is KINDS[kind]
    assert list(troubles(folder)) == []
    assert f"every {KINDS[kind].name} is valid" in run("data", "validate", folder).out
    out = run("data", "stats", folder).out
    assert f"splits: train {len(splits['train'])}, validation 1" in out
    assert f"no {KINDS[kind].name} is in two splits" in out
    split, row = find_rows(folder)[0]
    assert row == ROWS[kind][0]
    assert run("data", "peek", folder).out == row_text(KINDS[kind], row, split) + "\n"


def test_stats_prints_the_table_and_what_the_card_says(tmp_path):
    folder = write_rows(tmp_path / "data", "records", {"train": RECORDS})
    content = json.loads((folder / "statistics.json").read_text())
    content["build"] |= {"notes": ["A \x1b[31mnote."], "drops": {"x": {"[gone]": 3}}}
    (folder / "statistics.json").write_text(json.dumps(content))
    out = run("data", "stats", folder).out
    for part in ("129,902", "[SUFFICIENT]", "x: [gone]", "A \ufffd[31mnote."):
        assert part in out
    (folder / "statistics.json").unlink()
    assert "build: unknown (no statistics.json)" in run("data", "stats", folder).out


RECORD_TROUBLES = (
    {
        "train": [record("1", "a", "Why?"), record("1", "a", "Why?")],
        "validation": [record("2", "a", "Other?"), record("3", "b", "why")],
    },
    '{"id": "4"}\n{"id": "5", oops\n',
    [
        "train-00000.jsonl:2: record id '1' occurs a second time",
        "validation-00000.jsonl:1: question id 'a' is in 'validation' and in 'train'",
        "validation-00000.jsonl:2: question text 'why' is in 'validation' and in 'train'",
        "train-00000.jsonl:3: the row lacks question_id",
        "train-00000.jsonl:4: not valid JSON",
        "split 'train' has 4 rows, but this file says 2",
    ],
)
PAIR_TROUBLES = (
    {
        "train": [*PAIRS, ExtractionPair("a", "Other text.")],
        "validation": [ExtractionPair("z", "hello   THERE", "With a title")],
    },
    '{"id": "y", "text": " ", "triples": []}\n{"id": "5", oops\n',
    [
        "train-00000.jsonl:4: pair id 'a' occurs a second time",
        "train-00000.jsonl:5: pair 'y': the text is empty",
        "train-00000.jsonl:6: not valid JSON",
        "validation-00000.jsonl:1: text 'hellothere' is in 'validation' and in 'train'",
        "split 'train' has 6 rows, but this file says 4",
    ],
)


@pytest.mark.parametrize(
    ("kind", "splits", "lines", "told"), [("records", *RECORD_TROUBLES), ("pairs", *PAIR_TROUBLES)]
)
def test_every_trouble_is_named(tmp_path, kind, splits, lines, told):
    folder = write_rows(tmp_path / "data", kind, splits)
    with (folder / "train-00000.jsonl").open("a") as file:
        file.write(lines)
    found = list(troubles(folder))
    for part in told:
        assert any(part in line for line in found), part
    assert len(found) == len(told)
    ran = run("data", "validate", folder)
    assert ran.code == 1
    assert f"{len(told)} problem(s)" in ran.out


def test_a_problem_of_many_rows_is_one_line(tmp_path):
    file = tmp_path / "chats.jsonl"
    write_lines(file, [{"messages": "x"}] + [{"text": "x"}] * 12)
    shown = run("data", "validate", file).out.splitlines()
    assert shown[0].startswith(f"{file}:1: messages must be a list")
    assert shown[1].startswith(f"{file}:2,3,4,5,6,7,8,9,10,11 and 2 more lines: the row is no chat")
    assert shown[2:] == [f"{file}: 13 problem(s)"]


def test_rows_of_no_layout_hear_of_the_layouts(tmp_path):
    for row in ({"text": "### Q ... ### A ..."}, {"sentence": "Oslo.", "triplets": []}):
        file = tmp_path / "rows.jsonl"
        write_lines(file, [row])
        for command in ("validate", "peek"):
            ran = run("data", command, file)
            shown = ran.out + ran.err
            assert "rows.jsonl:1: the row is no chat: it needs messages" in shown
            assert f"but it has {', '.join(row)} (a pair for text-to-triples has text and triples)" in shown


def test_a_folder_without_shards_ends_with_one_line(tmp_path):
    for place, message in ((tmp_path / "gone", "no such file or folder"), (tmp_path, "holds no shards")):
        assert message in run("data", "validate", place).error


def ids(found):
    return [row.id for _, row in found]


def test_rows_are_found_by_id_question_number_label_and_split(folder):
    assert ids(find_rows(folder)) == ["1"]
    assert ids(find_rows(folder, identity="2")) == ["2"]
    assert ids(find_rows(folder, identity="q")) == ["1", "2", "3"]
    assert ids(find_rows(folder, identity="q", number=2)) == ["2"]
    assert find_rows(folder, number=4)[0][0] == "validation"
    assert ids(find_rows(folder, split="validation")) == ["4"]
    for label, identity in (("subq", "1"), ("sufficient", "2"), ("answer", "3"), ("direct_answer", "5")):
        assert ids(find_rows(folder, label=label)) == [identity]


def test_nothing_found_is_said(folder):
    for options, message in (
        ({"identity": "c", "number": 9}, "no record with id c, number 9"),
        ({"label": "facts"}, "label 'facts' is not one of subq, .* holds records"),
        ({"split": "test"}, "no split 'test'; it has train, validation"),
    ):
        with pytest.raises(ValueError, match=message):
            find_rows(folder, **options)


def test_a_row_is_shown_as_the_model_sees_it(folder):
    ((split, row),) = find_rows(folder, label="answer")
    text = row_text(KINDS["records"], row, split)
    assert f"{load_instructions()['answering']}\n\n{render(row.input)}\n\n=> answer" in text
    assert "q_0: 2 triples, 3 nodes" in text
    assert "gold answers: answer | one" in text
    text = row_text(KINDS["pairs"], PAIRS[0], "train")
    assert text.startswith("a  (split train, source -, with facts)\n2 triples, 3 entities\n\nAda: Ada was born in")
    assert "(nothing: the text has no facts)" in row_text(KINDS["pairs"], PAIRS[2], "train")


def test_peek_prints_all_rows_of_a_question_and_no_control_characters(tmp_path):
    """Defect 8: ids and questions with ESC sequences reached the terminal."""
    rows = [record("a\x1b[2J", "q", "Why?\x07"), record("b", "q", "Why?\x07")]
    folder = write_rows(tmp_path / "data", "records", {"train": rows})
    out = run("data", "peek", folder, "--id", "q").out
    assert out.count("=> ") == 2
    assert "a\ufffd[2J  (planning" in out
    rows = [record("a\nb\u202e", "q", "Why?")]
    folder = write_rows(tmp_path / "lines", "records", {"train": rows})
    assert "a b\ufffd  (planning" in run("data", "peek", folder).out
    assert not {"\x1b", "\x07"} & set(out)


def test_a_graph_is_printed_as_mermaid_text(folder):
    assert run("data", "peek", folder, "--id", "2", "--mermaid").out.splitlines() == [
        "flowchart LR",
        '    n0["a"]',
        '    n1["b"]',
        '    n2["c"]',
        '    n3["the Answer"]',
        '    n0 -->|"q_0: r"| n1',
        '    n0 -->|"q_0: s"| n2',
        '    n1 -->|"q_1: r"| n3',
        "    classDef bridge stroke-width:3px",
        "    class n1 bridge",
    ]
    assert "record '1' has no triples to draw" in run("data", "peek", folder, "--id", "1", "--mermaid").error


def test_names_are_no_mermaid_syntax():
    step = Step("q", (Triple('a"]; click\n#x', "<b>`p`", "é (c)"),))
    text = mermaid(KINDS["records"], Record("1", "q", "planning", "Why?", Action.SUFFICIENT, (step,)))
    assert text.splitlines()[1:] == [
        '    n0["a#34;#93;#59; click #35;x"]',
        '    n1["é (c)"]',
        '    n0 -->|"#60;b#62;#96;p#96;"| n1',
    ]


def test_explagraphs_command_keeps_repeated_pairs_on_one_side(tmp_path):
    lines = [f"claim {n % 25}\treason {n % 25}\tsupport\t(a; b; c)\n" for n in range(50)]
    (tmp_path / "e.tsv").write_text("".join(lines))
    words = "data", "explagraphs", "--input", tmp_path / "e.tsv", "--output", tmp_path / "out"
    assert run(*words).code == 0
    assert list(troubles(tmp_path / "out")) == []
    assert list(dataset_files(tmp_path / "out")) == ["test", "train", "validation"]
    assert "--overwrite to replace it" in run(*words).error


TURNS = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Kelm"}]
OTHERS_CHATS = [
    {"messages": TURNS},
    {"conversations": [{"from": "human", "value": "Where?"}, {"from": "gpt", "value": "Kelm"}]},
    {"instruction": "Where?", "input": "", "output": "Kelm"},
    {"prompt": "Where?", "completion": "Kelm"},
    {"prompt": "Where?", "chosen": "Kelm", "rejected": "Oslo"},
    {"chosen": TURNS, "rejected": [TURNS[0], {"role": "assistant", "content": "Oslo"}]},
    {"question": "Where?", "answer": "Kelm"},
]


@pytest.mark.parametrize("row", OTHERS_CHATS)
@pytest.mark.parametrize("is_array", [False, True])
def test_files_of_chats_of_other_trainers(row, is_array, tmp_path):
    if is_array:
        (tmp_path / "mine.json").write_text(json.dumps([row]))
        file = str(tmp_path / "mine.json")
    else:
        file = write_lines(tmp_path / "mine.jsonl", [row])
    assert run("data", "validate", file).out == f"{file}: every chat is valid\n"
    out = run("data", "stats", file).out
    assert "chats: 1" in out
    assert "splits" not in out
    assert ("with a rejected reply (pairs)" in out) == ("rejected" in row)
    out = run("data", "peek", file).out
    assert "user: Where?\n\n=> Kelm" in out
    assert ("=> Kelm\n\nrejected: Oslo\n" in out) == ("rejected" in row)


def test_a_last_turn_of_the_user_is_no_label(tmp_path):
    messages = [TURNS[0], TURNS[1], {"role": "user", "content": "Thanks."}]
    file = write_lines(tmp_path / "mine.jsonl", [{"messages": messages}])
    assert run("data", "peek", file).out.endswith("assistant (learned): Kelm\n\nuser: Thanks.\n")


def test_a_folder_of_chats_needs_no_numbers_in_its_files(tmp_path):
    other = {"messages": [{"role": "user", "content": "Who?"}, TURNS[1]]}
    write_lines(tmp_path / "train.jsonl", [OTHERS_CHATS[0], other, other, {"messages": [{"role": "tool"}]}])
    write_lines(tmp_path / "validation.jsonl", OTHERS_CHATS[1:2])
    assert list(troubles(tmp_path)) == [
        f"{tmp_path}/train.jsonl:3: the chat, or its id, occurs a second time",
        f"{tmp_path}/train.jsonl:4: the chat has a turn of the role 'tool', but calls and results of tools are not "
        "trained: leave such chats out, or write each call as the text of an assistant's turn and each result as the "
        "text of a user's turn",
        f"{tmp_path}/validation.jsonl:1: first question 'Where?' is in 'validation' and in 'train'",
    ]


def test_only_a_folder_is_pushed(tmp_path):
    file = write_lines(tmp_path / "mine.jsonl", OTHERS_CHATS[:1])
    assert f"{file} is a file: name the folder of a data set" in run("data", "push", file, "me/mine").error


def test_validate_names_columns_that_are_not_read(tmp_path):
    turns = [{"role": "user", "content": "Who?", "name": "Ida"}, {"role": "assistant", "content": "Me."}]
    others = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    rows = [{"messages": turns, "level": "easy"}, {"messages": others, "level": "hard", "tags": None}]
    ran = run("data", "validate", write_lines(tmp_path / "chats.jsonl", rows))
    assert ran.code == 0
    assert "chats.jsonl has columns that are not read: level (2 rows), messages[].name (1 rows)\n" in ran.out
    assert "every chat is valid" in ran.out


def test_validate_names_the_way_for_questions_with_passages(tmp_path):
    row = {"question": "Who?", "answer": "Ida", "context": [["Kelm", ["Ida lives in Kelm."]]]}
    ran = run("data", "validate", write_lines(tmp_path / "hotpot.jsonl", [row]))
    assert "hotpot.jsonl looks like questions with passages, and is read here as chats without them" in ran.out
