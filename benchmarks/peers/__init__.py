"""Other trainers on the tokens of our runs: TRL's `SFTTrainer`, transformers' `Trainer` with PEFT, and G-Retriever.

A peer gets a run's language model, LoRA, batches and optimiser. It reads the rows in the order of our sampler, which
puts rows of similar length into a batch, so that both sides pad alike and their losses can be compared step by step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from tripletune.models.graph_llm.graphs import GraphEncoder
from tripletune.models.loading import load_causal_lm
from tripletune.models.lora import add_lora
from tripletune.train.settings import RunConfig
from tripletune.train.tasks import TrainingTask
from tripletune.train.tasks.ras import GraphTask

# Arguments of transformers that follow from settings of the same name.
_OPTIMISER = ("learning_rate", "adam_beta1", "adam_beta2", "weight_decay", "max_grad_norm", "warmup_ratio")


class TokenRow(TypedDict):
    """The tokens of a training row, and its labels, -100 where the prompt is."""

    input_ids: list[int]
    labels: list[int]


class AdaptedModel(NamedTuple):
    """A language model with LoRA, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


class _InOrder:
    """Reads the rows in their order; the first base class of a peer's trainer."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        """The sampler of the rows' order, whatever arguments the version of transformers passes."""
        return SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]


class _Trl(_InOrder, SFTTrainer):  # type: ignore[misc]
    """TRL's `SFTTrainer`, which reads the rows in their order."""

    def _send_telemetry(self) -> None:
        """Send nothing."""


class _Transformers(_InOrder, Trainer):  # type: ignore[misc]
    """transformers' `Trainer`, which reads the rows in their order."""


class Clock(TrainerCallback):
    """Measures a call of `train` from its first batch to the end of its last step.

    Attributes:
        seconds: Of the last call.
        steps: Seconds of each step of the last call.
        losses: Of each step of the first call, if the trainer logs each step.
        limit: Seconds after which no further step begins.
    """

    def __init__(self, limit: float | None = None) -> None:
        self.limit = limit
        self.seconds = 0.0
        self.steps: list[float] = []
        self.losses: list[float] = []
        self._begun = 0.0
        self._step_begun = 0.0
        self._calls = 0

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock; set-up and checkpoints are not counted."""
        self._begun = time.perf_counter()
        self._step_begun = self._begun
        self._calls += 1
        self.steps = []

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Read the clock when the device has finished the step; tells `control` to stop after `limit`."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.steps.append(now - self._step_begun)
        self.seconds = now - self._begun
        self._step_begun = now
        if self.limit is not None and self.seconds > self.limit:
            control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the losses of the first call: in later ones the weights are already trained."""
        if self._calls == 1 and logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


def rows_in_our_order(task: TrainingTask) -> list[TokenRow]:
    """Tokens and labels of a run's training rows, in the order in which the run's first epoch reads them."""
    order = list(task.sampler(task.train, task.rows_per_step(1)))
    rows: list[TokenRow] = []
    for number in order:
        row = task.train[number]
        rows.append({"input_ids": list(row["input_ids"]), "labels": list(row["labels"])})
    return rows


def arguments_of(config: RunConfig, **settings: Any) -> dict[str, Any]:
    """Arguments of transformers' `TrainingArguments` for one pass as a run makes it.

    Args:
        config: The settings of our run.
        **settings: Further arguments, which replace equal ones; `TrainingArguments` refuses unknown names.
    """
    train = config.train
    optimiser = {name: getattr(train, name) for name in _OPTIMISER}
    # The number of steps is not known here; a share below 1 is what transformers takes for it.
    optimiser["warmup_steps"] = optimiser.pop("warmup_ratio")
    return optimiser | {
        "output_dir": f"{config.output_dir}/peer",
        "per_device_train_batch_size": train.batch_size,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 1,
        "max_steps": train.max_steps or -1,
        "lr_scheduler_type": train.scheduler,
        "logging_steps": 1,
        "seed": config.seed,
        "use_cpu": not torch.cuda.is_available(),
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **settings,
    }


def adapted_model(config: RunConfig, dtype: str, attention: str = "sdpa") -> AdaptedModel:
    """A run's language model with its LoRA, without dropout, so that losses can be compared."""
    torch.manual_seed(config.seed)
    chosen = config.model
    model, tokenizer = load_causal_lm(chosen.base, getattr(torch, dtype))
    model.set_attn_implementation(attention)
    adapted = add_lora(model, base=chosen.base, **chosen.lora_arguments() | {"dropout": 0.0})
    return AdaptedModel(adapted, tokenizer)


