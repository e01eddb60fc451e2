"""Observe a model: its outputs for three fictional inputs, in float32 at batch size 1, for `checkpoints.verify`.

An output is the log normaliser of the first logits, and the tokens of the greedy reply.

Tested in `tests/checkpoints/test_verify.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NotRequired, TypedDict

import yaml

from tripletune.core.calls import Message
from tripletune.core.data.records import ModelInput, Step, Task
from tripletune.core.files import read_text
from tripletune.core.program import versions
from tripletune.models.control_tokens import text_ids
from tripletune.models.run_folders import PROMPT_FILE, task_of, trained_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tripletune.models.graph_llm.processor import GraphLLMProcessor

# Maximum tokens of a reply.
_NEW_TOKENS = 32
_CASES = Path(__file__).with_name("cases.yaml")


class VerifyCase(TypedDict):
    """A model's input, in one of four forms.

    Attributes:
        task: With `question` and `steps` (`Step.to_json`), the input of a Graph-LLM.
        messages: A chat.
        text: The input of an encoder-decoder.
        prompt_ids: The tokens of any prompt; beside stored outputs also those of the other forms.
    """

    name: str
    task: NotRequired[Task]
    question: NotRequired[str]
    steps: NotRequired[list[dict[str, Any]]]
    messages: NotRequired[list[Message]]
    text: NotRequired[str]
    prompt_ids: NotRequired[list[int]]


class Output(TypedDict):
    """A model's output for a prompt.

    Attributes:
        log_normaliser: Log of the sum of the exponentials of the first token's logits.
        reply_ids: The tokens of the greedy reply.
        reply: The greedy reply.
    """

    log_normaliser: float
    reply_ids: list[int]
    reply: str


class ObservedCase(VerifyCase, Output):
    """A case with its prompt tokens and the model's output."""


class Observation(TypedDict):
    """A model's outputs as `verify.json` stores them, with `recorded_files` if they were stored with their model."""

    dtype: Literal["float32"]
    device: str
    versions: dict[str, str]
    cases: list[ObservedCase]
    weights: NotRequired[dict[str, str]]
    files: NotRequired[dict[str, str]]


