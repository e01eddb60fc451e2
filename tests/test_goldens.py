"""What a user keeps is what it was: data sets, answers, scores, losses and replies, against `tests/goldens/`.

`goldens/digests.json` has a digest of each text and the losses. The other files are excerpts that a reader of a diff
understands: the first record of a data set, the first row and trace of a system, all answers, all replies.
`GOLDENS=write python -m pytest tests/test_goldens.py` writes both again. `GOLDENS=FOLDER` keeps the whole texts behind
the digests: of two checkouts, `diff -r` shows what changed. `tests/stores/` holds what an older revision wrote.
"""

import hashlib
import json
import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.checkpoints.conftest import add_run_files, train_tiny
from tests.cli import run
from tests.train import test_grpo
from tests.train.test_contract import CASES
from tests.train.test_grpo import make as make_grpo  # noqa: F401

HERE = Path(__file__).parent
GOLDENS = HERE / "goldens"
DIGESTS = GOLDENS / "digests.json"
STORES = HERE / "stores"
# Nobody reads a longer one in a diff, for example all figures of a report.
LONGEST_EXCERPT = 10_000
KEPT = os.environ.get("GOLDENS", "")
WRITE = KEPT == "write"
WORLD = ["--train", 12, "--validation", 4, "--test", 12, "--seed", 5, "--common-knowledge", 0.1]
SYSTEMS = "cirag gear gold_passages ircot no_retrieval ppr random_passages ras react self_ask standard t2rag thrag"
LIMITS = ["--max-plan-tokens", 8, "--max-answer-tokens", 8, "--dtype", "float32"]
STEPS = {"train.gradient_accumulation": 1, "train.max_steps": 3, "train.save_steps": 3, "train.eval_steps": 3}
# Times, which of two equal calls at once was sent, and sums of 32-bit numbers.
PASSING = re.compile(r"seconds|structuring_seconds|session|latency|cached.*|sent|score")


@pytest.fixture(scope="module")
def goldens():
    """The file's values by name; those of tests that ran are written back."""
    values = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    yield values
    if WRITE:
        DIGESTS.write_text(json.dumps(dict(sorted(values.items())), indent=1) + "\n")


def as_text(value):
    return json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def excerpt(value):
    """What a reader of a diff sees: the first row of JSON lines or of a list of rows, or all of a short list."""
    if isinstance(value, str):
        return as_text(json.loads(value.splitlines()[0])) if value else ""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return as_text(value[0])
    return as_text(value)


def check_excerpt(name, value):
    path = GOLDENS / f"{name}.json"
    text = excerpt(value)
    if len(text) > LONGEST_EXCERPT:
        return
    if WRITE:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"the first row or the answers of {name} changed"


@pytest.fixture
def check(goldens):
    """`check(name, value)` compares a text or JSON with its golden digest, or `nearly` numbers."""

    def compare(name, value, nearly=False):
        if not nearly:
            check_excerpt(name, value)
            text = value if isinstance(value, str) else as_text(value).removesuffix("\n")
            value = hashlib.sha256(text.encode()).hexdigest()[:16]
            if KEPT and not WRITE:
                path = Path(KEPT, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text + "\n", encoding="utf-8")
        if WRITE:
            goldens[name] = value
        expected = goldens.get(name)
        assert expected is not None, f"{name} has no golden: GOLDENS=write python -m pytest tests/test_goldens.py"
        assert value == (pytest.approx(expected, rel=1e-4, abs=1e-5) if nearly else expected), (
            f"{name} is another: GOLDENS=FOLDER keeps what to compare"
        )

    return compare


