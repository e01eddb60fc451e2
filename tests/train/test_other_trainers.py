"""Names of other trainers: each is answered with the setting that does the same, with and without a section."""

import pytest

from tests.cli import write_lines
from tripletune.core.config import elsewhere, load_config
from tripletune.core.options import ConfigError, leaves
from tripletune.core.plugins import load_from, names_in
from tripletune.train import TASKS
from tripletune.train.misfits import library_misfits
from tripletune.train.settings import RunConfig, other_trainers
from tripletune.train.tasks.chat import ChatConfig
from tripletune.train.tasks.grpo import GrpoConfig

# Names as users of transformers and TRL, axolotl, LLaMA-Factory, Unsloth and ms-swift type them, with words of the
# answer that a user of `train chat` needs.
ANSWERS = {
    # transformers and TRL
    "model_name_or_path": "model.base", "torch_dtype": "model.dtype", "attn_implementation": "model.attention",
    "use_peft": "model.tune: true is lora", "lora_r": "model.lora_rank", "lora_target_modules": "model.lora_targets",
    "load_in_4bit": "model.quantization: true is nf4", "load_in_8bit": "there is no 8-bit base",
    "dataset_name": "data.train", "dataset_test_split": "data.validation_split", "max_length": "data.max_tokens",
    "num_train_epochs": "train.epochs", "per_device_train_batch_size": "train.batch_size",
    "per_device_eval_batch_size": "train.eval_batch_size", "optim": "train.optimizer",
    "gradient_accumulation_steps": "train.gradient_accumulation", "lr_scheduler_type": "train.scheduler",
    "lr_scheduler_kwargs": "train.scheduler_arguments", "dataloader_num_workers": "train.workers",
    "eval_strategy": "train.eval_steps: optimiser steps", "save_strategy": "train.save_steps: optimiser steps",
    "metric_for_best_model": "train.best_metric", "greater_is_better": "train.best_is: true is highest",
    "load_best_model_at_end": "train.best_metric", "early_stopping_patience": "train.patience",
    "resume_from_checkpoint": "resume", "overwrite_output_dir": "resume: true is resume false",
    "hub_model_id": "push_to_hub", "model_revision": "model.base: write NAME@REVISION",
    "max_new_tokens": "train.eval_max_new_tokens", "max_completion_length": "prompt and reply together",
    "remove_unused_columns": "columns that are not read are reported", "dataloader_drop_last": "are learned, too",
    "save_only_model": "a checkpoint has optimiser and schedule", "bnb_4bit_quant_storage": "nf4 is all there is",
    "ref_model": "model.adapter, or the base", "use_vllm": "vLLM is not offered in training",
    "reward_funcs": "tripletune train grpo has the rewards", "torch_compile_backend": "nothing else to set",
    "ddp_find_unused_parameters": "write train.arguments {ddp_find_unused_parameters: VALUE}", "top_p": "greedy",
    "fp16": "train.bf16: there is no float16", "deepspeed": "accelerate launch", "fsdp": "accelerate launch",
    "neftune_noise_alpha": "train.arguments {neftune_noise_alpha: VALUE}", "adam_epsilon": "train.arguments",
    "assistant_only_loss": "data.learn", "completion_only_loss": "data.learn", "loss_type": "train.preference",
    # axolotl
    "base_model": "model.base", "adapter": "model.tune: lora or all", "lora_model_dir": "model.adapter",
    "sequence_len": "data.max_tokens", "sample_packing": "train.packing", "micro_batch_size": "train.batch_size",
    "num_epochs": "train.epochs", "lr_scheduler": "train.scheduler", "val_set_size": "data.validation_share",
    "evals_per_epoch": "train.eval_steps: optimiser steps", "saves_per_epoch": "train.save_steps: optimiser steps",
    "train_on_inputs": "data.learn: true is everything", "wandb_project": "project", "wandb_entity": "entity",
    "wandb_name": "run_name", "lora_target_linear": "model.lora_targets: true is all-linear",
    "flash_attention": "model.attention: true is flash_attention_2", "datasets": "data.train: a file",
    "noisy_embedding_alpha": "train.arguments {neftune_noise_alpha: N}", "roles_to_train": "data.learn",
    "chat_template_jinja": "data.chat_template: a Jinja file", "train_on_eos": "end of each learned reply is learned",
    "field_human": "the layout is found in the rows", "shuffle_merged_datasets": "shuffled with seed in every epoch",
    "flex_attention": "model.attention: true is flex_attention", "local_rank": "accelerate launch",
    "excess_length_strategy": "data.max_tokens: longer rows are left out and counted", "relora_steps": "not offered",
    "wandb_log_model": "artifacts: model or dataset", "wandb_run_id": "set the variable WANDB_RUN_ID",
    "eval_table_size": "train.eval_generate_records", "cut_cross_entropy": "only the logits of label tokens",
    "liger_rope": "write train.arguments {use_liger_kernel: true}", "lora_fan_in_fan_out": "{fan_in_fan_out: true}",
    "bfloat16": "model.dtype: true is bfloat16", "orpo_alpha": "this one is not offered", "plugins": "own_training.md",
    "dataset_prepared_path": "data.cache", "test_datasets": "data.validation", "rl": "train.preference",
    # LLaMA-Factory
    "finetuning_type": "model.tune: lora or all, where all is full", "cutoff_len": "data.max_tokens",
    "val_size": "data.validation_share: a share of the questions; for N rows, write N / all rows",
    "max_samples": "data.max_train_records", "template": "data.chat_template: a Jinja file", "stage": "the task",
    "train_on_prompt": "data.learn: true is everything", "mask_history": "data.learn: true is last",
    "dataset_dir": "data.train: a path", "mix_strategy": "data.train: several files", "use_unsloth": "not offered",
    "default_system": "a column system", "pure_bf16": "model.dtype", "add_tokens": "the tokenizer is the base model's",
    "export_dir": "tripletune checkpoints export RUN", "create_new_adapter": "tripletune checkpoints merge",
    "num_layer_trainable": "layers_to_transform", "double_quantization": "nf4 is all there is",
    "image_max_pixels": "images, audio and video are not read", "pref_ftx": "this one is not offered",
    "adapter_name_or_path": "model.adapter", "pref_beta": "train.beta", "pref_loss": "train.preference",
    "quantization_bit": "model.quantization: 4 is nf4", "additional_target": "model.lora_options",
    "lora_target": "names of layers, where all is all-linear",
    "dataset": "data.train", "preprocessing_num_workers": "all processes",
    # Unsloth
    "model_name": "model.base", "max_seq_length": "data.max_tokens", "full_finetuning": "model.tune: true is all",
    "use_gradient_checkpointing": "train.gradient_checkpointing", "random_state": "seed", "r": "model.lora_rank",
    "target_modules": "model.lora_targets", "use_rslora": "model.lora_options: write {use_rslora: true}",
    "train_on_responses_only": "data.learn", "response_part": "data.learn", "token": "hf auth login",
    "finetune_mlp_modules": "model.lora_targets", "bias": "model.lora_options: write {bias: VALUE}",
    "embedding_learning_rate": "LoRA+ is not offered",
    # ms-swift
    "train_type": "model.tune: lora or all", "split_dataset_ratio": "data.validation_share",
    "val_dataset": "data.validation", "loss_scale": "data.learn", "rlhf_type": "train.preference",
    "attn_impl": "model.attention", "quant_bits": "model.quantization", "adapters": "model.adapter",
    "truncation_strategy": "data.max_tokens: longer rows are left out", "target_regex": "no regular expression",
    "init_weights": "model.lora_options: write {init_lora_weights: NAME}", "lazy_tokenize": "rows are made again",
    "sequence_parallel_size": "sequences are not split", "freeze_vit": "images, audio and video are not read",
    # Those for which letters alone gave a wrong guess, and their neighbours.
    "total_batch_size": "here it is train.records_per_step", "train_test_split": "data.validation_share",
    "eval_size": "data.validation_share", "galore_rank": "not offered", "type": "the layout is found in the rows",
    "logging_first_step": "always logged", "gradient_checkpointing_kwargs": "write train.arguments {gradient_",
    "num_warmup_steps": "here it is train.warmup_steps", "save_every": "train.save_steps", "bits": "4 is nf4",
    "sdp_attention": "model.attention: true is sdpa", "num_generations": "other tasks have train.runs",
    "enable_thinking": "data.template_options: write {enable_thinking: true}", "tf32": "train.arguments {tf32: VALUE}",
    "dataset_text_field": "the layout is found in the rows", "eos_token": "chat template", "system": "a column system",
    "warmup": "train.warmup_steps", "report_too": "did you mean report_to",
}  # fmt: skip


