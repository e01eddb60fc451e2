"""Settings that the installed PEFT, transformers and trackers would refuse, found before anything is loaded.

Tested in `tests/train/test_config.py`.
"""

from __future__ import annotations

import inspect
import os
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal

from tripletune.core import libraries
from tripletune.core.config import elsewhere
from tripletune.core.options import nearest, not_one_of, shown
from tripletune.models.adapters import NO_ALORA
from tripletune.train.settings import RunConfig

# Fields of PEFT's LoraConfig, training arguments, and arguments of a schedule that a run sets itself or has no use for.
_OWN_LORA_FIELDS = (
    "r", "lora_alpha", "lora_dropout", "target_modules", "base_model_name_or_path", "revision", "task_type",
    "peft_type", "peft_version", "auto_mapping", "inference_mode",
)  # fmt: skip
_OWN_ARGUMENTS = ("gradient_checkpointing", "train_sampling_strategy")
_OWN_SCHEDULE_ARGUMENTS = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")
# Optimisers that come with bitsandbytes.
_BITSANDBYTES = re.compile("bnb|paged|lion|ademamix|^adamw_8bit")
# W&B sends nothing in these modes, so it needs no key.
_OFFLINE = ("offline", "disabled", "dryrun")


def library_misfits(config: RunConfig) -> list[str]:
    """Settings that the installed PEFT and transformers would refuse, found before a model is loaded."""
    libraries.check_use("settings of training")
    return [
        *_lora_misfits(config),
        *_argument_misfits(config),
        *_optimizer_misfits(config.train.optimizer),
        *_schedule_misfits(config),
        *_tracker_misfits(config.report_to),
    ]


def _lora_misfits(config: RunConfig) -> list[str]:
    """Fields of `model.lora_options` that PEFT's `LoraConfig` lacks, or whose values it would refuse."""
    from peft import LoraConfig

    hints = typing.get_type_hints(LoraConfig)
    # Other initialisations need data or random numbers: a checkpoint would be loaded onto another base.
    hints["init_lora_weights"] = bool | Literal["gaussian", "olora", "orthogonal", "pissa"]
    problems = _refused_arguments(
        "model.lora_options", config.model.lora_options, hints, _OWN_LORA_FIELDS, type(config)
    )
    if config.model.lora_options.get("alora_invocation_tokens"):
        problems.append(f"model.lora_options: leave out alora_invocation_tokens, which {NO_ALORA}")
    return problems


def _argument_misfits(config: RunConfig) -> list[str]:
    """Names in `train.arguments` that transformers lacks, that a run sets itself, or that do not fit this engine.

    A name that the run sets itself is refused and not overridden, so that a setting has one place.
    """
    from transformers import TrainingArguments

    from tripletune.train.arguments import broken_promises, own_arguments

    arguments = config.train.arguments
    hints = typing.get_type_hints(TrainingArguments)
    # `push_to_hub` of ours pushes the result, not checkpoints.
    hints = {name: hint for name, hint in hints.items() if not name.startswith("hub_")}
    problems = _refused_arguments(
        "train.arguments", arguments, hints, (*own_arguments(config), *_OWN_ARGUMENTS), type(config)
    )
    return problems + broken_promises(arguments)


def _optimizer_misfits(optimizer: str | None) -> list[str]:
    """The optimiser, if transformers does not know it or its package is missing.

    transformers imports bitsandbytes only when it makes the optimiser, after the model was loaded and tokenised.
    """
    if optimizer is None:
        return []
    names = [member.value for member in libraries.take("transformers.training_args:OptimizerNames")]
    if optimizer not in names:
        return [not_one_of("train.optimizer", optimizer, names)]
    if _BITSANDBYTES.search(optimizer) and not find_spec("bitsandbytes"):
        return [f"train.optimizer {optimizer} needs bitsandbytes: pip install 'tripletune[qlora]'"]
    return []


