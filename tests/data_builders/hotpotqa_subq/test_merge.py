import json
import shutil

import pytest

from tripletune.data_builders.__main__ import main
from tripletune.data_builders.datasets.card import BuildFacts
from tripletune.data_builders.hotpotqa_subq.build import BuildOptions, build
from tripletune.data_builders.hotpotqa_subq.merge import ShardFolder, merge, merged_facts
from tripletune.data_builders.hotpotqa_subq.output import ORDER
from tripletune.data_builders.hotpotqa_subq.questions import DropReason
from tripletune.data_builders.hotpotqa_subq.sources import Source

COUNT = 3


def question(number: int) -> dict:
    titles = [f"Book {number}", f"Author {number}"]
    return {
        # Question 11 stands twice in the file, question 5 names a title that is not in its context.
        "_id": f"q{11 if number == 13 else number}",
        "question": f"Where was the author of Book {number} born?",
        "answer": f"Town {number}",
        "type": "bridge",
        "supporting_facts": [[f"Book {-1 if number == 5 else number}", 0], [titles[1], 7 if number == 8 else 0]],
        "context": [[title, [f"{title} is here."]] for title in titles],
    }


def reply(number: int) -> dict:
    return {
        "_id": f"q{number}",
        "helpful": [f"Book {number}", f"Author {number}"] if number % 4 else [f"Author {number}"],
        "subqueries": [
            {"title": f"Book {number}", "question": f"Who wrote Book {number}?"},
            {"title": f"Author {number}", "question": f"Where was Author {number} born?"},
        ],
        "triples": {
            f"Book {number}": [[f"Book {number}", "author", f"Author {number}"]],
            f"Author {number}": [[f"Author {number}", "born in", f"Town {number}"]],
        },
    }


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def sources(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    first = lines(data / "first.jsonl", (question(n) for n in range(20)))
    second = lines(data / "second.jsonl", (question(n) | {"_id": f"q{n}"} for n in range(20, 31)))
    # No reply for questions 3 and 25.
    replies = lines(data / "replies.jsonl", (reply(n) for n in range(31) if n not in (3, 25)))
    choices = {"text": ["a", "b"], "label": ["1", "2"]}
    arc = lines(
        data / "arc.jsonl",
        ({"id": f"arc{n}", "question": f"Pick {n}.", "choices": choices, "answerKey": "2"} for n in range(7)),
    )
    return [
        Source.parse(f"one=hotpotqa:{first}:{replies}"),
        Source.parse(f"two=hotpotqa:{second}:{replies}"),
        Source.parse(f"arc_easy:{arc}"),
    ]


def build_shards(tmp_path, sources, **options) -> list[str]:
    outputs = []
    for number in range(COUNT):
        outputs.append(str(tmp_path / f"shard{number}"))
        build(sources, BuildOptions(output=outputs[-1], shard=f"{number}/{COUNT}", **options))
    return outputs


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_merged_shards_are_the_bytes_of_an_unsharded_build(tmp_path, sources, format):
    options = {"format": format, "shard_size": 17, "validation_fraction": 0.3}
    outputs = build_shards(tmp_path, sources, **options)
    whole = tmp_path / "whole"
    build(sources, BuildOptions(output=str(whole), **options))
    expected = contents(whole)
    shutil.rmtree(whole)
    numbers = merge([outputs[2], outputs[0], outputs[1]], str(whole))
    assert contents(whole) == expected
    # The comparison is of something: both splits, several shards of one, and every kind of note.
    assert {"train-00001." + format, "validation-00000." + format} < set(expected)
    assert numbers["records"] > 60
    card = expected["README.md"].decode()
    for note in ("question id seen before | 1", "not in the context | 1", "arc_easy (arc_easy) gave 7 of the 2,147"):
        assert note in card


def test_an_empty_shard_is_a_shard(tmp_path, sources):
    outputs = build_shards(tmp_path, sources[2:], limit=2)
    assert not (tmp_path / "shard2" / "train-00000.jsonl").exists()
    assert merge(outputs, str(tmp_path / "out"))["records"] == 2


def test_command_says_what_is_missing(tmp_path, sources, capsys):
    outputs = build_shards(tmp_path, sources)
    for folders, message in (
        ([outputs[0], outputs[2]], "shard 1/3 is missing"),
        ([*outputs, outputs[1]], "shard 1/3 is given twice"),
        ([*outputs[:2], str(tmp_path / "gone")], "gone has no statistics.json"),
    ):
        assert main(["merge", *folders, "--output", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err
    assert main(["merge", *outputs, "--output", outputs[0], "--overwrite"]) == 2
    assert "is one of the shards" in capsys.readouterr().err
    assert main(["merge", *outputs, "--output", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'out'}: train ")
    assert main(["merge", *outputs, "--output", str(tmp_path / "out")]) == 2
    assert "--overwrite to replace it" in capsys.readouterr().err
    assert main(["merge", *outputs, "--output", str(tmp_path / "out"), "--overwrite"]) == 0


def test_shards_of_different_builds_do_not_mix(tmp_path, sources):
    outputs = build_shards(tmp_path, sources)
    build(sources, BuildOptions(output=outputs[1], shard=f"1/{COUNT}", seed=1, overwrite=True))
    with pytest.raises(ValueError, match="option seed is 0 and 1"):
        merge(outputs, str(tmp_path / "out"))
    with open(sources[0].location, "a", encoding="utf-8") as file:
        file.write("\n")
    build(sources, BuildOptions(output=outputs[1], shard=f"1/{COUNT}", overwrite=True))
    with pytest.raises(ValueError, match="input files"):
        merge(outputs, str(tmp_path / "out"))
    build(sources, BuildOptions(output=outputs[1], shard="1/2", overwrite=True))
    with pytest.raises(ValueError, match="number of shards is 3 and 2"):
        merge(outputs, str(tmp_path / "out"))


def test_speed_options_may_differ(tmp_path, sources):
    outputs = build_shards(tmp_path, sources)
    build(sources, BuildOptions(output=outputs[1], shard=f"1/{COUNT}", concurrency=2, overwrite=True))
    assert merge(outputs, str(tmp_path / "out"))["records"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda text: text.splitlines(keepends=True)[1:], "holds more records"),
        (lambda text: [text.replace("\t3\n", "\t4\n")], "holds fewer records"),
        (lambda text: text.splitlines(keepends=True)[::-1], "out of order"),
        (lambda text: [text.replace("\t", " ")], "expected source, position, split"),
    ],
)
def test_order_that_does_not_fit_is_refused(tmp_path, sources, spoil, message):
    outputs = build_shards(tmp_path, sources)
    path = tmp_path / "shard1" / ORDER
    path.write_text("".join(spoil(path.read_text(encoding="utf-8"))), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        merge(outputs, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_whole_data_set_is_no_shard(tmp_path, sources):
    build(sources, BuildOptions(output=str(tmp_path / "whole")))
    with pytest.raises(FileNotFoundError, match=r"has no order\.tsv"):
        merge([tmp_path / "whole"], str(tmp_path / "out"))


def test_what_the_teacher_did_is_added_up(tmp_path):
    def shard(number: int, **facts) -> ShardFolder:
        options = {"shard": f"{number}/2", "output": f"out{number}"}
        return ShardFolder(
            tmp_path, number, 2, BuildFacts("T", "S.", {"a": "LLM", "b": "LLM"}, options=options, **facts)
        )

    first, *_, last = (reason.value for reason in DropReason)
    one = shard(0, repairs={"b": {"triples": 2}}, calls={"query": {"calls": 3}}, drops={"b": {last: 1}})
    two = shard(
        1,
        repairs={"b": {"filter": 1, "triples": 5}, "a": {"query": 1}},
        calls={"filter": {"calls": 4, "malformed": 1}, "query": {"calls": 1}},
        drops={"a": {first: 2}, "b": {first: 3, last: 1}},
    )
    facts = merged_facts([one, two], "out", overwrite=True)
    assert json.dumps(facts.repairs) == json.dumps({"a": {"query": 1}, "b": {"filter": 1, "triples": 7}})
    assert json.dumps(facts.calls) == json.dumps({"filter": {"calls": 4, "malformed": 1}, "query": {"calls": 4}})
    assert json.dumps(facts.drops) == json.dumps({"a": {first: 2}, "b": {first: 3, last: 2}})
    assert facts.options == {"shard": None, "output": "out", "overwrite": True}
