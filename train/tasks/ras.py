"""Train the RAS Graph-LLM on planning and answering records (RAS, sections 3.4 and D.2).

Defaults are the paper's (section D.2, table 8) or, if the paper gives none, those of the authors' code. Records are
tokenised once, and every distinct node and edge string of their graphs is embedded once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tripletune.core.data.graph_settings import GraphSettings, PromptSettings, values_of
from tripletune.core.data.records import IGNORED, TASKS, ModelInput, Record
from tripletune.core.options import other_default, rare, setting
from tripletune.models.loading import encoder_fingerprint
from tripletune.train.tasks import DataSection, Examples, ModelSection, ReplySection, RunConfig, TrainingTask, spread

if TYPE_CHECKING:
    from tripletune.models.graph_llm.embeddings import EmbeddingTable
    from tripletune.models.graph_llm.processor import GraphLLMProcessor
    from tripletune.train.batches import RecordCollator

logger = logging.getLogger(__name__)
# Learning rate of the graph warm-up; it falls linearly to zero.
_WARMUP_RATE = 1e-3


@dataclass
class GraphModelSection(GraphSettings, ModelSection):
    """The Graph-LLM."""

    base: str = other_default(ModelSection, "base", "meta-llama/Llama-2-7b-hf")
    tune: str = setting(
        "lora",
        "train LoRA and graph modules (lora), only graph modules (graph_token, ablation No LoRA), or all weights (all)",
        choices=("lora", "graph_token", "all"),
    )
    lora_rank: int = other_default(ModelSection, "lora_rank", 8)
    lora_alpha: int = other_default(ModelSection, "lora_alpha", 16)
    lora_targets: list[str] = other_default(ModelSection, "lora_targets", ["q_proj", "v_proj"])  # noqa: RUF009

    def check(self) -> list[str]:
        found = super().check()
        if self.graph_heads > 0 and self.graph_hidden_width % self.graph_heads:
            found.append(
                f"model.graph_hidden_width: {self.graph_hidden_width} is not a multiple of model.graph_heads "
                f"{self.graph_heads}"
            )
        if self.tune == "graph_token" and not self.use_graph:
            found.append("model.tune graph_token trains only the graph modules, so model.use_graph must be true")
        return found


@dataclass
class RecordSection(PromptSettings, DataSection):
    """Records and how they become prompts."""

    train: str = other_default(DataSection, "train", "data/hotpotqa_subq")
    tasks: list[str] = setting(
        ["planning", "answering"],
        "tasks to train; one task alone is the ablation No Multi-Task",
        choices=("planning", "answering"),
    )
    planning_prompt: str | None = rare(None, "file that replaces the planning instruction")
    answering_prompt: str | None = rare(None, "file that replaces the answering instruction")
    # The authors' code cuts long labels.
    long_labels: str = rare(
        "truncate", "cut a label that is too long, skip its record, or stop", choices=("truncate", "skip", "error")
    )
    learn_copies: bool = rare(True, "learn the words of a first sub-query that repeats the main question")

    def check(self) -> list[str]:
        found = [] if self.tasks else ["data.tasks: name planning, answering or both"]
        return found + super().check()


@dataclass
class GraphTrainSection(ReplySection):
    """Optimisation."""

    epochs: float = other_default(ReplySection, "epochs", 2.0)
    batch_size: int = other_default(ReplySection, "batch_size", 2)
    default_accumulation: ClassVar[int] = 2
    # From the paper's text; its table 8 marks 5e-5.
    learning_rate: float = other_default(ReplySection, "learning_rate", 1e-5)
    warmup_ratio: float = other_default(ReplySection, "warmup_ratio", 0.15)
    scheduler: str = other_default(ReplySection, "scheduler", "cosine")
    adam_beta2: float = other_default(ReplySection, "adam_beta2", 0.95)
    max_grad_norm: float = other_default(ReplySection, "max_grad_norm", 0.5)
    eval_max_new_tokens: int = other_default(ReplySection, "eval_max_new_tokens", 64)
    action_weight: float = rare(1.0, "loss weight of the tokens of [SUBQ], [SUFFICIENT], [NO_RETRIEVAL]", above=0)
    answer_weight: float = rare(1.0, "loss weight of answering records' label tokens", above=0)
    loss_per: str = rare("token", "average the loss over label tokens, or over records", choices=("token", "record"))
    graph_warmup_steps: int = rare(
        0,
        "steps before training in which graph encoder and projector learn to predict the mean embedding of a label's "
        "tokens (the paper: none)",
        at_least=0,
    )


@dataclass
class GraphConfig(RunConfig):
    """A whole run."""

    output_dir: str = other_default(RunConfig, "output_dir", "runs/ras")
    model: GraphModelSection = field(default_factory=GraphModelSection)
    data: RecordSection = field(default_factory=RecordSection)
    train: GraphTrainSection = field(default_factory=GraphTrainSection)

    def check(self) -> list[str]:
        found = super().check()
        if self.data.evidence == "graph" and not self.model.use_graph:
            found.append("data.evidence graph with model.use_graph false: prompts hold no facts; change one of them")
        alone = self.data.prompt_order != "interleaved" and self.model.use_graph
        if self.train.graph_warmup_steps and not alone:
            found.append(
                "train.graph_warmup_steps needs one graph per row: set model.use_graph true, and a data.prompt_order "
                "other than interleaved"
            )
        if self.train.graph_warmup_steps and (self.train.preference or self.model.adapter):
            found.append(
                "train.graph_warmup_steps is for new graph modules: not with model.adapter or train.preference"
            )
        return found


class GraphTask(TrainingTask):
    """Trains a Graph-LLM on records."""

    Config: ClassVar[type[RunConfig]] = GraphConfig
    usage = "--config smollm2_135m_ras_cpu --model.base MODEL --data.train runs/subq"
    unit: str = "records"
    loss_parts: ClassVar[tuple[str, ...]] = TASKS
    published: ClassVar[str] = "the paper: 2 x 2, 4 GPUs (16 if per device); the authors' code: 4"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.data.prompt_order == "interleaved":
            self.unit = "questions"

    @cached_property
    def sources(self) -> tuple[Examples, Examples | None]:
        tasks = tuple(self.config.data.tasks)
        return self.source_pair(
            _read,
            keep=lambda record, share: record.task in tasks,
            selection=tasks,
            what=f"records of the tasks {', '.join(tasks)}",
        )

    def load(self) -> tuple[Any, GraphLLMProcessor]:
        from transformers import set_seed

        from tripletune.core.data.rendering import load_instructions
        from tripletune.models.attention import lies_end_to_end
        from tripletune.models.graph_llm import add_adapter, build_graph_llm
        from tripletune.models.loading import take_over

        set_seed(self.config.seed)
        model, data = self.config.model, self.config.data
        instructions = load_instructions(data.planning_prompt, data.answering_prompt)
        settings: dict[str, Any] = {f"{task}_instruction": text for task, text in instructions.items()}
        settings |= values_of(PromptSettings, data)
        base, processor = build_graph_llm(
            model.base,
            attention=None if model.attention == "auto" else model.attention,
            processor_settings=settings,
            **model.weights(),
            **values_of(GraphSettings, model),
        )
        adapted = add_adapter(base, tune=model.tune, **model.lora())
        if model.adapter is not None:
            take_over(adapted, model.adapter, model.base)
        longest = data.max_input_tokens + data.max_label_tokens
        base.end_to_end = model.attention == "blocks" and lies_end_to_end(base.language_model, longest)
        return adapted, processor

    @property
    def graph_llm(self) -> Any:
        """The model without PEFT's wrapper."""
        return getattr(self.model, "get_base_model", lambda: self.model)()

    @cached_property
    def table(self) -> EmbeddingTable | None:
        """Embeddings of all node and edge strings of both sources; None for models without graph."""
        if not self.config.model.use_graph:
            return None
        from tripletune.models.graph_llm.embeddings import TABLE, EmbeddingTable
        from tripletune.models.loading import best_dtype
        from tripletune.train.batches import cached_rows, graph_strings

        sources, encoder = [source for source in self.sources if source is not None], self.config.model.encoder
        data = [[source.digest for source in sources], self.processor.settings.graph_pooling]
        parts = [*data, encoder, encoder_fingerprint(encoder), str(best_dtype())]
        folder = self.cache / f"vectors-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}"
        if (folder / TABLE).exists():
            return EmbeddingTable(folder)
        works = (partial(graph_strings, part, data[1]) for source in sources for part in source.parts())
        strings = cached_rows(data, self.cache, works, {"key": "int64", "text": "string"}, "strings")
        return EmbeddingTable.build(strings["text"], encoder, folder, strings.data.column("key").to_numpy())

    def rows(self, source: Examples, cache: Path) -> Any:
        from tripletune.train.batches import PAIR, cached_rows, encode_rows, rows_of_pairs

        processor = self.processor
        # An evaluation counts all label tokens, also those that training leaves out.
        learn_copies = self.config.data.learn_copies or source is not self.sources[0]
        long_labels = self.config.data.long_labels
        columns = {"input_ids": "[int32]", "labels": "[int32]", "length": "int32", "spans": "[[int32]]"}
        if self.table is not None:
            columns |= dict.fromkeys(("nodes", "edges"), "[[int64]]")
            columns |= dict.fromkeys(("sources", "targets", "subgraph"), "[[int32]]")
        # Empty prompts reveal changes of template and tokenizer in a folder that keeps its name.
        empty = [processor.prompt(ModelInput(task, "?"), self.config.data.evidence) for task in TASKS]
        settings = dataclasses.asdict(processor.settings)
        tokenizer = [processor.tokenizer.name_or_path, len(processor.tokenizer)]
        key = ["records", source.digest, settings, tokenizer, empty, learn_copies, long_labels]
        make = partial(encode_rows, processor=processor, learn_copies=learn_copies, long_labels=long_labels)
        if self.config.train.preference:
            make, columns = partial(rows_of_pairs, make=make), columns | PAIR
        return cached_rows(key, cache, (partial(make, part) for part in source.parts()), columns)

    def prepare(self) -> None:
        """Train the graph modules to predict the mean embedding of the label's tokens (without end-of-sequence token).
        The language model would learn to ignore an untrained graph token. A step takes 16 records, and all processes
        do the same steps.
        """
        if not (steps := self.config.train.graph_warmup_steps):
            return
        import torch

        base, collate, rng = self.graph_llm, self.collator(), random.Random(self.config.seed)
        parts, embed = (base.graph_encoder, base.projector), base.get_input_embeddings()
        optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters() if p.requires_grad], _WARMUP_RATE)
        for part in parts:
            part.train()
        for step in range(steps):
            batch = collate([self.train[rng.randrange(len(self.train))] for _ in range(16)])
            labels = batch["labels"].to(embed.weight.device)
            shown = (labels != IGNORED) & (labels.roll(-1, 1) != IGNORED)
            words = embed(labels.clamp(min=0)).float() * shown.unsqueeze(-1)
            target = words.sum(1) / shown.sum(1, keepdim=True).clamp(min=1)
            given = parts[1](parts[0](batch["graphs"])).float()
            # 4-bit weights are on the GPU before the launcher moves the other weights.
            loss = torch.nn.functional.mse_loss(given, target.detach().to(given.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.param_groups[0]["lr"] = _WARMUP_RATE * (1 - step / steps)
            optimizer.step()
            if (step + 1) % 100 == 0 or step + 1 == steps:
                logger.info("graph warm-up, step %d/%d: squared error %.4g", step + 1, steps, loss.item())

    def warnings(self) -> list[str]:
        from tripletune.train.batches import rows_meta

        limit, found = self.config.data.max_label_tokens, []
        template = str(getattr(self.processor.tokenizer, "chat_template", None) or "[INST]")
        if self.config.data.prompt_format == "llama2" and "[INST]" not in template:
            found.append("data.prompt_format llama2: the base model's chat template has no [INST]; use chat")
        for name, rows in (("training", self.train), ("validation", self.validation)):
            counts = rows_meta(rows) if rows is not None else {}
            for what, happened in (("truncated_labels", "were cut"), ("skipped_labels", "are left out")):
                if number := counts.get(what):
                    found.append(
                        f"{number:,} {name} label(s) of more than {limit} tokens {happened} (data.long_labels)"
                    )
        return found

    def trainer(self) -> Any:
        if not self.config.train.preference:
            return None
        from tripletune.train.trl_trainers import PreferenceTrainer

        return PreferenceTrainer(self)

    def collator(self) -> RecordCollator:
        from tripletune.train.batches import RecordCollator

        train = self.config.train
        pad, weights = self.processor.tokenizer.pad_token_id, (train.action_weight, train.answer_weight)
        return RecordCollator(pad, self.table, *weights, per_record=train.loss_per == "record")

    def answer_shares(self) -> tuple[float, float]:
        """Return the share of answering records among the training records, and their share of the loss weights."""
        import pyarrow.compute as pc

        train, spans = self.config.train, pc.list_flatten(pc.list_flatten(self.train.data.column("spans")))
        starts, ends, marker = spans.to_numpy().reshape(-1, 3).T
        tokens, answers = ends - starts, marker == 0
        weights = tokens * train.answer_weight * answers + (tokens - marker + marker * train.action_weight) * ~answers
        if train.loss_per == "record":
            weights = 1 + (train.answer_weight - 1) * answers
        return float(answers.mean()), float(weights[answers].sum() / weights.sum())

    @cached_property
    def scored(self) -> list[Record]:
        from tripletune.train.text import choose_examples

        return choose_examples(self.sources[1] or [], self.config.train.eval_generate_records, lambda record: record.id)

    def shown(self, one: Record) -> tuple[list[int], str]:
        return self.processor.prompt(one.input, self.config.data.evidence), one.label

    def replies(self, model: Any) -> list[str]:
        from tripletune.llm.graph_generator import LocalGenerator

        train = self.config.train
        generator = LocalGenerator(model, self.processor, train.eval_batch_size, self.table)

        def reply(inputs: Sequence[ModelInput]) -> list[str]:
            return [completion.text for completion in generator.generate_many(inputs, train.eval_max_new_tokens)]

        return spread(model, [record.input for record in self.scored], reply)

    def metrics(self, replies: list[str]) -> dict[str, Any]:
        from tripletune.eval.suites.records import score_predictions

        return score_predictions(self.scored, replies)

    def metric_names(self) -> list[str]:
        absent = {*TASKS} - {*(() if self.config.train.preference else self.config.data.tasks)}
        return [name for name in super().metric_names() if name.removeprefix("loss_") not in absent]

    def save(self, folder: Path) -> None:
        self.model.config.save_pretrained(folder)
        self.processor.save_pretrained(folder)

    def notes(self) -> list[str]:
        if self.config.train.preference:
            return []
        share, weight = self.answer_shares()
        base, attention = self.graph_llm, self.config.model.attention
        reasons = {
            f"model.attention is {attention}, not blocks": attention != "blocks",
            f"{type(base.language_model).__name__} computes other values for joined rows": not base.end_to_end,
            "the model computes the logits of all tokens": not base.labels_only,
        }
        padded = (f"are padded: {reason}" for reason, holds in reasons.items() if holds)
        return [
            f"loss per {self.config.train.loss_per}: answering records are {share:.0%} of the records and have "
            f"{weight:.0%} of the weight",
            f"the rows of a batch {next(padded, 'lie end to end, without padding')}",
        ]


TASK = GraphTask


def _read(row: dict[str, Any], where: str) -> Record | list[Record]:
    """Return a stored record, or make the records of a stored question with steps."""
    from tripletune.data_builders.subq.annotations import plain_records

    if "task" in row:
        return Record.from_json(row, where)
    if "question" not in row:
        raise ValueError(f"{where}: neither a record nor a question with answers and steps; it has {', '.join(row)}")
    return plain_records(row, where)
