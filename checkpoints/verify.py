"""Write reference outputs of a model, and check in a new process that a folder still gives the same outputs.

`verify.json` holds the trained model's outputs for three fictional inputs, in float32 at batch size 1: prompt tokens,
the log normaliser of the first logits, and the tokens of the greedy reply. Equal prompts prove tokenizer and
instructions to be the same for these inputs, and digests of their files for all inputs; equal normalisers and replies
prove adapter, base model, graph modules and encoder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict, cast

import yaml

from tripletune.core.calls import Message
from tripletune.core.data.fields import checked
from tripletune.core.data.records import ModelInput, Step, Task
from tripletune.core.files import file_digest, read_json, read_text
from tripletune.core.program import versions
from tripletune.models.control_tokens import text_ids
from tripletune.models.run_folders import (
    PROCESSOR,
    PROMPT_FILE,
    TOKENIZER_FILES,
    check_model_folder,
    task_of,
    trained_folder,
    weight_files,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tripletune.models.graph_llm.processor import GraphLLMProcessor

REFERENCE = "verify.json"
TOLERANCE = 1e-3
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


class RecordedFiles(TypedDict):
    """Digests of a model's files by name: its weights, and the files from which prompts are made."""

    weights: dict[str, str]
    files: dict[str, str]


class Observation(TypedDict):
    """A model's outputs as `verify.json` stores them, with `recorded_files` if they were stored with their model."""

    dtype: Literal["float32"]
    device: str
    versions: dict[str, str]
    cases: list[ObservedCase]
    weights: NotRequired[dict[str, str]]
    files: NotRequired[dict[str, str]]


