"""The page of a report in Markdown. It holds no figure that is not in the report's JSON, and no time of day."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tripletune.data_builders.datasets.card import table
from tripletune.eval.metrics import find_metrics
from tripletune.eval.report.figures import COSTS, LEVELS

_NOTE = (
    "Scores, shares and recall are times 100. In brackets: the 95 % interval of a bootstrap over questions. "
    "Differences are paired by question; p is the two-sided bootstrap p-value."
)
_OPTION_TITLES = {
    "candidates": "candidate triples a round, N",
    "max_rounds": "most rounds, L",
    "top_k": "passages a round, K",
}


def page_of(report: Mapping[str, Any], plots: Sequence[Mapping[str, str]]) -> str:
    """The whole page.

    Args:
        report: The figures, from `eval.reports.build.build_report`.
        plots: `{"file", "section", "caption"}` of every plot; the section is "<group number>/<name>".
    """
    parts = ["# Evaluation report", _NOTE]
    if report["missing"]:
        parts += ["## What is missing", "\n".join(f"- {sentence}" for sentence in report["missing"])]
    parts += _overview(report["groups"])
    for number, group in enumerate(report["groups"]):
        parts += _group(number, group, plots)
    if report["others"]:
        parts.append("## Other evaluations")
        for other in report["others"]:
            parts += _other(other)
    parts += _sources(report)
    return "\n\n".join(parts) + "\n"


def option_title(option: str) -> str:
    """An option in words, with the paper's letter where it has one."""
    return _OPTION_TITLES.get(option, option.replace("_", " "))


def ablation_name(run: Mapping[str, Any]) -> str:
    """A run's name in a table of ablations, where the system is understood."""
    if not run["ablations"]:
        return f"{run['name']} (whole)"
    return str(run["name"]).removeprefix(f"{run['system']} ")


