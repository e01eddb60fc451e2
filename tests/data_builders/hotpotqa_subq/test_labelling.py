import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from tripletune.data_builders.hotpotqa_subq import Annotation, Question, label_question
from tripletune.data_builders.hotpotqa_subq.annotations import PartTeacher, TripleFile
from tripletune.data_builders.hotpotqa_subq.build import OpenSource, build
from tripletune.data_builders.hotpotqa_subq.options import BuildOptions, Source
from tripletune.data_builders.readers import get_reader
from tripletune.data_builders.readers._rows import NO_ANSWER
from tripletune.data_builders.readers.arc_easy import NOT_TRAIN
from tripletune.eval import load_task
from tripletune.models.data.records import Action, Passage, Step, read_records
from tripletune.models.data.triples import Triple

PASSAGES = (Passage("Gold", "g"), Passage("Also gold", "a"), *(Passage(f"Other {n}", f"o{n}") for n in range(4)))
QUESTION = Question(
    id="q1", question="Who?", answers=("Ann",), passages=PASSAGES, supporting=(0, 1), type="bridge", source="hotpotqa"
)


class Teacher:
    name = "fake"

    async def annotate(self, question):
        found = [Triple(passage.title, "is", "here") for passage in question.passages]
        return [Annotation(0, "Who first?", found[:1]), Annotation(1, "Who next?", found[1:2])]


