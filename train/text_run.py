"""The stages of a run on plain text that the recipes share: model, rows, result.

A recipe calls `checkpoint_to_go_on_from`, `load_text_model`, `train.text_rows.cached_rows` and `pack_rows`,
`train.text_engine.make_trainer`, `train_to_the_end` and `save_text_result`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tripletune.models.label_loss import learn_labels_only
from tripletune.models.loading import (
    add_lora,
    best_dtype,
    is_encoder_decoder,
    load_tokenizer,
    load_weights,
    parse_dtype,
)
from tripletune.models.run_folders import seconds_until
from tripletune.train.run_folder import RESULT
from tripletune.train.run_trainer import LOSS_FILE, newest_checkpoint
from tripletune.train.same_run import check_same_run, write_text
from tripletune.train.text_config import TextModelSection, TextRunConfig
from tripletune.train.tracking import check_tracking

logger = logging.getLogger(__name__)


def set_up_process() -> Any:
    """Start logging and say what the run runs on.

    Returns:
        accelerate's `PartialState`.
    """
    import torch
    from accelerate import DistributedType, PartialState
    from transformers.utils import logging as transformers_logging

    state = PartialState(cpu=not torch.cuda.is_available())
    level = logging.INFO if state.is_main_process else logging.WARNING
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=level, force=True)
    for name in ("httpx", "sentence_transformers", "datasets", "accelerate", "absl"):
        logging.getLogger(name).setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    how = "" if state.distributed_type is DistributedType.NO else f", {state.distributed_type.value}"
    logging.info("%d process(es) on %s%s", state.num_processes, state.device, how)
    return state


def load_text_model(config: TextRunConfig) -> tuple[Any, Any]:
    """The base model, with a fresh adapter under LoRA, and its tokenizer.

    Raises:
        FileNotFoundError: no such model.
        ValueError: a LoRA target does not exist, or a dtype or attention kernel does not work.
    """
    from transformers import set_seed

    set_seed(config.seed)
    section = config.model
    tokenizer = load_tokenizer(section.base, section.revision)
    seq2seq = is_encoder_decoder(section.base, section.revision)
    model = load_weights(section.base, _dtype(section), section.revision)
    if section.attention != "auto":
        model.set_attn_implementation(section.attention)
    if not seq2seq:
        learn_labels_only(model)
    if not section.lora:
        return model, tokenizer
    adapted = add_lora(
        model,
        rank=section.lora_rank,
        alpha=section.lora_alpha,
        dropout=section.lora_dropout,
        targets=tuple(section.lora_targets),
        base=section.base,
        revision=section.revision,
    )
    return adapted, tokenizer


def checkpoint_to_go_on_from(config: TextRunConfig, train_digest: str) -> Path | None:
    """The newest complete checkpoint of the run folder; call it before anything is loaded.

    Args:
        config: The run.
        train_digest: Fingerprint of the training data.

    Raises:
        ValueError: the folder was begun with other settings or other data, or a tracker can't be reached.
    """
    from accelerate import PartialState

    if PartialState().is_main_process:
        check_tracking(config.report_to)
    checkpoint = newest_checkpoint(config.output_dir) if config.resume else None
    if checkpoint is not None:
        check_same_run(config, train_digest)
    return checkpoint


def train_to_the_end(trainer: Any, checkpoint: Path | None, train_digest: str) -> tuple[dict[str, float], float]:
    """Train, from a checkpoint where there is one, and evaluate.

    Args:
        trainer: From `train.text_engine.make_trainer`.
        checkpoint: From `checkpoint_to_go_on_from`.
        train_digest: Fingerprint of the training data.

    Returns:
        The last evaluation's metrics, and the seconds of training in this process.
    """
    if checkpoint is not None:
        logger.info("going on from %s", checkpoint)
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    logger.info("training %s parameters on %d rows", f"{trained:,}", len(trainer.train_dataset))
    if trainer.eval_dataset is None:
        logger.info("there are no validation rows: nothing is evaluated")
    seconds = trainer.train_as_run(checkpoint, train_digest)
    if trainer.eval_dataset is None:
        return {}, seconds
    done, metrics = trainer.last_evaluation or (None, {})
    # Where `eval_steps` has just ended with the run, nothing has changed since.
    return metrics if done == trainer.state.global_step else trainer.evaluate(), seconds


def save_text_result(
    trainer: Any,
    config: TextRunConfig,
    data: Mapping[str, Any],
    metrics: Mapping[str, float],
    seconds: float,
    **more: Any,
) -> Path:
    """Write the trained model to `<output_dir>/final` and what training measured beside it.

    Args:
        trainer: The trainer.
        config: The run.
        data: Of each split its path and digest.
        metrics: The last evaluation.
        seconds: Of this process; what it took before a kill is added from the loss log.
        **more: Further JSON data for `training.json`.
    """
    folder = Path(config.output_dir) / RESULT
    trainer.save_model(str(folder))
    if trainer.is_world_process_zero():
        result = {
            "rows": len(trainer.train_dataset),
            "steps": trainer.state.global_step,
            "seconds": round(max(seconds, seconds_until(folder.parent / LOSS_FILE, trainer.state.global_step)), 1),
            "data": dict(data),
            **more,
            "evaluation": dict(metrics),
        }
        write_text(folder / "training.json", json.dumps(result, indent=2) + "\n")
    return folder


def _dtype(section: TextModelSection) -> Any:
    # AdamW's steps are smaller than what bfloat16 weights can tell apart; frozen ones do not mind.
    if section.dtype == "auto":
        return best_dtype() if section.lora else parse_dtype("float32")
    return parse_dtype(section.dtype)
