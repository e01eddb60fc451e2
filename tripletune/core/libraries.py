"""Find what this project uses of other libraries beyond what they document: private names, helpers, arguments.

A release may rename such a name without notice. `core.private_names.USES` lists them, so that a release that breaks one
is found in one place: `check_use` checks the names of a use before it begins, and `take` returns an object by its name.
Both name the library and its versions if something is missing, since otherwise the fault seems to be in the user's
model or data.

`tested.yaml` lists the versions that the tests passed with, those of requirements.lock among them.
"""

from __future__ import annotations

import importlib
import inspect
import platform
import re
from functools import cache
from importlib import metadata
from pathlib import Path
from types import FunctionType
from typing import Any

from tripletune.core.private_names import CACHE_ARGUMENT, PYTHON, USES, Private

TESTED = Path(__file__).with_name("tested.yaml")
NOT_INSTALLED = "not installed"
_NAME = re.compile(r"(?P<module>[\w.]+):(?P<path>[\w.]+?)(\((?P<arguments>[\w|]+)\)|@(?P<attribute>\w+))?")


class LibraryError(ImportError):
    """An installed version of a library lacks something that an earlier version had."""


def check_use(use: str) -> None:
    """Raise a `LibraryError` if a name of a use is missing in the installed version of its library."""
    for private in USES[use]:
        _find_or_explain(use, private)


def take(name: str) -> Any:
    """Return the object of a name in `USES`; for a name with arguments, the argument that exists.

    Raises:
        LibraryError: The installed version of the library lacks the name.
    """
    return _find_or_explain(*_uses_by_name()[name])


@cache
def _uses_by_name() -> dict[str, tuple[str, Private]]:
    """Every name of `USES`, with its use."""
    uses_by_name = {}
    for use, listed in USES.items():
        for private in listed:
            uses_by_name[private.name] = (use, private)
    return uses_by_name


def _find_or_explain(use: str, private: Private) -> Any:
    """The object of a name; a `LibraryError` names the use and the tested versions if it is missing."""
    try:
        return _resolve_name(private.name)
    except ModuleNotFoundError as error:
        # A library that is not installed at all has an error of its own, which says how to install it.
        if error.name == private.name.partition(":")[0].partition(".")[0]:
            raise
    except (ImportError, LookupError, AttributeError):
        pass
    raise _missing_name_error(use, private)


def _missing_name_error(use: str, private: Private) -> LibraryError:
    """The error of a name that the installed version of its library lacks."""
    library = private.library
    shown = private.name.partition(":")[2]
    versions = tested(library)
    cure = f"run pip install '{library}=={versions[-1]}'"
    if library == PYTHON:
        cure = f"use Python {versions[-1]}"
    return LibraryError(
        f"{library} {installed(library)} has no {shown}, which is needed for {use} ({private.why}). "
        f"Tested were {', '.join(versions)}: {cure}"
    )


def _resolve_name(name: str) -> Any:
    """The object of a name, or the name of the argument that exists.

    Raises:
        ImportError: There is no such module.
        AttributeError: The module or class lacks the name.
        LookupError: The function has none of the arguments.
    """
    name_parts = _NAME.fullmatch(name)
    if name_parts is None:
        raise ValueError(f"{name} is no name of a library's object; see `Private.name`")
    target: Any = importlib.import_module(name_parts["module"])
    for step in name_parts["path"].split("."):
        target = getattr(target, step)
    if name_parts["arguments"]:
        parameters = inspect.signature(target).parameters
        for argument in name_parts["arguments"].split("|"):
            if argument in parameters:
                return argument
        raise LookupError(name)
    if name_parts["attribute"] and not _mentions_attribute(target, name_parts["attribute"]):
        raise AttributeError(name)
    return target


def _mentions_attribute(kind: type, attribute: str) -> bool:
    """Whether a class or one of its bases has an attribute, or has a method that sets or reads it.

    Attributes of an object appear only when it is made, so the names in the code of the methods are looked at. Nothing
    is called.
    """
    for base in kind.__mro__:
        if attribute in vars(base) or attribute in inspect.get_annotations(base):
            return True
        for method in vars(base).values():
            function = inspect.unwrap(method) if callable(method) else method
            if not isinstance(function, FunctionType):
                continue
            # A constant of the code may be the name that `setattr` or `getattr` gets.
            code = function.__code__
            if attribute in code.co_names or attribute in code.co_consts:
                return True
    return False


def cache_argument() -> str:
    """The argument with which the models of the installed transformers take their cache."""
    return str(take(CACHE_ARGUMENT))


def installed(library: str) -> str:
    """The installed version of a library, `NOT_INSTALLED` if it is missing; of Python, without the patch release."""
    if library == PYTHON:
        return ".".join(platform.python_version_tuple()[:2])
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED


@cache
def _all_tested() -> dict[str, list[str]]:
    """The content of `tested.yaml`."""
    import yaml

    versions: dict[str, list[str]] = yaml.safe_load(TESTED.read_text(encoding="utf-8"))
    return versions


def tested(library: str) -> list[str]:
    """The versions of a library that the tests passed with, oldest first; empty for a library that no test needs."""
    return _all_tested().get(re.sub(r"[-_.]+", "-", library).lower(), [])


def untested(library: str) -> str:
    """A remark for errors that a new version of a library could cause; "" if the installed version was tested."""
    version = installed(library).partition("+")[0]  # of torch, "+cpu" names the build
    if version in tested(library):
        return ""
    return f" (or {library} {version} is the reason, which was not tested; tested were {', '.join(tested(library))})"
