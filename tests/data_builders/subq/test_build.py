import asyncio
from contextlib import aclosing

import pytest

from tests.cli import write_lines
from tests.data_builders.rows import build_facts, hotpot_row, shards, shared
from tests.data_builders.subq_replies import recorded_client
from tripletune.core.concurrency import in_order
from tripletune.core.data.questions import DropReason
from tripletune.core.data.records import read_records
from tripletune.data_builders.subq.build import build
from tripletune.data_builders.subq.options import BuildOptions, Source
from tripletune.data_builders.subq.teacher import StoredAnswers
from tripletune.data_builders.world.build import WorldOptions, generate_world


def teacher_row(number, **more):
    return {
        "_id": f"id{number}",
        "helpful": ["A"],
        "subqueries": [{"title": "A", "question": "Which number is it?"}],
        "triples": {"A": [["A", "is", f"answer {number}"]]},
    } | more


@pytest.fixture
def source(tmp_path):
    rows = [hotpot_row(n) for n in range(60)]
    alike = [hotpot_row(n, question=f"question NUMBER {n - 60}") for n in range(60, 120)]
    file = write_lines(tmp_path / "q.jsonl", [*rows, *alike, hotpot_row(0), hotpot_row(999)])
    teacher = [teacher_row(n, closed_book="x") for n in range(119)] + [{"_id": "id119", "direct": True}]
    return Source("hotpotqa", "hotpotqa", file, write_lines(tmp_path / "t.jsonl", teacher))


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
    facts = build_facts(tmp_path / "out")
    assert facts["drops"] == {"hotpotqa": {"question id seen before": 1, "no annotation for the question": 1}}
    assert facts["questions"] == {"hotpotqa": 120}
    assert len(facts["files"]) == 2


def test_labels_without_facts_are_counted_or_dropped(tmp_path):
    questions = write_lines(tmp_path / "q.jsonl", [hotpot_row(n) for n in range(6)])
    rows = [teacher_row(n) if n % 3 else teacher_row(n, triples={"A": [["A", "is", "here"]]}) for n in range(6)]
    source = Source("hotpotqa", "hotpotqa", questions, write_lines(tmp_path / "t.jsonl", rows))
    found, reason = {}, DropReason.ANSWER_NOT_IN_FACTS.value
    for mode in ("off", "count", "drop"):
        build([source], BuildOptions(str(tmp_path / mode), split_name="train", check_facts=mode))
        found[mode] = build_facts(tmp_path / mode)
    assert [one["questions"]["hotpotqa"] for one in found.values()] == [6, 6, 4]
    assert found["drop"]["drops"] == {"hotpotqa": {reason: 2}}
    assert found["count"]["issues"] == {f"hotpotqa: {reason}": 2}
    assert found["off"]["issues"] == {}
    assert shards(tmp_path / "off") == shards(tmp_path / "count")
    assert f"{reason} | 2 |" in (tmp_path / "count" / "README.md").read_text(encoding="utf-8")


def test_stored_direct_answers_decide_by_normalised_match(tmp_path, source):
    answers = [{"question_id": f"id{n}", "answer": "The Answer 1!" if n == 1 else "answer 1"} for n in range(4)]
    file = write_lines(tmp_path / "a.jsonl", answers)
    build([source], BuildOptions(str(tmp_path / "out"), split_name="train", limit=4, direct_answers=file))
    direct = {r.question_id for r in read_records(tmp_path / "out") if r.action.value == "[NO_RETRIEVAL]"}
    assert direct == {"id1"}
    with pytest.raises(ValueError, match="no direct answer to question 'id4'"):
        build([source], BuildOptions(str(tmp_path / "b"), limit=5, direct_answers=file))
    assert not (tmp_path / "b").exists()


def test_a_second_different_answer_to_a_question_is_reported(tmp_path, caplog):
    rows = [{"question_id": "id1", "answer": answer} for answer in ("Oslo", "Rome", "Oslo")]
    StoredAnswers(write_lines(tmp_path / "answers.jsonl", rows))
    assert "answers.jsonl: 1 rows answer a question again, differently; the first counts" in caplog.text


