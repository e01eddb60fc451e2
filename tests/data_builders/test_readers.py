from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli import write_lines
from tests.data_builders.rows import shared
from tripletune.core import rows as _rows
from tripletune.core.data import arrays
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import Dropped, DropReason, Question
from tripletune.core.data.triples import Triple
from tripletune.data_builders.published import parse_graph, read_explagraphs
from tripletune.data_builders.readers import get_reader
from tripletune.data_builders.readers.claims import NOT_BINARY
from tripletune.data_builders.readers.hotpotqa import OUT_OF_RANGE

HOTPOT = {
    "_id": "h1",
    "question": "Where was the author of Dune born?",
    "answer": "Tacoma",
    "type": "bridge",
    "supporting_facts": [["Frank Herbert", 1], ["Dune", 0], ["Frank Herbert", 0]],
    "context": [
        ["Dune", ["Dune is a novel.", " It is by Frank Herbert."]],
        ["Other", ["Nothing."]],
        ["Frank Herbert", ["He wrote.", " He was born in Tacoma."]],
    ],
}
TWO_WIKI = HOTPOT | {"evidences": [["Dune", "author", "Frank Herbert"], ["Frank Herbert", "place of birth", "Tacoma"]]}
MUSIQUE = {
    "id": "2hop__1_2",
    "question": "Where was the author of Dune born?",
    "answer": "Tacoma",
    "answer_aliases": ["Tacoma, Washington", "Tacoma"],
    "answerable": True,
    "paragraphs": [
        {"idx": 0, "title": "Frank Herbert", "paragraph_text": "Born in Tacoma.", "is_supporting": True},
        {"idx": 1, "title": "Dune", "paragraph_text": "By Frank Herbert.", "is_supporting": True},
    ],
    "question_decomposition": [
        {"question": "Dune >> author", "answer": "Frank Herbert", "paragraph_support_idx": 1},
        {"question": "where was #1 born", "answer": "Tacoma", "paragraph_support_idx": 0},
    ],
}


def read(tmp_path, reader, *rows, issues=None):
    return list(get_reader(reader)(write_lines(tmp_path / "rows.jsonl", rows), issues))


def only(tmp_path, reader, row, issues=None):
    (question,) = read(tmp_path, reader, row, issues=issues)
    assert isinstance(question, Question)
    return question


def test_hotpotqa_orders_supporting_passages_by_their_first_fact(tmp_path):
    question = only(tmp_path, "hotpotqa", HOTPOT)
    assert question.supporting == (2, 0)
    assert question.passages[2].text == "He wrote. He was born in Tacoma."
    assert (question.id, question.answers, question.type, question.source) == ("h1", ("Tacoma",), "bridge", "hotpotqa")


def test_hotpotqa_hub_layout_gives_the_same_question(tmp_path):
    titles, indices = zip(*HOTPOT["supporting_facts"])
    hub = {key: value for key, value in HOTPOT.items() if key != "_id"} | {
        "id": "h1",
        "supporting_facts": {"title": list(titles), "sent_id": list(indices)},
        "context": {"title": [t for t, _ in HOTPOT["context"]], "sentences": [s for _, s in HOTPOT["context"]]},
    }
    official = only(tmp_path, "hotpotqa", HOTPOT)
    assert only(tmp_path, "hotpotqa", hub) == official


def test_json_array_parquet_and_folder_give_the_same_rows(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    expected = [only(tmp_path, "musique", MUSIQUE)]
    array, folder = tmp_path / "a.json", tmp_path / "folder"
    array.write_text(json.dumps([MUSIQUE], indent=1))
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist([MUSIQUE]), folder / "train.parquet")
    for place in (array, folder / "train.parquet", folder):
        assert list(get_reader("musique")(str(place))) == expected


