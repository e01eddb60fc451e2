"""Settings of every task: what can't work, what the defaults are, and the configurations in recipes/configs/."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tripletune.core.command_line import parse_command_line
from tripletune.core.config import load_config
from tripletune.core.options import ConfigError, problems
from tripletune.core.plugins import load_from, names_in
from tripletune.recipes.own_documents import OwnDocumentsConfig
from tripletune.train import TASKS
from tripletune.train.tasks.ras import GraphConfig

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes" / "configs"
CONFIGS = [
    path for path in sorted(FOLDER.rglob("*.yaml")) if not {"trajectories", "expert"} & set(path.stem.split("_"))
]
KINDS: dict[str, type] = {"documents": OwnDocumentsConfig} | {
    name: load_from(TASKS, task, "").TASK.Config
    for name, task in (("grpo", "grpo"), ("cirag", "cirag_distill"), ("t2t", "text_to_triples"), ("", "ras"))
}
KINDS = {"preference": KINDS["cirag"]} | KINDS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data.evidence": "graph", "model.use_graph": False}, "prompts hold no facts"),
        ({"data.prompt_order": "interleaved", "train.graph_warmup_steps": 5}, "needs one graph per row"),
        ({"train.graph_warmup_steps": 5, "train.preference": "sigmoid"}, "is for new graph modules"),
        ({"model.tune": "graph_token", "model.use_graph": False}, "model.use_graph must be true"),
        ({"model.tune": "all", "model.quantization": "nf4"}, "4-bit weights can't be trained"),
        ({"model.tune": "all", "model.dtype": "float16"}, "use float32"),
        ({"model.tune": "all", "model.dtype": "bfloat16"}, "bfloat16 weights round most of AdamW's steps away"),
        ({"model.tune": "all", "model.adapter": "runs/one"}, "name a fully trained model as model.base"),
        ({"train.per_device_train_batch_size": 2}, r"per_device_train_batch_size \(here it is train\.batch_size\)"),
        ({"num_train_epochs": 2}, r"unknown key num_train_epochs \(here it is train\.epochs\)"),
        ({"model.r": 2}, r"unknown key model\.r \(here it is model\.lora_rank\)"),
        ({"max_seq_length": 2}, r"unknown key max_seq_length \(here it is data\.max_input_tokens\)"),
        ({"train.epochs_per_eval": 2}, r"unknown key train\.epochs_per_eval$"),
        ({"data.validation": "v", "data.validation_share": 0.1}, "are both set: leave one of them out"),
        ({"learning_rate": 2}, r"unknown key learning_rate \(here it is train\.learning_rate\)"),
        ({"train.epohcs": 2}, r"unknown key train\.epohcs \(did you mean train\.epochs\?\)"),
        ({"model.lora_options": "{use_dora: true}", "model.tune": "all"}, "has no effect"),
        ({"model.lora_options": "{init_lora_weights: pissa}", "model.adapter": "x"}, "leave adapter and"),
        ({"train.scheduler_arguments": "3"}, "is not a mapping of names and values"),
        ({"model.lora_targets": "all-linear,q_proj"}, "or all-linear alone"),
        ({"train.learning_rate": 1e6}, "must be greater than 0 and at most 0.1"),
        ({"train.save_total_limit": 0}, "must be at least 1"),
        ({"model.graph_hidden_width": 12}, "not a multiple of model.graph_heads 8"),
        ({"data.tasks": []}, "name planning, answering or both"),
        ({"train.learning_rate": float("nan")}, "not a number"),
    ],
)
def test_settings_that_cannot_work(settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        load_config(GraphConfig, None, settings)
    assert "the command line: 1 problem(s)" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train.optimizer": "adamw8bit"}, r"'adamw8bit' is not one of .* \(did you mean adamw_8bit\?\)"),
        ({"train.optimizer": "paged_adamw_8bit"}, r"needs bitsandbytes: pip install 'tripletune\[qlora\]'"),
        ({"train.scheduler": "cosin"}, r"\(did you mean cosine\?\)"),
        ({"train.scheduler": "warmup_stable_decay"}, "needs num_decay_steps in train.scheduler_arguments"),
        ({"train.scheduler_arguments": "{min_lr: 1}"}, "unknown setting 'min_lr'; known: num_cycles"),
        ({"train.scheduler_arguments": "{num_cycles: two}"}, "num_cycles 'two' is not float"),
        ({"model.lora_options": "{use_dorra: true}"}, r"unknown setting 'use_dorra' \(did you mean use_dora\?\)"),
        ({"model.lora_options": "{r: 8}"}, r"unknown setting 'r' \(here it is model\.lora_rank\)"),
        ({"model.lora_options": "{init_lora_weights: pissa_niter_4}"}, "'pissa_niter_4' is not .*'pissa'"),
        ({"model.lora_options": "{layers_to_transform: all}"}, r"layers_to_transform 'all' is not .*list\[int\]"),
        ({"report_to": "wand"}, r"report_to: 'wand' is not one of .*\(did you mean wandb\?\)"),
        ({"train.arguments": "{learning_rate: 1}"}, r"\(here it is train\.learning_rate\)"),
        ({"train.arguments": "{neftune_noise: 1}"}, r"\(did you mean neftune_noise_alpha\?\)"),
        ({"train.arguments": "{hub_model_id: me/m}"}, r"unknown setting 'hub_model_id' \(here it is push_to_hub\)"),
        (
            {"train.arguments": "{label_smoothing_factor: 0.5}"},
            "label_smoothing_factor 0.5: it does not fit our losses",
        ),
        ({"train.arguments": "{gradient_checkpointing: true}"}, r"\(here it is train\.gradient_checkpointing\)"),
        ({"train.arguments": "{train_sampling_strategy: sequential}"}, r"\(here it is train\.group_by_length: "),
        ({"train.arguments": "{push_to_hub: true}"}, r"unknown setting 'push_to_hub' \(here it is push_to_hub\)"),
    ],
)
def test_what_the_libraries_would_refuse(settings, message, monkeypatch):
    from tripletune.train.misfits import library_misfits

    monkeypatch.setattr("tripletune.train.misfits.find_spec", lambda name: None)
    (problem,) = library_misfits(load_config(GraphConfig, None, settings))
    assert re.search(message, problem)


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("save_only_model: true", "would begin without optimiser"),
        ("ignore_data_skip: true", "would learn from the first rows again"),
        ("restore_callback_states_from_checkpoint: true", "a resumed run"),
        ("save_strategy: 'no'", "checkpoints follow train.save_steps"),
        ("save_strategy: epoch", "checkpoints follow train.save_steps"),
        ("save_strategy: best", "checkpoints follow train.save_steps"),
        ("enable_jit_checkpoint: true", "at SIGTERM"),
        ("resume_from_checkpoint: runs/a", "newest checkpoint"),
        ("average_tokens_across_devices: false", "other losses than one"),
        ("auto_find_batch_size: true", "set train.batch_size"),
        ("load_best_model_at_end: true", "set train.best_metric"),
        ("dataloader_in_order: false", "data-loading processes finish"),
        ("dataloader_drop_last: true", "neither learned nor evaluated"),
        ("bf16_full_eval: true", "would round the weights"),
        ("fp16_full_eval: true", "would round the weights"),
        ("torch_compile: true", "set train.torch_compile"),
        ("torch_compile_mode: default", "set train.torch_compile"),
        ("deepspeed: zero.json", "accelerate launch"),
        ("fsdp: full_shard", "accelerate launch"),
        ("accelerator_config: {split_batches: true}", "rows per device"),
        ("accelerator_config: {dispatch_batches: true}", "collates its own rows"),
        ("accelerator_config: {gradient_accumulation_kwargs: {num_steps: 2}}", "train.gradient_accumulation"),
        ("accelerator_config: speed.json", "must be a mapping"),
    ],
)
def test_arguments_that_break_a_promise_are_refused(argument, reason):
    from tripletune.train.misfits import library_misfits

    (problem,) = library_misfits(load_config(GraphConfig, None, {"train.arguments": f"{{{argument}}}"}))
    assert argument.partition(":")[0] in problem or "{" in argument
    assert reason in problem


def test_an_adapter_that_only_peft_can_run_is_not_trained():
    from tripletune.train.misfits import library_misfits

    options = "{alora_invocation_tokens: [3, 4]}"
    (problem,) = library_misfits(load_config(GraphConfig, None, {"model.lora_options": options}))
    assert problem.startswith("model.lora_options: leave out alora_invocation_tokens, which only PEFT's own generate")


@pytest.mark.parametrize(
    "argument",
    ["save_only_model: false", "save_strategy: steps", "average_tokens_across_devices: true", "bf16_full_eval: null",
     "accelerator_config: {even_batches: false}", "eval_delay: 3", "full_determinism: true"],
)  # fmt: skip
def test_arguments_that_break_no_promise_pass(argument):
    from tripletune.train.arguments import broken_promises

    assert broken_promises(load_config(GraphConfig, None, {"train.arguments": f"{{{argument}}}"}).train.arguments) == []


def test_what_the_libraries_take():
    from tripletune.train.arguments import shared_arguments
    from tripletune.train.misfits import library_misfits

    words = {"train.scheduler": "cosine_with_min_lr", "train.scheduler_arguments": "{min_lr: 1e-6, num_cycles: 1}"}
    words |= {"train.optimizer": "adafactor", "train.arguments": "{neftune_noise_alpha: 5, adam_epsilon: 1e-6}"}
    words["model.lora_options"] = "{rank_pattern: {q_proj: 2}, use_rslora: true, init_lora_weights: pissa}"
    config = load_config(GraphConfig, None, words)
    assert library_misfits(config) == []
    found = shared_arguments(config)
    assert found["lr_scheduler_kwargs"] == {"min_lr": 1e-6, "num_cycles": 1}
    assert (found["optim"], found["adam_epsilon"]) == ("adafactor", 1e-6)


@pytest.mark.parametrize("task", ["text_to_triples", "cirag_distill", "cirag_on_policy", "grpo"])
def test_without_a_graph_there_is_no_graph_token_to_tune(task):
    with pytest.raises(ConfigError, match=r"model\.tune: 'graph_token' is not one of lora, all"):
        load_config(load_from(TASKS, task, "").TASK.Config, None, {"model.tune": "graph_token"})


def test_defaults_are_the_papers():
    train, model = GraphConfig().train, GraphConfig().model
    assert (train.learning_rate, train.epochs, train.adam_beta2, train.warmup_ratio) == (1e-5, 2.0, 0.95, 0.15)
    assert (train.batch_size, train.micro_batches(1), train.max_grad_norm) == (2, 2, 0.5)
    assert GraphConfig().data.long_labels == "truncate"
    assert (model.lora_rank, model.lora_alpha, model.graph_layers, model.graph_heads) == (8, 16, 3, 8)
    assert problems(GraphConfig()) == []


def test_accumulation_follows_from_the_records_of_a_step():
    train = load_config(GraphConfig, FOLDER / "llama2_7b_ras_paper.yaml").train
    assert [train.micro_batches(processes) for processes in (1, 2, 4, 8)] == [8, 4, 2, 1]
    with pytest.raises(ValueError, match=r"records_per_step 16 is not a multiple of train.batch_size 2 x 3 process"):
        train.micro_batches(3)
    with pytest.raises(ValueError, match="x 16 process"):
        train.micro_batches(16)
    both = {"train.records_per_step": 16, "train.gradient_accumulation": 8}
    with pytest.raises(ConfigError, match=r"records_per_step 16 and train\.gradient_accumulation 8 are both set"):
        load_config(GraphConfig, None, both)
    without = {**both, "train.records_per_step": "none"}
    assert load_config(GraphConfig, None, without).train.micro_batches(3) == 8


def test_help_lists_every_field_with_its_default(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_command_line(GraphConfig, "what it is", ["--help"])
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for section in ("model", "data", "train"):
        for item in dataclasses.fields(getattr(GraphConfig(), section)):
            assert f"{section}.{item.name} " in shown
            assert item.metadata["help"], item.name


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(FOLDER)))
def test_every_configuration_is_valid(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(next(kind for name, kind in KINDS.items() if name in path.name), path)
    assert config.output_dir.startswith("runs/"), "git ignores runs/ alone"
    assert path.read_text().startswith("# "), "the head of a configuration says what it trains"


def test_there_are_configurations():
    assert len(CONFIGS) >= 19


@pytest.mark.parametrize("task", names_in(TASKS))
def test_help_needs_no_torch(task):
    code = f"import sys\nfrom tripletune.train import main\ntry: main('{task}', '', ['-h'])\n"
    code += "except SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "False"
    assert "--train.learning_rate" in done.stdout
