import dataclasses
from pathlib import Path

import pytest

from tripletune.train.config import ConfigError, RunConfig, load_config, parse_command_line, to_yaml

ROOT = Path(__file__).resolve().parents[2]
# The other recipes have configurations of their own kind, which their tests read.
OTHER_RECIPES = ("t2t", "cirag")
CONFIGS = [
    path
    for path in sorted((ROOT / "recipes" / "configs").rglob("*.yaml"))
    if not any(name in path.name for name in OTHER_RECIPES)
]


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key train\.learning_rat \(did you mean learning_rate\?\)"):
        load_config(RunConfig, written(tmp_path, "train:\n  learning_rat: 1e-4\n"))
    with pytest.raises(ConfigError, match=r"unknown key modle \(did you mean model\?\)"):
        load_config(RunConfig, written(tmp_path, "modle:\n  base: x/y\n"))


def test_shared_prefixes_need_a_kernel_that_takes_a_mask() -> None:
    values = {"data.prompt_order": "history_first", "train.shared_prefixes": True}
    assert load_config(RunConfig, None, values).train.shared_prefixes
    with pytest.raises(ConfigError, match=r"flash_attention_2 takes no mask of our own; set sdpa or eager"):
        load_config(RunConfig, None, {**values, "model.attention": "flash_attention_2"})
    load_config(RunConfig, None, {"train.shared_prefixes": True, "model.use_graph": False})
    with pytest.raises(ConfigError, match=r"with train.batch_size 1 nothing is shared"):
        load_config(RunConfig, None, {**values, "train.batch_size": 1})


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    text = "sed: 1\ntrain:\n  batch_size: two\n  epochs: yes\nmodel:\n  use_graph: 1\n  lora_rank: 2.5\n"
    with pytest.raises(ConfigError) as error:
        load_config(RunConfig, written(tmp_path, text))
    message = str(error.value)
    assert "run.yaml: 5 problem(s)" in message
    for part in (
        "unknown key sed (did you mean seed?)",
        "train.batch_size: 'two' is not a whole number",
        "train.epochs: True is not a number",
        "model.use_graph: 1 is not true or false",
        "model.lora_rank: 2.5 is not a whole number",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train.batch_size", 0, "must be greater than 0"),
        ("train.batch_size", float("inf"), "not a whole number"),
        ("train.warmup_ratio", 1.5, "must be from 0 to 1"),
        ("train.scheduler", "cosin", r"did you mean cosine\?"),
        ("train.bf16", "maybe", "not one of auto, true, false"),
        ("model.graph_architecture", "transformer", "not one of graph_transformer, gat, gcn"),
        ("model.graph_hidden_width", 12, "not a multiple of model.graph_heads 8"),
        ("model.graph_hidden_width", 0, "must be greater than 0"),
        ("model.lora_targets", [], "at least one linear layer"),
        ("data.prompt_order", "history", r"did you mean history_first\?"),
        ("train.shared_prefixes", True, "set data.prompt_order history_first"),
        ("data.tasks", [], "name planning, answering or both"),
        ("data.tasks", "planing", r"did you mean planning\?"),
        ("data.max_input_tokens", 5, "at least 16"),
        ("data.max_train_records", 0, "must be greater than 0"),
        ("data.planning_prompt", "/nowhere.md", "there is no file /nowhere.md"),
        ("report_to", "mlflow", "not one of wandb, tensorboard, none"),
        ("seed", None, "not a whole number"),
        ("seed", -1, "must be 0 or more"),
        ("train.epochs", float("inf"), "not a number"),
        ("train.learning_rate", float("nan"), "not a number"),
        ("train.workers", -2, "must be 0 or more"),
        ("train.weight_decay", -1, "must be 0 or more"),
        ("train.max_grad_norm", -1, "must be 0 or more"),
        ("train.adam_beta1", 2, "at least 0 and below 1"),
        ("model.lora_alpha", 0, "must be greater than 0"),
        ("model.revision", 42798, "put text in quotes"),
        ("data.train", "", "name a folder or file"),
        ("output_dir", "", "name a folder or file"),
        ("output_dir", None, "not text"),
    ],
)
def test_values_that_cannot_work(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_config(RunConfig, None, {key: value})
    assert "1 problem(s)" in str(error.value)
    assert key.split(".")[-1] in str(error.value)


def test_nothing_left_to_train() -> None:
    with pytest.raises(ConfigError, match="nothing is left to train"):
        load_config(RunConfig, None, {"model.lora": False, "model.use_graph": False})


def test_numbers_as_yaml_and_people_write_them(tmp_path: Path) -> None:
    config = load_config(RunConfig, written(tmp_path, "train:\n  learning_rate: 1e-5\n  epochs: 3\n  bf16: true\n"))
    assert config.train.learning_rate == 1e-5
    assert isinstance(config.train.epochs, float)
    assert config.train.bf16 == "true"


def test_defaults_are_the_papers() -> None:
    train, model = RunConfig().train, RunConfig().model
    assert (train.learning_rate, train.epochs, train.adam_beta2, train.warmup_ratio) == (1e-5, 2.0, 0.95, 0.15)
    assert (train.batch_size, train.gradient_accumulation, train.max_grad_norm) == (2, 2, 0.5)
    assert (model.lora_rank, model.lora_alpha, model.graph_layers, model.graph_heads) == (8, 16, 3, 8)
    assert RunConfig().check() == []


def test_a_name_given_twice_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "train:\n  learning_rate: 3e-4\ntrain:\n  batch_size: 4\n")
    with pytest.raises(ConfigError, match=r"train is given twice.*line 3"):
        load_config(RunConfig, path)


