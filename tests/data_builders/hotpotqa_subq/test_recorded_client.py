import asyncio
import json
from pathlib import Path

import pytest

from tripletune.data_builders.hotpotqa_subq.build import BuildOptions, build
from tripletune.data_builders.hotpotqa_subq.recorded_client import RecordedClient
from tripletune.data_builders.hotpotqa_subq.sources import Source
from tripletune.data_builders.hotpotqa_subq.teacher import FILTER_ROLE, QUERY_ROLE, TRIPLES_ROLE
from tripletune.data_builders.world.build import WorldOptions, generate_world
from tripletune.models.data.records import read_records
from tripletune.models.llm.client import CallError

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


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


def test_questions_marked_as_direct_are_so_both_ways(tmp_path):
    options = WorldOptions(train=12, validation=0, test=0, common_knowledge=0.5, one_hop=0.0)
    world = generate_world(options, "train")
    questions, replies = (
        write(tmp_path / "q.jsonl", world.question_rows()),
        write(tmp_path / "t.jsonl", world.teacher_rows()),
    )
    recorded, through = both_ways(tmp_path, questions, replies, split_name="train")
    assert recorded == through
    assert sum(r.action.value == "[NO_RETRIEVAL]" for r in read_records(tmp_path / "b") if r.task == "planning") == 6


@pytest.mark.parametrize("split", ["train", "dev"])
def test_real_questions_give_the_same_records_both_ways(tmp_path, split):
    questions, replies = SHARED / f"hotpotqa_{split}.jsonl", SHARED / "teacher" / f"hotpotqa_{split}.jsonl"
    if not replies.is_file():
        pytest.skip(f"{replies} is not on this machine")
    recorded, through = both_ways(tmp_path, str(questions), str(replies))
    assert recorded == through
    assert set(recorded) == {"train-00000.jsonl", "validation-00000.jsonl"}


ROW = {
    "_id": "q",
    "helpful": ["Straße A", "Gone"],
    "subqueries": [{"title": "strasse a", "question": "Who?"}],
    "triples": {"Straße A": [["a", "b", "c"]]},
}


def reply(client, role, prompt, question_id="q"):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": prompt}]
    return json.loads(asyncio.run(client.chat(messages, role=role, question_id=question_id)).text)


def test_titles_are_compared_as_the_recorded_teacher_compares_them(tmp_path):
    client = RecordedClient(write(tmp_path / "t.jsonl", [ROW]))
    prompt = "Question: x\n\nDocuments:\n[1] Other\ntext\n\n[2] STRASSE A\ntext"
    # A title that is not shown is no document at all: the checks say so.
    assert reply(client, FILTER_ROLE, prompt)["documents"] == [2, 0]
    assert reply(client, QUERY_ROLE, "Main question: x\n\nDocument: Straße A\ntext") == {"question": "Who?"}
    assert reply(client, TRIPLES_ROLE, "Document: Straße A\ntext") == {"triples": [["a", "b", "c"]]}
    assert reply(client, f"{TRIPLES_ROLE}.repair", "Document: B\ntext") == {"triples": []}
    assert reply(client, FILTER_ROLE, prompt, "another")["documents"] == []
    with pytest.raises(CallError, match="role 'plan'"):
        reply(client, "plan", "x")
