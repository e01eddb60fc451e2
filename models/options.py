"""Options: a dataclass whose fields say default, help, choices and range. From it come flags, YAML, `--set` and checks.

A field's default is the paper's setting. All problems of a configuration are reported at once, each with the nearest
name that exists. This module imports nothing heavy, so that `--help` and errors come at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from tripletune.models.files import read_text

T = TypeVar("T")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_RANGES: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "at_least": ("at least", lambda value, bound: value >= bound),
    "above": ("greater than", lambda value, bound: value > bound),
    "at_most": ("at most", lambda value, bound: value <= bound),
    "below": ("below", lambda value, bound: value < bound),
}


class ConfigError(ValueError):
    """A configuration that can't work; the message lists every problem."""


def setting(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | Callable[[], Sequence[str]] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    is_prefix: bool = False,
    also: str = "",
    flag: bool = True,
) -> Any:
    """A dataclass field with a default, its help text, and what its value may be.

    Args:
        default: The default; a list is copied. `dataclasses.MISSING` for a field that must be given.
        help: The `--help` text.
        choices: Allowed values, or a function that lists them; of a list, allowed items. A `Literal` type needs none.
        at_least: Smallest value. None is never out of range.
        above: The value must be greater than this.
        at_most: Largest value.
        below: The value must be less than this.
        is_prefix: With a prefix of flags, such as "teacher", the field's flag is the prefix alone: `--teacher`.
        also: A second flag of the same field.
        flag: False where few need it: it has no flag of its own, YAML and `--set NAME=VALUE` reach it.
    """
    bounds = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    metadata: dict[str, Any] = {"help": help, "choices": choices, "is_prefix": is_prefix, "also": also, "flag": flag}
    metadata |= {k: v for k, v in bounds.items() if v is not None}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def other_default(section: type, name: str, default: Any) -> Any:
    """A base class's setting with another default; its help, choices and range stay."""
    item = next(item for item in dataclasses.fields(section) if item.name == name)
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=item.metadata)
    return field(default=default, metadata=item.metadata)


def problems(config: Any, prefix: str = "") -> list[str]:
    """What can't work in a configuration: choices, ranges, then what the `check` method of each section says.

    Args:
        config: A dataclass instance, sections in it included.
        prefix: Put before the names of its fields.
    """
    found: list[str] = []
    hints = typing.get_type_hints(type(config))
    for item in dataclasses.fields(config):
        value, name = getattr(config, item.name), prefix + item.name
        if dataclasses.is_dataclass(value):
            found += problems(value, f"{name}.")
        elif value is not None:
            found += _out_of_range(value, item, hints[item.name], name)
    return found + (config.check() if hasattr(config, "check") else [])


def require(config: Any) -> None:
    """Raise `ValueError` with all `problems` of a configuration; the `__post_init__` of options made in code."""
    found = problems(config)
    if found:
        raise ValueError("; ".join(found))


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedOptions:
    """Options that are checked when they are made: all values that make no sense are in one `ValueError`."""

    def __post_init__(self) -> None:
        require(self)


def _out_of_range(value: Any, item: dataclasses.Field[Any], hint: Any, name: str) -> list[str]:
    allowed = _choices(item, hint)
    if allowed:
        given = value if isinstance(value, (list, tuple)) else [value]
        return [not_one_of(name, each, allowed) for each in given if each not in allowed]
    if isinstance(value, float) and not math.isfinite(value):
        return [f"{name}: {value} is not a finite number"]
    bounds = {word: item.metadata[word] for word in _RANGES if word in item.metadata}
    if all(_RANGES[word][1](value, bound) for word, bound in bounds.items()):
        return []
    wanted = " and ".join(f"{_RANGES[word][0]} {bound:g}" for word, bound in bounds.items())
    return [f"{name}: {value} must be {wanted}"]


def _choices(item: dataclasses.Field[Any], hint: Any = None) -> Sequence[str]:
    literal = next((part for part in (hint, *typing.get_args(hint)) if typing.get_origin(part) is Literal), None)
    found = item.metadata.get("choices") or typing.get_args(literal)
    return found() if callable(found) else tuple(found)


def not_one_of(name: str, value: Any, known: Sequence[str]) -> str:
    """The sentence that refuses a value, with the nearest allowed one."""
    return f"{name}: {value!r} is not one of {', '.join(known)}{nearest(str(value), known)}"


