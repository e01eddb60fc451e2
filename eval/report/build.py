"""Puts the figures of several results folders together: one JSON value, from which the page and the plots are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tripletune.eval.report.figures import figures_of
from tripletune.eval.report.read import Other, Run
from tripletune.eval.report.variants import Group, differences, group_runs, sweeps_of
from tripletune.eval.statistics import paired_difference


def build_report(found: Sequence[Run | Other]) -> dict[str, Any]:
    """All figures of a report.

    Args:
        found: Results folders, in the order given.

    Returns:
        `groups` of runs over the same questions, `others`, and `missing`: sentences on what could not be said.
    """
    runs = [one for one in found if isinstance(one, Run)]
    groups = [_group(group) for group in group_runs(runs)]
    others = [
        {
            "name": one.name or one.folder,
            "folder": one.folder,
            "command": _command(one.about),
            "settings": dict(one.settings),
            "results": one.rows,
            "metrics": one.metrics,
        }
        for one in found
        if isinstance(one, Other)
    ]
    missing = [sentence for group in groups for run in group["runs"] for sentence in _missing(run)]
    missing += [
        f"`{one['name']}` was stopped before its end: it has {one['results']:,} results and no metrics yet. "
        "Give its command again to go on."
        for one in others
        if one["metrics"] is None
    ]
    return {"groups": groups, "others": others, "missing": missing}


def _group(group: Group) -> dict[str, Any]:
    metrics = group.runs[0].metrics
    reference = group.runs[0]
    order = group.in_paper_order()
    return {
        "task": group.task,
        "metrics": metrics,
        "runs": [
            {
                "name": name,
                "folder": run.folder,
                "system": run.system,
                "command": _command(run.about),
                "settings": dict(run.settings),
                "differs": {key: list(values) for key, values in differences(reference.settings, run.settings).items()},
                "ablations": list(ablations),
                "questions": len(run.rows),
                "expected": run.expected,
                "finished": run.finished,
                "cut_off": run.cut_off,
                "figures": figures_of(run),
            }
            for run, name, ablations in zip(group.runs, group.names, group.ablations)
        ],
        "differences": [_paired(reference, run, metrics) for run in group.runs],
        "ablations": {
            "order": order,
            "differences": [_paired(group.runs[order[0]], group.runs[n], metrics) for n in order],
        }
        if order
        else None,
        "sweeps": [
            {"option": sweep.option, "values": list(sweep.values), "runs": list(sweep.members)}
            for sweep in sweeps_of(group)
        ],
    }


def _paired(first: Run, second: Run, metrics: Sequence[str]) -> dict[str, Any] | None:
    """Differences to the first by metric, over the questions that both have; None for the first itself."""
    if first is second:
        return None
    scores = {row.id: row.scores for row in second.rows}
    both = [row for row in first.rows if row.id in scores]
    if not both:
        return None
    return {
        name: paired_difference([row.scores[name] for row in both], [scores[row.id][name] for row in both]).to_json()
        for name in metrics
        if all(name in scores[row.id] for row in both)
    }


def _command(about: Mapping[str, Any]) -> list[str] | None:
    return list(about["command"]) if about.get("command") else None


def _missing(run: Mapping[str, Any]) -> list[str]:
    name, figures = f"`{run['name']}`", run["figures"]
    found = []
    if not run["finished"]:
        of = f" of {run['expected']:,}" if run["expected"] else ""
        cut = "; its last line was cut off" if run["cut_off"] else ""
        found.append(
            f"{name} is not finished: it has {run['questions']:,}{of} questions{cut}. Its figures are about these "
            "alone; give its command again to go on."
        )
    if run["command"] is None:
        found.append(f"{name} does not say which command made it: an earlier version wrote its results.")
    if not figures:
        return found
    if figures["errors"]:
        found.append(
            f"{name}: {figures['errors']:,} questions failed; they score 0 and stay in the denominator of every score. "
            "Recall is that of the others."
        )
    if figures["recall"] is None and figures["errors"] < run["questions"]:
        found.append(f"{name} has no gold links (`--gold`), so the recall of its passages is not known.")
    roles = figures["roles"] or {}
    if any(one["tokens_read"] is None for one in roles.values()):
        found.append(f"{name} does not say how many tokens each role used: an earlier version wrote its results.")
    return found
