"""Replies that could not be read, by role: when there are many, the terminal and the report say so.

A strong model that writes another form than a prompt asks for lowers recall without an error. So the rate and an
example belong beside the scores.
"""

from __future__ import annotations

from dataclasses import dataclass

from tripletune.core.tables import on_one_line
from tripletune.llm.question_client import CALLS, TRAINED_PLANNER, UNREADABLE
from tripletune.llm.replies import REPAIR_ROLE
from tripletune.rag.results import StoredTrace

# Shares of unreadable replies above this are reported.
REPORTED_SHARE = 0.05


@dataclass(slots=True)
class UnreadableReplies:
    """The replies of a role.

    Attributes:
        replies: All replies, with those of repair turns.
        unreadable: Those that could not be read, with those whose repair turn succeeded.
        reason: Why the example could not be read.
        example: The beginning of the first of them.
    """

    role: str
    replies: int = 0
    unreadable: int = 0
    reason: str = ""
    example: str = ""

    @property
    def sentence(self) -> str:
        """What a user should know."""
        share = f"{self.unreadable:,} of {self.replies:,} replies of {self.role} could not be read"
        return f"{share}, for example ({self.reason}): {on_one_line(self.example)}"


class UnreadableCounter:
    """Counts replies by role over the traces of a run."""

    def __init__(self) -> None:
        self._roles: dict[str, UnreadableReplies] = {}
        self._index_is_counted = False

    def add(self, trace: StoredTrace) -> None:
        """Add a question to the counts of its roles: replies, those that could not be read, and a first example.

        Repairs count as replies of the role that they repair.
        """
        for tally, count in trace.tallies.items():
            if tally.startswith(CALLS):
                role = tally.removeprefix(CALLS).removesuffix(REPAIR_ROLE)
                self._replies_of(role).replies += count
            elif tally.startswith(UNREADABLE):
                self._add_unreadable(tally.removeprefix(UNREADABLE), count, trace)
        # A Graph-LLM has no client that counts its calls; other systems never tally this role as unreadable.
        self._replies_of(TRAINED_PLANNER).replies += len(trace.actions)
        self._add_index_once(trace)

    def _add_index_once(self, trace: StoredTrace) -> None:
        """Add the calls that made the corpus's one graph, which every question of a run notes with the same numbers."""
        if self._index_is_counted:
            return
        for role, counts in trace.index.items():
            self._index_is_counted = True
            self._replies_of(role.removesuffix(REPAIR_ROLE)).replies += counts[0]
        for role, count in trace.index_unreadable.items():
            self._add_unreadable(role, count, trace)

    def _add_unreadable(self, role: str, count: int, trace: StoredTrace) -> None:
        """Count replies of a role that could not be read, and keep the first one that a trace has as an example."""
        replies = self._replies_of(role)
        replies.unreadable += count
        if not replies.example:
            replies.reason, replies.example = trace.unreadable.get(role, ("", ""))

    def roles_to_report(self) -> list[UnreadableReplies]:
        """The roles whose share of unreadable replies is too high, by name."""
        too_many = []
        for _, replies in sorted(self._roles.items()):
            if replies.unreadable > REPORTED_SHARE * replies.replies:
                too_many.append(replies)
        return too_many

    def _replies_of(self, role: str) -> UnreadableReplies:
        """The counts of a role, for the caller to add to; a role that is new starts at 0."""
        return self._roles.setdefault(role, UnreadableReplies(role))
