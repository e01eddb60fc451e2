"""The tables of a report, on the page and in the files of tables alone (Markdown and LaTeX).

All figures come from the report's JSON, without any date, so the same results give the same bytes.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import add
from typing import Any

from tripletune.core.files import flatten
from tripletune.core.tables import Table, on_one_line, plain, tex
from tripletune.eval import find_metrics
from tripletune.eval.costs import WEIGHTED
from tripletune.eval.report.runs import COSTS
from tripletune.eval.results import RANKINGS
from tripletune.eval.statistics import NO_DIFFERENCE, P_NOTE, SIGNIFICANT, correct_table, p_cell, verdict
from tripletune.eval.suites import interval_cells

Runs = Sequence[Mapping[str, Any]]
SOURCES = "Where the figures come from"

NOTE = (
    "Scores, shares and recall are times 100. Brackets show a 95 % interval, by bootstrap over questions. "
    f"Differences are paired by question; {P_NOTE}, separately for each score."
)
_SHARED = (
    "Compared runs have equal values of all settings from data to max_answer_tokens that both use; top_k may also be "
    "the value of each system's paper. A setting that only one system has is part of that system."
)


@dataclass(frozen=True)
class Section:
    """The content under one heading; the heading is empty if the title suffices."""

    title: str
    heading: str
    blocks: list[str | Table]


def sections_of(report: Mapping[str, Any]) -> list[Section]:
    """All tables of a report, from the figures of `eval.report.build_report`."""
    found = [section for group in report["groups"] for section in _group(group)]
    return [*_overview(report["groups"]), *found, *map(_other, report["others"]), _sources(report)]


def markdown_of(report: Mapping[str, Any], sections: Sequence[Section]) -> str:
    """The tables as a page in Markdown."""
    parts, title = [f"# {plain(report['title'])}", NOTE], ""
    if report["missing"]:
        parts += ["## What is missing", "\n".join(f"- {plain(sentence)}" for sentence in report["missing"])]
    for section in sections:
        if section.title != title:
            title = section.title
            parts.append(f"## {plain(title)}")
        parts += [f"### {plain(section.heading)}"] if section.heading else []
        for block in section.blocks:
            parts.append(plain(block) if isinstance(block, str) else block.markdown())
    return "\n\n".join(parts) + "\n"


def tables_of(sections: Sequence[Section]) -> list[tuple[str, Table]]:
    """All tables except sources, each with its caption."""
    captions = [(": ".join(filter(None, (one.title, one.heading))), one) for one in sections if one.title != SOURCES]
    return [(caption, block) for caption, one in captions for block in one.blocks if isinstance(block, Table)]


def latex_of(report: Mapping[str, Any], sections: Sequence[Section]) -> str:
    """The main table and all other tables in LaTeX, each a `table` with the rules of `booktabs`."""
    parts = ["% Needs \\usepackage{booktabs}. " + on_one_line(NOTE)]
    parts += [_main(report["groups"])] if report["groups"] else []
    parts += [table.latex(caption) for caption, table in tables_of(sections)]
    return "\n\n".join(parts) + "\n"


def _main(groups: Runs) -> str:
    """A paper's main table: systems by tasks, with marks for the best score and for differences to the first run."""
    names = dict.fromkeys(run["name"] for group in groups for run in group["runs"])
    columns: list[dict[str, str]] = []
    for group in groups:
        metric, marks = group["metrics"][0], {"better": r"$^\dagger$", "worse": r"$^\ddagger$"}
        gaps = {run["name"]: dict(row[0] or {}) for run, row in zip(group["runs"], group["pairs"][metric])}
        correct_table(filter(None, gaps.values()))
        known = {run["name"]: run for run in group["runs"] if run["figures"]["scores"][metric]["n"]}
        means = {name: f"{100 * run['figures']['scores'][metric]['mean']:z.1f}" for name, run in known.items()}
        best = max((mean for name, mean in means.items() if known[name]["finished"]), key=float, default="")
        columns.append({
            name: (rf"\textbf{{{mean}}}" if mean == best and known[name]["finished"] else mean)
            + _name(known[name], marks.get(verdict(gaps[name]) if gaps[name] else "", ""))
            for name, mean in means.items()
        })  # fmt: skip
    caption = (
        "Scores are times 100, the best in bold. A dagger marks scores better than the first run of the column, a "
        f"double dagger worse scores (p < {SIGNIFICANT}, Holm). Failed questions score 0. Unfinished runs are not bold."
    )
    head = ["system", *(f"{group['task']} {group['metrics'][0]}, {group['told']}".rstrip(", ") for group in groups)]
    return Table(head, [[tex(name), *(one.get(name, "-") for one in columns)] for name in names]).latex(caption, str)


