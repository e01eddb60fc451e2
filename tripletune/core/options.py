"""Options: dataclass fields with default, help, choices and range, which define flags, YAML keys, `--set` and checks.

A field's default is the paper's setting. All problems of a configuration are reported together, with the nearest known
name for each unknown name. This module imports nothing heavy, so that `--help` and errors are fast.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import yaml

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# The type of a field, as `typing.get_type_hints` returns it: a class, or a form such as `list[str]` or `str | None`.
# Python has no type for all of them.
TypeHint = Any
# Shortens values in messages, since the aliases of a small YAML file can stand for gigabytes.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 1, 80, 80
shown = _SHORT.repr
# Numbers that PyYAML reads as text.
_POWER = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
_RANGES: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "at_least": ("at least", lambda value, bound: value >= bound),
    "above": ("greater than", lambda value, bound: value > bound),
    "at_most": ("at most", lambda value, bound: value <= bound),
    "below": ("below", lambda value, bound: value < bound),
}
EMPTY = "the value is empty: give a value, or leave the option out"


class ConfigError(ValueError):
    """A configuration that can't work; the message lists every problem."""


class About(typing.TypedDict, total=False):
    """Which values a setting allows, and how a user sets it.

    Attributes:
        choices: Allowed values (for a list, allowed items), or a function that returns them; not for a `Literal` type.
        is_prefix: With a prefix of flags, such as "teacher", the field's flag is only the prefix: `--teacher`.
        also: A second flag for the field.
        several: For a text of several names with commas: whether `--x a --x b` means `--x a,b`, as it does for a list.
        needs: Name of the field that must be set for this field to have an effect.
        flag: False (`rare`) if the setting has no flag, and is set only by YAML and `--set NAME=VALUE`.
    """

    choices: Sequence[str] | Callable[[], Sequence[str]]
    at_least: float
    above: float
    at_most: float
    below: float
    is_prefix: bool
    also: str
    several: bool
    needs: str
    flag: bool


def setting(default: Any, help: str, **about: typing.Unpack[About]) -> Any:
    """A dataclass field with a default (copied if it is a list; `dataclasses.MISSING`: required) and its help text."""
    return _dataclass_field(default, {"help": help, **about})


def _dataclass_field(default: Any, metadata: Mapping[str, Any]) -> Any:
    """A dataclass field; declared as Any, so that type checkers accept it as a default of any type."""
    # dataclasses refuse a list or dict as default, since all objects would share it.
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


rare = partial(setting, flag=False)


def other_default(section: type, name: str, default: Any) -> Any:
    """A base class's setting with another default."""
    fields = {item.name: item for item in dataclasses.fields(section)}
    return _dataclass_field(default, fields[name].metadata)


def problems(config: DataclassInstance, prefix: str = "") -> list[str]:
    """Check choices and ranges, then call each section's `check`; return the problems that were found.

    None means that a setting is not set, so it is in no range.
    """
    messages: list[str] = []
    hints = typing.get_type_hints(type(config))
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        name = prefix + item.name
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            messages += problems(value, f"{name}.")
        elif value is not None:
            messages += _problems_of_value(value, item, hints[item.name], name)
        needs = item.metadata.get("needs")
        if needs and value != item.default and not getattr(config, needs):
            messages.append(f"{name} has no effect without {needs}: set {needs}, or leave out {item.name}")
    if hasattr(config, "check"):
        messages += config.check()
    return messages


def require(config: DataclassInstance) -> None:
    """Raise a `ValueError` with all `problems` of a configuration; options call this in `__post_init__`."""
    messages = problems(config)
    if messages:
        raise ValueError("; ".join(messages))


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedOptions:
    """Options that are checked when they are created; one `ValueError` lists all problems."""

    def __post_init__(self) -> None:
        require(self)