def lasting(value):
    """A value of JSON without what no second run has; floats to six digits."""
    if isinstance(value, dict):
        return {key: lasting(item) for key, item in value.items() if not PASSING.fullmatch(key)}
    if isinstance(value, list):
        return [lasting(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def rows(path):
    return [lasting(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def done(*words):
    ran = run(*words)
    assert ran.code == 0, ran.err


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("goldens") / "world"
    done("build world", *WORLD, "--noise", 0, "--output", folder)
    (folder / "prompts").mkdir()
    (folder / "prompts" / "cirag_integrate.md").write_text("Go.")
    return folder


def test_worlds(world, tmp_path, check):
    for name in ("train.jsonl", "train.teacher.jsonl", "test.corpus.jsonl", "test.triples.jsonl"):
        check(f"world/{name}", (world / name).read_text())
    done("build world", *WORLD, "--noise", 0.3, "--output", tmp_path / "odd")
    check("odd/train.jsonl", (tmp_path / "odd" / "train.jsonl").read_text())


def test_data_sets(world, tmp_path, check):
    source = f"hotpotqa:{world}/train.jsonl:{world}/train.teacher.jsonl"
    distracted = ["--distractors", 1, "--failed-searches", 0.3, "--triple-file", f"{world}/train.triples.jsonl"]
    files = ["--train", f"{world}/train.jsonl", "--evaluation", f"{world}/test.jsonl"]
    for name, words in {
        "subq": ["build subq", "--source", source, "--validation-fraction", 0.3],
        "subq_generated": ["build subq", "--source", source, "--first-subquery", "generated", *distracted],
        "pairs": ["build pairs", "--source", f"triples:{world}/train.triples.jsonl", "--validation-rows", 5],
        "corpus": ["build corpus", "--reader", "hotpotqa", *files, "--train-count", 5, "--evaluation-count", 5],
    }.items():
        done(*words, "--output", tmp_path / name)
        for path in sorted((tmp_path / name).glob("*.jsonl")):
            check(f"{name}/{path.name}", path.read_text(encoding="utf-8"))


def test_answers_scores_report_and_trajectories(world, tiny_encoder, tmp_path, check):
    found = ["--corpus", f"{world}/test.corpus.jsonl", "--triples", f"{world}/test.triples.jsonl"]
    asked = ["--task", "hotpotqa", "--data", f"{world}/test.jsonl", "--oracle", f"{world}/test"]
    done("eval", "run", "--system", SYSTEMS.replace(" ", ","), *asked, *found, "--encoder", tiny_encoder,
         "--output", tmp_path / "run")  # fmt: skip
    folders = [tmp_path / "run" / "hotpotqa" / name for name in SYSTEMS.split()]
    for folder in folders:
        results = rows(folder / "results.jsonl")
        check(f"predictions/{folder.name}", [row["prediction"] for row in results])
        check(f"answers/{folder.name}", results)
        check(f"scores/{folder.name}", lasting(json.loads((folder / "metrics.json").read_text())))
    done("eval", "report", *folders, "--output", tmp_path / "report")
    (group,) = json.loads((tmp_path / "report" / "report.json").read_text())["groups"]
    check("report/figures", lasting([one["figures"] for one in group["runs"]]))
    check("report/pairs", lasting(group["pairs"]))
    done("build trajectories", "--results", folders[0], "--output", tmp_path / "trajectories")
    check("trajectories", (tmp_path / "trajectories" / "train-00000.jsonl").read_text(encoding="utf-8"))


# What is sampled, as the replies of on-policy training are, differs between kinds of processors.
@pytest.mark.parametrize("case", [case for case in CASES if "on_policy" not in case])
def test_losses(case, make_task, tmp_path, check):
    from tripletune.train import train

    name, own, options = CASES[case]
    train(make_task(name, {**own, **STEPS}, **options))
    found = rows(tmp_path / "run" / "losses.jsonl") + rows(tmp_path / "run" / "evaluations.jsonl")
    check(f"losses/{case}", [row["loss"] for row in found], nearly=True)


def test_losses_of_reinforcement(
    make_grpo,  # noqa: F811
    tmp_path,
    check,
    monkeypatch,
):
    from tripletune.train import train

    monkeypatch.setattr(test_grpo.grpo, "reward_parts", test_grpo.by_length)
    train(make_grpo())
    found = zip(rows(tmp_path / "run" / "losses.jsonl"), rows(tmp_path / "run" / "rewards.jsonl"))
    check("losses/grpo", [value for one, two in found for value in (one["loss"], two["reward"], two["entropy"])], True)


def test_replies_and_an_export(world, records, write_records, tiny_model, tiny_encoder, tmp_path, check):
    train_tiny(tiny_model("smollm2"), tiny_encoder, tmp_path / "trained" / "final")
    add_run_files(tmp_path / "trained")
    export = tmp_path / "export"
    done("checkpoints", "export", tmp_path / "trained", "--output", export)
    done("checkpoints", "verify", export)
    done("eval", "records", "--model", export, "--data", write_records(records, "test"), "--split", "test", *LIMITS,
         "--output", tmp_path / "replies")  # fmt: skip
    check("replies/graph_llm", [row["reply"] for row in rows(tmp_path / "replies" / "results.jsonl")])
    done("eval", "run", "--system", "no_retrieval", "--task", "hotpotqa", "--data", f"{world}/test.jsonl",
         "--teacher", "hf", "--teacher-model", tiny_model("llama"), "--teacher-dtype", "float32", "--limit", 4,
         "--max-answer-tokens", 8, "--output", tmp_path / "chat")  # fmt: skip
    check("replies/chat", [row["prediction"] for row in rows(tmp_path / "chat" / "results.jsonl")])


def stored(name, folder):
    """A file that revision b3f73d5 wrote, from its SQL text."""
    with closing(sqlite3.connect(folder / name)) as database:
        database.executescript((STORES / f"{name}.sql").read_text(encoding="utf-8"))
    return folder / name


def test_a_ledger_of_an_older_revision_answers(tmp_path, check):
    nobody = ["--teacher", "openai", "--teacher-model", "m", "--teacher-url", "http://127.0.0.1:9/v1"]
    done("build subq", "--source", f"hotpotqa:{STORES}/questions.jsonl", *nobody, "--set", "teacher.attempts=1",
         "--teacher-ledger", stored("ledger.sqlite", tmp_path), "--output", tmp_path / "out")  # fmt: skip
    check("subq_teacher", (tmp_path / "out" / "train-00000.jsonl").read_text(encoding="utf-8"))


def test_a_triple_store_of_an_older_revision_is_read(tmp_path, check):
    done("rag", "export", "--corpus", STORES / "corpus.jsonl", "--store", stored("triples.sqlite", tmp_path),
         "--output", tmp_path / "triples.jsonl")  # fmt: skip
    check("exported_triples", (tmp_path / "triples.jsonl").read_text(encoding="utf-8"))