def interval(value: Mapping[str, Any] | None, times: float = 100, digits: int = 1, sign: str = "") -> str:
    """A mean with its interval; a dash if there is none."""
    return "{} ({})".format(*interval_cells(value, times, f"{sign}z.{digits}f")) if value and value["n"] else "-"


def _by_run(runs: Runs, head: Sequence[str], cells: Callable[[Mapping[str, Any]], Iterable[Any]]) -> Table:
    """A table with one row per run: its name and the `cells` of its figures."""
    return Table(["run", *head], [[_name(run), *cells(run["figures"])] for run in runs])


def _name(run: Mapping[str, Any], name: str | None = None) -> str:
    """A run's name, or another text, with the questions of an unfinished run and the number that failed."""
    failed = run["figures"]["errors"]
    parts = ([] if run["finished"] else [_asked(run)]) + ([f"{failed:,} failed"] if failed else [])
    return (run["name"] if name is None else name) + (f" ({', '.join(parts)})" if parts else "")


def _asked(run: Mapping[str, Any]) -> str:
    of = f" of {run['expected']:,}" if run["expected"] else ", not finished"
    return f"{run['questions']:,}" + ("" if run["finished"] else of)


def _scored(run: Mapping[str, Any], metrics: Sequence[str]) -> list[str]:
    return [interval(run["figures"]["scores"][metric]) for metric in metrics]


def _overview(groups: Runs) -> list[Section]:
    """Headline scores of runs by name: one column per task, and the mean over tasks if none is missing."""
    figures = [{run["name"]: run for run in group["runs"]} for group in groups]
    shared = [name for name in dict.fromkeys(chain(*figures)) if sum(name in one for one in figures) > 1]
    if not shared:
        return []
    # A mean over different metrics, or over two settings of one task, would have no meaning.
    alike = len({one["metrics"][0] for one in groups}) == 1 and len({one["task"] for one in groups}) == len(groups)
    rows = []
    for name in shared:
        found = [one.get(name) for one in figures]
        scores = [one and one["figures"]["scores"][group["metrics"][0]] for one, group in zip(found, groups)]
        means = [100 * one["mean"] for run, one in zip(found, scores) if run and one and run["finished"] and alike]
        mean = [_number(sum(means) / len(means) if len(means) == len(groups) else None)] * alike
        rows.append([name, *map(add, map(interval, scores), [_name(one, "") if one else "" for one in found]), *mean])
    told = (f"{one['task']} {one['metrics'][0]}, {one['told']}".rstrip(", ") for one in groups)
    return [Section("All tasks", "", [Table(["", *told, *["mean"] * alike], rows)])]


def _group(group: Mapping[str, Any]) -> Iterator[Section]:
    runs, title = group["runs"], group_title(group)
    setting: list[str | Table] = [about_of(group), Table(["setting", "value"], group["setting"]), _SHARED]
    sections = (
        ("Setting", setting),
        ("Scores", _scores(group)),
        ("Ablations", _ablations(group)),
        ("All differences", _pairs(group)),
        ("Sweeps", _sweeps(group)),
        ("By type of question", _slices(runs, group["metrics"], "by_type")),
        ("By number of hops", _slices(runs, group["metrics"], "by_hops")),
        ("Which granularity answered", _granularity(runs, group["metrics"])),
        ("Facts that were kept", _facts(runs)),
        ("Supporting passages found", _recall(runs)),
        ("Rounds", _rounds(runs)),
        ("Calls and tokens", _cost(runs)),
        ("Latency", _latency(runs)),
        ("Decisions", _decisions(runs)),
    )
    for heading, blocks in sections:
        if blocks:
            yield Section(title, heading, blocks)