def test_supporting_fact_out_of_range_is_counted_and_keeps_its_passage(tmp_path):
    issues: Counter[str] = Counter()
    row = TWO_WIKI | {"supporting_facts": [["Dune", 9], ["Frank Herbert", 0]]}
    assert only(tmp_path, "two_wiki", row, issues).supporting == (0, 2)
    assert issues == {OUT_OF_RANGE: 1}


def test_supporting_title_outside_the_context_drops_the_row(tmp_path):
    found = read(tmp_path, "hotpotqa", HOTPOT | {"supporting_facts": [["Elsewhere", 0]]})
    assert found == [Dropped("h1", DropReason.SUPPORT_NOT_IN_CONTEXT)]


def test_two_wiki_keeps_the_order_of_the_evidence(tmp_path):
    question = only(tmp_path, "two_wiki", TWO_WIKI)
    assert question.evidences == (
        Triple("Dune", "author", "Frank Herbert"),
        Triple("Frank Herbert", "place of birth", "Tacoma"),
    )


def test_musique_hops_aliases_and_type(tmp_path):
    question = only(tmp_path, "musique", MUSIQUE)
    assert [(hop.question, hop.passage_index) for hop in question.hops] == [
        ("Dune >> author", 1),
        ("where was #1 born", 0),
    ]
    assert question.supporting == (1, 0)
    assert question.answers == ("Tacoma", "Tacoma, Washington")
    assert question.type == "2hop"


def test_musique_unanswerable_and_foreign_paragraph_are_dropped(tmp_path):
    hop = MUSIQUE["question_decomposition"][0] | {"paragraph_support_idx": None}
    flags = [MUSIQUE | {"answerable": flag} for flag in (False, "False", 0, "no")]
    *found, last = read(tmp_path, "musique", *flags, MUSIQUE | {"question_decomposition": [hop]})
    assert [row.reason for row in found] == [DropReason.UNANSWERABLE] * 4
    assert last.reason == DropReason.SUPPORT_NOT_IN_CONTEXT
    texts = [hop | {"paragraph_support_idx": number} for number in ("1", 0.0)]
    row = MUSIQUE | {"id": 7, "answerable": "True", "question_decomposition": texts}
    assert only(tmp_path, "musique", row).supporting == (1, 0)


CONTEXT = [{"sentences": sentences, "title": title} for title, sentences in HOTPOT["context"]]
FACTS = [{"title": title, "sent_idx": number} for title, number in HOTPOT["supporting_facts"]]
COLUMNS = dict(zip(("fact", "relation", "entity"), map(list, zip(*TWO_WIKI["evidences"]))))


@pytest.mark.parametrize(
    "change",
    [
        {"context": CONTEXT, "supporting_facts": FACTS},
        {"context": str(HOTPOT["context"]), "supporting_facts": str(HOTPOT["supporting_facts"])},
        {"context": json.dumps(CONTEXT), "evidences": COLUMNS},
        {"evidences": [dict(zip(("subject", "predicate", "object"), one)) for one in TWO_WIKI["evidences"]]},
        {"evidences": json.dumps(COLUMNS), "_id": None, "id": "h1"},
    ],
)
def test_copies_in_other_layouts_give_the_same_question(tmp_path, change):
    assert read(tmp_path, "two_wiki", TWO_WIKI | change) == read(tmp_path, "two_wiki", TWO_WIKI)


@pytest.mark.parametrize("number", [7, 0])
def test_an_id_may_be_a_number(tmp_path, number):
    assert only(tmp_path, "hotpotqa", HOTPOT | {"_id": number}).id == str(number)


@pytest.mark.parametrize(
    "opening", ["[", '{"data": [', '\ufeff{"version": 1.1,\r\n "ok": true, "name": "ü", "data": [']
)
def test_arrays_in_objects_and_packed_files_are_read(tmp_path, opening):
    text = opening + json.dumps(HOTPOT) + "\n, " + json.dumps(HOTPOT) + ("]" if opening == "[" else "]}\n")
    for name, data in (("a.json", text.encode()), ("a.json.gz", gzip.compress(text.encode()))):
        (tmp_path / name).write_bytes(data)
        found = [where for where, row in _rows.source_rows(str(tmp_path / name)) if row == HOTPOT]
        line = 1 + text.count("\r\n")
        assert found == [f"{tmp_path / name}:{line}", f"{tmp_path / name}:{line + 1}"]


