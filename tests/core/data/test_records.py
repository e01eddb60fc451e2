import gzip
import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli import write_lines
from tripletune.core.data.answers import mentions, normalize_answer, normalize_name
from tripletune.core.data.jsonl import read_jsonl, record_files
from tripletune.core.data.passages import Passage, passage_id, read_corpus
from tripletune.core.data.records import Action, Record, Step, read_records
from tripletune.core.data.triples import Triple
from tripletune.data_builders.questions.names import contains_name, searchable


@pytest.mark.parametrize(
    ("text", "phrase", "expected"),
    [
        ("The house of Mary O\u2019Neil is old.", "Mary O'Neil", True),
        ("The house of Mary O'Neil is old.", "Mary O\u2018Neil", True),
        (unicodedata.normalize("NFD", "Zoë Grün sang."), "Zoë Grün", True),
        ("The Gri\ufb03n sleeps.", "Griffin", True),
        ("Jean\u2011Luc left.", "Jean-Luc", True),
        ("It weighs 10⁶ tons.", "106", False),
        ("A patient with Hepatitis A recovers.", "Hepatitis A", True),
        ("A vaccine against hepatitis a, and others.", "Hepatitis A", True),
        ("A patient with Hepatitis B recovers.", "Hepatitis A", False),
        ("Vitamin C is in lemons.", "the Vitamin A", False),
        ("Vitamin C is in lemons.", "Vitamin", True),
        ("Plan A failed, so Plan B came.", "Plan B", True),
        ("Windows 8 came after Windows 7.", "Windows 8", True),
        ("She has type 2 diabetes.", "type 1 diabetes", False),
        ("The emperors lived in Xi An for long.", "Xi An", True),
        ("The article xi is a letter.", "Xi An", False),
        ("The Man with a Plan is a film.", "Man With a Plan", True),
    ],
)
def test_one_name_in_two_spellings_is_one(text, phrase, expected):
    assert mentions(text, phrase) is expected
    assert contains_name(searchable(text), phrase) is expected


def test_the_last_word_of_a_name_is_no_article():
    names = ("Hepatitis A", "Hepatitis", "Xi An", "Xi", "Penhale, A.", "Penhale")
    assert len({*map(normalize_name, names)}) == len(names)
    assert normalize_name("the hepatitis a.") == normalize_name("Hepatitis A") == normalize_name("hepatitis a")
    texts = ("A", "The The", "A Man", "U.S.A.", "!")
    assert [normalize_name(text) for text in texts] == ["a", "the the", "man", "usa", "!"]


def test_the_key_of_a_passage_tells_numbers_apart_and_no_other_spaces():
    rooms = [
        Passage("Rooms", f"Seats by room:{text}").key for text in (" 1 12 4", " 11 2 4", "1  12\n4", " 1 -2", " 1-2")
    ]
    assert len(set(rooms)) == 4
    assert rooms[0] == rooms[2]
    assert Passage("A b", "In Kelm . It is").key == Passage("Ab", "In Kelm.\tIt is").key


def test_json_round_trip(records):
    for record in records:
        assert Record.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_labels():
    step = Step("q", (Triple("a", "b", "c"),))
    assert Record("1", "1", "planning", "Q", Action.SUBQ, (step,), "next?").label == "[SUBQ] next?"
    assert Record("1", "1", "planning", "Q", Action.NO_RETRIEVAL).label == "[NO_RETRIEVAL]"
    assert Record("1", "1", "answering", "Q", Action.SUFFICIENT, answers=("Paris", "Lutetia")).label == "Paris"


def test_the_input_holds_no_label():
    record = Record("1", "1", "answering", "Q", Action.NO_RETRIEVAL, answers=("secret",))
    assert "secret" not in repr(record.input)
    assert "NO_RETRIEVAL" not in repr(record.input)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action": "[SUBQ]", "subquery": ""}, "needs a sub-query"),
        ({"action": "[SUFFICIENT]", "subquery": "left over"}, "any other label must have an empty sub-query"),
        ({"task": "answering", "answers": []}, "needs a gold answer"),
        ({"task": "answering", "answers": "Paris"}, "answers must be a list"),
        ({"task": "guessing"}, "not one of planning, answering"),
        ({"action": "[STOP]"}, "not one of \\[SUBQ\\], "),
        ({"question": "  "}, "question is empty"),
        ({"steps": [{"triples": []}]}, "step 1: the row lacks query"),
        ({"steps": [{"query": "q", "triples": [["a", "b"]]}]}, "a triple must be"),
        ({"steps": 5}, "steps must be a list, found 5"),
        ({"question": None}, "question must be text, found null"),
    ],
)
def test_a_bad_record_is_one_error_with_its_place(change, message):
    row = Record("1", "1", "planning", "Q", Action.NO_RETRIEVAL).to_json() | change
    with pytest.raises(ValueError, match=message) as error:
        Record.from_json(row, "file:3")
    assert str(error.value).startswith("file:3: ")
    assert str(error.value).count("file:3") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n\n{"a": \n', r"rows.jsonl:3: not valid JSON"),
        (b'{"a": 1}\n[1]\n', r"rows.jsonl:2: expected a JSON object, found list"),
        (b"\x1f\x8b\x08\x00\xff\n", r"rows.jsonl: the gzip file is damaged or cut off"),
        (b'{"a": 1}\n{"a": ' + b"[" * 200_000 + b"\n", r"rows.jsonl:2: not valid JSON .*recursion"),
        (b'{"a": 1}\n{"a": ' + b"9" * 6_000 + b"}\n", r"rows.jsonl:2: not valid JSON .*digits"),
        (b'{"a": NaN}\n', r"rows.jsonl:1: not valid JSON \(NaN is not a number"),
        (gzip.compress(b'{"a": 1}\n' * 9, mtime=0)[:-9], r"rows.jsonl: the gzip file is damaged or cut off"),
    ],
)
def test_malformed_lines_are_told_with_their_number(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_jsonl(path))


