"""Steps of a recipe that are commands: show each command, run it, and continue a stopped recipe after its last step.

The folder of a recipe holds `steps.json`, with a digest of each step's command and input files. Results of other
commands or files are refused, or made again one by one (`overwrite`).
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tripletune.core.config import to_yaml
from tripletune.core.files import (
    check_folder,
    file_digest,
    files_fingerprint,
    own_or_packaged,
    read_json,
    write_json,
    write_text,
)
from tripletune.models.fingerprints import model_fingerprint
from tripletune.models.run_folders import CONFIG, PREEMPTED, PREEMPTED_CODE, RESULT, is_adapter, is_run

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    class RecipeConfig(DataclassInstance, Protocol):
        """A recipe's settings, which `run_recipe` stores in its `output_dir`."""

        output_dir: str


# Options whose values are names, even if there is a folder with this name.
_NAMED = ("--config_file", "--split-name", "--split", "--task", "--system")
# The file in a recipe's folder that holds the records of its steps.
_RECORDS = "steps.json"
# The modules of the programs that steps call.
_MODULES = {"tripletune": "tripletune", "accelerate": "accelerate.commands.accelerate_cli"}


class RecipeStep(NamedTuple):
    """A step of a recipe.

    Attributes:
        title: What the step does; it identifies the step in `steps.json`.
        command: The words of `tripletune …` or `accelerate …`, as a shell reads them.
        result: The file in the recipe's folder that shows that the step is done; "" for a step that always runs.
    """

    title: str
    command: str
    result: str


class _StepRecord(NamedTuple):
    """What `steps.json` holds of a step.

    Attributes:
        digest: The digest of its last run.
        failed: Whether this run failed or was stopped.
        outdated: Whether its result was made from other settings or files, and is removed before the step runs.
    """

    digest: str
    failed: bool
    outdated: bool = False


class _StateOfSteps(NamedTuple):
    """What is known of steps before they run; the two lists have an item per step.

    Attributes:
        records: The records of earlier runs by the step's title.
        digests: The digest of each step's command and input files as they are now.
        has_result: Whether the file that shows that a step is done exists and is not outdated.
    """

    records: dict[str, _StepRecord]
    digests: list[str]
    has_result: list[bool]


def further_seeds(trainings: int) -> range:
    """The seeds of all trainings but the first, which keeps the seed of its YAML file; no file is likely to have these.

    So a finished recipe of one training can be continued with more of them.
    """
    return range(101, 100 + trainings)


def run_recipe(config: RecipeConfig, steps: Sequence[RecipeStep], dry_run: bool, overwrite: bool | None = None) -> int:
    """Run a configuration's steps in its `output_dir`, which keeps the settings.

    Args:
        dry_run: Print the commands, raise the errors that a run would begin with, and run and write nothing.
        overwrite: Whether results of other settings or input files are made again; None: the recipe has no such option.

    Returns:
        The exit code of the first failed step, or 0.
    """
    if dry_run:
        for step in steps:
            print(shlex.join(_words_of(step.command)))
    home = Path(config.output_dir)
    # A folder of another program is refused; nothing is deleted, since earlier results are continued.
    check_folder(home, (), overwrite=True, continues="config.yaml")
    state = _checked_state(steps, home, overwrite)
    if dry_run:
        return 0
    # After the check, so that refused settings don't replace those of the results.
    home.mkdir(parents=True, exist_ok=True)
    write_text(home / "config.yaml", to_yaml(config))
    return _run_from_state(steps, home, state)


def run_steps(steps: Sequence[RecipeStep], home: Path) -> int:
    """Run steps in order, note each in `steps.json`, and return the exit code of the first failed step, else 0.

    A step is skipped if its result exists in `home` and its last run has not failed. A failed step may have left a
    result that is wrong, and results of other settings would be mixed with new ones, so neither is used. All steps are
    compared before the first one runs, because it may take hours.

    Raises:
        ValueError: A digest has changed, and a result of this or a later step exists.
    """
    return _run_from_state(steps, home, _checked_state(steps, home))