@pytest.mark.parametrize(
    ("reader", "change", "message"),
    [
        ("hotpotqa", {"answer": None}, "no gold answer"),
        ("hotpotqa", {"context": [["Dune", "one string"]]}, r"context\[0\].sentences must be a list"),
        ("two_wiki", {"evidences": [["Dune", "author"]]}, "a triple must be"),
        ("two_wiki", {"evidences": {"fact": ["Dune"], "relation": [], "entity": []}}, "triples must be a list"),
        ("hotpotqa", {"context": {"title": ["Dune"], "content": [["It."]]}}, "context must be a list"),
        ("hotpotqa", {"_id": True}, "_id or id must be text, found true"),
        ("hotpotqa", {"answer": {"text": "x"}}, "no gold answer"),
        ("musique", {"answerable": "maybe"}, 'answerable must be true or false, found "maybe"'),
        ("musique", {"paragraphs": [{"title": "Dune"}]}, r"the row has no .paragraph_text. or .text."),
    ],
)
def test_bad_row_is_named_by_file_and_line(tmp_path, reader, change, message):
    good = {"hotpotqa": HOTPOT, "two_wiki": TWO_WIKI, "musique": MUSIQUE}[reader]
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path, reader, good, good | change)
    assert str(caught.value).startswith(f"{tmp_path / 'rows.jsonl'}:2: ")


@settings(deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=30), max_size=3), max_size=6),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
)
def test_json_array_is_streamed_whatever_the_window(tmp_path_factory, rows, indent, ascii_only):
    path = tmp_path_factory.mktemp("array") / "a.json"
    path.write_text(json.dumps(rows, indent=indent, ensure_ascii=ascii_only), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "_CHUNK", 7)
        assert [row for _, row in _rows.source_rows(str(path))] == rows


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('[{"a": 1},\n {"a": ]', 2, "not valid JSON"),
        ('[{"a": 1},\n', 2, "ends inside its JSON array"),
        ('[{"a": 1}]\nmore', 2, "text after the array"),
        ('{"data": [{"a": 1}]}\n{"data": []}', 2, "text after the array"),
        ('[{"a": 1},\n' + "[" * 100_000, 2, "not valid JSON .*recursion"),
        ('[{"a": 1},\n{"a": ' + "9" * 6_000 + "}]", 2, "not valid JSON .*digits"),
    ],
)
def test_broken_json_array_is_named_by_line(tmp_path, text, line, message):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        list(_rows.source_rows(str(path)))
    assert str(caught.value).startswith(f"{path}:{line}: ")


