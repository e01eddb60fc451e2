"""MAUVE of finished runs: how similar all answers are to all gold answers (`tripletune eval mauve`)."""

from __future__ import annotations

import argparse
import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from tripletune.core.data.fields import checked
from tripletune.core.files import read_json, write_json
from tripletune.eval.results import run_folders
from tripletune.eval.suites import show_table
from tripletune.rag.results import RESULTS, ResultRow, read_result_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAUVE = "mauve.json"
# Maximum words of a text that MAUVE reads.
_WORDS = 100


@dataclass(frozen=True, slots=True)
class MauveScore:
    """The content of a run's `mauve.json`; the score is from 0 to 1.

    Attributes:
        model: Whose hidden states were compared; scores of other models do not compare.
        texts: Number of answers.
    """

    mauve: float
    model: str
    texts: int
    seed: int


def read_mauve(folder: str | Path) -> MauveScore | None:
    """The MAUVE of a run; None if it was not measured."""
    path = Path(folder) / MAUVE
    if not path.is_file():
        return None
    values = read_json(path)
    checked(values, str(path), {"mauve": float, "model": str, "texts": int, "seed": int})
    return MauveScore(**values)


def mauve(args: argparse.Namespace, console: Console) -> None:
    """`tripletune eval mauve`: write the similarity of a run's answers and the gold answers into the run's folder.

    The authors' package `mauve-text` (Pillutla et al., 2021) computes MAUVE from hidden states of `args.model`. A text
    is the first 100 words of question and answer, as in ALCE (Gao et al., 2023). Scores are comparable only with the
    same model and number of texts; the papers use GPT-2 large.
    """
    try:
        from mauve import compute_mauve
    except ImportError as error:
        raise ImportError(
            "the package mauve-text is not installed; it is licensed under GPL-3, TripleTune under Apache-2.0: "
            "run pip install 'tripletune[mauve]' if that suits you"
        ) from error

    from tripletune.models.loading import load_causal_lm

    model, tokenizer = load_causal_lm(args.model)
    rows = []
    for folder in run_folders(args.folders):
        stored = read_result_rows(folder / RESULTS, "question", "answers", "prediction")
        questions = [ResultRow.from_json(values) for _, values in stored]
        if len(questions) < 2:
            raise ValueError(f"{folder}: {len(questions)} answers are too few to compare distributions")
        gold_texts = [_first_words(row.question, row.answers[0]) for row in questions]
        answer_texts = [_first_words(row.question, row.prediction) for row in questions]
        gold_states = hidden_states(gold_texts, model, tokenizer)
        answer_states = hidden_states(answer_texts, model, tokenizer)
        similarity = float(compute_mauve(p_features=gold_states, q_features=answer_states, seed=args.seed).mauve)
        score = MauveScore(similarity, args.model, len(questions), args.seed)
        write_json(folder / MAUVE, asdict(score))
        failed = sum(bool(row.error) for row in questions)
        rows.append((str(folder), f"{100 * similarity:.1f}", str(failed), str(len(questions))))
    show_table(console, f"MAUVE (times 100), features of {args.model}", ("run", "mauve", "failed", "answers"), rows)


def hidden_states(texts: Sequence[str], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """The model's last hidden state at each text's last token, shape (texts, width)."""
    import torch

    states = []
    for text in texts:
        encoded = tokenizer(text, truncation=True, max_length=512, split_special_tokens=True, return_tensors="pt")
        ids = encoded["input_ids"].to(model.device)
        with torch.inference_mode():
            last_layer = model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
        states.append(last_layer[0, -1].float().cpu().numpy())
    return np.stack(states)


def _first_words(question: str, answer: str) -> str:
    """Question and answer as MAUVE reads them, cut to the words that ALCE compares."""
    return " ".join(f"{question} {answer.strip()}".split()[:_WORDS]).rstrip(string.punctuation)
