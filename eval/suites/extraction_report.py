"""Tables of extraction scores: one run, and several runs side by side with paired differences."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tripletune.eval.results import METRICS, read_rows
from tripletune.eval.statistics import bootstrap_ratio, paired_ratio_difference
from tripletune.eval.suites.triples import FIELDS, LEVELS, ROUGE, text_scores

logger = logging.getLogger(__name__)

KIND = "extraction"
SCORES_FILE = "scores.jsonl"
_INTERVALS = "Scores are times 100, with the 95 % interval of a bootstrap over texts."
# A row of `eval.triples.score_rows` as numerator and denominator; sums of both make the score of a data set.
_Part = Callable[[Mapping[str, Any]], tuple[float, float]]


def _level_parts(level: str) -> dict[str, _Part]:
    def macro(place: int) -> _Part:
        return lambda row: (text_scores(row, level)[place], 1.0)

    micro: dict[str, _Part] = {
        "precision": lambda row: (row[level][0], row[level][1]),
        "recall": lambda row: (row[level][0], row[level][2]),
        "f1": lambda row: (2.0 * row[level][0], row[level][1] + row[level][2]),
    }
    parts = {f"{level}/micro/{name}": part for name, part in micro.items()}
    return parts | {f"{level}/macro/{name}": macro(place) for place, name in enumerate(micro)}


def _field_part(field: str) -> _Part:
    return lambda row: (row[field], row["normalised"][2])


def _mean_part(name: str) -> _Part:
    return lambda row: (float(row[name]), 1.0)


PARTS: dict[str, _Part] = {
    **{name: part for level in LEVELS for name, part in _level_parts(level).items()},
    **{f"accuracy/{field}": _field_part(field) for field in FIELDS},
    "malformed_output": _mean_part("malformed"),
    "malformed_triples": lambda row: (row["malformed_triples"], row["malformed_triples"] + row["predicted"]),
    "groundedness": lambda row: (row["grounded"], row["entities"]),
    **{name: _mean_part(name) for name in ROUGE},
}
EXPLANATIONS = {
    "exact": "all three fields are the same text",
    "normalised": "case, articles, punctuation and the form of the predicate aside",
    "soft": "by the similarity of embeddings",
    "accuracy": "gold triples with this field right",
    "malformed_output": "texts whose reply could not be read as a whole",
    "malformed_triples": "triples written that could not be read",
    "groundedness": "names written that occur in the text",
    **dict.fromkeys(ROUGE, "of the reply as it was written"),
}


def show_extraction(metrics: Mapping[str, Any], console: Console) -> None:
    """Print the scores of one run."""
    table = Table(title=f"{metrics['model']} on {metrics['texts']} texts of {metrics['data']}")
    for heading in ("score", "mean", "95 % interval", "what it says"):
        table.add_column(heading)
    for name, value in scores_of(metrics):
        table.add_row(name, *_cells(value), EXPLANATIONS[name.split("/")[0]])
    console.print(table)
    console.print(_INTERVALS)
    if soft := metrics.get("soft"):
        limits = ", ".join(f"{name} {value}" for name, value in soft["thresholds"].items())
        console.print(f"soft: smallest cosines {limits}; embedder {metrics['embedder']}", markup=False)
    counts, cost = metrics["counts"], metrics["cost_per_text"]
    console.print(
        f"errors {counts['errors']}, replies cut off at their limit {counts['cut_off']}, texts in pieces "
        f"{counts['texts_in_pieces']}; a text: {cost['prompt_tokens']} tokens read, {cost['completion_tokens']} "
        f"written, {cost['seconds']} s"
    )
    if session := metrics.get("session"):
        console.print(f"{session['texts']} texts in {session['seconds']} s, {session['texts_per_second']} a second")


def scores_of(metrics: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The scores of `eval.triples.summarise` under the names of `PARTS`, in their order."""
    for name in PARTS:
        value: Any = metrics
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            yield name, value


