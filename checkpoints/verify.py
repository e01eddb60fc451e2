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
from typing import TypedDict, cast

from tripletune.checkpoints.observation import Observation, VerifyCase, load_for_observation, observe
from tripletune.core.data.fields import checked
from tripletune.core.files import file_digest, read_json
from tripletune.core.program import quiet_libraries
from tripletune.models.run_folders import (
    PROCESSOR,
    PROMPT_FILE,
    TOKENIZER_FILES,
    check_model_folder,
    trained_folder,
    weight_files,
)

REFERENCE = "verify.json"
# Between the differences of other hardware and those of another model; see `verify`.
TOLERANCE = 1e-3


class RecordedFiles(TypedDict):
    """Digests of a model's files by name: its weights, and the files from which prompts are made."""

    weights: dict[str, str]
    files: dict[str, str]


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
    changed = _names_with_other_digests(files["weights"], reference.get("weights") or {})
    recorded = reference.get("files")
    # Earlier versions recorded only weights.
    if recorded is not None:
        changed |= _names_with_other_digests(files["files"], recorded)
    return sorted(changed)


def _names_with_other_digests(digests: Mapping[str, str], recorded: Mapping[str, str]) -> set[str]:
    """Names of files whose digests differ, also of those that only one side has."""
    names = digests.keys() | recorded.keys()
    return {name for name in names if digests.get(name) != recorded.get(name)}


def compare_observations(
    reference: Observation, observed: Observation, tolerance: float = TOLERANCE, against: str = REFERENCE
) -> Comparison:
    """Compare two observations of the same cases; a normaliser that is not finite never passes.

    Args:
        reference: What was observed when the folder was written.
        observed: What the folder gives now, of the same cases in the same order.
        tolerance: Largest accepted difference of two log normalisers, in nats.
        against: What the reference is called in messages.
    """
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
    # With NaN or a negative number, equal outputs would be called those of another model.
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance {tolerance:g}: must be a number from 0")
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
        with ProcessPoolExecutor(1, get_context("spawn"), quiet_libraries) as pool:
            return pool.submit(_observe_folder, folder, cases).result()
    except BrokenProcessPool:
        raise ValueError(
            f"the process that loaded {folder} was killed: check that the model fits into memory in float32"
        ) from None


def _observe_folder(folder: Path, cases: Sequence[VerifyCase]) -> Observation:
    """What the new process runs; a function of the module, since processes exchange only such functions."""
    return observe(load_for_observation(folder), cases)
