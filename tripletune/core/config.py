"""Read a configuration: a YAML file with its `base:` file and overrides by dotted names, built into a dataclass.

An unknown name is answered with the setting that does the same (`elsewhere`), or with a similar one.
Fields, checks and the conversion of values are in `core.options`. All problems of a configuration are reported
together, with the file or the command line that they come from.

Tested in `tests/core/test_options.py`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import yaml

from tripletune.core.files import flatten, own_or_packaged, read_text
from tripletune.core.options import (
    ConfigError,
    PlainNumbers,
    convert,
    leaves,
    not_one_of,
    problems,
    shown,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
# Similarity from which a name may be a slip of the keys: "epohcs" is one of "epochs", "val_size" none of "batch_size".
_SLIP = 0.75
CONFIGS = Path(__file__).parents[1] / "recipes" / "configs"


class Elsewhere(NamedTuple):
    """What a name of another program means here.

    Attributes:
        settings: The settings that do the same; a configuration may have only some of them.
        note: What differs, such as the unit, or what to do if there is no such setting.
    """

    settings: tuple[str, ...]
    note: str = ""


def load_config(kind: type[T], path: str | Path | None, overrides: Mapping[str, Any] | None = None) -> T:
    """Read a YAML file (None: the defaults) into a dataclass, apply overrides by dotted names, and check everything.

    The name of a file in recipes/configs, which is part of the package, is also accepted as path, and so is its path in
    the project.

    Raises:
        ConfigError: Names or values are wrong; the message lists all problems.
    """
    overrides = overrides or {}
    if path is not None and not Path(path).suffix and not Path(path).exists():
        path = _shipped_file(str(path))
    tree = read_yaml(own_or_packaged(path)) if path is not None else {}
    in_file = flatten(tree, ".")
    for name, value in overrides.items():
        _put_at_dotted_name(tree, name, value, str(path))
    messages: list[str] = []
    config = _build_section(kind, tree, "", messages, kind)
    if not messages:
        # Checked only if every value has its type, since a value that could not be read is the default here.
        messages = problems(config)
    if messages:
        raise ConfigError(_all_problems(messages, path, overrides, in_file))
    return config


def _shipped_file(name: str) -> Path:
    """The YAML file of the package with this name, in any folder of recipes/configs."""
    shipped = {file.stem: file for file in CONFIGS.rglob("*.yaml")}
    if name not in shipped:
        raise FileNotFoundError(f"no such file, and {not_one_of('configuration', name, sorted(shipped))}")
    return shipped[name]


def to_yaml(config: DataclassInstance) -> str:
    """The resolved configuration as YAML."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read names and values of a YAML file, which override those of its `base:` file.

    A base file may name another one. Its path counts from the file that names it, so that files can be moved together.
    """
    path = Path(path)
    seen: list[Path] = []
    tree: dict[str, Any] = {}
    while True:
        if path.resolve() in seen:
            raise ConfigError(f"{path}: the chain of base files leads back to this file")
        seen.append(path.resolve())
        own = _read_yaml_file(path)
        base = own.pop("base", None)
        # What was read before stands in the file that names this one, and wins.
        _merge_into(own, tree)
        tree = own
        if base is None:
            return tree
        path = path.parent / str(base)


def _read_yaml_file(path: Path) -> dict[str, Any]:
    """The names and values of one YAML file, `base` among them; an empty file has none.

    Deep nesting ends Python's stack in the parser, which would look like a fault of this program.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such configuration file: {path}")
    text = read_text(path)
    try:
        loaded = yaml.load(text, _UniqueKeys)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path} is not valid YAML: it is nested too deeply") from None
    if loaded is not None and not isinstance(loaded, dict):
        raise ConfigError(f"{path}: expected names and values, found {type(loaded).__name__}")
    if _holds_itself(loaded, frozenset(), set()):
        raise ConfigError(f"{path}: an alias (*) stands inside of the value that it repeats")
    return loaded or {}


def _holds_itself(value: object, above: frozenset[int], checked: set[int]) -> bool:
    """Whether a value of YAML holds itself, by an alias; a value that is repeated often is looked at once.

    Args:
        above: Identities of the values that hold this one.
        checked: Identities of the values that do not hold themselves.
    """
    if id(value) in above:
        return True
    if not isinstance(value, (dict, list)) or id(value) in checked:
        return False
    inside = above | {id(value)}
    for inner in value.values() if isinstance(value, dict) else value:
        if _holds_itself(inner, inside, checked):
            return True
    checked.add(id(value))
    return False


