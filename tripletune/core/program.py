"""Common parts of programs: command line, logging, exit codes, one-line errors, and plug-ins.

Every module in the folders of backends, readers, systems and tasks is a plug-in.
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

from tripletune.core.options import (
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
from tripletune.core.tables import printable

T = TypeVar("T")
# Third parties that log each HTTP request and index build.
NOISY = ("absl", "anthropic", "bm25s", "faiss", "httpcore", "httpcore2", "httpx", "httpx2", "openai",
         "sentence_transformers", "urllib3", "uvicorn")  # fmt: skip
# How torch, numpy, safetensors, Arrow and SQLite report a full disk, besides `ENOSPC`.
_FULL = re.compile(
    r"(?i)no space left|disk quota|disk is full|file write failed|inline_container.*unexpected pos|basic_ios::clear|"
    r"\d+ requested and \d+ written"
)
# Optional packages, and the extra that installs each of them.
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
        0 for success, 2 for bad input, 1 for a full disk or memory, 130 for an interrupt, or the attribute `exit_code`
        of an exception.
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
        # These warn of future changes in libraries, such as old names in transformers that PEFT still uses.
        warnings.filterwarnings("ignore", category=FutureWarning)
    # Drop transformers' warning about missing weights, since `models.loading.complete` raises an error for them. (A
    # higher level of this logger would make transformers check plans of tensor parallelism.)
    logging.getLogger("transformers.modeling_utils").addFilter(lambda record: record.levelno >= logging.ERROR)
    try:
        code = program() or 0
        # Flush here, so that a broken pipe raises its error now and not at exit.
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of the pipe, for example `head`, has closed it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _say(stopped, 130)
    except Exception as error:
        if full := _full_disk(error):
            return _say(f"error: no space left on the disk ({full}); free some space, then run the command again", 1)
        if type(error).__name__ == "OutOfMemoryError":
            reason = str(error).partition(" If reserved")[0]
            return _say(f"error: the device's memory is full ({reason}); use smaller batches", 1)
        bad = isinstance(error, (ValueError, OSError, ImportError)) or str(error).startswith("Symlink loop")
        found = getattr(error, "exit_code", 2 if bad else None)
        if found is None:
            raise
        if verbose:
            logging.getLogger(__name__).exception("traceback")
        if isinstance(error, ImportError) and error.name in EXTRAS:
            return _say(f"error: {error}: run pip install 'tripletune[{EXTRAS[error.name]}]'", found)
        if isinstance(error, OSError) and error.filename and error.strerror:
            return _say(f"error: {error.filename}: {error.strerror}", found)
        # Codes from 3 on are no errors: the run waits for replies.
        return _say(f"error: {error}" if found < 3 else str(error), found)
    finally:
        root.removeHandler(handler)
        root.setLevel(before)


def _full_disk(error: BaseException | None) -> str:
    """The message about a full disk in an error or its causes; "" if there is none."""
    while error is not None:
        line = re.sub(r"^\[Errno \d+\] ", "", str(error).partition("\n")[0])
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
    """Write each state of a tqdm bar to standard error as a line, without tqdm's carriage returns."""

    def write(self, text: str) -> None:
        if line := text.strip("\r\n"):
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of packages by name; "not installed" for a missing package."""
    found = dict[str, str]()
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


@cache
def code_version() -> dict[str, str]:
    """The version of this code, and in a checkout its git commit, with "+changes" if files were changed."""
    here, about = Path(__file__).resolve(), {"version": versions(["tripletune"])["tripletune"]}
    try:
        # If the package is installed inside another repository, git does not track this file there.
        for words in (["ls-files", "--error-unmatch", here.name], ["describe", "--always", "--abbrev=40", "--exclude=*",
                      "--dirty=+changes"]):  # fmt: skip
            git = subprocess.run(["git", "-C", here.parent, *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return about
    return about | {"commit": git.stdout.strip()}


def progress(items: Iterable[Any] | None = None, name: str = "", unit: str = "question", **more: Any) -> Any:
    """A tqdm bar on a terminal, or one line per minute elsewhere (logs, pipes); `more` are arguments of tqdm."""
    from tqdm import tqdm

    seconds = 0.1 if sys.stderr.isatty() else 60.0
    if not sys.stderr.isatty():
        more["file"] = _Lines()
    # The bar is first drawn after `seconds`, so a short pass leaves no line in a log.
    more |= {"mininterval": seconds, "maxinterval": max(seconds, 10.0), "delay": seconds}
    return tqdm(items, name, unit=f" {unit}s", **more)


def names_in(package: str) -> list[str]:
    """Names of a package's public modules and entry points; no module of the package is imported."""
    found = pkgutil.iter_modules(importlib.import_module(package).__path__)
    return sorted({module.name for module in found if not module.name.startswith("_")} | _installed(package).keys())


