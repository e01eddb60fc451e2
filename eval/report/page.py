"""The page of a report in Markdown. It holds no figure that is not in the report's JSON, and no time of day.

Names, types and counts come from data and other people's files, so all of them go through `models.program.plain`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tripletune.eval import find_metrics
from tripletune.eval.controls import control_table
from tripletune.eval.report.runs import COSTS
from tripletune.eval.statistics import P_NOTE, flatten, p_cell
from tripletune.models.program import code_span, markdown_table, on_one_line, plain

Runs = Sequence[Mapping[str, Any]]

_NOTE = (
    "Scores, shares and recall are times 100. In brackets: the 95 % interval of a bootstrap over questions. "
    f"Differences are paired by question; {P_NOTE}."
)
_OPTION_TITLES = {
    "candidates": "candidate triples a round, N",
    "max_rounds": "most rounds, L",
    "top_k": "passages a round, K",
}


def page_of(report: Mapping[str, Any], plots: Sequence[tuple[str, str, str, bytes]]) -> str:
    """The whole page.

    Args:
        report: The figures, from `eval.report.build_report`.
        plots: Of every plot its section ("<group number>/<name>"), file, caption and picture.
    """
    parts = ["# Evaluation report", _NOTE]
    if report["missing"]:
        parts += ["## What is missing", "\n".join(f"- {plain(told)}" for told in report["missing"])]
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


def interval(value: Mapping[str, Any] | None, times: float = 100, digits: int = 1, sign: str = "") -> str:
    """A mean with its interval; a dash where there is nothing."""
    if not value or value["mean"] is None:
        return "-"
    mean, low, high = (format(times * value[key], f"{sign}.{digits}f") for key in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def _table(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    return markdown_table(map(plain, head), (map(plain, row) for row in rows))


def _by_run(runs: Runs, head: Sequence[str], cells: Callable[[Mapping[str, Any]], Iterable[Any]]) -> str:
    """A table with one row per run; what `cells` makes of its figures stands behind the name."""
    return _table(["run", *head], [[run["name"], *cells(run["figures"])] for run in runs])


def _scored(run: Mapping[str, Any], metrics: Sequence[str]) -> list[str]:
    return [interval(run["figures"]["scores"][metric]) if run["figures"] else "-" for metric in metrics]


def _overview(groups: Runs) -> list[str]:
    """One row per name, one column per task, for names that several tasks have (CIRAG, tables 1 and 2)."""
    names = [[run["name"] for run in group["runs"]] for group in groups]
    every = dict.fromkeys(name for found in names for name in found)
    shared = [name for name in every if sum(name in found for found in names) > 1]
    if not shared:
        return []
    rows = []
    for name in shared:
        row = [name]
        for group in groups:
            run = next((run for run in group["runs"] if run["name"] == name), {"figures": None})
            row += _scored(run, group["metrics"])
        rows.append(row)
    head = ["", *(f"{group['task']} {metric}" for group in groups for metric in group["metrics"])]
    return ["## All tasks", _table(head, rows)]


def _group(number: int, group: Mapping[str, Any], plots: Sequence[tuple[str, str, str, bytes]]) -> list[str]:
    runs = [run for run in group["runs"] if run["figures"]]
    questions = max(run["expected"] or run["questions"] for run in group["runs"])
    title = f"## {plain(group['task'])}, {questions:,} questions"
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
        ("cost", "Calls and tokens per question", _cost(runs)),
        ("latency", "Latency", _latency(runs)),
        ("decisions", "Decisions", _decisions(runs)),
    )
    parts = [title]
    for key, heading, body in sections:
        if body:
            captions = [(plain(told), file) for section, file, told, _ in plots if section == f"{number}/{key}"]
            parts += [f"### {heading}", *body, *(f"![{told}]({file})\n\n{told}." for told, file in captions)]
    return parts


def _scores(group: Mapping[str, Any]) -> list[str]:
    metrics, runs, known = group["metrics"], group["runs"], find_metrics()
    first = [[run["name"], f"{run['questions']:,}"] for run in runs]
    for cells, run in zip(first, runs):
        if not run["finished"]:
            cells[1] += f" of {run['expected']:,}" if run["expected"] else ", not finished"
    explained = [f"- {name}: {known[name].explanation}" for name in metrics if name in known]
    return [_with_gaps(["run", "questions"], first, runs, group["differences"], metrics), "\n".join(explained)]


def _ablations(group: Mapping[str, Any]) -> list[str]:
    if not group["ablations"]:
        return []
    runs = [group["runs"][place] for place in group["ablations"]["order"]]
    first = [[ablation_name(run)] for run in runs]
    table = _with_gaps(["method"], first, runs, group["ablations"]["differences"], group["metrics"])
    return ["The rows of the CIRAG paper's tables 2 and 3, in their order.", table]


def _with_gaps(
    head: list[str], first: Sequence[list[str]], runs: Runs, differences: Sequence[Any], metrics: Sequence[str]
) -> str:
    """A table of scores, each behind the row's first cells, and with its difference to the first of several runs."""
    rows = []
    for cells, run, gaps in zip(first, runs, differences):
        row = [*cells]
        for metric, score in zip(metrics, _scored(run, metrics)):
            row += [score, *(_gap(gaps, metric) if len(runs) > 1 else [])]
        rows.append(row)
    titles = (f"minus {runs[0]['name']}", "p") if len(runs) > 1 else ()
    return _table([*head, *(title for metric in metrics for title in (metric, *titles))], rows)


