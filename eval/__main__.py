"""Evaluate from the command line: `tripletune eval run`, `compare` and `records`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import get_args

from tripletune.eval.report import curve
from tripletune.eval.report.cli import add_arguments as add_report_arguments
from tripletune.eval.suites import extraction_cli
from tripletune.eval.suites.decisions_cli import add_arguments as add_decision_arguments
from tripletune.eval.task import task_names
from tripletune.models.llm.options import add_arguments
from tripletune.rag.retrieval.retrievers import RetrieverKind
from tripletune.rag.systems import Evidence, FirstQuery, system_names


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="tripletune eval", description="Evaluate retrieval systems and planners.")
    top.add_argument("--verbose", action="store_true", help="log more, and show tracebacks")
    commands = top.add_subparsers(dest="command", required=True)
    _add_run(commands.add_parser("run", help="answer the questions of a task with a system"))
    compare = commands.add_parser("compare", help="compare finished runs, question by question, with the first")
    compare.add_argument("folders", nargs="+", metavar="DIR", help="output folders of `run`, or of `extraction`")
    compare.add_argument("--metric", help="score to compare (default: the headline of the task)")
    compare.add_argument("--output", metavar="FILE", help="also write the comparison as JSON")
    _add_records(commands.add_parser("records", help="score a model on SUBQ records with gold history"))
    add_decision_arguments(commands.add_parser("decisions", help="score a CIRAG student's decisions on trajectories"))
    extraction_cli.add_arguments(commands.add_parser("extraction", help="score a text-to-triples model on pairs"))
    curve.add_arguments(commands.add_parser("curve", help="draw the learning curve of a training run"))
    add_report_arguments(commands.add_parser("report", help="tables and plots of finished evaluations"))
    return top


def run_arguments(words: Sequence[str]) -> argparse.Namespace:
    """A command line as the commands take it: parsed, with its words beside it."""
    args = parser().parse_args(words)
    args.words = list(words)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; bad input gives one line on stderr.

    Returns:
        0; 1 when every question failed, or a server does not answer; 2 for bad input; 3 when questions wait for the
        replies of a batch; 130 when it was interrupted.
    """
    args = run_arguments(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(
        level=logging.DEBUG if args.verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    # Third parties log each HTTP request and index build at these levels.
    for noisy in ("anthropic", "bm25s", "faiss", "httpcore", "httpx", "openai", "sentence_transformers", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    from rich.console import Console

    from tripletune.eval.harness import QuestionsPending
    from tripletune.eval.report.cli import report
    from tripletune.eval.suites import decisions_cli
    from tripletune.eval.suites import questions as commands
    from tripletune.models.llm.client import CallError

    command = {
        "run": commands.run,
        "compare": commands.compare_runs,
        "records": commands.records,
        "decisions": decisions_cli.run,
        "extraction": extraction_cli.run,
        "curve": curve.run,
        "report": report,
    }[args.command]
    # A table in a log file must not be cut at the 80 columns a file is taken to have.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    try:
        return command(args, console)
    except (ValueError, OSError) as error:
        if args.verbose:
            logging.getLogger(__name__).exception("traceback")
        print(f"error: {error}", file=sys.stderr)
        return 2
    except CallError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except QuestionsPending as pending:
        print(pending, file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("stopped; run the same command again to go on", file=sys.stderr)
        return 130


def _add_run(run: argparse.ArgumentParser) -> None:
    run.add_argument("--system", required=True, choices=system_names(), help="the system")
    run.add_argument("--task", required=True, help=f"{', '.join(task_names())}, or a YAML file of your own")
    run.add_argument("--data", required=True, help="the task's question file (or hub id)")
    _add_model(run, required=False)
    run.add_argument("--planner-model", metavar="MODEL", help="plan with this model and answer with --model")
    run.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE",
        help="an option of the system's own, for example candidates=50 or granularities=triples,passages; repeatable",
    )  # fmt: skip
    run.add_argument("--corpus", metavar="FILE", help="passages to retrieve from (default: all contexts in --data)")
    run.add_argument("--gold", metavar="FILE", help="gold links of --corpus, from data_builders.corpus, for recall")
    _add_triples(run)
    run.add_argument("--retriever", choices=get_args(RetrieverKind), default="bm25", help="default: %(default)s")
    run.add_argument(
        "--encoder", metavar="SPEC",
        help="sentence encoder of dense retrieval and of reranking: hub id, folder or pypi:<package>",
    )  # fmt: skip
    run.add_argument("--index", metavar="DIR", help="where indexes are kept (default: OUTPUT/index)")
    run.add_argument("--concurrency", type=int, default=64, help="questions under way at once (default: %(default)s)")
    run.add_argument("--max-rounds", type=int, help="most rounds of retrieval (default: the system's paper's)")
    run.add_argument("--top-k", type=int, help="passages a round (default: the system's paper's)")
    run.add_argument("--no-planning", action="store_true", help="retrieve once with the question, then answer")
    run.add_argument("--no-retrieval", action="store_true", help="answer directly")
    run.add_argument("--evidence", choices=get_args(Evidence), help="what is read of a step (default: triples)")
    run.add_argument("--first-query", choices=get_args(FirstQuery), help="what q_0 is (default: main_question)")
    run.add_argument("--triples-per-step", type=int, metavar="N", help="most triples a step (default: all)")
    run.add_argument("--retry-errors", action="store_true", help="run questions again that failed in an earlier call")
    run.add_argument(
        "--integrator",
        metavar="SPEC",
        help="cirag: this local model in the place of the teacher in the integration phase",
    )
    run.add_argument(
        "--oracle", metavar="DIR/SPLIT",
        help="a teacher that knows the facts of a world made by data_builders.world, in the place of a language model",
    )  # fmt: skip
    add_arguments(run, "teacher")


def _add_triples(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--triples", metavar="FILE",
        help='triples of the passages: JSON lines of {"title", "text", "triples"}, or a store of `rag extract`',
    )  # fmt: skip
    command.add_argument("--extractor", metavar="NAME", help="whose triples, where --triples holds those of several")


def _add_records(records: argparse.ArgumentParser) -> None:
    records.add_argument("--data", required=True, help="folder of record shards, or one shard")
    records.add_argument("--split", default="validation", help="split of the folder (default: %(default)s)")
    _add_model(records)
    records.add_argument("--evidence", choices=get_args(Evidence), help="default: as the model was trained")
    _add_triples(records)


def _add_model(command: argparse.ArgumentParser, required: bool = True) -> None:
    command.add_argument("--model", required=required, help="run, checkpoint or export folder of a Graph-LLM")
    command.add_argument("--untrained", action="store_true", help="the base model as it is, as a reference point")
    command.add_argument("--output", required=True, metavar="DIR", help="results go here; the same call goes on here")
    command.add_argument("--overwrite", action="store_true", help="forget the results of an earlier run in --output")
    command.add_argument("--limit", type=int, metavar="N", help="only the first N")
    command.add_argument("--batch-size", type=int, default=16, help="inputs a forward pass (default: %(default)s)")
    command.add_argument("--dtype", default="float32", help="float32 (default), bfloat16, float16 or auto")
    command.add_argument("--max-plan-tokens", type=int, help="longest plan (default: 64)")
    command.add_argument("--max-answer-tokens", type=int, help="longest answer (default: the task's, or 100)")


if __name__ == "__main__":
    sys.exit(main())