@cache
def _installed(package: str) -> dict[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=package)}


def load_from(package: str, name: str, kind: str) -> ModuleType:
    """Import a module of a package by name; a module in the package is preferred to an entry point."""
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
        raise ValueError(f"{kind} {name!r} can't be loaded ({entry.value} of the package {owner}): {error}") from error


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
        self.example, self.how, self.others, self.hands_on, self.kind = example, how, others, hands_on, kind
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
        """The help, which begins with the most used options and ends with the settings without a flag."""
        self.add_set()
        if self.example:
            self._put_example_first()
        rows = [
            textwrap.fill(about.replace("%%", "%"), 118, initial_indent=f"  {name:28} ", subsequent_indent=" " * 31)
            for name, (_, about) in self.settable.items()
        ]
        return super().format_help() + "\n".join(["", f"more settings, by {self.how}:", *rows, ""] if rows else [])

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments as `ArgumentParser` does; an unknown word is reported by the command that received it."""
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
                told = f" (write --set {name}=VALUE)"
        return f"unrecognized arguments: {' '.join(unknown)}{told}"

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
    # Values stay text here, since YAML would turn the revision 0123456 into a number and 2024-01-01 into a date.
    overrides = {name: value for name, value in vars(arguments).items() if name in settings}
    return load_config(kind, arguments.config, overrides), arguments.dry_run


def _form(item: dataclasses.Field[Any]) -> str:
    """The form of a setting's value, for `--help`."""
    if choices := choices_of(item):
        return f"{{{','.join(choices)}}}"
    forms = {"list": "A,B", "tuple": "A,B", "bool": "{true,false}", "int": "N", "float": "N"}
    return next((form for kind, form in forms.items() if kind in str(item.type)), "VALUE")


def add_arguments(parser: Any, kind: type, prefix: str = "", only: Sequence[str] | None = None) -> None:
    """Add one flag `--name` per field of a flat dataclass to a parser or a group.

    Args:
        prefix: With "teacher", the field `model` becomes `--teacher-model`.
        only: The fields to add, in this order; None: all fields.
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
    """Add a flag to a parser or a group for each field that the program also accepts by `--set`.

    `--top-k 5` abbreviates `--set top_k=5`. For a field that is true by default, `--no-planning` abbreviates `--set
    planning=no`. Both forms are stored in the namespace's `set`; the last one wins.
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
    """A flag that abbreviates `--set NAME=VALUE`; `const` is the value of a flag without argument."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        name = self.dest.removeprefix("no_") if self.const == "no" else self.dest
        namespace.set = [*namespace.set, f"{name}={self.const or values}"]


class _Repeatable(argparse.Action):
    """An option for which `--x a --x b` means `--x a,b`."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest, self.default)
        setattr(namespace, self.dest, values if before is self.default else f"{before},{values}")


def from_arguments(kind: type[T], arguments: argparse.Namespace, prefix: str = "", **given: Any) -> T:
    """Build the dataclass from the flags that `add_arguments` added; `given` replaces values of flags."""
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
    """The command-line words of these options; options at their default are left out."""
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
