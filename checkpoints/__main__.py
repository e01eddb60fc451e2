"""Export, check and publish a trained model: `tripletune checkpoints export`, `verify`, `merge`, `gguf` and `push`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from tripletune.checkpoints import DTYPES, MADE, export_adapter, merge_adapter
from tripletune.checkpoints.gguf_file import TYPES, write_gguf
from tripletune.checkpoints.verify import TOLERANCE, verify
from tripletune.models.files import add_push, push_folder
from tripletune.models.program import CommandParser, run_program

# Options of `export_adapter`.
_EXPORT = ("base_model", "base_revision", "encoder", "licence", "scores", "language_model_only", "overwrite")


def _parser() -> argparse.ArgumentParser:
    top = CommandParser(prog="tripletune checkpoints", description=__doc__)
    top.add_argument("--verbose", action="store_true", help="log more, and show tracebacks")
    commands = top.add_subparsers(dest="command", required=True, metavar="{export,verify,merge,gguf,push}")
    export = commands.add_parser(
        "export",
        help="write a run's adapter, or its whole model, with card and reference outputs",
        example="tripletune checkpoints export runs/h1 --output exports/h1 --scores runs/eval/loop/metrics.json",
    )
    export.set_defaults(run_command=_export)
    export.add_argument("run", metavar="RUN", help="run folder (its final/ is taken), or a checkpoint folder")
    export.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    export.add_argument("--scores", action="append", default=[], metavar="FILE", help="a metrics.json for the card")
    export.add_argument(
        "--base-model", metavar="SPEC", help="write this name of the base model: hub id, pypi:name, folder"
    )
    export.add_argument("--base-revision", metavar="REV", help="hub revision of the base model")
    export.add_argument("--encoder", metavar="SPEC", help="write this name of the text encoder")
    export.add_argument("--licence", "--license", metavar="ID", help="licence of the folder, for the card")
    export.add_argument(
        "--language-model-only",
        action="store_true",
        help="write an adapter of the plain base model, for a Graph-LLM trained without graph",
    )
    verify_ = commands.add_parser(
        "verify",
        help="load a folder in a new process and compare it with its verify.json",
        example="tripletune checkpoints verify exports/h1 --run runs/h1",
    )
    verify_.set_defaults(run_command=_verify)
    verify_.add_argument("folder", metavar="DIR", help="folder written by export or merge")
    verify_.add_argument("--run", metavar="RUN", help="compare with this run or checkpoint too")
    verify_.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help="largest difference of log normalisers (default: %(default)s)",
    )
    merge = commands.add_parser(
        "merge",
        help="merge the adapter into the language model",
        example="tripletune checkpoints merge exports/h1 --output exports/h1-merged",
    )
    merge.set_defaults(run_command=_merge)
    merge.add_argument("folder", metavar="DIR", help="export, run or checkpoint folder with an adapter")
    merge.add_argument("--output", required=True, metavar="OUT", help="folder to write")
    merge.add_argument("--dtype", choices=DTYPES, default="float32", help="weights to write (default: %(default)s)")
    merge.add_argument(
        "--language-model-only",
        action="store_true",
        help="write a plain transformers model; sensible for a model trained without graph token",
    )
    gguf = commands.add_parser(
        "gguf",
        help="write a merged text model as a GGUF file for llama.cpp and Ollama",
        example="tripletune checkpoints gguf exports/extractor-merged --output extractor.gguf --quantize q8_0",
    )
    gguf.set_defaults(run_command=_gguf)
    gguf.add_argument("folder", metavar="DIR", help="folder of a whole language model, as merge writes it")
    gguf.add_argument("--output", required=True, metavar="FILE", help="file to write")
    gguf.add_argument("--quantize", choices=TYPES, default="f16", help="type of the weights (default: %(default)s)")
    push = commands.add_parser(
        "push",
        help="verify a folder and upload it to the Hugging Face Hub",
        example="tripletune checkpoints push exports/h1 me/h1",
    )
    push.set_defaults(run_command=_push)
    add_push(push)
    for command in (export, merge):
        command.add_argument("--overwrite", action="store_true", help="replace an existing model folder")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 1 when a folder does not verify, and 2 for bad input."""
    args = _parser().parse_args(argv)
    return run_program(lambda: args.run_command(args), verbose=args.verbose, stopped="stopped; nothing was written")


def _export(args: argparse.Namespace) -> None:
    folder = export_adapter(args.run, args.output, **{name: getattr(args, name) for name in _EXPORT})
    checks = "" if args.language_model_only else f"; check it with: tripletune checkpoints verify {folder}"
    print(f"exported to {folder}{checks}")


def _verify(args: argparse.Namespace) -> int:
    if not 0 <= args.tolerance < math.inf:
        raise ValueError(f"--tolerance {args.tolerance}: give a number, 0 or greater")
    comparisons = verify(args.folder, args.run, args.tolerance)
    for one in comparisons:
        if one.passed:
            print(f"{args.folder} is intact against {one}")
        else:
            print(f"error: {args.folder} does not verify against {one}", file=sys.stderr)
    return 0 if all(one.passed for one in comparisons) else 1


def _merge(args: argparse.Namespace) -> None:
    found = merge_adapter(
        args.folder,
        args.output,
        dtype=args.dtype,
        language_model_only=args.language_model_only,
        overwrite=args.overwrite,
    )
    print(
        f"merged to {args.output} ({args.dtype}): log normalisers differ from the adapter's by at most "
        f"{found.difference:.1e}, {found.same_replies} of {found.cases} greedy replies are the same"
    )


def _gguf(args: argparse.Namespace) -> None:
    write_gguf(args.folder, args.output, args.quantize)
    print(f"wrote {args.output} ({args.quantize})")


def _push(args: argparse.Namespace) -> None:
    for one in verify(args.folder):
        if not one.passed:
            raise ValueError(f"{args.folder} does not verify, so it is not pushed: {one}")
    print(f"pushed to {push_folder(args.folder, args.repo, 'model', MADE)}")


if __name__ == "__main__":
    sys.exit(main())
