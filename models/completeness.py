"""Checks while a model is loaded: missing weights, weights that are not finite, and errors said in one line.

Tested in `tests/models/test_loading.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tripletune.core import libraries
from tripletune.models.run_folders import check_finite

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What is being loaded, for messages.
Part = Literal["weights", "tokenizer", "adapter", "configuration", "encoder", "Graph-LLM"]
# Weights of another size are then part of the loading information, so that `checked_model` reports all faults in one
# error.
SAY_WHAT_IS_MISSING: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}


def checked_model(
    loaded: tuple[PreTrainedModel, dict[str, Any]], spec: str | Path, may_be_new: re.Pattern[str] | None = None
) -> PreTrainedModel:
    """Return the model that `from_pretrained` loaded, if all its weights were found and are finite.

    Transformers fills missing weights at random, and only warns.

    Args:
        loaded: Model and loading information, as `from_pretrained(…, **SAY_WHAT_IS_MISSING)` returns them.
        spec: The model's spec, for messages.
        may_be_new: Names of weights that may be missing.

    Raises:
        ValueError: Weights are missing, of another size or not finite.
    """
    model, info = loaded
    # Name of each wrong weight -> the two shapes, if it is not missing.
    wrong: dict[str, str] = {}
    for name in info["missing_keys"]:
        if may_be_new is None or not may_be_new.search(name):
            wrong[name] = ""
    for name, stored_shape, model_shape in info["mismatched_keys"]:
        wrong[name] = f" ({list(stored_shape)} instead of {list(model_shape)})"
    if wrong:
        shown = ", ".join(f"{name}{wrong[name]}" for name in sorted(wrong)[:3])
        unused = sorted(info["unexpected_keys"])
        if unused:
            shown += f"; {len(unused)} weights are not used, such as {', '.join(unused[:3])}"
        raise ValueError(
            f"model {spec}: {len(wrong)} weights are missing or have another size: {shown}. Copy the folder "
            "again, or use the weights that belong to its config.json"
        )
    check_finite(model.named_parameters(), f"model {spec}")
    return model


@contextmanager
def loading_errors_explained(spec: str | Path, part: Part) -> Iterator[None]:
    """Turn errors of loading a part of a model into one line that says what to do.

    An error without explanation here, such as an interrupted download or too little memory, is raised as it is.
    """
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        explanation = _explain_loading_error(error, reason, spec, part)
        if explanation:
            raise ValueError(f"model {spec}: {explanation}") from error
        # A Graph-LLM's own errors name the file already.
        if isinstance(error, OSError) and part != "Graph-LLM":
            # The path of a folder that does not exist may look like a name of the Hub.
            searched = "" if Path(spec).is_dir() else f"there is no folder {spec}, and on the Hub: "
            raise FileNotFoundError(f"model {spec}: the {part} can't be loaded: {searched}{reason}") from None
        raise


def _explain_loading_error(error: Exception, reason: str, spec: str | Path, part: Part) -> str:
    """What is wrong with the model's files, and what to do; "" if the error does not tell.

    Libraries report most faults with general types such as `ValueError` and `OSError`, so the words of a message are
    looked at first, and its type only if no words are known. So the order matters: a message about code or pickles may
    come as an `OSError`, which is otherwise passed on with its own text.
    """
    name = type(error).__name__
    if name == "SafetensorError":
        return f"the weights cannot be read ({reason}): the file is cut off or damaged; copy the file again"
    if "trust_remote_code" in reason:
        text = (
            "the model comes with Python code (auto_map in its configuration, or modules.json), which is never run "
            "here; use a model that transformers supports"
        )
        if part == "encoder":
            text += " (for a retrieval encoder, --set trust_remote_code=yes runs the code)"
        return text
    if part in ("weights", "encoder") and "model.safetensors" in reason:
        return (
            "the model has no safetensors weights, and pickles (.bin, .pt) are not loaded, since they can run "
            f"code; convert them with `tripletune checkpoints convert {spec} --output FOLDER`, or name a revision "
            "that has model.safetensors (owner/name@revision)"
        )
    if isinstance(error, OSError) and part != "Graph-LLM":
        return ""
    if isinstance(error, (TypeError, AttributeError)):
        return (
            f"the {part} can't be built from the JSON files ({reason}): a value is missing or has the wrong type; "
            f"copy the folder again{libraries.untested('transformers')}"
        )
    # torch and PEFT report wrong names and shapes with these errors; the last line names them.
    is_misfit = isinstance(error, (RuntimeError, KeyError, UserWarning))
    if part == "adapter" and isinstance(error, ValueError):
        is_misfit = True
    # Also a `RuntimeError`, but of the device.
    is_of_device = name in ("OutOfMemoryError", "AcceleratorError")
    if is_misfit and not is_of_device:
        last_line = str(error).strip().splitlines()[-1].strip()
        return (
            f"the files of the {part} do not match ({last_line}): do they belong to another base model, or to another "
            f"version of this project?{libraries.untested('transformers')}"
        )
    return ""
