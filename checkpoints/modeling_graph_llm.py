"""Definitions that only an exported Graph-LLM's modelling file has.

`checkpoints.standalone` writes that file from these definitions and the definitions of the project that they use. A
definition here replaces a definition of the project with the same name.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchFeature,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils import cached_file

from tripletune.core.data.records import ModelInput, Step, Task
from tripletune.core.data.triples import Triple
from tripletune.models.control_tokens import read_control_as_text
from tripletune.models.graph_llm.graphs import batch_graphs
from tripletune.models.graph_llm.model import GraphLLM, GraphLLMConfig
from tripletune.models.graph_llm.processor import GraphLLMProcessor, ProcessorSettings


def _declare_default(default: Any, help: str, **_: Any) -> Any:
    """Stand for `core.options.setting` in an exported file: only the default, whose type the field's annotation says.

    The file has no command line, so nothing shows the help, and ranges and choices (`_`) are not checked.
    """
    return default


setting = rare = _declare_default


class ModelPlace(NamedTuple):
    """A folder or hub id, and its revision, which `from_pretrained` ignores for folders."""

    folder_or_id: str
    revision: str


def place_of(spec: str) -> ModelPlace:
    """Where the model of a spec is: a folder, a hub id, `owner/name@revision` or `pypi:package`."""
    if Path(spec).is_dir():
        return ModelPlace(spec, "main")
    if not spec.startswith("pypi:"):
        name, _, revision = spec.partition("@")
        return ModelPlace(name, revision or "main")
    # The first folder of the package that holds a file of this name.
    folders: dict[str, str] = {}
    for file in package_files(spec):
        folders.setdefault(file.name, str(file.parent))
    # A sentence-transformers model has a modules.json, and its modules have a config.json each.
    folder = folders.get("modules.json") or folders.get("config.json")
    if folder:
        return ModelPlace(folder, "main")
    raise FileNotFoundError(
        f"{spec}: there is no installed Python package {spec.removeprefix('pypi:')} with a model in it; install it, "
        "or give the model's folder: base_model=FOLDER for the model, encoder=FOLDER for the processor"
    )


def package_files(spec: str) -> list[Path]:
    """The files of an installed Python package `pypi:package`; none if it is not installed."""
    with suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.files(spec.removeprefix("pypi:")) or []
        return [Path(str(file.locate())) for file in files]
    return []


def base_language_model(spec: str, revision: str | None, dtype: torch.dtype | str) -> PreTrainedModel:
    """Load the base model of an adapter; a GGUF file in a Python package is converted, which takes seconds."""
    files = package_files(spec) if spec.startswith("pypi:") else []
    gguf_files = [file for file in files if file.suffix == ".gguf"]
    if gguf_files and not any(file.name == "config.json" for file in files):
        # Imported here, so that other exports load with a transformers that lacks it.
        from transformers import GgufConfig

        gguf = gguf_files[0]
        plain = GgufConfig(dequantize=True)
        options = {"gguf_file": gguf.name, "quantization_config": plain, "trust_remote_code": False}
        return AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=dtype, **options)
    place, own_revision = place_of(spec)
    safe = {"use_safetensors": True, "trust_remote_code": False, "revision": revision or own_revision}
    return AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **safe)


def read_model_json(place: str, name: str, revision: str = "main") -> Any:
    """The content of a JSON file of a model (folder or hub id), an object or a list; None if there is no such file."""
    try:
        file = cached_file(place, name, revision=revision)
    except OSError:
        return None
    return json.loads(Path(file).read_text(encoding="utf-8"))


def pooling_mode(settings: Mapping[str, Any]) -> str:
    """The pooling of a sentence-transformers module: "mean", "first", or another mode that is not supported here."""
    mode = settings.get("pooling_mode")
    if not mode:
        # Older settings have a switch for each mode, of which several may be on.
        switches = [name for name, is_on in settings.items() if name.startswith("pooling_mode_") and is_on is True]
        mode = ",".join(switches)
    if mode in ("mean", "pooling_mode_mean_tokens"):
        return "mean"
    if mode in ("cls", "pooling_mode_cls_token"):
        return "first"
    return str(mode)


class NodeEncoder:
    """Runs a sentence-transformers model with only transformers: mean or first-token pooling, optionally normalised.

    Vectors are rounded to float16, as in training.

    Attributes:
        first: Whether a text's vector is that of its first token, not the mean of all tokens.
        unit: Whether vectors have length 1.
        limit: Maximum tokens of a text; the tokens after it are left out.
    """

    def __init__(self, spec: str) -> None:
        """Read how the encoder pools, and load it.

        What this class does not compute (another pooling, a prompt before each text, a dense layer) is refused before
        anything is loaded, since its vectors would differ from those of the training.
        """
        place, revision = place_of(spec)
        modules = read_model_json(place, "modules.json", revision) or ()
        paths = {module["type"].rpartition(".")[2]: module["path"] for module in modules}
        mode = ""
        if "Pooling" in paths:
            mode = pooling_mode(read_model_json(place, f"{paths['Pooling']}/config.json", revision))
        texts = read_model_json(place, "sentence_bert_config.json", revision) or {}
        general = read_model_json(place, "config_sentence_transformers.json", revision) or {}
        adds_to_texts = general.get("default_prompt_name") or "message" in texts.get("modality_config", ())
        other_modules = paths.keys() - {"Transformer", "Pooling", "Normalize"}
        if mode not in ("mean", "first") or adds_to_texts or other_modules:
            raise ValueError(
                f"encoder {spec}: only sentence-transformers models with plain mean or first-token pooling are "
                "supported; set processor.vectors to a function from n texts to (n, D) floats"
            )
        self.first = mode == "first"
        self.unit = "Normalize" in paths
        self.tokenizer = AutoTokenizer.from_pretrained(place, revision=revision, trust_remote_code=False)
        read_control_as_text(self.tokenizer)
        safe = {"use_safetensors": True, "trust_remote_code": False, "revision": revision}
        self.model = AutoModel.from_pretrained(place, dtype=torch.float32, **safe).eval()
        longest = getattr(self.model.config, "max_position_embeddings", self.tokenizer.model_max_length)
        self.limit = texts.get("max_seq_length") or min(longest, self.tokenizer.model_max_length)

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> torch.Tensor:
        """The vectors of n texts, (n, D) floats."""
        # Names repeat in a graph, and the predicates even more.
        distinct = list(dict.fromkeys(texts))
        # An empty row block, so that no texts give no rows.
        vectors = [torch.zeros(0, self.model.config.hidden_size)]
        for start in range(0, len(distinct), 256):
            batch = distinct[start : start + 256]
            inputs = self.tokenizer(batch, padding=True, truncation=True, max_length=self.limit, return_tensors="pt")
            hidden = self.model(**inputs).last_hidden_state
            if self.first:
                pooled = hidden[:, 0]
            else:
                mask = inputs["attention_mask"].unsqueeze(-1)
                pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
            if self.unit:
                pooled = torch.nn.functional.normalize(pooled, dim=-1)
            vectors.append(pooled)
        rows = {text: row for row, text in enumerate(distinct)}
        return torch.cat(vectors)[[rows[text] for text in texts]].half().float()


class AutoGraphLLM(GraphLLM):
    """The model that `AutoModel.from_pretrained(FOLDER, trust_remote_code=True)` returns."""

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *args: Any,
        config: GraphLLMConfig | None = None,
        dtype: torch.dtype | str = "auto",
        **options: Any,
    ) -> PreTrainedModel:
        """Load a whole model, or an adapter and the base model that `config.base_model` names.

        transformers passes `args` and `options`, of which loading an adapter needs none.

        The adapter stays unmerged, since merging in 16 bits would round a part of it away. PEFT's wrapper is not
        needed, because the adapter's layers are in the model itself.
        """
        if read_model_json(str(folder), "adapter_config.json") is None:
            return super().from_pretrained(folder, *args, config=config, dtype=dtype, **options)
        config = config or GraphLLMConfig.from_pretrained(folder)
        language_model = base_language_model(config.base_model, config.base_revision, dtype)
        adapted = PeftModel.from_pretrained(cls(config, language_model), str(folder), autocast_adapter_dtype=False)
        model = adapted.get_base_model().eval()
        model.generation_config = GenerationConfig.from_pretrained(folder)
        return model


class AutoGraphLLMProcessor(GraphLLMProcessor):
    """The processor that `AutoProcessor.from_pretrained(FOLDER, trust_remote_code=True)` returns.

    Attributes:
        vectors: Turns n node and edge texts into (n, D) floats; None until the first graph, then a `NodeEncoder`.
    """

    encoder: str = ""
    vectors: Callable[[Sequence[str]], torch.Tensor] | None = None

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoProcessor") -> None:
        """Do nothing: transformers calls it, but the folder already names the class."""

    @classmethod
    def from_pretrained(cls, folder: str | Path, encoder: str = "", **_: Any) -> AutoGraphLLMProcessor:
        """Load the folder's tokenizer and prompts; `encoder` names the text encoder if it is in another place.

        transformers passes more arguments, such as `trust_remote_code`, which have no effect here.
        """
        # The code of this folder is running already; without this, transformers would ask for it again.
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        processor = cls(tokenizer, ProcessorSettings(**read_model_json(str(folder), "processor_config.json")))
        processor.encoder = encoder or read_model_json(str(folder), "config.json")["encoder"]
        return processor

    def __call__(
        self, question: str, steps: Sequence[tuple[str, Sequence[Sequence[str]]]] = (), task: Task = "answering"
    ) -> BatchFeature:
        """Return the inputs of `model.generate` for one question.

        Args:
            steps: The rounds so far: (sub-query, [(subject, predicate, object), …]) each.
            task: "planning" or "answering".
        """
        history = []
        for query, rows in steps:
            triples = tuple(Triple(*row) for row in rows)
            history.append(Step(query, triples))
        encoded = self.encode_input(ModelInput(task, question, tuple(history)))
        ids = torch.tensor([encoded.input_ids])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if encoded.graphs:
            self.vectors = self.vectors or NodeEncoder(self.encoder)
            inputs["graphs"] = batch_graphs(encoded.graphs, self.vectors)
        return BatchFeature(inputs)

    def decode(self, output: torch.Tensor, inputs: BatchFeature) -> str:
        """Return the reply in the output of `generate` for these inputs."""
        reply = output[0, inputs["input_ids"].shape[1] :]
        return str(self.tokenizer.decode(reply, skip_special_tokens=True)).strip()
