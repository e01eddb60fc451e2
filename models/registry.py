"""Things found by their place: a module in a package's folder is one more backend, reader, system or task."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from tripletune.models.options import nearest


def names_in(package: str) -> list[str]:
    """Names of the modules in a package whose name has no underscore in front; nothing but the package is imported."""
    found = pkgutil.iter_modules(importlib.import_module(package).__path__)
    return sorted(module.name for module in found if not module.name.startswith("_"))


def load_from(package: str, name: str, kind: str) -> ModuleType:
    """The module of that name in a package.

    Args:
        package: Import name of the package.
        name: The module's name in it.
        kind: What it is, for the message: "benchmark reader".

    Raises:
        ValueError: there is none; the message names the nearest and all others.
    """
    known = names_in(package)
    if name not in known:
        raise ValueError(f"{kind} {name!r} is not one of {', '.join(known)}{nearest(name, known)}")
    return importlib.import_module(f"{package}.{name}")