@pytest.mark.parametrize("section", ["", "train.", "data."])
@pytest.mark.parametrize("name", ANSWERS)
def test_names_of_other_trainers(name, section):
    with pytest.raises(ConfigError) as error:
        load_config(ChatConfig, None, {f"{section}{name}": "1"})
    problem = str(error.value).partition("\n  - ")[2]
    assert problem.startswith(f"unknown key {section}{name} (")
    assert ANSWERS[name] in problem


def test_each_table_entry_is_a_setting_of_a_task_or_says_what_to_do():
    known = {name for task in names_in(TASKS) for name in leaves(load_from(TASKS, task, "").TASK.Config)}
    for name, meaning in other_trainers().items():
        assert set(meaning.settings) <= known, name
        assert meaning.settings or meaning.note, name
    assert len(other_trainers()) > 450
    # The same name as ours, but another meaning there.
    assert {name.rpartition(".")[2] for name in known} & set(other_trainers()) == {"adapter", "beta"}


def test_names_that_are_passed_on_are_taken():
    arguments = {}
    lora_options = {}
    for name, meaning in other_trainers().items():
        if f"{{{name}: VALUE}}" in meaning.note:
            target = lora_options if meaning.settings else arguments
            target[name] = None
    assert {"neftune_noise_alpha", "tf32"} <= set(arguments)
    assert "rank_pattern" in lora_options
    config = ChatConfig()
    config.train.arguments = arguments
    config.model.lora_options = lora_options
    # None is no value of some of them, which is another problem.
    assert [problem for problem in library_misfits(config) if "unknown" in problem or "leave out" in problem] == []