def _problems_of_value(value: Any, item: dataclasses.Field[Any], hint: TypeHint, name: str) -> list[str]:
    """The problems of a field's value with its choices and range; `name` is the field's dotted name.

    An empty text is refused unless it is the default, since a script may have left a variable unset. A number must be
    finite even without a range, since YAML knows `.inf` and `.nan`.
    """
    allowed = choices_of(item, hint)
    if allowed:
        values = value if isinstance(value, (list, tuple)) else [value]
        return [not_one_of(name, choice, allowed) for choice in values if choice not in allowed]
    if value == "" and item.default != "":
        return [f"{name}: {EMPTY}"]
    if isinstance(value, float) and not math.isfinite(value):
        return [f"{name}: {value} is not a finite number"]
    bounds = {word: item.metadata[word] for word in _RANGES if word in item.metadata}
    if all(_RANGES[word][1](value, bound) for word, bound in bounds.items()):
        return []
    wanted = " and ".join(f"{_RANGES[word][0]} {bound:g}" for word, bound in bounds.items())
    return [f"{name}: {value} must be {wanted}"]


def choices_of(item: dataclasses.Field[Any], hint: TypeHint = None) -> Sequence[str]:
    """The values that a field allows; empty if the field allows all values."""
    choices = item.metadata.get("choices")
    if callable(choices):
        return choices()
    if choices:
        return tuple(choices)
    # A literal may be optional: `Literal["a", "b"] | None`.
    for alternative in (hint, *typing.get_args(hint)):
        if typing.get_origin(alternative) is Literal:
            return typing.get_args(alternative)
    return ()


def not_one_of(name: str, value: object, allowed: Sequence[str]) -> str:
    """The error text for a value that is not allowed, with the nearest allowed value."""
    return f"{name}: {value!r} is not one of {', '.join(allowed)}{nearest(str(value), allowed)}"


