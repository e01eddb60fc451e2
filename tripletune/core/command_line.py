"""Command lines: a parser with clear errors and help; flags and `--set` for the fields of dataclasses.

Tested in `tests/core/test_options.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tripletune.core.config import load_config
from tripletune.core.options import (
    ConfigError,
    TypeHint,
    choices_of,
    convert,
    default_of,
    leaves,
    problems,
)
from tripletune.core.parser import CommandParser, Settable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def parse_command_line(
    kind: type[T],
    description: str,
    argv: Sequence[str] | None = None,
    dry_run: str = "show settings, counts, memory and a sample, then stop",
    **options: Any,
) -> tuple[T, bool]:
    """Parse `--config`, `--dry-run` and `--section.field VALUE`; return the configuration and whether to run dry.

    Flags have no defaults of their own: what is not on the command line comes from the file, then from the class.

    Args:
        dry_run: The help of `--dry-run`.
        options: Arguments of `CommandParser`, which checks them.
    """
    usage = "%(prog)s [--config FILE] [--dry-run] [--SECTION.FIELD VALUE ...]"
    how = "--SECTION.FIELD VALUE, or in the YAML file"
    parser = CommandParser(description=description, usage=usage, how=how, kind=kind, **options)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file of settings, or the name of a file in recipes/configs; options override its settings",
    )
    parser.add_argument("--dry-run", action="store_true", help=dry_run)
    # Settings outside a section stand in no group.
    groups: dict[str, Any] = {"": parser}
    settings = leaves(kind)
    for name, item in settings.items():
        default = default_of(item)
        section = name.rpartition(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        form = _value_form(item)
        about = _help_with_default(item, default)
        if not item.metadata.get("flag", True):
            # It has a flag, which only the list of settings at the end of the help shows.
            shown = f"{form} {about}" if form.startswith("{") else about
            parser.settable[name] = Settable(name, shown)
            about = argparse.SUPPRESS
        # The last value of a setting wins, so that a script can add overrides behind those that it has.
        action = "store"
        if isinstance(default, (list, tuple)):
            action = "join"
        groups[section].add_argument(
            f"--{name}", dest=name, default=argparse.SUPPRESS, metavar=form, help=about, action=action
        )
    arguments = parser.parse_args(argv)
    # Values stay text here, since YAML would turn the revision 0123456 into a number and 2024-01-01 into a date.
    overrides = {name: value for name, value in vars(arguments).items() if name in settings}
    return load_config(kind, arguments.config, overrides), arguments.dry_run


def _value_form(item: dataclasses.Field[Any]) -> str:
    """The form of a setting's value, for `--help`.

    The types stand in the source as text (`int | None`), whose first known word tells the form.
    """
    choices = choices_of(item)
    if choices:
        return f"{{{','.join(choices)}}}"
    forms = {"list": "A,B", "tuple": "A,B", "bool": "{true,false}", "int": "N", "float": "N"}
    for kind, form in forms.items():
        if kind in str(item.type):
            return form
    return "VALUE"


def add_arguments(
    parser: argparse._ActionsContainer, kind: type, prefix: str = "", only: Sequence[str] | None = None
) -> None:
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


def _add_without_flag(
    parser: argparse._ActionsContainer, item: dataclasses.Field[Any], hint: TypeHint, prefix: str
) -> None:
    """Let `--set NAME=VALUE` set a field."""
    default = default_of(item)
    dest = _flag_name(item, prefix).replace("-", "_")
    parser.set_defaults(**{dest: default})
    choices = choices_of(item, hint)
    about = _help_with_default(item, default)
    if choices:
        about = f"{{{','.join(choices)}}} {about}"
    parser.get_default("settable")[_set_name(item, prefix)] = Settable(dest, about)


def _add_flag(parser: argparse._ActionsContainer, item: dataclasses.Field[Any], hint: TypeHint, prefix: str) -> None:
    """Add a field's flag.

    A bool that is true by default needs `--no-name` too. A value of several items is one text here; `from_arguments`
    converts all texts, so that flags and YAML are read alike.
    """
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
    elif typing.get_origin(hint) in (list, tuple) or item.metadata.get("several"):
        more["action"] = "join"
        more["metavar"] = _metavar_of(item, hint)
    elif choices:
        more["choices"] = choices
    else:
        more["metavar"] = _metavar_of(item, hint)
    flags = [f"--{_flag_name(item, prefix)}"]
    if item.metadata.get("also"):
        flags.append(f"--{item.metadata['also']}")
    parser.add_argument(*flags, default=default, help=_help_with_default(item, default), required=is_required, **more)


def _metavar_of(item: dataclasses.Field[Any], hint: TypeHint) -> str:
    """What the help shows for a value: N for a number, else the last word of the field's name."""
    if {int, float} & {hint, *typing.get_args(hint)}:
        return "N"
    return item.name.rpartition("_")[2].upper()