def test_beta_is_the_setting_of_the_task():
    assert elsewhere(ChatConfig, "beta") == " (here it is train.beta)"
    assert elsewhere(GrpoConfig, "beta") == " (here it is train.kl)"


def test_a_setting_of_other_tasks_alone():
    assert elsewhere(RunConfig, "sample_packing") == " (other tasks have train.packing, this one has not)"


@pytest.mark.parametrize("name", ["fancy_new_option", "evaluate_now", "token_budget", "on_inputs", "size"])
def test_no_far_fetched_guess(name):
    for section in ("", "train.", "data."):
        with pytest.raises(ConfigError) as error:
            load_config(ChatConfig, None, {section + name: "1"})
        assert str(error.value).endswith(f"unknown key {section}{name}")


def test_a_value_of_the_file_is_blamed_on_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("train: {gradient_accumulation: 1}\n")
    with pytest.raises(ConfigError) as error:
        load_config(ChatConfig, path, {"train.records_per_step": "2"})
    assert str(error.value).endswith(f"set one of them to none (train.gradient_accumulation 1 is in {path})")


def test_each_unknown_flag_has_its_answer(capsys):
    from tripletune.core.command_line import parse_command_line

    words = ["--val_size", "0.1", "--train.early_stopping_patience", "3", "--lora_r=8", "--data.train", "x"]
    with pytest.raises(SystemExit):
        parse_command_line(ChatConfig, "", words)
    assert (
        "--val_size 0.1 (here it is --data.validation_share: a share of the questions; for N rows, write N / all rows) "
        "--train.early_stopping_patience 3 (here it is --train.patience) --lora_r=8 (here it is --model.lora_rank);"
    ) in capsys.readouterr().err


@pytest.mark.parametrize(("steps", "expected"), [("7", 7), ("0", 0), ("none", 0.05)])
def test_steps_of_warmup(steps, expected):
    from tripletune.train.arguments import own_arguments

    config = load_config(ChatConfig, None, {"train.warmup_steps": steps})
    assert own_arguments(config)["warmup_steps"] == expected


def chats(path, count):
    rows = [{"messages": [{"role": "user", "content": f"Q{number % (count // 2)}"},
                          {"role": "assistant", "content": f"A{number}"}]} for number in range(count)]  # fmt: skip
    write_lines(path, rows)


@pytest.mark.parametrize("share", [0.1, 0.4])
def test_a_share_of_the_chats_is_for_validation(share, tmp_path):
    chats(tmp_path / "chats.jsonl", 40)

    def questions(seed):
        settings = {"data.train": str(tmp_path / "chats.jsonl"), "data.validation_share": share, "seed": seed}
        task = load_from(TASKS, "chat", "").TASK(load_config(ChatConfig, None, settings))
        sources = task.sources
        return [sorted(chat.messages[0]["content"] for chat in source) for source in sources]

    train, validation = questions(1)
    assert [len(train), len(validation)] == [40 * (1 - share), 40 * share]
    assert not set(train) & set(validation)
    assert questions(1) == [train, validation] != questions(2)


def test_two_questions_can_be_divided_and_one_can_not(tmp_path):
    settings = {"data.train": str(tmp_path / "chats.jsonl"), "data.validation_share": 0.01}
    kind = load_from(TASKS, "chat", "").TASK
    chats(tmp_path / "chats.jsonl", 4)
    train, validation = kind(load_config(ChatConfig, None, settings)).sources
    assert len(list(train)) == len(list(validation)) == 2
    chats(tmp_path / "chats.jsonl", 2)
    with pytest.raises(ValueError, match="the rows have 1 different questions, texts or first questions of chats"):
        _ = kind(load_config(ChatConfig, None, settings)).sources
