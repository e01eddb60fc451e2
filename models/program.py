"""Common parts of programs: command line, logging, exit codes, errors in one line, and plug-ins: any module in the
folder of backends, readers, systems or tasks is one more.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import importlib.util
import logging
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
import typing
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from tripletune.models.options import (
    EMPTY,
    ConfigError,
    choices_of,
    convert,
    default_of,
    elsewhere,
    leaves,
    load_config,
    nearest,
    not_one_of,
    problems,
)
from tripletune.models.tables import printable

T = TypeVar("T")
# Third parties that log each HTTP request and index build.
NOISY = ("absl", "anthropic", "bm25s", "faiss", "httpcore", "httpcore2", "httpx", "httpx2", "openai",
         "sentence_transformers", "urllib3", "uvicorn")  # fmt: skip
# How torch, numpy, safetensors, Arrow and SQLite report a full disk, besides `ENOSPC`.
_FULL = re.compile(
    r"no space left|disk quota|disk is full|file write failed|inline_container.*unexpected pos|\d+ requested and \d+ "
    "written",
    re.IGNORECASE,
)
# Packages that not everybody has, and the extra that brings them.
EXTRAS = {"anthropic": "teachers", "argcomplete": "completion", "bitsandbytes": "qlora",
          "charset_normalizer": "documents", "mammoth": "documents",
          "markdown_it": "documents", "matplotlib": "plots", "mauve": "mauve", "pypdfium2": "documents",
          "openai": "teachers", "prometheus_client": "serve", "ray": "ray", "starlette": "serve",
          "uvicorn": "serve"}  # fmt: skip


def run_program(
    program: Callable[[], int | None],
    *,
    verbose: bool = False,
    form: str = "%(message)s",
    level: int = logging.INFO,
    stopped: str = "stopped; run the same command again to continue",
) -> int:
    """Run a program; an error becomes one line on stderr (with `verbose`, a traceback) and an exit code.

    Returns:
        0; 2 for bad input; 1 when the disk is full; 130 when it was interrupted; for an exception with an attribute
        `exit_code`, that one.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Printable(form, datefmt="%H:%M:%S"))
    root, before = logging.getLogger(), logging.getLogger().level
    # A program may run another one, as the demo does.
    if not any(isinstance(one.formatter, _Printable) for one in root.handlers):
        root.addHandler(handler)
    root.setLevel(logging.DEBUG if verbose else level)
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    if not verbose:
        # What will change in a library, such as the old names that PEFT asks transformers by.
        warnings.filterwarnings("ignore", category=FutureWarning)
    # transformers warns of missing weights with a table; `models.loading.complete` refuses them. (A higher level of its
    # logger makes it check plans of tensor parallelism.)
    logging.getLogger("transformers.modeling_utils").addFilter(lambda record: record.levelno >= logging.ERROR)
    try:
        code = program() or 0
        # What a pipe refuses must show here, not when the interpreter closes it.
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of a pipe, `head` for one, has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _say(stopped, 130)
    except Exception as error:
        if full := _full_disk(error):
            return _say(f"error: no space left on the disk ({full}); free some and run the command again", 1)
        if type(error).__name__ == "OutOfMemoryError":
            reason = str(error).partition(" If reserved")[0]
            return _say(f"error: the device's memory is full ({reason}); make batches smaller", 1)
        found = getattr(error, "exit_code", 2 if isinstance(error, (ValueError, OSError, ImportError)) else None)
        if found is None:
            raise
        if verbose:
            logging.getLogger(__name__).exception("traceback")
        if isinstance(error, ImportError) and error.name in EXTRAS:
            return _say(f"error: {error}: pip install 'tripletune[{EXTRAS[error.name]}]'", found)
        if isinstance(error, OSError) and error.filename and error.strerror:
            return _say(f"error: {error.filename}: {error.strerror}", found)
        # Higher codes say how a run ended well: replies are waited for.
        return _say(f"error: {error}" if found < 3 else str(error), found)
    finally:
        root.removeHandler(handler)
        root.setLevel(before)


def _full_disk(error: BaseException | None) -> str:
    """The message on a full disk in an error or its causes."""
    while error is not None:
        line = str(error).partition("\n")[0]
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or _FULL.search(line):
            return line
        error = error.__cause__ or error.__context__
    return ""


