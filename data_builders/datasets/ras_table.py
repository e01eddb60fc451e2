"""Table 4 of RAS, beside which the card of a data set of records shows its own numbers."""

from __future__ import annotations

from typing import NamedTuple

from tripletune.data_builders.datasets import Numbers


class PaperRow(NamedTuple):
    """A row of RAS's table 4.

    Attributes:
        name: The row's name, with the statistics that it shows in brackets.
        key: The count or measure of `Statistics` beside it.
        planning, answering: The paper's cells.
    """

    name: str
    key: str
    planning: str
    answering: str


TABLE_4 = (
    PaperRow("Queries", "records", "129,902", "78,164"),
    PaperRow("Input tokens (mean, median, max)", "input_tokens", "338, 301, 1,910", "475, 466, 2,214"),
    PaperRow("Output tokens (mean, median, max)", "output_tokens", "13, 12, 62", "13, 4, 2,332"),
    PaperRow("Sub-queries (min, mean, max)", "subqueries", "0, 0.8, 5", "0, 1.2, 6"),
    PaperRow("[SUFFICIENT]", "[SUFFICIENT]", "45,722 (35.2%)", "-"),
    PaperRow("[SUBQ]", "[SUBQ]", "71,676 (55.2%)", "-"),
    PaperRow("[NO_RETRIEVAL]", "[NO_RETRIEVAL]", "12,504 (9.6%)", "-"),
    PaperRow("[SUBQ] tokens (min, mean, max)", "subq_tokens", "6, 18.3, 62", "-"),
    PaperRow("Nodes of a graph (mean, median, max)", "graph_nodes", "11.6, 11, 56", "11.7, 11, 84"),
    PaperRow("Edges of a graph (mean, median, max)", "graph_edges", "21.2, 20, 116", "21.3, 20, 160"),
)


def own_cell(numbers: Numbers, task: str, paper: PaperRow) -> str:
    """Our cell of table 4: a count, a share, or the statistics that the row's name lists in brackets.

    A dash stands where the paper has one too, or where there is nothing to count.
    """
    counts = numbers.get("tasks", {}).get(task, {})
    records = counts.get("records", 0)
    if paper.key == "records":
        return f"{records:,}"
    is_action = paper.name == paper.key
    if is_action:
        if task != "planning" or not records:
            return "-"
        count = counts.get(paper.key, 0)
        return f"{count:,} ({count / records:.1%})"
    values = numbers["lengths"].get(task, {}).get(paper.key)
    if not values:
        return "-"
    shown = paper.name[paper.name.index("(") + 1 : -1].split(", ")
    return ", ".join(f"{values[statistic]:,.1f}".removesuffix(".0") for statistic in shown)
