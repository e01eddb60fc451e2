"""Command lines: a parser with clear errors and help; flags and `--set` for the fields of dataclasses."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import textwrap
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from tripletune.core import libraries
from tripletune.core.config import load_config
from tripletune.core.options import (
    EMPTY,
    ConfigError,
    choices_of,
    convert,
    default_of,
    elsewhere,
    leaves,
    nearest,
    not_one_of,
    problems,
)

libraries.check_use("command lines")
T = TypeVar("T")


class CommandParser(argparse.ArgumentParser):
    """A command line whose one-line errors suggest the nearest name, and whose help lists settings without a flag.

    Args:
        example: A command that works. The help begins with this command and its options.
        how: How to give settings without a flag.
        others: Help text for other uses of `--set NAME=VALUE`; their values are stored in the namespace's `set`.
        hands_on: Whether the caller of `parse_known_args` handles unknown words.
        kind: The configuration in which to look up unknown words; see `core.options.elsewhere`.
    """

    words: Sequence[str] = ()
    completing = False

    def __init__(
        self,
        *,
        example: str = "",
        how: str = "--set NAME=VALUE",
        others: str = "",
        hands_on: bool = False,
        kind: type | None = None,
        **options: Any,
    ) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)
        self.example = example
        self.how = how
        self.others = others
        self.hands_on = hands_on
        self.kind = kind
        # Settings without a flag by name: their names in the namespace, and their help texts.
        self.settable: dict[str, tuple[str, str]] = {}
        self.set_defaults(settable=self.settable)

    def add_set(self) -> None:
        """Add `--set` if there are settings without a flag."""
        by_set = self.others or (self.settable and self.how.startswith("--set"))
        if by_set and self.get_default("set") is None:
            about = self.others or "set a setting of the list below; repeatable"
            self.add_argument("--set", action=_Set, default=[], metavar="NAME=VALUE", help=about)

    def _put_example_first(self) -> None:
        """Move the example and its and all required options to the start of the help; the usage names only these."""
        words = set(self.example.partition("\n")[0].split())
        first = []
        for action in self._actions:
            is_positional = not action.option_strings
            if action.required or is_positional or words & set(action.option_strings):
                first.append(action)
        for alternatives in self._mutually_exclusive_groups:
            if set(alternatives._group_actions) & set(first):
                first += [action for action in alternatives._group_actions if action not in first]
        for group in self._action_groups:
            group._group_actions[:] = [action for action in group._group_actions if action not in first]
        top = self.add_argument_group("most used", f"example:\n  {self.example}")
        top._group_actions += first
        self._action_groups.insert(0, self._action_groups.pop())
        if self.usage is None:
            formatter = self._get_formatter()
            formatter.add_usage(None, first, self._mutually_exclusive_groups, "")
            self.usage = f"{formatter.format_help().strip()} [OPTIONS]"
        self.example = ""

    def format_help(self) -> str:
        """The help, which begins with the most used options and ends with the settings without a flag."""
        self.add_set()
        if self.example:
            self._put_example_first()
        text = super().format_help()
        if not self.settable:
            return text
        lines = ["", f"more settings, by {self.how}:"]
        for name, (_, about) in self.settable.items():
            about = about.replace("%%", "%")
            lines.append(textwrap.fill(about, 118, initial_indent=f"  {name:28} ", subsequent_indent=" " * 31))
        return text + "\n".join([*lines, ""])

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments as `ArgumentParser` does; an unknown word is reported by the command that received it."""
        self.add_set()
        if "_ARGCOMPLETE" in os.environ and not CommandParser.completing:
            import argcomplete

            CommandParser.completing = True
            argcomplete.autocomplete(self)
        if args is None:
            args = sys.argv[1:]
        self.words = list(args)
        for before, word in zip(["", *self.words], self.words):
            flag, equals, value = word.partition("=")
            if not word or (flag in self._option_string_actions and equals and not value):
                self.error(f"{flag or before or 'the command'}: {EMPTY}")
        parsed, unknown = super().parse_known_args(self.words, namespace)
        if unknown and not self.hands_on:
            self.error(self._unrecognized(unknown))
        return parsed, unknown

    def _unrecognized(self, unknown: Sequence[str]) -> str:
        """The error text for unknown words, with the name that was probably meant for the first of them."""
        word = unknown[0].split("=")[0].lstrip("-")
        advice = nearest(word, [flag.lstrip("-") for flag in self._option_string_actions], flag="--")
        if self.kind:
            advice = elsewhere(self.kind, word, flag="--") or advice
        for name, (dest, _) in self.settable.items():
            if self.how.startswith("--set") and dest == word.replace("-", "_"):
                advice = f" (write --set {name}=VALUE)"
        return f"unrecognized arguments: {' '.join(unknown)}{advice}"

    def error(self, message: str) -> typing.NoReturn:
        """Exit with one line; it names a misspelt flag instead of the required flag that is missing because of that."""
        flags = [word for word in self.words if word.startswith("--") and word != "--"]
        unknown = [flag for flag in flags if flag.split("=")[0] not in self._option_string_actions]
        if unknown and not self.hands_on and message.startswith("the following arguments are required"):
            message = self._unrecognized(unknown)
        self.exit(2, f"error: {self.prog}: {message}; --help shows the options\n")


