"""What a report is made of: output folders of `tripletune eval`, their figures, and which runs belong together.

A folder may be whole or left by a run that was killed. The figures of `eval run` are computed from its rows, so that
tables and plots agree with each other; those of other evaluations (records, extraction, decisions) are taken as they
stand. They are JSON values; an interval is `{"mean", "low", "high", "n"}`.

Runs of one task, with the same scores and over one question file, are a `Group`; its first run is the one the others
are compared with. A run is named after what differs from that one, in the CIRAG paper's words where an option is one of
its ablations (tables 2 and 3, figures 7 and 8).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from operator import or_
from pathlib import Path
from typing import Any

import pandas as pd

from tripletune.eval.costs import Costs, Prices
from tripletune.eval.results import ABOUT, METRICS, RESULTS, SETTINGS, read_results, read_scored
from tripletune.eval.statistics import (
    bootstrap_mean,
    bootstrap_means,
    correct_table,
    flatten,
    paired_difference,
    paired_table,
    verdict,
)
from tripletune.models.files import read_json
from tripletune.rag.systems.cirag import DEFAULT, GRANULARITIES

LEVELS = (*GRANULARITIES, DEFAULT)
COSTS = ("calls", "tokens_read", "tokens_written")
_CALLS = "calls."
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
# Settings in which CIRAG's ablations differ.
_TOLD = ("options.rerank", "options.granularities", "integrator.spec", "integrator.weights", "encoder")


@dataclass(frozen=True, slots=True)
class Run:
    """An output folder of `tripletune eval`.

    Attributes:
        folder: As it was named.
        name: The name given on the command line, or empty.
        settings: `settings.json`: all that the results depend on.
        about: `run.json`: the command, and how many questions a whole run has.
        metrics: `metrics.json`; empty when it was stopped before its end.
        results: How many results it has.
        rows: Of `eval run`, the questions that have a result, one row each: `id`, `question`, `answers`, `prediction`,
            `type`, a column per score (`f1`), `failed`, `rounds`, `stop`, `calls`, `tokens_read`, `tokens_written`,
            `tokens` (both), `seconds`, `tallies`, `malformed`, and, where they are known and else None, `sent` (calls
            that the ledger did not answer), `dollars` (for 1,000 such questions), `hops` (number of supporting
            passages), `role_tokens`, `granularity`, `recall` (share of the supporting passages found up to each round)
            and `kept` (share that a kept triple comes from). None for other evaluations, whose figures are taken as
            they stand.
        cut_off: Whether the last line was cut off by a kill.
        added: Scores that `tripletune eval score` added.
    """

    folder: str
    name: str
    settings: Mapping[str, Any]
    about: Mapping[str, Any]
    metrics: Mapping[str, Any]
    results: int
    rows: pd.DataFrame | None
    cut_off: bool = False
    added: tuple[str, ...] = ()

    @property
    def system(self) -> str:
        """The system's name."""
        return str(self.settings["system"])

    @property
    def task(self) -> str:
        """The task's name."""
        return str(self.settings["task"]["name"])

    @property
    def scores(self) -> list[str]:
        """The task's metrics, the headline first, and those that were added."""
        return [*self.settings["task"]["metrics"], *self.added]

    @property
    def finished(self) -> bool:
        """Whether the run came to its end, so that no question is missing."""
        return bool(self.metrics) and not self.cut_off and self.results == self.about.get("questions")


def read_folder(spec: str, prices: Prices | None = None) -> Run:
    """Read one output folder.

    Args:
        spec: The folder, or NAME=FOLDER to give it a name in the report.
        prices: What tokens cost; see `eval.costs.read_prices`.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it holds no results, or a file in it is damaged.
    """
    name, equals, rest = spec.partition("=")
    name, path = (name, Path(rest)) if equals and not Path(spec).exists() else ("", Path(spec))
    if not path.is_dir():
        raise FileNotFoundError(f"no such folder: {path}")
    settings, about, metrics = (
        read_json(path / file) if (path / file).is_file() else {} for file in (SETTINGS, ABOUT, METRICS)
    )
    results = path / RESULTS
    if not metrics and not (results.is_file() and settings):
        raise ValueError(
            f"{path} holds no results of `tripletune eval`: there is no {METRICS}, or {RESULTS} with {SETTINGS}"
        )
    if "system" in settings and results.is_file():
        (rows, added), cut_off = _rows(path, settings, prices or {}), results.read_bytes()[-1:] not in (b"\n", b"")
        return Run(str(path), name, settings, about, metrics, len(rows), rows, cut_off, added)
    count = sum(1 for _ in read_results(results, partial=True)) if results.is_file() else 0
    return Run(str(path), name, settings, about, metrics, count, None)


