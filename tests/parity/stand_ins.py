"""Small modules in place of those that the authors' code imports but that a comparison does not use."""

import importlib.util
import sys
import zlib
from collections.abc import Iterable
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np


class Absent:
    """Stands for any name of a module that is not installed; an error if it is used."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("this name is a stand-in: the comparison must not reach it")


def _any_name(name: str) -> type[Absent]:
    """What a module gives for a name that it lacks; names of Python itself stay missing, as imports look for them."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent


def stand_in(*names: str, **values: Any) -> None:
    """Put modules in `sys.modules` whose names are all `Absent`, apart from these values; installed ones stay."""
    for name in names:
        is_installed = "." not in name and name not in sys.modules and importlib.util.find_spec(name) is not None
        if not is_installed:
            replace(name, **values)


def replace(name: str, **values: Any) -> None:
    """As `stand_in`, also for a module that is installed or lies in the clone."""
    module = ModuleType(name)
    module.__path__ = []
    module.__all__ = list(values)  # type: ignore[attr-defined]
    module.__getattr__ = _any_name  # type: ignore[method-assign]
    vars(module).update(values)
    sys.modules[name] = module


def package(name: str, folder: str) -> None:
    """Make a folder a package without running its `__init__.py`."""
    module = ModuleType(name)
    module.__path__ = [folder]
    sys.modules[name] = module


def vectors_of(texts: Iterable[str], width: int) -> np.ndarray:
    """Made-up vectors (texts, `width`): those of a text's words, and a little of its own, so that no two are alike."""
    rows = []
    for text in texts:
        row = 0.1 * _direction(text, width)
        for word in text.lower().split():
            row += _direction_of_word(word.strip(".,?!"), width)
        rows.append(row / np.linalg.norm(row))
    return np.array(rows, dtype=np.float32).reshape(-1, width)


def _direction(text: str, width: int) -> np.ndarray:
    """A random vector (`width`) that depends only on the text."""
    return np.random.default_rng(zlib.crc32(text.encode())).standard_normal(width)


_direction_of_word = lru_cache(maxsize=None)(_direction)


class SentenceVectors:
    """Has the methods of a sentence encoder that the authors' code calls."""

    width = 32

    def __init__(self, *_: Any) -> None:
        pass

    def get_sentence_embedding_dimension(self) -> int:
        """The length of a vector."""
        return self.width

    def encode(self, texts: list[str]) -> np.ndarray:
        """Vectors (texts, `width`) of texts."""
        return vectors_of(texts, self.width)
