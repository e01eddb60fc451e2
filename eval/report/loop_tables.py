"""Tables of what the systems did and what it cost: rounds, passages, facts, decisions, calls, tokens and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tripletune.core.tables import Table
from tripletune.eval.report.cells import Blocks, Runs, interval, name_of, number_of, table_by_run
from tripletune.eval.report.contents import ReportedRun
from tripletune.eval.report.figures import COSTS, Latency, RunFigures
from tripletune.eval.results import RANKINGS
from tripletune.rag.costs import WEIGHTED

# Costs of answering and of reading the corpus -> heads of their columns.
_ANSWERING = {
    "calls": "calls",
    "sent": "of them sent",
    "tokens_read": "tokens read",
    "tokens_written": "tokens written",
    WEIGHTED: "in + 4 x out",
    "dollars": "dollars per 1,000 questions",
}
_INDEXING = {
    "calls": "calls",
    "prompt_tokens": "tokens read",
    "completion_tokens": "tokens written",
    WEIGHTED: "in + 4 x out",
    "cached_calls": "calls not sent",
    "dollars": "dollars",
    "embedded": "texts embedded",
}


def granularity_blocks(runs: Runs, metrics: Sequence[str]) -> Blocks:
    """Which level of CIRAG's cascade answered, and how well (figures 3 and 5)."""
    rows = []
    for run in runs:
        for level, figures in (run.figures.granularity or {}).items():
            rows.append([name_of(run), level, *(interval(figures[name]) for name in ("share", *metrics))])
    if not rows:
        return []
    return [
        "Share of the questions that each level answered, and the scores of these questions:",
        Table(["run", "answered from", "share", *metrics], rows),
        '"default": no level found its evidence enough. The last level answers even if it has nothing to read.',
    ]


def facts_blocks(runs: Runs) -> Blocks:
    """How many of CIRAG's candidate triples become core triples, and how often these name the answer."""
    rows = []
    for run in runs:
        facts = run.figures.facts
        if facts is not None:
            numbers = [interval(facts.facts_kept, 1), interval(facts.facts_shown, 1)]
            rows.append([name_of(run), interval(facts.answer_kept), *numbers])
    if not rows:
        return []
    told = "Of questions (not yes/no): share whose answer is in a core triple; core triples and candidates of each."
    return [Table(["run", "answer kept", "facts kept", "facts shown"], rows), told]


def recall_blocks(runs: Runs) -> Blocks:
    """Recall of the supporting passages in each ranking; "kept" for CIRAG, which chooses core triples."""
    known = [run for run in runs if run.figures.recall]
    if not known:
        return []
    has_kept = any(run.figures.kept["n"] for run in known)
    names: dict[str, None] = {}
    for run in known:
        names |= dict.fromkeys(run.figures.recall)

    def cells(figures: RunFigures) -> list[str]:
        shares = [interval(figures.recall[name]) if name in figures.recall else "not known" for name in names]
        return [*shares, interval(figures.kept)] if has_kept else shares

    heads = []
    for name in names:
        ranking, _, budget = name.partition("@")
        heads.append(f"{RANKINGS[ranking]} R@{budget}")
    told = (
        "Share of the supporting passages among the first 2, 5 and 15, over all questions with known supporting "
        "passages; a passage counts once."
    )
    if has_kept:
        heads.append("kept")
        told += " Kept: share among all passages of core triples."
    return [table_by_run(known, heads, cells), told]


def rounds_blocks(runs: Runs) -> Blocks:
    """How many searches the systems made, and why they ended."""
    lengths: set[int] = set()
    ends: set[str] = set()
    for run in runs:
        lengths.update(map(int, run.figures.rounds.questions))
        ends.update(run.figures.rounds.ended_by)

    def cells(figures: RunFigures) -> list[Any]:
        rounds = figures.rounds
        of_length = [rounds.questions.get(str(length), 0) for length in sorted(lengths)]
        of_end = [rounds.ended_by.get(end, 0) for end in sorted(ends)]
        return [interval(rounds.mean, 1, 2), *of_length, *of_end]

    head = ["mean", *(f"{length} rounds" for length in sorted(lengths)), *(f"ended by {end}" for end in sorted(ends))]
    return [table_by_run(runs, head, cells), "Columns of rounds and of ends count questions."]


def cost_blocks(runs: Runs) -> Blocks:
    """The costs of answering, of reading the corpus, and of answering by role."""
    names = [name for name in _ANSWERING if any(name in run.figures.cost for run in runs)]

    def answering(figures: RunFigures) -> list[str]:
        return [interval(figures.cost.get(name), 1, 3 if name == "dollars" else 1) for name in names]

    blocks: Blocks = [
        "Answering, per question. Here and below, calls that the ledger answered are included.",
        table_by_run(runs, [_ANSWERING[name] for name in names], answering),
        "Indexing, per corpus: each call that reads a passage counts once. A dash means that the figure is not known.",
        Table(["run", *_INDEXING.values(), "not in these figures"], map(_indexing_row, runs)),
    ]
    roles = []
    for run in runs:
        for role, costs in (run.figures.roles or {}).items():
            cells = [number_of(costs[name], 1 if name == "calls" else 0) for name in COSTS]
            roles.append([run.name, role, *cells])
    if roles:
        blocks += ["Answering by role:", Table(["run", "role", *(_ANSWERING[name] for name in COSTS)], roles)]
    return blocks


def _indexing_row(run: ReportedRun) -> list[str]:
    numbers: dict[str, float | None] = {**run.figures.indexing, "embedded": run.figures.embedded}
    cells = [number_of(numbers.get(name), 3 if name == "dollars" else 0) for name in _INDEXING]
    return [name_of(run), *cells, "triples of an earlier run" if run.has_stored_triples else ""]


def latency_blocks(runs: Runs) -> Blocks:
    """Seconds per question, for runs whose seconds measure their system."""
    rows = []
    # Why the seconds of runs do not measure their systems -> names of these runs.
    untimed: dict[str, list[str]] = {}
    for run in runs:
        latency = run.figures.latency
        if isinstance(latency, Latency):
            rows.append([name_of(run), *_latency_cells(latency)])
        else:
            untimed.setdefault(latency.unknown, []).append(name_of(run))
    blocks: Blocks = []
    if rows:
        head = ["seconds per question", "of them for triples", "10 %", "median", "90 %", "questions/s"]
        blocks += [
            Table(["run", *head, "most under way"], rows),
            "Seconds are wall-clock time from a question's start to its answer, while other questions of the run were "
            "answered at the same time. Questions/s are of the last session.",
        ]
    blocks += [f"Time is not shown, since {why}: {', '.join(names)}." for why, names in untimed.items()]
    return blocks


def _latency_cells(latency: Latency) -> list[str]:
    shares = [f"{latency.percentiles[share]:.2f}" for share in ("10", "50", "90")]
    speed = [number_of(latency.questions_per_second, 3), number_of(latency.concurrency, 0)]
    return [interval(latency.mean, 1, 2), number_of(latency.structuring, 2), *shares, *speed]


def decisions_blocks(runs: Runs) -> Blocks:
    """Counts that are specific to the systems, one column per run."""
    names: set[str] = set()
    for run in runs:
        names.update(run.figures.decisions)
    names.discard("rounds")
    if not names:
        return []
    rows = []
    for name in ("rounds", *sorted(names)):
        rows.append([name, *(f"{run.figures.decisions.get(name, 0):,}" for run in runs)])
    return [Table(["counted", *(run.name for run in runs)], rows)]
