"""The schema of YAML files accepts what is shipped, and refuses what the programs refuse."""

import dataclasses
import json

import jsonschema
import pytest
import yaml

from tests.cli import run
from tripletune.config_schema import configuration_of, schema_of
from tripletune.core.config import CONFIGS
from tripletune.core.options import PlainNumbers

# The program of each shipped file, by a part of its name.
PROGRAMS = {
    "_ras_": "ras", "_t2t_": "text-to-triples", "_cirag_": "cirag-distill", "_grpo_": "grpo", "_expert_": "iterate",
    "_explagraphs": "ras", "_preference_": "cirag-distill", "example_documents": "own-documents",
}  # fmt: skip


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_files_fit(path):
    (program,) = {program for part, program in PROGRAMS.items() if part in path.stem}
    values = yaml.load(path.read_text(encoding="utf-8"), PlainNumbers)
    schema = schema_of(configuration_of(program), program)
    assert [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(values)] == []


@pytest.mark.parametrize("program", sorted(set(PROGRAMS.values()) | {"chat"}))
def test_no_setting_is_named_like_the_key_of_a_base_file(program):
    # `base:` names the file that a YAML file begins from, so a setting of this name could not be given there.
    assert "base" not in {field.name for field in dataclasses.fields(configuration_of(program))}


@pytest.mark.parametrize(
    "wrong",
    [
        {"train": {"epochs": "many"}},
        {"train": {"epoch": 1}},
        {"train": {"learning_rate": -1}},
        {"model": {"tune": "lara"}},
        {"modle": {}},
    ],
)
def test_wrong_files_do_not_fit(wrong):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema_of(configuration_of("ras"), "ras"))


def test_the_program_writes_a_file_with_help_and_defaults(tmp_path):
    output = tmp_path / "ras.schema.json"
    assert run("config-schema", "ras", "--output", str(output)).code == 0
    schema = json.loads(output.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    epochs = schema["properties"]["train"]["properties"]["epochs"]
    assert epochs["description"]
    assert "default" in epochs
    assert "base" in schema["properties"]
    assert "did you mean ras?" in run("config-schema", "res", "--output", str(output)).error
