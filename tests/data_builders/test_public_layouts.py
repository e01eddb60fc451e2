"""Public files in their published layouts: rows written here, layouts as the projects' own code reads them."""

import gzip
import json

import pytest

from tests.cli import read_lines, run, write_lines
from tripletune.core.data.passages import read_corpus
from tripletune.core.rows import whole_object
from tripletune.data_builders.adapt import AdaptOptions, adapt_rows
from tripletune.data_builders.readers import get_reader

TSV = (
    "id\ttext\ttitle\n"
    '1\t"Aaron Aaron ( or ; ""Ahärôn"") is a prophet."\tAaron\n'
    '2\t"He sings ""Eat It""."\t"""Weird Al"" Yankovic"\n'
)
PASSAGES = [
    ("1", "Aaron", 'Aaron Aaron ( or ; "Ahärôn") is a prophet.'),
    ("2", '"Weird Al" Yankovic', 'He sings "Eat It".'),
]


def united(tmp_path, *files, **options):
    output = tmp_path / "out.jsonl"
    return adapt_rows(AdaptOptions(str(output), tuple(map(str, files)), **options)), output


def contents(output):
    return [(passage.id, passage.title, passage.text) for passage in read_corpus(output)]


@pytest.mark.parametrize("packed", [False, True])
def test_dpr_passages_keep_ids_titles_and_quotation_marks(tmp_path, packed):
    file = tmp_path / ("psgs_w100.tsv.gz" if packed else "psgs_w100.tsv")
    file.write_bytes(gzip.compress(TSV.encode()) if packed else TSV.encode())
    counts, output = united(tmp_path, file)
    assert contents(output) == PASSAGES
    assert counts == {"passages": 2}


def test_a_dpr_file_without_its_header_is_refused_with_the_header(tmp_path):
    (tmp_path / "psgs.tsv").write_text(TSV.partition("\n")[2])
    ran = run("data", "adapt", "--input", tmp_path / "psgs.tsv", "--output", tmp_path / "out.jsonl")
    assert ran.code == 2
    assert "the first line of a table names its columns: write DPR's above the first row (id, text, title)" in ran.error


def test_wiki18_has_one_pair_of_quotation_marks_around_each_title(tmp_path):
    rows = [{"id": "0", "contents": '"Aaron"\nA prophet.'}, {"id": "1", "contents": '""Weird Al" Yankovic"\nHe sings.'}]
    counts, output = united(tmp_path, write_lines(tmp_path / "wiki-18.jsonl", rows))
    assert contents(output) == [("0", "Aaron", "A prophet."), ("1", '"Weird Al" Yankovic', "He sings.")]
    assert counts == {"passages": 2}


def test_atlas_sections_follow_the_title_and_other_fields_are_counted(tmp_path):
    rows = [
        {"id": "0", "title": "Orchid", "section": "Description", "text": "They differ."},
        {"id": "1", "title": "Orchid", "section": "", "text": "They are plants."},
        {"id": "2", "title": "", "section": "Taxonomy", "text": "There are many.", "length": 3},
    ]
    counts, output = united(tmp_path, write_lines(tmp_path / "text-list-100-sec.jsonl", rows))
    assert [title for _, title, _ in contents(output)] == ["Orchid: Description", "Orchid", "Taxonomy"]
    assert counts == {"passages": 3, "titles with their section": 2, "rows with length, which is not read": 1}


PAGE = {
    "_id": "17", "wikipedia_id": "17", "wikipedia_title": "Kelm", "anchors": [],
    "text": ["Kelm\n", "Kelm is a town.\n", "Section::::History.\n", "BULLET::::- It burnt in 1802.\n", " "],
}  # fmt: skip


def test_a_page_of_kilt_becomes_paragraphs_that_the_questions_name(tmp_path):
    # The knowledge source is called .json and holds JSON lines; it must not be read as a whole.
    source = write_lines(tmp_path / "kilt_knowledgesource.json", [PAGE, {**PAGE, "wikipedia_id": "18", "_id": "18"}])
    assert whole_object(str(source)) is None
    counts, output = united(tmp_path, source)
    first, bullet = read_lines(output)[:2]
    assert first == {"title": "Kelm", "id": "17_1", "text": "Kelm is a town."}
    assert bullet == {"title": "Kelm", "id": "17_3", "text": "BULLET::::- It burnt in 1802.", "heading": "History"}
    assert counts["passages"] == 4
    assert counts["titles and headings among the paragraphs, no passages"] == 4
    assert counts["rows without text, left out"] == 2
    row = {
        "id": "q1", "input": "When did Kelm burn?", "meta": {},
        "output": [
            {"answer": "1802"}, {"answer": "in 1802", "provenance": [
                {"wikipedia_id": "17", "title": "Kelm", "start_paragraph_id": 3, "end_paragraph_id": 3},
            ]},
            {"answer": "1802", "provenance": [{"wikipedia_id": "18", "start_paragraph_id": 1, "end_paragraph_id": 1}]},
        ],
    }  # fmt: skip
    (question,) = get_reader("qa")(write_lines(tmp_path / "nq-dev-kilt.jsonl", [row]))
    assert (question.id, question.answers, question.links) == ("q1", ("1802", "in 1802"), ("17_3",))
    del row["output"]
    (question,) = get_reader("qa")(write_lines(tmp_path / "test.jsonl", [row]))
    assert question.answers == ()