@pytest.fixture
def triple_file(tmp_path):
    path = tmp_path / "triples.jsonl"
    # "Other 3" is not covered: a passage without triples can't be a distractor.
    rows = [{"title": p.title, "text": p.text, "triples": [[p.title, "is", "there"]]} for p in PASSAGES[:5]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TripleFile(path).of


def label(**options):
    return asyncio.run(label_question(QUESTION, Teacher(), **options))


def test_without_the_option_a_step_holds_the_kept_document_alone():
    assert [[t.subject for t in step.triples] for step in label()[-1].steps] == [["Gold"], ["Also gold"]]


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_distractors_join_every_step_and_are_never_kept_documents(triple_file, count):
    steps = label(distractors=count, triples_of=triple_file)[-1].steps
    for gold, step in zip(("Gold", "Also gold"), steps):
        subjects = [triple.subject for triple in step.triples]
        assert subjects.count(gold) == 1
        others = set(subjects) - {gold}
        assert len(others) == min(count, 3)
        assert others <= {"Other 0", "Other 1", "Other 2"}
        assert all(subject in step.text for subject in subjects)


def test_distractors_hang_on_seed_and_question_alone(triple_file):
    one, two = (label(distractors=2, triples_of=triple_file, seed=3) for _ in range(2))
    assert one == two
    orders = {label(distractors=2, triples_of=triple_file, seed=seed)[-1].steps for seed in range(12)}
    assert len(orders) > 1
    places = {step.triples[0].subject == "Gold" for steps in orders for step in steps[:1]}
    assert places == {True, False}  # the kept document does not always stand first


def test_distractors_need_their_triples(tmp_path):
    with pytest.raises(ValueError, match="--triple-file"):
        BuildOptions(output=str(tmp_path), distractors=1)


DATA = Path(__file__).resolve().parents[4] / "shared" / "data"

ASQA = {
    "sample_id": "7",
    "ambiguous_question": "Who sang it?",
    "qa_pairs": [
        {"question": "Who sang it first?", "short_answers": ["Ann"], "wikipage": "Song", "context": "Ann sang it."},
        {"question": "Who sang it later?", "short_answers": ["Ben"], "context": "No context provided"},
    ],
    "annotations": [
        {"long_answer": "Ann sang it,\nlater Ben.", "knowledge": [{"content": "Ben sang it.", "wikipage": None}]},
        {"long_answer": "Ben did.", "knowledge": [{"content": "Unused.", "wikipage": "Other"}]},
    ],
}
ARC = {"id": "x1", "question": "Hot?", "choices": {"text": ["ice", "fire"], "label": ["1", "2"]}, "answerKey": "2"}
SELF_RAG = [
    {
        "id": "arc_easy_0",
        "dataset_name": "arc_easy",
        "instruction": "Choose the best answer.## Input:\n\nHot?\nA: ice\nB: fire",
        "input": "",
        "output": "[No Retrieval]B[Utility:5]",
    },
    {
        "id": "asqa_0",
        "dataset_name": "asqa",
        "instruction": "Answer in long form.## Input:\n\nWho sang it?",
        "output": "[Retrieval]<paragraph>Song\nAnn sang it.\nTwice.</paragraph>[Relevant]Ann [sic] sang it."
        "[Fully supported][Continue to Use Evidence]Ben too."
        "[Retrieval]<paragraph>Tree\nNothing.</paragraph>[Irrelevant]End.[Utility:4]",
    },
    {"id": "asqa_1", "dataset_name": "asqa", "instruction": "Why?", "output": "[No Retrieval][Utility:1]"},
    {"id": "flan_1", "dataset_name": "flan_v2", "instruction": "Translate.", "output": "Ja."},
]


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read(reader: str, location: str, issues: Counter[str] | None = None) -> list[Question]:
    return list(get_reader(reader)(location, issues))


def test_asqa_takes_the_first_long_answer_and_the_knowledge_behind_it(tmp_path):
    (question,) = read("asqa", write(tmp_path / "asqa.jsonl", ASQA))
    assert (question.id, question.question, question.source) == ("7", "Who sang it?", "asqa")
    assert question.answers == ("Ann sang it, later Ben.", "Ben did.")
    assert [(p.title, p.text) for p in question.passages] == [("", "Ben sang it."), ("Song", "Ann sang it.")]
    assert question.supporting == (0, 1)


def test_official_asqa_file_is_read_by_its_train_split(tmp_path):
    path = tmp_path / "ASQA.json"
    row = {key: value for key, value in ASQA.items() if key != "sample_id"}
    path.write_text(json.dumps({"dev": {"d": row}, "train": {"t1": row, "t2": row}}, indent=1))
    assert [question.id for question in read("asqa", str(path))] == ["t1", "t2"]
    path.write_text(json.dumps({"dev": {"d": row}}))
    assert [question.id for question in read("asqa", str(path))] == ["d"]
    path.write_text(json.dumps([ASQA]))
    assert [question.id for question in read("asqa", str(path))] == ["7"]
    path.write_text(json.dumps({"train": {"t1": "oops"}}))
    with pytest.raises(ValueError, match=r"ASQA\.json: question t1: it is not an object"):
        read("asqa", str(path))


def test_rows_without_a_long_answer_are_counted(tmp_path):
    issues: Counter[str] = Counter()
    path = write(tmp_path / "a.jsonl", ASQA | {"annotations": [{"long_answer": " "}]}, ASQA)
    assert len(read("asqa", path, issues)) == 1
    assert issues[NO_ANSWER] == 1
    with pytest.raises(ValueError, match=r"b\.jsonl:1: 'knowledge' must be a list"):
        read("asqa", write(tmp_path / "b.jsonl", ASQA | {"annotations": [{"long_answer": "a", "knowledge": "b"}]}))


def test_self_rag_rows_are_told_apart_and_stripped_of_reflection(tmp_path):
    path, issues = write(tmp_path / "self_rag.jsonl", *SELF_RAG), Counter[str]()
    (arc,) = read("arc_easy", path)
    assert (arc.id, arc.question, arc.answers, arc.passages) == ("arc_easy_0", "Hot? A: ice B: fire", ("B",), ())
    (asqa,) = read("asqa", path, issues)
    assert (asqa.question, asqa.answers) == ("Who sang it?", ("Ann [sic] sang it. Ben too. End.",))
    assert [(p.title, p.text) for p in asqa.passages] == [("Song", "Ann sang it.\nTwice.")]
    assert issues[NO_ANSWER] == 1


def test_arc_rows_of_other_splits_are_counted(tmp_path):
    issues: Counter[str] = Counter()
    path = write(tmp_path / "arc.jsonl", ARC, ARC | {"id": "x2", "split": "test"}, ARC | {"id": "x3", "split": "train"})
    assert [question.answers for question in read("arc_easy", path, issues)] == [("B",)] * 3
    assert issues[NOT_TRAIN] == 1


def test_a_part_gives_one_answering_record_in_the_words_of_its_task(tmp_path):
    (question,) = read("arc_easy", write(tmp_path / "arc.jsonl", ARC))
    (record,) = PartTeacher("arc_easy", None).records(question)
    assert (record.task, record.action, record.steps) == ("answering", Action.NO_RETRIEVAL, ())
    assert record.question == load_task("arc").prompt(question)
    assert (record.label, record.id, record.question_id) == ("B", "arc_easy:x1:answer", "x1")


def test_triples_of_the_passages_make_one_step(tmp_path):
    triples = write(
        tmp_path / "triples.jsonl",
        {"title": "", "text": "Ben  sang it.", "triples": [["Ben", "sang", "it"]]},
        {"title": "Song", "text": "Ann sang it.", "triples": [["Ann", "sang", "it"], ["Ben", "sang", "it"]]},
    )
    (question,) = read("asqa", write(tmp_path / "asqa.jsonl", ASQA))
    (record,) = PartTeacher("asqa", triples).records(question)
    facts = (Triple("Ben", "sang", "it"), Triple("Ann", "sang", "it"))
    assert record.steps == (Step("Who sang it?", facts, "Ben sang it.\nSong\nAnn sang it."),)
    assert record.action is Action.SUFFICIENT
    assert record.question.startswith("Who sang it? ")
    assert record.question.endswith("[Long Form]")


@pytest.mark.parametrize(
    ("wanted", "labelled", "left_out", "sentence"),
    [
        (150, 150, 0, None),
        (3897, 150, 0, "Source a (asqa) gave 150 of the 3,897 questions asked for; its file has no more."),
        (5, 3, 2, "Source a (asqa) gave 3 of the 5 questions asked for; 2 were left out."),
        (5, 3, 1, "Source a (asqa) gave 3 of the 5 questions asked for; 1 were left out and its file has no more."),
    ],
)
def test_shortages_are_said(wanted, labelled, left_out, sentence):
    drops = Counter({"why": left_out} if left_out else {})
    source = Source.parse("a=asqa:f")
    assert OpenSource(source, PartTeacher("asqa", None), Counter(), wanted, labelled, drops).shortage() == sentence


def test_parts_join_a_build_as_sources(tmp_path):
    asqa, arc = (
        write(tmp_path / "asqa.jsonl", ASQA),
        write(tmp_path / "arc.jsonl", *(ARC | {"id": f"{n}"} for n in range(5))),
    )
    sources = [Source.parse(f"asqa:{asqa}"), Source.parse(f"arc_easy:{arc}")]
    options = BuildOptions(output=str(tmp_path / "out"), split_name="train", arc_easy_count=3)
    numbers = build(sources, options)
    assert numbers["tasks"]["planning"]["records"] == 0
    assert [record.id for record in read_records(tmp_path / "out")] == [
        "asqa:7:answer",
        *(f"arc_easy:{n}:answer" for n in range(3)),
    ]
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "asqa (asqa) gave 1 of the 3,897" in card
    assert "arc_easy (arc_easy) gave" not in card


@pytest.mark.parametrize(
    ("reader", "file", "count"), [("asqa", "asqa_dev.jsonl", 150), ("arc_easy", "arc_easy.jsonl", 400)]
)
def test_real_files(reader, file, count):
    if not (DATA / file).is_file():
        pytest.skip(f"{DATA / file} is not there")
    questions = read(reader, str(DATA / file))
    teacher = PartTeacher(reader, None)
    assert len(questions) == count
    assert all(len(teacher.records(question)) == 1 for question in questions[:20])
