"""`settings.json` of `tripletune eval run`: everything that a row of the results depends on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from tripletune.core.calls import in_role
from tripletune.eval import Task
from tripletune.llm.question_client import TRAINED_PLANNER
from tripletune.rag.results import fields_as_json, non_null_fields, present_values

# How the name of a teacher begins that is an oracle; its folder follows.
ORACLE = "oracle:"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine: its name, a fingerprint of its weights, and for CIRAG's integrator the weight type."""

    spec: str
    weights: str | None = None
    dtype: str | None = None

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | str | None) -> LocalModel | None:
        """Read the value of `to_json`, or a name alone, which says nothing of the weights."""
        if not value:
            return None
        if isinstance(value, str):
            return cls(value)
        return cls(value["spec"], value.get("weights"), value.get("dtype"))

    def to_json(self) -> dict[str, Any]:
        """The model as JSON values; runs without a set dtype have none, as in earlier versions."""
        values = {"spec": self.spec, "weights": self.weights}
        if self.dtype is not None:
            values["dtype"] = self.dtype
        return values


@dataclass(frozen=True, slots=True)
class ChatModel:
    """A chat model: its name in the ledger, and a fingerprint of its weights if it runs on this machine."""

    model: str
    weights: str | None = None

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | str) -> ChatModel:
        """Read the value of `to_json`, or a name alone, which says nothing of the weights."""
        if isinstance(value, str):
            return cls(value)
        return cls(value["model"], value.get("model_weights"))

    def to_json(self) -> dict[str, Any]:
        """The model as JSON values; only models on this machine have weights."""
        if self.weights is None:
            return {"model": self.model}
        return {"model": self.model, "model_weights": self.weights}


