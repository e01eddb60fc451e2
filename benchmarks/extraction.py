"""What extracting a corpus costs: `rag extract` against one `generate` call after another, and a second run.

    python benchmarks/extraction.py --model runs/extractor

Both ways read the same passages greedily with the same model, prompt, number type, longest reply and rule for replies
that go round in circles; it is counted how many passages have the same triples. The loop is the plainest one: a prompt,
`generate`, the next prompt, on the model with its adapter merged. `--one-by-one N` gives it every so many-th passage
alone, N of them, where all would take hours; passages a second are compared. The second part fills a store with
synthetic passages and runs over them again, with peak memory at a tenth of them and at all. `--passages 0` leaves the
first part out, `--stored 0` the second.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from measure import PeakMemory, environment, gigabytes, quiet, write_result

from tripletune.models.data.pairs import load_instruction, read_reply
from tripletune.models.data.passages import Passage
from tripletune.models.data.triples import Triple
from tripletune.models.local.generation import Completion
from tripletune.models.local.grammar import Repetition
from tripletune.rag.triples.cli import read_passages
from tripletune.rag.triples.extract import CorpusExtraction, ExtractionCounts, source_pieces
from tripletune.rag.triples.local_extractor import DTYPES, PROMPT_FILE, LocalOptions, open_local_extractor
from tripletune.rag.triples.prompt import ExtractionPrompt
from tripletune.rag.triples.store import TripleStore, passage_key

CORPUS = Path(__file__).resolve().parents[2] / "shared" / "data" / "2wikimultihopqa_corpus.jsonl"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables and write the JSON; bad input gives one line and exit code 2."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        result = measure(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(result)
    print(f"written to {write_result(args.output, 'extraction', result)}")
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure both parts.

    Returns:
        The content of the JSON file.

    Raises:
        FileNotFoundError: model or corpus is not there.
        ValueError: an option can't work.
    """
    options = LocalOptions(max_tokens=args.max_tokens, batch_size=args.batch_size, dtype=args.dtype)
    if args.passages < 0 or args.stored < 0:
        raise ValueError("--passages and --stored must be 0 or more")
    if args.one_by_one is not None and not 1 <= args.one_by_one <= args.passages:
        raise ValueError(f"--one-by-one is {args.one_by_one}: it must be 1 to {args.passages}, what --passages says")
    if args.passages and not args.model:
        raise ValueError("name a --model to extract with, or leave that part out with --passages 0")
    result: dict[str, Any] = {"options": {name: str(value) for name, value in vars(args).items() if name != "output"}}
    with tempfile.TemporaryDirectory() as scratch:
        if args.passages:
            quiet()
            passages = list(islice(read_passages(args.corpus, ExtractionCounts()), args.passages))
            result["extraction"] = _extraction(args, options, passages, Path(scratch))
        if args.stored:
            result["second_run"] = [_second_run(count, Path(scratch)) for count in (args.stored // 10, args.stored)]
    return {**result, "environment": environment()}


def _extraction(
    args: argparse.Namespace, options: LocalOptions, passages: Sequence[Passage], scratch: Path
) -> dict[str, Any]:
    together = _together(args, options, passages, scratch)
    gc.collect()
    # Evenly spread, since a corpus may stand in some order.
    count = args.one_by_one or len(passages)
    chosen = [number * len(passages) // count for number in range(count)]
    some = [passages[number] for number in chosen]
    one_by_one = _one_by_one(args, some)
    found = together.pop("triples")
    pairs = list(zip(some, one_by_one.pop("triples"), [found[number] for number in chosen], strict=True))
    differ = [
        {"title": passage.title, "one_by_one": _shown(one), "together": _shown(other)}
        for passage, one, other in pairs
        if one != other
    ]
    return {
        "passages": len(passages),
        "one_by_one": count,
        "triples": sum(len(one or ()) for one in found),
        "ways": [one_by_one, together],
        "speed_up": round(together["passages_per_second"] / one_by_one["passages_per_second"], 3),
        "passages_that_differ": differ,
    }


def _together(
    args: argparse.Namespace, options: LocalOptions, passages: Sequence[Passage], scratch: Path
) -> dict[str, Any]:
    extractor = open_local_extractor(args.model, options)
    store = TripleStore(scratch / "extracted.sqlite")
    run = CorpusExtraction(extractor, store)

    async def work() -> tuple[float, ExtractionCounts]:
        try:
            # Loads the model and makes it warm.
            await extractor.complete(["Warm: A text that warms up."])
            start = time.perf_counter()
            counts = await run.run(passages)
            return time.perf_counter() - start, counts
        finally:
            await extractor.close()

    with PeakMemory() as memory:
        seconds, counts = asyncio.run(work())
    found = [store.get(run.id, passage_key(passage.title, passage.text)) for passage in passages]
    store.close()
    return _way("together", len(passages), seconds, memory.peak) | {"counts": vars(counts), "triples": found}


def _one_by_one(args: argparse.Namespace, passages: Sequence[Passage]) -> dict[str, Any]:
    """The plainest loop; an encoder-decoder reads the text alone."""
    import torch

    from tripletune.models.llm.chat import ChatEncoder
    from tripletune.models.loading import is_encoder_decoder, load_tokenizer, load_weights, parse_dtype, resolve
    from tripletune.models.local.decoding import Request, end_tokens

    folder = resolve(args.model)
    apart = is_encoder_decoder(folder)
    tokenizer = load_tokenizer(folder)
    model: Any = load_weights(folder, parse_dtype(args.dtype))
    if torch.cuda.is_available():
        model = model.to("cuda")
    own = Path(folder) / PROMPT_FILE
    prompt = ExtractionPrompt(load_instruction(own if own.is_file() else None))
    chat = None if apart else ChatEncoder(tokenizer, args.model)
    ends = end_tokens(model, tokenizer)
    circles = Repetition(tokenizer)

    def reply(text: str, limit: int) -> str:
        ids = list(tokenizer(text)["input_ids"]) if chat is None else chat.encode(prompt.chat(text))
        start = 0 if apart else len(ids)

        # Replies that go round in circles end at the same place in both ways.
        def enough(written: Any, scores: Any, **_: Any) -> Any:
            found = circles.found(Request(ids, limit, tokens=written[0, start:].tolist()))
            return torch.tensor([found], device=written.device)

        output = model.generate(
            torch.tensor([ids], device=model.device), max_new_tokens=limit, do_sample=False, num_beams=1,
            temperature=None, top_p=None, top_k=None, repetition_penalty=1.0, stopping_criteria=[enough],
            eos_token_id=ends, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        return str(tokenizer.decode(output[0, start:], skip_special_tokens=True))

    found: list[tuple[Triple, ...]] = []
    with PeakMemory() as memory:
        reply("Warm: A text that warms up.", 8)
        start = time.perf_counter()
        for number, passage in enumerate(passages, 1):
            pieces = source_pieces(passage.title, passage.text)
            triples = [triple for text in pieces for triple in read_reply(reply(text, args.max_tokens)).triples]
            found.append(tuple(dict.fromkeys(triples)))
            if not number % 50:
                print(f"one by one: {number} of {len(passages)}", file=sys.stderr)
        seconds = time.perf_counter() - start
    return _way("one by one", len(passages), seconds, memory.peak) | {"triples": found}


class _Rule:
    """An extractor that costs nothing, to fill a store."""

    model, settings, batch_size, concurrency = "rule", "none", 64, 4

    async def extract(self, texts: Sequence[str]) -> list[str]:
        return [f"(S> {text.split()[0]}| P> is in| O> Town {n}), (S> a| P> b| O> c)" for n, text in enumerate(texts)]

    async def complete(self, texts: Sequence[str]) -> list[Completion]:
        return [Completion(text) for text in await self.extract(texts)]

    async def close(self) -> None:
        return


def _second_run(count: int, scratch: Path) -> dict[str, Any]:
    """Passages a second when a store has them all, and peak memory of the first and of the second run."""
    corpus = scratch / f"corpus-{count}.jsonl"
    with corpus.open("w", encoding="utf-8") as file:
        for number in range(count):
            text = f"Place {number} lies on the river {number % 977}. It was founded in {1000 + number % 900}. " * 5
            file.write(json.dumps({"title": f"Place {number}", "text": text}) + "\n")
    runs = []
    for name in ("first", "second"):
        store = TripleStore(scratch / f"filled-{count}.sqlite")
        run = CorpusExtraction(_Rule(), store)
        with PeakMemory() as memory:
            start = time.perf_counter()
            counts = asyncio.run(run.run(_read(corpus, run.counts)))
            seconds = time.perf_counter() - start
        store.close()
        if name == "second" and counts.stored != count:
            raise ValueError(f"the store knows {counts.stored} of {count} passages: this is a fault of the program")
        runs.append(_way(name, count, seconds, memory.peak) | {"resting_bytes": memory.resting})
    corpus.unlink()
    return {"passages": count, "runs": runs}


def _read(corpus: Path, counts: ExtractionCounts) -> Iterator[Passage]:
    return read_passages(corpus, counts)


def _way(name: str, passages: int, seconds: float, peak: int) -> dict[str, Any]:
    return {
        "name": name,
        "seconds": round(seconds, 4),
        "passages_per_second": round(passages / seconds, 4),
        "peak_bytes": peak,
    }


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=120)
    options = result["options"]
    if part := result.get("extraction"):
        table = Table(title=f"{part['passages']} passages, {part['triples']} triples")
        for heading in ("way", "seconds", "passages/s", "peak GB"):
            table.add_column(heading, justify="left" if heading == "way" else "right")
        for row in part["ways"]:
            speed = f"{row['passages_per_second']:.3f}"
            table.add_row(row["name"], f"{row['seconds']:.1f}", speed, gigabytes(row["peak_bytes"]))
        console.print(table)
        differ = len(part["passages_that_differ"])
        console.print(f"together is {part['speed_up']:.2f} times as fast as one by one")
        verdict = f"{differ} of {part['one_by_one']} passages differ" if differ else "all equal"
        console.print(f"triples: {verdict} ({options['dtype']}; {part['one_by_one']} passages were read one by one)")
    if runs := result.get("second_run"):
        table = Table(title="a store that is filled, and the same run again")
        for heading in ("passages", "run", "passages/s", "peak MB"):
            table.add_column(heading, justify="left" if heading == "run" else "right")
        for size in runs:
            for row in size["runs"]:
                speed, peak = f"{row['passages_per_second']:,.0f}", f"{row['peak_bytes'] / 1e6:.0f}"
                table.add_row(f"{size['passages']:,}", row["name"], speed, peak)
        console.print(table)


def _shown(triples: Sequence[Triple] | None) -> list[list[str]] | None:
    return None if triples is None else [triple.as_list() for triple in triples]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", metavar="SPEC", help="trained extractor: run, checkpoint, export or merged folder, or hub id")
    add("--corpus", default=str(CORPUS), help="passages: JSON lines with title and text (default: %(default)s)")
    add("--passages", type=int, default=500, help="passages to extract; 0: none (default: %(default)s)")
    add("--one-by-one", type=int, metavar="N", help="read N of them one by one, evenly spread (default: all)")
    add("--max-tokens", type=int, default=256, help="longest reply (default: %(default)s)")
    add("--batch-size", type=int, default=64, help="most texts under way together (default: %(default)s)")
    add("--dtype", default="float32", choices=DTYPES, help="number type of the weights (default: %(default)s)")
    add("--stored", type=int, default=200_000, help="passages of the second run; 0: none (default: %(default)s)")
    add("--output", default="runs/benchmarks", help="folder of the JSON (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