def _say(line: str, code: int) -> int:
    print(printable(line), file=sys.stderr)  # noqa: T201
    return code


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _Lines:
    """Standard error, on which tqdm begins each state of a bar with a carriage return instead of ending a line."""

    def write(self, text: str) -> None:
        if line := text.strip("\r\n"):
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of packages; a checkout that is not installed has none."""
    found = dict[str, str]()
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


@cache
def code_version() -> dict[str, str]:
    """Version of this code, and in a checkout its git commit, with "+changes" where files differ from it."""
    here, about = Path(__file__).resolve(), {"version": versions(["tripletune"])["tripletune"]}
    try:
        # In somebody else's repository, as a package that is installed there, this file is not tracked.
        for words in (["ls-files", "--error-unmatch", here.name], ["describe", "--always", "--abbrev=40", "--exclude=*",
                      "--dirty=+changes"]):  # fmt: skip
            git = subprocess.run(["git", "-C", here.parent, *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return about
    return about | {"commit": git.stdout.strip()}


def progress(items: Iterable[Any] | None = None, name: str = "", unit: str = "question", **more: Any) -> Any:
    """A bar of tqdm on a terminal, and elsewhere (logs, pipes) a line a minute; `more` are tqdm's arguments."""
    from tqdm import tqdm

    seconds = 0.1 if sys.stderr.isatty() else 60.0
    if not sys.stderr.isatty():
        more["file"] = _Lines()
    # A bar that is redrawn every `seconds` and not before that time: a short pass shows none in a log.
    more |= {"mininterval": seconds, "maxinterval": max(seconds, 10.0), "delay": seconds}
    return tqdm(items, name, unit=f" {unit}s", **more)


def names_in(package: str) -> list[str]:
    """Names of a package's modules without an underscore in front, and of its entry points; it alone is imported."""
    found = pkgutil.iter_modules(importlib.import_module(package).__path__)
    return sorted({module.name for module in found if not module.name.startswith("_")} | _installed(package).keys())


@cache
def _installed(package: str) -> dict[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=package)}


def load_from(package: str, name: str, kind: str) -> ModuleType:
    """The module of that name in a package; one of its own goes before an entry point."""
    known = names_in(package)
    if name not in known:
        raise ValueError(f"{kind} {name!r} is not one of {', '.join(known)}{nearest(name, known)}")
    entry = _installed(package).get(name)
    if entry is None or importlib.util.find_spec(f"{package}.{name}"):
        return importlib.import_module(f"{package}.{name}")
    try:
        return entry.load()
    except Exception as error:
        owner = entry.dist.name if entry.dist else "another package"
        raise ValueError(f"{kind} {name!r}, entry point {entry.value} of {owner}: {error}; see {owner}") from error