def adapter_values(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The values of a model's LoRA by the names of its layers, which are the same in every wrapper."""
    values = {}
    for name, weight in model.named_parameters():
        if ".lora_" in name:
            values[name[name.index("layers.") :]] = weight.detach().clone()
    return values


def copy_into_adapter(target: PreTrainedModel, values: dict[str, torch.Tensor]) -> None:
    """Give a peer's LoRA the values of our model's, whose random numbers were drawn in another order."""
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if ".lora_" in name:
                weight.copy_(values[name[name.index("layers.") :]])


def trl_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[TokenRow],
    config: RunConfig,
    **settings: Any,
) -> SFTTrainer:
    """TRL's `SFTTrainer`; `settings` go to `arguments_of`, and all that it does not set is TRL's default."""
    arguments = SFTConfig(**arguments_of(config, max_length=None, **settings))
    trainer = _Trl(model, arguments, train_dataset=Dataset.from_list(list(rows)), processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    return trainer


def transformers_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[TokenRow],
    config: RunConfig,
    **settings: Any,
) -> Trainer:
    """transformers' `Trainer` with its own padding collator; `settings` go to `arguments_of`.

    It uses bfloat16 autocast where a run would.
    """
    from tripletune.train.arguments import use_bf16

    settings = {"bf16": use_bf16(config.train.bf16), **settings}
    arguments = TrainingArguments(**arguments_of(config, **settings))
    trainer = _Transformers(
        model,
        arguments,
        train_dataset=Dataset.from_list(list(rows)),
        data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class _Nodes(torch.nn.Module):
    """The layers of our graph encoder without pooling, which G-Retriever does itself: the mean over a graph's nodes."""

    def __init__(self, encoder: GraphEncoder) -> None:
        super().__init__()
        self.layers = encoder.convolutions
        self.norms = encoder.norms
        self.out_channels = encoder.settings.graph_hidden_width

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, edge_attr: torch.Tensor) -> torch.Tensor:
        """Turn the vectors of nodes, (N, D), into (N, H)."""
        for number, layer in enumerate(self.layers):
            x = layer(x, edge_index, edge_attr)
            if number < len(self.norms):
                x = torch.relu(self.norms[number](x))
        return x


class _OnRows(torch.nn.Module):
    """PyG's `GRetriever` on token rows with a placeholder for the graph, instead of on its own prompts.

    It so reads the tokens that our model reads. All else is its own: padding on the left, and logits of all tokens.

    Args:
        retriever: The model.
        graph_token_id: The placeholder.
    """

    def __init__(self, retriever: Any, graph_token_id: int) -> None:
        super().__init__()
        self.retriever = retriever
        self.graph_token_id = graph_token_id
        retriever.llm._get_embeds = self._embed_rows

    def forward(self, rows: Sequence[TokenRow], graphs: Any) -> dict[str, torch.Tensor]:
        """The loss of a batch; `graphs` is that of `models.graph_llm.graphs.batch_graphs`."""
        loss = self.retriever(rows, graphs.x, graphs.edge_index, graphs.batch, rows, graphs.edge_attr)
        return {"loss": loss}

    def _embed_rows(
        self, rows: Sequence[TokenRow], _context: None, graph_tokens: Sequence[torch.Tensor | None], _labels: Any
    ) -> tuple[Any, ...]:
        """Embeddings, attention mask and labels, as `LLM._get_embeds` returns them."""
        llm = self.retriever.llm
        embeds, masks, labels = [], [], []
        for row, graph_token in zip(rows, graph_tokens, strict=True):
            if graph_token is None:
                # A graph without nodes: G-Retriever leaves it out, we project the zero vector.
                weight = self.retriever.projector[0].weight
                graph_token = self.retriever.projector(weight.new_zeros(1, weight.shape[1]))[0]
            ids = torch.tensor(row["input_ids"])
            is_graph = ids == self.graph_token_id
            tokens = llm.word_embedding(torch.where(is_graph, 0, ids))
            embeds.append(tokens.masked_scatter(is_graph[:, None], graph_token.to(tokens.dtype)))
            masks.append([1] * len(ids))
            labels.append(list(row["labels"]))
        padding = llm.word_embedding(torch.tensor([llm.tokenizer.pad_token_id]))
        return tuple(llm._pad_embeds(padding, embeds, masks, labels))


def g_retriever_trainer(task: GraphTask, dtype: str, in_bfloat16: bool) -> Trainer:
    """transformers' `Trainer` with PyG's `GRetriever` in place of a task's Graph-LLM, with the same first weights.

    Args:
        task: Has rows and graph modules; its model is dropped.
        dtype: The type of the language model's file.
        in_bfloat16: Compute the language model in bfloat16, as on a GPU; on a CPU, GRetriever makes it float32.
    """
    from torch_geometric.llm.models import LLM, GRetriever

    from tripletune.core import libraries
    from tripletune.models.specs import source_of

    libraries.check_use("the benchmark of G-Retriever")
    # PEFT has wrapped the graph modules.
    ours: Any = task.graph_llm
    encoder, projector = (module.modules_to_save["default"] for module in (ours.graph_encoder, ours.projector))
    adapter = adapter_values(task.model)
    graph_token_id = ours.config.graph_token_id
    task.model = None
    place = source_of(task.config.model.base).place
    retriever = GRetriever(LLM(place, num_params=0, dtype=getattr(torch, dtype)), _Nodes(encoder), use_lora=True)
    retriever.projector[0].load_state_dict(projector.up.state_dict())
    retriever.projector[2].load_state_dict(projector.out.state_dict())
    copy_into_adapter(retriever.llm_generator, adapter)
    for module in retriever.llm_generator.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if in_bfloat16:
        retriever.llm.autocast_context = torch.autocast("cpu", torch.bfloat16)
        for weight in retriever.llm_generator.parameters():
            if not weight.requires_grad:
                weight.data = weight.data.bfloat16()
    ours_in_batches = task.collator()

    def collate(rows: list[Any]) -> dict[str, Any]:
        """A batch of our rows as `_OnRows` takes it."""
        return {"rows": rows, "graphs": ours_in_batches(rows)["graphs"]}

    order = list(task.sampler(task.train, task.rows_per_step(1)))
    arguments = arguments_of(task.config, bf16=False, remove_unused_columns=False)
    trainer = _Transformers(
        _OnRows(retriever, graph_token_id),
        TrainingArguments(**arguments),
        train_dataset=[task.train[number] for number in order],
        data_collator=collate,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
