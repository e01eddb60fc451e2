import asyncio
import json
from contextlib import aclosing
from pathlib import Path

import pytest

from tests.data_builders.subq_replies import RecordedClient
from tripletune.data_builders.hotpotqa_subq import (
    Annotation,
    DropReason,
    Question,
    UnlabelledQuestion,
    gives_away_answer,
    label_question,
)
from tripletune.data_builders.hotpotqa_subq.build import build, in_order
from tripletune.data_builders.hotpotqa_subq.options import BuildOptions, Source
from tripletune.data_builders.world.build import WorldOptions, generate_world
from tripletune.models.data.records import Passage, read_records
from tripletune.models.data.triples import Triple

QUESTION = Question(
    id="q1",
    question="Where was the author of Dune born?",
    answers=("Tacoma", "Tacoma, Washington"),
    passages=(Passage("Dune", "By Frank Herbert."), Passage("Other", "x"), Passage("Frank Herbert", "Of Tacoma.")),
    supporting=(0, 2),
    type="bridge",
    source="hotpotqa",
)


class FakeTeacher:
    name = "fake"

    def __init__(self, documents=(0, 2), subqueries=("Who wrote Dune?", "Where was Herbert born?"), empty=None):
        self.documents, self.asked, self.empty = documents, subqueries, empty

    async def annotate(self, question):
        facts = {number: [Triple(question.passages[number].title, "is", "here")] * 2 for number in self.documents}
        facts |= {self.empty: []}
        return [Annotation(number, asked, facts[number]) for number, asked in zip(self.documents, self.asked)]


def label(teacher, direct=False, **options):
    return asyncio.run(label_question(QUESTION, teacher, direct, **options))


def test_two_documents_give_three_planning_records_and_one_answer():
    records = label(FakeTeacher())
    assert [record.label for record in records] == [
        "[SUBQ] Where was the author of Dune born?",
        "[SUBQ] Where was Herbert born?",
        "[SUFFICIENT]",
        "Tacoma",
    ]
    assert [[step.query for step in record.steps] for record in records] == [
        [],
        [QUESTION.question],
        [QUESTION.question, "Where was Herbert born?"],
        [QUESTION.question, "Where was Herbert born?"],
    ]
    assert records[-1].steps[0].triples == (Triple("Dune", "is", "here"),)
    assert records[-1].steps[1].text == "Frank Herbert\nOf Tacoma."
    assert [record.id for record in records] == [
        "hotpotqa:q1:plan0",
        "hotpotqa:q1:plan1",
        "hotpotqa:q1:plan2",
        "hotpotqa:q1:answer",
    ]
    assert {record.question_id for record in records} == {"q1"}


def test_generated_first_subquery_is_label_and_query():
    records = label(FakeTeacher(), first_subquery="generated")
    assert records[0].label == "[SUBQ] Who wrote Dune?"
    assert records[1].steps[0].query == "Who wrote Dune?"


def test_one_document_is_enough():
    records = label(FakeTeacher(documents=[2], subqueries=["Where was Herbert born?"]))
    assert [record.action.value for record in records] == ["[SUBQ]", "[SUFFICIENT]", "[SUFFICIENT]"]


def test_direct_answer_leaves_the_chain_out():
    planning, answering = label(FakeTeacher(), direct=True)
    assert (planning.label, planning.steps) == ("[NO_RETRIEVAL]", ())
    assert (answering.label, answering.action.value, answering.steps) == ("Tacoma", "[NO_RETRIEVAL]", ())


@pytest.mark.parametrize(
    ("teacher", "reason"),
    [
        (FakeTeacher(documents=[], subqueries=[]), DropReason.NO_HELPFUL),
        (FakeTeacher(empty=2), DropReason.NO_TRIPLES),
        (FakeTeacher(subqueries=["Who wrote Dune?", "Is Tacoma his town?"]), DropReason.ANSWER_IN_SUBQUERY),
    ],
)
def test_what_cannot_be_labelled(teacher, reason):
    with pytest.raises(UnlabelledQuestion) as caught:
        label(teacher)
    assert caught.value.reason is reason


def question_with(text, *answers):
    return Question("q", text, answers, (), (), "", "test")


@pytest.mark.parametrize(
    ("subquery", "question", "expected"),
    [
        ("When did Bob die?", question_with("Who died first, Ann or Bob?", "Bob"), False),
        ("Is there no lake?", question_with("Are both lakes?", "no"), False),
        ("Is there no fjord?", question_with("Which country?", "Norway", "NO"), False),
        ("Where is Oslo, Norge?", question_with("Which country?", "Norway", "Norge"), True),
        ("What are the Normans?", question_with("Who?", "Norman"), False),
    ],
)
def test_gives_away_answer(subquery, question, expected):
    assert gives_away_answer(subquery, question) is expected