@dataclass
class LoadedModel:
    """A model in float32 and evaluation mode, with its adapter unmerged; only a Graph-LLM has a processor."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    processor: GraphLLMProcessor | None
    folder: Path


class PromptInputs(NamedTuple):
    """What `generate` reads for a case.

    Attributes:
        ids: The prompt's tokens.
        extra: More arguments of `generate`: the graphs of a Graph-LLM, or none.
    """

    ids: list[int]
    extra: dict[str, Any]


def load_for_observation(folder: str | Path, plain: bool = False) -> LoadedModel:
    """Load a model in float32, on a GPU if there is one; load a `plain` one with transformers and PEFT.

    In 16 bits, rounding would hide the small differences that another encoder or a damaged file makes. The adapter
    stays unmerged, so that the outputs of a merged model can be compared with it.
    """
    import torch

    from tripletune.models.adapters import adapter_base, load_adapter
    from tripletune.models.graph_llm import load_graph_llm
    from tripletune.models.loading import load_language_model, load_tokenizer, use_embedded_padding

    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = Path(folder) if plain else trained_folder(folder)
    if not plain and not task_of(source):
        graph_llm, processor = load_graph_llm(source, torch.float32)
        return LoadedModel(graph_llm.to(device), processor.tokenizer, processor, source)
    base = adapter_base(source)
    if base is not None:
        model = load_adapter(load_language_model(base, torch.float32), source, base).eval()
    else:
        model = load_language_model(source, torch.float32)
    tokenizer = load_tokenizer(source)
    use_embedded_padding(tokenizer, model)
    return LoadedModel(model.to(device), tokenizer, None, source)


def cases_of(loaded: LoadedModel) -> list[VerifyCase]:
    """Return the cases for comparing a model: inputs of a Graph-LLM, or texts in the form of the model's training.

    An encoder-decoder reads the text alone. A chat model reads it after its instruction, if it was trained with one.
    """
    cases = yaml.safe_load(read_text(_CASES))
    # Each kind of model reads its own form of input; see `VerifyCase`.
    if loaded.processor is not None:
        return list(cases["graph_llm"])
    if task_of(loaded.folder).get("encoder_decoder"):
        return [{"name": name, "text": text} for name, text in cases["text"].items()]
    system_turns: list[Message] = []
    prompt = loaded.folder / PROMPT_FILE
    if prompt.is_file() and read_text(prompt).strip():
        system_turns.append({"role": "system", "content": read_text(prompt).strip()})
    chats: list[VerifyCase] = []
    for name, text in cases["text"].items():
        chats.append({"name": name, "messages": [*system_turns, {"role": "user", "content": text}]})
    return chats


def prompt_of(loaded: LoadedModel, case: VerifyCase) -> PromptInputs:
    """What `generate` reads for a case, in the form that the case has; see `VerifyCase`.

    Prompts are made as in inference, since a wrong template or tokenizer must show here.
    """
    if loaded.processor is not None:
        from tripletune.models.graph_llm.embeddings import LiveEmbeddings
        from tripletune.models.graph_llm.graphs import batch_graphs

        steps = tuple(Step.from_json(step) for step in case["steps"])
        encoded = loaded.processor.encode_input(ModelInput(case["task"], case["question"], steps))
        if not encoded.graphs:
            return PromptInputs(encoded.input_ids, {})
        config = loaded.model.config
        embeddings = LiveEmbeddings(config.encoder, config.text_embedding_width)
        return PromptInputs(encoded.input_ids, {"graphs": batch_graphs(encoded.graphs, embeddings.vectors)})
    if "messages" in case:
        from tripletune.models.local.chat import ChatEncoder

        return PromptInputs(ChatEncoder(loaded.tokenizer, str(loaded.folder)).encode(case["messages"]), {})
    if "text" in case:
        (prompt,) = text_ids(loaded.tokenizer, [case["text"]], around=True)
        return PromptInputs(prompt, {})
    return PromptInputs(case["prompt_ids"], {})


def observe(loaded: LoadedModel, cases: Sequence[VerifyCase]) -> Observation:
    """Return a loaded model's outputs for each case, as stored in `verify.json`.

    The prompt tokens are stored beside the outputs, so that a changed tokenizer is told from changed weights.
    """
    outputs: list[ObservedCase] = []
    for case in cases:
        inputs = prompt_of(loaded, case)
        outputs.append({**case, "prompt_ids": inputs.ids, **_output_for(loaded, inputs)})
    return {
        "dtype": "float32",
        "device": str(loaded.model.device.type),
        "versions": versions(("torch", "transformers", "peft", "sentence-transformers")),
        "cases": outputs,
    }


def _output_for(loaded: LoadedModel, inputs: PromptInputs) -> Output:
    """Return the outputs of a model for a prompt: the first log normaliser, and the greedy reply.

    The normaliser depends on all logits of the first token, so it changes with any weight, while a short reply may stay
    the same by chance.
    """
    import torch

    from tripletune.models.local.chat import eos_token_ids

    model = loaded.model
    tokenizer = loaded.tokenizer
    ends = [tokenizer.eos_token_id]
    if loaded.processor is None:
        ends = eos_token_ids(tokenizer, model.generation_config)
    ids = torch.tensor([inputs.ids], device=model.device)
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=_NEW_TOKENS,
            do_sample=False,
            # Values in a generation configuration would be warned of.
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=list(ends),
            pad_token_id=tokenizer.pad_token_id,
            return_dict_in_generate=True,
            output_logits=True,
            **inputs.extra,
        )
    # An encoder-decoder returns only its reply, after the start token of its decoder.
    start = 1 if model.config.is_encoder_decoder else len(inputs.ids)
    reply = output.sequences[0, start:].tolist()
    normaliser = torch.logsumexp(output.logits[0][0].float(), 0).item()
    if not math.isfinite(normaliser):
        raise ValueError(f"{loaded.folder}: the model's logits are not finite")
    return {
        # Nine digits distinguish all float32 values.
        "log_normaliser": float(f"{normaliser:.9g}"),
        "reply_ids": reply,
        "reply": tokenizer.decode(reply, skip_special_tokens=True).strip(),
    }
