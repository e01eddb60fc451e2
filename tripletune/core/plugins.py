"""Plug-ins: every module in the folders of backends, readers, systems and tasks, and entry points of other packages."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import re
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType

from tripletune.core.options import nearest


def names_in(package: str) -> list[str]:
    """Names of a package's public modules and entry points; no module of the package is imported."""
    modules = pkgutil.iter_modules(importlib.import_module(package).__path__)
    own = {module.name for module in modules if not module.name.startswith("_")}
    return sorted(own | _installed(package).keys())


def about_modules(package: str) -> dict[str, str]:
    """The first sentence of each public module's docstring by name, read without importing the module.

    A module of another package is named with its package.
    """
    folder = Path(str(importlib.import_module(package).__file__)).parent
    about = {}
    for name in names_in(package):
        files = [path for path in (folder / f"{name}.py", folder / name / "__init__.py") if path.is_file()]
        if files:
            text = ast.get_docstring(ast.parse(files[0].read_text(encoding="utf-8"))) or ""
            about[name] = re.split(r"\.\s", text.partition("\n\n")[0].replace("\n", " "), maxsplit=1)[0].rstrip(".")
        else:
            owner = _installed(package)[name].dist
            about[name] = f"of the package {owner.name}" if owner else "of another package"
    return about


@cache
def _installed(package: str) -> dict[str, metadata.EntryPoint]:
    """The modules that other installed packages add to one of our packages, by name."""
    return {entry.name: entry for entry in metadata.entry_points(group=package)}


def load_from(package: str, name: str, kind: str) -> ModuleType:
    """Import a module of a package by name; a module in the package is preferred to an entry point.

    Another package may fail to import in any way, so every error of an entry point is reported with the package's name.

    Args:
        kind: What the module is, for messages, such as "training task".
    """
    names = names_in(package)
    if name not in names:
        raise ValueError(f"{kind} {name!r} is not one of {', '.join(names)}{nearest(name, names)}")
    entry = _installed(package).get(name)
    if entry is None or importlib.util.find_spec(f"{package}.{name}"):
        return importlib.import_module(f"{package}.{name}")
    try:
        return entry.load()
    except Exception as error:
        owner = entry.dist.name if entry.dist else "another package"
        raise ValueError(f"{kind} {name!r} can't be loaded ({entry.value} of the package {owner}): {error}") from error
