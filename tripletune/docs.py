"""Write `docs/reference/` from the code: options of programs, tasks, metrics, systems, readers and recipes.

Run `python -m tripletune.docs`; `tests/test_docs.py` fails if a page and the code differ.
"""

import argparse
import ast
import contextlib
import importlib
import inspect
import itertools
import re
import runpy
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

from tripletune.__main__ import PROGRAMS
from tripletune.core.options import default_of
from tripletune.core.plugins import names_in
from tripletune.eval import find_metrics, load_task, task_names
from tripletune.rag.systems import AnswerOptions, LoopOptions, find_system, system_names
from tripletune.train.settings import EngineConfig

ROOT = Path(__file__).resolve().parents[1]
_PLACE = re.compile(r"\b(eq\.|algorithm|figures?|tables?|sections?|papers? leaves?) (\d|[A-Z]\.\d|a choice)", re.I)
_ROOMS = ("rag", "models", "tripletune/llm", "tripletune/core", "data_builders", "train", "eval")
_NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NOTE = "Made by `python -m tripletune.docs`: change the code, not this page."
_READERS = "tripletune.data_builders.readers"


def _parser_of(words: Sequence[str]) -> argparse.ArgumentParser:
    length, found = 2 if " ".join(words[:2]) in PROGRAMS else 1, list[argparse.ArgumentParser]()
    module, *first = PROGRAMS[" ".join(words[:length])][0].split()
    argv = ["tripletune", *first, *words[length:], "--help"]
    shown = mock.patch.object(argparse.ArgumentParser, "print_help", lambda parser: found.append(parser))
    with shown, mock.patch.object(sys, "argv", argv), warnings.catch_warnings(), contextlib.suppress(SystemExit):
        warnings.simplefilter("ignore", RuntimeWarning)  # runpy's, of modules that are imported already
        runpy.run_module(f"tripletune.{module}", run_name="__main__", alter_sys=True)
    return found[0]


def _commands(words: tuple[str, ...]) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    if words == ("train",):
        names, parser = [name.replace("_", "-") for name in names_in("tripletune.train.tasks")], None
    else:
        parser = _parser_of(words)
        found = [one.choices for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
        names = list(itertools.chain.from_iterable(found))
    for name in names:
        yield from _commands((*words, name))
    if parser and not names:
        yield " ".join(words), parser


def _cell(value: object) -> str:
    text = " ".join(str(value).split()).replace("|", r"\|")
    # Outside code, `<name>` would be a tag and `[name]` a link.
    return re.sub("`[^`]*`|[<[]", lambda part: {"<": "&lt;", "[": r"\["}.get(part[0], part[0]), text)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [list(map(_cell, row)) for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines]) + "\n"


def _option(action: argparse.Action) -> tuple[str, str]:
    shown = argparse.HelpFormatter("")
    value = shown._format_args(action, action.dest.upper()) if action.nargs != 0 else ""
    written = f"{', '.join(action.option_strings)} {value}".strip()
    return f"`{written}`", shown._expand_help(action) if action.help else ""


def _options(parser: Any) -> str:
    parser.format_help()  # adds `--set` and the settings without a flag
    groups = {}
    for group in parser._action_groups:
        actions = [one for one in group._group_actions if one.dest != "help" and one.help != argparse.SUPPRESS]
        groups[group.title] = [_option(one) for one in actions]
    settable = {f"`{name}`": about.replace("%%", "%") for name, (_, about) in getattr(parser, "settable", {}).items()}
    groups[f"more settings, by `{getattr(parser, 'how', '')}`"] = list(settable.items())
    text = "\n".join(f"**{title}**\n\n{_table(('option', 'what'), rows)}" for title, rows in groups.items() if rows)
    return re.sub(r"/\S*/tripletune-\d+", "TMP/tripletune-UID", text.replace(f"{ROOT}/tripletune/", ""))


