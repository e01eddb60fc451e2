import importlib.util
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tripletune.models.data.records import Action, Record
from tripletune.train import check_tracking, dry_run_report, make_rows, train

Begin = Callable[..., Any]


def test_the_report(begin_task: Begin) -> None:
    task = begin_task("ras", {"train.epochs": 1.5})
    text = dry_run_report(task)
    assert "  learning_rate: 0.01" in text.replace("    ", "  ")
    assert "train: rows 12, tokens " in text
    for kind in ("answering [NO_RETRIEVAL] 1", "answering [SUFFICIENT] 3", "planning [SUBQ] 3"):
        assert kind in text
    assert "validation: rows 4, " in text
    # Three steps an epoch; 4.5 are rounded up, as the Trainer does.
    assert "5 optimiser steps, 1 of them warm-up" in text
    assert "4 records per optimiser step (batch_size 2 x 2 micro-batch(es) x 1 process(es)); the paper: 16 (2 x" in text
    trained = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    assert f"({trained:,} parameters)" in text
    assert "shared prefixes:" not in text
    assert f"for 2 x {max(task.train['length'])} tokens" in text


def test_steps_count_the_records_of_every_process(begin_task: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tripletune.train.resume.process_count", lambda: 2)
    text = dry_run_report(begin_task("ras", {"train.epochs": 2}))
    assert "4 optimiser steps, 1 of them warm-up" in text
    assert "8 records per optimiser step (batch_size 2 x 2 micro-batch(es) x 2 process(es))" in text


def test_one_process_on_several_gpus_is_refused(make_task: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    with pytest.raises(ValueError, match="one process sees 8 GPUs: start one per GPU"):
        train(make_task("ras"))


def test_the_mask_is_shown_in_any_script(begin_task: Begin, write_records: Any, records: list[Record]) -> None:
    task = begin_task("ras")
    record = Record("1", "1", "answering", "誰?", Action.NO_RETRIEVAL, answers=("紫式部",))
    write_records([record], "train", None)
    task.__dict__.pop("sources")
    make_rows(task)
    text = dry_run_report(task)
    assert "Question: 誰?<|im_end|>" in text
    assert text.endswith("⟦紫式部<|im_end|>⟧" + text.rsplit("⟧", 1)[1])
    assert text.count("⟦") == text.count("⟧") == 2
    assert "�" not in text


def test_with_shared_prefixes_the_first_question_is_shown_as_one_row(begin_task: Begin) -> None:
    shared = {"data.prompt_order": "history_first", "train.shared_prefixes": True}
    task = begin_task("ras", {**shared, "train.batch_size": 3})
    text = dry_run_report(task)
    apart = sum(task.train["length"])
    found = re.search(r"shared prefixes: ([\d,]+) tokens instead of ([\d,]+) \((\d+)%\)", text)
    assert found is not None
    assert found[2] == f"{apart:,}"
    assert int(found[3]) == round(100 * int(found[1].replace(",", "")) / apart) < 80
    shown = text.rsplit("first row", 1)[1]
    # Its three records, each with a graph of its own, and the facts of the first step once.
    assert shown.count("⟦") == 1 + 3
    assert shown.count("<|graph|>") == 3
    assert shown.count("(S> Ada Lovelace| P> born in| O> London)") == 1
    assert "⟦England<|im_end|>⟧" in shown


def test_a_result_that_was_cut_off_is_not_there(make_task: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tripletune.train.write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            train(make_task("text_to_triples", {"train.max_steps": 1}))
    assert not (tmp_path / "run" / "final").exists()
    train(make_task("text_to_triples", {"train.max_steps": 1}))
    assert {"training.json", "adapter_model.safetensors"} <= {path.name for path in (tmp_path / "run/final").iterdir()}


# Trackers


class UsageError(Exception):
    pass


@pytest.fixture
def no_login(monkeypatch: pytest.MonkeyPatch) -> None:
    def login() -> None:
        raise UsageError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(login=login, errors=SimpleNamespace(UsageError=UsageError), __spec__=True)
    )
    monkeypatch.delenv("WANDB_MODE", raising=False)


def test_wandb_without_login_is_told_before_anything_is_loaded(no_login: None) -> None:
    with pytest.raises(ValueError, match=r"No API key configured.*WANDB_MODE=offline") as error:
        check_tracking(["tensorboard", "wandb"])
    assert "\n" not in str(error.value)


def test_offline_or_without_a_tracker_no_login_is_needed(no_login: None, monkeypatch: pytest.MonkeyPatch) -> None:
    check_tracking(["none"])
    for mode in ("offline", "disabled"):
        monkeypatch.setenv("WANDB_MODE", mode)
        check_tracking(["wandb"])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        check_tracking(["tensorboard"])
