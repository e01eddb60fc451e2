"""CIRAG from the command line: the oracle of a world, and a batch teacher whose replies a script writes."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.cli import read_lines, write_lines
from tests.llm.provider import answer_batch
from tripletune.core.calls import Sampling
from tripletune.core.data.pairs import read_trajectories
from tripletune.core.data.passages import passage_id, read_corpus
from tripletune.data_builders.corpus import CorpusOptions, build_corpus
from tripletune.data_builders.trajectories.build import main as build_trajectories
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.data_builders.world.oracle import WorldOracle
from tripletune.eval import context_links, load_task, task_questions
from tripletune.eval.__main__ import main
from tripletune.eval.results import read_rows_with_added_scores
from tripletune.llm.programs import main as calls
from tripletune.rag.systems.cirag.student import warning_of_other_prompt
from tripletune.rag.triple_store import gold_links_in_file

OPTIONS = WorldOptions(seed=5, train=8, validation=0, test=8, common_knowledge=0)
ROOT = Path(__file__).resolve().parents[2]
SHORT = ROOT / "recipes" / "configs" / "cirag_short_prompts"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    write_world(OPTIONS, folder)
    return folder


def command(world, output, *more, oracle=True, split="test"):
    teacher = ["--oracle", f"{world}/{split}"] if oracle else []
    return [
        "run", "--system", "cirag", "--task", "hotpotqa", "--data", f"{world}/{split}.jsonl", "--output", str(output),
        "--corpus", f"{world}/{split}.corpus.jsonl", "--set", "rerank=no", *teacher, *more,
    ]  # fmt: skip


def rows(folder):
    found = read_lines(folder / "results.jsonl")
    for row in found:
        for name in ("seconds", "structuring_seconds", "cached"):
            row["trace"].pop(name)
    return found


@pytest.fixture(scope="module")
def run(world, tmp_path_factory):
    output = tmp_path_factory.mktemp("run")
    assert main(command(world, output)) == 0
    return output


def test_supporting_passages_are_found_by_content_and_by_gold_links_alike(world, run, tmp_path):
    supporting = {row["id"]: set(row["supporting"]) for row in rows(run)}
    assert all(supporting.values())
    build = CorpusOptions("hotpotqa", evaluation=f"{world}/test.jsonl", evaluation_count=0)
    build_corpus(build, tmp_path / "corpus")
    gold = tmp_path / "corpus" / "evaluation.gold.jsonl"
    assert gold_links_in_file(gold) == supporting
    named = [{"id": str(n), "title": one.title, "text": f"  {one.text}"}
             for n, one in enumerate(read_corpus(world / "test.corpus.jsonl"))]  # fmt: skip
    corpus = tmp_path / "named.jsonl"
    write_lines(corpus, named)
    contents = {passage_id(row["title"], row["text"].strip()): row["id"] for row in named}
    questions = list(task_questions(load_task("hotpotqa"), f"{world}/test.jsonl"))
    assert context_links(questions, corpus) == {
        name: {contents[one] for one in passages} for name, passages in supporting.items()
    }
    first = contents[min(supporting[questions[0].id])]
    write_lines(corpus, (row for row in named if row["id"] != first))
    assert questions[0].id not in context_links(questions, corpus)
    assert main(["score", str(run), "--metrics", "recall@15", "--gold", str(gold)]) == 0
    assert {row.scores["recall@15"] for row in read_rows_with_added_scores(run)} == {1.0}


def reply_to_batch(home, oracle):
    """Import the oracle's replies to the newest file of requests; how many files there are."""
    requests, replies = sorted((home / "ledger.sqlite.batch").glob("*.jsonl")), home / "replies.jsonl"
    answer_batch(requests[-1], replies, lambda body: asyncio.run(oracle.complete(body["messages"], Sampling())).text)
    assert calls(["batch", "import", "--ledger", str(home / "ledger.sqlite"), "--replies", str(replies)]) == 0
    return len(requests)


