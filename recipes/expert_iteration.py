r"""Expert iteration: a student answers each training question several times and learns from its successful runs.

    python recipes/expert_iteration.py --config recipes/configs/smollm2_135m_expert_cpu.yaml

Each round samples K runs per question with the student in the loop, keeps runs by score, recall and length, trains on
the kept runs with the usual recipe, and tests the new student on held-out questions (like STaR, Zelikman et al., 2022,
and ReST-EM, Singh et al., 2024). Every step is a command that you can run alone; `--dry-run` prints the commands. The
same command continues a stopped run.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tripletune.core.command_line import parse_command_line, to_arguments
from tripletune.core.options import other_default, setting
from tripletune.core.program import run_program
from tripletune.data_builders.trajectories.options import TrajectoryOptions
from tripletune.eval.systems import read_options
from tripletune.recipes.demo import follow


@dataclass(frozen=True, slots=True)
class KeepOptions(TrajectoryOptions):
    """The runs to keep."""

    min_score: tuple[str, ...] = other_default(TrajectoryOptions, "min_score", ("exact_match=1",))
    no_repairs: bool = other_default(TrajectoryOptions, "no_repairs", True)
    min_recall: float | None = other_default(TrajectoryOptions, "min_recall", 1.0)
    shortest: int | None = other_default(TrajectoryOptions, "shortest", 1)


@dataclass
class TrainingStep:
    """How a student's adapter is trained on the kept runs."""

    recipe: str = setting("cirag_distill", "training program in recipes/", choices=("cirag_distill", "ras_multitask"))
    config: str = setting("", "YAML file of the training program")
    settings: dict[str, Any] = setting({}, "settings that override the YAML file, for example {train.epochs: 1}")
    launcher: str = setting("recipes/accelerate/cpu.yaml", "accelerate's configuration file")


@dataclass
class ExpertConfig:
    """All rounds."""

    output_dir: str = setting("runs/expert", "folder of all rounds")
    student: str = setting("", "initial student: run, adapter or export folder")
    rounds: int = setting(2, "number of rounds", at_least=1)
    samples: int = setting(4, "runs per question and round (K)", at_least=1)
    loop: dict[str, Any] = setting({}, "options of `tripletune eval run` and the system, except student and data")
    questions: dict[str, Any] = setting({}, "options for the training questions, such as data and corpus")
    exam: dict[str, Any] = setting({}, "options for the held-out questions, such as data and corpus")
    draw: str = setting("student", "model that samples its replies at temperature 1", choices=("student", "teacher"))
    first_sample: int = setting(0, "seed of the first sample; each next sample has the next number", at_least=0)
    keep: KeepOptions = field(default_factory=KeepOptions)
    train: TrainingStep = field(default_factory=TrainingStep)

    def check(self) -> list[str]:
        """Return messages about missing settings, and about options that the loop does not have."""
        needed = {name: getattr(self, name) for name in ("student", "loop", "questions", "exam")}
        needed["train.config"] = self.train.config
        found = [f"{name}: not set" for name, value in needed.items() if not value]
        for name, values in (("questions", self.questions), ("exam", self.exam)) if not found else ():
            try:
                read_options(self.loop | values | {"output": self.output_dir})
            except ValueError as error:
                found.append(f"loop, {name}: {error}")
        return found

    def run_command(self, student: str, values: dict[str, Any], output: str, sample: int | None = None) -> list[str]:
        """Return the command that runs the loop with a student."""
        role = "integrator" if self.loop["system"] == "cirag" else "model"
        given = {role: student, "ledger": f"{self.output_dir}/ledger.sqlite", "output": output}
        options, teacher = read_options(self.loop | values | given)
        if sample is not None and self.draw == "teacher" and teacher is None:
            raise ValueError("draw: teacher samples from loop.teacher_model, which is not set: set it")
        if sample is not None and self.draw == "student":
            options.student_seed = sample
        elif sample is not None and teacher is not None:
            teacher = replace(teacher, temperature=1.0, seed=sample)
        chat_model = to_arguments(teacher, "teacher") if teacher else []
        return ["tripletune", "eval", "run", *to_arguments(options), *chat_model]


def steps(config: ExpertConfig) -> Iterator[tuple[str, str, str]]:
    """Yield each step's title, command, and the file that shows that the step is done."""
    home, student = config.output_dir, config.student

    def run(output: str, values: dict[str, Any], sample: int | None = None) -> tuple[str, str]:
        return shlex.join(config.run_command(student, values, f"{home}/{output}", sample)), f"{output}/metrics.json"

    yield "Test the initial student on held-out questions", *run("exam-0", config.exam)
    for number in range(1, config.rounds + 1):
        folder = f"round-{number}"
        runs = [f"{folder}/sample-{sample}" for sample in range(config.samples)]
        for sample, output in enumerate(runs):
            title = f"Round {number}: run sample {sample + 1} of {config.samples}"
            yield title, *run(output, config.questions, config.first_sample + sample)
        data = f"{folder}/trajectories"
        results = (word for one in runs for word in ("--results", f"{home}/{one}"))
        build = ["tripletune", "build", "trajectories", *results]
        keep = to_arguments(TrajectoryOptions(**asdict(config.keep)))
        build += ["--ledger", f"{home}/ledger.sqlite", *keep, "--overwrite", "--output", f"{home}/{data}"]
        yield f"Round {number}: keep the best runs", shlex.join(build), f"{data}/README.md"
        settings = {**config.train.settings, "model.adapter": student, "data.train": f"{home}/{data}"}
        student = f"{home}/{folder}/student"
        train = ["accelerate", "launch", "--quiet", "--config_file", config.train.launcher]
        train += [f"recipes/{config.train.recipe}.py", "--config", config.train.config]
        for name, value in {**settings, "output_dir": student}.items():
            train += [f"--{name}", ",".join(map(str, value)) if isinstance(value, list) else str(value)]
        yield f"Round {number}: train", shlex.join(train), f"{folder}/student/final/training.json"
        yield f"Round {number}: test on held-out questions", *run(f"exam-{number}", config.exam)
    exams = shlex.join(f"{home}/exam-{number}" for number in range(config.rounds + 1))
    yield "Compare all students with the initial student", f"tripletune eval compare --across model {exams}", ""


def main(config: ExpertConfig, dry_run: bool = False) -> int:
    """Run the missing steps; return the exit code of a failed step, else 0."""
    return follow(config, list(steps(config)), dry_run)


def run(argv: list[str] | None = None) -> int:
    """Run from a command line; return the exit code of a failed step, 2 for bad input, else 0."""
    return run_program(lambda: main(*parse_command_line(ExpertConfig, __doc__ or "", argv, prog="tripletune iterate")))


if __name__ == "__main__":
    sys.exit(run())