def group_title(group: Mapping[str, Any]) -> str:
    """The title of a group in all outputs."""
    number = f"{group['task']}, {max(run['expected'] or run['questions'] for run in group['runs']):,} questions"
    return f"{number}, {group['told']}" if group["told"] else number


def about_of(group: Mapping[str, Any]) -> str:
    """Warnings about a group's figures, shown first."""
    told = dict(group["setting"])
    parts = [f"{name}: {told[name]}" for name in ("model", "date", "code") if told[name] != "-"]
    return "; ".join([f"{group_title(group)}; {len(group['runs'])} runs", *parts])


def _scores(group: Mapping[str, Any]) -> list[str | Table]:
    metrics, runs, known = group["metrics"], group["runs"], find_metrics()
    first = [[run["name"], _asked(run), run["figures"]["errors"]] for run in runs]
    explained = [f"{name}: {known[name].explanation}." for name in metrics if name in known]
    counts = {name: {run["figures"]["scores"][name]["n"] for run in runs} for name in metrics}
    most = max(run["questions"] for run in runs)
    explained += [f"{name} is known for {max(n)} of {most:,} questions." for name, n in counts.items() if max(n) < most]
    return [_with_gaps(["run", "questions", "failed"], first, group, range(len(runs))), *explained]


def _ablations(group: Mapping[str, Any]) -> list[str | Table]:
    if not group["ablations"]:
        return []
    runs = [group["runs"][place] for place in group["ablations"]]
    names = (
        run["name"].removeprefix(f"{run['system']} ") if run["ablations"] else f"{run['name']} (whole)" for run in runs
    )
    first = [[_name(run, name)] for name, run in zip(names, runs)]
    table = _with_gaps(["method"], first, group, group["ablations"])
    return ["The rows of tables 2 and 3 of the CIRAG paper, in the paper's order.", table]


def _with_gaps(head: list[str], first: Sequence[list[Any]], group: Mapping[str, Any], places: Sequence[int]) -> Table:
    """A table whose rows begin with the cells of `first`, then have each score and its difference to the first run."""
    rows, several, base = [*first], len(places) > 1, group["runs"][places[0]]["name"]
    for metric in group["metrics"]:
        gaps = [dict(group["pairs"][metric][place][places[0]] or {}) for place in places]
        correct_table(filter(None, gaps))
        for row, place, gap in zip(rows, places, gaps):
            compared = [interval(gap, sign="+"), p_cell(gap)] if gap else ["", ""]
            row += [*_scored(group["runs"][place], [metric]), *(compared if several else [])]
    titles = (f"minus {base}", "p") if several else ()
    return Table([*head, *(title for metric in group["metrics"] for title in (metric, *titles))], rows)


def _pairs(group: Mapping[str, Any]) -> list[str | Table]:
    """Differences of the headline between all pairs of runs; for two runs, the table of scores has the difference."""
    if len(group["runs"]) < 3:
        return []
    metric = group["metrics"][0]
    rows = [
        [_name(run), *(f"{100 * gap['mean']:+z.1f} ({p_cell(gap)})" if gap else "" for gap in gaps)]
        for run, gaps in zip(group["runs"], group["pairs"][metric])
    ]
    about = f"{metric}: row minus column, with p in brackets; p of {SIGNIFICANT} or more means {NO_DIFFERENCE}."
    return [about, Table(["", *(run["name"] for run in group["runs"])], rows)]


def _sweeps(group: Mapping[str, Any]) -> list[str | Table]:
    parts: list[str | Table] = []
    for sweep in group["sweeps"]:
        rows = []
        for value, run in zip(sweep["values"], map(group["runs"].__getitem__, sweep["runs"])):
            costs = [interval(run["figures"]["cost"][name], 1) for name in COSTS[:2]]
            rows.append([_name(run, f"{value:g}"), *_scored(run, group["metrics"]), *costs])
        parts.append(Table([sweep["option"], *group["metrics"], "calls", "tokens read"], rows))
    return parts


