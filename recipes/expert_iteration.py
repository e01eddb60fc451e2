r"""Expert iteration: a student answers training questions several times, and learns from the runs that went well.

    python recipes/expert_iteration.py --config recipes/configs/smollm2_135m_expert_cpu.yaml

Each round samples K runs per question with the student in the loop, keeps some by score, recall and length, trains
on them with the usual recipe, and examines the new student on held-out questions (as STaR, Zelikman et al., 2022, and
ReST-EM, Singh et al., 2024). Every step is a command that can be run alone: `--dry-run` prints them. Stopped, it
continues when the same command is given again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tripletune.models.files import read_text, write_text
from tripletune.models.options import parse_command_line, setting, to_yaml
from tripletune.models.program import run_program
from tripletune.recipes.demo import run as run_step


@dataclass
class ExpertConfig:
    """All rounds. In the words of a command {student} is the round's student and {sample} the number of a sample."""

    output_dir: str = setting("runs/expert", "folder of all rounds")
    student: str = setting("", "the student to begin with: run, adapter or export")
    rounds: int = setting(2, "rounds", at_least=1)
    samples: int = setting(4, "K, runs of each question in a round", at_least=1)
    loop: str = setting(
        "", "words of `tripletune eval run` with {student}, such as --system cirag --integrator {student}"
    )
    sampling: str = setting("--set student_seed={sample}", "its words that make a run a sample")
    questions: str = setting("", "its words that name the training questions")
    exam: str = setting("", "its words that name the held-out questions")
    keep: str = setting(
        "--min-score exact_match=1 --min-recall 1 --no-repairs --shortest 1",
        "words of `tripletune build trajectories` that say which are kept",
    )
    train: str = setting(
        "", "the training command without its data and output; with --model.adapter {student} it goes on"
    )

    def check(self) -> list[str]:
        """What is not said."""
        return [
            f"{name}: not set" for name in ("student", "loop", "questions", "exam", "train") if not getattr(self, name)
        ]


def steps(config: ExpertConfig) -> Iterator[tuple[str, str, str]]:
    """What each step does, its command, and the file that shows that it is done."""
    home, student = config.output_dir, config.student
    ledger = f"--ledger {home}/ledger.sqlite"

    def loop(output: str, words: str) -> tuple[str, str]:
        words = f"{config.loop} {words}".replace("{student}", student)
        return f"tripletune eval run {words} {ledger} --output {output}", f"{output}/metrics.json"

    yield "The student at the start: held-out questions", *loop(f"{home}/exam-0", config.exam)
    for number in range(1, config.rounds + 1):
        folder = f"{home}/round-{number}"
        runs = [f"{folder}/sample-{sample}" for sample in range(config.samples)]
        for sample, output in enumerate(runs):
            words = f"{config.questions} {config.sampling}".replace("{sample}", str(sample))
            yield f"Round {number}: sample {sample + 1} of {config.samples}", *loop(output, words)
        data = f"{folder}/trajectories"
        results = " ".join(f"--results {output}" for output in runs)
        build = f"tripletune build trajectories {results} {ledger} {config.keep} --overwrite --output {data}"
        yield f"Round {number}: keep the best", build, f"{data}/README.md"
        train = config.train.replace("{student}", student)
        student = f"{folder}/student"
        train += f" --data.train {data} --output_dir {student}"
        yield f"Round {number}: train", train, f"{student}/final/training.json"
        yield f"Round {number}: held-out questions", *loop(f"{home}/exam-{number}", config.exam)
    exams = " ".join(f"{home}/exam-{number}" for number in range(config.rounds + 1))
    yield "All students, question by question with the first", f"tripletune eval compare {exams}", ""


def main(config: ExpertConfig, dry_run: bool = False) -> int:
    """Do what is not done yet; the exit code of a step that failed, else 0.

    Raises:
        ValueError: the folder holds other rounds.
    """
    if dry_run:
        sys.stdout.write("".join(f"{command}\n" for _, command, _ in steps(config)))
        return 0
    about, now = Path(config.output_dir) / "config.yaml", to_yaml(config)
    if about.is_file() and read_text(about) != now:
        raise ValueError(f"{about} is of another run: give another --output_dir, or the settings that it has")
    about.parent.mkdir(parents=True, exist_ok=True)
    write_text(about, now)
    for title, command, done in steps(config):
        sys.stdout.write(f"\n{title}\n")
        if status := run_step(command, done=bool(done) and Path(done).exists()):
            return status
    return 0


def run(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code of a step that failed, 2 for bad input, else 0."""
    return run_program(lambda: main(*parse_command_line(ExpertConfig, __doc__ or "", argv)))


if __name__ == "__main__":
    sys.exit(run())
