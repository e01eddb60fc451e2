"""Plug-ins: every module in the folders of backends, readers, systems and tasks, and entry points of other packages.

What a plug-in consists of (`code_digests`) is part of a run's settings, so that no run continues with other code.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
import pkgutil
import re
import sys
import tokenize
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType

from tripletune.core.files import file_digest
from tripletune.core.options import nearest

# Endings of files that hold prompts and settings of a plug-in.
_TEXTS = frozenset({".md", ".txt", ".prompt", ".j2", ".jinja", ".jinja2", ".json", ".toml", ".yaml", ".yml"})
# Longer constants of a module are no names of files.
_LONGEST_NAME = 200


def names_in(package: str) -> list[str]:
    """Names of a package's public modules and entry points; no module of the package is imported."""
    modules = pkgutil.iter_modules(importlib.import_module(package).__path__)
    own = {module.name for module in modules if not module.name.startswith("_")}
    return sorted(own | _entry_points_of(package).keys())


def about_modules(package: str) -> dict[str, str]:
    """The first sentence of each public module's docstring by name, read without importing the module.

    Importing all of them would load every optional library. A module of another package is named with its package.
    """
    folder = Path(str(importlib.import_module(package).__file__)).parent
    about = {}
    for name in names_in(package):
        files = [path for path in (folder / f"{name}.py", folder / name / "__init__.py") if path.is_file()]
        if files:
            text = _docstring_of(files[0])
            about[name] = re.split(r"\.\s", text.partition("\n\n")[0].replace("\n", " "), maxsplit=1)[0].rstrip(".")
        else:
            owner = _entry_points_of(package)[name].dist
            about[name] = f"of the package {owner.name}" if owner else "of another package"
    return about


def _docstring_of(path: Path) -> str:
    """The docstring of a module, which is its first statement; "" if it has none. The rest of the file is not read."""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.STRING:
                return inspect.cleandoc(ast.literal_eval(token.string))
            if token.type not in (tokenize.COMMENT, tokenize.NL):
                break
    return ""


def _entry_points_of(package: str) -> dict[str, metadata.EntryPoint]:
    """The modules that other installed packages add to one of our packages, by name."""
    return _added_modules().get(package, {})


@cache
def _added_modules() -> dict[str, dict[str, metadata.EntryPoint]]:
    """The modules that other installed packages add, by our package, then by name.

    They are read once for all packages, since this reads a file of every installed package.
    """
    added: dict[str, dict[str, metadata.EntryPoint]] = {}
    entry_points = metadata.entry_points()
    for group in entry_points.groups:
        if group.startswith("tripletune."):
            added[group] = {entry.name: entry for entry in entry_points.select(group=group)}
    return added


def load_from(package: str, name: str, kind: str) -> ModuleType:
    """Import a module of a package by name; a module in the package is preferred to an entry point.

    Another package may fail to import in any way, so every error of an entry point is reported with the package's name.

    Args:
        kind: What the module is, for messages, such as "training task".
    """
    names = names_in(package)
    if name not in names:
        raise ValueError(f"{kind} {name!r} is not one of {', '.join(names)}{nearest(name, names)}")
    entry = entry_point(package, name)
    if entry is None:
        return importlib.import_module(f"{package}.{name}")
    try:
        return entry.load()
    except Exception as error:
        owner = entry.dist.name if entry.dist else "another package"
        reason = f"{type(error).__name__}: {error}"
        if not isinstance(error, ModuleNotFoundError):
            reason += f" ({error_place(error)})"
        raise ValueError(f"{kind} {name!r} can't be loaded ({entry.value} of the package {owner}): {reason}") from error


def entry_point(package: str, name: str) -> metadata.EntryPoint | None:
    """The entry point of another package that adds `name`; None for a module of ours, which is preferred."""
    entry = _entry_points_of(package).get(name)
    if entry is None or importlib.util.find_spec(f"{package}.{name}"):
        return None
    return entry