def hotpot_row(number: int, question: str | None = None) -> dict:
    return {
        "_id": f"id{number}",
        "question": question or f"Question number {number}?",
        "answer": f"answer {number}",
        "type": "bridge",
        "supporting_facts": [["A", 0]],
        "context": [["A", [f"Text {number}."]], ["B", ["Other."]]],
    }


def teacher_row(number: int, **more) -> dict:
    return {
        "_id": f"id{number}",
        "helpful": ["A"],
        "subqueries": [{"title": "A", "question": "What of A?"}],
        "triples": {"A": [["A", "is", f"answer {number}"]]},
    } | more


def write(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def source(tmp_path):
    rows = [hotpot_row(n) for n in range(60)] + [hotpot_row(n, f"question NUMBER {n - 60}") for n in range(60, 120)]
    file = write(tmp_path / "q.jsonl", [*rows, hotpot_row(0), hotpot_row(999)])
    teacher = [teacher_row(n, closed_book="x") for n in range(119)] + [{"_id": "id119", "direct": True}]
    return Source("hotpotqa", "hotpotqa", file, write(tmp_path / "t.jsonl", teacher))


def test_build_splits_by_question_and_counts_what_is_left_out(tmp_path, source):
    build([source], BuildOptions(str(tmp_path / "out"), validation_fraction=0.3, seed=1))
    sides = {split: list(read_records(tmp_path / "out", split)) for split in ("train", "validation")}
    ids = {split: {record.question_id for record in records} for split, records in sides.items()}
    assert ids["train"] | ids["validation"] == {f"id{n}" for n in range(120)}
    assert not ids["train"] & ids["validation"]
    # Questions n and n + 60 have the same words, so they share a side.
    assert all((f"id{n}" in ids["train"]) == (f"id{n + 60}" in ids["train"]) for n in range(60))
    assert 20 < len(ids["validation"]) < 55
    direct = [r for records in sides.values() for r in records if r.question_id == "id119"]
    assert [r.action.value for r in direct] == ["[NO_RETRIEVAL]", "[NO_RETRIEVAL]"]
    facts = json.loads((tmp_path / "out" / "statistics.json").read_text())["build"]
    assert facts["drops"] == {"hotpotqa": {"question id seen before": 1, "no annotation for the question": 1}}
    assert facts["questions"] == {"hotpotqa": 120}
    assert len(facts["files"]) == 2


def test_build_does_not_depend_on_concurrency_and_moves_with_the_seed(tmp_path, source):
    def contents(name, **options):
        build([source], BuildOptions(str(tmp_path / name), validation_fraction=0.3, **options))
        return [r.id for split in ("train", "validation") for r in read_records(tmp_path / name, split)]

    first = contents("a", concurrency=1)
    assert contents("b", concurrency=50) == first
    assert contents("c", seed=5) != first


def test_stored_direct_answers_decide_by_normalised_match(tmp_path, source):
    answers = [{"question_id": f"id{n}", "answer": "The Answer 1!" if n == 1 else "answer 1"} for n in range(4)]
    file = write(tmp_path / "a.jsonl", answers)
    build([source], BuildOptions(str(tmp_path / "out"), split_name="train", limit=4, direct_answers=file))
    direct = {r.question_id for r in read_records(tmp_path / "out") if r.action.value == "[NO_RETRIEVAL]"}
    assert direct == {"id1"}
    with pytest.raises(ValueError, match="no direct answer to question 'id4'"):
        build([source], BuildOptions(str(tmp_path / "b"), limit=5, direct_answers=file))
    assert not (tmp_path / "b").exists()


def test_no_question_left_is_an_error(tmp_path, source):
    other = write(tmp_path / "o.jsonl", [hotpot_row(5000)])
    with pytest.raises(ValueError, match="hotpotqa: 1 x no annotation for the question"):
        build([Source("hotpotqa", "hotpotqa", other, source.annotations)], BuildOptions(str(tmp_path / "out")))


def test_source_on_the_command_line():
    assert Source.parse("two_wiki:f.json") == Source("two_wiki", "two_wiki", "f.json", None)
    assert Source.parse("world=hotpotqa:f:t") == Source("world", "hotpotqa", "f", "t")
    for text in ("hotpotqa", "hotpotqa:", "a:b:c:d", "=hotpotqa:f", "x=:f", "hotpotqa:f:"):
        with pytest.raises(ValueError, match="write it as READER:FILE"):
            Source.parse(text)


async def collect(items, work, concurrency):
    return [pair async for pair in in_order(iter(items), work, concurrency)]


def test_results_come_in_the_order_of_the_items():
    async def work(number):
        for _ in range(5 - number % 5):
            await asyncio.sleep(0)
        return -number

    found = asyncio.run(collect(range(50), work, 4))
    assert found == [(number, -number) for number in range(50)]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_slow_item_stalls_nothing_until_the_window_is_full(concurrency):
    started, most, at_work, drawn = [], 0, 0, 0
    slow = None

    def items():
        nonlocal drawn
        for number in range(100):
            drawn += 1
            yield number

    async def work(number):
        nonlocal most, at_work
        started.append(number)
        at_work += 1
        most = max(most, at_work)
        if number == 0:
            await slow.wait()
        else:
            for _ in range(6):
                await asyncio.sleep(0)
        at_work -= 1
        return number

    async def go():
        nonlocal slow
        slow = asyncio.Event()
        found = []

        async def read():
            async for number, _ in in_order(items(), work, concurrency):
                found.append(number)

        task = asyncio.create_task(read())
        for _ in range(500):
            await asyncio.sleep(0)
        held = len(started), drawn, list(found)
        slow.set()
        await task
        return held, found

    (begun, taken, early), found = asyncio.run(go())
    assert early == []
    # With room for one, the slow item has it; else the others go on, as far as the window reaches.
    assert begun == (1 if concurrency == 1 else 4 * concurrency + 1)
    assert taken <= 4 * concurrency + 2
    assert most == concurrency
    assert found == list(range(100))


def test_an_error_comes_at_its_turn_and_leaves_nothing_running():
    ended = []

    async def work(number):
        if number == 2:
            raise ValueError("two")
        try:
            if number > 2:
                await asyncio.sleep(60)
        finally:
            ended.append(number)
        return number

    found = []

    async def read():
        async with aclosing(in_order(iter(range(10)), work, 4)) as results:
            async for number, _ in results:
                found.append(number)

    async def go():
        with pytest.raises(ValueError, match="two"):
            await read()
        return len(asyncio.all_tasks())

    assert asyncio.run(go()) == 1
    assert found == [0, 1]
    assert set(ended) >= {0, 1}


SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"


def both_ways(tmp_path, questions, replies, **options):
    """Records of the recorded teacher, and of the same replies through the path of a teacher LLM."""
    build([Source("hotpotqa", "hotpotqa", questions, replies)], BuildOptions(str(tmp_path / "a"), **options))
    bare = [Source("hotpotqa", "hotpotqa", questions)]
    build(bare, BuildOptions(str(tmp_path / "b"), **options), lambda: RecordedClient(replies))
    files = [sorted((tmp_path / name).glob("*.jsonl")) for name in ("a", "b")]
    return [{file.name: file.read_bytes() for file in found} for found in files]


@pytest.mark.parametrize("first_subquery", ["main_question", "generated"])
def test_the_llm_path_gives_the_records_of_the_recorded_teacher(tmp_path, first_subquery):
    # No questions of one hop: their sub-query is the question in its own words, which no teacher may hand in.
    options = WorldOptions(train=40, validation=0, test=0, common_knowledge=0.0, one_hop=0.0, noise=0.3)
    world = generate_world(options, "train")
    rows = list(world.teacher_rows())
    # What neither can label: nothing recorded, and no triples of a document.
    del rows[3]
    rows[5]["triples"] = {title: [] for title in rows[5]["triples"]}
    questions, replies = write(tmp_path / "q.jsonl", world.question_rows()), write(tmp_path / "t.jsonl", rows)
    recorded, through = both_ways(tmp_path, questions, replies, first_subquery=first_subquery, validation_fraction=0.3)
    assert recorded == through
    assert len({record.question_id for split in recorded for record in read_records(tmp_path / "a" / split)}) == 38
    drops = json.loads((tmp_path / "b" / "statistics.json").read_text())["build"]["drops"]["hotpotqa"]
    assert drops == {"no helpful document": 1, "a helpful document has no triples": 1}


@pytest.mark.parametrize("split", ["train", "dev"])
def test_real_questions_give_the_same_records_both_ways(tmp_path, split):
    questions, replies = SHARED / f"hotpotqa_{split}.jsonl", SHARED / "teacher" / f"hotpotqa_{split}.jsonl"
    if not replies.is_file():
        pytest.skip(f"{replies} is not on this machine")
    recorded, through = both_ways(tmp_path, str(questions), str(replies))
    assert recorded == through
    assert set(recorded) == {"train-00000.jsonl", "validation-00000.jsonl"}
