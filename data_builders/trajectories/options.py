"""Options of `tripletune build trajectories`, and the roles that they name in a ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from tripletune.core.options import CheckedOptions, setting
from tripletune.data_builders.datasets import RowKind
from tripletune.data_builders.datasets.kinds import RECORDS, TRAJECTORIES, with_rejected
from tripletune.data_builders.trajectories.ledger_chats import RoleModel, roles_with_models
from tripletune.rag.systems import find_system, system_names

# Options that choose among a model's runs and replies.
_OF_RUNS = (
    "records", "pairs", "roles", "model", "min_score", "no_repairs", "no_repeated_query", "answer_kept", "min_recall",
    "shortest",
)  # fmt: skip


@dataclass(frozen=True)
class TrajectoryOptions(CheckedOptions):
    """Which trajectories are kept."""

    source: tuple[str, ...] = setting(
        (),
        "instead of --results, a benchmark file whose gold steps become cirag's decisions, without a model: "
        "two_wiki:FILE, musique:FILE:TRIPLES or qa:FILE; repeatable",
    )
    distractors: int = setting(
        3,
        "with --source, passages without help in each round, whose facts the student has to leave out",
        at_least=0,
        needs="source",
    )
    system: str = setting("cirag", "learn the calls of this system", choices=system_names())
    records: bool = setting(False, "write planning and answering records of RAS, of any planner; no ledger is read")
    pairs: bool = setting(
        False, "write a better and a worse reply wherever runs of a question differ, for train.preference"
    )
    roles: tuple[str, ...] = setting(
        (), "calls to learn, for example resolve; repeatable (default: all; for cirag only integrate, as in the paper)"
    )
    model: str | None = setting(None, "train only on calls to this model (its name as in the ledger)")
    prompt: str | None = setting(
        None,
        "file with the student's system prompt, if not the teacher's; its loop needs the same (--set prompts=FOLDER)",
    )
    min_score: tuple[str, ...] = setting((), "minimum score, for example exact_match=1 or f1=0.8; repeatable")
    no_repairs: bool = setting(False, "leave out chats with a repaired or recovered reply")
    no_repeated_query: bool = setting(False, "leave out questions that ended with a repeated query")
    answer_kept: bool = setting(
        False, "leave out questions of which no kept fact names a gold answer, and those with yes or no (cirag)"
    )
    min_recall: float | None = setting(None, "minimum share of supporting passages that were retrieved")
    shortest: int | None = setting(None, "keep the N runs per question with the fewest turns or steps", at_least=1)
    limit: int | None = setting(None, "keep the first N runs of the results; the paper has 3,000", at_least=1)
    validation_fraction: float = setting(0.0, "share of the questions for validation", at_least=0, below=1)
    seed: int = setting(0, "seed of the split")

    def check(self) -> list[str]:
        """Problems of scores, of systems without plans, and of pairs.

        Only a score or `answer_kept` says which runs are good, so pairs need one; the other filters say what a run
        looks like. With `shortest`, the bad runs would be left out.
        """
        problems = self._source_problems()
        for text in self.min_score:
            try:
                parse_score(text)
            except ValueError:
                problems.append(f"min_score: {text!r}: write it as METRIC=VALUE, for example exact_match=1")
        if self.records and self.system in system_names() and not find_system(self.system).plans:
            problems.append(
                f"records: {self.system} has no plans to learn; name the system of a Graph-LLM: --system ras"
            )
        if self.records and self.prompt:
            problems.append("prompt: records hold no prompt; give the recipe its own (data.planning_prompt)")
        if self.answer_kept and self.system != "cirag":
            problems.append(f"answer_kept: {self.system} keeps no facts as CIRAG does; set min_score")
        says_what_is_good = self.min_score or self.answer_kept
        if self.pairs and (not says_what_is_good or self.shortest is not None):
            problems.append("pairs: set min_score or answer_kept, which say what a good run is, and leave out shortest")
        return problems

    def _source_problems(self) -> list[str]:
        """Options that choose among a model's runs, which have no effect on annotations."""
        problems: list[str] = []
        if not self.source:
            return problems
        if self.system != "cirag":
            problems.append(f"source: gold steps become decisions of cirag alone, not of {self.system}")
        for option in fields(self):
            if option.name in _OF_RUNS and getattr(self, option.name) != option.default:
                problems.append(f"{option.name}: without effect with --source, where no model ran: leave it out")
        return problems

    @property
    def kind(self) -> RowKind[Any]:
        """The kind of rows to write: chats, or records with `records`; both with a rejected reply with `pairs`."""
        kind: RowKind[Any] = TRAJECTORIES
        if self.records:
            kind = RECORDS
        if self.pairs:
            kind = with_rejected(kind)
        return kind

    def roles_in(self, ledger: Path) -> list[str]:
        """The full names of the wanted roles, such as "cirag.integrate".

        Named roles are returned whether the ledger has them or not; without names, these are all roles of the system
        in the ledger.
        """
        names = self.roles
        if not names and self.system == "cirag":
            # The paper's student learns the integrator alone (CIRAG, section 3.5).
            names = ("integrate",)
        prefix = f"{self.system}."
        if names:
            return [prefix + name.removeprefix(prefix) for name in names]
        return sorted({role for role, _ in roles_with_models(ledger) if role.startswith(prefix)})

    def check_ledgers(self, ledgers: Sequence[Path]) -> None:
        """Raise `ValueError` for a system, role or model that has no call in any of the ledgers.

        One prompt cannot replace those of several roles, so `prompt` needs a single one.
        """
        if self.records or self.source:
            return
        stored: set[RoleModel] = set()
        wanted: set[str] = set()
        for ledger in ledgers:
            stored |= roles_with_models(ledger)
            wanted |= set(self.roles_in(ledger))
        if not wanted:
            # No ledger has a role of this system, so the message names all of them.
            wanted = {f"{self.system}.…"}
        present = {role for role, model in stored if self.model in (None, model)}
        missing = ", ".join(sorted(wanted - present))
        if missing:
            by_model = f" by {self.model}" if self.model else ""
            held = ", ".join(f"{role} by {model}" for role, model in sorted(stored))
            raise ValueError(f"no ledger has a call of {missing}{by_model}; the ledgers have {held or 'no calls'}")
        if self.prompt and len(wanted) > 1:
            raise ValueError(f"prompt: {', '.join(sorted(wanted))} do not share one prompt: name one with --roles")


class LeastScore(NamedTuple):
    """The name of a score, and the least value that a run must have."""

    name: str
    least: float


def parse_score(text: str) -> LeastScore:
    """Read "exact_match=1"; a `ValueError` if the value is no number."""
    name, _, least = text.partition("=")
    return LeastScore(name.strip(), float(least))
