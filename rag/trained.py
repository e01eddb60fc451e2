"""The options of a loop as its Graph-LLM was trained, and the options of a run that differ from them.

A model knows only the prompts of its training, so the loop repeats their settings unless an option says otherwise. An
option that differs is named in the log, in `settings.json` and on the page of results.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tripletune.core.files import read_json
from tripletune.core.options import CheckedOptions
from tripletune.models.run_folders import PROCESSOR, trained_folder
from tripletune.models.specs import resolve
from tripletune.rag.systems import LoopOptions, System, make_options

if TYPE_CHECKING:
    from tripletune.rag.system_options import SystemOptions

logger = logging.getLogger(__name__)
# Options that must equal those of training; a model that was trained to search N times has `stop` and `max_rounds`.
_EQUAL = ("evidence", "first_query", "stop", "max_rounds")
# Options that may not be smaller than in training, since replies would be cut.
_AT_LEAST = ("max_plan_tokens", "max_answer_tokens")
# What a step shows: passages, and at most as many triples. Where the steps of the training have one passage each, as
# the paper's, the loop shows the paper's five, and the difference is named.
_SHOWN = ("top_k", "triples_per_step")


def options_of_training(spec: str) -> dict[str, Any]:
    """The options of `LoopOptions` that a Graph-LLM's training recorded in its `processor_config.json`.

    A model of an earlier version recorded only its evidence and whether it has a graph token. A model that is not
    there has no options here, and the error when it is opened says so.
    """
    try:
        folder = Path(resolve(spec))
        if folder.is_dir() and not (folder / PROCESSOR).is_file():
            folder = trained_folder(folder)
        settings = read_json(folder / PROCESSOR)
    except (OSError, ValueError):
        return {}
    recorded = {name: settings[name] for name in ("evidence",) if name in settings}
    if "use_graph" in settings:
        recorded["graph"] = settings["use_graph"]
    names = {item.name for item in fields(LoopOptions)}
    for name, value in settings.get("loop", {}).items():
        if name in names:
            recorded[name] = value
    return recorded


def loop_options(system: System, options: SystemOptions, **task_values: Any) -> CheckedOptions:
    """The options of a system: those of `--set`, then those of the task, then those of training, then the paper's.

    Args:
        task_values: Options by name that an evaluation's task sets, as `eval.suites.questions` passes them on;
            `make_options` refuses a name that the system does not have.

    Returns:
        An object of the class `system.options`.
    """
    values: dict[str, Any] = {}
    spec = options.model or options.planner_model
    if spec and system.options is LoopOptions and not options.untrained:
        recorded = options_of_training(spec)
        names: tuple[str, ...] = (*_EQUAL, *_AT_LEAST)
        if recorded.get("top_k", 1) > 1:
            names += _SHOWN
        for name in names:
            if name in recorded:
                values[name] = recorded[name]
    values.update(task_values)
    return make_options(system, options.set, **values)


def overridden_options(system: System, options: SystemOptions, loop: CheckedOptions) -> dict[str, str]:
    """The options of a run that differ from the training of one of its Graph-LLMs, by name, as "OWN, trained with X".

    Args:
        loop: The options of the system.
    """
    if system.options is not LoopOptions or options.untrained:
        return {}
    differing: dict[str, str] = {}
    for spec in (options.planner_model, options.model):
        if not spec:
            continue
        recorded = options_of_training(spec)
        for name, value in recorded.items():
            own = getattr(loop, name)
            if _is_unlike_training(name, own, recorded):
                differing[name] = f"{_as_option_text(own)}, trained with {_as_option_text(value)}"
    return differing


def _is_unlike_training(name: str, own: Any, recorded: Mapping[str, Any]) -> bool:
    """Whether an option makes a model read or write what it was not trained on.

    Args:
        own: The option's value in the run.
        recorded: The options of the training, by name, among them `name`.
    """
    trained = recorded[name]
    if name in _AT_LEAST:
        return bool(own < trained)
    if name == "triples_per_step":
        # More triples than of one passage follow from `top_k`, which is named.
        return bool(recorded.get("top_k", 1) > 1 if own is None else own > trained)
    if name == "graph":
        # A model without a graph token has none with the option either.
        return bool(trained and not own)
    return bool(own != trained)


def warn_of_overrides(differing: dict[str, str]) -> None:
    """Log the options that differ from training: a warning, unless replies are only cut earlier."""
    for name, values in differing.items():
        if name in _AT_LEAST:
            logger.info("%s %s: longer replies are cut", name, values)
        else:
            logger.warning("%s %s: the model reads prompts that it did not learn; run it as trained", name, values)


def _as_option_text(value: object) -> str:
    """A value as `--set` takes it, so that a warning can be copied."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
