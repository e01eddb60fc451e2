"""Flags, YAML and `--set` from one dataclass; every problem at once."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import pytest

from tripletune.core.command_line import CommandParser, add_arguments, from_arguments, parse_command_line, to_arguments
from tripletune.core.config import load_config, read_yaml, to_yaml
from tripletune.core.options import ConfigError, convert, problems, rare, set_values, setting


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

    def check(self):
        return ["quiet: only with one step"] if self.quiet and self.steps > 1 else []


def test_a_file_its_base_and_the_command_line_in_this_order(tmp_path):
    (tmp_path / "base.yaml").write_text("steps: 5\ninner: {rate: 1e-3, kind: linear}\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "run.yaml").write_text("base: ../base.yaml\ninner: {rate: 2}\n")
    config, dry = parse_command_line(Outer, "", ["--config", str(tmp_path / "deep" / "run.yaml"), "--inner.names", "b"])
    found = config.steps, config.inner.rate, config.inner.kind, config.inner.names, dry
    assert found == (5, 2.0, "linear", ["b"], False)
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(Outer, tmp_path / "again.yaml") == config


@dataclass
class Many:
    whole: int | None = setting(None, "a limit", at_least=1)
    share: float | None = setting(None, "a share")
    count: int = setting(3, "a count")
    path: str | None = setting(None, "a file")
    output: str = setting("runs/x", "a folder")
    chosen: list[str] = setting(["a"], "names")
    limit: int | None = rare(None, "another limit")


@pytest.mark.parametrize("name", [item.name for item in fields(Many)])
def test_an_empty_value_is_none_and_no_limit(tmp_path, name, capsys):
    parser = CommandParser()
    add_arguments(parser, Many)
    given = ["--set", "limit="] if name == "limit" else [f"--{name}", ""]
    for words in (given, [f"--{name}="] if name != "limit" else given):
        with pytest.raises((SystemExit, ConfigError)) as caught:
            from_arguments(Many, parser.parse_args(words))
        assert f"{name}: the value is empty" in str(caught.value) + capsys.readouterr().err
    (tmp_path / "run.yaml").write_text(f"{name}: ''\n")
    with pytest.raises(ConfigError, match=f"{name}: the value is empty"):
        load_config(Many, tmp_path / "run.yaml")
    (tmp_path / "run.yaml").write_text("whole: null\nshare:\npath: ~\n")
    assert load_config(Many, tmp_path / "run.yaml") == Many()
    if name not in ("output", "chosen"):
        assert set_values(Many, [f"{name}="], "it")[1] == [
            f"--set {name}=: the value is empty: give a value, or leave the option out"
        ]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("1:30", "1:30"), ("-1:30", "-1:30"), ("12:30:45", "12:30:45"), ("1:30.5", "1:30.5"), ("010", "010"),
        ("0o17", "0o17"), ("2024-01-02", "2024-01-02"), ("1_000", 1000), ("0x1F", 31), ("0", 0), ("-7", -7),
        ("1.5", 1.5), ("1.", 1.0), ("-.5", -0.5), ("1.5e-3", 0.0015), (".inf", math.inf), ("yes", True), ("~", None),
        ("2024-1", "2024-1"),
    ],
)  # fmt: skip
def test_what_yaml_reads_as_numbers(tmp_path, written, read):
    (tmp_path / "run.yaml").write_text(f"value: {written}\n")
    assert read_yaml(tmp_path / "run.yaml") == {"value": read}
    assert convert(f"{{value: {written}}}", dict[str, Any]) == {"value": read}


def test_a_time_is_no_number_of_steps(tmp_path):
    (tmp_path / "run.yaml").write_text("steps: 1:30\ninner: {rate: 1:30.5, revision: 0123456}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(Outer, tmp_path / "run.yaml")
    assert "steps: '1:30' is not a whole number" in str(caught.value)
    assert "inner.rate: '1:30.5' is not a number" in str(caught.value)
    (tmp_path / "run.yaml").write_text("inner: {revision: 0123456}\n")
    assert load_config(Outer, tmp_path / "run.yaml").inner.revision == "0123456"


def test_bases_that_go_round_are_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("base: a.yaml\n")
    with pytest.raises(ConfigError, match="back to this file"):
        load_config(Outer, tmp_path / "a.yaml")


def test_every_problem_is_reported_with_the_nearest_name(tmp_path):
    (tmp_path / "run.yaml").write_text("step: 2\nsteps: 1.5\ninner: {rate: x, kind: cosin, revision: 123456}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(Outer, tmp_path / "run.yaml")
    for said in ("unknown key step (did you mean steps?)", "steps: 1.5 is not a whole number", "inner.rate: 'x' is not",
                 "did you mean cosine?", "put it in quotes", "5 problem(s)", "run.yaml"):  # fmt: skip
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("given", "place"),
    [({"steps": 1}, "{path}"), ({"steps": 0}, "{path} and the command line"),
     ({"steps": 0, "inner.rate": 0}, "the command line")],
)  # fmt: skip
def test_a_problem_is_told_of_where_it_stands(tmp_path, given, place):
    path = tmp_path / "run.yaml"
    path.write_text("steps: 0\ninner: {rate: -1}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(Outer, path, given)
    assert str(caught.value).startswith(place.format(path=path) + ": ")


@pytest.mark.parametrize("name", ["steps", "quiet", "inner.names", "inner.revision", "inner"])
def test_aliases_of_a_file_that_stand_for_gigabytes_are_told_in_a_short_line(tmp_path, name):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    section, _, inner = name.partition(".")
    lines.append(f"{section}: {{{inner}: *a11}}" if inner else f"{section}: *a11")
    (tmp_path / "run.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        load_config(Outer, tmp_path / "run.yaml")
    told = [line for line in str(caught.value).splitlines() if f"{name}: " in line]
    assert told
    assert len(told[-1]) < 200


def test_ranges_choices_and_what_a_section_says():
    config = Outer(12, True, Inner(0, names=["c"]))
    assert problems(config) == [
        "steps: 12 must be at least 1 and at most 9",
        "inner.rate: 0 must be greater than 0",
        "inner.names: 'c' is not one of a, b",
        "quiet: only with one step",
    ]
    assert problems(Outer(inner=Inner(float("nan")))) == ["inner.rate: nan is not a finite number"]


def test_text_of_the_command_line_stays_text():
    config, _ = parse_command_line(Outer, "", ["--inner.revision", "0123456"])
    assert config.inner.revision == "0123456"
    config, _ = parse_command_line(Outer, "", ["--inner.revision", "null", "--quiet", "true", "--steps", "1"])
    assert (config.inner.revision, config.quiet) == (None, True)


def test_an_unknown_flag_is_one_line_with_the_nearest(capsys):
    with pytest.raises(SystemExit):
        parse_command_line(Outer, "", ["--inner.rat", "1"])
    said = capsys.readouterr().err
    assert "unrecognized arguments: --inner.rat 1 (did you mean --inner.rate?)" in said
    assert said.count("\n") == 1


@dataclass
class Rare(Inner):
    share: float = rare(1.0, "share of what is kept", above=0)
    words: list[str] = rare([], "some words")


def test_a_setting_without_a_flag_is_reached_by_set(capsys):
    def parse(*words):
        return from_arguments(Rare, parser.parse_args(list(words)), "teacher")

    parser = CommandParser(prog="ask", example="ask Who?")
    add_arguments(parser.add_argument_group("teacher"), Rare, "teacher")
    assert parse() == Rare()
    given = Rare(rate=0.5, share=0.25, words=["a", "b"])
    assert parse("--teacher-rate", "0.5", "--set", "teacher.share=0.25", "--set", "teacher.words=a,b") == given
    assert parse(*to_arguments(given, "teacher")) == given
    with pytest.raises(ConfigError, match=r"share: 0\.0 must be"):
        parse("--set", "teacher.share=0")
    help_text = parser.format_help()
    assert "teacher.share                share of what is kept (default: 1.0)" in help_text
    assert "most used:\n  example:\n    ask Who?" in help_text
    assert "--teacher-share" not in help_text
    for words, said in ((["--set", "teacher.shar=1"], "did you mean teacher.share?"),
                        (["--teacher-share", "1"], "write --set teacher.share=VALUE")):  # fmt: skip
        with pytest.raises(SystemExit):
            parse(*words)
        assert said in capsys.readouterr().err
    parser = CommandParser(others="an option of the system")
    add_arguments(parser, Rare)
    found = parser.parse_args(["--set", "share=0.5", "--set", "ras.top_k=3"])
    assert (found.set, from_arguments(Rare, found).share) == (["ras.top_k=3"], 0.5)


def test_the_help_opens_with_the_options_of_its_example():
    parser = CommandParser(prog="ask", example="ask Who? --rate 1 --model m")
    parser.add_argument("--seed")
    add_arguments(parser.add_argument_group("the teacher"), Rare)
    either = parser.add_mutually_exclusive_group(required=True)
    for flag in ("--model", "--llm"):
        either.add_argument(flag)
    text = parser.format_help()
    assert text.startswith("usage: ask [--rate N] (--model MODEL | --llm LLM) [OPTIONS]\n\nmost used:\n")
    assert re.findall(r"^  (--\w+)", text, re.MULTILINE)[:4] == ["--rate", "--model", "--llm", "--seed"]
    assert parser.format_help() == text


@dataclass
class Run(Outer):
    inner: Rare = field(default_factory=Rare)


def test_a_run_takes_any_setting_and_lists_those_that_few_need_last(capsys):
    assert parse_command_line(Run, "", ["--inner.share", "0.5"])[0].inner.share == 0.5
    with pytest.raises(SystemExit):
        parse_command_line(Run, "", ["--help"])
    said = capsys.readouterr().out
    assert "--inner.rate" in said
    assert "--inner.share" not in said
    assert "more settings, by --SECTION.FIELD VALUE, or in the YAML file:\n  inner.share" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [("a: 1\na: 2\n", "twice"), ("- 1\n", "names and values"), ("a: [\n", "valid YAML"), ("[" * 20000, "too deeply"),
     ("!!python/object:os.system x\n", "valid YAML")],
)  # fmt: skip
def test_a_file_that_is_no_configuration_is_one_clear_error(tmp_path, text, said):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_config(Outer, tmp_path / "run.yaml")


def test_a_flag_of_a_list_may_be_repeated():
    parser = CommandParser()
    add_arguments(parser, Inner)
    for words in (["--names", "b,a"], ["--names", "b", "--names", "a"]):
        assert from_arguments(Inner, parser.parse_args(words)).names == ["b", "a"]
    assert from_arguments(Inner, parser.parse_args([])).names == ["a"]


def test_another_value_of_an_option_is_refused_and_not_dropped(capsys):
    parser = CommandParser(prog="p")
    add_arguments(parser.add_argument_group("group"), Inner)
    parser.add_argument("--limit", type=int)
    # The same value again drops nothing.
    assert parser.parse_args(["--limit", "3", "--limit=3"]).limit == 3
    assert parser.parse_args(["--limit", "4"]).limit == 4, "another command line is not the second time"
    for words, both in ((["--limit", "3", "--limit", "4"], "3 and 4"), (["--rate", "1", "--rate=2"], "1 and 2")):
        with pytest.raises(SystemExit) as stop:
            parser.parse_args(words)
        assert stop.value.code == 2
        assert f"error: p: {words[0]} is given twice, as {both}: give it once" in capsys.readouterr().err


def test_the_last_value_of_a_setting_of_a_training_wins():
    config, _ = parse_command_line(Outer, "", ["--inner.rate", "0.25", "--inner.rate", "0.5"])
    assert config.inner.rate == 0.5


def test_set_values():
    values, found = set_values(Inner, ["rate=3", "revision=none", "knd=x", "kind=cosin", "names"], "system 'x'")
    assert values == {"rate": 3.0, "revision": None}
    assert found == [
        "--set knd=x: system 'x' has no option 'knd' (did you mean kind?)",
        "--set kind=cosin: 'cosin' is not one of cosine, linear (did you mean cosine?)",
        "--set names: write it as NAME=VALUE",
    ]


def test_a_text_keeps_its_spaces_and_nothing_else_does():
    """`--set query_prompt="query: "`: the encoder e5 was trained with the space."""
    values, found = set_values(Inner, ["revision=query: ", "rate= 3 ", "kind= cosine "], "system 'x'")
    assert (values, found) == ({"revision": "query: ", "rate": 3.0, "kind": "cosine"}, [])
    values, found = set_values(Inner, ["revision= none", "rate=  "], "system 'x'")
    assert (values, len(found)) == ({"revision": None}, 1)

    @dataclass
    class Rare:
        prompt: str | None = rare(None, "prompt")
        rate: float = rare(1.0, "rate")

    parser = CommandParser(prog="x")
    add_arguments(parser, Rare)
    words = ["--set", "prompt=Instruct: a\nQuery: ", "--set", "rate= 2 "]
    assert from_arguments(Rare, parser.parse_args(words)) == Rare("Instruct: a\nQuery: ", 2.0)


def test_an_option_that_has_no_effect_alone_is_refused():
    @dataclass
    class Pair:
        model: str | None = setting(None, "a model")
        beams: int = setting(1, "its beams", needs="model")

    assert problems(Pair()) == problems(Pair("m", 2)) == problems(Pair("m")) == []
    assert problems(Pair(beams=2)) == ["beams has no effect without model: set model, or leave out beams"]


def test_an_alias_inside_of_its_own_value_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_text("inner: &inner\n  rate: *inner\n")
    with pytest.raises(ConfigError, match=r"an alias \(\*\) stands inside of the value that it repeats"):
        read_yaml(tmp_path / "run.yaml")