def test_failed_searches_are_counted_and_hang_on_no_order(tmp_path, source):
    def built(name, **options):
        chosen = BuildOptions(str(tmp_path / name), split_name="train", failed_searches=0.5, **options)
        build([source], chosen)
        return shards(tmp_path / name)

    assert built("a", concurrency=1) == built("b", concurrency=50) == built("c", check_facts="drop")
    again = sum(record.id.endswith("-again") for record in read_records(tmp_path / "a"))
    assert 40 < again < 120
    assert f"Source hotpotqa: {again} failed searches are" in (tmp_path / "a" / "README.md").read_text("utf-8")


def test_a_triple_file_that_fits_nothing_is_refused(tmp_path, source):
    def built(name, text, **options):
        file = write_lines(tmp_path / "t2.jsonl", [{"title": "B", "text": text, "triples": [["B", "is", "other"]]}])
        chosen = BuildOptions(str(tmp_path / name), split_name="train", limit=5, triple_file=file, **options)
        build([source], chosen)

    built("fits", "Other.", distractors=1)
    for options in ({"distractors": 1}, {"failed_searches": 0.9}):
        with pytest.raises(ValueError, match=r"t2\.jsonl has no triples of the .* passages that were looked up"):
            built("foreign", "Else.", **options)
    with pytest.raises(ValueError, match="triple_file: without effect"):
        built("idle", "Other.")
    write_lines(tmp_path / "none.jsonl", [])
    with pytest.raises(ValueError, match="no row is a passage with triples"):
        build([source], BuildOptions(str(tmp_path / "o"), distractors=1, triple_file=str(tmp_path / "none.jsonl")))
    assert not (tmp_path / "foreign").exists()


def test_histories_of_real_searches_need_a_corpus_and_its_triples(tmp_path, source):
    def built(**options):
        build([source], BuildOptions(str(tmp_path / "out"), split_name="train", limit=5, retriever="bm25", **options))

    rows = [{"title": "A", "text": f"Text {n}.", "triples": [["A", "is", f"answer {n}"]]} for n in range(5)]
    files = {name: write_lines(tmp_path / f"{name}.jsonl", rows) for name in ("corpus", "triple_file")}
    with pytest.raises(ValueError, match="retriever has no effect without corpus"):
        built(triple_file=files["triple_file"])
    with pytest.raises(ValueError, match="retriever: needs the triples"):
        built(corpus=files["corpus"])
    built(**files)
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "Histories come from real searches (bm25, top 1)." in card
    assert ": 5 searches that" in card


def test_what_the_filter_drops_and_the_model_answers_gives_an_answer_alone(tmp_path, source):
    rows = [teacher_row(0, helpful=[]), teacher_row(1), {"_id": "id2", "direct": True}]
    kept = Source("hotpotqa", "hotpotqa", source.location, write_lines(tmp_path / "t2.jsonl", rows))
    answers = [{"question_id": f"id{n}", "answer": f"answer {n}"} for n in range(3)]
    file = write_lines(tmp_path / "a.jsonl", answers)
    options = BuildOptions(str(tmp_path / "o"), split_name="train", limit=3, direct_answers=file, filtered_answers=True)
    build([kept], options)
    made = [(record.question_id, record.task) for record in read_records(tmp_path / "o")]
    assert made == [("id0", "answering"), *((f"id{n}", task) for n in (1, 2) for task in ("planning", "answering"))]
    assert "hotpotqa: 1 questions answered directly" in (tmp_path / "o" / "README.md").read_text("utf-8")


def test_no_question_left_is_an_error(tmp_path, source):
    other = write_lines(tmp_path / "o.jsonl", [hotpot_row(5000)])
    with pytest.raises(ValueError, match="hotpotqa: 1 x no annotation for the question"):
        build([Source("hotpotqa", "hotpotqa", other, source.annotations)], BuildOptions(str(tmp_path / "out")))


def test_source_on_the_command_line():
    assert Source.parse("two_wiki:f.json") == Source("two_wiki", "two_wiki", "f.json", None)
    assert Source.parse("world=hotpotqa:f:t") == Source("world", "hotpotqa", "f", "t")
    with pytest.raises(ValueError, match="write it as READER:FILE"):
        Source.parse("hotpotqa")


