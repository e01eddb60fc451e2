"""From the flags of a command line to the options of a system: `--max-rounds 3 --set candidates=50`.

A flag that many systems have is given by name; every field of a system's own option class can be set with
`--set NAME=VALUE`. What a system does not have is refused, with the nearest name it does have.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

from tripletune.rag.systems.registry import System

_TRUE, _FALSE = ("yes", "true", "on", "1"), ("no", "false", "off", "0")


def make_options(system: System, flags: Mapping[str, Any], settings: Sequence[str] = ()) -> Any:
    """The options of a system.

    Args:
        system: The system.
        flags: Fields by name; those that are None were not given.
        settings: `NAME=VALUE` texts; they go before the flags.

    Returns:
        An instance of `system.options`; what is not given has its default, which is the paper's.

    Raises:
        ValueError: a name or a value makes no sense for the system; all problems are named at once.
    """
    hints = typing.get_type_hints(system.options)
    known = {item.name: hints[item.name] for item in fields(system.options)}
    values = {name: value for name, value in flags.items() if value is not None}
    problems = [_unknown(f"--{name.replace('_', '-')}", name, system, known) for name in values if name not in known]
    for setting in settings:
        name, equals, text = setting.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            problems.append(f"--set {setting}: write it as NAME=VALUE")
        elif name not in known:
            problems.append(_unknown(f"--set {setting}", name, system, known))
        else:
            try:
                values[name] = _value(text.strip(), known[name])
            except ValueError as error:
                problems.append(f"--set {setting}: {error}")
    if problems:
        raise ValueError("; ".join(problems))
    return system.options(**values)


def _unknown(given: str, name: str, system: System, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"its options are {', '.join(known)}"
    return f"{given}: system {system.name!r} has no option {name!r}; {hint}"


def _value(text: str, hint: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        if text.lower() in ("none", ""):
            return None
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if hint is bool:
        if text.lower() not in (*_TRUE, *_FALSE):
            raise ValueError("write yes or no")
        return text.lower() in _TRUE
    if hint in (int, float):
        kind = "a whole number" if hint is int else "a number"
        try:
            return hint(text)
        except ValueError:
            raise ValueError(f"it must be {kind}") from None
    if typing.get_origin(hint) is Literal and text not in typing.get_args(hint):
        raise ValueError(f"choose among {', '.join(map(str, typing.get_args(hint)))}")
    return text