def test_what_is_no_file_of_rows_is_said(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 damaged PAR1")
    script = tmp_path / "scripts"
    script.mkdir()
    (script / "scripts.py").write_text("raise SystemExit")
    for name, error, message in (
        ("gone", FileNotFoundError, "no such file: .*gone"),
        ("pipe", FileNotFoundError, "is a pipe or device, which can't be read twice"),
        ("a.parquet", ValueError, "a.parquet: not a readable Parquet file"),
        ("scripts", ValueError, "scripts: not a data set of files"),
    ):
        with pytest.raises(error, match=message):
            list(_rows.source_rows(str(tmp_path / name)))


def test_graph_names_may_hold_brackets_and_bad_triples_cost_no_neighbour():
    triples, malformed = parse_graph("(law (new); causes; order)(only; two)(a; b; )(order; part of; state (or city))")
    assert triples == (Triple("law (new)", "causes", "order"), Triple("order", "part of", "state (or city)"))
    assert malformed == 2


def test_explagraphs_row_becomes_an_answering_record(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('arg1\targ2\tlabel\tgraph\n"The ""big"" claim."\tA reason.\tcounter\t(reason; part of; claim)\n')
    (record,) = read_explagraphs(path, Counter())
    assert 'The "big" claim.' in record.question
    assert "A reason." in record.question
    assert (record.task, record.action.value, record.label) == ("answering", "[SUFFICIENT]", "counter")
    assert record.steps[0].triples == (Triple("reason", "part of", "claim"),)


def test_answers_in_every_layout_are_lists(tmp_path):
    rows = [
        {"id": 17, "question": "Q1?", "possible_answers": ["Max Born", "Max Born", " Born "]},
        {"id": 18, "question": "Q2?", "possible_answers": '["Max Born", "Born"]'},
        {"question_id": "t1", "question": "Q3?", "answer": {"value": "Oslo", "aliases": ["Oslo", "Kristiania"]}},
        {"question": "Q4?", "answers": ["1971"]},
        {"question": "Q5?", "answer": "Oslo"},
        {"question": "Q6?", "answer": "[sic]"},
        {"id": 0, "question": "Q7?", "golden_answers": [1999, 0]},
        {"question": "Q8?", "answer": "[1999]"},
        {"question": "Q9?", "answer": 0},
        {"question": "Q10?", "possible_answers": "['Ann' 'Bo']", "answer": None},
        {"question": "Q11?", "golden_answers": [], "answer": False, "answer_aliases": "['nope']"},
    ]
    questions = read(tmp_path, "qa", *rows)
    assert [question.answers for question in questions] == [
        ("Max Born", "Born"),
        ("Max Born", "Born"),
        ("Oslo", "Kristiania"),
        ("1971",),
        ("Oslo",),
        ("[sic]",),
        ("1999", "0"),
        ("[1999]",),
        ("0",),
        ("Ann", "Bo"),
        ("no", "false", "nope"),
    ]
    assert questions[6].id == "0"
    assert [question.id for question in questions[:3]] == ["17", "18", "t1"]
    assert len(questions[3].id) == 16
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: the row has no gold answer"):
        read(tmp_path, "qa", {"question": "Q?", "answers": [""]})
    for answers in ("['Ann', 'b", "[Ann, Bo]", [["Ann"]], {"names": ["Ann"]}):
        with pytest.raises(ValueError, match=r"rows\.jsonl:1: "):
            read(tmp_path, "qa", {"question": "Q?", "answers": answers})


@pytest.mark.parametrize(("reader", "name"), [("qa", "ctxs"), ("asqa", "docs")])
def test_passages_that_come_with_a_question(tmp_path, reader, name):
    texts = [{"title": "Oslo", "text": "A city.", "score": 1.5}, {"title": "No text", "text": " "}, {"text": "x"}]
    row = {"id": "1", "question": "Q?", "answers": ["A"], "annotations": [{"long_answer": "A."}], name: texts}
    (question,) = read(tmp_path, reader, row)
    assert question.passages == (Passage("Oslo", "A city."), Passage("", "x"))
    assert question.supporting == ()


@pytest.mark.parametrize("name", ["context", "contexts"])
def test_passages_that_are_texts_alone(tmp_path, name):
    (question,) = read(tmp_path, "qa", {"question": "Q?", "answers": ["A"], name: ["A city.", " ", {"text": "x"}]})
    assert question.passages == (Passage("", "A city."), Passage("", "x"))


@pytest.mark.parametrize(
    ("reader", "missing"),
    [
        ("hotpotqa", "context"),
        ("two_wiki", "context"),
        ("musique", "paragraphs"),
        ("musique", "question_decomposition"),
    ],
)
def test_a_file_that_kept_only_the_questions_of_a_benchmark_names_the_reader_for_it(tmp_path, reader, missing):
    row = {"id": "1", "question": "Q?", "answer": "A", "context": [["T", ["S."]]], "paragraphs": []}
    row["question_decomposition"] = []
    del row[missing]
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: the row lacks {missing}; it has .*`qa` reads it"):
        read(tmp_path, reader, row)
    (question,) = read(tmp_path, "qa", {"id": "1", "question": "Q?", "answer": "A"})
    assert question.answers == ("A",)


def test_choices_become_letters(tmp_path):
    lettered = {"text": ["ice", "fire"], "label": ["A", "B"]}
    numbered = {"text": ["ice", "fire"], "label": ["1", "2"]}
    first, second = read(
        tmp_path,
        "multiple_choice",
        {"id": "x", "question": "Hot?", "choices": lettered, "answerKey": "B"},
        {"id": "y", "question": "Hot?", "choices": numbered, "answerKey": "2"},
    )
    assert first.question == second.question == "Hot? A: ice B: fire"
    assert first.search == "Hot?", "choices are not searched for"
    assert first.answers == second.answers == ("B",)
    with pytest.raises(ValueError, match="answerKey 'C' is not one of the labels A, B"):
        read(tmp_path, "multiple_choice", {"id": "x", "question": "Hot?", "choices": lettered, "answerKey": "C"})


def test_news_questions_bring_the_facts_of_their_evidence(tmp_path):
    evidence = [{"title": "A", "fact": "a1", "url": "u"}, {"title": "B", "fact": "b"}, {"title": "A", "fact": "a2"}]
    row = {"query": "Who?", "answer": "Ada", "question_type": "inference_query", "evidence_list": evidence}
    (question,) = read(tmp_path, "multihop_rag", row)
    assert (question.question, question.answers, question.type) == ("Who?", ("Ada",), "inference_query")
    assert [(passage.title, passage.text) for passage in question.passages] == [("A", "a1\na2"), ("B", "b")]
    assert question.supporting == (0, 1)
    (null,) = read(
        tmp_path, "multihop_rag", {"query": "Why?", "answer": "Insufficient information.", "evidence_list": []}
    )
    assert (null.passages, null.answers) == ((), ("Insufficient information.",))
    assert null.id != question.id


def test_only_true_and_false_claims(tmp_path):
    labels = ["true", "False", "mixture", "unproven", 0, 2, 1, True, "2.0"]
    rows = [{"claim_id": n, "claim": "c", "label": label} for n, label in enumerate(labels)]
    issues: Counter[str] = Counter()
    questions = read(tmp_path, "claims", *rows, issues=issues)
    assert [question.answers[0] for question in questions] == ["true", "false", "false", "true", "true", "true"]
    assert issues == {NOT_BINARY: 3}


@pytest.mark.parametrize(
    ("reader", "file", "count"),
    [
        ("hotpotqa", "hotpotqa_dev.jsonl", 240),
        ("two_wiki", "2wikimultihopqa_dev.jsonl", 64),
        ("musique", "musique_ans_dev.jsonl", 80),
        ("qa", "popqa.jsonl", 300),
        ("qa", "triviaqa.jsonl", 200),
        ("multiple_choice", "arc_challenge.jsonl", 299),
        ("multiple_choice", "arc_easy.jsonl", 400),
        ("arc_easy", "arc_easy.jsonl", 400),
        ("claims", "pubhealth.jsonl", 135),
        ("asqa", "asqa_dev.jsonl", 150),
        ("multihop_rag", "multihoprag_queries.jsonl", 150),
    ],
)
def test_real_files_are_read_completely(reader, file, count):
    questions = list(get_reader(reader)(str(shared(file))))
    assert len(questions) == count
    assert all(isinstance(question, Question) for question in questions)


def test_half_characters_of_a_json_array_become_unknown_ones(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"a": "\\ud83d x"}, {"a": "\\ud83d\\ude00"}]')
    assert [row for _, row in _rows.source_rows(str(path))] == [{"a": "\ufffd x"}, {"a": "😀"}]


MIXED = ["007", "1.50", ["Bond", "James Bond"], "1e3", "1999-12-31", "true", "null"]
DATES = ["1999-12-31", "2001-01-02"]


@pytest.mark.parametrize("answers", [MIXED, DATES, ["007", "1e3"]])
@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet", "csv"])
def test_a_folder_is_read_like_its_file(tmp_path, monkeypatch, answers, ending):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    texts = [answer for answer in answers if isinstance(answer, str) or ending != "csv"]
    rows = [
        {"id": str(number), "question": f"Question {number}?", "answers": text} for number, text in enumerate(texts)
    ]
    (tmp_path / "set" / "data").mkdir(parents=True)
    file = tmp_path / "set" / "data" / f"train-00000-of-00001.{ending}"
    if ending == "parquet":
        from datasets import Dataset

        Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(file)
    elif ending == "csv":
        cells = [f"{row['id']},{row['question']},{row['answers']}" for row in rows]
        file.write_text("\n".join(["id,question,answers", *cells]))
    elif ending == "json":
        file.write_text(json.dumps(rows))
    else:
        write_lines(file, rows)

    def answers_of(place):
        return [question.answers for question in get_reader("qa")(str(place))]

    written = [(text,) if isinstance(text, str) else tuple(text) for text in texts]
    assert answers_of(file) == written
    assert answers_of(tmp_path / "set") == written


def test_messages_of_mixed_content_are_read_from_a_folder(tmp_path):
    from datasets import Dataset

    from tripletune.core.data.pairs import Trajectory
    from tripletune.train.sources import Examples, PlaceAndShare

    parts = [{"type": "text", "text": "1e3"}]
    chats = [
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "007"}]},
        {"messages": [{"role": "user", "content": "1.50"}, {"role": "assistant", "content": "true"}]},
    ]
    (tmp_path / "data").mkdir()
    Dataset.from_list(chats, on_mixed_types="use_json").to_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
    source = Examples(Trajectory.from_json, (PlaceAndShare(str(tmp_path), 1.0),), "train")
    texts = [[turn["content"] for turn in chat.messages] for chat in source]
    assert texts == [["1e3", "007"], ["1.50", "true"]]