def _head_of(path: Path) -> str:
    """Return the text at the head of a YAML file, up to its commands, or the first line of a program's docstring."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    lines = itertools.takewhile(lambda line: re.match("# (?! )", line), text.splitlines())
    return " ".join(line[2:] for line in lines).removesuffix(" Command:")


def _system(name: str) -> str:
    kind: Any = find_system(name).options
    about = (inspect.getdoc(importlib.import_module(f"tripletune.rag.systems.{name}")) or "").split("\n")[0]
    if kind is LoopOptions and name != "ras":
        return f"## {name}\n\n{about} It takes the options of [ras](#ras) that apply.\n"
    shared = [] if kind is LoopOptions else [item.name for item in fields(AnswerOptions)]
    own = [item for item in fields(kind) if "help" in item.metadata and item.name not in shared]
    rows = [(f"`{item.name}`", f"`{default_of(item)}`".replace("``", ""), item.metadata["help"]) for item in own]
    return f"## {name}\n\n{about}\n\n{_table(('option', 'default', 'what'), rows)}"


def _papers() -> Iterator[tuple[str, str]]:
    """Yield docstring paragraphs about equations, algorithms, figures, tables, and choices that papers leave open."""
    for path in itertools.chain.from_iterable(ROOT.glob(f"{room}/**/*.py") for room in _ROOMS):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes: list[tuple[str, Any]] = [(f":{one.name}", one) for one in tree.body if isinstance(one, _NAMED)]
        kinds = [(name, node) for name, node in nodes if isinstance(node, ast.ClassDef)]
        nodes += [(f"{name}.{one.name}", one) for name, node in kinds for one in node.body if isinstance(one, _NAMED)]
        for name, node in [("", tree), *nodes]:
            parts = re.split(r"(?<!:)\n\n", ast.get_docstring(node) or "")
            if said := " ".join(part for part in parts if _PLACE.search(part)):
                yield f"`{path.relative_to(ROOT)}{name}`", said


def pages() -> dict[str, str]:
    """Return the texts of the pages of `docs/reference/` by name."""
    made: dict[str, str] = {}
    for name, (_, line) in PROGRAMS.items():
        for title, parser in _commands(tuple(name.split())):
            text = f"## {title}\n\n{(parser.description or line).strip()}\n\n{_options(parser)}"
            made[name.split()[0]] = "\n".join([*filter(None, [made.get(name.split()[0])]), text])
    about = [(load_task(name), _head_of(ROOT / f"eval/tasks/{name}.yaml")) for name in task_names()]
    rows = [(f"`{one.name}`", f"`{one.reader}`", ", ".join(one.metrics), head) for one, head in about]
    tasks = _table(("task", "reader", "scores, headline first", "what"), rows)
    metrics = _table(("metric", "what"), [(f"`{name}`", one.explanation) for name, one in find_metrics().items()])
    made["tasks"] = f"{tasks}\n## Metrics\n\n{metrics}"
    made["systems"] = "An option is `--set NAME=VALUE`.\n\n" + "\n".join(map(_system, system_names()))
    readers = {name: inspect.getdoc(importlib.import_module(f"{_READERS}.{name}")) for name in names_in(_READERS)}
    made["readers"] = _table(("reader", "what"), [(f"`{k}`", (v or "").split("\n")[0]) for k, v in readers.items()])
    files = [*sorted(ROOT.glob("recipes/[!_]*.py")), *sorted(ROOT.glob("recipes/configs/**/*.yaml"))]
    made["recipes"] = _table(("file", "what"), [(f"`{one.relative_to(ROOT)}`", _head_of(one)) for one in files])
    names = [(f"`{there}`".replace(" ", "`, `"), f"`{here}`") for here, there in EngineConfig.elsewhere.items()]
    made["train"] += "\n## Names in other trainers\n\ntransformers, TRL, axolotl and LLaMA-Factory.\n\n"
    made["train"] += _table(("there", "here"), names)
    made["papers"] = _table(("code", "what it says of its paper"), sorted(_papers()))
    made["README"] = "\n".join(f"- [{name}]({name}.md)" for name in sorted(made)) + "\n"
    return {name: f"# {name.replace('README', 'Reference')}\n\n{NOTE}\n\n{text}" for name, text in made.items()}


if __name__ == "__main__":
    for page, content in pages().items():
        (ROOT / f"docs/reference/{page}.md").write_text(content, encoding="utf-8")
