r"""Expert iteration: a student answers each training question several times and learns from its successful runs.

    tripletune iterate --config smollm2_135m_expert_cpu

Each round samples K runs per question with the student in the loop, keeps runs by score, recall and length, trains on
the kept runs with the usual recipe, and tests the new student on held-out questions (like STaR, Zelikman et al., 2022,
and ReST-EM, Singh et al., 2024). Every step is a command that you can run alone; `--dry-run` prints the commands. The
same command continues a stopped run.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tripletune.core.command_line import parse_command_line, to_arguments
from tripletune.core.options import other_default, setting
from tripletune.core.program import run_program
from tripletune.data_builders.trajectories.options import TrajectoryOptions
from tripletune.eval.systems import read_options
from tripletune.recipes._steps import RecipeStep, run_recipe


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
        """Return messages about missing settings, and about options that the loop does not have.

        A round takes hours, so the options of its later steps are tried before the first one.
        """
        needed = {
            "student": self.student,
            "loop": self.loop,
            "questions": self.questions,
            "exam": self.exam,
            "train.config": self.train.config,
        }
        problems = [f"{name}: not set" for name, value in needed.items() if not value]
        if problems:
            return problems
        for name, values in (("questions", self.questions), ("exam", self.exam)):
            try:
                read_options(self.loop | values | {"output": self.output_dir})
            except ValueError as error:
                problems.append(f"loop, {name}: {error}")
        return problems

    def loop_command(self, student: str, values: dict[str, Any], output: str, sample: int | None = None) -> str:
        """Return the command that runs the loop with a student.

        Args:
            values: Options for the questions, such as data and corpus.
            output: Folder of the results.
            sample: Seed of the model that samples its replies; None for greedy replies of both models.
        """
        role = "integrator" if self.loop["system"] == "cirag" else "model"
        own = {role: student, "ledger": f"{self.output_dir}/ledger.sqlite", "output": output}
        options, teacher = read_options(self.loop | values | own)
        if sample is not None:
            if self.draw == "student":
                options.student_seed = sample
            elif teacher is None:
                raise ValueError("draw: teacher samples from loop.teacher_model, which is not set: set it")
            else:
                teacher = replace(teacher, temperature=1.0, seed=sample)
        words = ["tripletune", "eval", "run", *to_arguments(options)]
        if teacher is not None:
            words += to_arguments(teacher, "teacher")
        return shlex.join(words)


def expert_steps(config: ExpertConfig) -> Iterator[RecipeStep]:
    """Yield the steps of all rounds.

    Each round begins with the student of the round before, so results and names depend on the round's number. All
    students answer the same held-out questions, so the last step can compare them.
    """
    home = config.output_dir
    student = config.student
    command = config.loop_command(student, config.exam, f"{home}/exam-0")
    yield RecipeStep("Test the initial student on held-out questions", command, "exam-0/metrics.json")
    for number in range(1, config.rounds + 1):
        folder = f"round-{number}"
        samples = [f"{folder}/sample-{index}" for index in range(config.samples)]
        for index, output in enumerate(samples):
            seed = config.first_sample + index
            command = config.loop_command(student, config.questions, f"{home}/{output}", seed)
            title = f"Round {number}: run sample {index + 1} of {config.samples}"
            yield RecipeStep(title, command, f"{output}/metrics.json")
        data = f"{folder}/trajectories"
        command = _build_command(config, [f"{home}/{output}" for output in samples], f"{home}/{data}")
        yield RecipeStep(f"Round {number}: keep the best runs", command, f"{data}/README.md")
        command = _train_command(config.train, student, f"{home}/{data}", f"{home}/{folder}/student")
        yield RecipeStep(f"Round {number}: train", command, f"{folder}/student/final/training.json")
        student = f"{home}/{folder}/student"
        command = config.loop_command(student, config.exam, f"{home}/exam-{number}")
        yield RecipeStep(f"Round {number}: test on held-out questions", command, f"exam-{number}/metrics.json")
    exams = shlex.join(f"{home}/exam-{number}" for number in range(config.rounds + 1))
    command = f"tripletune eval compare --across model {exams}"
    yield RecipeStep("Compare all students with the initial student", command, "")


def _build_command(config: ExpertConfig, results: Sequence[str], output: str) -> str:
    """Return the command that makes trajectories of the runs to keep."""
    words = ["tripletune", "build", "trajectories"]
    for folder in results:
        words += ["--results", folder]
    words += ["--ledger", f"{config.output_dir}/ledger.sqlite"]
    words += to_arguments(TrajectoryOptions(**asdict(config.keep)))
    return shlex.join([*words, "--overwrite", "--output", output])


def _train_command(train: TrainingStep, student: str, data: str, output: str) -> str:
    """Return the command that trains a student's adapter on trajectories; the recipe decides paths and adapter."""
    words = ["accelerate", "launch", "--quiet", "--config_file", train.launcher, f"recipes/{train.recipe}.py"]
    words += ["--config", train.config]
    settings = {**train.settings, "model.adapter": student, "data.train": data, "output_dir": output}
    for name, value in settings.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        words += [f"--{name}", text]
    return shlex.join(words)


def main(config: ExpertConfig, dry_run: bool = False) -> int:
    """Run the missing steps; return the exit code of a failed step, else 0."""
    return run_recipe(config, list(expert_steps(config)), dry_run)


def run(argv: list[str] | None = None) -> int:
    """Run from a command line; return the exit code of a failed step, 2 for bad input, else 0."""
    shown = "print the commands, then stop"
    return run_program(
        lambda: main(*parse_command_line(ExpertConfig, __doc__ or "", argv, shown, prog="tripletune iterate"))
    )


if __name__ == "__main__":
    sys.exit(run())
