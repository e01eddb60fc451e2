import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tripletune.train.extraction_evaluation import ExtractionScorer, choose_pairs
from tripletune.train.extraction_rows import PairEncoder, RowLimits
from tripletune.train.text_evaluation import EvaluationLog, generate_replies


def steps(path: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in map(json.loads, path.read_text().splitlines())]


def test_every_step_has_one_line_in_order(tmp_path: Path) -> None:
    log = EvaluationLog(tmp_path / "evaluations.jsonl")
    for step, loss in ((5, 3.0), (10, 2.0), (10, 2.5)):
        log.add({"step": step, "loss": loss})
    assert steps(log.path) == [(5, 3.0), (10, 2.5)]


def test_a_resumed_run_forgets_what_it_will_do_again(tmp_path: Path) -> None:
    log = EvaluationLog(tmp_path / "evaluations.jsonl")
    for step in (5, 10, 15):
        log.add({"step": step, "loss": 1.0})
    log.on_train_begin(None, SimpleNamespace(global_step=10, is_world_process_zero=True), None)
    assert [step for step, _ in steps(log.path)] == [5, 10]
    log.on_train_begin(None, SimpleNamespace(global_step=0, is_world_process_zero=False), None)
    assert [step for step, _ in steps(log.path)] == [5, 10]


@pytest.mark.parametrize("seq2seq", [False, True])
def test_replies_are_those_of_one_prompt_at_a_time(
    tiny_llama: Path, tiny_t5: Path, tokenizer: Any, extraction_pairs: list[Any], seq2seq: bool
) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind, folder = (AutoModelForSeq2SeqLM, tiny_t5) if seq2seq else (AutoModelForCausalLM, tiny_llama)
    model = kind.from_pretrained(folder, dtype=torch.float32).train()
    encoder = PairEncoder(tokenizer, None if seq2seq else "Extract.", RowLimits())
    prompts = encoder.prompts([pair.source_text for pair in extraction_pairs[:5]])
    together = generate_replies(model, tokenizer, prompts, 4, 8)
    assert model.training
    assert together == [generate_replies(model, tokenizer, [prompt], 1, 8)[0] for prompt in prompts]


def test_the_pairs_that_are_scored_do_not_depend_on_their_order(extraction_pairs: list[Any]) -> None:
    chosen = choose_pairs(extraction_pairs, 4)
    assert len(chosen) == 4
    assert choose_pairs(reversed(extraction_pairs), 4) == chosen
    assert len(choose_pairs(extraction_pairs, 99)) == len(extraction_pairs)


def test_scores_are_those_of_the_replies(
    tokenizer: Any, extraction_pairs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [extraction_pairs[0], extraction_pairs[5]]
    scorer = ExtractionScorer(pairs, PairEncoder(tokenizer, "Extract.", RowLimits()), 2, 8)
    monkeypatch.setattr(
        "tripletune.train.extraction_evaluation.generate_replies", lambda *args: [pairs[0].target, "NONE"]
    )
    scores = scorer(None)
    assert (scores["exact/micro/f1"], scores["normalised/macro/f1"], scores["malformed_output"]) == (1, 1, 0)
    assert scores["texts"] == 2
    monkeypatch.setattr("tripletune.train.extraction_evaluation.generate_replies", lambda *args: ["(S> cut| P", "junk"])
    assert scorer(None)["malformed_output"] == 1
