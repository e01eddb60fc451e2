"""The loss log, the newest checkpoint, and the arguments that every run sets.

What a run computes with them is tested through the trainers: `test_engine.py`, `test_text_engine.py`.
"""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tripletune.train.config import RunConfig
from tripletune.train.run_trainer import LossLog, PlainProgress, newest_checkpoint, shared_arguments


def state(step: int, **more: Any) -> Any:
    return SimpleNamespace(global_step=step, max_steps=10, is_world_process_zero=True, **more)


ONE_PROCESS = SimpleNamespace(world_size=1)


def write_steps(log: LossLog, steps: range, saved: int | None = None) -> None:
    log.on_train_begin(ONE_PROCESS, state(steps.start - 1), None)
    for step in steps:
        log.add(torch.tensor(0.25 * step), 10)
        log.add(torch.tensor(0.5), 6)
        log.on_step_end(ONE_PROCESS, state(step), SimpleNamespace(should_save=step == saved))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_has_one_line_with_the_sum_of_its_parts(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    log = LossLog(path, flush_every=2)
    write_steps(log, range(1, 4))
    assert [row["step"] for row in rows(path)] == [1, 2]
    # A checkpoint that follows finds every line up to it on disk.
    write_steps(LossLog(path, flush_every=2), range(3, 4), saved=3)
    assert [(row["step"], row["loss"], row["tokens"]) for row in rows(path)] == [
        (1, 0.75, 16),
        (2, 1.0, 16),
        (3, 1.25, 16),
    ]


def test_steps_that_are_done_again_leave_no_second_line(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    write_steps(LossLog(path, 1), range(1, 6))
    with path.open("a") as out:
        out.write('{"step": 6, "lo')
    write_steps(LossLog(path, 1), range(4, 6))
    assert [row["step"] for row in rows(path)] == [1, 2, 3, 4, 5]


def test_the_newest_whole_checkpoint_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert newest_checkpoint(tmp_path) is None
    for step, content in ((9, '{"global_step": 9}'), (10, '{"global_step": 10}'), (20, '{"global_st')):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(content)
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert "checkpoint-20 was not written to its end" in caplog.text


def test_progress_says_how_long_is_left(caplog: pytest.LogCaptureFixture) -> None:
    progress = PlainProgress()
    progress.on_train_begin(None, state(2), None)
    with caplog.at_level(logging.INFO):
        progress.on_log(None, state(6), None, {"loss": 0.5, "learning_rate": 1e-4})
        progress.on_log(None, state(6), None, {"eval_loss": 0.5})
    assert len(caplog.records) == 1
    assert "step 6/10  loss 0.500  learning rate 1.00e-04" in caplog.text


def test_the_arguments_follow_the_configuration() -> None:
    config = RunConfig(output_dir="runs/x", seed=7)
    config.train.warmup_ratio, config.train.bf16, config.train.gradient_checkpointing = 0.1, "false", True
    found = shared_arguments(config)
    assert (found["run_name"], found["seed"], found["data_seed"]) == ("x", 7, 7)
    assert (found["warmup_steps"], found["bf16"], found["activation_checkpointing"]) == (0.1, False, True)
    assert found["remove_unused_columns"] is False
    assert found["report_to"] == ["none"]
