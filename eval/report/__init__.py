"""`tripletune eval report`: which runs belong together, what sets them apart, and one folder with page and plots.

Runs of one task, with the same scores and over one question file, are a group; its first run is the one the others are
compared with. A run is named after what differs from that one, in the CIRAG paper's words where an option is one of its
ablations (tables 2 and 3, figures 7 and 8).
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from tripletune.eval.report.page import page_of
from tripletune.eval.report.read import Other, Run, figures_of, read_folder
from tripletune.eval.statistics import flatten, paired_difference
from tripletune.models.files import check_folder, new_folder, write_json, write_text
from tripletune.rag.systems.cirag import GRANULARITIES

logger = logging.getLogger(__name__)
PAGE, FIGURES = "report.md", "report.json"
_MADE = (PAGE, FIGURES, "*.png")
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


def write_report(args: argparse.Namespace, console: Console) -> None:
    """Write page, figures and plots; the same results give the same bytes.

    Args:
        args: `folders` (results folders, or NAME=FOLDER), `output` and `no_plots`.
        console: Told what was written.

    Raises:
        FileNotFoundError: a folder is not there.
        ValueError: a folder holds no results, or is named twice; or plots are wanted and matplotlib is missing.
        FileExistsError: the output folder holds something else than a report.
    """
    check_folder(args.output, _MADE, overwrite=True)
    found = [read_folder(spec) for spec in args.folders]
    places = [Path(one.folder).resolve() for one in found]
    twice = next((one.folder for one, place in zip(found, places) if places.count(place) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is named twice: name every folder once")
    report = build_report(found)
    told: list[dict[str, str]] = []
    files: dict[str, bytes] = {}
    if not args.no_plots:
        from tripletune.eval.report.plots import draw_plots

        told, files = draw_plots(report)
    with new_folder(args.output, _MADE, overwrite=True, sources=places) as scratch:
        for name, png in files.items():
            (scratch / name).write_bytes(png)
        write_text(scratch / PAGE, page_of(report, told))
        write_json(scratch / FIGURES, report)
    for sentence in report["missing"]:
        logger.warning("%s", sentence.replace("`", ""))
    console.print(f"{Path(args.output) / PAGE}: {len(found)} results, {len(files)} plots")


def build_report(found: Sequence[Run | Other]) -> dict[str, Any]:
    """All figures of a report.

    Args:
        found: Results folders, in the order given.

    Returns:
        `groups` of runs over the same questions, `others`, and `missing`: sentences on what could not be said.
    """
    groups = [_figures(group) for group in group_runs([one for one in found if isinstance(one, Run)])]
    others = [
        {
            "name": one.name or one.folder,
            "folder": one.folder,
            "command": one.about.get("command") or None,
            "settings": one.settings,
            "results": one.rows,
            "metrics": one.metrics,
        }
        for one in found
        if isinstance(one, Other)
    ]
    missing = [sentence for group in groups for run in group["runs"] for sentence in _missing(run)]
    missing += [
        f"{_span(str(one['name']))} was stopped before its end: it has {one['results']:,} results and no metrics yet. "
        "Give its command again to continue."
        for one in others
        if one["metrics"] is None
    ]
    return {"groups": groups, "others": others, "missing": missing}


def _figures(group: Group) -> dict[str, Any]:
    reference, order = group.runs[0], group.in_paper_order()
    return {
        "task": group.task,
        "metrics": reference.metrics,
        "runs": [
            {
                "name": name,
                "folder": run.folder,
                "system": run.system,
                "command": run.about.get("command") or None,
                "settings": run.settings,
                "differs": differences(reference.settings, run.settings),
                "ablations": ablations,
                "questions": len(run.rows),
                "expected": run.expected,
                "finished": run.finished,
                "cut_off": run.cut_off,
                "figures": figures_of(run),
            }
            for run, name, ablations in zip(group.runs, group.names, group.ablations)
        ],
        "differences": [_paired(reference, run) for run in group.runs],
        "ablations": {
            "order": order,
            "differences": [_paired(group.runs[order[0]], group.runs[place]) for place in order],
        }
        if order
        else None,
        "sweeps": sweeps_of(group),
    }


def _paired(first: Run, second: Run) -> dict[str, Any] | None:
    """Differences to the first by metric, over the questions that both have; None for the first itself."""
    if first is second or first.rows.empty or second.rows.empty:
        return None
    both = first.rows.merge(second.rows, on="id", suffixes=("_first", "_second"))
    if both.empty:
        return None
    return {name: paired_difference(both[f"{name}_first"], both[f"{name}_second"]) for name in first.metrics}


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
        base = self.runs[whole[0]].settings
        known = [whole[0], *(n for n, found in enumerate(self.ablations) if found)]
        alike = [n for n in known if not _beyond_ablations(base, self.runs[n].settings)]
        alike.sort(key=lambda n: ([ABLATIONS.index(name) for name in self.ablations[n]], n))
        return alike if len(alike) > 1 else []


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
        ablations = tuple(ablations_of(run.settings, run.name) for run in members)
        groups.append(Group(members[0].task, tuple(members), tuple(names), ablations))
    return groups


def ablations_of(settings: Mapping[str, Any], name: str = "") -> tuple[str, ...]:
    """The paper's rows that a run is by its options, or because its user named it "w/o TD".

    An integrator from a `pypi:` package is a base model, so it is "w/o TD"; whether another one was distilled can't be
    told from its name, so its user names the run.
    """
    if settings.get("system") != "cirag":
        return ()
    options = settings.get("options") or {}
    found = []
    if name == WITHOUT_TD or str((settings.get("integrator") or {}).get("spec", "")).startswith("pypi:"):
        found.append(WITHOUT_TD)
    if options.get("rerank") is False:
        found.append(WITHOUT_RERANKER)
    levels = tuple(options.get("granularities") or GRANULARITIES)
    if levels in CASCADES:
        found.append(CASCADES[levels])
    return tuple(found)


def sweeps_of(group: Group) -> list[dict[str, Any]]:
    """Every numeric option in which runs differ while all else is the same.

    Returns:
        `{"option", "values", "runs"}`: the values, rising, and for each the first run with it, by its place in the
        group.
    """
    options = [run.settings.get("options") or {} for run in group.runs]
    numeric = sorted({name for one in options for name, value in one.items() if _is_number(value)})
    sweeps = []
    for option in numeric:
        alike: dict[str, dict[float, int]] = {}
        for number, run in enumerate(group.runs):
            value: Any = options[number].get(option)
            if _is_number(value):
                rest = {**run.settings, "options": {**options[number], option: None}}
                alike.setdefault(json.dumps(rest, sort_keys=True), {}).setdefault(value, number)
        for members in alike.values():
            if len(members) > 1:
                values = sorted(members)
                sweeps.append({"option": option, "values": values, "runs": [members[value] for value in values]})
    return sweeps


def differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings by dotted name in which two runs differ, with both values; not the weights of models that differ."""
    one, two = flatten(first, "."), flatten(other, ".")
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


def _span(name: str) -> str:
    return f"`{name.replace('`', chr(39))}`"


def _missing(run: Mapping[str, Any]) -> list[str]:
    name, figures = _span(run["name"]), run["figures"]
    found = []
    if not run["finished"]:
        of = f" of {run['expected']:,}" if run["expected"] else ""
        cut = "; its last line was cut off" if run["cut_off"] else ""
        found.append(
            f"{name} is not finished: it has {run['questions']:,}{of} questions{cut}. Its figures are about these "
            "alone; give its command again to continue."
        )
    if not figures:
        return found
    if figures["errors"]:
        found.append(
            f"{name}: {figures['errors']:,} questions failed; they score 0 and stay in the denominator of every score. "
            "Recall is that of the others."
        )
    if figures["recall"] is None and figures["errors"] < run["questions"]:
        found.append(f"{name} has no gold links (`--gold`), so the recall of its passages is not known.")
    return found