def figures_of(run: Run) -> dict[str, Any]:
    """All figures of a run.

    Returns:
        `scores`, `by_type`, `by_hops`, `rounds`, `cost`, `roles`, `latency`, `granularity`, `recall`, `decisions` and
        `errors`; those that its results do not allow are None. Nothing at all for a run without a result.
    """
    rows, metrics = run.rows, run.scores
    if rows is None or rows.empty:
        return {}
    seconds = rows["seconds"]
    costs = {name: rows[name] for name in (*COSTS, "tokens", "sent", "dollars") if rows[name].notna().all()}
    return {
        "scores": _means_of(rows, metrics),
        "by_type": _slices(rows, "type", metrics),
        "by_hops": _slices(rows, "hops", metrics),
        "rounds": {
            "mean": bootstrap_mean(rows["rounds"], None),
            "questions": _counted(rows["rounds"]),
            "ended_by": _counted(rows["stop"]),
        },
        "cost": bootstrap_means(costs, None),
        "indexing": run.metrics.get("indexing"),
        "roles": _roles(rows),
        "latency": {
            "mean": bootstrap_mean(seconds, None),
            "structuring": float(rows["structuring"].mean()),
            "percentiles": {str(share): float(seconds.quantile(share / 100)) for share in (10, 50, 90)},
            "questions_per_second": run.metrics.get("session", {}).get("questions_per_second"),
            "concurrency": run.about.get("concurrency"),
        },
        "granularity": _granularity(rows, metrics),
        "recall": _recall_by_round(rows),
        "decisions": _decisions(rows),
        "errors": int(rows["failed"].sum()),
    }


def _rows(path: Path, settings: Mapping[str, Any], prices: Prices) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The table of a folder's results, and the scores that were added."""
    found, added, metrics = [], dict[str, None](), settings["task"]["metrics"]
    for number, row in enumerate(read_scored(path, partial=True), 1):
        try:
            found.append({**row["scores"], **_row(row, metrics, prices)})
            added |= dict.fromkeys(name for name in row["scores"] if name not in metrics)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path / RESULTS}:{number}: not a result of `tripletune eval run`: {error!r}") from None
    return pd.DataFrame(found), tuple(added)


def _row(row: Mapping[str, Any], metrics: Sequence[str], prices: Prices) -> dict[str, Any]:
    trace = row["trace"]
    details, steps = trace.get("details", {}), trace["steps"]
    wanted = set(row.get("supporting") or ())
    known = bool(wanted) and not row["error"]
    found = accumulate((wanted & {passage["id"] for passage in step["passages"]} for step in steps), or_)
    kept, costs = details.get("core_passages"), Costs(prices)
    costs.add(trace)
    own = costs.questions
    # Who notes no role of a call notes neither its price nor that it was not sent.
    roles = sum(count for key, count in trace["tallies"].items() if key.startswith(_CALLS)) == trace["calls"]
    return {
        "id": row["id"],
        "type": row["type"] or "",
        "hops": len(wanted) or None,
        **{name: row["scores"][name] for name in metrics},
        **{name: row[name] for name in ("question", "answers", "prediction")},
        "failed": bool(row["error"]),
        "rounds": len(steps),
        "stop": trace["stop_reason"] or "error",
        "calls": own["calls"],
        "tokens_read": own["prompt_tokens"],
        "tokens_written": own["completion_tokens"],
        "tokens": own["prompt_tokens"] + own["completion_tokens"],
        "sent": own["calls"] - own["cached_calls"] if roles and "cached" in trace else None,
        "dollars": 1000 * own["dollars"] if prices and roles else None,
        "role_tokens": details.get("tokens"),
        "seconds": trace["seconds"],
        "structuring": trace.get("structuring_seconds", 0.0),
        "tallies": trace["tallies"],
        "malformed": trace["malformed"],
        "granularity": details.get("granularity"),
        "recall": [len(one) / len(wanted) for one in found] if known and steps else None,
        "kept": len(wanted & set(kept)) / len(wanted) if known and kept is not None else None,
    }