def _schedule_misfits(config: RunConfig) -> list[str]:
    """The schedule, if transformers does not know it, and arguments that it lacks or needs.

    The arguments that a schedule needs stand only in the signature of the function that makes it.
    """
    from transformers import SchedulerType

    name = config.train.scheduler
    given = config.train.scheduler_arguments
    names = [member.value for member in SchedulerType]
    if name not in names:
        return [not_one_of("train.scheduler", name, names)]
    parameters = inspect.signature(_maker_of_schedule(name), eval_str=True).parameters
    hints: dict[str, Any] = {}
    missing = []
    for argument, parameter in parameters.items():
        hints[argument] = Any if parameter.annotation is parameter.empty else parameter.annotation
        is_needed = parameter.default is parameter.empty
        if is_needed and argument not in _OWN_SCHEDULE_ARGUMENTS and argument not in given:
            missing.append(argument)
    problems = _refused_arguments("train.scheduler_arguments", given, hints, _OWN_SCHEDULE_ARGUMENTS, type(config))
    for argument in missing:
        problems.append(f"train.scheduler {name} needs {argument} in train.scheduler_arguments")
    return problems


def _maker_of_schedule(name: str) -> Callable[..., Any]:
    """The class or function that makes a schedule of transformers."""
    from torch.optim.lr_scheduler import ReduceLROnPlateau
    from transformers import GreedyLR, SchedulerType

    # These two follow the loss, and transformers makes them without the table of functions.
    if name == "reduce_lr_on_plateau":
        return ReduceLROnPlateau
    if name == "greedy":
        return GreedyLR  # type: ignore[no-any-return]
    makers = libraries.take("transformers.optimization:TYPE_TO_SCHEDULER_FUNCTION")
    return makers[SchedulerType(name)]  # type: ignore[no-any-return]


def _tracker_misfits(report_to: Sequence[str]) -> list[str]:
    """Names of trackers that transformers does not know, which it would refuse only when the trainer is made."""
    names = ["none", *libraries.take("transformers.integrations:INTEGRATION_TO_CALLBACK")]
    return [not_one_of("report_to", name, names) for name in report_to if name not in names]


def check_tracking(report_to: Sequence[str]) -> None:
    """Make sure that a run can report to its trackers.

    transformers makes their callbacks only when the trainer is made, and W&B asks for its key when training begins.
    """
    callbacks = libraries.take("transformers.integrations:INTEGRATION_TO_CALLBACK")
    for name in set(report_to) - {"none", "wandb"}:
        try:
            callbacks[name]()
        except (RuntimeError, ValueError, ImportError) as error:
            # The error says what is missing, and ends with a full stop.
            raise ValueError(f"report_to {name}: {error} Or leave {name} out.") from None
    if "wandb" not in report_to or os.environ.get("WANDB_MODE") in _OFFLINE:
        return
    import wandb

    try:
        # It looks for a key, and asks for one on a terminal.
        wandb.login()
    except wandb.errors.UsageError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"report_to wandb: {reason}. To log on this machine alone, set WANDB_MODE=offline; to train without W&B, "
            "set --report_to none"
        ) from None


def _refused_arguments(
    name: str, arguments: Mapping[str, Any], hints: Mapping[str, Any], taken: Collection[str], config_type: type
) -> list[str]:
    """Return a problem for each argument that a library would reject: unknown names and values of a wrong type.

    Libraries check their arguments late, or not at all, and report one at a time.

    Args:
        name: The setting that holds the arguments, for messages.
        arguments: What the user has set.
        hints: The types of the library's arguments.
        taken: Arguments that have separate settings.
        config_type: The class of the configuration, whose settings a misplaced name may mean; see `elsewhere`.
    """
    from huggingface_hub.dataclasses import validate_typed_dict

    new_schema: Any = typing.TypedDict  # as Any, because mypy reads only schemas with literal names
    messages = []
    allowed = [argument for argument in hints if argument not in taken]
    for key, value in arguments.items():
        if key not in allowed:
            nearest_name = nearest(key, allowed) or f"; known: {', '.join(allowed) or 'none'}"
            advice = elsewhere(config_type, key) or nearest_name
            messages.append(f"{name}: unknown setting {key!r}{advice}")
            continue
        hint = hints[key]
        # YAML reads 1 as a whole number, also where the library wants 1.0.
        takes_only_floats = {float, int} & {hint, *typing.get_args(hint)} == {float}
        if type(value) is int and takes_only_floats:
            value = float(value)
        try:
            validate_typed_dict(new_schema("one_field", {key: hint}), {key: value})
        except Exception:
            wanted = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            messages.append(f"{name}: {key} {shown(arguments[key])} is not {wanted}")
    return messages
