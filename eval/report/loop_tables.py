"""Tables of what the systems did and what it cost: rounds, passages, facts, decisions, calls, tokens and seconds."""

from __future__ import annotations

from collections.abc import Sequence

from tripletune.core.tables import Table
from tripletune.eval.report.cells import Blocks, Runs, interval_cell, name_of, number_cell
from tripletune.eval.report.contents import ReportedRun
from tripletune.eval.report.figures import COSTS, SUPPORT, Latency
from tripletune.eval.results import BUDGETS, RANKINGS
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
# Dollars are small; other costs are counts or means of counts.
_DIGITS = {"dollars": 3}
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
    """Which level of CIRAG's cascade answered, and how well (figures 3 and 5); nothing for other systems."""
    rows = []
    for run in runs:
        for level, figures in (run.figures.granularity or {}).items():
            rows.append([name_of(run), level, *(interval_cell(figures[name]) for name in ("share", *metrics))])
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
            numbers = [interval_cell(facts.facts_kept, 1), interval_cell(facts.facts_shown, 1)]
            rows.append([name_of(run), interval_cell(facts.answer_kept), *numbers])
    if not rows:
        return []
    sentence = "Of questions (not yes/no): share whose answer is in a core triple; core triples and candidates of each."
    return [Table(["run", "answer kept", "facts kept", "facts shown"], rows), sentence]


def recall_blocks(runs: Runs) -> Blocks:
    """Recall of the supporting passages in each ranking; "kept" for CIRAG, which chooses core triples.

    The columns are those of all runs together: a ranking that a system does not have is "not known", and not 0, which
    would say that its search found nothing.
    """
    measured = [run for run in runs if run.figures.recall]
    if not measured:
        return []
    has_kept = False
    # Such as "first@5", in the order in which they first occur.
    names: dict[str, None] = {}
    for run in measured:
        names |= dict.fromkeys(run.figures.recall)
        if run.figures.kept["n"]:
            has_kept = True
    head = ["run"]
    for name in names:
        ranking, _, budget = name.partition("@")
        head.append(f"{RANKINGS[ranking]} R@{budget}")
    sentence = (
        "Share of the supporting passages among the first 2, 5 and 15, over all questions with known supporting "
        "passages; a passage counts once."
    )
    if has_kept:
        head.append("kept")
        sentence += " Kept: share among all passages of core triples."
    rows = []
    has_short = False
    for run in measured:
        cells = [name_of(run)]
        for name in names:
            recall = run.figures.recall.get(name)
            if recall is not None:
                cells.append(interval_cell(recall))
            elif f"{name.partition('@')[0]}@{BUDGETS[0]}" in run.figures.recall:
                cells.append("-")
                has_short = True
            else:
                cells.append("not known")
        if has_kept:
            cells.append(interval_cell(run.figures.kept))
        rows.append(cells)
    if has_short:
        sentence += " A dash: no ranking of the run is longer than the number of the column before."
    return [Table(head, rows), sentence]


def support_blocks(runs: Runs, headline: str) -> Blocks:
    """What recall buys: scores where all, some or none of the supporting passages were shown, and their ratio.

    A run without known supporting passages has no row. The number of questions stands beside each score, since few
    questions may have none of their passages shown.
    """
    rows = []
    for run in runs:
        support = run.figures.support
        if support is None:
            continue
        conversion = "-" if support.conversion is None else f"{support.conversion:.2f}"
        cells = [name_of(run), interval_cell(support.recall), conversion]
        for share in SUPPORT:
            cells.append(f"{interval_cell(support.scores[share])}, n {support.questions[share]}")
        rows.append(cells)
    if not rows:
        return []
    head = ["run", "shown", f"{headline} / shown", *(f"{headline}, {share} shown" for share in SUPPORT)]
    sentence = (
        "Shown: share of the supporting passages whose text or facts were in the prompt of the answer. If a run finds "
        "more than another and answers no better, train its answerer; if little is shown, its planner or its search."
    )
    return [Table(head, rows), sentence]


