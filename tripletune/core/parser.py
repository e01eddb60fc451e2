"""A command line's parser with clear errors and help; `core.command_line` adds flags for the fields of dataclasses.

Tested in `tests/core/test_options.py` and `tests/train/test_other_trainers.py`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tripletune.core import libraries
from tripletune.core.config import elsewhere, similar_setting
from tripletune.core.options import EMPTY, leaves, nearest, not_one_of

libraries.check_use("command lines")

# A value with another option behind a comma; a value that holds names and values itself begins with one.
_NEXT_OPTION = re.compile(r"[^=,]*,\s*([\w.-]+)=")


class Settable(NamedTuple):
    """A setting without a flag: its name in the namespace, and its help text."""

    dest: str
    about: str


class CommandParser(argparse.ArgumentParser):
    """A command line whose one-line errors suggest the nearest name, and whose help lists settings without a flag.

    Args:
        example: A command that works. The help begins with this command and its options.
        how: How to give settings without a flag.
        others: Help text for other uses of `--set NAME=VALUE`; their values are stored in the namespace's `set`.
        hands_on: Whether the caller of `parse_known_args` handles unknown words.
        kind: The configuration in which to look up unknown words; see `core.config.elsewhere`.
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
        """Make the parser; `options` are arguments of `argparse.ArgumentParser`, which checks them."""
        # Examples in descriptions keep their lines.
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        # An abbreviation would become ambiguous, or mean another option, when options are added.
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)
        # The action of options that name none: argparse's own keeps the last value, and drops others without a word.
        self.register("action", None, _StoreOnce)
        self.register("action", "join", _Join)
        # The values of the options that the words of one command line had so far, by the option's name.
        self.given: dict[str, object] = {}
        self.example = example
        self.how = how
        self.others = others
        self.hands_on = hands_on
        self.kind = kind
        # Settings without a flag by name.
        self.settable: dict[str, Settable] = {}
        # More names for --set, with their help texts, by the title of their list.
        self.listed: dict[str, dict[str, str]] = {}
        # Called with the words of a command line before they are parsed; it may add options.
        self.before_parsing: Callable[[Sequence[str]], None] | None = None
        # Titles and functions that return lists of names with a line on each, which only the help shows.
        self.explained: dict[str, Callable[[], dict[str, str]]] = {}
        self.set_defaults(settable=self.settable)

    def add_set(self) -> None:
        """Add `--set` if there are settings without a flag.

        It is added late, when the help is shown or words are parsed, since only then all settings are known.
        """
        by_set = self.others or (self.settable and self.how.startswith("--set"))
        if by_set and self.get_default("set") is None:
            about = self.others or "set a setting of the list below; repeatable"
            self.add_argument("--set", action=_Set, default=[], metavar="NAME=VALUE", help=about)

    def _put_example_first(self) -> None:
        """Move the example and its and all required options to the start of the help; the usage names only these.

        Programs have up to a hundred options, and a newcomer needs a few. argparse shows groups in the order in which
        they were made, so the new group is made last and moved to the start.
        """
        first = self._first_actions()
        for group in self._action_groups:
            group._group_actions[:] = [action for action in group._group_actions if action not in first]
        top = self.add_argument_group("most used", f"example:\n  {self.example}")
        top._group_actions += first
        self._action_groups.insert(0, self._action_groups.pop())
        if self.usage is None:
            formatter = self._get_formatter()
            formatter.add_usage(None, first, self._mutually_exclusive_groups, "")
            self.usage = f"{formatter.format_help().strip()} [OPTIONS]"
        # The groups are changed for good, so a second call must not move them again.
        self.example = ""

    def _first_actions(self) -> list[argparse.Action]:
        """The options of the example's first line, all that are required, and what excludes one of these."""
        words = set(self.example.partition("\n")[0].split())
        first = []
        for action in self._actions:
            is_positional = not action.option_strings
            is_in_example = words & set(action.option_strings)
            if action.required or is_positional or is_in_example:
                first.append(action)
        for alternatives in self._mutually_exclusive_groups:
            if set(alternatives._group_actions) & set(first):
                first += [action for action in alternatives._group_actions if action not in first]
        return first

    def format_help(self) -> str:
        """The help, which begins with the most used options and ends with the settings without a flag.

        Lists that take time to make, such as the tasks that packages add (`explained`), are made only for it.
        """
        self.add_set()
        if self.example:
            self._put_example_first()
        text = super().format_help()
        lists = dict(self.listed)
        for title, explain in self.explained.items():
            lists[title] = explain()
        if self.settable:
            lists[f"more settings, by {self.how}:"] = {name: about for name, (_, about) in self.settable.items()}
        for title, settings in lists.items():
            text += f"\n{title}\n"
            for name, about in settings.items():
                # Written for argparse, which formats its own texts.
                about = about.replace("%%", "%")
                text += textwrap.fill(about, 118, initial_indent=f"  {name:28} ", subsequent_indent=" " * 31) + "\n"
        return text

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse arguments as `ArgumentParser` does; an unknown word is reported by the command that received it.

        `ArgumentParser` would let the top parser report it, which does not know the names of a command. An empty
        word, such as `--model "$MODEL"` with an unset variable, is refused: it would mean the default, or no limit.
        """
        self.add_set()
        if "_ARGCOMPLETE" in os.environ and not CommandParser.completing:
            import argcomplete

            CommandParser.completing = True
            argcomplete.autocomplete(self)
        if args is None:
            args = sys.argv[1:]
        self.words = list(args)
        self.given = {}
        if self.before_parsing is not None:
            self.before_parsing(self.words)
        # After `before_parsing`, which may add the flags that are looked for.
        self._refuse_empty_words()
        parsed, unknown = super().parse_known_args(self.words, namespace)
        if unknown and not self.hands_on:
            self.error(self._unrecognized_message(unknown))
        return parsed, unknown

    def _refuse_empty_words(self) -> None:
        """Exit with an error for an empty word, or for `--flag=` without a value; the flag before it is named."""
        # Each word with the one before it, so the first list has one word more.
        for before, word in zip(["", *self.words], self.words, strict=False):
            flag, equals, value = word.partition("=")
            lacks_value = flag in self._option_string_actions and equals and not value
            if not word or lacks_value:
                self.error(f"{flag or before or 'the first argument'}: {EMPTY}")

    def _unrecognized_message(self, unknown: Sequence[str]) -> str:
        """The error text for unknown words, with the name that was probably meant behind each of them."""
        said: list[str] = []
        for word in unknown:
            if said and not word.startswith("--"):
                # A value: the advice stands behind it.
                said[-1] += f" {word}"
            else:
                said.append(word)
        for number, words in enumerate(said):
            flag = words.partition(" ")[0].partition("=")[0]
            said[number] += self._advice_for_flag(flag.lstrip("-"))
        return f"unrecognized arguments: {' '.join(said)}"

    def _advice_for_flag(self, word: str) -> str:
        """The name that was probably meant with an unknown flag, in brackets; "" if no name is near.

        The surest advice wins: the same name by `--set`, then the same setting elsewhere, then a similar flag.
        """
        name = word.replace("-", "_")
        if self.how.startswith("--set"):
            by_set = {dest: set_name for set_name, (dest, _) in self.settable.items()}
            for names in self.listed.values():
                by_set |= {listed: listed for listed in names}
            if name in by_set:
                return f" (write --set {by_set[name]}=VALUE)"
        flags = [flag.lstrip("-") for flag in self._option_string_actions]
        if not self.kind:
            return nearest(word, flags, flag="--")
        # Flags of settings are compared without their sections, which would make all of a section similar.
        others = [flag for flag in flags if flag not in leaves(self.kind)]
        advice = elsewhere(self.kind, word, flag="--") or similar_setting(self.kind, word, flag="--")
        return advice or nearest(word, others, flag="--")

    def error(self, message: str) -> typing.NoReturn:
        """Exit with one line; it names a misspelt flag instead of the required flag that is missing because of that."""
        flags = [word for word in self.words if word.startswith("--") and word != "--"]
        unknown = [flag for flag in flags if flag.split("=")[0] not in self._option_string_actions]
        # argparse checks the required flags first, and would not come to the unknown one.
        lacks_required = message.startswith("the following arguments are required")
        if lacks_required and unknown and not self.hands_on:
            message = self._unrecognized_message(unknown)
        self.exit(2, f"error: {self.prog}: {message}; --help shows the options\n")


class _StoreOnce(argparse.Action):
    """An option with one value: another value is refused, since it would silently replace the first one."""

    def __call__(  # type: ignore[override]
        self, parser: CommandParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """Store the value, or exit with an error that names both values."""
        first = values
        if option_string is not None:
            first = parser.given.setdefault(self.dest, values)
        # A value that is not a number differs from itself.
        if first is not values and first != values:
            parser.error(f"{option_string} is given twice, as {first} and {values}: give it once")
        setattr(namespace, self.dest, values)


class _Join(argparse.Action):
    """An option for which `--x a --x b` means `--x a,b`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Add a value to those that were given before; the first one replaces the default."""
        earlier = getattr(namespace, self.dest, self.default)
        if earlier is not self.default:
            values = f"{earlier},{values}"
        setattr(namespace, self.dest, values)


class _Set(argparse.Action):
    """Store `--set NAME=VALUE`, as a setting without a flag, or as a text in the namespace's `set`."""

    def __call__(  # type: ignore[override]
        self, parser: CommandParser, namespace: argparse.Namespace, text: str, option_string: str | None = None
    ) -> None:
        """Store a value; a name that is no setting without a flag is left to the program, if it takes others."""
        name, equals, value = text.partition("=")
        joined = _NEXT_OPTION.match(value)
        if joined and joined[1].replace("-", "_") in parser.settable:
            parser.error(f"--set {text}: each option has its own --set: --set {name}=… --set {joined[1]}=…")
        dest, _ = parser.settable.get(name.strip().replace("-", "_"), ("", ""))
        if dest and equals:
            setattr(namespace, dest, value)
        elif parser.others:
            namespace.set = [*namespace.set, text]
        else:
            parser.error(f"--set {text}: write it as NAME=VALUE; " + not_one_of("its name", name, [*parser.settable]))
