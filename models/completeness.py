"""Checks while a model is loaded: missing weights, weights that are not finite, and errors said in one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tripletune.core import libraries
from tripletune.models.run_folders import (
    check_finite,
)

if TYPE_CHECKING:
    pass

SAY_WHAT_IS_MISSING: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}


def complete(loaded: tuple[Any, Any], spec: str | Path, may_be_new: re.Pattern[str] | None = None) -> Any:
    """Check that `from_pretrained(…, **SAY_WHAT_IS_MISSING)` found all weights, all finite, and return the model.

    Transformers fills missing weights at random, and only warns.
    """
    model, info = loaded
    wrong = {name: "" for name in info["missing_keys"] if may_be_new is None or not may_be_new.search(name)}
    wrong |= {name: f" ({list(there)} instead of {list(here)})" for name, there, here in info["mismatched_keys"]}
    if wrong:
        shown = ", ".join(f"{name}{wrong[name]}" for name in sorted(wrong)[:3])
        others = sorted(info["unexpected_keys"])
        also = f"; {len(others)} weights are not used, such as {', '.join(others[:3])}" if others else ""
        raise ValueError(
            f"model {spec}: {len(wrong)} weights are missing or have another size: {shown}{also}. Copy the folder "
            "again, or use the weights that belong to its config.json"
        )
    check_finite(model.named_parameters(), f"model {spec}")
    return model


@contextmanager
def telling(spec: str | Path, part: str) -> Iterator[None]:
    """Turn errors of loading a part of a model ("weights", "tokenizer", "adapter", …) into one line."""
    try:
        yield
    except Exception as error:
        reason, name = " ".join(str(error).split()), type(error).__name__
        # torch and PEFT report wrong names and shapes with these errors; the last line names them.
        misfit = (RuntimeError, KeyError, UserWarning, *([ValueError] if part == "adapter" else []))
        if name == "SafetensorError":
            text = f"the weights cannot be read ({reason}): the file is cut off or damaged; copy the file again"
        elif "trust_remote_code" in reason:
            text = (
                "the model comes with Python code (auto_map in its configuration, or modules.json), which is never run "
                "here; use a model that transformers supports"
            )
            text += " (for a retrieval encoder, --set trust_remote_code=yes runs the code)" * (part == "encoder")
        elif part in ("weights", "encoder") and "model.safetensors" in reason:
            text = (
                "the model has no safetensors weights, and pickles (.bin, .pt) are not loaded, since they can run "
                f"code; convert them with `tripletune checkpoints convert {spec} --output FOLDER`, or name a revision "
                "that has model.safetensors (owner/name@revision)"
            )
        elif isinstance(error, OSError) and part != "Graph-LLM":
            raise FileNotFoundError(f"model {spec}: the {part} can't be loaded: {reason}") from None
        elif isinstance(error, (TypeError, AttributeError)):
            text = (
                f"the {part} can't be built from the JSON files ({reason}): a value is missing or has the wrong type; "
                f"copy the folder again{libraries.untested('transformers')}"
            )
        elif isinstance(error, misfit) and name not in ("OutOfMemoryError", "AcceleratorError"):
            last = str(error).strip().splitlines()[-1].strip()
            text = (
                f"the files of the {part} do not match ({last}): do they belong to another base model, or to another "
                f"version of this project?{libraries.untested('transformers')}"
            )
        else:
            raise
        raise ValueError(f"model {spec}: {text}") from error
