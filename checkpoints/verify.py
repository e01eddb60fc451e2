"""Reference outputs of a model and the check that a folder still gives them, loaded in a fresh process.

`verify.json` holds, for a few fictional inputs, what the trained model said in float32 at batch size 1: prompt tokens,
a sample of the logits that follow the prompt, and the tokens of its greedy reply. Equal prompts prove tokenizer and
instructions, equal logits prove adapter, base model, graph modules and text encoder.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import tripletune
from tripletune.checkpoints.replies import FORMAT, observed_reply
from tripletune.checkpoints.text_models import TextCase, load_text_model, observe_text_model, text_cases
from tripletune.models.data.records import ModelInput, Step
from tripletune.models.data.triples import Triple, triples_from_json
from tripletune.models.run_folders import (
    check_model_folder,
    file_digest,
    is_text_model,
    load_model,
    read_json,
    trained_folder,
    weight_files,
    write_json,
)

REFERENCE = "verify.json"
TOLERANCE = 1e-3

_HARBOUR = Step(
    "Who wrote The Glass Harbour?",
    (Triple("The Glass Harbour", "written by", "Ida Morn"), Triple("The Glass Harbour", "published in", "1931")),
    "The Glass Harbour is a novel by Ida Morn, published in 1931.",
)
_MORN = Step(
    "Where was Ida Morn born?",
    (Triple("Ida Morn", "place of birth", "Velsund"), Triple("Velsund", "country", "Norlandia")),
    "Ida Morn was born in Velsund, a town in Norlandia.",
)
_QUESTION = "In which town was the author of The Glass Harbour born?"
CASES: dict[str, ModelInput] = {
    "planning, 0 steps": ModelInput("planning", _QUESTION),
    "planning, 1 step": ModelInput("planning", _QUESTION, (_HARBOUR,)),
    "planning, 2 steps": ModelInput("planning", _QUESTION, (_HARBOUR, _MORN)),
    "answering, 0 steps": ModelInput("answering", "Is a harbour a place for ships?"),
    "answering, 2 steps": ModelInput("answering", _QUESTION, (_HARBOUR, _MORN)),
}


@dataclass(frozen=True, slots=True)
class CaseResult:
    """How one case compares.

    Attributes:
        name: The case.
        same_prompt: Whether the prompt tokens are equal.
        logit_difference: Largest absolute difference among the sampled logits and their log normaliser.
        same_reply: Whether the greedy reply tokens are equal.
        tolerance: Largest difference that passes.
    """

    name: str
    same_prompt: bool
    logit_difference: float
    same_reply: bool
    tolerance: float = TOLERANCE

    @property
    def passed(self) -> bool:
        """Whether the case is as it should be; a NaN is not."""
        return self.same_prompt and self.same_reply and self.logit_difference <= self.tolerance


@dataclass(frozen=True, slots=True)
class Comparison:
    """A folder against one reference: what the reference is, the cases, and weight files that are not the same."""

    against: str
    cases: list[CaseResult]
    other_files: list[str]

    @property
    def passed(self) -> bool:
        """Whether all is as it should be."""
        return bool(self.cases) and not self.other_files and all(case.passed for case in self.cases)


def observe(folder: str | Path, cases: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Load a folder in float32 and write down what it says.

    Args:
        folder: Run, checkpoint, export or merged folder.
        cases: Inputs by name, of `cases_of`; unless given `CASES`, or `text_cases` of a model on plain text.

    Returns:
        The content of `verify.json`.

    Raises:
        FileNotFoundError: files are missing.
        ValueError: files are damaged.
    """
    import torch

    source = trained_folder(folder)
    if is_text_model(source):
        check_model_folder(source)
        return observe_text_model(load_text_model(source), text_cases(source) if cases is None else cases)
    model, processor = load_model(source, torch.float32)
    return observe_model(model, processor, cases)


