"""Statistics, Arrow schema and card of a data set of trajectories."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tripletune.data_builders.datasets.shards import CARD, STATISTICS, Format, front_matter, write_text
from tripletune.data_builders.datasets.stats import Histogram

from tripletune.data_builders.datasets.card import BuildFacts, table
from tripletune.models.data.trajectories import Trajectory

if TYPE_CHECKING:
    import pyarrow as pa


def trajectory_schema() -> pa.Schema:
    """The Arrow schema of a trajectory."""
    import pyarrow as pa

    text = pa.string()
    messages = pa.list_(pa.struct([("role", text), ("content", text)]))
    names = [(name, text) for name in ("id", "question_id", "role", "model")]
    return pa.schema([*names, ("messages", messages), ("learned", pa.list_(pa.bool_()))])


def trajectory_features() -> list[dict[str, Any]]:
    """The features of a trajectory as the YAML head of a data set card names them."""
    text = {"dtype": "string"}
    turns = [{"name": "role", **text}, {"name": "content", **text}]
    kinds: dict[str, dict[str, Any]] = {"messages": {"list": turns}, "learned": {"list": "bool"}}
    return [{"name": name, **kinds.get(name, text)} for name in trajectory_schema().names]


class TrajectoryStatistics:
    """Counts trajectories, their learned turns and their lengths.

    Args:
        tokenizer: A model spec whose tokenizer counts lengths; None counts words between white space.
    """

    def __init__(self, tokenizer: str | None = None) -> None:
        self.unit = f"tokens of {tokenizer}" if tokenizer else "white-space words, no tokenizer was given"
        self._length: Callable[[str], int] = _token_counter(tokenizer) if tokenizer else lambda text: len(text.split())
        self._splits: Counter[str] = Counter()
        self._turns: Counter[int] = Counter()
        self._models: Counter[str] = Counter()
        self._lengths = {"whole": Histogram(), "learned": Histogram()}

    @property
    def records(self) -> int:
        """How many trajectories were counted."""
        return self._splits.total()

    def add(self, record: Trajectory, split: str) -> None:
        """Count one trajectory of a split."""
        self._splits[split] += 1
        self._turns[sum(record.learned)] += 1
        self._models[record.model] += 1
        lengths = [self._length(message["content"]) for message in record.messages]
        self._lengths["whole"].add(sum(lengths))
        self._lengths["learned"].add(sum(n for n, learned in zip(lengths, record.learned) if learned))

    def to_json(self) -> dict[str, Any]:
        """Everything that was counted."""
        return {
            "unit": self.unit,
            "splits": dict(sorted(self._splits.items())),
            "learned_turns": {str(turns): count for turns, count in sorted(self._turns.items())},
            "models": dict(sorted(self._models.items())),
            "lengths": {name: histogram.summary() for name, histogram in self._lengths.items()},
        }


def write_trajectory_card(folder: Path, facts: BuildFacts, statistics: TrajectoryStatistics, format: Format) -> None:
    """Write `README.md` and `statistics.json` into a data set of trajectories."""
    numbers = statistics.to_json()
    head = front_matter(
        list(numbers["splits"]), format, facts.title, features=trajectory_features(), task="text-generation"
    )
    write_text(folder / CARD, f"{head}\n{_body(facts, numbers)}")
    content = {"statistics": numbers, "build": dataclasses.asdict(facts)}
    write_text(folder / STATISTICS, json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def _body(facts: BuildFacts, numbers: dict[str, Any]) -> str:
    counted = [[name, f"{count:,}"] for name, count in numbers["splits"].items()]
    counted += [[f"with {turns} learned turns", f"{count:,}"] for turns, count in numbers["learned_turns"].items()]
    counted += [[f"of {model}", f"{count:,}"] for model, count in numbers["models"].items()]
    lengths = [
        [name, *(f"{one[key]:g}" for key in ("min", "median", "mean", "max"))]
        for name, one in numbers["lengths"].items()
    ]
    drops = [[reason, f"{count:,}"] for counts in facts.drops.values() for reason, count in counts.items()]
    parts = [
        f"# {facts.title}",
        facts.summary,
        "## Trajectories",
        table(["", "trajectories"], counted),
        f"Lengths in {numbers['unit']}:",
        table(["", "min", "median", "mean", "max"], lengths),
        "## Left out",
        table(["reason, in the order of the filters", "trajectories"], drops) if drops else "Nothing.",
        *facts.notes,
        "## Input",
        table(["file", "SHA-256"], [[file, digest] for file, digest in facts.files.items()]),
        "Options: " + ", ".join(f"`{name}` {value}" for name, value in facts.options.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _token_counter(spec: str) -> Callable[[str], int]:
    from tripletune.models.loading import load_tokenizer

    tokenizer = load_tokenizer(spec)
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])
