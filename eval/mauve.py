"""MAUVE of finished runs (`tripletune eval mauve`): how alike a run's answers and the gold ones are, all together.

The score is that of the authors' package `mauve-text` (Pillutla et al., 2021), of the hidden states of a model of your
choice. Texts are made as for ALCE (Gao et al., 2023): question and answer, the first 100 words. Scores compare only
where the model and the number of texts are the same; the papers take GPT-2 large.
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


def mauve(args: argparse.Namespace, console: Console) -> None:
    """`tripletune eval mauve`: score finished runs, print the scores, and write them into the folders."""
    try:
        from mauve import compute_mauve
    except ImportError as error:
        raise ValueError(f"MAUVE needs {error.name}: pip install 'tripletune[mauve]'") from None
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
        score = float(compute_mauve(p_features=gold, q_features=said, seed=args.seed).mauve)
        write_json(folder / FILE, {"mauve": score, "model": args.model, "texts": len(found), "seed": args.seed})
        rows.append((str(folder), f"{100 * score:.1f}", str(len(found))))
    show_table(console, f"MAUVE (times 100), features of {args.model}", ("run", "mauve", "answers"), rows)


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
