"""Which runs belong together, what sets them apart, and what the CIRAG paper calls that (tables 2 and 3, figures 7, 8).

Runs of one task, with the same scores and over one question file, are a group; its first run is the one the others are
compared with. A run is named after what differs from that one, in the paper's words where an option is one of the
paper's ablations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tripletune.eval.report.read import Run
from tripletune.rag.systems.cirag.options import GRANULARITIES

WITHOUT_TD, WITHOUT_RERANKER = "w/o TD", "w/o reranker"
# Table 3: the levels that are asked, and the name of the row.
CASCADES: dict[tuple[str, ...], str] = {
    ("triples", "sentences"): "w/o Passage",
    ("sentences", "passages"): "w/o Triple",
    # The paper has no such row; it is the third two-level cascade.
    ("triples", "passages"): "w/o Sentence",
    ("triples",): "w/o Sentence + Passage",
    ("sentences",): "w/o Triple + Passage",
    ("passages",): "w/o Triple + Sentence",
}
# The rows of tables 2 and 3, in their order.
ABLATIONS = (WITHOUT_TD, WITHOUT_RERANKER, *CASCADES.values())
# Settings that only name a file's content; a difference is told without the digest.
_DIGESTS = ("corpus", "triples", "gold", "data")


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of one task over one file of questions.

    Attributes:
        task: The task's name.
        runs: In the order given; the first is the reference.
        names: Their names, all different.
        ablations: For each run, the rows of the paper it is.
    """

    task: str
    runs: tuple[Run, ...]
    names: tuple[str, ...]
    ablations: tuple[tuple[str, ...], ...]

    def in_paper_order(self) -> list[int]:
        """CIRAG runs that only leave out parts, the whole system first; empty when nothing was left out or all."""
        whole = [n for n, found in enumerate(self.ablations) if self.runs[n].system == "cirag" and not found]
        if any(WITHOUT_TD in found for found in self.ablations):
            # The whole system of that row integrates with a distilled student, not with its teacher.
            whole.sort(key=lambda n: self.runs[n].settings.get("integrator") is None)
        if not whole:
            return []
        base = whole[0]
        known = [base, *(n for n, found in enumerate(self.ablations) if found)]
        alike = [n for n in known if not _beyond_ablations(self.runs[base].settings, self.runs[n].settings)]
        if len(alike) < 2:
            return []
        return sorted(alike, key=lambda n: ([ABLATIONS.index(name) for name in self.ablations[n]], n))


@dataclass(frozen=True, slots=True)
class Sweep:
    """Runs of a group that differ in one numeric option alone.

    Attributes:
        option: The option.
        values: Its values, rising.
        members: The runs with these values, by their place in the group.
    """

    option: str
    values: tuple[float, ...]
    members: tuple[int, ...]


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Sort runs into groups and name them, in the order given."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        # A task file of the same name may have been changed between two runs.
        found.setdefault(json.dumps([run.task, run.metrics, run.settings.get("data")]), []).append(run)
    groups = []
    for members in found.values():
        names = [run.name or _name(members[0].settings, run.settings) for run in members]
        twice = {name for name in names if names.count(name) > 1}
        names = [f"{name} ({run.folder})" if name in twice else name for name, run in zip(names, members)]
        ablations = tuple(_ablations(run) for run in members)
        groups.append(Group(members[0].task, tuple(members), tuple(names), ablations))
    return groups