def _counted(values: pd.Series) -> dict[str, int]:
    return {str(value): int(count) for value, count in values.value_counts().sort_index().items()}


def _means_of(rows: pd.DataFrame, metrics: Sequence[str]) -> dict[str, Any]:
    # Where gold passages are not known, a ranking has no score.
    return bootstrap_means({name: rows[name].dropna() for name in metrics})


def _slices(rows: pd.DataFrame, column: str, metrics: Sequence[str]) -> dict[str, Any] | None:
    """Scores by the values of a column; None where all rows have the same."""
    parts = list(rows.dropna(subset=column).groupby(column))
    names = [f"{value:g}" if column == "hops" else value or "none" for value, _ in parts]
    return {name: _means_of(part, metrics) for name, (_, part) in zip(names, parts)} if len(parts) > 1 else None


def _roles(rows: pd.DataFrame) -> dict[str, dict[str, float]] | None:
    """Calls, tokens read and tokens written per question, by role, in the order in which questions meet them."""
    sums: dict[str, Counter[str]] = {}
    for tallies, used in zip(rows["tallies"], rows["role_tokens"]):
        for key, count in tallies.items():
            if key.startswith(_CALLS):
                role = key.removeprefix(_CALLS)
                costs = (count, *((used or {}).get(role) or (0, 0)))
                sums.setdefault(role, Counter()).update(dict(zip(COSTS, costs)))
    return {role: {name: found[name] / len(rows) for name in COSTS} for role, found in sums.items()} or None


def _granularity(rows: pd.DataFrame, metrics: Sequence[str]) -> dict[str, Any] | None:
    """Share of the questions each level answered, and how well (CIRAG, figures 3 and 5)."""
    found = {}
    for level in LEVELS if rows["granularity"].isin(LEVELS).any() else ():
        # A question that failed has no level and stays in the denominator of the shares.
        chosen = rows["granularity"] == level
        found[level] = {"share": bootstrap_mean(chosen), **_means_of(rows[chosen], metrics)}
    return found or None


def _recall_by_round(rows: pd.DataFrame) -> dict[str, Any] | None:
    """Recall of the supporting passages up to each round; a question that has ended keeps its last value."""
    known = rows["recall"].dropna()
    if known.empty:
        return None
    return {
        "by_round": {
            str(number): bootstrap_mean([shares[min(number, len(shares)) - 1] for shares in known])
            for number in range(1, known.map(len).max() + 1)
        },
        "kept": bootstrap_mean(rows["kept"].dropna()),
    }