def add_short_flags(
    parser: argparse._ActionsContainer, kind: type, defaults: bool = False, without_default: Sequence[str] = ()
) -> None:
    """Add a flag to a parser or a group for each field that the program also accepts by `--set`.

    `--top-k 5` abbreviates `--set top_k=5`. For a field that is true by default, `--no-planning` abbreviates `--set
    planning=no`. Both forms are stored in the namespace's `set`; the last one wins. A flag that is there already gets
    the choices and the help of this class; a flag of the program itself stays as it is.

    Args:
        defaults: Whether the help shows defaults, except those of the fields `without_default`.
    """
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        if not item.metadata.get("flag", True):
            continue
        default = None
        if defaults and item.name not in without_default:
            default = default_of(item)
        short = _short_flag(item, hints[item.name], default)
        present = parser._option_string_actions.get(short.flag)
        if present is None:
            parser.add_argument(short.flag, action=_Short, default=argparse.SUPPRESS, help=short.about, **short.more)
        elif isinstance(present, _Short):
            # Added before for another class, which has an option of the same name.
            present.help = short.about
            present.choices = short.more.get("choices")
            present.metavar = short.more.get("metavar")


class _ShortFlag(NamedTuple):
    """A flag that abbreviates `--set`: the flag itself, its help text, and more arguments of `add_argument`."""

    flag: str
    about: str
    more: dict[str, Any]


def _short_flag(item: dataclasses.Field[Any], hint: TypeHint, default: Any) -> _ShortFlag:
    """The flag of a field, by its type; `default` is the one that the help shows.

    A field that is true by default has a flag that switches it off: one that switched it on would do nothing.
    """
    name = _flag_name(item, "")
    about = _help_with_default(item, default)
    choices = choices_of(item, hint)
    if hint is bool and item.default:
        # The text says what the value `no` does, which is what the flag does.
        about = _help_with_default(item, None).removeprefix("no: ")
        return _ShortFlag(f"--no-{name}", about, {"nargs": 0, "const": "no"})
    if hint is bool:
        return _ShortFlag(f"--{name}", about, {"nargs": 0, "const": "yes"})
    if choices:
        return _ShortFlag(f"--{name}", about, {"choices": choices})
    return _ShortFlag(f"--{name}", about, {"metavar": _metavar_of(item, hint)})


def without_flags(kind: type) -> dict[str, str]:
    """The fields of a class that have no flag, each with its values and its help text."""
    hints = typing.get_type_hints(kind)
    texts = {}
    for item in dataclasses.fields(kind):
        if not item.metadata.get("flag", True):
            choices = choices_of(item, hints[item.name])
            values = f"{{{','.join(choices)}}} " if choices else ""
            texts[item.name] = values + _help_with_default(item, default_of(item))
    return texts


class _Short(argparse.Action):
    """A flag that abbreviates `--set NAME=VALUE`; `const` is the value of a flag without argument."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Store the flag as the text of a `--set`, in the order of the command line, so that the last one wins."""
        name = self.dest
        if self.const == "no":
            name = name.removeprefix("no_")
        namespace.set = [*namespace.set, f"{name}={self.const or values}"]


def from_arguments(kind: type[T], arguments: argparse.Namespace, prefix: str = "", **given: Any) -> T:
    """Build the dataclass from the flags that `add_arguments` added; `given` are values by field that replace flags.

    All values that cannot be read are reported together. Ranges are checked only afterwards, because the object must
    exist for that.
    """
    messages: list[str] = []
    values = {}
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):  # type: ignore[arg-type]
        flag = _flag_name(item, prefix)
        if item.name in given:
            value = given[item.name]
        else:
            value = getattr(arguments, flag.replace("-", "_"))
        try:
            # A default, or a value that is given here, has its type already.
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
            # Of a class that checks itself when it is made (`CheckedOptions`).
            messages = [str(error)]
    if messages and prefix:
        raise ConfigError(f"options --{prefix}-...: {'; '.join(messages)}")
    if messages:
        raise ConfigError("; ".join(messages))
    return config


def to_arguments(config: DataclassInstance, prefix: str = "") -> list[str]:
    """The command-line words of these options; options at their default are left out.

    So a command that a recipe shows has only what matters, and reads as a user would write it.
    """
    words = []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        flag = _flag_name(item, prefix)
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


def _flag_name(item: dataclasses.Field[Any], prefix: str) -> str:
    """A field's flag, without the two dashes.

    The main field of prefixed options, such as the teacher's backend, has the prefix itself as flag: `--teacher
    openai`.
    """
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


def _help_with_default(item: dataclasses.Field[Any], default: object) -> str:
    """A field's help text with its default, unless the default is empty, which the text itself explains."""
    about = item.metadata.get("help", "")
    shown = default
    if isinstance(default, (list, tuple)):
        shown = ", ".join(map(str, default))
    is_empty = default is None or default is False or shown == ""
    if not is_empty:
        about = f"{about} (default: {shown})"
    # argparse formats help texts with %.
    return about.replace("%", "%%")