def error_place(error: BaseException) -> str:
    """File and line where an error was raised, such as "mine/loop.py, line 12"; for a syntax error, where it stands."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "place unknown"
    path = Path(frames[-1].filename)
    return f"{path.parent.name}/{path.name}, line {frames[-1].lineno}"


def code_digests(package: str, name: str, prompts: Path | None = None) -> dict[str, str]:
    """SHA-256 of all files that a plug-in consists of, by their paths from the folder in which Python finds it.

    These are its module, the modules that it imports from its own package or from code that no installed package owns,
    the files that these modules name in their texts, and the texts (prompts) in its package.

    Args:
        prompts: A folder of ours, whose prompts count if a module names them.
    """
    entry = entry_point(package, name)
    module = entry.module if entry else f"{package}.{name}"
    files: dict[str, Path] = {}
    for own_name, path in _own_modules(module).items():
        is_package = path.name == "__init__.py"
        # The folder in which Python finds the module: one above it for each part of its name.
        root = path.parents[own_name.count(".") + is_package]
        texts = _short_texts(path)
        used = [path, *_named_files(path.parent, texts)]
        if is_package:
            used += text_files(path.parent)
        for file in used:
            shown = file.relative_to(root) if file.is_relative_to(root) else file
            files[shown.as_posix()] = file
        if prompts is not None:
            for text in texts:
                prompt = prompts / f"{text}.md"
                if prompt.is_file():
                    files[f"prompts/{prompt.name}"] = prompt
    return {shown: file_digest(files[shown]) for shown in sorted(files)}


def code_of_class(package: str, kind: type) -> str:
    """One digest of the plug-in that defines a class, if another package adds it; "" for a class of ours.

    A run with a class of another package must not continue after its code has changed, which no version need tell.
    """
    home = kind.__module__.partition(".")[0]
    digests: dict[str, str] = {}
    for name in sorted(_entry_points_of(package)):
        entry = entry_point(package, name)
        if entry is not None and entry.module.partition(".")[0] == home:
            digests |= code_digests(package, name)
    if not digests:
        return ""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def text_files(folder: Path) -> list[Path]:
    """The files below a folder whose endings are those of prompts and settings, sorted; hidden ones are left out.

    Editors and systems leave hidden files, with which the digest would change without a change of the plug-in.
    """
    paths = []
    for path in sorted(folder.rglob("*")):
        is_hidden = any(name.startswith(".") for name in path.relative_to(folder).parts)
        if path.suffix.lower() in _TEXTS and path.is_file() and not is_hidden:
            paths.append(path)
    return paths


def _own_modules(module: str) -> dict[str, Path]:
    """The files of a module and of the modules of its author that it imports, by the modules' names.

    Of a plug-in of ours only the module itself counts, with what is below it. The package that holds another author's
    module counts too, because Python runs its `__init__.py` first.
    """
    home = module if module.startswith("tripletune.") else module.partition(".")[0]
    own: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in own or not _is_own(name, home):
            continue
        path = _source_of(name)
        if path is None:
            continue
        own[name] = path
        parent = name.rpartition(".")[0]
        waiting += [parent, *_imported_names(name, path)]
    return own


@cache
def _distributions_by_module() -> Mapping[str, Sequence[str]]:
    """The names of the installed distributions that own a top-level module, by its name; this reads all of them."""
    return metadata.packages_distributions()


def _is_own(name: str, home: str) -> bool:
    """Whether a module belongs to the author of `home`: the same package, or code that no installed package owns."""
    if name == home or name.startswith(f"{home}."):
        return True
    top = name.partition(".")[0]
    is_of_python_or_ours = top in ("", "tripletune", "__main__") or top in sys.stdlib_module_names
    if home.startswith("tripletune.") or is_of_python_or_ours:
        return False
    # A distribution may hold several top-level modules; a file beside the plug-in belongs to no distribution.
    owners = set(_distributions_by_module().get(top, ()))
    return not owners or not owners.isdisjoint(_distributions_by_module().get(home, ()))


def _source_of(name: str) -> Path | None:
    """The file of a module; None if there is no such module, for example for a function that is imported from one."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    return Path(spec.origin)


def _imported_names(name: str, path: Path) -> Iterator[str]:
    """Yield the names of the modules that a module may import, wherever in the file.

    What is imported from a module may be a module too, so both names are yielded; `_source_of` knows which exist.
    """
    if path.suffix != ".py":
        return
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            yield base
            for alias in node.names:
                yield f"{base}.{alias.name}"


def _short_texts(path: Path) -> list[str]:
    """The texts in a module's code that may name a file, which long texts and texts of several lines do not."""
    if path.suffix != ".py":
        return []
    texts = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if text.strip("./ ") and len(text) <= _LONGEST_NAME and text.isprintable():
                texts.append(text)
    return texts


def _named_files(folder: Path, texts: Iterable[str]) -> Iterator[Path]:
    """Yield the files that texts name from a folder, with or without the ending .md, and what folders hold of texts.

    A text that is a path to a folder above is none of the plug-in's, so it is not read.
    """
    for text in texts:
        named = folder / text
        prompt = folder / f"{text}.md"
        if named.is_file():
            yield named
        elif prompt.is_file():
            yield prompt
        elif named.is_dir() and folder in named.parents:
            yield from text_files(named)
