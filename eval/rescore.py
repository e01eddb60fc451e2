"""Compute new scores of finished runs from their stored results (`tripletune eval score` and `mauve`).

Scores of questions are written to `scores.jsonl` beside the unchanged results; `compare` and `report` read both files.
"""

from __future__ import annotations

import argparse
import logging
import string
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from tripletune.core.data.fields import given
from tripletune.core.files import file_digest, json_line, lock_folder, new_file, read_json, write_json
from tripletune.core.options import not_one_of
from tripletune.eval import Metric, find_metrics, score_answer
from tripletune.eval.results import SCORES, SETTINGS, read_results, read_scored, run_folders
from tripletune.eval.statistics import Interval, bootstrap_means
from tripletune.eval.suites import interval_cells, show_table
from tripletune.rag.results import RESULTS, read_runs
from tripletune.rag.triple_store import read_gold

logger = logging.getLogger(__name__)
MAUVE = "mauve.json"
# Maximum words of a text that MAUVE reads.
_WORDS = 100


def score(args: argparse.Namespace, console: Console) -> None:
    """`tripletune eval score`: score finished runs with `args.metrics` and print the scores."""
    known, names = find_metrics(), [name.strip() for name in args.metrics.split(",") if name.strip()]
    if problems := [not_one_of("metrics", name, list(known)) for name in names if name not in known]:
        raise ValueError("; ".join(problems))
    gold, source = (read_gold(args.gold), file_digest(args.gold)) if args.gold else (None, "")
    folders, rows, failed = run_folders(args.folders), [], []
    for folder in folders:
        try:
            found = score_run(folder, {name: known[name] for name in names}, gold, source)
        except (OSError, ValueError) as error:
            failed.append(str(error))
            continue
        rows += [
            (str(folder), name, *interval_cells(one), *map(str, (one["failed"], one["n"])))
            for name, one in found.items()
        ]
    heads = ("run", "metric", "score", "95 % interval", "failed", "questions")
    if rows:
        show_table(console, f"scores of stored answers and rankings, in {SCORES}", heads, rows, "questions")
        for name in names:
            console.print(f"{name}: {known[name].explanation}.")
    if failed:
        raise ValueError(f"{len(failed)} of {len(folders)} runs could not be scored: {'; '.join(failed)}")


def score_run(
    folder: Path, metrics: Mapping[str, Metric], gold: Mapping[str, Collection[str]] | None = None, source: str = ""
) -> dict[str, Interval]:
    """Score one run, and write the scores beside its results and other scores.

    Each score also has `failed`, the number of failed questions. `gold` has the ids of each question's supporting
    passages, instead of those in the results, and `source` its digest, which is noted beside the scores. A metric is
    left out with a warning if no question has its gold.
    """
    path, values = folder / SCORES, dict[str, list[float]]({name: [] for name in metrics})
    settings = read_json(folder / SETTINGS)
    if "system" not in settings:
        raise ValueError(f"{folder} is not the output of `tripletune eval run`; repeat its evaluation to score it")
    with lock_folder(folder, f"another process writes into {folder}: wait for it or stop it"):
        before = {row["id"]: row for row in read_results(path)} if path.is_file() else {}
        source = source or settings.get("gold") or "links in the results"
        changed, failed = dict.fromkeys(metrics, 0), 0
        with new_file(path) as scratch, scratch.open("w", encoding="utf-8") as file:
            met, linked = set[str](), set[str]()
            for row in read_scored(folder, partial=True):
                links = None if gold is None else gold.get(row["id"], ())
                if links:
                    met.update(final_ranking(row["trace"]), row.get("supporting") or ())
                    linked.update(links)
                scores = score_row(row, metrics, links, (given(settings, "task") or {}).get("refusal"))
                failed += bool(row["error"])
                for name, one in scores.items():
                    values[name].append(one)
                    changed[name] += row["scores"].get(name, one) != one
                noted = {name: source for name in scores if metrics[name].reads == "supporting"}
                line, old = {"id": row["id"]}, before.get(row["id"], {})
                for name, new in (("scores", scores), ("links", noted)):
                    line[name] = {one: value for one, value in old.get(name, {}).items() if one not in metrics} | new
                file.write(json_line(line))
            if not file.tell():
                raise ValueError(f"{folder}: no question has a result yet: run the same command again")
            if met and met.isdisjoint(linked):
                raise ValueError(f"{folder}: --gold has no passage that the run found: give the links of its corpus")
            if empty := [name for name, scores in values.items() if not scores]:
                lacking = (
                    f"{folder}: {', '.join(empty)} need gold passages, but no question has any: give --gold FILE with "
                    "the links that `tripletune build corpus` writes"
                )
                if len(empty) == len(values):
                    raise ValueError(lacking)
                logger.warning("%s", lacking)
    for name, count in changed.items():
        if count:
            logger.warning("%s: %s of %d questions has changed; the new score counts", folder, name, count)
    known = bootstrap_means({name: found for name, found in values.items() if found})
    return {name: one | {"failed": failed} for name, one in known.items()}


