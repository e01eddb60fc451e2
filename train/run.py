"""The stages of a training run, in the order a recipe calls them: data, model, trainer, save."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tripletune.models.data.records import Record
from tripletune.models.graph_llm.branches import check_branches
from tripletune.models.graph_llm.embeddings import EmbeddingTable
from tripletune.models.graph_llm.loading import add_adapter, build_graph_llm
from tripletune.models.graph_llm.processor import GraphLLMProcessor
from tripletune.models.loading import parse_dtype
from tripletune.models.prompts.rendering import Instructions
from tripletune.models.run_folders import seconds_until
from tripletune.train.collate import Collator
from tripletune.train.config import RunConfig
from tripletune.train.dataset import RecordSource, build_table, tokenize
from tripletune.train.run_folder import RESULT
from tripletune.train.run_trainer import LOSS_FILE
from tripletune.train.same_run import write_text

logger = logging.getLogger(__name__)
__all__ = [
    "RESULT",
    "RunData",
    "check_inputs",
    "load_data",
    "load_model",
    "make_collator",
    "save_result",
    "sources",
]


@dataclass
class RunData:
    """Everything a trainer reads."""

    table: EmbeddingTable | None
    train: Any
    validation: Any
    validation_records: list[Record]


def sources(config: RunConfig) -> tuple[RecordSource, RecordSource | None]:
    """Training and validation records of a run; validation is optional where no such shards exist."""
    data = config.data
    tasks = tuple(data.tasks)
    train_split = data.train_split if Path(data.train).is_dir() else None
    train = RecordSource(data.train, train_split, tasks, data.max_train_records)
    place = data.validation or (data.train if Path(data.train).is_dir() else None)
    if place is None:
        return train, None
    split = data.validation_split if Path(place).is_dir() else None
    validation = RecordSource(place, split, tasks, data.max_validation_records)
    if data.validation is None:
        try:
            next(iter(validation), None)
        except FileNotFoundError:
            return train, None
    return train, validation


def check_inputs(config: RunConfig) -> None:
    """Fail now, not after the model is loaded: records that can't be read, a run folder that can't be written.

    Raises:
        FileNotFoundError: record files are missing.
        OSError: the run folder can't be made or written.
        ValueError: a source holds no record, or its first one can't be read.
    """
    for source in sources(config):
        if source is not None and next(iter(source), None) is None:
            raise ValueError(
                f"{source.path} (split {source.split!r}, tasks {', '.join(source.tasks)}) holds no records"
            )
    folder = Path(config.output_dir)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"output_dir {folder} is a file: name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"output_dir {folder} can't be written: name another folder")


def load_model(config: RunConfig) -> tuple[Any, GraphLLMProcessor]:
    """The base model with fresh graph modules and adapter, and its processor."""
    from transformers import set_seed

    set_seed(config.seed)
    model, data = config.model, config.data
    instructions = Instructions.load(data.planning_prompt, data.answering_prompt)
    base, processor = build_graph_llm(
        model.base,
        encoder=model.encoder,
        dtype=parse_dtype(model.dtype),
        revision=model.revision,
        attention=None if model.attention == "auto" else model.attention,
        processor_settings={
            "planning_instruction": instructions.planning,
            "answering_instruction": instructions.answering,
            "prompt_format": data.prompt_format,
            "prompt_order": data.prompt_order,
            "evidence": data.evidence,
            "max_input_tokens": data.max_input_tokens,
            "max_label_tokens": data.max_label_tokens,
        },
        use_graph=model.use_graph,
        graph_architecture=model.graph_architecture,
        graph_hidden_width=model.graph_hidden_width,
        graph_layers=model.graph_layers,
        graph_heads=model.graph_heads,
        graph_dropout=model.graph_dropout,
        graph_pooling=model.graph_pooling,
        projector_width=model.projector_width,
    )
    if config.train.shared_prefixes:
        check_branches(base.language_model, data.max_input_tokens + data.max_label_tokens)
    adapted = add_adapter(
        base,
        lora=model.lora,
        rank=model.lora_rank,
        alpha=model.lora_alpha,
        dropout=model.lora_dropout,
        targets=tuple(model.lora_targets),
    )
    return adapted, processor


def load_data(config: RunConfig, processor: GraphLLMProcessor) -> RunData:
    """Tokenise the records and embed their strings, or open what an earlier run left in the cache."""
    train, validation = sources(config)
    cache = Path(config.output_dir) / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    both = [train] if validation is None else [train, validation]
    table = build_table(both, processor, config.model.encoder, cache) if config.model.use_graph else None
    return RunData(
        table,
        tokenize(train, processor, table, cache, config.data.learn_copies),
        tokenize(validation, processor, table, cache, config.data.learn_copies) if validation else None,
        list(validation) if validation and config.train.eval_generate else [],
    )


def make_collator(config: RunConfig, processor: GraphLLMProcessor, table: EmbeddingTable | None) -> Collator:
    """What makes the batches of a run."""
    return Collator(
        processor.tokenizer.pad_token_id,
        table,
        action_weight=config.train.action_weight,
        answer_weight=config.train.answer_weight,
        shared_prefixes=config.train.shared_prefixes,
        graph_token_id=processor.graph_token_id,
    )


def save_result(trainer: Any, config: RunConfig, data: RunData, metrics: dict[str, float], seconds: float) -> Path:
    """Write the trained adapter to `<output_dir>/final` and what training measured beside it.

    Args:
        trainer: The trainer, at its end.
        config: The run.
        data: What it was trained on.
        metrics: The last evaluation.
        seconds: Of this process; what it took before a kill is added from the loss log.

    Returns:
        The folder written.
    """
    folder = Path(config.output_dir) / RESULT
    trainer.save_model(str(folder))
    train, validation = sources(config)
    result = {
        "records": len(data.train),
        "steps": trainer.state.global_step,
        "seconds": round(max(seconds, seconds_until(folder.parent / LOSS_FILE, trainer.state.global_step)), 1),
        "data": {
            "train": {"path": train.path, "sha256": train.digest()},
            "validation": {"path": validation.path, "sha256": validation.digest()} if validation else None,
        },
        "evaluation": metrics,
    }
    if trainer.is_world_process_zero():
        write_text(folder / "training.json", json.dumps(result, indent=2) + "\n")
    return folder