def _slices(runs: Runs, metrics: Sequence[str], key: str) -> list[str | Table]:
    metric, found = metrics[0], [run["figures"][key] or {} for run in runs]
    kinds = sorted({kind for one in found for kind in one})
    if not kinds:
        return []
    head = [f"{kind} ({max(one[kind][metric]['n'] for one in found if kind in one):,})" for kind in kinds]
    rows = ([_name(run), *(interval(one.get(kind, {}).get(metric)) for kind in kinds)] for run, one in zip(runs, found))
    of = "; the number of hops is the number of supporting passages" if key == "by_hops" else ""
    every = max(run["questions"] for run in runs)
    left = every - max(sum(part[metric]["n"] for part in one.values()) for one in found)
    told = [f"{left:,} of {every:,} questions are in no column, since their kind is not known."] if left else []
    return [f"{metric}, the headline{of}:", Table(["run", *head], rows), *told]


def _granularity(runs: Runs, metrics: Sequence[str]) -> list[str | Table]:
    known = [run for run in runs if run["figures"]["granularity"]]
    if not known:
        return []
    rows = [
        [_name(run), level, interval(found["share"]), *(interval(found[metric]) for metric in metrics)]
        for run in known
        for level, found in run["figures"]["granularity"].items()
    ]
    return [
        "Share of the questions that each level answered, and the scores of these questions:",
        Table(["run", "answered from", "share", *metrics], rows),
        '"default": no level found its evidence enough. The last level answers even if it has nothing to read.',
    ]


def _facts(runs: Runs) -> list[str | Table]:
    known = [run for run in runs if run["figures"]["facts"]]

    def cells(figures: Mapping[str, Any]) -> list[str]:
        found = figures["facts"]
        return [interval(found["answer_kept"]), *(interval(found[name], 1) for name in ("facts_kept", "facts_shown"))]

    told = "Of questions (not yes/no): share whose answer is in a core triple; core triples and candidates of each."
    return [_by_run(known, ["answer kept", "facts kept", "facts shown"], cells), told] if known else []


def _recall(runs: Runs) -> list[str | Table]:
    known = [run for run in runs if run["figures"]["recall"]]
    if not known:
        return []
    kept = any(run["figures"]["kept"]["n"] for run in known)
    names = list(dict.fromkeys(name for run in known for name in run["figures"]["recall"]))

    def cells(found: Mapping[str, Any]) -> list[str]:
        shares = [interval(found["recall"][name]) if name in found["recall"] else "not known" for name in names]
        return [*shares, interval(found["kept"])] if kept else shares

    heads = [f"{RANKINGS[of]} R@{k}" for of, _, k in (name.partition("@") for name in names)]
    told = (
        "Share of the supporting passages among the first 2, 5 and 15, over all questions with known supporting "
        f"passages; a passage counts once.{' Kept: share among all passages of core triples.' if kept else ''}"
    )
    return [_by_run(known, [*heads, "kept"] if kept else heads, cells), told]


def _rounds(runs: Runs) -> list[str | Table]:
    counts = sorted({int(count) for run in runs for count in run["figures"]["rounds"]["questions"]})
    ends = sorted({end for run in runs for end in run["figures"]["rounds"]["ended_by"]})

    def cells(figures: Mapping[str, Any]) -> list[Any]:
        found = figures["rounds"]
        numbers = [found["questions"].get(str(count), 0) for count in counts]
        return [interval(found["mean"], 1, 2), *numbers, *(found["ended_by"].get(end, 0) for end in ends)]

    head = ["mean", *(f"{count} rounds" for count in counts), *(f"ended by {end}" for end in ends)]
    return [_by_run(runs, head, cells), "Columns of rounds and of ends count questions."]


