"""Flags, YAML and `--set` from one dataclass; every problem at once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from tripletune.models.options import (
    ConfigError,
    add_arguments,
    from_arguments,
    load_config,
    parse_command_line,
    problems,
    set_values,
    setting,
    to_yaml,
)


@dataclass
class Inner:
    rate: float = setting(1e-5, "learning rate", above=0)
    kind: Literal["cosine", "linear"] = setting("cosine", "schedule")
    names: list[str] = setting(["a"], "names", choices=("a", "b"))
    revision: str | None = setting(None, "hub revision")


@dataclass
class Outer:
    steps: int = setting(3, "steps", at_least=1, at_most=9)
    quiet: bool = setting(False, "say less")
    inner: Inner = field(default_factory=Inner)

    def check(self) -> list[str]:
        return ["quiet: only with one step"] if self.quiet and self.steps > 1 else []


def test_a_file_its_base_and_the_command_line_in_this_order(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("steps: 5\ninner: {rate: 1e-3, kind: linear}\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "run.yaml").write_text("base: ../base.yaml\ninner: {rate: 2}\n")
    config, dry = parse_command_line(Outer, "", ["--config", str(tmp_path / "deep" / "run.yaml"), "--inner.names", "b"])
    assert (config.steps, config.inner.rate, config.inner.kind, config.inner.names, dry) == (
        5,
        2.0,
        "linear",
        ["b"],
        False,
    )
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(Outer, tmp_path / "again.yaml") == config


def test_bases_that_go_round_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: a.yaml\n")
    with pytest.raises(ConfigError, match="back to itself"):
        load_config(Outer, tmp_path / "a.yaml")


def test_every_problem_is_reported_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("step: 2\nsteps: 1.5\ninner: {rate: x, kind: cosin, revision: 0123456}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(Outer, tmp_path / "run.yaml")
    for said in ("unknown key step (did you mean steps?)", "steps: 1.5 is not a whole number", "inner.rate: 'x' is not",
                 "did you mean cosine?", "put text in quotes", "5 problem(s)", "run.yaml"):  # fmt: skip
        assert said in str(caught.value)


def test_ranges_choices_and_what_a_section_says() -> None:
    config = Outer(12, True, Inner(0, names=["c"]))
    assert problems(config) == [
        "steps: 12 must be at least 1 and at most 9",
        "inner.rate: 0 must be greater than 0",
        "inner.names: 'c' is not one of a, b",
        "quiet: only with one step",
    ]
    assert problems(Outer(inner=Inner(float("nan")))) == ["inner.rate: nan is not a finite number"]


def test_text_of_the_command_line_stays_text() -> None:
    config, _ = parse_command_line(Outer, "", ["--inner.revision", "0123456"])
    assert config.inner.revision == "0123456"
    config, _ = parse_command_line(Outer, "", ["--inner.revision", "null", "--quiet", "true", "--steps", "1"])
    assert (config.inner.revision, config.quiet) == (None, True)
    with pytest.raises(ConfigError, match=r"--inner.rat \(did you mean --inner.rate\?\)"):
        parse_command_line(Outer, "", ["--inner.rat", "1"])


@pytest.mark.parametrize(
    ("text", "said"),
    [("a: 1\na: 2\n", "twice"), ("- 1\n", "names and values"), ("a: [\n", "valid YAML"), ("[" * 20000, "too deeply"),
     ("!!python/object:os.system x\n", "valid YAML")],
)  # fmt: skip
def test_a_file_that_is_no_configuration_is_one_clear_error(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_config(Outer, tmp_path / "run.yaml")


def test_flags_of_a_flat_dataclass() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, Inner, "teacher")
    found = from_arguments(Inner, parser.parse_args(["--teacher-kind", "linear", "--teacher-names", "a,b"]), "teacher")
    assert found == Inner(kind="linear", names=["a", "b"])
    with pytest.raises(ConfigError, match=r"options --teacher-.*rate: 0.0 must be greater than 0"):
        from_arguments(Inner, parser.parse_args(["--teacher-rate", "0"]), "teacher")
    assert "(default: 1e-05)" in parser.format_help()


def test_a_flag_of_a_list_may_be_repeated() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, Inner)
    for words in (["--names", "b,a"], ["--names", "b", "--names", "a"]):
        assert from_arguments(Inner, parser.parse_args(words)).names == ["b", "a"]
    assert from_arguments(Inner, parser.parse_args([])).names == ["a"]


def test_set_values() -> None:
    values, found = set_values(Inner, ["rate=3", "revision=none", "knd=x", "kind=cosin", "names"], "system 'x'")
    assert values == {"rate": 3.0, "revision": None}
    assert found == [
        "--set knd=x: system 'x' has no option 'knd' (did you mean kind?)",
        "--set kind=cosin: 'cosin' is not one of cosine, linear (did you mean cosine?)",
        "--set names: write it as NAME=VALUE",
    ]