def score_row(
    row: Mapping[str, Any],
    metrics: Mapping[str, Metric],
    supporting: Collection[str] | None = None,
    refusal: str | None = None,
) -> dict[str, float]:
    """Score a stored question; a failed question scores 0, and rankings are scored only with gold passages.

    `supporting` replaces the ids of the row's supporting passages; for `refusal` see `tripletune.eval.Task`.
    """
    wanted = frozenset((row.get("supporting") or ()) if supporting is None else supporting)
    ranking = final_ranking(row["trace"])
    of_rankings = {name: metric for name, metric in metrics.items() if metric.reads == "supporting"}
    others = {name: metric for name, metric in metrics.items() if name not in of_rankings}
    scores = score_answer(row["prediction"], row["answers"], others, row.get("short_answers", ()), refusal)
    if wanted and "passages" not in row["trace"].get("details", {}).get("unknown", ()):
        scores |= {name: metric.score(ranking, wanted) for name, metric in of_rankings.items()}
    return {name: 0.0 if row["error"] else scores[name] for name in metrics if name in scores}


def final_ranking(trace: Mapping[str, Any]) -> Sequence[str]:
    """Distinct ids of passages, best first: a system's final ranking (GEAR, PageRank, TH-RAG), else round by round."""
    found = trace.get("details", {}).get("ranking")
    if found is None:
        found = [passage["id"] for step in trace["steps"] for passage in step["passages"]]
    return list(dict.fromkeys(found))


def mauve(args: argparse.Namespace, console: Console) -> None:
    """`tripletune eval mauve`: write the similarity of a run's answers and the gold answers into the run's folder.

    The authors' package `mauve-text` (Pillutla et al., 2021) computes MAUVE from hidden states of `args.model`. A text
    is the first 100 words of question and answer, as in ALCE (Gao et al., 2023). Scores are comparable only with the
    same model and number of texts; the papers use GPT-2 large.
    """
    from mauve import compute_mauve

    from tripletune.models.loading import load_causal_lm

    model, tokenizer = load_causal_lm(args.model)
    rows = []
    for folder in run_folders(args.folders):
        found = [row for _, row in read_runs(folder / RESULTS, "question", "answers", "prediction")]
        if len(found) < 2:
            raise ValueError(f"{folder}: {len(found)} answers are too few to compare distributions")
        gold, said = (
            hidden_states([_text(row["question"], answer(row)) for row in found], model, tokenizer)
            for answer in (lambda row: row["answers"][0], lambda row: row["prediction"])
        )
        score = float(compute_mauve(p_features=gold, q_features=said, seed=args.seed).mauve)
        write_json(folder / MAUVE, {"mauve": score, "model": args.model, "texts": len(found), "seed": args.seed})
        failed = sum(bool(row.get("error")) for row in found)
        rows.append((str(folder), f"{100 * score:.1f}", str(failed), str(len(found))))
    show_table(console, f"MAUVE (times 100), features of {args.model}", ("run", "mauve", "failed", "answers"), rows)


def hidden_states(texts: Sequence[str], model: Any, tokenizer: Any) -> np.ndarray:
    """The model's last hidden state at each text's last token, shape (texts, width)."""
    import torch

    found = []
    for text in texts:
        read = tokenizer(text, truncation=True, max_length=512, split_special_tokens=True, return_tensors="pt")
        ids = read["input_ids"].to(model.device)
        with torch.inference_mode():
            states = model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
        found.append(states[0, -1].float().cpu().numpy())
    return np.stack(found)


def _text(question: str, answer: str) -> str:
    return " ".join(f"{question} {answer.strip()}".split()[:_WORDS]).rstrip(string.punctuation)