@dataclass
class Loaded:
    """A model in float32 and evaluation mode, with its adapter unmerged; only a Graph-LLM has a processor."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    processor: GraphLLMProcessor | None
    folder: Path


@dataclass(frozen=True)
class Comparison:
    """How far a folder agrees with a reference.

    Attributes:
        against: What the reference is.
        cases: Number of cases.
        same_prompts: Cases with the same prompt tokens.
        same_replies: Cases with the same tokens of the greedy reply.
        difference: Largest difference of a log normaliser.
        tolerance: Largest accepted difference.
        other_files: Files of weights, tokenizer and prompts that have changed since the export.
    """

    against: str
    cases: int
    same_prompts: int
    same_replies: int
    difference: float
    tolerance: float
    other_files: Sequence[str] = ()

    @property
    def passed(self) -> bool:
        """Whether the folder agrees with the reference.

        Weight files count too: a change of a few numbers may leave the replies of three cases as they are.
        """
        all_same = self.same_prompts == self.cases and self.same_replies == self.cases
        return all_same and self.difference <= self.tolerance and not self.other_files

    def __str__(self) -> str:
        """One line of text, with the reason of a failure.

        The first of the possible reasons is named: other weights change everything, another tokenizer changes prompts.
        """
        line = (
            f"{self.against}: {self.same_prompts} of {self.cases} prompts and {self.same_replies} of {self.cases} "
            f"greedy replies are the same, log normalisers differ by up to {self.difference:.1e}"
        )
        if self.passed:
            return line
        if self.other_files:
            names = ", ".join(self.other_files)
            verb = "has" if len(self.other_files) == 1 else "have"
            return f"{line}; {names} {verb} changed since the export: copy the folder or export again"
        if self.against != REFERENCE:
            return f"{line}; it is another model, or its weights were rounded when they were merged"
        if self.same_prompts < self.cases:
            return f"{line}; the tokenizer or processor_config.json has changed"
        return f"{line}; the weight files are the same, so base model, encoder or package versions have changed"


def load(folder: str | Path, plain: bool = False) -> Loaded:
    """Load a model in float32, on a GPU if there is one; load a `plain` one with transformers and PEFT.

    In 16 bits, rounding would hide the small differences that another encoder or a damaged file makes. The adapter
    stays unmerged, so that the outputs of a merged model can be compared with it.
    """
    import torch

    from tripletune.models.graph_llm import load_graph_llm
    from tripletune.models.loading import load_language_model, load_tokenizer, use_embedded_padding
    from tripletune.models.lora import adapter_base, load_adapter

    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = Path(folder) if plain else trained_folder(folder)
    if not plain and not task_of(source):
        graph_llm, processor = load_graph_llm(source, torch.float32)
        return Loaded(graph_llm.to(device), processor.tokenizer, processor, source)
    base = adapter_base(source)
    if base is not None:
        model = load_adapter(load_language_model(base, torch.float32), source, base).eval()
    else:
        model = load_language_model(source, torch.float32)
    tokenizer = load_tokenizer(source)
    use_embedded_padding(tokenizer, model)
    return Loaded(model.to(device), tokenizer, None, source)


def cases_of(loaded: Loaded) -> list[VerifyCase]:
    """Return the cases for comparing a model: inputs of a Graph-LLM, or texts in the form of the model's training.

    An encoder-decoder reads the text alone. A chat model reads it after its instruction, if it was trained with one.
    """
    cases = yaml.safe_load(read_text(_CASES))
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


def prompt_of(loaded: Loaded, case: VerifyCase) -> tuple[list[int], dict[str, Any]]:
    """Return the prompt tokens of a case, and further arguments of `generate`.

    Prompts are made as in inference, since a wrong template or tokenizer must show here.
    """
    if loaded.processor is not None:
        from tripletune.models.graph_llm.embeddings import LiveEmbeddings
        from tripletune.models.graph_llm.graphs import batch_graphs

        steps = tuple(Step.from_json(step) for step in case["steps"])
        encoded = loaded.processor.encode_input(ModelInput(case["task"], case["question"], steps))
        if not encoded.graphs:
            return encoded.input_ids, {}
        config = loaded.model.config
        embeddings = LiveEmbeddings(config.encoder, config.text_embedding_width)
        return encoded.input_ids, {"graphs": batch_graphs(encoded.graphs, embeddings.vectors)}
    if "messages" in case:
        from tripletune.models.local.chat import ChatEncoder

        return ChatEncoder(loaded.tokenizer, str(loaded.folder)).encode(case["messages"]), {}
    if "text" in case:
        (prompt,) = text_ids(loaded.tokenizer, [case["text"]], around=True)
        return prompt, {}
    return case["prompt_ids"], {}


def observe(loaded: Loaded, cases: Sequence[VerifyCase]) -> Observation:
    """Return a loaded model's outputs for each case, as stored in `verify.json`."""
    outputs: list[ObservedCase] = []
    for case in cases:
        prompt, extra = prompt_of(loaded, case)
        outputs.append({**case, "prompt_ids": prompt, **_output_for(loaded, prompt, extra)})
    return {
        "dtype": "float32",
        "device": str(loaded.model.device.type),
        "versions": versions(("torch", "transformers", "peft", "sentence-transformers")),
        "cases": outputs,
    }


def _output_for(loaded: Loaded, prompt: list[int], extra: dict[str, Any]) -> Output:
    """Return the outputs of a model for a prompt: the first log normaliser, and the greedy reply.

    The normaliser depends on all logits of the first token, so it changes with any weight, while a short reply may stay
    the same by chance.

    Args:
        extra: More arguments of `generate`, such as graphs.
    """
    import torch

    from tripletune.models.local.chat import eos_token_ids

    model = loaded.model
    tokenizer = loaded.tokenizer
    ends = [tokenizer.eos_token_id]
    if loaded.processor is None:
        ends = eos_token_ids(tokenizer, model.generation_config)
    ids = torch.tensor([prompt], device=model.device)
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
            **extra,
        )
    # An encoder-decoder returns only its reply, after the start token of its decoder.
    start = 1 if model.config.is_encoder_decoder else len(prompt)
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


