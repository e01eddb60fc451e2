import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tripletune.models.data.records import Record
from tripletune.train.config import RunConfig
from tripletune.train.run import check_inputs, load_data, load_model, save_result, sources
from tripletune.train.run_folder import save_run_settings

Config = Callable[..., RunConfig]


def test_where_records_come_from(make_config: Config, records: list[Record], tmp_path: Path) -> None:
    config = make_config()
    train, validation = sources(config)
    assert list(train) == records
    assert validation is not None
    assert list(validation) == records[:4]

    config.data.max_train_records, config.data.max_validation_records = 5, 2
    config.data.tasks = ["planning"]
    train, validation = sources(config)
    assert list(train) == [record for record in records if record.task == "planning"][:5]
    assert validation is not None
    assert len(list(validation)) == 2


def test_validation_is_optional_where_no_shards_exist(make_config: Config) -> None:
    config = make_config()
    (Path(config.data.train) / "validation-00000.jsonl").unlink()
    assert sources(config)[1] is None
    # A single file has no splits.
    config.data.train += "/train-00000.jsonl"
    assert sources(config)[1] is None
    check_inputs(config)
    # But a place that was named must exist.
    config.data.validation = "/nowhere"
    with pytest.raises(FileNotFoundError, match="/nowhere"):
        check_inputs(config)


def test_inputs_are_checked_before_anything_is_loaded(make_config: Config, write_records: Any) -> None:
    config = make_config()
    config.data.tasks = ["answering"]
    write_records([], "validation", Path(config.data.train))
    with pytest.raises(ValueError, match=r"split 'validation', tasks answering\) holds no records"):
        check_inputs(config)
    write_records([], "train", Path(config.data.train))
    with pytest.raises(ValueError, match="split 'train'"):
        check_inputs(config)


def test_a_run_folder_that_cannot_be_is_told_before_anything_is_loaded(make_config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError, match=r"output_dir .*file is a file"):
        check_inputs(make_config({"output_dir": str(tmp_path / "file")}))
    with pytest.raises(OSError, match="file"):
        check_inputs(make_config({"output_dir": str(tmp_path / "file" / "run")}))


def test_settings_reach_model_and_processor(make_config: Config, tmp_path: Path) -> None:
    plan = tmp_path / "plan.md"
    plan.write_text("Plan it my way.\n")
    config = make_config(
        {
            "data.planning_prompt": str(plan),
            "data.prompt_format": "plain",
            "data.prompt_order": "history_first",
            "data.max_input_tokens": 321,
            "data.max_label_tokens": 45,
            "data.evidence": "text",
            "model.graph_architecture": "gat",
            "model.graph_pooling": "union",
            "model.lora_rank": 3,
            "model.lora_alpha": 5,
            "model.lora_targets": ["k_proj"],
        }
    )
    model, processor = load_model(config)
    settings = processor.settings
    assert settings.planning_instruction == "Plan it my way."
    assert (settings.prompt_format, settings.max_input_tokens, settings.max_label_tokens) == ("plain", 321, 45)
    assert settings.prompt_order == "history_first"
    assert (settings.evidence, settings.graph_pooling, settings.use_graph) == ("text", "union", True)
    base = model.get_base_model()
    assert (base.config.graph_architecture, base.config.graph_pooling) == ("gat", "union")
    assert (base.config.graph_hidden_width, base.config.projector_width) == (16, 16)
    lora = model.peft_config["default"]
    assert (lora.r, lora.lora_alpha, lora.lora_dropout) == (3, 5, 0.1)
    adapted = {name for name, p in model.named_parameters() if p.requires_grad and "lora_" in name}
    assert adapted
    assert all("k_proj" in name for name in adapted)


def test_the_seed_makes_the_new_weights(make_config: Config) -> None:
    def projector(seed: int) -> list[float]:
        model, _ = load_model(make_config({"seed": seed}))
        return model.get_base_model().projector.up.weight.flatten().tolist()

    assert projector(1) == projector(1)
    assert projector(1) != projector(2)


def test_without_graph_nothing_is_embedded(make_config: Config) -> None:
    config = make_config({"model.use_graph": False})
    _, processor = load_model(config)
    data = load_data(config, processor)
    assert data.table is None
    assert set(data.train.column_names) == {"input_ids", "label_ids", "marker", "length", "question"}
    assert len(data.validation_records) == 4
    assert not list((Path(config.output_dir) / "cache").glob("embeddings-*"))


def test_the_run_folder_says_what_ran(make_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123-secret")
    monkeypatch.setenv("HF_TOKEN", "4567-secret")
    monkeypatch.setattr(sys, "argv", ["ras_multitask.py", "--seed", "1"])
    config = make_config({"seed": 1})
    save_run_settings(config)
    folder = Path(config.output_dir)
    resolved = yaml.safe_load((folder / "config.yaml").read_text())
    assert resolved["seed"] == 1
    assert resolved["train"]["warmup_ratio"] == 0.15
    about = json.loads((folder / "environment.json").read_text())
    assert about["command"] == ["ras_multitask.py", "--seed", "1"]
    assert about["versions"]["torch"]
    assert "secret" not in "".join(path.read_text() for path in folder.iterdir() if path.is_file())


def test_the_result_names_its_data(make_config: Config) -> None:
    class State:
        global_step = 7

    class Trainer:
        state = State()

        def save_model(self, folder: str) -> None:
            Path(folder).mkdir(parents=True, exist_ok=True)

        def is_world_process_zero(self) -> bool:
            return True

    config = make_config({"model.use_graph": False})
    _, processor = load_model(config)
    folder = save_result(Trainer(), config, load_data(config, processor), {"eval_loss": 1.5}, 12.34)
    assert folder == Path(config.output_dir) / "final"
    result = json.loads((folder / "training.json").read_text())
    assert (result["records"], result["steps"], result["seconds"]) == (12, 7, 12.3)
    assert result["evaluation"] == {"eval_loss": 1.5}
    # What it took before a kill counts too.
    lines = [json.dumps({"step": step, "seconds": 10.0}) for step in range(1, 9)]
    (Path(config.output_dir) / "losses.jsonl").write_text("\n".join(lines))
    save_result(Trainer(), config, load_data(config, processor), {}, 12.34)
    assert json.loads((folder / "training.json").read_text())["seconds"] == 70.0
    assert result["data"]["train"] == {"path": config.data.train, "sha256": sources(config)[0].digest()}