def test_two_configurations_share_nothing() -> None:
    one, other = RunConfig(), RunConfig()
    one.model.lora_targets.append("o_proj")
    assert other.model.lora_targets == ["q_proj", "v_proj"]


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "seed: 1\nmodel:\ntrain:\n  epochs: 5\n")
    config, dry = parse_command_line(
        RunConfig, "", ["--config", str(path), "--train.epochs", "1.5", "--model.base", "a/b", "--dry-run"]
    )
    assert (config.seed, config.train.epochs, config.model.base, dry) == (1, 1.5, "a/b", True)


def test_command_line_values_keep_their_form() -> None:
    argv = [
        "--model.revision",
        "0123456",
        "--run_name",
        "2024-01-01",
        "--data.train",
        "runs/a: b",
        "--report_to",
        "none",
    ]
    argv += ["--model.lora_targets", "q_proj,o_proj", "--data.tasks", "[planning]", "--train.learning_rate", "1e-5"]
    argv += ["--train.max_steps", "null", "--data.validation", "null"]
    config, _ = parse_command_line(RunConfig, "", argv)
    assert (config.model.revision, config.run_name, config.data.train) == ("0123456", "2024-01-01", "runs/a: b")
    assert config.model.lora_targets == ["q_proj", "o_proj"]
    assert (config.data.tasks, config.train.learning_rate, config.train.max_steps) == (["planning"], 1e-5, None)
    assert (config.data.validation, config.report_to) == (None, ["none"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--train.epoch", "1"], r"unknown argument --train\.epoch \(did you mean --train\.epochs\?\)"),
        (["--train.batch_size", "[1"], r"train\.batch_size: '\[1' is not a whole number"),
        (["stray"], "unexpected argument"),
        (["--config", "/nowhere.yaml"], "no such configuration file: /nowhere.yaml"),
    ],
)
def test_mistakes_on_the_command_line(argv: list[str], message: str) -> None:
    with pytest.raises((ConfigError, FileNotFoundError), match=message):
        parse_command_line(RunConfig, "", argv)


def test_help_lists_every_field_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_command_line(RunConfig, "what it is", ["--help"])
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--train.learning_rate VALUE peak learning rate" in shown
    assert "about 30 % more time" in shown
    for section in ("model", "data", "train"):
        for item in dataclasses.fields(getattr(RunConfig(), section)):
            assert f"--{section}.{item.name} VALUE" in shown
            assert item.metadata["doc"], item.name


@pytest.mark.parametrize(
    ("text", "message"), [("- a\n", "found list"), ("a: [1\n", "not valid YAML"), ("train: 5\n", "train")]
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(RunConfig, written(tmp_path, text))
    if text.startswith("train"):
        with pytest.raises(ConfigError, match="expected names and values"):
            load_config(RunConfig, written(tmp_path, text), {"train.epochs": 1})


def test_the_resolved_configuration_can_be_read_back(tmp_path: Path) -> None:
    config = load_config(RunConfig, None, {"train.learning_rate": 3e-5, "data.tasks": ["planning"], "run_name": "ü"})
    assert load_config(RunConfig, written(tmp_path, to_yaml(config))) == config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_configuration_is_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(RunConfig, path)
    assert config.output_dir.startswith("runs/"), "git ignores runs/ alone"
    assert path.read_text().startswith("# "), "the head of a configuration says what it trains"


def test_there_are_configurations() -> None:
    assert len(CONFIGS) >= 2