def _merge_into(tree: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Replace the leaves of a tree of names and values, in place, by those of `overrides`.

    Sections are merged name by name, so that a variant's file holds only what differs. Lists are replaced as a whole.
    """
    for name, value in overrides.items():
        if isinstance(value, dict) and isinstance(tree.get(name), dict):
            _merge_into(tree[name], value)
        else:
            tree[name] = value


class _UniqueKeys(PlainNumbers):
    """A safe loader that rejects a repeated name, whose first value YAML would silently drop."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Make a mapping, after a look at its names, which are still all there in the node."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # PyYAML rejects such keys
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value} is given twice: give it only once", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _put_at_dotted_name(tree: dict[str, Any], name: str, value: Any, path: str) -> None:
    """Put a value at a dotted name into the tree that was read from `path`.

    Whether there is such a setting is checked later, with those of the file.

    Raises:
        ConfigError: The file has a value where the name needs a section.
    """
    *sections, leaf = name.split(".")
    for section in sections:
        if tree.get(section) is None:
            tree[section] = {}  # the file lacks this section, or has it without lines
        tree = tree[section]
        if not isinstance(tree, dict):
            raise ConfigError(f"{path}: {section}: expected names and values, found {shown(tree)}")
    tree[leaf] = value


def _build_section(kind: type[T], tree: Any, prefix: str, messages: list[str], whole: type) -> T:
    """Build a section of a configuration from names and values; a wrong value is reported and left at its default.

    Args:
        kind: The section's class.
        tree: Names and values, as YAML gives them.
        prefix: The section's dotted name with a dot behind it; "" for the whole configuration.
        messages: The problems so far; those of this section are added.
        whole: The configuration's class, whose other sections may have a setting that is unknown here.
    """
    if not isinstance(tree, dict):
        messages.append(f"{prefix.rstrip('.')}: expected names and values, found {shown(tree)}")
        return kind()
    hints = typing.get_type_hints(kind)
    names = [item.name for item in dataclasses.fields(kind)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in names:
            advice = elsewhere(whole, f"{prefix}{key}") or similar_setting(whole, f"{prefix}{key}")
            messages.append(f"unknown key {prefix}{key}{advice}")
        elif dataclasses.is_dataclass(hints[key]):
            section: Any = hints[key]
            # A section without lines below it is None in YAML.
            inner = {} if value is None else value
            values[key] = _build_section(section, inner, f"{prefix}{key}.", messages, whole)
        else:
            try:
                values[key] = convert(value, hints[key])
            except ValueError as error:
                messages.append(f"{prefix}{key}: {error}")
    return kind(**values)


def elsewhere(kind: type, name: str, flag: str = "") -> str:
    """` (here it is X)` for a name of another program (see the class's `elsewhere`), or of another section.

    Users bring names from other trainers, and a name that is merely similar would mislead them. The section that they
    write before a name does not matter. The table comes first, since a name that we have too may mean something else
    there.
    """
    leaf = name.rpartition(".")[2].replace("-", "_")
    own_names = leaves(kind)
    meaning = kind.elsewhere().get(leaf) if hasattr(kind, "elsewhere") else None
    if meaning is None:
        same = [own_name for own_name in own_names if own_name.rpartition(".")[2] == leaf]
        meaning = Elsewhere(tuple(same))
    settings = [f"{flag}{setting}" for setting in meaning.settings if setting in own_names]
    if settings:
        note = f": {meaning.note}" if meaning.note else ""
        return f" (here it is {' or '.join(settings)}{note})"
    if meaning.settings:
        return f" (other tasks have {' or '.join(meaning.settings)}, this one has not)"
    if meaning.note:
        return f" ({meaning.note})"
    return ""


def similar_setting(kind: type, name: str, flag: str = "") -> str:
    """` (did you mean SECTION.X?)` for the setting whose name, without its section, is most similar; "" without one.

    Of equally similar settings, the one of the same section is named.
    """
    section, _, leaf = name.replace("-", "_").rpartition(".")
    best_name = ""
    # Similarity of the names, then whether the sections are the same, which decides only between equals.
    best = (_SLIP, False)
    for own_name in leaves(kind):
        own_section, _, own_leaf = own_name.rpartition(".")
        similarity = (SequenceMatcher(None, leaf, own_leaf).ratio(), own_section == section)
        if similarity > best:
            best_name, best = own_name, similarity
    if not best_name:
        return ""
    return f" (did you mean {flag}{best_name}?)"


def _all_problems(
    messages: Sequence[str], path: str | Path | None, overrides: Mapping[str, Any], in_file: Mapping[str, Any]
) -> str:
    """One message that lists all problems, and says whether they come from the file, the command line or both.

    A problem belongs to the command line if it names a setting that was given there. If it also names a setting of the
    file, which somebody else may have written, it says so.

    Args:
        in_file: Values of the file by dotted names, before the command line replaced some of them.
    """
    of_command_line = []
    listed = []
    for message in messages:
        given = [name for name in overrides if name in message]
        if given:
            of_command_line.append(message)
            for name, value in in_file.items():
                if name in message and name not in overrides:
                    message += f" ({name} {shown(value)} is in {path})"
        listed.append(f"  - {message}")
    places = []
    if path is not None and len(of_command_line) < len(messages):
        places.append(str(path))
    if path is None or of_command_line:
        places.append("the command line")
    lines = "\n".join(listed)
    return f"{' and '.join(places)}: {len(messages)} problem(s)\n{lines}"