def test_files_of_a_hub_data_set_are_read_here(tmp_path, monkeypatch):
    import datasets

    folder = tmp_path / "blobs"
    folder.mkdir()
    rows = [{"question": f"Question {number}?", "answer": text} for number, text in enumerate(["007", ["x"], "1e3"])]
    write_lines(folder / "4f5e", rows)
    address = "hf://datasets/owner/name@4f5e/data/train-00000-of-00001.jsonl"

    builder = SimpleNamespace(name="json", dataset_name="name", config=SimpleNamespace(data_files={"train": [address]}))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda name, configuration: builder)
    monkeypatch.setattr(datasets.DownloadManager, "download", lambda self, url: str(folder / "4f5e"))
    found = list(_rows.source_rows("owner/name"))
    assert [row for _, row in found] == rows
    assert found[1][0] == f"{address}:2"


def test_a_folder_of_half_the_shards_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data" / "train-00000-of-00002.jsonl", [{"question": "Why?"}])
    with pytest.raises(ValueError, match=r"1 of 2 shards .* are missing \(number 1\)"):
        list(_rows.source_rows(str(tmp_path)))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("train-00000.jsonl", "train-00001.csv"), r"train-00001\.csv would not be read beside train-00000\.jsonl"),
        (("train.jsonl", "train (1).jsonl"), r"train \(1\)\.jsonl and train\.jsonl are the same"),
        (("train-00000.jsonl", "train-00001.jsonl.part"), r"train-00001\.jsonl\.part is not wholly written"),
    ],
)
def test_a_folder_with_rows_that_are_not_read_or_read_twice_is_refused(names, message, tmp_path):
    for name in names:
        write_lines(tmp_path / name, [{"question": "Why?"}])
    with pytest.raises(ValueError, match=message):
        list(_rows.source_rows(str(tmp_path)))
