"""Reference outputs of a model, and the check that a folder still gives them, loaded in a fresh process.

`verify.json` holds, for a few fictional inputs, what the trained model said in float32 at batch size 1: prompt tokens,
a sample of the logits that follow the prompt, and the tokens of its greedy reply. Equal prompts prove tokenizer and
instructions, equal logits prove adapter, base model, graph modules and text encoder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml

from tripletune.models.data.records import ModelInput, Step
from tripletune.models.files import file_digest, read_json, read_text
from tripletune.models.run_folders import (
    PROMPT_FILE,
    check_model_folder,
    is_text_model,
    task_of,
    trained_folder,
    weight_files,
)

REFERENCE = "verify.json"
TOLERANCE = 1e-3
LOGIT_SAMPLE = 64
MAX_NEW_TOKENS = 32
_IDS = ("prompt_ids", "logit_ids", "reply_ids")
_CASES = Path(__file__).with_name("cases.yaml")

# A case is a JSON object: a name, and what a model reads.
Case = dict[str, Any]


@dataclass
class Loaded:
    """A model in float32, in eval mode, and what it reads by.

    Attributes:
        model: The model; an adapter is beside its base model, not merged.
        tokenizer: Its tokenizer.
        processor: That of a Graph-LLM.
        folder: Where it lies.
    """

    model: Any
    tokenizer: Any
    processor: Any = None
    folder: Path = field(default_factory=Path)

    def cases(self) -> Sequence[Case]:
        """What it is compared by: five inputs of a Graph-LLM, or three texts, asked for as the model was trained."""
        cases = yaml.safe_load(read_text(_CASES))
        if self.processor is not None:
            return list(cases["graph_llm"])
        if task_of(self.folder).get("encoder_decoder"):
            return [{"name": name, "text": text} for name, text in cases["text"].items()]
        prompt = self.folder / PROMPT_FILE
        system = read_text(prompt).strip() if prompt.is_file() else ""
        opening = [{"role": "system", "content": system}] if system else []
        turns = {name: [*opening, {"role": "user", "content": text}] for name, text in cases["text"].items()}
        return [{"name": name, "messages": messages} for name, messages in turns.items()]

    def prompt(self, case: Case) -> tuple[list[int], dict[str, Any]]:
        """The tokens that the model reads, and further arguments of `generate`."""
        if self.processor is not None:
            from tripletune.models.graph_llm.graphs import batch_graphs

            encoded = self.processor.encode_input(model_input(case))
            more = {"graphs": batch_graphs(encoded.graphs, self._embeddings.vectors)} if encoded.graphs else {}
            return encoded.input_ids, more
        if "messages" in case:
            from tripletune.models.local.chat import ChatEncoder

            return ChatEncoder(self.tokenizer, str(self.folder)).encode(case["messages"]), {}
        return list(self.tokenizer(case["text"])["input_ids"]) if "text" in case else case["prompt_ids"], {}

    @cached_property
    def _embeddings(self) -> Any:
        from tripletune.models.graph_llm.embeddings import LiveEmbeddings

        return LiveEmbeddings(self.model.config.encoder, self.model.config.text_embedding_width)


def model_input(case: Case) -> ModelInput:
    """The input of a Graph-LLM that a case stands for."""
    return ModelInput(case["task"], case["question"], tuple(Step.from_json(step) for step in case["steps"]))


def load(folder: str | Path) -> Loaded:
    """Load a trained model in float32, on the GPU where there is one.

    Args:
        folder: Run, checkpoint, export or merged folder.

    Raises:
        FileNotFoundError: files are missing, or the base model or encoder is not there.
        ValueError: files are damaged, or the adapter does not fit the base model.
    """
    import torch

    from tripletune.models.graph_llm import load_graph_llm

    source = trained_folder(folder)
    check_model_folder(source)
    if is_text_model(source):
        return load_plain(source)
    model, processor = load_graph_llm(source, torch.float32)
    return Loaded(_placed(model), processor.tokenizer, processor, source)


def load_plain(folder: Path) -> Loaded:
    """Load a folder that plain transformers and PEFT load; see `load`."""
    import torch

    from tripletune.models.loading import adapter_base, load_adapter, load_tokenizer, load_weights

    base = adapter_base(folder)
    if base is None:
        model: Any = load_weights(folder, torch.float32)
    else:
        model = load_adapter(load_weights(base[0], torch.float32, base[1]), folder).eval()
    return Loaded(_placed(model), load_tokenizer(folder), None, folder)


def _placed(model: Any) -> Any:
    import torch

    return model.to("cuda") if torch.cuda.is_available() else model


def observe(loaded: Loaded, cases: Sequence[Case] | None = None) -> dict[str, Any]:
    """What a loaded model says to each case: the content of `verify.json`.

    Args:
        loaded: The model.
        cases: What it is asked; its own `cases` unless given.
    """
    from tripletune.models.local.chat import eos_token_ids

    tokenizer = loaded.tokenizer
    ends = (
        eos_token_ids(tokenizer, loaded.model.generation_config)
        if loaded.processor is None
        else [tokenizer.eos_token_id]
    )
    observed = []
    for case in loaded.cases() if cases is None else cases:
        ids, extra = loaded.prompt(case)
        reply = _reply(loaded.model, ids, ends, tokenizer.pad_token_id, extra)
        text = tokenizer.decode(reply["reply_ids"], skip_special_tokens=True)
        observed.append({**case, "prompt_ids": ids, **reply, "reply": text.strip()})
    packages = ("torch", "transformers", "peft", "sentence-transformers")
    return {
        "dtype": "float32",
        "device": str(loaded.model.device.type),
        "versions": {name: metadata.version(name) for name in packages},
        "cases": observed,
    }


def _reply(model: Any, prompt: Sequence[int], ends: Sequence[int], pad: int, extra: dict[str, Any]) -> dict[str, Any]:
    """A sample of the logits that follow a prompt, and the tokens of the greedy reply."""
    import torch

    ids = torch.tensor([list(prompt)], device=model.device)
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=list(ends),
            pad_token_id=pad,
            return_dict_in_generate=True,
            output_logits=True,
            **extra,
        )
    logits = output.logits[0][0].float().cpu()
    places = torch.linspace(0, logits.shape[0] - 1, min(LOGIT_SAMPLE, logits.shape[0])).round().long()
    # An encoder-decoder gives back its reply alone, behind the token its decoder starts with.
    start = 1 if model.config.is_encoder_decoder else ids.shape[1]
    return {
        "logit_ids": places.tolist(),
        # Nine digits tell float32 values apart.
        "logits": [float(f"{value:.9g}") for value in logits[places].tolist()],
        "log_normaliser": float(f"{torch.logsumexp(logits, 0).item():.9g}"),
        "reply_ids": output.sequences[0, start:].tolist(),
    }


def weight_digests(folder: str | Path) -> dict[str, str]:
    """SHA-256 of every weight file of a folder."""
    return {file.name: file_digest(file) for file in weight_files(folder)}


@dataclass(frozen=True, slots=True)
class CaseResult:
    """How one case compares.

    Attributes:
        name: The case.
        same_prompt: Whether the prompt tokens are equal.
        logit_difference: Largest absolute difference among the sampled logits and their log normaliser; NaN where one
            is NaN or the vocabularies differ.
        same_reply: Whether the greedy reply tokens are equal.
        passed: Whether the case is as it should be.
    """

    name: str
    same_prompt: bool
    logit_difference: float
    same_reply: bool
    passed: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """A folder against one reference: what the reference is, the cases, and weight files that are not the same."""

    against: str
    cases: list[CaseResult]
    other_files: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether all is as it should be."""
        return not self.other_files and all(case.passed for case in self.cases)

    @property
    def logit_difference(self) -> float:
        """The largest of all cases."""
        return max(case.logit_difference for case in self.cases)

    @property
    def same_replies(self) -> int:
        """How many greedy replies are equal."""
        return sum(case.same_reply for case in self.cases)


