"""Trajectories: chats of a teacher in a loop, with the turns that a student learns (CIRAG, section 3.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tripletune.data_builders.datasets.rows import RowKind, Statistics, Table, length_table
from tripletune.models.data.trajectories import Trajectory

if TYPE_CHECKING:
    import pyarrow as pa


class Trajectories(RowKind[Trajectory]):
    """Chats with their loss mask."""

    name, plural = "trajectory", "trajectories"
    keys = ("messages", "learned")

    def schema(self) -> pa.Schema:
        """The Arrow schema of a trajectory."""
        import pyarrow as pa

        text = pa.string()
        messages = pa.list_(pa.struct([("role", text), ("content", text)]))
        names = [(name, text) for name in ("id", "question_id", "role", "model")]
        return pa.schema([*names, ("messages", messages), ("learned", pa.list_(pa.bool_()))])

    def read(self, row: dict[str, Any], where: str) -> Trajectory:
        """Read a stored trajectory."""
        return Trajectory.from_json(row, where)

    def label(self, row: Trajectory) -> str:
        """The role of the calls."""
        return row.role

    def text(self, row: Trajectory) -> tuple[str, str]:
        """The chat up to its last turn, and that turn; earlier turns that are learned are marked."""
        turns = [
            f"{message['role']}{' (learned)' if learned else ''}: {message['content']}"
            for message, learned in zip(row.messages[:-1], row.learned)
        ]
        return "\n\n".join(turns), row.messages[-1]["content"]

    def describe(self, row: Trajectory, split: str) -> list[str]:
        """Identity and sizes."""
        head = f"{row.id}  ({row.role}, split {split}, teacher {row.model}, question {row.question_id})"
        return [head, f"{len(row.messages)} turns, {sum(row.learned)} learned"]

    def sides(self, row: Trajectory) -> list[tuple[str, str]]:
        """The question."""
        return [("question id", row.question_id)]

    def count(self, row: Trajectory, statistics: Statistics[Trajectory]) -> None:
        """Count learned turns, teachers and lengths."""
        statistics.count("trajectories", "learned_turns", str(sum(row.learned)))
        statistics.count("trajectories", "models", row.model)
        lengths = [statistics.length(message["content"]) for message in row.messages]
        statistics.measure("all", "whole", sum(lengths))
        statistics.measure("all", "learned", sum(n for n, learned in zip(lengths, row.learned) if learned))

    def tables(self, numbers: dict[str, Any], facts: Any) -> list[Table]:
        """Trajectories by learned turns and teacher, and their lengths."""
        counts = numbers.get("trajectories", {"learned_turns": {}, "models": {}})
        turns = sorted(counts["learned_turns"].items(), key=lambda item: int(item[0]))
        rows = [[f"with {name} learned turns", f"{count:,}"] for name, count in turns]
        rows += [[f"of {model}", f"{count:,}"] for model, count in sorted(counts["models"].items())]
        return [Table("Turns and teachers", ["", "trajectories"], rows), length_table(numbers)]


KIND = Trajectories()
