"""Names of settings in other trainers: transformers and TRL, axolotl, LLaMA-Factory, Unsloth, ms-swift.

An unknown name is looked up here before a similar name is guessed, so that the answer is the setting that does the
same. `python -m tripletune.docs` prints the table into docs/reference/train.md.
"""

from __future__ import annotations

from tripletune.core.names import Elsewhere

_LENGTHS = ("data.max_tokens", "data.max_input_tokens", "data.max_source_tokens")
# Our settings, with the names under which other trainers have the same values.
_SAME_VALUES: dict[tuple[str, ...], str] = {
    ("model.base",): "model model_name model_name_or_path base_model model_id model_id_or_path",
    ("model.attention",): "attn_implementation attn_impl",
    ("model.dtype",): "torch_dtype",
    ("model.adapter",): "adapter_name_or_path lora_model_dir adapters resume_from_adapter",
    ("model.lora_rank",): "r lora_r peft_r",
    ("model.lora_targets",): "target_modules lora_target_modules lora_target",
    ("data.train",): "dataset dataset_name dataset_path train_dataset train_file data_files",
    ("data.validation",): "eval_dataset val_dataset validation_file test_datasets",
    ("data.train_split",): "dataset_train_split",
    ("data.validation_split",): "dataset_test_split",
    ("data.validation_share",): "val_set_size test_size split_dataset_ratio",
    ("data.max_train_records",): "max_samples max_train_samples",
    ("data.max_validation_records",): "max_eval_samples",
    _LENGTHS: "max_seq_length max_seq_len max_length sequence_len cutoff_len model_max_length",
    ("data.cache",): "dataset_prepared_path tokenized_path",
    ("train.epochs",): "num_train_epochs num_epochs",
    ("train.learning_rate",): "lr",
    ("train.batch_size",): "per_device_train_batch_size micro_batch_size",
    ("train.gradient_accumulation",): "gradient_accumulation_steps grad_accum_steps",
    ("train.records_per_step",): "global_batch_size",
    ("train.optimizer",): "optim",
    ("train.scheduler",): "lr_scheduler_type lr_scheduler",
    ("train.scheduler_arguments",): "lr_scheduler_kwargs",
    ("train.max_grad_norm",): "gradient_clipping",
    ("train.eval_batch_size",): "per_device_eval_batch_size",
    ("train.workers",): "dataloader_num_workers",
    ("train.patience",): "early_stopping_patience early_stopping_steps early_stop_interval early_stopping",
    ("train.packing",): "sample_packing",
    ("train.pack_tokens",): "packing_length",
    ("train.beta",): "pref_beta rl_beta dpo_beta",
    ("project",): "wandb_project project_name swanlab_project",
    ("entity",): "wandb_entity",
    ("run_name",): "wandb_name wandb_run_name",
    ("push_to_hub",): "hub_model_id",
    ("seed",): "random_state data_seed",
}
# Names of settings with other values, each with what differs.
_OTHER_VALUES: dict[str, tuple[str, str]] = {
    "adapter": ("model.tune", "lora or all; model.adapter is a trained adapter to start from"),
    "finetuning_type": ("model.tune", "lora or all, where all is full"),
    "train_type": ("model.tune", "lora or all, where all is full"),
    "tuner_type": ("model.tune", "lora or all, where all is full"),
    "full_finetuning": ("model.tune", "true is all, false is lora"),
    "use_peft": ("model.tune", "true is lora, false is all"),
    "flash_attention": ("model.attention", "true is flash_attention_2"),
    "flash_attn": ("model.attention", "fa2 is flash_attention_2"),
    "load_in_4bit": ("model.quantization", "true is nf4"),
    "use_qlora": ("model.quantization", "true is nf4"),
    "quantization_bit": ("model.quantization", "4 is nf4; there is no 8"),
    "quant_bits": ("model.quantization", "4 is nf4; there is no 8"),
    "lora_target_linear": ("model.lora_targets", "true is all-linear"),
    "use_rslora": ("model.lora_options", "write {use_rslora: true}"),
    "use_dora": ("model.lora_options", "write {use_dora: true}"),
    "peft_use_rslora": ("model.lora_options", "write {use_rslora: true}"),
    "peft_use_dora": ("model.lora_options", "write {use_dora: true}"),
    "modules_to_save": ("model.lora_options", "write {modules_to_save: [NAME]}"),
    "lora_modules_to_save": ("model.lora_options", "write {modules_to_save: [NAME]}"),
    "additional_target": ("model.lora_options", "write {modules_to_save: [NAME]}"),
    "layers_to_transform": ("model.lora_options", "write {layers_to_transform: [N]}"),
    "pissa_init": ("model.lora_options", "write {init_lora_weights: pissa}"),
    "revision": ("model.base", "write NAME@REVISION"),
    "model_revision": ("model.base", "write NAME@REVISION"),
    "revision_of_model": ("model.base", "write NAME@REVISION"),
    "datasets": ("data.train", "a file, folder or name of the Hub; its layout is found in the rows"),
    "val_size": ("data.validation_share", "a share of the questions; for N rows, write N / all rows"),
    "template": ("data.chat_template", "a Jinja file; without it, the model's own template"),
    "chat_template_path": ("data.chat_template", "a Jinja file; without it, the model's own template"),
    "train_on_inputs": ("data.learn", "true is everything"),
    "train_on_prompt": ("data.learn", "true is everything"),
    "completion_only_loss": ("data.learn", "prompts are not learned unless it is everything"),
    "assistant_only_loss": ("data.learn", "prompts are not learned unless it is everything"),
    "train_on_responses_only": ("data.learn", "prompts are not learned unless it is everything"),
    "mask_history": ("data.learn", "true is last; or give single replies the weight 0 in the data"),
    "loss_scale": ("data.learn", "last_round is last, all is everything; or flag replies in the data"),
    "roles_to_train": ("data.learn", "assistant alone is the default"),
    "fp16": ("train.bf16", "there is no float16, whose small gradients vanish"),
    "mixed_precision": ("train.bf16", "bf16 is true, no is false"),
    "cosine_min_lr_ratio": (
        "train.scheduler",
        "cosine_with_min_lr, with train.scheduler_arguments {min_lr_rate: SHARE}",
    ),
    "warmup": ("train.warmup_steps", "train.warmup_ratio is a share"),
    "evals_per_epoch": ("train.eval_steps", "optimiser steps between evaluations: steps of an epoch / evaluations"),
    "saves_per_epoch": ("train.save_steps", "optimiser steps between checkpoints: steps of an epoch / checkpoints"),
    "eval_strategy": ("train.eval_steps", "optimiser steps between evaluations; none: only at the end"),
    "evaluation_strategy": ("train.eval_steps", "optimiser steps between evaluations; none: only at the end"),
    "do_eval": ("train.eval_steps", "validation data are evaluated at the end, and every so many steps"),
    "save_strategy": ("train.save_steps", "optimiser steps between checkpoints"),
    "metric_for_best_model": ("train.best_metric", "without eval_, such as loss"),
    "load_best_model_at_end": ("train.best_metric", "name a metric, such as loss, and the best step is the result"),
    "greater_is_better": ("train.best_is", "true is highest, false is lowest"),
    "train_sampling_strategy": ("train.group_by_length", "true is group_by_length"),
    "use_gradient_checkpointing": ("train.gradient_checkpointing", "true or false"),
    "activation_checkpointing": ("train.gradient_checkpointing", "true or false"),
    "disable_gradient_checkpointing": ("train.gradient_checkpointing", "with the opposite value"),
    "loss_type": ("train.preference", "a loss of TRL's DPOTrainer"),
    "pref_loss": ("train.preference", "sigmoid is DPO"),
    "rlhf_type": ("train.preference", "sigmoid is DPO"),
    "rl": ("train.preference", "sigmoid is DPO"),
    "use_wandb": ("report_to", "wandb"),
    "with_tracking": ("report_to", "wandb, tensorboard or others"),
    "resume_from_checkpoint": ("resume", "true continues from the newest checkpoint of output_dir"),
    "auto_resume_from_checkpoints": ("resume", "true continues from the newest checkpoint of output_dir"),
    "overwrite_output_dir": ("resume", "true is resume false"),
    "hub_strategy": ("push_to_hub", "OWNER/NAME; the result is pushed, no checkpoint"),
    "hub_token": ("push_to_hub", "OWNER/NAME; log in with: hf auth login"),
    "hub_private_repo": ("push_to_hub", "OWNER/NAME; make the repository private on the Hub"),
}
_BY_LAUNCHER = "the launcher's file says it: accelerate launch --config_file recipes/accelerate/zero2.yaml"
# Names without a setting, each with what to do.
_NO_SETTING = {
    "load_in_8bit": "there is no 8-bit base: model.quantization nf4 has 4 bits",
    "deepspeed": _BY_LAUNCHER,
    "fsdp": _BY_LAUNCHER.replace("zero2", "fsdp2"),
    "fsdp_config": _BY_LAUNCHER.replace("zero2", "fsdp2"),
    "num_processes": "the launcher says it: accelerate launch --num_processes N",
    "neftune_noise_alpha": "write train.arguments {neftune_noise_alpha: N}",
    "noisy_embedding_alpha": "write train.arguments {neftune_noise_alpha: N}",
    "adam_epsilon": "write train.arguments {adam_epsilon: N}",
    "optim_args": "write train.arguments {optim_args: TEXT}",
    "use_liger_kernel": "write train.arguments {use_liger_kernel: true}",
    "logging_strategy": "train.logging_steps is the number of steps between log lines",
    "logging_dir": "set the variable TENSORBOARD_LOGGING_DIR",
    "wandb_mode": "set the variable WANDB_MODE",
    "wandb_api_key": "set the variable WANDB_API_KEY",
    "do_train": "a run trains; --dry-run only shows what it would do",
    "stage": "the stage is the task: tripletune train chat, or grpo; train.preference for DPO",
    "trust_remote_code": "code of models is not run",
    "dataset_num_proc": "all processes make rows; there is nothing to set",
    "preprocessing_num_workers": "all processes make rows; there is nothing to set",
    "dataset_processes": "all processes make rows; there is nothing to set",
    "overwrite_cache": "rows are made again whenever data or settings change",
    "pad_to_sequence_len": "rows are padded to the longest of their batch",
    "streaming": "rows are streamed from their files",
    "label_smoothing_factor": "it does not fit our losses, so it is not offered",
}


def _table() -> dict[str, Elsewhere]:
    """Every name of another trainer, with its meaning here."""
    table = {}
    for settings, names in _SAME_VALUES.items():
        for name in names.split():
            table[name] = Elsewhere(settings)
    for name, (setting, note) in _OTHER_VALUES.items():
        table[name] = Elsewhere((setting,), note)
    for name, note in _NO_SETTING.items():
        table[name] = Elsewhere((), note)
    return table


OTHER_TRAINERS = _table()