class _Set(argparse.Action):
    """Store `--set NAME=VALUE`, as a setting without a flag, or as a text in the namespace's `set`."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, text: Any, option_string: Any = None) -> None:
        name, equals, value = text.partition("=")
        dest, _ = parser.settable.get(name.strip().replace("-", "_"), ("", ""))
        if dest and equals:
            setattr(namespace, dest, value)
        elif parser.others:
            namespace.set = [*namespace.set, text]
        else:
            parser.error(f"--set {text}: write it as NAME=VALUE; " + not_one_of("its name", name, [*parser.settable]))


def parse_command_line(
    kind: type[T], description: str, argv: Sequence[str] | None = None, **options: Any
) -> tuple[T, bool]:
    """Parse `--config`, `--dry-run` and `--section.field VALUE`; return the configuration and whether to run dry."""
    usage = "%(prog)s [--config FILE] [--dry-run] [--SECTION.FIELD VALUE ...]"
    how = "--SECTION.FIELD VALUE, or in the YAML file"
    parser = CommandParser(description=description, usage=usage, how=how, kind=kind, **options)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file of settings, or the name of a file in recipes/configs; options override its settings",
    )
    parser.add_argument("--dry-run", action="store_true", help="show settings, counts, memory and a sample, then stop")
    # Settings outside a section stand in no group.
    groups: dict[str, Any] = {"": parser}
    settings = leaves(kind)
    for name, item in settings.items():
        default = default_of(item)
        section = name.rpartition(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        form = _form(item)
        about = _help(item, default)
        if not item.metadata.get("flag", True):
            # It has a flag, which only the list of settings at the end of the help shows.
            shown = f"{form} {about}" if form.startswith("{") else about
            parser.settable[name] = (name, shown)
            about = argparse.SUPPRESS
        action: Any = "store"
        if isinstance(default, (list, tuple)):
            action = _Repeatable
        groups[section].add_argument(
            f"--{name}", dest=name, default=argparse.SUPPRESS, metavar=form, help=about, action=action
        )
    arguments = parser.parse_args(argv)
    # Values stay text here, since YAML would turn the revision 0123456 into a number and 2024-01-01 into a date.
    overrides = {name: value for name, value in vars(arguments).items() if name in settings}
    return load_config(kind, arguments.config, overrides), arguments.dry_run


def _form(item: dataclasses.Field[Any]) -> str:
    """The form of a setting's value, for `--help`."""
    choices = choices_of(item)
    if choices:
        return f"{{{','.join(choices)}}}"
    forms = {"list": "A,B", "tuple": "A,B", "bool": "{true,false}", "int": "N", "float": "N"}
    for kind, form in forms.items():
        if kind in str(item.type):
            return form
    return "VALUE"


def add_arguments(parser: Any, kind: type, prefix: str = "", only: Sequence[str] | None = None) -> None:
    """Add one flag `--name` per field of a flat dataclass to a parser or a group.

    Args:
        prefix: With "teacher", the field `model` becomes `--teacher-model`.
        only: The fields to add, in this order; None: all fields.
    """
    hints = typing.get_type_hints(kind)
    fields = {item.name: item for item in dataclasses.fields(kind)}
    for name in fields if only is None else only:
        item = fields[name]
        if item.metadata.get("flag", True):
            _add_flag(parser, item, hints[name], prefix)
        else:
            _add_without_flag(parser, item, hints[name], prefix)


def _add_without_flag(parser: Any, item: dataclasses.Field[Any], hint: Any, prefix: str) -> None:
    """Let `--set NAME=VALUE` set a field."""
    default = default_of(item)
    dest = _flag(item, prefix).replace("-", "_")
    parser.set_defaults(**{dest: default})
    choices = choices_of(item, hint)
    about = _help(item, default)
    if choices:
        about = f"{{{','.join(choices)}}} {about}"
    parser.get_default("settable")[_set_name(item, prefix)] = (dest, about)


def _add_flag(parser: Any, item: dataclasses.Field[Any], hint: Any, prefix: str) -> None:
    """Add a field's flag."""
    default = default_of(item)
    is_required = default is dataclasses.MISSING
    if is_required:
        default = None
    choices = choices_of(item, hint)
    more: dict[str, Any] = {}
    if hint is bool and default:
        more["action"] = argparse.BooleanOptionalAction
    elif hint is bool:
        more["action"] = "store_true"
    elif typing.get_origin(hint) in (list, tuple):
        more["action"] = _Repeatable
        more["metavar"] = _metavar(item, hint)
    elif choices:
        more["choices"] = choices
    else:
        more["metavar"] = _metavar(item, hint)
    flags = [f"--{_flag(item, prefix)}"]
    if item.metadata.get("also"):
        flags.append(f"--{item.metadata['also']}")
    parser.add_argument(*flags, default=default, help=_help(item, default), required=is_required, **more)