def nearest(name: str, names: Sequence[str] | Mapping[str, Any], flag: str = "") -> str:
    """` (did you mean X?)` for the nearest of `names`, with `flag` ("--") before it; "" if no name is near."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    if not close:
        return ""
    return f" (did you mean {flag}{close[0]}?)"


def leaves(kind: TypeHint, prefix: str = "") -> dict[str, dataclasses.Field[Any]]:
    """The settings of a configuration by their dotted names, in the order of the help; a section is no setting."""
    hints = typing.get_type_hints(kind)
    settings: dict[str, dataclasses.Field[Any]] = {}
    for item in dataclasses.fields(kind):
        section = hints[item.name]
        if dataclasses.is_dataclass(section):
            settings |= leaves(section, f"{prefix}{item.name}.")
        else:
            settings[prefix + item.name] = item
    return settings


class PlainNumbers(yaml.SafeLoader):
    """A safe loader that reads as numbers only what everyone reads as numbers.

    YAML 1.1 takes 1:30 for 90, 010 for 8 and 2024-01-02 for a date; here these are texts.
    """


def _resolvers_of_plain_types() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """The resolvers of a safe loader by first character, without those of numbers and dates."""
    replaced = [f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp")]
    resolvers = {}
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items():
        resolvers[first] = [(tag, pattern) for tag, pattern in pairs if tag not in replaced]
    return resolvers


PlainNumbers.yaml_implicit_resolvers = _resolvers_of_plain_types()
PlainNumbers.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][\d_]*|0x[\da-fA-F]+)$"), list("-+0123456789")
)
PlainNumbers.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"([-+]?\d[\d_]*\.[\d_]*(e[-+]\d+)?|[-+]?\.\d[\d_]*(e[-+]\d+)?|[-+]?\.inf|\.nan)$", re.IGNORECASE),
    list("-+0123456789."),
)


def default_of(item: dataclasses.Field[Any]) -> Any:
    """The default of a field; `dataclasses.MISSING` if the field is required."""
    if callable(item.default_factory):
        return item.default_factory()
    return item.default


def convert(value: Any, hint: TypeHint) -> Any:
    """Convert a value from YAML or a command line to the type of its field.

    One function for both, so that a text means the same in a file and on a command line. YAML gives typed values, a
    command line only texts.

    A text keeps its spaces, such as the one behind `query_prompt="query: "`.
    """
    if isinstance(value, str) and hint not in (str, str | None):
        value = value.strip()
    if value == "" and hint is not str:  # a script may have left a variable unset: never read this as "no limit"
        raise ValueError(EMPTY)
    is_optional = typing.get_origin(hint) in (types.UnionType, typing.Union)
    if is_optional:
        says_none = isinstance(value, str) and value.strip().lower() in ("none", "null", "~")
        if value is None or says_none:
            return None
        hint = next(alternative for alternative in typing.get_args(hint) if alternative is not types.NoneType)
    origin: Any = typing.get_origin(hint)
    if origin is Literal:
        return _convert_choice(value, typing.get_args(hint))
    if origin in (list, tuple):
        return origin(_convert_texts(value))
    if origin is dict:
        return _convert_mapping(value)
    if hint is bool:
        return _convert_boolean(value)
    if hint in (int, float):
        return _convert_number(value, hint)
    return _convert_text(value)


def _convert_choice(value: Any, choices: Sequence[str]) -> Any:
    """A value that is one of the choices, with the nearest one in the error."""
    if value not in choices:
        raise ValueError(f"{shown(value)} is not one of {', '.join(choices)}{nearest(shown(value), choices)}")
    return value


def _convert_texts(value: object) -> list[str]:
    """Convert to a list of texts: a list of YAML, or texts between commas; empty texts are left out.

    A comma at the end is common in lists that a script writes.
    """
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or any(isinstance(item, (list, dict)) for item in items):
        raise ValueError(f"{shown(value)} is not a list of texts")
    texts = [str(item).strip() for item in items]
    return [text for text in texts if text]


def _convert_mapping(value: object) -> dict[str, Any]:
    """Convert to names and values, on a command line from YAML; `1e-5` becomes a number, as in other settings.

    The types of the values are unknown here; the library that takes them checks them (`train.misfits`).
    """
    mapping = value
    if isinstance(value, str):
        try:
            mapping = yaml.load(value, PlainNumbers)
        except yaml.YAMLError:
            mapping = None
    if not isinstance(mapping, dict):
        raise ValueError(f"{shown(value)} is not a mapping of names and values, such as {{name: value}}")
    values = {}
    for key, item in mapping.items():
        values[str(key)] = float(item) if _POWER.fullmatch(str(item)) else item
    return values


def _convert_boolean(value: object) -> bool:
    """Convert to true or false; another text is refused, since Python takes every text, even "false", for true."""
    if isinstance(value, str) and value.lower() in (*_TRUE, *_FALSE):
        return value.lower() in _TRUE
    if not isinstance(value, bool):
        raise ValueError(f"{shown(value)} is not true or false")
    return value


def _convert_number(value: Any, hint: type) -> float:
    """Convert to a number, also texts like 1e-5, which PyYAML does not read as a number."""
    try:
        number = float(value)
        has_fraction = hint is int and int(value) != number
        # Python counts true as 1.
        if isinstance(value, bool) or not math.isfinite(number) or has_fraction:
            raise ValueError
        return hint(value)
    except (TypeError, ValueError, OverflowError):
        wanted = "a whole number" if hint is int else "a number"
        raise ValueError(f"{shown(value)} is not {wanted}") from None


def _convert_text(value: object) -> str:
    """Convert to a text; YAML's true and false get their own words back, but a number's digits may have been lost."""
    if value is None or isinstance(value, (dict, list)):
        raise ValueError(f"{shown(value)} is not text")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # YAML turned the revision 1_234 into 1234, so the original text is lost.
        raise ValueError(f"{value!r} was read as a number; put it in quotes")
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def set_values(kind: type, settings: Sequence[str], owner: str) -> tuple[dict[str, Any], list[str]]:
    """Parse `--set NAME=VALUE` texts into values by field, and a list of problems, which name the owner.

    The problems are returned, so that the caller can report them with those of other options.
    """
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    messages = []
    for given in settings:
        name, equals, text = given.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            messages.append(f"--set {given}: write it as NAME=VALUE")
        elif name not in hints:
            messages.append(f"--set {given}: {no_option(owner, name, hints)}")
        else:
            try:
                values[name] = convert(text, hints[name])
            except ValueError as error:
                messages.append(f"--set {given}: {error}")
    return values, messages


def no_option(owner: str, name: str, options: Collection[str]) -> str:
    """The error text for an unknown option of an owner, such as a system."""
    hint = nearest(name, list(options)) or f"; its options are {', '.join(options)}"
    return f"{owner} has no option {name!r}{hint}"