def rounds_blocks(runs: Runs) -> Blocks:
    """How many searches the systems made, and why they ended.

    The columns are those of all runs together; a number of rounds or an end that a run never had counts 0 questions.
    """
    # Numbers of rounds, as texts, and reasons of ends.
    numbers: set[str] = set()
    ends: set[str] = set()
    for run in runs:
        numbers.update(run.figures.rounds.questions)
        ends.update(run.figures.rounds.ended_by)
    head = ["run", "mean"]
    head += [f"{number} rounds" for number in sorted(numbers, key=int)]
    head += [f"ended by {end}" for end in sorted(ends)]
    rows = []
    for run in runs:
        rounds = run.figures.rounds
        cells: list[str | int] = [name_of(run), interval_cell(rounds.mean, 1, 2)]
        cells += [rounds.questions.get(number, 0) for number in sorted(numbers, key=int)]
        cells += [rounds.ended_by.get(end, 0) for end in sorted(ends)]
        rows.append(cells)
    return [Table(head, rows), "Columns of rounds and of ends count questions."]


def cost_blocks(runs: Runs) -> Blocks:
    """The costs of answering, of reading the corpus, and of answering by role."""
    blocks: Blocks = [
        "Answering, per question. Here and below, calls that the ledger answered are included.",
        _answering_table(runs),
        "Indexing, per corpus: each call that reads a passage counts once. A dash means that the figure is not known.",
        Table(["run", *_INDEXING.values(), "not in these figures"], map(_indexing_row, runs)),
    ]
    roles = _role_rows(runs)
    if roles:
        head = ["run", "role", *map(_ANSWERING.__getitem__, COSTS)]
        blocks += ["Answering by role:", Table(head, roles)]
    return blocks


def _answering_table(runs: Runs) -> Table:
    """The mean costs of a question; a cost that no run knows, such as dollars without prices, has no column."""
    in_runs: set[str] = set()
    for run in runs:
        in_runs.update(run.figures.cost)
    columns = {name: title for name, title in _ANSWERING.items() if name in in_runs}
    rows = []
    for run in runs:
        cells = [name_of(run)]
        for name in columns:
            cells.append(interval_cell(run.figures.cost.get(name), 1, _DIGITS.get(name, 1)))
        rows.append(cells)
    return Table(["run", *columns.values()], rows)


def _indexing_row(run: ReportedRun) -> list[str]:
    """A run's sums for reading the corpus; a dash for a figure that is not known."""
    figures: dict[str, float | None] = {**run.figures.indexing, "embedded": run.figures.embedded}
    cells = [name_of(run)]
    for name in _INDEXING:
        cells.append(number_cell(figures.get(name), _DIGITS.get(name, 0)))
    cells.append("triples of an earlier run" if run.has_stored_triples else "")
    return cells


def _role_rows(runs: Runs) -> list[list[str]]:
    """The costs of each role per question; the roles of the first run come first."""
    rows = []
    for run in runs:
        for role, costs in (run.figures.roles or {}).items():
            cells = [run.name, role]
            cells.append(number_cell(costs["calls"]))
            cells += [number_cell(costs[name], 0) for name in COSTS[1:]]
            rows.append(cells)
    return rows


def latency_blocks(runs: Runs) -> Blocks:
    """Seconds per question, for runs whose seconds measure their system.

    Replies from a ledger or from a Batch API take no time, and a shared machine is slower, so such runs have no row but
    a sentence with the reason (`runs.why_untimed`): a table of both kinds would call the run with a full ledger the
    fastest.
    """
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
    for why, names in untimed.items():
        blocks.append(f"Time is not shown, since {why}: {', '.join(names)}.")
    return blocks


def _latency_cells(latency: Latency) -> list[str]:
    """The cells of a run's row, in the order of the heads in `latency_blocks`: seconds, then questions per second."""
    shares = [f"{latency.percentiles[share]:.2f}" for share in ("10", "50", "90")]
    speed = [number_cell(latency.questions_per_second, 3), number_cell(latency.concurrency, 0)]
    return [interval_cell(latency.mean, 1, 2), number_cell(latency.structuring, 2), *shares, *speed]


def decisions_blocks(runs: Runs) -> Blocks:
    """Counts that are specific to the systems, one column per run; a count that a run does not have is 0.

    All runs have rounds, which stand first; alone they are no reason for a table.
    """
    names: set[str] = set()
    for run in runs:
        names.update(run.figures.decisions)
    names.discard("rounds")
    if not names:
        return []
    head = ["counted"]
    rows = [["rounds"], *([name] for name in sorted(names))]
    for run in runs:
        head.append(run.name)
        for row in rows:
            row.append(f"{run.figures.decisions.get(row[0], 0):,}")
    return [Table(head, rows)]