class CommandParser(argparse.ArgumentParser):
    """A command line with errors of one line with the nearest name, and help that lists settings without a flag.

    Args:
        example: A command that works. The help opens with it and its options, as those that most people need.
        how: How to give settings without a flag.
        others: Help on other uses of `--set NAME=VALUE`, which stay in the namespace's `set`.
        hands_on: Unknown words are left to the caller of `parse_known_args`.
        kind: The configuration whose settings unknown words may be; see `models.options.elsewhere`.
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
        self.example, self.how, self.others, self.hands_on, self.kind = example, how, others, hands_on, kind
        # Settings without a flag of their own by name: where they land in the namespace, and their help texts.
        self.settable: dict[str, tuple[str, str]] = {}
        self.set_defaults(settable=self.settable)

    def add_set(self) -> None:
        """Add `--set`, where something can be set by it."""
        by_set = self.others or (self.settable and self.how.startswith("--set"))
        if by_set and self.get_default("set") is None:
            about = self.others or "a setting of the list below; repeatable"
            self.add_argument("--set", action=_Set, default=[], metavar="NAME=VALUE", help=about)

    def _put_example_first(self) -> None:
        """Move the example, its options and the required ones to the start of the help; the usage names these alone."""
        words = {*self.example.partition("\n")[0].split()}
        first = [
            one for one in self._actions if one.required or not one.option_strings or words & {*one.option_strings}
        ]
        for either in self._mutually_exclusive_groups:
            if {*either._group_actions} & {*first}:
                first += [one for one in either._group_actions if one not in first]
        for group in self._action_groups:
            group._group_actions[:] = [one for one in group._group_actions if one not in first]
        top = self.add_argument_group("most used", f"example:\n  {self.example}")
        top._group_actions += first
        self._action_groups.insert(0, self._action_groups.pop())
        if self.usage is None:
            formatter = self._get_formatter()
            formatter.add_usage(None, first, self._mutually_exclusive_groups, "")
            self.usage = f"{formatter.format_help().strip()} [OPTIONS]"
        self.example = ""

    def format_help(self) -> str:
        """The help, with what most people need at its start and the settings that have no flag at its end."""
        self.add_set()
        if self.example:
            self._put_example_first()
        rows = [
            textwrap.fill(about.replace("%%", "%"), 118, initial_indent=f"  {name:28} ", subsequent_indent=" " * 31)
            for name, (_, about) in self.settable.items()
        ]
        return super().format_help() + "\n".join(["", f"more settings, by {self.how}:", *rows, ""] if rows else [])

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See `ArgumentParser`; an unknown word is an error of the command that it was given to."""
        self.add_set()
        if "_ARGCOMPLETE" in os.environ and not CommandParser.completing:
            import argcomplete

            CommandParser.completing = True
            argcomplete.autocomplete(self)
        self.words = sys.argv[1:] if args is None else list(args)
        for before, word in zip(["", *self.words], self.words):
            flag, equals, value = word.partition("=")
            if not word or (flag in self._option_string_actions and equals and not value):
                self.error(f"{flag or before or 'the command'}: {EMPTY}")
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and not self.hands_on:
            self.error(self._unrecognized(unknown))
        return found, unknown

    def _unrecognized(self, unknown: Sequence[str]) -> str:
        word = unknown[0].split("=")[0].lstrip("-")
        flags = [flag.lstrip("-") for flag in self._option_string_actions]
        told = self.kind and elsewhere(self.kind, word).replace(" is ", " is --").replace(" or ", " or --")
        told = told or nearest(word, flags).replace("mean ", "mean --")
        for name, (dest, _) in self.settable.items():
            if self.how.startswith("--set") and dest == word.replace("-", "_"):
                told = f" (it is set by --set {name}=VALUE)"
        return f"unrecognized arguments: {' '.join(unknown)}{told}"

    def error(self, message: str) -> typing.NoReturn:
        """End the program with one line; it names a misspelt flag before the flag that is missing because of it."""
        flags = [word for word in self.words if word.startswith("--") and word != "--"]
        unknown = [flag for flag in flags if flag.split("=")[0] not in self._option_string_actions]
        if unknown and not self.hands_on and message.startswith("the following arguments are required"):
            message = self._unrecognized(unknown)
        self.exit(2, f"error: {self.prog}: {message}; --help shows the options\n")