def test_lines_are_read_whatever_the_line_end_and_byte_order_mark(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes('\ufeff{"a": "é\\u2028"}\r\n\r\n{"a": "b\u2028c"}'.encode())
    assert list(read_jsonl(path)) == [(f"{path}:1", {"a": "é\u2028"}), (f"{path}:3", {"a": "b\u2028c"})]


def test_rows_of_a_corpus_keep_the_ids_that_they_have(tmp_path):
    rows = [{"id": 0, "title": 1984}, {"_id": "b", "title": None}, {"id": None, "title": "x"}, {"id": ""}]
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row | {"text": "t"}) + "\n" for row in rows).encode()))
    found = list(read_corpus(path))
    assert [one.id for one in found] == ["0", "b", passage_id("x", "t"), passage_id("", "t")]
    assert [one.title for one in found] == ["1984", "", "x", ""]
    for row in ({"text": 7}, {"text": "t", "title": ["x"]}, {"text": "t", "id": {}}, {"text": "t", "id": True}):
        write_lines(tmp_path / "bad.jsonl", [row])
        with pytest.raises(ValueError, match=r"bad\.jsonl:1: .* must be text, found"):
            list(read_corpus(tmp_path / "bad.jsonl"))


def test_half_characters_become_unknown_ones(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": ["\\ud83d x"], "\\uDE00": 1}\n{"a": "\\ud83d\\ude00 \\u00e9"}\n')
    assert [row for _, row in read_jsonl(path)] == [{"a": ["\ufffd x"], "\ufffd": 1}, {"a": "😀 é"}]


def test_a_split_whose_name_begins_alike_is_another_one(tmp_path, records, write_records):
    folder = write_records(records[:1], "train")
    write_records(records[1:2], "train_small", folder)
    assert list(read_records(folder, "train")) == records[:1]
    assert list(read_records(folder, "train_small")) == records[1:2]
    (folder / "dev_a.jsonl").write_bytes((folder / "train-00000.jsonl").read_bytes())
    assert list(read_records(folder, "dev")) == records[:1]


def test_shards_of_a_split(tmp_path, records, write_records):
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = write_records(records[:2], "train")
    write_records(records[2:3], "validation", folder)
    pq.write_table(pa.Table.from_pylist([row.to_json() for row in records[3:]]), folder / "train-00001.parquet")
    assert [file.name for file in record_files(folder, "validation")] == ["validation-00000.jsonl"]
    assert list(read_records(folder, "train")) == [*records[:2], *records[3:]]
    assert list(read_records(folder / "train-00000.jsonl")) == records[:2]
    with pytest.raises(FileNotFoundError, match=r"no test\*.jsonl"):
        record_files(folder, "test")
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        record_files(tmp_path / "nowhere")


def test_a_damaged_parquet_file_is_named(tmp_path):
    path = tmp_path / "train.parquet"
    path.write_bytes(b"PAR1 cut off")
    with pytest.raises(ValueError, match=r"train.parquet: not a readable Parquet file"):
        list(read_records(path))


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Beatles!", "beatles"),
        ("an U.S. state", "us state"),
        ("A", "a"),
        ("The The", "the the"),
        ("É́cole «X»", "é́cole «x»"),
    ],
)
def test_normalised_answers(text, normal):
    assert normalize_answer(text) == normal


@pytest.mark.parametrize(
    ("text", "phrase", "expected"),
    [
        ("Who lives in (New York), 1900?", "the new york", True),
        ("What are the Normans?", "Norman", False),
        ("내각은 나가노에서", "나가노", False),
        ("内藤多仲是在长野出生的吗?", "长野", True),
        ("内藤多仲は長野県で生まれた", "長崎", False),
        ("ラーメンはどこのもの", "ラーメン", True),
        ("เขาเกิดที่กรุงเทพมหานคร", "กรุงเทพ", True),
        ("ລາວເກີດຢູ່ວຽງຈັນ", "ວຽງຈັນ", True),
        ("គាត់កើតនៅភ្នំពេញ", "ភ្នំពេញ", True),
        ("သူသည်ရန်ကုန်တွင်", "ရန်ကုန်", True),
        # A word or number of another script ends at such a character.
        ("塔于1958年竣工", "1958", True),
        ("塔于1958年竣工", "195", False),
    ],
)
def test_a_phrase_is_found_as_whole_words_or_inside_text_without_spaces(text, phrase, expected):
    assert mentions(text, phrase) is expected


@given(st.text())
def test_only_blank_text_becomes_empty(text):
    assert bool(normalize_answer(text)) == bool(text.split())


@given(st.text())
def test_case_and_spacing_do_not_matter(text):
    assert normalize_answer(f"  {text}\t") == normalize_answer(text)
    assert normalize_answer(text.lower()) == normalize_answer(text)
