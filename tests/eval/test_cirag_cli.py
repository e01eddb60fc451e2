"""CIRAG from the command line: the oracle of a world, and a batch teacher whose replies a script writes."""

from __future__ import annotations

import asyncio
import json

import pytest

from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.data_builders.world.oracle import WorldOracle
from tripletune.eval.__main__ import main
from tripletune.models.llm.client import Sampling
from tripletune.models.llm.programs import main as calls

OPTIONS = WorldOptions(seed=5, train=0, validation=0, test=8, common_knowledge=0)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    write_world(OPTIONS, folder)
    return folder


def command(world, output, *more, oracle=True):
    teacher = ["--oracle", f"{world}/test"] if oracle else []
    return [
        "run", "--system", "cirag", "--task", "hotpotqa", "--data", f"{world}/test.jsonl", "--output", str(output),
        "--corpus", f"{world}/test.corpus.jsonl", "--set", "rerank=no", *teacher, *more,
    ]  # fmt: skip


def rows(folder):
    found = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    for row in found:
        row["trace"].pop("seconds")
    return found


@pytest.fixture(scope="module")
def run(world, tmp_path_factory):
    output = tmp_path_factory.mktemp("run")
    assert main(command(world, output)) == 0
    return output


def test_the_oracle_answers_and_everything_is_counted(run):
    metrics = json.loads((run / "metrics.json").read_text())
    assert (metrics["system"], metrics["questions"]) == ("cirag", 8)
    assert metrics["metrics"]["exact_match"]["mean"] >= 0.95
    tallies = metrics["counts"]["tallies"]
    assert tallies["answered.triples"] >= 7
    assert tallies["calls.cirag.integrate"] == metrics["counts"]["rounds"]
    assert metrics["counts"]["actions"]["no_question"] >= 7
    assert (run / "ledger.sqlite").is_file()
    assert rows(run)[0]["trace"]["details"]["rounds"][0]["thought"]


def test_the_same_command_goes_on_and_other_options_are_refused(world, run, capsys):
    assert main(command(world, run)) == 0
    assert main(command(world, run, "--set", "candidates=7")) == 2
    assert "'candidates': 7" in capsys.readouterr().err
    assert main(command(world, run, "--top-k", "3")) == 2
    assert "'top_k': 3" in capsys.readouterr().err


def test_one_at_a_time_gives_the_same_rows(world, run, tmp_path):
    assert main(command(world, tmp_path, "--concurrency", "1")) == 0
    assert rows(tmp_path) == rows(run)


def answer(requests, replies, oracle):
    """A script in the place of a provider: one reply a request, in the layout of OpenAI's Batch API."""
    with replies.open("w") as file:
        for line in requests.read_text().splitlines():
            request = json.loads(line)
            reply = asyncio.run(oracle.complete(request["body"]["messages"], Sampling()))
            body = {
                "choices": [{"message": {"role": "assistant", "content": reply.text}, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1},
            }
            row = {"custom_id": request["custom_id"], "response": {"status_code": 200, "body": body}, "error": None}
            file.write(json.dumps(row) + "\n")


def test_a_batch_teacher_writes_the_same_files_and_goes_on_with_the_replies(world, run, tmp_path, capsys):
    oracle = WorldOracle.open(world, "test")
    args = ["--teacher-backend", "batch", "--teacher-model", "some-model"]
    first, second = tmp_path / "a", tmp_path / "b"
    for output in (first, second):
        assert main(command(world, output, *args, oracle=False)) == 3
        assert "8 questions wait. " in capsys.readouterr().err
    name = "ledger-requests-0001.jsonl"
    assert (first / "ledger.sqlite.batch" / name).read_bytes() == (second / "ledger.sqlite.batch" / name).read_bytes()
    rounds = 0
    while True:
        rounds += 1
        requests = sorted((first / "ledger.sqlite.batch").glob("*.jsonl"))
        assert len(requests) == rounds
        answer(requests[-1], tmp_path / "replies.jsonl", oracle)
        ledger = str(first / "ledger.sqlite")
        assert calls(["batch", "import", "--ledger", ledger, "--replies", str(tmp_path / "replies.jsonl")]) == 0
        code = main(command(world, first, *args, oracle=False))
        if code == 0:
            break
        assert code == 3
    assert rounds >= 4, "entities, triples, integration and answer are a batch each"
    assert [row["prediction"] for row in rows(first)] == [row["prediction"] for row in rows(run)]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model", "folder"], "leave out --model"),
        (["--teacher-model", "m"], "needs one teacher"),
        (["--set", "rerank=yes"], "reranks triples with an embedder, and BM25 has none: give --encoder SPEC"),
        (["--set", "extraction=store"], "reads triples: give --triples FILE, or other options"),
        (["--set", "reranker=no"], "did you mean rerank"),
        (["--evidence", "text"], "--evidence: system 'cirag' has no option 'evidence'"),
        (["--max-answer-tokens", "5"], "--max-answer-tokens: system 'cirag' has no option"),
        (["--set", "prompts=/nowhere"], "no such folder of prompts: /nowhere"),
        (["--oracle", "/nowhere/test"], "holds no world.json"),
        (["--gold", "/nowhere"], "no such file: /nowhere"),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2(world, tmp_path, capsys, more, message):
    assert main(command(world, tmp_path, *more)) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]


def test_a_teacher_is_not_for_systems_with_a_graph_llm(world, tmp_path, capsys):
    args = ["run", "--system", "ras", "--task", "hotpotqa", "--data", f"{world}/test.jsonl", "--output", str(tmp_path)]
    assert main([*args, "--oracle", f"{world}/test", "--evidence", "text"]) == 2
    shown = capsys.readouterr().err
    assert "--system ras works with a Graph-LLM: name its folder with --model" in shown
    assert "--oracle is for systems that prompt a language model" in shown


def test_gold_links_of_other_questions_are_refused_and_missing_ones_told(world, tmp_path, capsys):
    gold = tmp_path / "gold.jsonl"
    gold.write_text('{"question_id": "somebody else", "passages": ["p"]}\n')
    assert main(command(world, tmp_path / "out", "--gold", str(gold))) == 2
    assert "has no link of any question: is it the file of another split?" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    first = json.loads((world / "test.jsonl").read_text().splitlines()[0])["_id"]
    gold.write_text(json.dumps({"question_id": first, "passages": ["p"]}) + "\n")
    assert main(command(world, tmp_path / "out", "--gold", str(gold))) == 0
    assert "7 questions have no gold link" in capsys.readouterr().err


def test_gold_links_give_the_recall_of_supporting_passages(world, tmp_path):
    from tripletune.models.data.records import read_corpus

    ids = {passage.title: passage.id for passage in read_corpus(f"{world}/test.corpus.jsonl")}
    with (tmp_path / "gold.jsonl").open("w") as file:
        for line in (world / "test.jsonl").read_text().splitlines():
            row = json.loads(line)
            wanted = [ids[title] for title, _ in row["supporting_facts"]]
            file.write(json.dumps({"question_id": row["_id"], "passages": wanted}) + "\n")
    assert main(command(world, tmp_path / "out", "--gold", str(tmp_path / "gold.jsonl"))) == 0
    recall = json.loads((tmp_path / "out" / "metrics.json").read_text())["supporting_recall"]
    assert (recall["n"], recall["mean"] >= 0.9) == (8, True)