class _Set(argparse.Action):
    """`--set NAME=VALUE`: a setting without a flag, or a text for the program in `set`."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, text: Any, option_string: Any = None) -> None:
        name, equals, value = text.partition("=")
        dest, _ = parser.settable.get(name.strip().replace("-", "_"), ("", ""))
        if dest and equals:
            setattr(namespace, dest, value.strip())
        elif parser.others:
            namespace.set = [*namespace.set, text]
        else:
            parser.error(f"--set {text}: write it as NAME=VALUE; " + not_one_of("its name", name, [*parser.settable]))


def parse_command_line(
    kind: type[T], description: str, argv: Sequence[str] | None = None, **options: Any
) -> tuple[T, bool]:
    """Configuration and whether only a dry run is asked for, of `--config`, `--dry-run` and `--section.field VALUE`."""
    usage = "%(prog)s [--config FILE] [--dry-run] [--SECTION.FIELD VALUE ...]"
    how = "--SECTION.FIELD VALUE, or in the YAML file"
    parser = CommandParser(description=description, usage=usage, how=how, kind=kind, **options)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file of settings, or the name of one in recipes/configs; options override it",
    )
    parser.add_argument("--dry-run", action="store_true", help="show settings, counts, memory and a sample, then stop")
    groups: dict[str, Any] = {}
    settings = leaves(kind)
    for name, item in settings.items():
        value, section = default_of(item), name.rpartition(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(section) if section else parser
        group, shown = groups[section], _form(item)
        more: dict[str, Any] = {"action": _Repeatable} if isinstance(value, (list, tuple)) else {}
        about = _help(item, value)
        if not item.metadata.get("flag", True):
            parser.settable[name] = (name, f"{shown} {about}" if shown.startswith("{") else about)
            about = argparse.SUPPRESS
        group.add_argument(f"--{name}", dest=name, default=argparse.SUPPRESS, metavar=shown, help=about, **more)
    arguments = parser.parse_args(argv)
    # Values are text here: YAML would make a number of the revision 0123456 and a date of 2024-01-01.
    overrides = {name: value for name, value in vars(arguments).items() if name in settings}
    return load_config(kind, arguments.config, overrides), arguments.dry_run


def _form(item: dataclasses.Field[Any]) -> str:
    """How the value of a setting is written, for `--help`."""
    if choices := choices_of(item):
        return f"{{{','.join(choices)}}}"
    forms = {"list": "A,B", "tuple": "A,B", "bool": "{true,false}", "int": "N", "float": "N"}
    return next((form for kind, form in forms.items() if kind in str(item.type)), "VALUE")


def add_arguments(parser: Any, kind: type, prefix: str = "", only: Sequence[str] | None = None) -> None:
    """Give a parser (or a group of it) one `--name` per field of a flat dataclass.

    Args:
        prefix: With "teacher", the field `model` is `--teacher-model`.
        only: The fields, in this order; None takes all of them. One call per group puts options into groups.
    """
    hints = typing.get_type_hints(kind)
    fields = {item.name: item for item in dataclasses.fields(kind)}
    for item in (fields[name] for name in (fields if only is None else only)):
        default = default_of(item)
        if missing := default is dataclasses.MISSING:
            default = None
        hint = hints[item.name]
        if not item.metadata.get("flag", True):
            dest = _flag(item, prefix).replace("-", "_")
            parser.set_defaults(**{dest: default})
            name = f"{prefix}.{item.name}" if prefix else item.name
            allowed = f"{{{','.join(choices_of(item, hint))}}} " if choices_of(item, hint) else ""
            parser.get_default("settable")[name] = (dest, allowed + _help(item, default))
            continue
        is_list = typing.get_origin(hint) in (list, tuple)
        more: dict[str, Any] = {}
        if hint is bool:
            more["action"] = argparse.BooleanOptionalAction if default else "store_true"
        elif is_list:
            more["action"] = _Repeatable
        if not is_list and (choices := choices_of(item, hint)):
            more["choices"] = choices
        elif hint is not bool:
            number = {int, float} & {hint, *typing.get_args(hint)}
            more["metavar"] = "N" if number else item.name.rpartition("_")[2].upper()
        flags = [f"--{flag}" for flag in (_flag(item, prefix), item.metadata.get("also")) if flag]
        parser.add_argument(*flags, default=default, help=_help(item, default), required=missing, **more)


def add_short_flags(parser: Any, kind: type) -> None:
    """Give a parser (or a group of it) a flag for each field of options that the program takes by `--set`.

    `--top-k 5` is short for `--set top_k=5`, and `--no-planning`, of a field that is true by default, for `--set
    planning=no`. Both go into the namespace's `set`; the later one counts.
    """
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        if not item.metadata.get("flag", True):
            continue
        flag, more = _flag(item, ""), dict[str, Any]()
        if hints[item.name] is bool:
            flag = f"no-{flag}" if item.default else flag
            more = {"nargs": 0, "const": "no" if item.default else "yes"}
        elif choices := choices_of(item, hints[item.name]):
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
    """The dataclass of a command line that `add_arguments` gave; `given` replaces values of flags."""
    found: list[str] = []
    values = {}
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):  # type: ignore[arg-type]
        flag = _flag(item, prefix)
        value = given[item.name] if item.name in given else getattr(arguments, flag.replace("-", "_"))
        try:
            values[item.name] = convert(value, hints[item.name]) if isinstance(value, str) else value
        except ValueError as error:
            found.append(f"--{flag}: {error}" if item.metadata.get("flag", True) else f"--set {item.name}: {error}")
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
    """The command line of these options, without defaults."""
    words = []
    for item in dataclasses.fields(config):
        value, flag = getattr(config, item.name), f"--{_flag(item, prefix)}"
        if value == default_of(item):
            continue
        if not item.metadata.get("flag", True):
            text = ",".join(value) if isinstance(value, (list, tuple)) else str(value)
            words += ["--set", f"{prefix}.{item.name}={text}" if prefix else f"{item.name}={text}"]
        elif isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [w for one in (value if isinstance(value, (list, tuple)) else [value]) for w in (flag, str(one))]
    return words


def _flag(item: dataclasses.Field[Any], prefix: str) -> str:
    if prefix and item.metadata.get("is_prefix"):
        return prefix
    return (f"{prefix}-{item.name}" if prefix else item.name).replace("_", "-")


def _help(item: dataclasses.Field[Any], default: Any) -> str:
    shown = ", ".join(map(str, default)) if isinstance(default, (list, tuple)) else default
    end = "" if default is None or default is False or shown == "" else f" (default: {shown})"
    return f"{item.metadata.get('help', '')}{end}".replace("%", "%%")