def interval(value: Mapping[str, Any] | None, times: float = 100, digits: int = 1) -> str:
    """A mean with its interval; a dash where there is nothing."""
    if not value or value["mean"] is None:
        return "-"
    mean, low, high = (format(times * value[key], f".{digits}f") for key in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def _overview(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """One row a name, one column a task, for names that several tasks have (tables 1 and 2 of the CIRAG paper)."""
    names = [[run["name"] for run in group["runs"]] for group in groups]
    every = dict.fromkeys(name for found in names for name in found)
    shared = [name for name in every if sum(name in found for found in names) > 1]
    if not shared:
        return []
    shown = [(group, metric) for group in groups for metric in group["metrics"]]
    rows = []
    for name in shared:
        cells = []
        for group, metric in shown:
            run = next((run for run in group["runs"] if run["name"] == name), None)
            cells.append(interval(run["figures"]["scores"][metric]) if run and run["figures"] else "-")
        rows.append([name, *cells])
    head = ["", *(f"{group['task']} {metric}" for group, metric in shown)]
    return ["## All tasks", table(head, rows)]


def _group(number: int, group: Mapping[str, Any], plots: Sequence[Mapping[str, str]]) -> list[str]:
    runs = [run for run in group["runs"] if run["figures"]]
    questions = max(run["expected"] or run["questions"] for run in group["runs"])
    title = f"## {group['task']}, {questions:,} questions"
    if not runs:
        return [title, "No question has a result yet."]
    sections = (
        ("scores", "Scores", _scores(group)),
        ("ablations", "Ablations", _ablations(group)),
        ("sweeps", "Sweeps", _sweeps(group)),
        ("types", "By type of question", _types(runs, group["metrics"])),
        ("granularity", "Which granularity answered", _granularity(runs, group["metrics"])),
        ("recall", "Supporting passages found", _recall(runs)),
        ("rounds", "Rounds", _rounds(runs)),
        ("cost", "Calls and tokens a question", _cost(runs)),
        ("latency", "Latency", _latency(runs)),
        ("decisions", "Decisions", _decisions(runs)),
    )
    parts = [title]
    for key, heading, body in sections:
        pictures = [
            f"![{plot['caption']}]({plot['file']})\n\n{plot['caption']}."
            for plot in plots
            if plot["section"] == f"{number}/{key}"
        ]
        if body:
            parts += [f"### {heading}", *body, *pictures]
    return parts


def _scores(group: Mapping[str, Any]) -> list[str]:
    metrics, first = group["metrics"], group["runs"][0]["name"]
    head = ["run", "questions"]
    for metric in metrics:
        head += [metric] if len(group["runs"]) < 2 else [metric, f"minus {first}", "p"]
    rows = []
    for run, gaps in zip(group["runs"], group["differences"]):
        row = [run["name"], _count(run)]
        for metric in metrics:
            row.append(interval(run["figures"]["scores"][metric]) if run["figures"] else "-")
            row += _gap(gaps, metric) if len(group["runs"]) > 1 else []
        rows.append(row)
    known = find_metrics()
    explained = [f"- {name}: {known[name].explanation}" for name in metrics if name in known]
    return [table(head, rows), "\n".join(explained)]


def _ablations(group: Mapping[str, Any]) -> list[str]:
    if not group["ablations"]:
        return []
    order = group["ablations"]["order"]
    whole = group["runs"][order[0]]["name"]
    head = ["method"]
    for metric in group["metrics"]:
        head += [metric, f"minus {whole}", "p"]
    rows = []
    for place, gaps in zip(order, group["ablations"]["differences"]):
        run = group["runs"][place]
        row = [ablation_name(run)]
        for metric in group["metrics"]:
            row += [interval(run["figures"]["scores"][metric]) if run["figures"] else "-", *_gap(gaps, metric)]
        rows.append(row)
    return ["The rows of the CIRAG paper's tables 2 and 3, in their order.", table(head, rows)]


def _sweeps(group: Mapping[str, Any]) -> list[str]:
    parts = []
    for sweep in group["sweeps"]:
        runs = [group["runs"][place] for place in sweep["runs"]]
        rows = [
            [
                f"{value:g}",
                *(interval(run["figures"]["scores"][metric]) if run["figures"] else "-" for metric in group["metrics"]),
                *(interval(run["figures"]["cost"][name], 1) if run["figures"] else "-" for name in COSTS[:2]),
            ]
            for value, run in zip(sweep["values"], runs)
        ]
        head = [option_title(sweep["option"]), *group["metrics"], "calls", "tokens read"]
        parts.append(table(head, rows))
    return parts


def _types(runs: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> list[str]:
    metric = metrics[0]
    sizes: dict[str, int] = {}
    for run in runs:
        for kind, found in (run["figures"]["by_type"] or {}).items():
            sizes[kind] = max(sizes.get(kind, 0), found[metric]["n"])
    if not sizes:
        return []
    kinds = sorted(sizes)
    rows = [
        [run["name"], *(interval((run["figures"]["by_type"] or {}).get(kind, {}).get(metric)) for kind in kinds)]
        for run in runs
    ]
    return [f"{metric}, the headline:", table(["run", *(f"{kind} ({sizes[kind]:,})" for kind in kinds)], rows)]


def _granularity(runs: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> list[str]:
    known = [(run["name"], found) for run in runs if (found := run["figures"]["granularity"])]
    if not known:
        return []
    shares = [[name, *(interval(found[level]["share"]) for level in LEVELS)] for name, found in known]
    scores = [
        [name, level, f"{found[level][metrics[0]]['n']:,}", *(interval(found[level][metric]) for metric in metrics)]
        for name, found in known
        for level in LEVELS
        if found[level][metrics[0]]["n"]
    ]
    note = '"default": no level said that its evidence was enough, so the last level\'s answer stands.'
    return [
        "Share of the questions that each level answered:",
        table(["run", *LEVELS], shares),
        "Scores of the questions that each level answered:",
        table(["run", "answered from", "questions", *metrics], scores),
        note,
    ]


def _recall(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    found = [(run["name"], run["figures"]["recall"]) for run in runs if run["figures"]["recall"]]
    if not found:
        return []
    rounds = max((len(one["by_round"]) for _, one in found), default=0)
    head = ["run", *(f"after round {number}" for number in range(1, rounds + 1)), "kept"]
    rows = [
        [name, *(interval(one["by_round"].get(str(number))) for number in range(1, rounds + 1)), interval(one["kept"])]
        for name, one in found
    ]
    note = (
        "A question that has ended keeps its last value. Kept: supporting passages that a core triple comes from, "
        "which is what the answer can be read from."
    )
    return [table(head, rows), note]


def _rounds(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    counts = sorted({int(count) for run in runs for count in run["figures"]["rounds"]["questions"]})
    ends = sorted({end for run in runs for end in run["figures"]["rounds"]["ended_by"]})
    head = ["run", "mean", *(f"{count} rounds" for count in counts), *(f"ended by {end}" for end in ends)]
    rows = []
    for run in runs:
        found = run["figures"]["rounds"]
        cells = [str(found["questions"].get(str(count), 0)) for count in counts]
        rows.append(
            [run["name"], interval(found["mean"], 1, 2), *cells, *(str(found["ended_by"].get(e, 0)) for e in ends)]
        )
    return [table(head, rows), "Numbers of rounds and of ends are numbers of questions."]


def _cost(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    titles = [name.replace("_", " ") for name in COSTS]
    parts = [
        table(
            ["run", *titles],
            [[run["name"], *(interval(run["figures"]["cost"][name], 1) for name in COSTS)] for run in runs],
        )
    ]
    roles = list(dict.fromkeys(role for run in runs for role in run["figures"]["roles"] or {}))
    if roles:
        rows = [[run["name"], *(_role((run["figures"]["roles"] or {}).get(role)) for role in roles)] for run in runs]
        parts += ["By role, as calls / tokens read / tokens written:", table(["run", *roles], rows)]
    parts.append("Calls that the ledger answered count like those that were sent.")
    return parts


def _latency(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    for run in runs:
        found = run["figures"]["latency"]
        shares = [f"{found['percentiles'][key]:.2f}" for key in ("10", "50", "90")]
        speed = [_plain(found["questions_per_second"], 3), _plain(found["concurrency"], 0)]
        rows.append([run["name"], interval(found["mean"], 1, 2), *shares, *speed])
    head = ["run", "seconds a question", "10 %", "median", "90 %", "questions/s", "most under way"]
    note = (
        "Wall-clock seconds from a question's start to its answer, as they were measured: other questions under way "
        "and replies out of the ledger are in them. Questions/s are of the last session."
    )
    return [table(head, rows), note]


def _decisions(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    names = sorted({name for run in runs for name in run["figures"]["decisions"]} - {"rounds"})
    if not names:
        return []
    rows = [["rounds", *(f"{run['figures']['decisions'].get('rounds', 0):,}" for run in runs)]]
    rows += [[name, *(f"{run['figures']['decisions'].get(name, 0):,}" for run in runs)] for name in names]
    return [table(["counted", *(run["name"] for run in runs)], rows)]


def _other(other: Mapping[str, Any]) -> list[str]:
    parts = [f"### {other['name']}"]
    if other["metrics"] is None:
        return [*parts, "Not finished."]
    intervals, numbers = [], []
    for name, value in _walk(other["metrics"]):
        if isinstance(value, Mapping):
            intervals.append([name, interval(value), str(value.get("n", "-"))])
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            numbers.append([name, f"{value:,}" if isinstance(value, int) else f"{value:.4g}"])
        elif isinstance(value, str):
            numbers.append([name, value])
    if intervals:
        parts.append(table(["score", "times 100", "n"], intervals))
    if numbers:
        parts.append(table(["figure", "value"], numbers))
    return parts


def _walk(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, one in value.items():
        if isinstance(one, Mapping) and not {"mean", "low", "high"} <= one.keys():
            found += _walk(one, f"{prefix}{name}/")
        else:
            found.append((prefix + name, one))
    return found


def _sources(report: Mapping[str, Any]) -> list[str]:
    parts = ["## Where the figures come from"]
    for run in [run for group in report["groups"] for run in group["runs"]] + list(report["others"]):
        parts.append(f"**{run['name']}**: `{run['folder']}`")
        if run["command"]:
            parts.append(f"```bash\n{shlex.join(run['command'])}\n```")
        if run.get("differs"):
            rows = [[name, _value(one), _value(other)] for name, (one, other) in run["differs"].items()]
            parts.append(table(["setting", "first run of the task", "here"], rows))
    return parts


def _gap(gaps: Mapping[str, Any] | None, metric: str) -> list[str]:
    gap = (gaps or {}).get(metric)
    if gap is None:
        return ["", ""]
    mean, low, high = (f"{100 * gap[key]:+.1f}" for key in ("mean", "low", "high"))
    return [f"{mean} ({low} to {high})", "< 0.001" if gap["p_value"] < 0.001 else f"{gap['p_value']:.3f}"]


def _count(run: Mapping[str, Any]) -> str:
    if run["finished"]:
        return f"{run['questions']:,}"
    return f"{run['questions']:,} of {run['expected']:,}" if run["expected"] else f"{run['questions']:,}, not finished"


def _role(found: Mapping[str, float | None] | None) -> str:
    return " / ".join(_plain(found[name], digits) for name, digits in zip(COSTS, (1, 0, 0))) if found else "-"


def _plain(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _value(value: Any) -> str:
    if value is None:
        return "-"
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
