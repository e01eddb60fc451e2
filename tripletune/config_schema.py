"""Write the JSON Schema of a program's YAML files, so that an editor completes and checks them.

Begin a YAML file with the line `# yaml-language-server: $schema=FILE`.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

from tripletune.core.command_line import CommandParser
from tripletune.core.files import check_new, write_json
from tripletune.core.options import TypeHint, choices_of, not_one_of
from tripletune.core.plugins import load_from, names_in
from tripletune.core.program import run_program

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
# What JSON Schema calls the ranges of `core.options.About`.
_RANGES = {"at_least": "minimum", "above": "exclusiveMinimum", "at_most": "maximum", "below": "exclusiveMaximum"}
_BASE = {"type": "string", "description": "YAML file whose settings this file overrides, relative to this file"}
# Programs with a configuration that is no training task: module and class.
_RECIPES = {"own-documents": ("own_documents", "OwnDocumentsConfig"), "iterate": ("expert_iteration", "ExpertConfig")}


def schema_of(kind: type, title: str) -> dict[str, Any]:
    """The JSON Schema of the YAML files of a configuration, which is a dataclass of settings and sections.

    A file holds only the settings that differ from the defaults, so none is required. Checks that concern several
    settings are left to the program.
    """
    schema = _schema_of_section(kind)
    schema["properties"] = {"base": _BASE, **schema["properties"]}
    return {"$schema": _DIALECT, "title": title, **schema}


def _schema_of_section(kind: type) -> dict[str, Any]:
    """The schema of a configuration or of one of its sections; other names are errors, as they are when it is read."""
    hints = typing.get_type_hints(kind)
    properties: dict[str, Any] = {}
    for item in dataclasses.fields(kind):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            properties[item.name] = _schema_of_section(typing.cast(type, hint))
        else:
            properties[item.name] = _schema_of_setting(item, hint)
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _schema_of_setting(item: dataclasses.Field[Any], hint: TypeHint) -> dict[str, Any]:
    """The schema of a setting with its help and its default, which editors show."""
    schema = _schema_of_values(hint, item)
    if "help" in item.metadata:
        schema["description"] = item.metadata["help"]
    if item.default is not dataclasses.MISSING:
        schema["default"] = item.default
    elif item.default_factory is not dataclasses.MISSING:
        schema["default"] = item.default_factory()
    return schema


def _schema_of_values(hint: TypeHint, item: dataclasses.Field[Any]) -> dict[str, Any]:
    """The schema of the values of a type; choices and ranges are those of the field.

    A type that is not known here accepts every value: the program itself still checks it.
    """
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_schema_of_values(alternative, item) for alternative in arguments]}
    if hint is type(None):
        return {"type": "null"}
    if origin is Literal:
        return {"enum": list(arguments)}
    if hint in _TYPES:
        schema: dict[str, Any] = {"type": _TYPES[hint]}
        if hint in (int, float):
            schema |= {_RANGES[word]: item.metadata[word] for word in _RANGES if word in item.metadata}
        choices = choices_of(item)
        if hint is str and choices:
            schema["enum"] = list(choices)
        return schema
    if origin in (list, tuple):
        # A list of one value may also be written without brackets.
        one = _schema_of_values(arguments[0], item)
        return {"anyOf": [{"type": "array", "items": one}, one]}
    if hint is dict or origin is dict:
        return {"type": "object"}
    return {}


def configuration_of(program: str) -> type:
    """The class of a program's configuration: a training task, `own-documents` or `iterate`."""
    tasks = {name.replace("_", "-"): name for name in names_in("tripletune.train.tasks")}
    if program in tasks:
        kind: type = load_from("tripletune.train.tasks", tasks[program], "training task").TASK.Config
        return kind
    if program in _RECIPES:
        module, name = _RECIPES[program]
        recipe: type = getattr(load_from("tripletune.recipes", module, "recipe"), name)
        return recipe
    raise ValueError(not_one_of("program", program, sorted([*tasks, *_RECIPES])))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; bad input prints one line and gives exit code 2."""
    parser = CommandParser(
        prog="tripletune config-schema",
        description=(__doc__ or "").split("\n")[0],
        example="tripletune config-schema ras --output ras.schema.json",
    )
    parser.add_argument("program", help="training task (ras, text-to-triples, …), own-documents or iterate")
    parser.add_argument("--output", required=True, help="file to write; an existing file is replaced")
    parsed = parser.parse_args(arguments)

    def write() -> None:
        """Write the schema; the configuration is found first, so that a wrong name leaves no file."""
        schema = schema_of(configuration_of(parsed.program), f"tripletune {parsed.program}")
        check_new(parsed.output, ())
        write_json(parsed.output, schema)

    return run_program(write)


if __name__ == "__main__":
    sys.exit(main())
