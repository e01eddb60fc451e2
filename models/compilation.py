"""Compile the layers of a language model for training (`train.torch_compile`).

Tested in `tests/train/test_engine.py`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import torch
from torch import nn


def compile_layers(model: nn.Module, backend: str = "inductor") -> int:
    """Compile each layer of a language model in place, and return their number; names and weights do not change.

    All layers of a stack share one compiled code, so compiling takes seconds instead of minutes. accelerate's
    `compile_regions` would also compile embeddings and output layer, whose shapes change with every batch.
    """
    compilers = (os.environ.get("CXX", "g++"), "clang++")
    has_compiler = any(shutil.which(compiler) for compiler in compilers)
    if backend == "inductor" and not torch.cuda.is_available() and not has_compiler:
        raise ValueError(
            "train.torch_compile needs a C++ compiler (g++, clang++ or $CXX): install one, or leave torch_compile out"
        )
    layers = list(_layers_of_stacks(model))
    if not layers:
        raise ValueError(f"train.torch_compile: {type(model).__name__} has no stack of equal layers to compile")
    for layer in layers:
        # Lengths change with every batch, so sizes are dynamic from the start, not only after a second compilation.
        layer.compile(backend=backend, dynamic=True)
    return len(layers)


def _layers_of_stacks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of the outermost stacks of equal layers.

    A layer may hold stacks itself, such as the experts of a mixture, which are compiled with it.
    """
    if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1:
        yield from module
        return
    for child in module.children():
        yield from _layers_of_stacks(child)