def observe_model(model: Any, processor: Any, cases: Mapping[str, ModelInput] | None = None) -> dict[str, Any]:
    """What a loaded float32 model says to each case; see `observe`."""
    from tripletune.models.graph_llm.embeddings import LiveEmbeddings

    config = model.get_base_model().config if hasattr(model, "get_base_model") else model.config
    embeddings = LiveEmbeddings(config.encoder, config.text_embedding_width)
    packages = ("torch", "transformers", "peft", "sentence-transformers")
    return {
        "format": FORMAT,
        "dtype": "float32",
        "device": str(model.device.type),
        "versions": {name: metadata.version(name) for name in packages},
        "cases": [
            _observe_case(name, sample, model, processor, embeddings)
            for name, sample in (CASES if cases is None else cases).items()
        ],
    }


def _observe_case(name: str, sample: ModelInput, model: Any, processor: Any, embeddings: Any) -> dict[str, Any]:
    from tripletune.models.graph_llm.graphs import batch_graphs, graph_rows

    encoded = processor.encode_input(sample)
    extra: dict[str, Any] = {}
    if processor.settings.use_graph:
        strings = list(dict.fromkeys(text for graph in encoded.graphs for text in graph.strings))
        table = embeddings.vectors(strings)
        rows = graph_rows(encoded.graphs, {text: row for row, text in enumerate(strings)})
        extra["graphs"] = batch_graphs([rows], table.__getitem__, embeddings.dimension).to(model.device)
    tokenizer = processor.tokenizer
    reply = observed_reply(model, encoded.input_ids, [tokenizer.eos_token_id], tokenizer.pad_token_id, **extra)
    return {
        "name": name,
        "task": sample.task,
        "question": sample.question,
        "steps": [
            {"query": step.query, "triples": [t.as_list() for t in step.triples], "text": step.text}
            for step in sample.steps
        ],
        "prompt_ids": encoded.input_ids,
        **reply,
        "reply": processor.decode(reply["reply_ids"]),
    }


def weight_digests(folder: str | Path) -> dict[str, str]:
    """SHA-256 of every weight file of a folder."""
    return {file.name: file_digest(file) for file in weight_files(folder)}


def read_reference(folder: str | Path) -> dict[str, Any]:
    """Read `verify.json`.

    Raises:
        FileNotFoundError: the folder has none.
        ValueError: it is malformed or of another format.
    """
    path = Path(folder) / REFERENCE
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {REFERENCE}: only folders written by `tripletune checkpoints export` or `merge` can be "
            "verified"
        )
    reference = read_json(path)
    if reference.get("format") != FORMAT:
        raise ValueError(f"{path}: format {reference.get('format')!r} is not {FORMAT}: export the run again")
    cases_of(reference, path)
    return reference


def cases_of(reference: dict[str, Any], where: str | Path = REFERENCE) -> dict[str, ModelInput | TextCase]:
    """The inputs a reference was made with.

    Raises:
        ValueError: there are none, or they do not have the expected layout.
    """
    try:
        cases = {case["name"]: _case_of(case, str(where)) for case in reference["cases"]}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where}: a case does not have the expected layout ({error!r})") from None
    if not cases:
        raise ValueError(f"{where} holds no cases: export the run again")
    return cases


def _case_of(case: dict[str, Any], where: str) -> ModelInput | TextCase:
    if "messages" in case or "text" in case:
        return TextCase.from_json(case)
    steps = (Step(step["query"], triples_from_json(step["triples"], where), step["text"]) for step in case["steps"])
    return ModelInput(case["task"], case["question"], tuple(steps))


def compare(
    reference: dict[str, Any], observed: dict[str, Any], tolerance: float = TOLERANCE, against: str = REFERENCE
) -> Comparison:
    """Compare two observations of the same cases.

    Args:
        reference: What should be.
        observed: What is.
        tolerance: Largest absolute difference of a logit.
        against: Name of the reference, for people.
    """
    found = {case["name"]: case for case in observed["cases"]}
    results = [_compare_case(case, found.get(case["name"]), tolerance) for case in reference["cases"]]
    return Comparison(against, results, [])


