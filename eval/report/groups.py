"""Groups of comparable runs, their names, and comparisons within a group.

A `Group` holds runs with the same task, scores and question file that agree in all shared settings
(`eval/report/setting.py`); tables compare the group's first run with the others. A run is named after its difference to
the first run, in the CIRAG paper's words for ablations (tables 2 and 3, figures 7 and 8).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from tripletune.core.files import flatten
from tripletune.eval.report.runs import Run
from tripletune.eval.report.setting import EQUAL, apart, shared_settings, told_of
from tripletune.eval.statistics import correct_table, paired_table, verdict
from tripletune.rag.systems.cirag import GRANULARITIES

WITHOUT_TD, WITHOUT_RERANKER = "w/o TD", "w/o reranker"
# Table 3: granularity levels of the cascade -> name of the row.
CASCADES: dict[tuple[str, ...], str] = {
    ("triples", "sentences"): "w/o Passage",
    ("sentences", "passages"): "w/o Triple",
    # The paper has no such row; it is the third two-level cascade.
    ("triples", "passages"): "w/o Sentence",
    ("triples",): "w/o Sentence + Passage",
    ("sentences",): "w/o Triple + Passage",
    ("passages",): "w/o Triple + Sentence",
}
# The rows of tables 2 and 3, in the paper's order.
ABLATIONS = (WITHOUT_TD, WITHOUT_RERANKER, *CASCADES.values())
# Settings that are digests of a file; the name of a run says that they differ, without the digest.
_DIGESTS = ("corpus", "triples", "gold", "data")
# Settings in which ablations of CIRAG may differ.
_TOLD = ("options.rerank", "options.granularities", "integrator.spec", "integrator.weights", "encoder")


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of one task over one file of questions, the reference first, each with its ablations in the paper's words.

    `told` says in words which settings distinguish the group from the task's other groups.
    """

    runs: tuple[Run, ...]
    names: tuple[str, ...]
    ablations: tuple[tuple[str, ...], ...]
    told: str = ""

    @property
    def metrics(self) -> list[str]:
        """The scores that all runs have, the headline first."""
        return [name for name in self.runs[0].scores if all(name in run.scores for run in self.runs)]

    def in_paper_order(self) -> list[int]:
        """CIRAG runs that only leave out parts, the whole system first; empty without a whole system or an ablation."""
        whole = [n for n, found in enumerate(self.ablations) if self.runs[n].system == "cirag" and not found]
        if any(WITHOUT_TD in found for found in self.ablations):
            # For this ablation, the whole system integrates with a distilled student, not with its teacher.
            whole.sort(key=lambda n: self.runs[n].settings.get("integrator") is None)
        if not whole:
            return []
        base = self.runs[whole[0]].settings
        known = [whole[0], *(n for n, found in enumerate(self.ablations) if found)]
        # An untrained integrator needs prompts with more instructions, so prompts may differ.
        alike = [
            n for n in known
            if all(name in _TOLD or _is_prompt(name) for name in differences(base, self.runs[n].settings))
        ]  # fmt: skip
        alike.sort(key=lambda n: ([ABLATIONS.index(name) for name in self.ablations[n]], n))
        return alike if len(alike) > 1 else []


def group_runs(runs: Sequence[Run], across: Collection[str] = (), baseline: str | None = None) -> list[Group]:
    """Sort runs into groups and name them, in the given order; runs whose name, system or folder is `baseline` lead."""
    if baseline:
        named = [baseline in (run.name, run.settings["system"], Path(run.folder).name) for run in runs]
        if not any(named):
            raise ValueError(f"--baseline {baseline}: no run has this name, system or folder")
        runs = [run for _, run in sorted(zip(named, runs), key=lambda pair: not pair[0])]
    found: dict[str, list[Run]] = {}
    for run in runs:
        # A task file of the same name may have been changed between two runs.
        asked = [run.task, run.settings["task"]["metrics"], run.settings.get("data")]
        found.setdefault(json.dumps(asked), []).append(run)
    parts = []
    for members in found.values():
        # A run without gold links takes the number of hops from the other runs.
        hops = {name: n for run in members for name, n in zip(run.rows["id"], run.rows["hops"]) if n and n == n}
        for run in members:
            run.rows["hops"] = run.rows["id"].map(hops)
        parts += _comparable(members, across)
    groups = []
    for part in parts:
        names = [run.name or _name(part[0].settings, run.settings) for run in part]
        twice = {name for name in names if names.count(name) > 1}
        names = [f"{name} ({run.folder})" if name in twice else name for name, run in zip(names, part)]
        ablations = tuple(ablations_of(run.settings, run.name) for run in part)
        told = _told(part, [other for other in parts if other[0].task == part[0].task])
        groups.append(Group(tuple(part), tuple(names), ablations, told))
    return groups


def _comparable(runs: Sequence[Run], across: Collection[str]) -> list[list[Run]]:
    """The largest sets of runs that agree in all shared settings; a run may be in several."""
    fits = {(n, m): not apart(one, two, across) for n, one in enumerate(runs) for m, two in enumerate(runs)}
    parts: list[list[int]] = []
    for n in range(len(runs)):
        if not any(all(fits[n, m] for m in part) for part in parts):
            # Add the other runs that fit all runs of the part.
            parts.append([n])
            for other in range(len(runs)):
                if other != n and all(fits[other, m] for m in parts[-1]):
                    parts[-1].append(other)
    return [[runs[n] for n in sorted(part)] for part in parts]