def _checked_state(steps: Sequence[RecipeStep], home: Path, overwrite: bool | None = None) -> _StateOfSteps:
    """What an earlier run of the steps left in `home`; writes nothing.

    Args:
        overwrite: As in `run_recipe`. Results of the first changed step and of all later ones are then outdated,
            because they were made from its earlier result.

    Raises:
        ValueError: A digest has changed, a result of this or a later step exists, and `overwrite` is not set.
    """
    file = home / _RECORDS
    records: dict[str, _StepRecord] = {}
    if file.is_file():
        records = {title: _StepRecord(*stored) for title, stored in read_json(file).items()}
    has_result = []
    for step in steps:
        is_outdated = step.title in records and records[step.title].outdated
        has_result.append(bool(step.result) and (home / step.result).exists() and not is_outdated)
    digests = [_digest_of_command(step.command, home) for step in steps]
    changed = _first_changed(steps, records, digests)
    # Without any result, a changed step simply runs.
    if changed is not None and any(has_result[changed:]):
        if not overwrite:
            step = steps[changed]
            again = ", or --overwrite true to make these results again" if overwrite is False else ""
            raise ValueError(
                f"{home} holds results of other settings or input files of the step {step.title!r} ({step.command}): "
                f"give another output folder, or the earlier settings and files{again}"
            )
        for index in range(changed, len(steps)):
            if has_result[index]:
                records[steps[index].title] = _StepRecord(digests[index], False, outdated=True)
                has_result[index] = False
    return _StateOfSteps(records, digests, has_result)


def _run_from_state(steps: Sequence[RecipeStep], home: Path, state: _StateOfSteps) -> int:
    """Run steps as `run_steps` does, from a state that was checked; adds to its records and to `steps.json`."""
    started = time.monotonic()
    file = home / _RECORDS
    records, digests, has_result = state
    for index, step in enumerate(steps):
        print(f"\n[{index + 1}/{len(steps)} · {minutes_since(started)}] {step.title}", flush=True)
        record = records.get(step.title)
        has_failed = record is not None and record.failed
        if record is not None and record.outdated:
            # Only now, so that the results of later steps are still there if this one fails.
            _remove_result(home, step)
        # A step that is killed while it runs counts neither as failed nor as done: its result decides.
        records[step.title] = _StepRecord(digests[index], has_failed)
        write_json(file, records)
        status = run_command(step.command, done=has_result[index] and not has_failed)
        records[step.title] = _StepRecord(digests[index], status != 0)
        write_json(file, records)
        if status:
            return PREEMPTED_CODE if _was_preempted(home / step.result) else status
    return 0


def _first_changed(
    steps: Sequence[RecipeStep], records: Mapping[str, _StepRecord], digests: Sequence[str]
) -> int | None:
    """The position of the first step whose command or input files have changed since its last run; None if none has."""
    for index, step in enumerate(steps):
        record = records.get(step.title)
        if record is not None and record.digest != digests[index]:
            return index
    return None


def _remove_result(home: Path, step: RecipeStep) -> None:
    """Remove the folder in `home` that holds a step's result, or the file if it is not in a folder."""
    place = home / Path(step.result).parts[0]
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def _was_preempted(result: Path) -> bool:
    """Whether a signal stopped the training that makes this file; its launcher turns the exit code into 1."""
    run, is_run_file, _ = str(result).partition(f"/{RESULT}")
    return bool(is_run_file) and (Path(run) / PREEMPTED).is_file()


def run_command(command: str, done: bool = False) -> int:
    """Show a command as a user would type it, run it unless it is done, and return its exit code."""
    words = _words_of(command)
    print(f"  $ {shlex.join(words)}", flush=True)
    if done:
        print("  done before", flush=True)
        return 0
    # Run the programs of this Python environment, even if it is not activated.
    return subprocess.run([sys.executable, "-m", _MODULES[words[0]], *words[1:]], check=False).returncode


def _words_of(command: str) -> list[str]:
    """The words of a command; files of `recipes/` that the working folder lacks are those of the installed package.

    Commands are written as a user types them in a clone; an installed package is started from any folder.
    """
    return [str(own_or_packaged(word)) for word in shlex.split(command)]


def minutes_since(started: float) -> str:
    """Minutes and seconds since a time of `time.monotonic`."""
    minutes, seconds = divmod(int(time.monotonic() - started), 60)
    return f"{minutes}:{seconds:02d}"


def _digest_of_command(command: str, home: Path) -> str:
    """A digest of a command and of the files and folders outside `home` that it reads.

    Files inside of `home` are results of earlier steps, which have digests of their own. A word is taken for a file if
    there is one; names of tasks and the like are left out, since a folder may happen to have the same name.
    """
    words = _words_of(command)
    contents = []
    # Each word with the one before it, which may be its option; the first two are the program and its command.
    for option, word in pairwise(words[2:]):
        place = Path(word)
        is_inside = home.resolve() in (place.resolve(), *place.resolve().parents)
        if option not in _NAMED and not is_inside and os.path.exists(word):
            contents.append(_fingerprint_of_place(place))
    return hashlib.blake2b(repr([words, contents]).encode(), digest_size=8).hexdigest()


def _fingerprint_of_place(place: Path) -> str:
    """A fingerprint of a file, a model's folder, or a folder of files.

    A model's covers its base model too, which may lie in another folder.
    """
    if place.is_file():
        return file_digest(place)
    if is_run(place) or is_adapter(place) or (place / CONFIG).is_file():
        return model_fingerprint(place)
    return files_fingerprint(place, "*")