def nearest(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """` (did you mean X?)` for the nearest known name; empty where none is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


# YAML files ---------------------------------------------------------------------------------------------------------


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Names and values of a YAML file; what its `base:` file says is under what it says itself."""
    path, seen = Path(path), []
    tree: dict[str, Any] = {}
    while True:
        if path.resolve() in seen:
            raise ConfigError(f"{path}: its base names lead back to itself")
        seen.append(path.resolve())
        own = _read_one(path)
        base = own.pop("base", None)
        tree = _over(own, tree)
        if base is None:
            return tree
        path = path.parent / str(base)


def _over(tree: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in above.items():
        both = isinstance(value, dict) and isinstance(tree.get(name), dict)
        tree[name] = _over(tree[name], value) if both else value
    return tree


def _read_one(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"no such configuration file: {path}")
    text = read_text(path)
    try:
        loaded = yaml.load(text, _UniqueKeys)
    except (yaml.YAMLError, RecursionError) as error:
        said = " ".join(str(error).split()) if isinstance(error, yaml.YAMLError) else "it is nested too deeply"
        raise ConfigError(f"{path} is not valid YAML: {said}") from None
    if loaded is not None and not isinstance(loaded, dict):
        raise ConfigError(f"{path}: expected names and values, found {type(loaded).__name__}")
    return loaded or {}


class _UniqueKeys(yaml.SafeLoader):
    """A safe loader that refuses a name given twice, of which YAML would silently drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # which PyYAML refuses by itself
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value} is given twice: put its values under one", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_config(kind: type[T], path: str | Path | None, overrides: Mapping[str, Any] | None = None) -> T:
    """Read a YAML file into a dataclass, apply overrides, and check everything.

    Args:
        kind: The configuration dataclass.
        path: YAML file; None for defaults alone.
        overrides: Dotted names and values, such as {"train.learning_rate": "3e-4"}.
    """
    tree = read_yaml(path) if path is not None else {}
    for name, value in (overrides or {}).items():
        node = tree
        *parents, leaf = name.split(".")
        for parent in parents:
            if node.get(parent) is None:
                node[parent] = {}  # also a section that is named in the file and left empty
            node = node[parent]
            if not isinstance(node, dict):
                raise ConfigError(f"{path}: {parent}: expected names and values, found {node!r}")
        node[leaf] = value
    found: list[str] = []
    config = _build(kind, tree, "", found)
    found = found or problems(config)
    if found:
        listed = "\n".join(f"  - {problem}" for problem in found)
        raise ConfigError(f"{path or 'the command line'}: {len(found)} problem(s)\n{listed}")
    return config


def to_yaml(config: Any) -> str:
    """The resolved configuration as YAML."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)


def _build(kind: type[T], tree: Any, prefix: str, found: list[str]) -> T:
    if not isinstance(tree, dict):
        found.append(f"{prefix.rstrip('.')}: expected names and values, found {tree!r}")
        return kind()
    hints = typing.get_type_hints(kind)
    known = [item.name for item in dataclasses.fields(kind)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in known:
            found.append(f"unknown key {prefix}{key}{nearest(str(key), known)}")
        elif dataclasses.is_dataclass(hints[key]):
            values[key] = _build(hints[key], {} if value is None else value, f"{prefix}{key}.", found)  # type: ignore[arg-type]
        else:
            try:
                values[key] = convert(value, hints[key])
            except ValueError as error:
                found.append(f"{prefix}{key}: {error}")
    return kind(**values)


def convert(value: Any, hint: Any) -> Any:
    """A value of YAML or of a command line as the type of its field."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null", "~", "")):
            return None
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    origin = typing.get_origin(hint)
    if origin is Literal:
        known = typing.get_args(hint)
        if value not in known:
            raise ValueError(f"{value!r} is not one of {', '.join(known)}{nearest(str(value), known)}")
        return value
    if origin in (list, tuple):
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)):
            raise ValueError(f"{value!r} is not a list")
        return origin(str(item).strip() for item in items if str(item).strip())
    if origin is dict:
        try:
            found = yaml.safe_load(value) if isinstance(value, str) else value
        except yaml.YAMLError:
            found = value
        if not isinstance(found, dict):
            raise ValueError(f"{value!r} is not a mapping of names and values, such as {{name: value}}")
        return found
    if hint is bool:
        if isinstance(value, str) and value.lower() in (*_TRUE, *_FALSE):
            return value.lower() in _TRUE
        if not isinstance(value, bool):
            raise ValueError(f"{value!r} is not true or false")
        return value
    return _number(value, hint) if hint in (int, float) else _text(value)


def _number(value: Any, hint: type) -> float:
    """A number; PyYAML reads 1e-5 as text, and it is a number to everyone else."""
    try:
        if isinstance(value, bool) or not math.isfinite(float(value)) or (hint is int and int(value) != float(value)):
            raise ValueError
        return int(value) if hint is int else float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{value!r} is not a {'whole ' if hint is int else ''}number") from None


def _text(value: Any) -> str:
    if value is None or isinstance(value, (dict, list)):
        raise ValueError(f"{value!r} is not text")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # YAML has made 42798 of the revision 0123456; what was written is gone.
        raise ValueError(f"{value!r} was read as a number; put text in quotes")
    return str(value).lower() if isinstance(value, bool) else str(value)


# Command lines ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Settable:
    """A setting without a flag of its own: where it lands in the namespace, and its help text."""

    dest: str
    help: str


class CommandParser(argparse.ArgumentParser):
    """A command line whose errors are one line with the nearest name, and whose help lists settings without a flag.

    Args:
        example: A command that works, shown at the end of the help.
        how: How settings without a flag are given.
        others: What else `--set NAME=VALUE` takes; such texts are left in the namespace's `set`.
        hands_on: Unknown words are left to the caller of `parse_known_args`.
    """

    words: Sequence[str] = ()

    def __init__(
        self,
        *,
        example: str = "",
        how: str = "--set NAME=VALUE",
        others: str = "",
        hands_on: bool = False,
        **options: Any,
    ) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)
        super().__init__(epilog=f"example:\n  {example}" if example else None, **options)
        self.how, self.others, self.hands_on = how, others, hands_on
        self.settable: dict[str, _Settable] = {}
        self.set_defaults(settable=self.settable)

    def add_set(self) -> None:
        """Add `--set`, where something can be set by it."""
        by_set = self.others or (self.settable and self.how.startswith("--set"))
        if by_set and self.get_default("set") is None:
            about = self.others or "a setting without a flag of its own, listed below; repeatable"
            self.add_argument("--set", action=_Set, default=[], metavar="NAME=VALUE", help=about)

    def format_help(self) -> str:
        """The help, with the settings that have no flag at its end."""
        self.add_set()
        rows = [
            textwrap.fill(one.help.replace("%%", "%"), 118, initial_indent=f"  {name:28} ", subsequent_indent=" " * 31)
            for name, one in self.settable.items()
        ]
        return super().format_help() + "\n".join(["", f"more settings, by {self.how}:", *rows, ""] if rows else [])

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See `ArgumentParser`; an unknown word is an error of the command that it was given to."""
        self.add_set()
        self.words = sys.argv[1:] if args is None else list(args)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and not self.hands_on:
            self.error(self._unrecognized(unknown))
        return found, unknown

    def _unrecognized(self, unknown: Sequence[str]) -> str:
        word = unknown[0].split("=")[0].lstrip("-")
        hint = nearest(word, [flag.lstrip("-") for flag in self._option_string_actions]).replace("mean ", "mean --")
        for name, one in self.settable.items():
            if one.dest == word.replace("-", "_"):
                hint = f" (it is set by --set {name}=VALUE)"
        return f"unrecognized arguments: {' '.join(unknown)}{hint}"

    def error(self, message: str) -> typing.NoReturn:
        """End the program with one line; a misspelt flag is named before the flag that it leaves missing."""
        flags = [word for word in self.words if word.startswith("--") and word != "--"]
        unknown = [flag for flag in flags if flag.split("=")[0] not in self._option_string_actions]
        if unknown and not self.hands_on and message.startswith("the following arguments are required"):
            message = self._unrecognized(unknown)
        self.exit(2, f"error: {self.prog}: {message}; --help shows the options\n")


class _Set(argparse.Action):
    """`--set NAME=VALUE`: a setting without a flag of its own, or what is left to the program in `set`."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, text: Any, option_string: Any = None) -> None:
        name, equals, value = text.partition("=")
        one = parser.settable.get(name.strip().replace("-", "_"))
        if one is not None and equals:
            setattr(namespace, one.dest, value.strip())
        elif parser.others:
            namespace.set = [*namespace.set, text]
        else:
            parser.error(f"--set {text}: write it as NAME=VALUE; " + not_one_of("its name", name, [*parser.settable]))


def parse_command_line(
    kind: type[T], description: str, argv: Sequence[str] | None = None, **options: Any
) -> tuple[T, bool]:
    """`--config FILE`, `--dry-run`, and one `--section.field VALUE` per field; `options` are the parser's.

    Returns:
        The configuration and whether only a dry run was asked for.
    """
    usage = "%(prog)s [--config FILE] [--dry-run] [--SECTION.FIELD VALUE ...]"
    how = "--SECTION.FIELD VALUE, or in the YAML file"
    parser = CommandParser(description=description, usage=usage, how=how, **options)
    parser.add_argument("--config", metavar="FILE", help="YAML file with the settings; options below override it")
    parser.add_argument("--dry-run", action="store_true", help="show settings, counts, memory and a sample, then stop")
    groups: dict[str, Any] = {}
    names = []
    for name, item, value in _leaves(kind(), ""):
        names.append(name)
        section = name.rpartition(".")[0]
        group = groups.setdefault(section, parser.add_argument_group(section) if section else parser)
        shown = f"{{{','.join(_choices(item))}}}" if _choices(item) else "VALUE"
        more: dict[str, Any] = {"action": _Repeatable} if isinstance(value, (list, tuple)) else {}
        about = _help(item, value)
        if not item.metadata.get("flag", True):
            parser.settable[name] = _Settable(name, about if shown == "VALUE" else f"{shown} {about}")
            about = argparse.SUPPRESS
        group.add_argument(f"--{name}", dest=name, default=argparse.SUPPRESS, metavar=shown, help=about, **more)
    arguments = parser.parse_args(argv)
    # Values are text here: YAML would make a number of the revision 0123456 and a date of 2024-01-01.
    overrides = {name: value for name, value in vars(arguments).items() if name in names}
    return load_config(kind, arguments.config, overrides), arguments.dry_run


def add_arguments(parser: Any, kind: type, prefix: str = "", only: Sequence[str] | None = None) -> None:
    """Give a parser (or a group of it) one `--name` per field of a flat dataclass.

    Args:
        parser: The parser or argument group.
        kind: The dataclass.
        prefix: With "teacher", the field `model` is `--teacher-model`.
        only: The fields, in this order; None takes all of them. One call per group puts options into groups.
    """
    hints = typing.get_type_hints(kind)
    fields = {item.name: item for item in dataclasses.fields(kind)}
    for item in (fields[name] for name in (fields if only is None else only)):
        missing = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        default = None if missing else item.default_factory() if callable(item.default_factory) else item.default
        hint = hints[item.name]
        if not item.metadata.get("flag", True):
            dest = _flag(item, prefix).replace("-", "_")
            parser.set_defaults(**{dest: default})
            name = f"{prefix}.{item.name}" if prefix else item.name
            allowed = f"{{{','.join(_choices(item, hint))}}} " if _choices(item, hint) else ""
            parser.get_default("settable")[name] = _Settable(dest, allowed + _help(item, default))
            continue
        is_list = typing.get_origin(hint) in (list, tuple)
        more: dict[str, Any] = {}
        if hint is bool:
            more["action"] = argparse.BooleanOptionalAction if default else "store_true"
        elif is_list:
            more["action"] = _Repeatable
        if not is_list and (choices := _choices(item, hint)):
            more["choices"] = choices
        elif hint is not bool:
            number = {int, float} & {hint, *typing.get_args(hint)}
            more["metavar"] = "N" if number else item.name.rpartition("_")[2].upper()
        flags = [f"--{flag}" for flag in (_flag(item, prefix), item.metadata.get("also")) if flag]
        parser.add_argument(*flags, default=default, help=_help(item, default), required=missing, **more)


def add_short_flags(parser: Any, kind: type) -> None:
    """Give a parser (or a group of it) a flag for each field of options that the program takes by `--set`.

    `--top-k 5` is short for `--set top_k=5`, and `--no-planning`, of a field that is true by default, for
    `--set planning=no`. What is given of both stands in the namespace's `set`; the later one counts.
    """
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        if not item.metadata.get("flag", True):
            continue
        flag, more = _flag(item, ""), dict[str, Any]()
        if hints[item.name] is bool:
            flag = f"no-{flag}" if item.default else flag
            more = {"nargs": 0, "const": "no" if item.default else "yes"}
        elif choices := _choices(item, hints[item.name]):
            more["choices"] = choices
        else:
            more["metavar"] = item.name.rpartition("_")[2].upper()
        parser.add_argument(f"--{flag}", action=_Short, default=argparse.SUPPRESS, help=_help(item, None), **more)


class _Short(argparse.Action):
    """A flag that is short for `--set NAME=VALUE`; `const` is the value of one without."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        name = self.dest.removeprefix("no_") if self.const == "no" else self.dest
        namespace.set = [*namespace.set, f"{name}={self.const or values}"]


class _Repeatable(argparse.Action):
    """`--x a,b` and `--x a --x b` are the same."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest, self.default)
        setattr(namespace, self.dest, values if before is self.default else f"{before},{values}")


def from_arguments(kind: type[T], arguments: argparse.Namespace, prefix: str = "", **given: Any) -> T:
    """The dataclass of a command line that `add_arguments` gave; values in `given` replace those of flags."""
    found: list[str] = []
    values = {}
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):  # type: ignore[arg-type]
        flag = _flag(item, prefix)
        value = given[item.name] if item.name in given else getattr(arguments, flag.replace("-", "_"))
        try:
            values[item.name] = convert(value, hints[item.name]) if isinstance(value, str) else value
        except ValueError as error:
            found.append(f"--{flag}: {error}")
    if not found:
        try:
            config = kind(**values)
            found = problems(config)
        except ValueError as error:
            found = [str(error)]
    if found:
        raise ConfigError("; ".join(found) if not prefix else f"options --{prefix}-...: {'; '.join(found)}")
    return config


def to_arguments(config: Any, prefix: str = "") -> list[str]:
    """The words of a command line that give these options; what is at its default is left out.

    Args:
        config: An instance of a flat dataclass.
        prefix: As in `add_arguments`.
    """
    words = []
    for item in dataclasses.fields(config):
        value, flag = getattr(config, item.name), f"--{_flag(item, prefix)}"
        default = item.default_factory() if callable(item.default_factory) else item.default
        if value == default:
            continue
        if not item.metadata.get("flag", True):
            text = ",".join(value) if isinstance(value, (list, tuple)) else str(value)
            words += ["--set", f"{prefix}.{item.name}={text}" if prefix else f"{item.name}={text}"]
        elif isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [w for one in (value if isinstance(value, (list, tuple)) else [value]) for w in (flag, str(one))]
    return words


def set_values(kind: type, settings: Sequence[str], owner: str) -> tuple[dict[str, Any], list[str]]:
    """Values of `--set NAME=VALUE` texts for the fields of a dataclass.

    Args:
        kind: The dataclass.
        settings: The texts.
        owner: Whose options they are, for messages: "system 'ras'".

    Returns:
        Values by field, and what is wrong with the texts.
    """
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    found = []
    for given in settings:
        name, equals, text = given.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            found.append(f"--set {given}: write it as NAME=VALUE")
        elif name not in hints:
            found.append(f"--set {given}: {no_option(owner, name, hints)}")
        else:
            try:
                values[name] = convert(text.strip(), hints[name])
            except ValueError as error:
                found.append(f"--set {given}: {error}")
    return values, found


def no_option(owner: str, name: str, known: Collection[str]) -> str:
    """The sentence that refuses an option that its owner does not have."""
    hint = nearest(name, [*known]) or f"; its options are {', '.join(known)}"
    return f"{owner} has no option {name!r}{hint}"


def _flag(item: dataclasses.Field[Any], prefix: str) -> str:
    if prefix and item.metadata.get("is_prefix"):
        return prefix
    return (f"{prefix}-{item.name}" if prefix else item.name).replace("_", "-")


def _help(item: dataclasses.Field[Any], default: Any) -> str:
    shown = ", ".join(default) if isinstance(default, (list, tuple)) else default
    end = "" if default is None or default is False or shown == "" else f" (default: {shown})"
    return f"{item.metadata.get('help', '')}{end}".replace("%", "%%")


def _leaves(config: Any, prefix: str) -> list[tuple[str, dataclasses.Field[Any], Any]]:
    found = []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            found += _leaves(value, f"{prefix}{item.name}.")
        else:
            found.append((prefix + item.name, item, value))
    return found
