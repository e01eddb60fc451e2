"""MAUVE of finished runs (`tripletune eval mauve`): how alike a run's answers and the gold ones are, all together.

Pillutla et al., 2021: texts become hidden states of a language model, these become clusters, and the divergence curve
of the two histograms encloses the score. Texts are made as for ALCE (Gao et al., 2023): question and answer, the first
100 words. Scores compare only where the model and the number of texts are the same; the papers take GPT-2 large.
"""

from __future__ import annotations

import argparse
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console

from tripletune.eval.results import RESULTS, read_results, run_folders
from tripletune.eval.suites import show_table
from tripletune.models.files import write_json

FILE = "mauve.json"
_WORDS = 100
_VARIANCE = 0.9
_SCALE = 5
_POINTS = 25


def mauve(args: argparse.Namespace, console: Console) -> None:
    """`tripletune eval mauve`: score finished runs, print the scores, and write them into the folders.

    Args:
        args: `folders`, `model` (which gives the hidden states) and `seed` (of the clusters).
        console: Shows the scores.

    Raises:
        FileNotFoundError: a folder or the model is not there.
        ValueError: a run has fewer than two answers.
    """
    from tripletune.models.loading import load_causal_lm

    model, tokenizer = load_causal_lm(args.model)
    rows = []
    for folder in run_folders(args.folders):
        found = list(read_results(folder / RESULTS))
        if len(found) < 2:
            raise ValueError(f"{folder}: {len(found)} answers are too few to compare distributions")
        gold, said = (
            hidden_states([_text(row["question"], answer(row)) for row in found], model, tokenizer)
            for answer in (lambda row: row["answers"][0], lambda row: row["prediction"])
        )
        score = mauve_score(gold, said, args.seed)
        write_json(folder / FILE, {"mauve": score, "model": args.model, "texts": len(found), "seed": args.seed})
        rows.append((str(folder), f"{100 * score:.1f}", str(len(found))))
    show_table(console, f"MAUVE (times 100), features of {args.model}", ("run", "mauve", "answers"), rows)


def mauve_score(first: np.ndarray, second: np.ndarray, seed: int = 25) -> float:
    """MAUVE of two sets of feature vectors.

    Args:
        first: Shape (texts, width).
        second: Shape (other texts, width).
        seed: Seed of the clusters.

    Returns:
        0 to 1; 1 for equal histograms.
    """
    import faiss

    both = np.vstack([first, second]).astype(np.float64)
    both /= np.maximum(np.linalg.norm(both, axis=1, keepdims=True), 1e-12)
    both -= both.mean(axis=0)
    _, sizes, axes = np.linalg.svd(both, full_matrices=False)
    shares = np.cumsum(sizes**2) / max(float((sizes**2).sum()), 1e-12)
    reduced = np.ascontiguousarray(both @ axes[: int(np.argmax(shares >= _VARIANCE)) + 1].T, dtype=np.float32)
    clusters = max(2, round(min(len(first), len(second)) / 10))
    means = faiss.Kmeans(
        reduced.shape[1], clusters, niter=500, nredo=5, update_index=True, seed=seed, min_points_per_centroid=1
    )
    means.train(reduced)
    labels = means.index.search(reduced, 1)[1].ravel()
    counts = (np.bincount(side, minlength=clusters) for side in (labels[: len(first)], labels[len(first) :]))
    return curve_area(*(one / one.sum() for one in counts))


def curve_area(p: np.ndarray, q: np.ndarray) -> float:
    """Area under the divergence curve of two histograms, at 25 mixtures of them."""
    from scipy.stats import entropy

    weights = np.linspace(1e-6, 1 - 1e-6, _POINTS)
    points = [(entropy(q, w * p + (1 - w) * q), entropy(p, w * p + (1 - w) * q)) for w in weights]
    across, up = np.exp(-_SCALE * np.array([(0.0, np.inf), *points, (np.inf, 0.0)])).T
    return float(-np.trapezoid(up, across))


def hidden_states(texts: Sequence[str], model: Any, tokenizer: Any) -> np.ndarray:
    """The model's last hidden state at each text's last token, shape (texts, width)."""
    import torch

    found = []
    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=512, return_tensors="pt")["input_ids"].to(model.device)
        with torch.inference_mode():
            states = model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
        found.append(states[0, -1].float().cpu().numpy())
    return np.stack(found)


def _text(question: str, answer: str) -> str:
    return " ".join(f"{question} {answer.strip()}".split()[:_WORDS]).rstrip(string.punctuation)