def is_extraction(folder: str | Path) -> bool:
    """Whether a folder holds the result of `tripletune eval extraction`."""
    path = Path(folder) / METRICS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return bool(found.get("evaluation") == KIND)
    except (OSError, ValueError, AttributeError):
        return False


def compare_extractions(folders: Sequence[str | Path], metric: str | None = None) -> dict[str, Any]:
    """Compare runs with the first one, text by text.

    Args:
        folders: Output folders of `tripletune eval extraction`.
        metric: The score to compare, or the beginning of several names, such as "soft"; None compares all.

    Returns:
        `{"texts", "runs": [folder, ...], "scores": {name: [{"score", "difference"}, ...]}}`; a difference is "this run
        minus the first", None for the first.

    Raises:
        FileNotFoundError: a folder has no results.
        ValueError: a folder holds another kind of result, a metric is not there, or the runs share no text.
    """
    rows = [_rows(Path(folder)) for folder in folders]
    common = [name for name in rows[0] if all(name in other for other in rows[1:])]
    if not common:
        raise ValueError("the runs have no text in common: were they made from different data?")
    if any(len(other) != len(common) for other in rows):
        logger.warning("only the %d texts that all runs have are compared", len(common))
    sample = [next(iter(run.values())) for run in rows]
    names = [name for name in PARTS if all(_has(row, name) for row in sample)]
    chosen = [name for name in names if metric is None or name == metric or name.startswith(f"{metric}/")]
    if not chosen:
        raise ValueError(f"no metric {metric!r} that all runs have; there are {', '.join(names)}")
    scores: dict[str, list[dict[str, Any]]] = {}
    for name in chosen:
        columns = [tuple(zip(*(PARTS[name](run[text]) for text in common))) for run in rows]
        scores[name] = [
            {
                "score": bootstrap_ratio(above, below).to_json(),
                "difference": paired_ratio_difference(columns[0], (above, below)).to_json() if number else None,  # type: ignore[arg-type]
            }
            for number, (above, below) in enumerate(columns)
        ]
    return {"evaluation": KIND, "texts": len(common), "runs": [str(folder) for folder in folders], "scores": scores}


def show_extraction_comparison(comparison: Mapping[str, Any], console: Console) -> None:
    """Print a comparison."""
    table = Table(title=f"extraction, {comparison['texts']} texts")
    table.add_column("score", no_wrap=True)
    # Folders have long names, so the columns have numbers.
    for number, folder in enumerate(comparison["runs"], 1):
        console.print(f"run {number}: {folder}", markup=False)
        table.add_column(f"run {number}")
        if number > 1:
            table.add_column(f"{number} minus 1")
            table.add_column("p")
    for name, runs in comparison["scores"].items():
        cells: list[str] = []
        for run in runs:
            cells.append("{} ({})".format(*_cells(run["score"])))
            if gap := run["difference"]:
                cells += ["{} ({})".format(*_cells(gap, sign=True)), f"{gap['p_value']:.3f}"]
        table.add_row(name, *cells)
    console.print(table)
    console.print(_INTERVALS)
    console.print("Differences to run 1 are paired by text; p is the two-sided bootstrap p-value.")


def _rows(folder: Path) -> dict[str, dict[str, Any]]:
    if not is_extraction(folder):
        raise ValueError(
            f"{folder} is not the output of a finished `tripletune eval extraction`: compare one kind of run"
        )
    return {row["id"]: row for row in read_rows(folder / SCORES_FILE)}


def _has(row: Mapping[str, Any], name: str) -> bool:
    needed = name.split("/")[0]
    return needed not in (*LEVELS, *ROUGE) or needed in row


def _cells(value: Mapping[str, Any], sign: bool = False) -> tuple[str, str]:
    form = "+.1f" if sign else ".1f"
    if value["mean"] is None:
        return "-", "-"
    return format(100 * value["mean"], form), f"{100 * value['low']:{form}} to {100 * value['high']:{form}}"