def _cost(runs: Runs) -> list[str | Table]:
    titles = {
        "calls": "calls", "sent": "of them sent", "tokens_read": "tokens read", "tokens_written": "tokens written",
        WEIGHTED: "in + 4 x out", "dollars": "dollars per 1,000 questions",
    }  # fmt: skip
    names = [name for name in titles if any(name in run["figures"]["cost"] for run in runs)]

    def answering(figures: Mapping[str, Any]) -> Iterator[str]:
        return (interval(figures["cost"].get(name), 1, 3 if name == "dollars" else 1) for name in names)

    parts: list[str | Table] = [_by_run(runs, [titles[name] for name in names], answering)]
    index = {"calls": "calls", "prompt_tokens": "tokens read", "completion_tokens": "tokens written",
             WEIGHTED: "in + 4 x out", "cached_calls": "calls not sent", "dollars": "dollars",
             "embedded": "texts embedded"}  # fmt: skip

    def indexing(run: Mapping[str, Any]) -> list[str]:
        found, triples = run["figures"]["indexing"], run["settings"].get("triples")
        numbers = {"embedded": run["figures"]["embedded"], **found}
        cells = [_number(numbers.get(name), 3 * (name == "dollars")) for name in index]
        return [_name(run), *cells, "triples of an earlier run" if triples and "extractor" not in triples else ""]

    parts += [
        "Indexing, per corpus: each call that reads a passage counts once. A dash means that the figure is not known.",
        Table(["run", *index.values(), "not in these figures"], map(indexing, runs)),
    ]
    roles = [
        [run["name"], role, *(_number(found[name], digits) for name, digits in zip(COSTS, (1, 0, 0, 0)))]
        for run in runs
        for role, found in (run["figures"]["roles"] or {}).items()
    ]
    if roles:
        parts += ["Answering by role:", Table(["run", "role", *(titles[name] for name in COSTS)], roles)]
    return ["Answering, per question. Here and below, calls that the ledger answered are included.", *parts]


def _latency(runs: Runs) -> list[str | Table]:
    def cells(figures: Mapping[str, Any]) -> list[str]:
        found = figures["latency"]
        shares = [f"{found['percentiles'][key]:.2f}" for key in ("10", "50", "90")]
        speed = [_number(found["questions_per_second"], 3), _number(found["concurrency"], 0)]
        return [interval(found["mean"], 1, 2), _number(found["structuring"], 2), *shares, *speed]

    by_why = defaultdict[str, list[Mapping[str, Any]]](list)
    for run in runs:
        by_why[run["figures"]["latency"].get("unknown", "")].append(run)
    timed = by_why.pop("", [])
    others = [f"Time is not shown, since {why}: {', '.join(map(_name, found))}." for why, found in by_why.items()]
    head = ["seconds per question", "of them for triples", "10 %", "median", "90 %", "questions/s", "most under way"]
    told = (
        "Seconds are wall-clock time from a question's start to its answer, while other questions of the run were "
        "answered at the same time. Questions/s are of the last session."
    )
    return [*((_by_run(timed, head, cells), told) if timed else ()), *others]


def _decisions(runs: Runs) -> list[str | Table]:
    names = sorted({name for run in runs for name in run["figures"]["decisions"]} - {"rounds"})
    if not names:
        return []
    rows = [[name, *(f"{run['figures']['decisions'].get(name, 0):,}" for run in runs)] for name in ("rounds", *names)]
    return [Table(["counted", *(run["name"] for run in runs)], rows)]


def _other(other: Mapping[str, Any]) -> Section:
    if other["metrics"] is None:
        return Section(other["name"], "", ["Not finished."])
    blocks = list[str | Table]()
    if table := other["metrics"].get("control_table"):
        blocks.append(Table(*table))
    intervals, numbers = [], []
    figures = {name: value for name, value in other["metrics"].items() if name != "controls"}
    for name, value in flatten(figures, "/").items():
        if isinstance(value, Mapping):
            intervals.append([name, interval(value), value.get("n", "-")])
        elif isinstance(value, str) or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            numbers.append([name, f"{value:.4g}" if isinstance(value, float) else value])
    tables = ((["score", "times 100", "n"], intervals), (["figure", "value"], numbers))
    return Section(
        f"{other['name']}, another evaluation", "", [*blocks, *(Table(head, rows) for head, rows in tables if rows)]
    )


def _sources(report: Mapping[str, Any]) -> Section:
    runs = {run["folder"]: run for group in report["groups"] for run in group["runs"]}
    found = (*runs.values(), *report["others"])
    rows = [[run["name"], run["folder"], shlex.join(run["command"] or ())] for run in found]
    return Section(SOURCES, "", [Table(["run", "folder", "command"], rows)])


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