def ircot_row(number, **fields):
    paragraph = {"idx": 0, "title": f"Town {number}", "paragraph_text": f"Town {number} burnt.", "is_supporting": True}
    other = {"idx": 1, "title": "Kelm", "paragraph_text": "Kelm is a town.", "is_supporting": False}
    return {
        "dataset": "musique", "question_id": f"2hop__{number}", "question_text": "When?",
        "answers_objects": [{"number": "", "date": {"day": "", "month": "", "year": ""}, "spans": ["1802"]}],
        "contexts": [paragraph, other],
    } | fields  # fmt: skip


def test_ircots_questions_and_a_corpus_of_its_sets_own_files(tmp_path):
    split = write_lines(tmp_path / "test_subsampled.jsonl", [ircot_row(1), ircot_row(2)])
    first, _ = get_reader("ircot")(str(split))
    assert (first.id, first.answers, first.type, first.supporting) == ("2hop__1", ("1802",), "2hop", (0,))
    dated = {"number": "", "date": {"day": "1", "month": "May", "year": "1802"}, "spans": []}
    (row,) = get_reader("ircot")(write_lines(tmp_path / "a.jsonl", [ircot_row(1, answers_objects=[dated])]))
    assert row.answers == ("1 May 1802",)
    with pytest.raises(ValueError, match="rows of IRCoT, which the reader ircot and the tasks ircot_… read"):
        list(get_reader("musique")(str(split)))
    # The files of 2WikiMultiHopQA: an array, and a test file without answers.
    dev = tmp_path / "dev.json"
    dev.write_text(
        json.dumps([{"_id": "d", "question": "?", "answer": "a", "context": [["Kelm", ["Kelm is", "a town."]]]}])
    )
    test = tmp_path / "test.json"
    test.write_text(json.dumps([{"_id": "t", "question": "?", "context": [["Ulm", ["A town."]], ["Empty", []]]}]))
    counts, output = united(tmp_path, split, dev, test)
    assert [title for _, title, _ in contents(output)] == ["Town 1", "Kelm", "Town 2", "Ulm"]
    assert counts["copies of passages, left out"] == 2
    assert counts["rows without text, left out"] == 1


def test_several_files_become_one_corpus_whose_repeated_ids_are_named(tmp_path):
    text = write_lines(
        tmp_path / "text.jsonl", [{"id": "0", "title": "A", "text": "a"}, {"id": "1", "title": "B", "text": "b"}]
    )
    infobox = write_lines(
        tmp_path / "infobox.jsonl", [{"id": "0", "title": "C", "text": "c"}, {"id": "9", "title": "B", "text": "b "}]
    )
    with pytest.raises(
        ValueError, match=r"infobox.jsonl:1: the id '0' is that of another passage \(.*text.jsonl:1\): set"
    ):
        united(tmp_path, text, infobox)
    counts, output = united(tmp_path, text, infobox, repeated_ids="rename")
    assert [identity for identity, _, _ in contents(output)] == ["0", "1", "infobox:0"]
    assert (counts["repeated ids, renamed"], counts["copies of passages, left out"]) == (1, 1)


CTXS = [{"id": "7", "title": "Kelm", "text": "Kelm is a town.", "score": "1.5"}]


@pytest.mark.parametrize(
    ("reader", "row", "answer"),
    [
        ("qa", {"id": 4222362, "question": "Q?", "possible_answers": '["x"]', "answers": ["x"], "ctxs": CTXS}, "x"),
        ("qa", {"question": "Q?", "answers": ["x"], "ctxs": CTXS}, "x"),
        ("claims", {"claim": "C.", "label": "true", "answers": ["true"], "question": "C.", "ctxs": CTXS}, "true"),
        (
            "multiple_choice",
            {"id": "M1", "question": "Q?", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2",
             "answers": ["B"], "top_contexts": CTXS},
            "B",
        ),
        ("qa", {"question": "Q?", "answer": "x", "claims": ["c"], "question_ctx": "", "docs": CTXS}, "x"),
        (
            "asqa",
            {"sample_id": "s", "question": "Q?", "qa_pairs": [{"short_answers": ["x"], "question": "?"}],
             "annotations": [{"long_answer": "x", "knowledge": []}], "wikipages": [], "answer": "x", "docs": CTXS},
            "x",
        ),
    ],
)  # fmt: skip
def test_the_evaluation_files_of_self_rag_and_alce_bring_their_passages(tmp_path, reader, row, answer):
    (question,) = get_reader(reader)(write_lines(tmp_path / "rows.jsonl", [row]))
    assert question.answers == (answer,)
    assert [(passage.title, passage.text) for passage in question.passages] == [("Kelm", "Kelm is a town.")]


def test_questions_without_passages_are_sent_to_eval_run(tmp_path):
    rows = write_lines(tmp_path / "nq.jsonl", [{"question": "Q?", "answer": ["x"]}])
    with pytest.raises(
        ValueError, match="a question without passages, and `data adapt` makes corpora: give the file to"
    ):
        united(tmp_path, rows)