def insist(comparison: Comparison) -> None:
    """Make sure that a merged model says what its adapter says.

    Raises:
        ValueError: it does not.
    """
    failed = [case for case in comparison.cases if not case.passed]
    if failed:
        worst = max(case.logit_difference for case in failed)
        raise ValueError(
            f"the merged model does not say what the adapter says ({len(failed)} of {len(comparison.cases)} cases, "
            f"first {failed[0].name!r}; logits differ by up to {worst:.1e}), so nothing was written"
        )


def _compare_case(wanted: dict[str, Any], found: dict[str, Any] | None, tolerance: float) -> CaseResult:
    if found is None:
        return CaseResult(wanted["name"], False, math.nan, False, tolerance)
    difference = math.nan
    if wanted["logit_ids"] == found["logit_ids"]:
        pairs = zip([*wanted["logits"], wanted["log_normaliser"]], [*found["logits"], found["log_normaliser"]])
        differences = [abs(one - other) for one, other in pairs]
        # max() passes over a NaN that does not stand first.
        difference = math.nan if any(map(math.isnan, differences)) else max(differences)
    return CaseResult(
        wanted["name"],
        wanted["prompt_ids"] == found["prompt_ids"],
        difference,
        wanted["reply_ids"] == found["reply_ids"],
        tolerance,
    )


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
    reference = read_reference(folder)
    # Before the slow part, so that a wrong name is told at once.
    source = trained_folder(run) if run is not None else None
    recorded = reference.get("weights") or {}
    digests = weight_digests(folder)
    other = sorted(name for name in digests.keys() | recorded.keys() if digests.get(name) != recorded.get(name))
    observed = observe_in_new_process(folder, reference)
    against = compare(reference, observed, tolerance)
    comparisons = [Comparison(REFERENCE, against.cases, other)]
    if source is not None:
        check_model_folder(source)
        trained = observe_in_new_process(source, reference)
        comparisons.append(compare(trained, observed, tolerance, str(run)))
    return comparisons


def observe_in_new_process(folder: Path, reference: dict[str, Any]) -> dict[str, Any]:
    """`observe` in a fresh Python, so that nothing this process has loaded can stand in for a missing file.

    Raises:
        ValueError: the folder can't be loaded; the message is that of the other process.
    """
    with tempfile.TemporaryDirectory(prefix="tripletune-verify-") as scratch:
        cases, output = Path(scratch) / "cases.json", Path(scratch) / "observed.json"
        write_json(cases, {"format": FORMAT, "cases": reference["cases"]})
        command = [sys.executable, "-m", "tripletune.checkpoints", "observe", str(folder)]
        # The packages need not be installed: the other process finds them where this one did.
        places = [str(Path(tripletune.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        done = subprocess.run(
            [*command, "--cases", str(cases), "--output", str(output)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        )
        if done.returncode or not output.exists():
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
            reason = next((line for line in lines if line.startswith("error: ")), lines[-1])
            raise ValueError(reason.removeprefix("error: "))
        return read_json(output)


def table(comparisons: Sequence[Comparison]) -> str:
    """The comparisons as a plain-text table."""
    rows = [("case", "against", "prompt", "logit difference", "reply", "")]
    for comparison in comparisons:
        rows += [
            (
                case.name,
                comparison.against,
                _same(case.same_prompt),
                f"{case.logit_difference:.1e}",
                _same(case.same_reply),
                "ok" if case.passed else "FAILED",
            )
            for case in comparison.cases
        ]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def explain(comparisons: Sequence[Comparison]) -> str:
    """Why a verification failed and what to do, in one line."""
    return "; ".join(_reason(comparison) for comparison in comparisons if not comparison.passed)


def _reason(comparison: Comparison) -> str:
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


def _same(value: bool) -> str:
    return "same" if value else "DIFFERS"
