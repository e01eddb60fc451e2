"""Hand a trained model on: `tripletune checkpoints export`, `verify` and `merge`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="tripletune checkpoints", description=__doc__)
    top.add_argument("--verbose", action="store_true", help="log more, and show tracebacks")
    commands = top.add_subparsers(dest="command", required=True, metavar="{export,verify,merge}")
    _add_export(
        commands.add_parser("export", help="write the adapter folder of a run, with card and reference outputs")
    )
    verify = commands.add_parser("verify", help="load a folder in a new process and compare it with its verify.json")
    verify.add_argument("folder", metavar="DIR", help="folder written by export or merge")
    verify.add_argument("--run", metavar="RUN", help="compare with this run or checkpoint too")
    verify.add_argument("--tolerance", type=float, help="largest absolute difference of a logit (default: 0.001)")
    _add_merge(commands.add_parser("merge", help="merge the adapter into the language model"))
    # The other half of `verify`; people have no use for it, so the help does not show it.
    observe = commands.add_parser("observe")
    observe.add_argument("folder")
    observe.add_argument("--cases", required=True)
    observe.add_argument("--output", required=True)
    return top


def _add_export(export: argparse.ArgumentParser) -> None:
    export.add_argument("run", metavar="RUN", help="run folder (its final/ is taken), or a checkpoint folder")
    export.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    export.add_argument("--scores", action="append", default=[], metavar="FILE", help="a metrics.json for the card")
    export.add_argument("--base-model", metavar="SPEC", help="name the base model anew: hub id, pypi:package or folder")
    export.add_argument("--base-revision", metavar="REV", help="hub revision of the base model")
    export.add_argument("--encoder", metavar="SPEC", help="name the text encoder anew")
    export.add_argument("--licence", "--license", metavar="ID", help="licence of the folder, for the card")
    export.add_argument("--overwrite", action="store_true", help="replace a model folder in DIR")


def _add_merge(merge: argparse.ArgumentParser) -> None:
    from tripletune.checkpoints.merge import DTYPES

    merge.add_argument("folder", metavar="DIR", help="export, run or checkpoint folder with an adapter")
    merge.add_argument("--output", required=True, metavar="OUT", help="folder to write")
    merge.add_argument("--dtype", choices=DTYPES, default="float32", help="weights to write (default: %(default)s)")
    merge.add_argument(
        "--language-model-only",
        action="store_true",
        help="write a plain transformers model; sensible for a model trained without graph token",
    )
    merge.add_argument("--overwrite", action="store_true", help="replace a model folder in OUT")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0, 1 when a folder does not verify, or 2 with one line on stderr for bad input.
    """
    args = parser().parse_args(argv)
    logging.basicConfig(
        level=logging.DEBUG if args.verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    _hush(args.verbose)
    command = {"export": _export, "verify": _verify, "merge": _merge, "observe": _observe}[args.command]
    try:
        return command(args)
    except (ValueError, OSError) as error:
        if args.verbose:
            logging.getLogger(__name__).exception("traceback")
        # transformers and PEFT write paragraphs.
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return 130


def _export(args: argparse.Namespace) -> int:
    from tripletune.checkpoints.export import ExportOptions, export

    options = ExportOptions(
        args.base_model, args.base_revision, args.encoder, args.licence, tuple(args.scores), args.overwrite
    )
    folder = export(args.run, args.output, options)
    print(f"exported to {folder}; check it with: tripletune checkpoints verify {folder}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from tripletune.checkpoints.verify import TOLERANCE, explain, table, verify

    tolerance = TOLERANCE if args.tolerance is None else args.tolerance
    if not tolerance >= 0:
        raise ValueError(f"--tolerance is {tolerance}: it must not be negative")
    comparisons = verify(args.folder, args.run, tolerance)
    print(table(comparisons))
    if all(comparison.passed for comparison in comparisons):
        most = max(case.logit_difference for comparison in comparisons for case in comparison.cases)
        print(
            f"{args.folder} is intact: prompts and greedy replies are the same, logits differ by at most {most:.1e} "
            f"(allowed {tolerance:g})"
        )
        return 0
    print(f"error: {args.folder} does not verify: {explain(comparisons)}", file=sys.stderr)
    return 1


def _merge(args: argparse.Namespace) -> int:
    from tripletune.checkpoints.merge import merge

    report = merge(
        args.folder,
        args.output,
        dtype=args.dtype,
        language_model_only=args.language_model_only,
        overwrite=args.overwrite,
    )
    what = "most likely next tokens" if args.language_model_only else "greedy replies"
    print(
        f"merged to {report.folder} ({args.dtype}): logits differ from the adapter's by at most "
        f"{report.logit_difference:.1e}, {report.same_replies} of {report.replies} {what} are the same"
    )
    if args.language_model_only and report.uses_graph:
        print(
            "note: this model was trained with a graph token, which a plain language model does not read; "
            "its replies differ from those of the Graph-LLM"
        )
    return 0


def _observe(args: argparse.Namespace) -> int:
    from pathlib import Path

    from tripletune.checkpoints.verify import cases_of, observe
    from tripletune.models.run_folders import read_json, write_json

    cases = cases_of(read_json(Path(args.cases)), args.cases)
    write_json(Path(args.output), observe(args.folder, cases))
    return 0


def _hush(verbose: bool) -> None:
    """Third parties report each file they open at these levels, and progress bars fill log files."""
    for name in ("httpx", "sentence_transformers", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if not sys.stderr.isatty():
        # Read by transformers when it is imported, which has not happened yet.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not verbose:
        warnings.filterwarnings("ignore", category=FutureWarning)


if __name__ == "__main__":
    sys.exit(main())
