r"""Expert iteration: a student answers training questions several times, and learns from its successful runs.

    python recipes/expert_iteration.py --config recipes/configs/smollm2_135m_expert_cpu.yaml

Each round samples K runs per question with the student in the loop, keeps some by score, recall and length, trains on
them with the usual recipe, and tests the new student on held-out questions (as STaR, Zelikman et al., 2022, and
ReST-EM, Singh et al., 2024). Every step is a command that can be run alone: `--dry-run` prints them. Stopped, it
continues when the same command is given again.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tripletune.data_builders.trajectories import TrajectoryOptions
from tripletune.eval.systems import read_options
from tripletune.models.files import check_folder, read_text, write_text
from tripletune.models.options import other_default, setting, to_yaml
from tripletune.models.program import parse_command_line, run_program, to_arguments
from tripletune.recipes.demo import walk


@dataclass(frozen=True, slots=True)
class KeepOptions(TrajectoryOptions):
    """Which runs are kept."""

    min_score: tuple[str, ...] = other_default(TrajectoryOptions, "min_score", ("exact_match=1",))
    no_repairs: bool = other_default(TrajectoryOptions, "no_repairs", True)
    min_recall: float | None = other_default(TrajectoryOptions, "min_recall", 1.0)
    shortest: int | None = other_default(TrajectoryOptions, "shortest", 1)


@dataclass
class TrainingStep:
    """How a student, from its adapter on, learns from the kept runs."""

    recipe: str = setting("cirag_distill", "training program in recipes/", choices=("cirag_distill", "ras_multitask"))
    config: str = setting("", "YAML file of that program")
    settings: dict[str, Any] = setting({}, "settings that override the file, for example {train.epochs: 1}")
    launcher: str = setting("recipes/accelerate/cpu.yaml", "accelerate's configuration file")


@dataclass
class ExpertConfig:
    """All rounds."""

    output_dir: str = setting("runs/expert", "folder of all rounds")
    student: str = setting("", "the student to begin with: run, adapter or export")
    rounds: int = setting(2, "number of rounds", at_least=1)
    samples: int = setting(4, "K, runs per question and round", at_least=1)
    loop: dict[str, Any] = setting({}, "options of `tripletune eval run` and of the system, without student and data")
    questions: dict[str, Any] = setting({}, "options for the training questions, such as data and corpus")
    exam: dict[str, Any] = setting({}, "options for the held-out questions")
    draw: str = setting("student", "model that samples its replies at temperature 1", choices=("student", "teacher"))
    first_sample: int = setting(0, "seed of the first sample; the next ones follow", at_least=0)
    keep: KeepOptions = field(default_factory=KeepOptions)
    train: TrainingStep = field(default_factory=TrainingStep)

    def check(self) -> list[str]:
        """Missing settings, and options that the loop does not have."""
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
        """The words that run the loop with a student."""
        role = "integrator" if self.loop["system"] == "cirag" else "model"
        given = {role: student, "ledger": f"{self.output_dir}/ledger.sqlite", "output": output}
        options, teacher = read_options(self.loop | values | given)
        if sample is not None and self.draw == "teacher" and teacher is None:
            raise ValueError("draw: teacher draws replies of loop.teacher_model, which is not set")
        if sample is not None and self.draw == "student":
            options.student_seed = sample
        elif sample is not None and teacher is not None:
            teacher = replace(teacher, temperature=1.0, seed=sample)
        chat_model = to_arguments(teacher, "teacher") if teacher else []
        return ["tripletune", "eval", "run", *to_arguments(options), *chat_model]


def steps(config: ExpertConfig) -> Iterator[tuple[str, str, str]]:
    """Each step's title, command, and the file that shows that it is done."""
    home, student = config.output_dir, config.student

    def run(output: str, values: dict[str, Any], sample: int | None = None) -> tuple[str, str]:
        return shlex.join(config.run_command(student, values, output, sample)), f"{output}/metrics.json"

    yield "The student at the start: held-out questions", *run(f"{home}/exam-0", config.exam)
    for number in range(1, config.rounds + 1):
        folder = f"{home}/round-{number}"
        runs = [f"{folder}/sample-{sample}" for sample in range(config.samples)]
        for sample, output in enumerate(runs):
            title = f"Round {number}: sample {sample + 1} of {config.samples}"
            yield title, *run(output, config.questions, config.first_sample + sample)
        data = f"{folder}/trajectories"
        build = ["tripletune", "build", "trajectories", *(word for one in runs for word in ("--results", one))]
        keep = to_arguments(TrajectoryOptions(**asdict(config.keep)))
        build += ["--ledger", f"{home}/ledger.sqlite", *keep, "--overwrite", "--output", data]
        yield f"Round {number}: keep the best", shlex.join(build), f"{data}/README.md"
        settings = {**config.train.settings, "model.adapter": student, "data.train": data}
        student = f"{folder}/student"
        train = ["accelerate", "launch", "--quiet", "--config_file", config.train.launcher]
        train += [f"recipes/{config.train.recipe}.py", "--config", config.train.config]
        for name, value in {**settings, "output_dir": student}.items():
            train += [f"--{name}", ",".join(map(str, value)) if isinstance(value, list) else str(value)]
        yield f"Round {number}: train", shlex.join(train), f"{student}/final/training.json"
        yield f"Round {number}: held-out questions", *run(f"{home}/exam-{number}", config.exam)
    exams = shlex.join(f"{home}/exam-{number}" for number in range(config.rounds + 1))
    yield "All students, question by question with the first", f"tripletune eval compare --across model {exams}", ""


def main(config: ExpertConfig, dry_run: bool = False) -> int:
    """Run the missing steps; returns the exit code of a failed step, else 0."""
    if dry_run:
        sys.stdout.write("".join(f"{command}\n" for _, command, _ in steps(config)))
        return 0
    about, now = Path(config.output_dir) / "config.yaml", to_yaml(config)
    check_folder(config.output_dir, (), True, continues=about.name)
    if about.is_file() and read_text(about) != now:
        raise ValueError(f"{about} is of another run: give another --output_dir, or the settings that it has")
    about.parent.mkdir(parents=True, exist_ok=True)
    write_text(about, now)
    return walk(list(steps(config)))


def run(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code of a step that failed, 2 for bad input, else 0."""
    return run_program(lambda: main(*parse_command_line(ExpertConfig, __doc__ or "", argv, prog="tripletune iterate")))


if __name__ == "__main__":
    sys.exit(run())