def ablations_of(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The paper's rows that a run is by its options.

    An integrator from a `pypi:` package is a base model, so it is "w/o TD"; whether another one was distilled can't be
    told from its name, so its user names the run.
    """
    options = settings.get("options") or {}
    if settings.get("system") != "cirag":
        return ()
    found = []
    if str((settings.get("integrator") or {}).get("spec", "")).startswith("pypi:"):
        found.append(WITHOUT_TD)
    if options.get("rerank") is False:
        found.append(WITHOUT_RERANKER)
    levels = tuple(options.get("granularities") or GRANULARITIES)
    if levels in CASCADES:
        found.append(CASCADES[levels])
    return tuple(found)


def _ablations(run: Run) -> tuple[str, ...]:
    """The paper's rows that a run is by its options, or because its user named it so."""
    found = ablations_of(run.settings)
    named = run.name == WITHOUT_TD and run.system == "cirag" and WITHOUT_TD not in found
    return (WITHOUT_TD, *found) if named else found


def sweeps_of(group: Group) -> list[Sweep]:
    """Every numeric option in which runs differ while all else is the same; one run for each value."""
    options = [run.settings.get("options") or {} for run in group.runs]
    numeric = sorted({name for one in options for name, value in one.items() if _is_number(value)})
    sweeps = []
    for option in numeric:
        alike: dict[str, dict[float, int]] = {}
        for number, run in enumerate(group.runs):
            value: Any = options[number].get(option)
            if not _is_number(value):
                continue
            rest = {**run.settings, "options": {k: v for k, v in options[number].items() if k != option}}
            alike.setdefault(json.dumps(rest, sort_keys=True), {}).setdefault(value, number)
        for members in alike.values():
            if len(members) > 1:
                values = sorted(members)
                sweeps.append(Sweep(option, tuple(values), tuple(members[value] for value in values)))
    return sweeps


def differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings by dotted name in which two runs differ, with both values; not the weights of models that differ."""
    one, two = flat(first), flat(other)
    found = {
        name: (one.get(name), two.get(name))
        for name in sorted(one.keys() | two.keys())
        if one.get(name) != two.get(name)
    }
    return {
        name: values
        for name, values in found.items()
        if not (name.endswith(".weights") and f"{name.removesuffix('.weights')}.spec" in found)
        and not (name == "teacher_weights" and "teacher" in found)
    }


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name."""
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[prefix + name] = value
    return values


def _name(reference: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    ablations = ablations_of(settings)
    system = str(settings["system"])
    parts = [f"{system} {' and '.join(ablations)}" if ablations else system]
    if system == reference["system"]:
        for name, (_, value) in differences(reference, settings).items():
            if not _told_by(name, ablations, reference, settings):
                parts.append(_difference(name, value))
    return ", ".join(dict.fromkeys(parts))


def _told_by(name: str, ablations: Sequence[str], reference: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether a difference is already said by the paper's names, or is only the way back to the whole system."""
    before = ablations_of(reference)
    if name == "options.rerank":
        return WITHOUT_RERANKER in (*ablations, *before)
    if name == "options.granularities":
        return any(row in CASCADES.values() for row in (*ablations, *before))
    if name == "encoder":
        # Without a reranker BM25 needs none.
        return WITHOUT_RERANKER in (*ablations, *before) and None in (settings["encoder"], reference["encoder"])
    return name.startswith("integrator.") and WITHOUT_TD in ablations


def _difference(name: str, value: Any) -> str:
    if _is_prompt(name):
        return "other prompts"
    if name in _DIGESTS or name.startswith("task.") or name.endswith("weights"):
        return f"other {name.replace('_', ' ')}"
    short = name.removeprefix("options.").removesuffix(".spec")
    if short == "integrator" and value is None:
        return "integrated by the teacher"
    if isinstance(value, list):
        value = ",".join(map(str, value))
    if isinstance(value, str) and Path(value).is_absolute():
        value = "/".join(Path(value).parts[-3:])
    return f"no {short}" if value is None else f"{short}={value}"


def _beyond_ablations(base: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    told = ("options.rerank", "options.granularities", "integrator.spec", "integrator.weights", "encoder")
    # An untrained integrator needs prompts that tell it more; the row's name says so.
    return any(name not in told and not _is_prompt(name) for name in differences(base, other))


def _is_prompt(name: str) -> bool:
    return name.startswith("files.") or name == "options.prompts"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