def _sweeps(group: Mapping[str, Any]) -> list[str]:
    parts = []
    for sweep in group["sweeps"]:
        rows = []
        for value, place in zip(sweep["values"], sweep["runs"]):
            run = group["runs"][place]
            costs = [interval(run["figures"]["cost"][name], 1) if run["figures"] else "-" for name in COSTS[:2]]
            rows.append([f"{value:g}", *_scored(run, group["metrics"]), *costs])
        parts.append(_table([option_title(sweep["option"]), *group["metrics"], "calls", "tokens read"], rows))
    return parts


def _types(runs: Runs, metrics: Sequence[str]) -> list[str]:
    metric, found = metrics[0], [run["figures"]["by_type"] or {} for run in runs]
    kinds = sorted({kind for one in found for kind in one})
    if not kinds:
        return []
    head = [f"{kind} ({max(one[kind][metric]['n'] for one in found if kind in one):,})" for kind in kinds]
    rows = (
        [run["name"], *(interval(one.get(kind, {}).get(metric)) for kind in kinds)] for run, one in zip(runs, found)
    )
    return [f"{metric}, the headline:", _table(["run", *head], rows)]


def _granularity(runs: Runs, metrics: Sequence[str]) -> list[str]:
    known = [run for run in runs if run["figures"]["granularity"]]
    if not known:
        return []
    rows = [
        [run["name"], level, interval(found["share"]), *(interval(found[metric]) for metric in metrics)]
        for run in known
        for level, found in run["figures"]["granularity"].items()
    ]
    return [
        "Share of the questions that each level answered, and the scores of these:",
        _table(["run", "answered from", "share", *metrics], rows),
        '"default": no level said that its evidence was enough, so the last level\'s answer stands.',
    ]


def _recall(runs: Runs) -> list[str]:
    known = [run for run in runs if run["figures"]["recall"]]
    if not known:
        return []
    rounds = range(1, 1 + max(len(run["figures"]["recall"]["by_round"]) for run in known))

    def cells(found: Mapping[str, Any]) -> list[str]:
        recall = found["recall"]
        return [*(interval(recall["by_round"].get(str(number))) for number in rounds), interval(recall["kept"])]

    return [
        _by_run(known, [*(f"after round {number}" for number in rounds), "kept"], cells),
        "A question that has ended keeps its last value. Kept: supporting passages that a core triple comes from, "
        "which is what the answer can be read from.",
    ]