def _decisions(rows: pd.DataFrame) -> dict[str, int]:
    """What was noted, by name: the system's tallies, and decisions that cannot be read."""
    counts: Counter[str] = Counter(rounds=int(rows["rounds"].sum()), unreadable_decisions=int(rows["malformed"].sum()))
    for tallies in rows["tallies"]:
        # Calls and answers by granularity have tables of their own.
        counts.update({key: n for key, n in tallies.items() if not key.startswith((_CALLS, "answered."))})
    return dict(sorted((name, n) for name, n in counts.items() if n))


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of one task over one file of questions.

    Attributes:
        runs: In the order given; the first is the reference.
        names: Their names, all different.
        ablations: For each run, the rows of the paper it is.
    """

    runs: tuple[Run, ...]
    names: tuple[str, ...]
    ablations: tuple[tuple[str, ...], ...]

    @property
    def metrics(self) -> list[str]:
        """The scores that all runs have, the headline first."""
        return [name for name in self.runs[0].scores if all(name in run.scores for run in self.runs)]

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
        # An untrained integrator needs prompts that tell it more; the row's name says so.
        alike = [
            n for n in known
            if all(name in _TOLD or _is_prompt(name) for name in differences(base, self.runs[n].settings))
        ]  # fmt: skip
        alike.sort(key=lambda n: ([ABLATIONS.index(name) for name in self.ablations[n]], n))
        return alike if len(alike) > 1 else []


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Sort runs into groups and name them, in the order given."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        # A task file of the same name may have been changed between two runs.
        asked = [run.task, run.settings["task"]["metrics"], run.settings.get("data")]
        found.setdefault(json.dumps(asked), []).append(run)
    groups = []
    for members in found.values():
        # A run without gold links takes the number of hops from the others.
        tables = [run.rows for run in members if run.rows is not None and run.results]
        hops = {name: n for table in tables for name, n in zip(table["id"], table["hops"]) if n and n == n}
        for table in tables:
            table["hops"] = table["id"].map(hops)
        names = [run.name or _name(members[0].settings, run.settings) for run in members]
        twice = {name for name in names if names.count(name) > 1}
        names = [f"{name} ({run.folder})" if name in twice else name for name, run in zip(names, members)]
        ablations = tuple(ablations_of(run.settings, run.name) for run in members)
        groups.append(Group(tuple(members), tuple(names), ablations))
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


def compare_pairs(group: Group) -> dict[str, list[list[dict[str, Any] | None]]]:
    """Every run of a group against every other, on the questions that both have.

    Returns:
        By metric a matrix: row i, column j is "run i minus run j" with `p_value`, `p_holm` (over the pairs of the
        matrix) and `verdict`; None on the diagonal, and where two runs have no question in common.
    """
    tables = {n: run.rows.set_index("id") for n, run in enumerate(group.runs) if run.rows is not None and run.results}
    found = {}
    for metric in group.metrics:
        scores = {n: table[metric].dropna() for n, table in tables.items()}
        ids = {n: frozenset(one.index) for n, one in scores.items()}
        shared = Counter(ids.values()).most_common(1)[0][0] if ids else frozenset()
        whole = {str(n): one.loc[sorted(shared)].to_numpy() for n, one in scores.items() if ids[n] == shared}
        pairs = paired_table(whole) if shared else []
        for one, two in combinations(scores, 2):
            # A run that was stopped is compared on what it has; the others keep all their questions.
            if not (ids[one] == ids[two] == shared) and (both := sorted(ids[one] & ids[two])):
                gap = paired_difference(*(scores[n].loc[both].to_numpy() for n in (one, two)))
                pairs.append({"first": str(one), "second": str(two), **gap})
        correct_table(pairs)
        matrix: list[list[dict[str, Any] | None]] = [[None for _ in group.runs] for _ in group.runs]
        for pair in pairs:
            one, two = int(pair.pop("first")), int(pair.pop("second"))
            turned = pair | {"mean": -pair["mean"], "low": -pair["high"], "high": -pair["low"]}
            matrix[two][one], matrix[one][two] = (gap | {"verdict": verdict(gap)} for gap in (pair, turned))
        found[metric] = matrix
    return found


def sweeps_of(group: Group) -> list[dict[str, Any]]:
    """Every numeric option in which runs differ while all else is the same.

    Returns:
        `{"option", "values", "runs"}`: the values, rising, and for each the first run with it, by its place in the
        group.
    """
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
    """Settings by dotted name in which two runs differ, with both values; not the weights of models that differ."""
    one, two = flatten(first, "."), flatten(other, ".")
    names = [name for name in sorted(one.keys() | two.keys()) if one.get(name) != two.get(name)]
    weights = {f"{name.removesuffix('.spec')}{end}" for name in names for end in (".weights", "_weights")}
    return {name: (one.get(name), two.get(name)) for name in names if name not in weights}


def _name(reference: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    ablations, system = ablations_of(settings), str(settings["system"])
    parts = [f"{system} {' and '.join(ablations)}" if ablations else system]
    if system == reference["system"]:
        told = {*ablations, *ablations_of(reference)}
        for name, values in differences(reference, settings).items():
            # What the paper's names say already, or what is only the way back to the whole system.
            known = (
                (name == "options.rerank" and WITHOUT_RERANKER in told)
                or (name == "options.granularities" and told & set(CASCADES.values()))
                # Without a reranker BM25 needs none.
                or (name == "encoder" and WITHOUT_RERANKER in told and None in values)
                or (name.startswith("integrator.") and WITHOUT_TD in ablations)
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