def test_a_colon_inside_a_path_or_an_address_cuts_no_source(tmp_path):
    drive, other = r"C:\data\train.json", "d:/replies.jsonl"
    assert Source.parse(f"hotpotqa:{drive}") == Source("hotpotqa", "hotpotqa", drive)
    assert Source.parse(f"x=hotpotqa:{drive}:{other}") == Source("x", "hotpotqa", drive, other)
    assert Source.parse("hotpotqa:s3://bucket/train.json") == Source("hotpotqa", "hotpotqa", "s3://bucket/train.json")
    (tmp_path / "10:30").mkdir()
    path = write_lines(tmp_path / "10:30" / "train.json", [])
    assert Source.parse(f"hotpotqa:{path}").location == str(path)
    assert Source.parse(f"hotpotqa:{path}:r:s.jsonl").annotations == "r:s.jsonl"


def test_an_error_comes_at_its_turn_and_leaves_nothing_running():
    found = []

    async def work(number):
        if number == 2:
            raise ValueError("two")
        await asyncio.sleep(60 if number > 2 else 0)

    async def go():
        with pytest.raises(ValueError, match="two"):
            async with aclosing(in_order(iter(range(10)), work, 4)) as results:
                async for number, _ in results:
                    found.append(number)
        return len(asyncio.all_tasks())

    assert asyncio.run(go()) == 1
    assert found == [0, 1]


def both_ways(tmp_path, questions, replies, **options):
    """Records of the recorded teacher, and of the same replies through the path of a teacher LLM."""
    build([Source("hotpotqa", "hotpotqa", questions, replies)], BuildOptions(str(tmp_path / "a"), **options))
    bare = [Source("hotpotqa", "hotpotqa", questions)]
    build(bare, BuildOptions(str(tmp_path / "b"), **options), lambda: recorded_client(replies))
    return [shards(tmp_path / name) for name in ("a", "b")]


@pytest.mark.parametrize("first_subquery", ["main_question", "generated"])
def test_the_llm_path_gives_the_records_of_the_recorded_teacher(tmp_path, first_subquery):
    # No questions of one hop: their sub-query is the question in its own words, which no teacher may hand in.
    options = WorldOptions(train=40, validation=0, test=0, common_knowledge=0.0, one_hop=0.0, noise=0.3)
    world = generate_world(options, "train")
    rows = list(world.teacher_rows())
    # What neither can label: nothing recorded, and no triples of a document.
    del rows[3]
    rows[5]["triples"] = {title: [] for title in rows[5]["triples"]}
    questions, replies = (
        write_lines(tmp_path / "q.jsonl", world.question_rows()),
        write_lines(tmp_path / "t.jsonl", rows),
    )
    recorded, through = both_ways(tmp_path, questions, replies, first_subquery=first_subquery, validation_fraction=0.3)
    assert recorded == through
    assert len({record.question_id for split in recorded for record in read_records(tmp_path / "a" / split)}) == 38
    drops = build_facts(tmp_path / "b")["drops"]["hotpotqa"]
    assert drops == {"no helpful document": 1, "a helpful document has no triples": 1}


@pytest.mark.parametrize("split", ["train", "dev"])
def test_real_questions_give_the_same_records_both_ways(tmp_path, split):
    questions, replies = (str(shared(f"{folder}hotpotqa_{split}.jsonl")) for folder in ("", "teacher/"))
    recorded, through = both_ways(tmp_path, questions, replies)
    assert recorded == through
    assert set(recorded) == {"train-00000.jsonl", "validation-00000.jsonl"}


@pytest.mark.parametrize("concurrency", [1, 3])
def test_results_keep_their_order_and_work_its_limit(concurrency):
    taken, at_work, most = [], 0, 0

    async def work(number):
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        for _ in range(50 if number == 0 else 6 - number % 5):
            await asyncio.sleep(0)
        at_work -= 1
        return -number

    async def go():
        return [pair async for pair in in_order((taken.append(n) or n for n in range(100)), work, concurrency)]

    assert asyncio.run(go()) == [(number, -number) for number in range(100)]
    assert most == concurrency
