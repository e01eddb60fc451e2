"""The stages of a training run, in the order a recipe calls them: data, model, trainer, save."""

from __future__ import annotations

import json
import logging
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from models.graph_processor import GraphLLMProcessor
from models.loading import add_adapter, build_graph_llm
from models.records import Record
from models.rendering import Instructions
from models.sources import parse_dtype
from models.text_embeddings import EmbeddingTable
from train.config import RunConfig, to_yaml
from train.dataset import RecordSource, build_table, tokenize

logger = logging.getLogger(__name__)
RESULT = "final"


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
    """Fail now, not after the model is loaded: the record files must exist and their first record must be readable."""
    for source in sources(config):
        if source is not None and next(iter(source), None) is None:
            raise ValueError(
                f"{source.path} (split {source.split!r}, tasks {', '.join(source.tasks)}) holds no records"
            )


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
        tokenize(train, processor, table, cache),
        tokenize(validation, processor, table, cache) if validation else None,
        list(validation) if validation and config.train.eval_generate else [],
    )


def save_run_settings(config: RunConfig) -> None:
    """Write the resolved configuration, git revision and versions into the run folder."""
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    packages = ("torch", "transformers", "peft", "accelerate", "torch-geometric", "datasets", "sentence-transformers")
    about = {
        "command": sys.argv,
        "git_revision": _git_revision(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: metadata.version(name) for name in packages},
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    (folder / "environment.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def save_result(trainer: Any, config: RunConfig, data: RunData, metrics: dict[str, float], seconds: float) -> Path:
    """Write the trained adapter to `<output_dir>/final` and what training measured beside it."""
    folder = Path(config.output_dir) / RESULT
    trainer.save_model(str(folder))
    train, validation = sources(config)
    result = {
        "records": len(data.train),
        "steps": trainer.state.global_step,
        "seconds": round(seconds, 1),
        "data": {
            "train": {"path": train.path, "sha256": train.digest()},
            "validation": {"path": validation.path, "sha256": validation.digest()} if validation else None,
        },
        "evaluation": metrics,
    }
    if trainer.is_world_process_zero():
        (folder / "training.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return folder


def _git_revision() -> str | None:
    try:
        root = Path(__file__).parent
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