def test_a_batch_teacher_writes_the_same_files_and_goes_on_with_the_replies(world, run, tmp_path, capsys):
    oracle = WorldOracle.open(world, "test")
    args = ["--teacher", "batch", "--teacher-model", "some-model"]
    first, second = tmp_path / "a", tmp_path / "b"
    for output in (first, second):
        assert main(command(world, output, *args, oracle=False)) == 3
        assert "8 wait." in capsys.readouterr().err
    name = "ledger-requests-0001.jsonl"
    assert (first / "ledger.sqlite.batch" / name).read_bytes() == (second / "ledger.sqlite.batch" / name).read_bytes()
    rounds, code = 0, 3
    while code == 3:
        rounds += 1
        assert reply_to_batch(first, oracle) == rounds
        code = main(command(world, first, *args, oracle=False))
    assert code == 0
    assert rounds >= 4, "entities, triples, integration and answer are a batch each"
    assert [row["prediction"] for row in rows(first)] == [row["prediction"] for row in rows(run)]


def test_three_training_sets_are_one_run_with_a_request_file_a_round(world, tmp_path):
    """docs/guide/cirag.md, "Three training sets at once", with two sets."""
    home, oracle = tmp_path / "runs", WorldOracle.open(world, "train")
    other = tmp_path / "other.yaml"
    other.write_text((ROOT / "eval" / "tasks" / "hotpotqa.yaml").read_text())
    for name, seed in (("hotpotqa", 0), ("other", 1)):
        build_corpus(CorpusOptions("hotpotqa", f"{world}/train.jsonl", train_count=4, seed=seed), home / name)
    folder = str(home / "{task}")
    words = [
        "run", "--system", "cirag", "--tasks", f"hotpotqa,{other}", "--data", f"{folder}/train.jsonl", "--corpus",
        f"{folder}/train.corpus.jsonl", "--gold", f"{folder}/train.gold.jsonl", "--index", f"{folder}/index", "--set",
        "rerank=no", "--teacher", "batch", "--teacher-model", "some-model", "--output", str(home),
    ]  # fmt: skip
    rounds = 0
    while (code := main(words)) == 3:
        rounds += 1
        assert reply_to_batch(home, oracle) == rounds
    assert code == 0
    results = [word for name in ("hotpotqa", "other") for word in ("--results", str(home / name / "cirag"))]
    assert build_trajectories([*results, "--output", str(home / "trajectories")]) == 0
    found = [one.question_id for one in read_trajectories(home / "trajectories")]
    assert found == [row["id"] for name in ("hotpotqa", "other") for row in rows(home / name / "cirag")]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model", "folder"], "leave out --model"),
        (["--set", "rerank=yes"], "reranks triples with an encoder, but BM25 has none: give --encoder SPEC"),
        (["--set", "extraction=store"], "needs triples: give --triples FILE, --extractor MODEL, or other options"),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2(world, tmp_path, error_of, more, message):
    assert main(command(world, tmp_path, *more)) == 2
    assert message in error_of()


def test_gold_links_of_other_questions_are_refused_and_missing_ones_told(world, tmp_path, capsys):
    gold = tmp_path / "gold.jsonl"
    gold.write_text('{"question_id": "somebody else", "passages": ["p"]}\n')
    assert main(command(world, tmp_path / "out", "--gold", str(gold))) == 2
    assert "has no links of these questions: is it the file of another split?" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    first = json.loads((world / "test.jsonl").read_text().splitlines()[0])["_id"]
    passages = [passage.id for passage in read_corpus(world / "test.corpus.jsonl")]
    write_lines(gold, [{"question_id": first, "passages": passages}])
    assert main(command(world, tmp_path / "out", "--gold", str(gold))) == 0
    assert "7 questions have no gold link" in capsys.readouterr().err


# From the oracle's run to the student in its place: docs/evidence/cirag_student.md, at toy size.