def _told(part: Sequence[Run], parts: Sequence[Sequence[Run]]) -> str:
    """The settings that distinguish a part from the other parts, in words."""
    values = [{n: one for run in reversed(each) for n, one in shared_settings(run).items() if one} for each in parts]
    own = values[[each is part for each in parts].index(True)]
    # Other data have a corpus, triples and links of their own, so these tell nothing more.
    same = [one for one in values if one.get("data") == own.get("data")]
    pools = {name: same if name in ("corpus", "triples", "gold") else values for name in EQUAL if name in own}
    telling = [name for name, pool in pools.items() if any(one.get(name, own[name]) != own[name] for one in pool)]
    return ", ".join(f"{name} {told_of(own[name])}" for name in telling)


def ablations_of(settings: Mapping[str, Any], name: str = "") -> tuple[str, ...]:
    """The paper's ablations that a run's options make, or that its name "w/o TD" says.

    An integrator from a `pypi:` package is a base model, so the run is "w/o TD"; for other models the name must say so.
    """
    if settings.get("system") != "cirag":
        return ()
    options = settings.get("options") or {}
    untaught = name == WITHOUT_TD or str((settings.get("integrator") or {}).get("spec", "")).startswith("pypi:")
    levels = tuple(options.get("granularities") or GRANULARITIES)
    found = {WITHOUT_TD: untaught, WITHOUT_RERANKER: options.get("rerank") is False, CASCADES.get(levels, ""): True}
    return tuple(part for part, is_so in found.items() if part and is_so)


def compare_pairs(group: Group) -> dict[str, list[list[dict[str, Any] | None]]]:
    """For each metric, a matrix that compares all pairs of runs on the questions that both runs have.

    Row i, column j is "run i minus run j"; None on the diagonal, and for two runs without a common question.
    """
    tables = {n: run.rows.set_index("id") for n, run in enumerate(group.runs)}
    found = {}
    for metric in group.metrics:
        scores = {n: table[metric].dropna() for n, table in tables.items()}
        ids = {n: frozenset(one.index) for n, one in scores.items()}
        shared = Counter(ids.values()).most_common(1)[0][0]
        whole = {n: one.loc[sorted(shared)].to_numpy() for n, one in scores.items() if ids[n] == shared}
        pairs = paired_table(whole) if shared else {}
        for one, two in combinations(scores, 2):
            # Only comparisons with a stopped run lack the questions that this run lacks.
            if not (ids[one] == ids[two] == shared) and (both := sorted(ids[one] & ids[two])):
                pairs |= paired_table({n: scores[n].loc[both].to_numpy() for n in (one, two)})
        correct_table(pairs.values())
        matrix: list[list[dict[str, Any] | None]] = [[None for _ in group.runs] for _ in group.runs]
        for (one, two), gap in pairs.items():
            turned = gap | {"mean": -gap["mean"], "low": -gap["high"], "high": -gap["low"]}
            matrix[two][one], matrix[one][two] = (each | {"verdict": verdict(each)} for each in (gap, turned))
        found[metric] = matrix
    return found


def sweeps_of(group: Group) -> list[dict[str, Any]]:
    """Numeric options in which runs differ while all else is equal: rising values, and the first run of each value."""
    alike: dict[tuple[str, str], dict[float, int]] = {}
    for number, run in enumerate(group.runs):
        options = run.settings.get("options") or {}
        for option, value in options.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                rest = json.dumps({**run.settings, "options": {**options, option: None}}, sort_keys=True)
                alike.setdefault((option, rest), {}).setdefault(value, number)
    return [
        {"option": option, "values": sorted(members), "runs": [members[value] for value in sorted(members)]}
        for (option, _), members in sorted(alike.items(), key=lambda item: item[0][0])
        if len(members) > 1
    ]


def differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings by dotted name in which two runs differ, with both values, without fingerprints of different models."""
    one, two = flatten(first, "."), flatten(other, ".")
    names = [name for name in sorted(one.keys() | two.keys()) if one.get(name) != two.get(name)]
    weights = {f"{name.removesuffix('.spec')}{end}" for name in names for end in (".weights", "_weights")}
    return {name: (one.get(name), two.get(name)) for name in names if name not in weights}


def _name(reference: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    ablations, system = ablations_of(settings), str(settings["system"])
    parts = [f"{system} {' and '.join(ablations)}" if ablations else system]
    if system == reference["system"]:
        named = {*ablations, *ablations_of(reference)}
        for name, values in differences(reference, settings).items():
            # Leave out what the paper's names say, and differences that only restore the whole system.
            known = (
                (name == "options.rerank" and WITHOUT_RERANKER in named)
                or (name == "options.granularities" and named & set(CASCADES.values()))
                # BM25 without a reranker needs no encoder.
                or (name == "encoder" and WITHOUT_RERANKER in named and None in values)
                or (name.startswith("integrator.") and WITHOUT_TD in ablations)
                or name == "control_run"
            )
            if not known:
                parts.append(_difference(name, values[1]))
    return ", ".join(dict.fromkeys(parts))


def _difference(name: str, value: Any) -> str:
    if _is_prompt(name):
        return "other prompts"
    if name in _DIGESTS or name.startswith("task.") or name.endswith("weights"):
        return f"other {name.replace('_', ' ')}"
    short = name.removeprefix("options.").removesuffix(".spec")
    if isinstance(value, list):
        value = ",".join(map(str, value))
    if isinstance(value, str) and Path(value).is_absolute():
        value = "/".join(Path(value).parts[-3:])
    return f"no {short}" if value is None else f"{short}={value}"


def _is_prompt(name: str) -> bool:
    return name.startswith("files.") or name == "options.prompts"