def recorded_files(folder: str | Path) -> RecordedFiles:
    """SHA-256 of the weight files of a folder, and of the files from which prompts are made, for `verify.json`.

    The cases are too few to show every change of a chat template or a tokenizer.
    """
    prompt_files = [Path(folder) / name for name in (*TOKENIZER_FILES, PROCESSOR, PROMPT_FILE)]
    return {
        "weights": {file.name: file_digest(file) for file in weight_files(folder)},
        "files": {file.name: file_digest(file) for file in prompt_files if file.is_file()},
    }


def _changed_files(folder: Path, reference: Observation) -> list[str]:
    """Names of the files of a folder that are not those of its reference, sorted."""
    files = recorded_files(folder)
    changed = _differing(files["weights"], reference.get("weights") or {})
    recorded = reference.get("files")
    # Earlier versions recorded only weights.
    if recorded is not None:
        changed |= _differing(files["files"], recorded)
    return sorted(changed)


def _differing(digests: Mapping[str, str], recorded: Mapping[str, str]) -> set[str]:
    names = digests.keys() | recorded.keys()
    return {name for name in names if digests.get(name) != recorded.get(name)}


def compare_observations(
    reference: Observation, observed: Observation, tolerance: float = TOLERANCE, against: str = REFERENCE
) -> Comparison:
    """Compare two observations of the same cases."""
    import numpy as np

    same_prompts = 0
    same_replies = 0
    differences = []
    for expected, case in zip(reference["cases"], observed["cases"], strict=True):
        same_prompts += expected["prompt_ids"] == case["prompt_ids"]
        same_replies += expected["reply_ids"] == case["reply_ids"]
        differences.append(expected["log_normaliser"] - case["log_normaliser"])
    # NumPy's maximum is NaN if one of the values is NaN.
    difference = float(np.abs(differences).max())
    return Comparison(against, len(differences), same_prompts, same_replies, difference, tolerance)


# The layout of `verify.json`; see `core.data.fields.checked`.
_CASE = {"name": str, "prompt_ids": [int], "reply_ids": [int], "log_normaliser": float}
_LAYOUT = {
    "cases": [{**_CASE, "task?": str, "question?": str, "steps?": [dict]}],
    "weights?": {"": str},
    "files?": {"": str},
}


def verify(folder: str | Path, run: str | Path | None = None, tolerance: float = TOLERANCE) -> list[Comparison]:
    """Compare an export or merged folder, loaded in a new process, with its `verify.json` and its run.

    Log normalisers differ by about 1e-5 on other hardware or with merged weights, and by more than 0.1 with another
    base model or encoder.

    Args:
        run: Run or checkpoint folder to compare with too.
        tolerance: Largest accepted difference of log normalisers.

    Returns:
        The comparison with `verify.json`, and with a run the comparison with it.
    """
    folder = trained_folder(folder)
    check_model_folder(folder)
    path = folder / REFERENCE
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {REFERENCE}: only folders written by `tripletune checkpoints export` or `merge` can be "
            "verified"
        )
    reference = cast(Observation, checked(read_json(path), str(path), _LAYOUT))
    # Checked before the slow part, so that a wrong name is reported at once.
    source = trained_folder(run) if run is not None else None
    changed = _changed_files(folder, reference)
    observed = observe_in_new_process(folder, reference["cases"])
    comparisons = [replace(compare_observations(reference, observed, tolerance), other_files=changed)]
    if source is not None:
        check_model_folder(source)
        trained = observe_in_new_process(source, reference["cases"])
        comparisons.append(compare_observations(trained, observed, tolerance, str(run)))
    return comparisons


def observe_in_new_process(folder: Path, cases: Sequence[VerifyCase]) -> Observation:
    """Run `observe` in a new Python process, in which a missing file is an error.

    In this process, something may be loaded already that a user of the folder would have to load from it.
    """
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(_observe_folder, folder, cases).result()
    except BrokenProcessPool:
        raise ValueError(
            f"the process that loaded {folder} was killed: check that the model fits into memory in float32"
        ) from None


def _observe_folder(folder: Path, cases: Sequence[VerifyCase]) -> Observation:
    return observe(load(folder), cases)
