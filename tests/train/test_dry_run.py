import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tripletune.models.data.records import Action, Record
from tripletune.train.config import RunConfig
from tripletune.train.dry_run import report
from tripletune.train.run import RunData, load_data, load_model

Config = Callable[..., RunConfig]


def dry(config: RunConfig) -> tuple[str, Any, RunData]:
    model, processor = load_model(config)
    data = load_data(config, processor)
    return report(config, model, processor, data), model, data


def test_the_report(make_config: Config) -> None:
    text, model, data = dry(make_config({"train.epochs": 1.5}))
    assert "  learning_rate: 0.01" in text.replace("    ", "  ")
    assert (
        "train: 12 (answering [NO_RETRIEVAL] 1, answering [SUFFICIENT] 3, planning [NO_RETRIEVAL] 1, "
        "planning [SUBQ] 3, planning [SUFFICIENT] 4)"
    ) in text
    assert "validation: 4 (" in text
    # Three steps an epoch; 4.5 are rounded up, as the Trainer does.
    assert "5 optimiser steps of 4 records a device, 1 of them warm-up" in text
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert f"({trained:,} parameters)" in text
    assert "shared prefixes:" not in text
    assert f"for 2 x {max(data.train['length'])} tokens" in text


def test_steps_are_those_of_the_trainer(make_config: Config, tmp_path: Path) -> None:
    from tripletune.train.engine import GraphLLMTrainer

    changes: list[dict[str, Any]] = [
        {"train.epochs": 1.5},
        {"train.max_steps": 7},
        {"train.batch_size": 5},
    ]
    for number, change in enumerate(changes):
        config = make_config({**change, "train.eval_generate": False, "output_dir": str(tmp_path / f"run{number}")})
        model, processor = load_model(config)
        data = load_data(config, processor)
        shown = report(config, model, processor, data)
        trainer = GraphLLMTrainer(model, config, processor, data.table, data.train)
        trainer.train()
        assert f"  {trainer.state.max_steps} optimiser steps" in shown


def test_steps_count_the_records_of_every_process(make_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tripletune.train.dry_run.process_count", lambda: 2)
    text, _, _ = dry(make_config({"train.epochs": 2}))
    assert "4 optimiser steps of 4 records on each of 2 devices, 1 of them warm-up" in text


def test_the_mask_is_shown_in_any_script(make_config: Config, write_records: Any, records: list[Record]) -> None:
    config = make_config()
    record = Record("1", "1", "answering", "誰?", Action.NO_RETRIEVAL, answers=("紫式部",))
    write_records([record], "train", None)
    text, _, _ = dry(config)
    assert "Question: 誰?<|im_end|>" in text
    assert text.endswith("⟦紫式部<|im_end|>⟧" + text.rsplit("⟧", 1)[1])
    assert text.count("⟦") == text.count("⟧") == 2
    assert "�" not in text


def test_with_shared_prefixes_the_first_question_is_shown_as_one_row(make_config: Config) -> None:
    shared = {"data.prompt_order": "history_first", "train.shared_prefixes": True}
    text, _, data = dry(make_config({**shared, "train.batch_size": 3}))
    apart = sum(data.train["length"])
    found = re.search(r"shared prefixes: ([\d,]+) tokens in the place of ([\d,]+) \((\d+)%\)", text)
    assert found is not None
    assert found[2] == f"{apart:,}"
    assert int(found[3]) == round(100 * int(found[1].replace(",", "")) / apart) < 80
    shown = text.rsplit("first batch", 1)[1]
    # Its three records, each with a graph of its own, and the facts of the first step once.
    assert shown.count("⟦") == 1 + 3
    assert shown.count("<|graph|>") == 3
    assert shown.count("(S> Ada Lovelace| P> born in| O> London)") == 1
    assert "⟦England<|im_end|>⟧" in shown