class SamplingSettings(NamedTuple):
    """How the chat model draws its replies."""

    temperature: float
    top_p: float
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """`settings.json`: everything that a row depends on; batch size and concurrency change no row.

    Digests are SHA-256 of files. A setting that the system does not use is None.

    Attributes:
        system: Name of the system; "" for an evaluation other than `eval run`.
        data: Digest of the file of questions, digests of a folder's files, or a hub id.
        limit: Only the first questions were asked.
        dtype: Type of the weights of the Graph-LLMs.
        model: The Graph-LLM that answers, and plans if no other model does.
        planner: The Graph-LLM that plans.
        student_seed: Seed of the sampled replies of `model` or `integrator`.
        prompt_embeds: The model that gets embeddings instead of text, without its address.
        sampling: How the teacher draws.
        teacher: The chat model for all roles without an own one in `llm`; "oracle:FOLDER" knows the facts.
        llm: Chat models by role, such as "t2rag.resolve", "t2rag" for all its roles, or "extract".
        integrator: CIRAG's distilled student.
        files: Digests of prompts and other files of the system, by name.
        query_prompt: What the encoder reads before a query.
        text_prompt: What the encoder reads before a passage.
        similarity: How vectors are compared, if not as the encoder says.
        encoder_weights: Fingerprint of a local encoder.
        vectors: Kind of vector index, if not "flat".
        language: Language of BM25's words, if it is not guessed.
        control: An `eval.systems.Control`.
        control_run: Digest of the results whose facts `control` gives to other questions.
        gold: Digest of the file of gold links.
        corpus: Digest of the passages; None if they are the questions' own contexts.
        triples: Digest of a file of triples; of a store, its extractor and digest; or the extractor in the loop.
        entities: Digest of the names that are read in place of those in the triples.
        retriever: "bm25", "dense" or "hybrid".
        encoder: Name of the encoder of queries and passages.
        options: Options of the system, such as "top_k".
        overrides: Options that differ from the training of a Graph-LLM, as "OWN, trained with X".
        others: Settings of other evaluations, and of revisions that have other settings.
    """

    system: str = ""
    task: Task = field(default_factory=lambda: Task(""))
    data: str | list[str] | None = None
    limit: int | None = None
    dtype: str | None = None
    model: LocalModel | None = None
    planner: LocalModel | None = None
    student_seed: int | None = None
    prompt_embeds: str | None = None
    sampling: SamplingSettings | None = None
    teacher: ChatModel | None = None
    llm: Mapping[str, ChatModel] = field(default_factory=dict)
    integrator: LocalModel | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    query_prompt: str | None = None
    text_prompt: str | None = None
    similarity: str | None = None
    encoder_weights: str | None = None
    vectors: str | None = None
    language: str | None = None
    control: str | None = None
    control_run: str | None = None
    gold: str | None = None
    corpus: str | None = None
    triples: str | Mapping[str, Any] | None = None
    entities: str | None = None
    retriever: str | None = None
    encoder: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reads_passages(self) -> bool:
        """Whether an extractor made the triples while the system ran, so that their cost belongs to the run."""
        return isinstance(self.triples, Mapping) and "extractor" in self.triples

    def asks_oracle(self, role: str) -> bool:
        """Whether an oracle answered the calls of a role, whose replies say nothing about a model."""
        if self.teacher is None or not self.teacher.model.startswith(ORACLE) or role == TRAINED_PLANNER:
            return False
        return not in_role(dict.fromkeys(self.llm, True), role, default=False)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunSettings:
        """Read the settings of any evaluation.

        Names that are not fields stay in `others`, so that settings of other revisions are shown and written again as
        well.
        """
        if "system" not in values:
            # Names such as "model" have another meaning in other evaluations.
            others = _without_names(values, ("data", "limit"))
            return cls(data=values.get("data"), limit=values.get("limit"), others=others)
        arguments = non_null_fields(cls, values)
        arguments["others"] = _without_names(values, [*(item.name for item in fields(cls)), "teacher_weights"])
        task = non_null_fields(Task, arguments.get("task", {}))
        arguments["task"] = Task(**{"name": "", **task, "metrics": tuple(task.get("metrics", ()))})
        for name in ("model", "planner", "integrator"):
            arguments[name] = LocalModel.from_json(arguments.get(name))
        if "teacher" in arguments:
            arguments["teacher"] = ChatModel(arguments["teacher"], values.get("teacher_weights"))
        if "sampling" in arguments:
            arguments["sampling"] = SamplingSettings(*arguments["sampling"])
        if "llm" in arguments:
            arguments["llm"] = {role: ChatModel.from_json(model) for role, model in arguments["llm"].items()}
        return cls(**arguments)

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON values; a setting that most systems do not have is left out if it is None or empty.

        The same command continues a run only if these values are equal to the stored ones. A new setting must therefore
        be left out at its default, or no earlier run could be continued; `tests/stores` has files of earlier versions.
        """
        if not self.system:
            return {"data": self.data, "limit": self.limit, **self.others}
        optional = {
            "dtype": self.dtype,
            "model": _model_json(self.model),
            "planner": _model_json(self.planner),
            "student_seed": self.student_seed,
            "prompt_embeds": self.prompt_embeds,
            "sampling": self.sampling,
            "teacher": None if self.teacher is None else self.teacher.model,
            "teacher_weights": None if self.teacher is None else self.teacher.weights,
            "llm": {role: model.to_json() for role, model in self.llm.items()},
            "integrator": _model_json(self.integrator),
            "files": dict(self.files),
            "query_prompt": self.query_prompt,
            "text_prompt": self.text_prompt,
            "similarity": self.similarity,
            "encoder_weights": self.encoder_weights,
            "vectors": self.vectors,
            "language": self.language,
            "control": self.control,
            "control_run": self.control_run,
            "gold": self.gold,
            "entities": self.entities,
            "overrides": dict(self.overrides),
        }
        return {
            "system": self.system,
            "task": present_values(fields_as_json(self.task)),
            "data": self.data,
            "limit": self.limit,
            **present_values(optional),
            "corpus": self.corpus,
            "triples": self.triples,
            "retriever": self.retriever,
            "encoder": self.encoder,
            "options": dict(self.options),
            **self.others,
        }


def _model_json(model: LocalModel | None) -> dict[str, Any] | None:
    """The model as JSON values; None if there is none."""
    return None if model is None else model.to_json()


def _without_names(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The values under other names than these."""
    return {name: value for name, value in values.items() if name not in names}
