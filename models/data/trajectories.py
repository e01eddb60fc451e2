"""The record of a trajectory: a chat with the turns a student is to learn (CIRAG, section 3.5, eq. 7 and 8).

One JSON object a line: `{"id", "question_id", "role", "model", "messages": [{"role", "content"}], "learned": [bool]}`.
`learned` says of every message whether the loss counts it: the decisions y_t of the teacher, not what was retrieved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tripletune.models.data.records import shown, stored_rows, text_fields
from tripletune.models.llm import Message

_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A chat and its loss mask.

    Attributes:
        role: What the calls were for, for example "cirag.integrate".
        model: The teacher, as the ledger calls it.
    """

    id: str
    question_id: str
    role: str
    model: str
    messages: tuple[Message, ...]
    learned: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.messages) != len(self.learned):
            raise ValueError(f"trajectory {self.id!r}: {len(self.messages)} turns and {len(self.learned)} flags")
        if not any(self.learned):
            raise ValueError(f"trajectory {self.id!r}: no turn is learned")

    def to_json(self) -> dict[str, Any]:
        """The row as it is stored."""
        return {**asdict(self), "messages": list(self.messages), "learned": list(self.learned)}

    @classmethod
    def from_json(cls, row: dict[str, Any], where: str = "trajectory") -> Trajectory:
        """Read a stored row; `where` (file and line) opens every error message."""
        texts = text_fields(row, where, "trajectory", ("id", "question_id", "role", "model"))
        messages, learned = row.get("messages"), row.get("learned")
        if not isinstance(messages, list) or not all(
            isinstance(turn, dict) and turn.get("role") in _ROLES and isinstance(turn.get("content"), str)
            for turn in messages
        ):
            raise ValueError(
                f"{where}: messages must be a list of turns with a role ({', '.join(_ROLES)}) and a text, "
                f"found {shown(messages)}"
            )
        if not isinstance(learned, list) or not all(isinstance(flag, bool) for flag in learned):
            raise ValueError(f"{where}: learned must be a list of true and false, found {shown(learned)}")
        turns: list[Message] = [{"role": turn["role"], "content": turn["content"]} for turn in messages]
        try:
            return cls(messages=tuple(turns), learned=tuple(learned), **texts)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def read_trajectories(path: str | Path, split: str | None = None) -> Iterator[Trajectory]:
    """Stream the trajectories of a file, or of one split of a folder, in file order."""
    for where, row in stored_rows(path, split):
        yield Trajectory.from_json(row, where)
