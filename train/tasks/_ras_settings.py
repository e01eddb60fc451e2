"""The settings of a RAS Graph-LLM's training; defaults are those of the paper (RAS, section D.2, table 8).

If the paper gives none, they are those of the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from tripletune.core.data.graph_settings import GraphSettings, PromptSettings
from tripletune.core.options import other_default, rare, setting
from tripletune.train.settings import DataSection, HindsightSection, ModelSection, ReplySection, RunConfig


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
    lora_targets: list[str] = other_default(ModelSection, "lora_targets", ["q_proj", "v_proj"])

    def check(self) -> list[str]:
        """Problems of the graph modules, besides those of any model; the heads of a convolution share its width."""
        problems = super().check()
        if self.graph_heads > 0 and self.graph_hidden_width % self.graph_heads:
            problems.append(
                f"model.graph_hidden_width: {self.graph_hidden_width} is not a multiple of model.graph_heads "
                f"{self.graph_heads}"
            )
        if self.tune == "graph_token" and not self.use_graph:
            problems.append("model.tune graph_token trains only the graph modules, so model.use_graph must be true")
        return problems


@dataclass
class RecordSection(PromptSettings, DataSection):
    """Records and how they become prompts."""

    train: list[str] = other_default(DataSection, "train", ["data/hotpotqa_subq"])
    tasks: list[str] = setting(
        ["planning", "answering"],
        "tasks to train; one task alone is the ablation No Multi-Task",
        choices=("planning", "answering"),
    )
    stop: str = setting(
        "adaptive",
        "adaptive: the planner learns when to stop; fixed: only to write sub-queries, and to answer from evidence, for "
        "a loop that always searches as often as data.searches says",
        choices=("adaptive", "fixed"),
    )
    searches: int | None = setting(None, "with data.stop fixed: searches per question", at_least=1)
    planning_prompt: str | None = rare(None, "file that replaces the planning instruction")
    answering_prompt: str | None = rare(None, "file that replaces the answering instruction")
    hindsight_prompt: str | None = rare(
        None, "file that replaces the question in the teacher's prompt, with train.hindsight_weight"
    )
    # The authors' code cuts long labels.
    long_labels: str = rare(
        "truncate", "cut a label that is too long, skip its record, or stop", choices=("truncate", "skip", "error")
    )
    learn_copies: bool = rare(True, "learn the words of a first sub-query that repeats the main question")

    def check(self) -> list[str]:
        """Problems of the data that every training has, and of an empty list of tasks, which would leave no record."""
        problems = super().check()
        if not self.tasks:
            problems.insert(0, "data.tasks: name planning, answering or both")
        if (self.stop == "fixed") != (self.searches is not None):
            problems.append(
                "data.stop fixed and data.searches need each other: set both, for example data.searches 2, or neither"
            )
        return problems


@dataclass
class GraphTrainSection(HindsightSection, ReplySection):
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
        """Problems of settings in different sections."""
        problems = super().check()
        if self.data.evidence == "graph" and not self.model.use_graph:
            problems.append("data.evidence graph with model.use_graph false: prompts hold no facts; change one of them")
        if self.train.graph_warmup_steps:
            problems += self._warmup_problems()
        if self.train.hindsight_weight and "planning" not in self.data.tasks:
            problems.append("train.hindsight_weight teaches sub-queries: data.tasks must have planning")
        return problems

    def _warmup_problems(self) -> list[str]:
        """Settings that do not fit a warm-up.

        It compares one graph token with one label per row, and would undo what trained graph modules have learned.
        """
        problems = []
        if self.data.prompt_order == "interleaved" or not self.model.use_graph:
            problems.append(
                "train.graph_warmup_steps needs one graph per row: set model.use_graph true, and a data.prompt_order "
                "other than interleaved"
            )
        if self.train.preference or self.model.adapter:
            problems.append(
                "train.graph_warmup_steps is for new graph modules: not with model.adapter or train.preference"
            )
        return problems