def _rounds(runs: Runs) -> list[str]:
    counts = sorted({int(count) for run in runs for count in run["figures"]["rounds"]["questions"]})
    ends = sorted({end for run in runs for end in run["figures"]["rounds"]["ended_by"]})

    def cells(figures: Mapping[str, Any]) -> list[Any]:
        found = figures["rounds"]
        numbers = [found["questions"].get(str(count), 0) for count in counts]
        return [interval(found["mean"], 1, 2), *numbers, *(found["ended_by"].get(end, 0) for end in ends)]

    head = ["mean", *(f"{count} rounds" for count in counts), *(f"ended by {end}" for end in ends)]
    return [_by_run(runs, head, cells), "Numbers of rounds and of ends are numbers of questions."]


def _cost(runs: Runs) -> list[str]:
    titles = [name.replace("_", " ") for name in COSTS]
    parts = [_by_run(runs, titles, lambda found: (interval(found["cost"][name], 1) for name in COSTS))]
    roles = list(dict.fromkeys(role for run in runs for role in run["figures"]["roles"] or {}))
    if roles:
        parts += [
            "By role, as calls / tokens read / tokens written:",
            _by_run(runs, roles, lambda found: (_role((found["roles"] or {}).get(role)) for role in roles)),
        ]
    return [*parts, "Calls that the ledger answered count like those that were sent."]


def _latency(runs: Runs) -> list[str]:
    def cells(figures: Mapping[str, Any]) -> list[str]:
        found = figures["latency"]
        shares = [f"{found['percentiles'][key]:.2f}" for key in ("10", "50", "90")]
        speed = [_number(found["questions_per_second"], 3), _number(found["concurrency"], 0)]
        return [interval(found["mean"], 1, 2), _number(found["structuring"], 2), *shares, *speed]

    head = ["seconds per question", "of them for triples", "10 %", "median", "90 %", "questions/s", "most under way"]
    return [
        _by_run(runs, head, cells),
        "Wall-clock seconds from a question's start to its answer, as they were measured: other questions under way "
        "and replies out of the ledger are in them. Questions/s are of the last session.",
    ]


def _decisions(runs: Runs) -> list[str]:
    names = sorted({name for run in runs for name in run["figures"]["decisions"]} - {"rounds"})
    if not names:
        return []
    rows = [[name, *(f"{run['figures']['decisions'].get(name, 0):,}" for run in runs)] for name in ("rounds", *names)]
    return [_table(["counted", *(run["name"] for run in runs)], rows)]


def _other(other: Mapping[str, Any]) -> list[str]:
    parts = [f"### {plain(other['name'])}"]
    if other["metrics"] is None:
        return [*parts, "Not finished."]
    if controls := other["metrics"].get("controls"):
        parts.append(_table(*control_table(controls)))
    intervals, numbers = [], []
    figures = {name: value for name, value in other["metrics"].items() if name != "controls"}
    for name, value in flatten(figures, "/").items():
        if isinstance(value, Mapping):
            intervals.append([name, interval(value), value.get("n", "-")])
        elif isinstance(value, str) or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            numbers.append([name, f"{value:.4g}" if isinstance(value, float) else value])
    tables = ((["score", "times 100", "n"], intervals), (["figure", "value"], numbers))
    return [*parts, *(_table(head, rows) for head, rows in tables if rows)]


def _sources(report: Mapping[str, Any]) -> list[str]:
    parts = ["## Where the figures come from"]
    for run in [run for group in report["groups"] for run in group["runs"]] + list(report["others"]):
        parts.append(f"**{plain(run['name'])}**: {code_span(run['folder'])}")
        if run["command"]:
            parts.append(f"```bash\n{on_one_line(shlex.join(run['command']))}\n```")
        if run.get("differs"):
            rows = [[name, _value(one), _value(other)] for name, (one, other) in run["differs"].items()]
            parts.append(_table(["setting", "first run of the task", "here"], rows))
    return parts


def _gap(gaps: Mapping[str, Any] | None, metric: str) -> list[str]:
    if gaps is None:
        return ["", ""]
    return [interval(gaps[metric], sign="+"), p_cell(gaps[metric])]


def _role(found: Mapping[str, float | None] | None) -> str:
    return " / ".join(_number(found[name], digits) for name, digits in zip(COSTS, (1, 0, 0))) if found else "-"


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _value(value: Any) -> str:
    if value is None:
        return "-"
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
