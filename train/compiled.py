"""`torch.compile` of a language model's layers, one by one.

All layers of a stack have the same code, so one is compiled and the others use what came of it: seconds in the place of
minutes for a whole model, with nearly the same gain. What is between and around the layers stays as it is, so that
graphs, embeddings and the loss, whose shapes change with every batch, are never compiled again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils.other import is_repeated_blocks
from torch import nn


def compile_layers(model: nn.Module, backend: str = "inductor") -> int:
    """Compile the layers of a language model in place; names and saved weights do not change.

    Args:
        model: Any model of transformers, with or without PEFT adapter; of a Graph-LLM its language model.
        backend: As in `torch.compile`.

    Returns:
        How many layers were found.

    Raises:
        ValueError: the model has no stack of equal layers, or kernels for a CPU can't be compiled here.
    """
    compilers = os.environ.get("CXX", "g++"), "clang++"
    if backend == "inductor" and not torch.cuda.is_available() and not any(map(shutil.which, compilers)):
        raise ValueError(
            "train.torch_compile: there is no C++ compiler (g++, clang++ or $CXX); install one, or leave the option out"
        )
    layers = list(_layers(model))
    if not layers:
        raise ValueError(f"train.torch_compile: {type(model).__name__} has no stack of equal layers to compile")
    for layer in layers:
        # Lengths change with every batch: sizes are left open from the start, not after a second compilation.
        layer.compile(backend=backend, dynamic=True)
    return len(layers)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of the outermost stacks; what is inside a layer is part of it."""
    if is_repeated_blocks(module):
        yield from module.children()
        return
    for child in module.children():
        yield from _layers(child)


@contextmanager
def as_written(enabled: bool = True) -> Iterator[None]:
    """Run compiled layers uncompiled: for generation, whose every step has another shape.

    Args:
        enabled: Whether to; so that a caller need not ask.
    """
    if not enabled:
        yield
        return
    stance: Any = torch.compiler.set_stance("force_eager")
    with stance:
        yield