def compare_observations(
    reference: dict[str, Any], observed: dict[str, Any], tolerance: float = TOLERANCE, against: str = REFERENCE
) -> Comparison:
    """Compare two observations of the same cases.

    Args:
        reference: What should be.
        observed: What is.
        tolerance: Largest absolute difference of a logit.
        against: Name of the reference, for people.
    """
    import numpy as np

    cases = []
    for wanted, found in zip(reference["cases"], observed["cases"], strict=True):
        same_prompt, same_logits, same_reply = (wanted[key] == found[key] for key in _IDS)
        one, other = ([*case["logits"], case["log_normaliser"]] for case in (wanted, found))
        difference = float(np.abs(np.subtract(one, other)).max()) if same_logits else math.nan
        passed = same_prompt and same_reply and difference <= tolerance
        cases.append(CaseResult(wanted["name"], same_prompt, difference, same_reply, passed))
    return Comparison(against, cases)


def verify(folder: str | Path, run: str | Path | None = None, tolerance: float = TOLERANCE) -> list[Comparison]:
    """Load a folder in a new process and compare it with its `verify.json`, and with the run it comes from.

    Args:
        folder: Export or merged folder.
        run: The run (or checkpoint) it was made from; compared too when given.
        tolerance: Largest absolute difference of a float32 logit. Sums in another order (other hardware, merged
            weights) differ by about 1e-5; another base model or encoder by more than 0.1.

    Returns:
        One comparison with `verify.json`, and one with the run when given.

    Raises:
        FileNotFoundError: files are missing.
        ValueError: files are damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {folder}")
    check_model_folder(folder)
    path = folder / REFERENCE
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {REFERENCE}: only folders written by `tripletune checkpoints export` or `merge` can be "
            "verified"
        )
    reference = read_json(path)
    # Before the slow part, so that a wrong name is told at once.
    source = trained_folder(run) if run is not None else None
    recorded, digests = reference.get("weights") or {}, weight_digests(folder)
    other = sorted(name for name in digests.keys() | recorded.keys() if digests.get(name) != recorded.get(name))
    observed = observe_in_new_process(folder, reference["cases"])
    comparisons = [replace(compare_observations(reference, observed, tolerance), other_files=other)]
    if source is not None:
        check_model_folder(source)
        trained = observe_in_new_process(source, reference["cases"])
        comparisons.append(compare_observations(trained, observed, tolerance, str(run)))
    return comparisons


def observe_in_new_process(folder: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """`observe` in a fresh Python, so that nothing this process has loaded can stand in for a missing file.

    Raises:
        ValueError: the other process was killed; what it raises itself is raised here.
    """
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(_observe_folder, folder, cases).result()
    except BrokenProcessPool:
        raise ValueError(
            f"the process that loaded {folder} was killed: is there memory for the model in float32?"
        ) from None


def _observe_folder(folder: Path, cases: Sequence[Case]) -> dict[str, Any]:
    return observe(load(folder), cases)


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    """The comparisons as a plain-text table."""
    rows = [("case", "against", "prompt", "logit difference", "reply", "")]
    for comparison in comparisons:
        for case in comparison.cases:
            prompt, reply = ("same" if same else "DIFFERS" for same in (case.same_prompt, case.same_reply))
            passed = "ok" if case.passed else "FAILED"
            rows.append((case.name, comparison.against, prompt, f"{case.logit_difference:.1e}", reply, passed))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def explain(comparison: Comparison) -> str:
    """Why a comparison failed and what to do, in one line."""
    failed = [case for case in comparison.cases if not case.passed]
    what = f"{len(failed)} of {len(comparison.cases)} cases differ from {comparison.against}"
    if comparison.other_files:
        names = ", ".join(comparison.other_files)
        return f"{what}, and {names} is not the file that was written then: copy the folder or export again"
    if comparison.against != REFERENCE:
        return f"{what}: it is another model, or its weights were rounded when they were merged"
    if not all(case.same_prompt for case in failed):
        return f"{what} in their prompt: the tokenizer or processor_config.json is another one"
    return f"{what} though the weight files are the same: base model, encoder or package versions are other ones"