@pytest.fixture(scope="module")
def student(tmp_path_factory, tiny_llama):
    """A run folder with an adapter, as the recipe leaves it."""
    import torch
    from peft import LoraConfig, get_peft_model

    from tripletune.models.loading import load_causal_lm

    model, tokenizer = load_causal_lm(tiny_llama, torch.float32)
    torch.manual_seed(5)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    folder = tmp_path_factory.mktemp("run")
    adapted.save_pretrained(folder / "final")
    tokenizer.save_pretrained(folder / "final")
    return folder


def short_command(world, split, output, *more):
    return command(
        world, output, "--set", f"prompts={SHORT}", "--set", "repairs=0", "--set", "max_integration_tokens=4",
        "--top-k", "1", "--limit", "8" if split == "train" else "3", *more, split=split,
    )  # fmt: skip


def test_the_chain_of_commands(world, student, tmp_path):
    oracle = tmp_path / "oracle"
    assert main(short_command(world, "train", oracle)) == 0
    built = ["--results", str(oracle), "--output", str(tmp_path / "data"), "--validation-fraction", "0.4"]
    assert build_trajectories(built) == 0
    chats = [one for split in ("train", "validation") for one in read_trajectories(tmp_path / "data", split)]
    assert len(chats) == 8
    assert {one.messages[0]["content"] for one in chats} == {(SHORT / "cirag_integrate.md").read_text().strip()}
    decisions = ["decisions", "--data", str(tmp_path / "data"), "--model", str(student), "--dtype", "float32"]
    decisions += ["--max-reply-tokens", "4", "--limit", "3", "--output", str(tmp_path / "decisions")]
    assert main(decisions) == 0
    assert json.loads((tmp_path / "decisions" / "metrics.json").read_text())["metrics"]["malformed"]["mean"] == 1.0
    scored = read_lines(tmp_path / "decisions" / "results.jsonl")
    assert [(row["completion_tokens"], row["error"]) for row in scored] == [(4, "")] * 3

    # The oracle extracts and answers, the student integrates.
    more = ["--integrator", str(student), "--teacher-dtype", "float32", "--set", "max_prompt_tokens=900"]
    output = tmp_path / "student"
    assert main(short_command(world, "test", output, *more)) == 0
    answered = rows(output)
    assert len(answered) == 3
    for row in answered:
        assert row["error"] == ""
        calls = row["trace"]["tallies"]
        assert calls["calls.cirag.integrate"] == calls["cut_off.cirag.integrate"] == 1
        assert calls["calls.cirag.triples"] >= 1
        assert row["trace"]["stop_reason"] == "malformed"
    settings = json.loads((output / "settings.json").read_text())
    assert settings["teacher"].startswith("oracle:")
    assert settings["integrator"]["weights"]
    # The same command answers out of the results; another student's weights are another run.
    assert main(short_command(world, "test", output, *more)) == 0
    assert rows(output) == answered

    # A sample has a number, which is part of the keys of the student's calls and of no other's.
    numbered = ["--ledger", str(tmp_path / "samples.sqlite"), "--set"]
    for seed in ("3", "4"):
        assert main(short_command(world, "test", tmp_path / seed, *more, *numbered, f"student_seed={seed}")) == 0
    first, second = (rows(tmp_path / seed)[0]["trace"]["details"]["calls"] for seed in ("3", "4"))
    assert first["cirag.integrate"] != second["cirag.integrate"]
    assert first["cirag.triples"] == second["cirag.triples"]


def test_a_student_that_is_asked_in_other_words_is_told(student, tiny_llama):
    assert warning_of_other_prompt(str(student), str(SHORT)) is None  # it brings no prompt
    assert warning_of_other_prompt(str(tiny_llama), None) is None
    learned = student / "final" / "prompt.md"
    learned.write_text((SHORT / "cirag_integrate.md").read_text().strip() + "\n")
    try:
        assert warning_of_other_prompt(str(student), str(SHORT)) is None
        warning = warning_of_other_prompt(str(student), None)
        assert warning is not None
        assert str(learned) in warning
    finally:
        learned.unlink()
