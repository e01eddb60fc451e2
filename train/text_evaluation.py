"""Evaluation of a text model while it trains: replies to validation prompts, and a file with a line an evaluation.

`evaluations.jsonl` holds step, epoch, loss and scores of every evaluation; a learning curve is drawn from it (RAS,
figure 15).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback

EVALUATIONS = "evaluations.jsonl"
# Scores of a model, by name. It is given the model without what is put around it to train on several devices, the
# number of this process and how many there are.
Scorer = Callable[[Any, int, int], dict[str, float]]


class EvaluationLog(TrainerCallback):
    """`evaluations.jsonl`: one line an evaluation, in the order of steps, each step once, also after a resume."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, row: dict[str, Any]) -> None:
        """Write the line of an evaluation; one of the same step, and all after it, are replaced."""
        self._write([*self._lines(below=row["step"]), row])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget lines of steps that will be done again."""
        if state.is_world_process_zero and self.path.exists():
            self._write(self._lines(below=state.global_step + 1))

    def _lines(self, below: int) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["step"] < below:
                rows.append(row)
        return rows

    def _write(self, rows: Sequence[dict[str, Any]]) -> None:
        # Few and short lines: the file is written anew in one step, so a kill never leaves half a line.
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        os.replace(scratch, self.path)


def generate_replies(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    batch_size: int,
    max_new_tokens: int,
    process_index: int = 0,
    num_processes: int = 1,
    criterion: Callable[[Any], bool] | None = None,
) -> list[str]:
    """Greedy replies to prompts, spread over the processes.

    Args:
        model: Decoder or encoder-decoder, with or without PEFT adapter.
        tokenizer: Its tokenizer.
        prompts: Token ids.
        batch_size: Prompts in a batch.
        max_new_tokens: Longest reply.
        process_index: Number of this process.
        num_processes: How many there are.
        criterion: Stopping criterion on a `models.local.decoding.Request`, such as `Repetition.found`.

    Returns:
        The replies in the order of the prompts, without special tokens, on every process.
    """
    from tripletune.models.local.continuous_batch import make_decoder
    from tripletune.models.local.decoding import Request, decode, end_tokens

    was_training = model.training
    model.eval()
    try:
        decoder = make_decoder(model, end_tokens(model, tokenizer), tokenizer.pad_token_id, rows=batch_size)
        mine = range(process_index, len(prompts), num_processes)
        requests = {n: Request(list(prompts[n]), max_new_tokens, criterion=criterion) for n in mine}
        decode(decoder, list(requests.values()))
    finally:
        model.train(was_training)
    replies = [(n, tokenizer.decode(request.tokens, skip_special_tokens=True)) for n, request in requests.items()]
    if num_processes > 1:
        replies = gather_object(replies)
    return [text for _, text in sorted(replies)]
