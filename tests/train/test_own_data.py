"""Rows as people have them, in the files that they have them in, train without a line of code."""

import csv
import json

import pytest

from tests.cli import run, write_lines
from tripletune.core.data.pairs import ExtractionPair, Trajectory
from tripletune.core.data.triples import Triple
from tripletune.data_builders.subq.annotations import plain_records

STEP = {"question": "Who wrote Glass?", "triples": [["Glass", "written by", "Ida"]]}
LAST = {"question": "Where was Ida born?", "triples": [{"head": "Ida", "relation": "born in", "tail": "Kelm"}]}
PLAIN = {"question": "Where was the author of Glass born?", "answers": ["Kelm"], "steps": [STEP, LAST]}
CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
CHAT = [*CHAT, {"role": "assistant", "content": "Ho"}]
TALK = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
FACTS = [["Ida", "born in", "Kelm"]]
PAIR = {"text": "Ida was born in Kelm.", "triples": FACTS}


def array(path, rows):
    path.write_text(json.dumps(rows))
    return path


def parquet(path, rows):
    from datasets import Dataset

    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(rows).to_parquet(path)
    return path


def table(path, rows):
    """Lists become text, as JSON, since a cell holds nothing else."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        for row in rows:
            cells = [value if isinstance(value, str) else json.dumps(value) for value in row.values()]
            writer.writerow(dict(zip(row, cells, strict=True)))
    return path


WRITERS = {"jsonl": write_lines, "json": array, "parquet": parquet, "hub": parquet, "csv": table, "tsv": table}
SHAPES = {
    "messages": ("chat", [{"messages": CHAT}], "jsonl"),
    "conversations": ("chat", [{"conversations": TALK}], "json"),
    "instructions": ("chat", [{"instruction": "Say ho.", "input": "Hi", "output": "Ho"}], "jsonl"),
    "prompts": ("chat", [{"prompt": CHAT[:2], "completion": CHAT[2:]}], "hub"),
    "preferences": ("chat", [{"prompt": "Hi", "chosen": "Ho", "rejected": "Hm"}], "parquet"),
    "questions": ("ras", [PLAIN, {"question": "Two and two?", "answer": "four", "steps": []}], "json"),
    "questions, parquet": ("ras", [{**PLAIN, "steps": [STEP]}], "parquet"),
    "pairs": ("text-to-triples", [PAIR, {"text": "Ho.", "triples": []}], "parquet"),
    "instructions, table": ("chat", [{"instruction": "Say ho.", "input": "", "output": "Ho\nho"}], "csv"),
    "conversations, table": ("chat", [{"conversations": TALK}], "csv"),
    "preferences, table": ("chat", [{"prompt": "Hi", "chosen": CHAT[1:], "rejected": "Hm"}], "csv"),
    "questions, table": ("ras", [PLAIN, {**PLAIN, "question": "Two and two?", "steps": []}], "csv"),
    "pairs, table": ("text-to-triples", [PAIR, {"text": "Ho.", "triples": []}], "tsv"),
    "pairs as text": ("text-to-triples", [{**PAIR, "triples": "(<S> Ida| <P> born in| <O> Kelm)"}], "jsonl"),
}


@pytest.fixture
def words(tmp_path, tiny_llama, tiny_encoder):
    """The command line of a short run of a task on rows that lie in a file of a kind."""

    def make(task, rows, kind):
        name = {"hub": "set/data/train-00000-of-00001.parquet"}.get(kind, f"rows.{kind}")
        WRITERS[kind](tmp_path / name, rows)
        place = tmp_path / ("set" if kind == "hub" else name)
        found = ["--data.train", place, "--model.base", tiny_llama, "--output_dir", tmp_path / "run"]
        if task == "ras":
            found += ["--model.encoder", tiny_encoder, "--model.graph_hidden_width", 16, "--model.graph_heads", 2]
        return [task, *found, "--train.max_steps", 1, "--train.bf16", "false", "--train.learning_rate", 0.01]

    return make


@pytest.mark.parametrize("shape", SHAPES)
def test_own_rows_train(shape, words, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    task, rows, kind = SHAPES[shape]
    loss = ["--train.preference", "sigmoid"] if shape.startswith("preferences") else []
    ran = run("train", *words(task, rows, kind), *loss)
    assert ran.code == 0, ran.err
    about = json.loads((tmp_path / "run" / "final" / "training.json").read_text())
    assert about["steps"] == 1
    if task == "chat":
        counts = about["tokenised"]["train"]
        assert (counts["chats"], counts["replies"]) == (1, 1)
        assert not {"trajectories", "rounds", "of custom"} & counts.keys()


@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
def test_training_and_the_data_commands_read_the_same_rows(kind, words, tmp_path):
    rows = [{"instruction": f"Say {number}.", "output": str(number)} for number in range(4)]
    found = words("chat", rows, kind)
    path = found[2]
    assert f"{path}: every chat is valid" in run("data", "validate", path).out
    split = run("data", "split", path, "--output", tmp_path / "out", "--validation-fraction", 0.5)
    assert sorted(split.out.split(": ")[1].strip().split(", ")) == ["train 2", "validation 2"]
    assert "chats 4" in run("train", *found, "--dry-run").out


def test_columns_that_are_not_read_are_named_once_per_file(words, tmp_path):
    chats = [{"messages": CHAT, "tools": [{"name": "search"}], "difficulty": 1}, {"messages": CHAT, "difficulty": 2}]
    task, *found = words("chat", chats, "jsonl")
    write_lines(tmp_path / "more.jsonl", chats[:1])
    found[1] = f"{found[1]},{tmp_path / 'more.jsonl'}"
    warnings = [
        "rows.jsonl has columns that are not read: difficulty (2 rows), tools (1 rows)",
        "more.jsonl has columns that are not read: difficulty (1 rows), tools (1 rows)",
    ]
    for _ in range(2):  # also for rows from the cache
        ran = run("train", task, *found, "--dry-run")
        assert [ran.err.count(warning) for warning in warnings] == [1, 1], ran.err


def test_rejected_replies_that_are_not_learned_from_are_told(words):
    task, rows, kind = SHAPES["preferences"]
    found = words(task, rows, kind)
    ran = run("train", *found, "--dry-run")
    assert (
        ran.err.count("1 rows have a rejected reply, which is not read: this run learns the chosen replies alone") == 1
    )
    assert "rejected replies (not read) 1" in ran.out
    assert "first row, learned tokens" in ran.out


def test_packs_are_called_packs(words):
    """The longest row comes first in a pack, not the first row of the file."""
    longer = [*CHAT[:2], {"role": "assistant", "content": "Ho ho ho"}]
    rows = [{"messages": CHAT}, {"messages": longer}]
    ran = run("train", *words("chat", rows, "jsonl"), "--train.packing", "true", "--dry-run")
    assert "an optimiser step takes 8 packs, but only 1 exist: it takes them all" in ran.err
    assert "8 packs per optimiser step" in ran.out
    shown = ran.out.partition("first row of the first pack, learned tokens")[2]
    assert "⟦Ho ho ho" in shown


LONG = "word " * 200


@pytest.mark.parametrize(
    ("task", "row", "settings", "reason"),
    [
        ("chat", {"prompt": LONG, "completion": "Ho"}, ["--data.max_tokens", 30],
         "all 2 chats are longer than data.max_tokens 30: raise it"),
        ("chat", {"prompt": "Hi", "chosen": "Ho", "rejected": LONG},
         ["--data.max_tokens", 60, "--train.preference", "dpo"],
         "all 2 pairs have a reply that, with its prompt, is longer than data.max_tokens 60: raise it"),
        ("cirag-distill", {"prompt": "Hi", "completion": LONG},
         ["--data.max_tokens", 64, "--data.max_prompt_tokens", 60],
         "all 2 trajectories are longer than data.max_tokens 64: raise it"),
        ("ras", plain_records({"question": "Who?", "answer": LONG, "steps": []}, "x")[-1].to_json(),
         ["--data.max_label_tokens", 16, "--data.long_labels", "skip"],
         "all 2 records have labels of more than data.max_label_tokens 16, which data.long_labels skip leaves out: "),
    ],
)  # fmt: skip
def test_rows_that_are_all_left_out_name_the_setting(task, row, settings, reason, words):
    model = words("ras" if task == "ras" else "chat", [row, row], "jsonl")[1:]
    ran = run("train", task, *model, *settings, "--dry-run")
    assert "there are no rows to learn from in the training data: " in ran.error
    assert reason in ran.error


@pytest.mark.parametrize("name", ["dpo", "sigmoid"])
def test_a_dry_run_shows_both_replies_of_a_pair(name, words):
    task, rows, kind = SHAPES["preferences"]
    ran = run("train", *words(task, rows, kind), "--dry-run", "--train.preference", name)
    assert "not read" not in ran.out + ran.err
    chosen, rejected = ran.out.partition("first pair, chosen reply, learned tokens")[2].split("first pair, rejected")
    assert ("⟦Ho" in chosen, "⟦Hm" in chosen) == (True, False)
    assert ("⟦Ho" in rejected, "⟦Hm" in rejected) == (False, True)


def test_preference_data_without_pairs_are_named_by_their_place(words):
    ran = run("train", *words("chat", [{"messages": CHAT}], "jsonl"), "--train.preference", "dpo")
    assert "rows.jsonl:1: train.preference learns from pairs, but the row has no rejected reply" in ran.error


def direct(number, **more):
    return {"question": f"Is {number} even?", "answer": "no", "steps": [], **more}


@pytest.mark.parametrize(
    ("task", "train", "validation", "rows"),
    [
        ("text-to-triples", [{**PAIR, "text": f"Text {n}."} for n in range(4)], [{**PAIR, "text": "text  2."}], 3),
        ("text-to-triples", [{**PAIR, "id": "0"}], [{"text": "Another.", "triples": [], "id": "0"}], 1),
        ("ras", [direct(n, id=n) for n in range(4)], [direct(2, id=0), direct(9, id=1)], 6),
        ("chat", [{"messages": CHAT}, {"conversations": [{"from": "human", "value": "?"}, TALK[1]]}],
         [{"conversations": TALK}], 1),
    ],
)  # fmt: skip
def test_validation_data_are_left_out_of_training(task, train, validation, rows, words, tmp_path):
    write_lines(tmp_path / "validation.jsonl", validation)
    ran = run("train", *words(task, train, "jsonl"), "--data.validation", tmp_path / "validation.jsonl")
    assert ran.code == 0, ran.err
    counted = json.loads((tmp_path / "run" / "final" / "training.json").read_text())["tokenised"]["train"]
    assert counted["rows"] == rows
    assert counted.get("left_out_as_validation_data", 0) > 0 or counted["rows"] == len(train)


def test_validation_data_that_are_the_training_data_are_refused(words, tmp_path):
    found = words("text-to-triples", [PAIR], "jsonl")
    ran = run("train", *found, "--data.validation", tmp_path / "rows.jsonl")
    assert "holds no text-to-triples pairs but those of the validation data" in ran.error


@pytest.mark.parametrize(
    ("task", "row", "column"),
    [
        ("ras", {**PLAIN, "steps": [{**STEP, "hint": "x"}, LAST]}, "steps[].hint (1 rows)"),
        ("ras", {**PLAIN, "level": "hard"}, "level (1 rows)"),
        ("text-to-triples", {**PAIR, "entities": ["Ida"]}, "entities (1 rows)"),
    ],
)
def test_other_tasks_name_unread_columns_too(task, row, column, words):
    ran = run("train", *words(task, [row], "jsonl"), "--dry-run")
    assert f"rows.jsonl has columns that are not read: {column}" in ran.err


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("chat", {"text": "Hi"}, r"rows\.jsonl:1: the row is no chat: it needs messages.*, but it has text"),
        ("chat", {"messages": "Hi"}, r"rows\.jsonl:1: messages must be a list, found"),
        (
            "chat",
            {"messages": [{"role": "tool", "content": "x"}]},
            r"rows\.jsonl:1: the chat has a turn of the role 'to",
        ),
        ("chat", {"messages": CHAT[:2]}, "no turn is learned"),
        ("chat", {"messages": [*CHAT[:2], {"role": "assistant", "content": None}]}, "a reply to learn has no"),
        ("chat", {"messages": [{"role": "user", "content": 3}]}, r"messages\[0\]\.content must be text"),
        ("chat", PAIR, r"the row is no chat.* but it has text, triples"),
        ("ras", {"messages": CHAT}, "neither a record nor a question with answers and steps; it has messages"),
        ("ras", {"question": "Who?", "answers": ["Ida"]}, "the question has no steps: add steps"),
        ("ras", {**PLAIN, "answers": []}, "no gold answer"),
        ("ras", {**PLAIN, "steps": [{"question": "Who?"}]}, "has no triples and no passage"),
        ("ras", {**PLAIN, "steps": [STEP, {**LAST, "question": "Is it Kelm?"}]}, "gives away the gold answer"),
        ("text-to-triples", {"text": "Ida"}, r"rows\.jsonl:1: .*lacks triples"),
        ("text-to-triples", {**PAIR, "triples": [["Ida", "Kelm"]]}, r"a triple must be \[subject, predicate, object\]"),
        ("text-to-triples", {**PAIR, "triples": "Ida born in Kelm"}, r"write triples in a text as \(S> subject"),
    ],
)
def test_rows_that_cannot_be_read_are_one_line(task, row, message, words):
    ran = run("train", *words(task, [row], "jsonl"))
    assert ran.code == 2
    pytest.fail(ran.err) if ran.err.count("\n") > 2 else None
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(ran.error)


def test_a_data_set_that_is_not_there(words):
    task, *found = words("chat", [{"messages": CHAT}], "jsonl")
    found[found.index("--data.train") + 1] = "nobody/nothing#train"
    assert "nobody/nothing" in run("train", task, *found).error


def test_which_turns_are_learned():
    def flags(row):
        return Trajectory.from_json(row, "x").learned

    more = [*CHAT, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "So.", "weight": 0}]
    assert flags({"messages": more}) == (False, False, True, False, False)
    assert flags({"prompt": more[:4], "completion": "So."}) == (False, False, False, False, True)
    one = Trajectory.from_json({"system": "Be.", "instruction": "Add.", "input": "1", "output": "2"}, "x")
    assert [turn["content"] for turn in one.messages] == ["Be.", "Add.\n\n1", "2"]
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "o"}]
    chat = Trajectory.from_json({"messages": [CHAT[1], {"role": "model", "content": parts}]}, "x")
    assert chat.messages[-1] == CHAT[-1]
    # The same question, whoever replied: it is in one split alone.
    assert chat.question_id == Trajectory.from_json({"conversations": TALK}, "x").question_id
    assert chat.id != Trajectory.from_json({"conversations": TALK}, "x").id


def test_a_question_with_steps_is_the_records_of_its_annotation():
    found = plain_records({**PLAIN, "steps": [STEP, {**LAST, "passage": "Ida (author)"}]}, "x")
    assert [record.label for record in found] == [
        f"[SUBQ] {PLAIN['question']}",
        "[SUBQ] Where was Ida born?",
        "[SUFFICIENT]",
        "Kelm",
    ]
    assert [step.triples for step in found[-1].steps] == [
        (Triple("Glass", "written by", "Ida"),),
        (Triple("Ida", "born in", "Kelm"),),
    ]
    direct = plain_records({"question": "Two and two?", "answer": "four", "steps": []}, "x")
    assert [record.label for record in direct] == ["[NO_RETRIEVAL]", "four"]


def test_turns_of_tables_are_those_of_lists():
    def turns(row):
        return Trajectory.from_json(row, "x").messages

    assert turns({"messages": json.dumps(CHAT)}) == turns({"messages": str(CHAT)}) == tuple(CHAT)
    pair = Trajectory.from_json({"prompt": "Hi", "chosen": str(CHAT[1:]), "rejected": json.dumps(CHAT[1:2])[:-1]}, "x")
    assert (pair.messages, pair.rejected) == (tuple(CHAT[1:]), json.dumps(CHAT[1:2])[:-1])
    assert turns({"prompt": "A list?", "completion": "[{}]"})[-1]["content"] == "[{}]"


@pytest.mark.parametrize("name", ["label", "kto_tag"])
def test_bad_examples_of_tables_are_refused(name):
    with pytest.raises(ValueError, match=f"x: {name} is false, so the reply is a bad example"):
        Trajectory.from_json({"prompt": "Hi", "completion": "Ho", name: "False"}, "x")


def test_pairs_need_no_id():
    one = ExtractionPair.from_json(PAIR, "x")
    assert one.triples == ExtractionPair.from_json({**PAIR, "triples": "(S> Ida| P> born in| O> Kelm)"}, "x").triples
    assert one.id


def test_options_of_a_chat_template_are_saved_with_it(make_task, tokenizer_folder, tiny_llama, tmp_path):
    from transformers import AutoTokenizer

    template = "{% if loud %}{{ loud }} {% endif %}" + AutoTokenizer.from_pretrained(tokenizer_folder).chat_template
    (tmp_path / "template.jinja").write_text(template)
    settings = {"data.chat_template": str(tmp_path / "template.jinja"), "data.template_options": "{loud: HEY}"}
    task = make_task("cirag_distill", settings)
    task.open_model()
    assert task.encoder.sample()
    assert task.processor.apply_chat_template(CHAT, tokenize=False).startswith("HEY ")
    task.processor.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.apply_chat_template(CHAT, tokenize=False).startswith("HEY ")
    with pytest.raises(ValueError, match=r"has no lowd \(did you mean loud\?\)"):
        make_task("cirag_distill", {**settings, "data.template_options": "{lowd: 1}"}).open_model()