def _metavar(item: dataclasses.Field[Any], hint: Any) -> str:
    """What the help shows for a value: N for a number, else the last word of the field's name."""
    if {int, float} & {hint, *typing.get_args(hint)}:
        return "N"
    return item.name.rpartition("_")[2].upper()


def add_short_flags(parser: Any, kind: type) -> None:
    """Add a flag to a parser or a group for each field that the program also accepts by `--set`.

    `--top-k 5` abbreviates `--set top_k=5`. For a field that is true by default, `--no-planning` abbreviates `--set
    planning=no`. Both forms are stored in the namespace's `set`; the last one wins.
    """
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        if not item.metadata.get("flag", True):
            continue
        flag = _flag(item, "")
        choices = choices_of(item, hints[item.name])
        more: dict[str, Any] = {}
        if hints[item.name] is bool and item.default:
            flag = f"no-{flag}"
            more = {"nargs": 0, "const": "no"}
        elif hints[item.name] is bool:
            more = {"nargs": 0, "const": "yes"}
        elif choices:
            more["choices"] = choices
        else:
            more["metavar"] = item.name.rpartition("_")[2].upper()
        parser.add_argument(f"--{flag}", action=_Short, default=argparse.SUPPRESS, help=_help(item, None), **more)


class _Short(argparse.Action):
    """A flag that abbreviates `--set NAME=VALUE`; `const` is the value of a flag without argument."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        name = self.dest
        if self.const == "no":
            name = name.removeprefix("no_")
        namespace.set = [*namespace.set, f"{name}={self.const or values}"]


class _Repeatable(argparse.Action):
    """An option for which `--x a --x b` means `--x a,b`."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        earlier = getattr(namespace, self.dest, self.default)
        if earlier is not self.default:
            values = f"{earlier},{values}"
        # The first value replaces the default.
        setattr(namespace, self.dest, values)


def from_arguments(kind: type[T], arguments: argparse.Namespace, prefix: str = "", **given: Any) -> T:
    """Build the dataclass from the flags that `add_arguments` added; `given` replaces values of flags."""
    messages: list[str] = []
    values = {}
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):  # type: ignore[arg-type]
        flag = _flag(item, prefix)
        if item.name in given:
            value = given[item.name]
        else:
            value = getattr(arguments, flag.replace("-", "_"))
        try:
            if isinstance(value, str):
                value = convert(value, hints[item.name])
            values[item.name] = value
        except ValueError as error:
            option = f"--{flag}"
            if not item.metadata.get("flag", True):
                option = f"--set {item.name}"
            messages.append(f"{option}: {error}")
    if not messages:
        try:
            config = kind(**values)
            messages = problems(config)
        except ValueError as error:
            messages = [str(error)]
    if messages and prefix:
        raise ConfigError(f"options --{prefix}-...: {'; '.join(messages)}")
    if messages:
        raise ConfigError("; ".join(messages))
    return config


def to_arguments(config: Any, prefix: str = "") -> list[str]:
    """The command-line words of these options; options at their default are left out."""
    words = []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        flag = _flag(item, prefix)
        if value == default_of(item):
            continue
        if not item.metadata.get("flag", True):
            text = str(value)
            if isinstance(value, (list, tuple)):
                text = ",".join(value)
            words += ["--set", f"{_set_name(item, prefix)}={text}"]
        elif value is True:
            words.append(f"--{flag}")
        elif value is False:
            words.append(f"--no-{flag}")
        elif isinstance(value, (list, tuple)):
            for entry in value:
                words += [f"--{flag}", str(entry)]
        else:
            words += [f"--{flag}", str(value)]
    return words


def _flag(item: dataclasses.Field[Any], prefix: str) -> str:
    """A field's flag, without the two dashes."""
    name = item.name.replace("_", "-")
    if not prefix:
        return name
    if item.metadata.get("is_prefix"):
        return prefix
    return f"{prefix.replace('_', '-')}-{name}"


def _set_name(item: dataclasses.Field[Any], prefix: str) -> str:
    """A field's name in `--set NAME=VALUE`."""
    if not prefix:
        return item.name
    return f"{prefix}.{item.name}"


def _help(item: dataclasses.Field[Any], default: Any) -> str:
    """A field's help text with its default, unless the default is empty."""
    about = item.metadata.get("help", "")
    shown = default
    if isinstance(default, (list, tuple)):
        shown = ", ".join(map(str, default))
    is_empty = default is None or default is False or shown == ""
    if not is_empty:
        about = f"{about} (default: {shown})"
    # argparse formats help texts with %.
    return about.replace("%", "%%")
