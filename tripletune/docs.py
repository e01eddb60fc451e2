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
from tripletune.core.config import Elsewhere
from tripletune.core.options import default_of
from tripletune.core.plugins import names_in
from tripletune.eval import about_tasks, find_metrics, load_task, task_names
from tripletune.rag.systems import AnswerOptions, LoopOptions, find_system, system_names
from tripletune.train.settings import other_trainers

ROOT = Path(__file__).resolve().parents[1]
_PLACE = re.compile(r"\b(eq\.|algorithm|figures?|tables?|sections?|papers? leaves?) (\d|[A-Z]\.\d|a choice)", re.I)
_ROOMS = ("rag", "models", "tripletune/llm", "tripletune/core", "data_builders", "train", "eval")
_NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NOTE = "Made by `python -m tripletune.docs`: change the code, not this page."
_READERS = "tripletune.data_builders.readers"


def _parser_of(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of a program or command, which the program makes when it is asked for its help.

    Programs make their parsers in their own ways, some deep inside `main`; printing help is what all have in common.
    """
    length = 1
    if " ".join(words[:2]) in PROGRAMS:
        length = 2
    module, *own_words = PROGRAMS[" ".join(words[:length])][0].split()
    argv = ["tripletune", *own_words, *words[length:], "--help"]
    parsers: list[argparse.ArgumentParser] = []

    def keep(parser: argparse.ArgumentParser, file: object = None) -> None:
        """Stand in for `print_help`."""
        parsers.append(parser)

    with (
        mock.patch.object(argparse.ArgumentParser, "print_help", keep),
        mock.patch.object(sys, "argv", argv),
        warnings.catch_warnings(),
        contextlib.suppress(SystemExit),
    ):
        warnings.simplefilter("ignore", RuntimeWarning)  # runpy's, of modules that are imported already
        runpy.run_module(f"tripletune.{module}", run_name="__main__", alter_sys=True)
    return parsers[0]


def _commands_of(words: tuple[str, ...]) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the title and parser of a program, or of each of its commands, down to those without sub-commands."""
    if words == ("train",):
        # Its tasks are no sub-parsers, because importing all of them would make `--help` slow.
        for task in names_in("tripletune.train.tasks"):
            yield from _commands_of((*words, task.replace("_", "-")))
        return
    parser = _parser_of(words)
    names: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            names += action.choices
    for name in names:
        yield from _commands_of((*words, name))
    if not names:
        yield " ".join(words), parser


def _escape_cell(value: object) -> str:
    """A cell of a Markdown table."""
    text = " ".join(str(value).split()).replace("|", r"\|")
    # Outside code, `<name>` would be a tag and `[name]` a link.
    escaped = {"<": "&lt;", "[": r"\["}
    return re.sub("`[^`]*`|[<[]", lambda match: escaped.get(match[0], match[0]), text)


def _markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table with a line break at its end."""
    lines = [_table_line(head), _table_line(["---"] * len(head))]
    for row in rows:
        lines.append(_table_line([_escape_cell(value) for value in row]))
    return "".join(lines)


def _table_line(cells: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |\n"


def _option_row(action: argparse.Action) -> list[str]:
    """The row of an option: its flags with their values, as code, and its help text."""
    formatter = argparse.HelpFormatter("")
    written = ", ".join(action.option_strings)
    if action.nargs != 0:
        written += f" {formatter._format_args(action, action.dest.upper())}"
    about = ""
    if action.help:
        about = formatter._expand_help(action)
    return [f"`{written.strip()}`", about]


def _option_tables(parser: argparse.ArgumentParser) -> str:
    """The options of a parser, a table for each group, and at the end the settings that have no flag in its help.

    What differs between machines is replaced, since a test compares the pages with those in the repository.
    """
    parser.format_help()  # adds `--set` and the settings without a flag
    groups = {}
    for group in parser._action_groups:
        rows = []
        for action in group._group_actions:
            if action.dest != "help" and action.help != argparse.SUPPRESS:
                rows.append(_option_row(action))
        groups[group.title] = rows
    settable = []
    for name, (_, about) in getattr(parser, "settable", {}).items():
        settable.append([f"`{name}`", about.replace("%%", "%")])
    groups[f"more settings, by {getattr(parser, 'how', '')}"] = settable
    tables = [f"**{title}**\n\n{_markdown_table(('option', 'what'), rows)}" for title, rows in groups.items() if rows]
    # Paths of this machine are not shown.
    text = "\n".join(tables).replace(f"{ROOT}/tripletune/", "")
    return re.sub(r"/\S*/tripletune-\d+", "TMP/tripletune-UID", text)


def _head_of(path: Path) -> str:
    """Return the text at the head of a YAML file, up to its commands, or the first line of a program's docstring."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return _first_line(ast.get_docstring(ast.parse(text)))
    lines = itertools.takewhile(lambda line: re.match("# (?! )", line), text.splitlines())
    return " ".join(line[2:] for line in lines).removesuffix(" Command:")


def _first_line(docstring: str | None) -> str:
    """The first line of a docstring, which says what a thing is; "" without a docstring."""
    return (docstring or "").split("\n")[0]


def _first_line_of_module(module: str) -> str:
    """The first line of a module's docstring."""
    return _first_line(inspect.getdoc(importlib.import_module(module)))


def _system_section(name: str) -> str:
    """The section of a system: what it is, and the options that not all systems have.

    A system with the options of `ras` refers to its section instead of repeating the table.
    """
    kind: Any = find_system(name).options
    about = _first_line_of_module(f"tripletune.rag.systems.{name}")
    if kind is LoopOptions and name != "ras":
        return f"## {name}\n\n{about} It takes the options of [ras](#ras) that apply.\n"
    shared = []
    if kind is not LoopOptions:
        shared = [item.name for item in fields(AnswerOptions)]
    rows = []
    for item in fields(kind):
        if "help" in item.metadata and item.name not in shared:
            # An empty default would be an empty code span.
            default = f"`{default_of(item)}`".replace("``", "")
            rows.append((f"`{item.name}`", default, item.metadata["help"]))
    return f"## {name}\n\n{about}\n\n{_markdown_table(('option', 'default', 'what'), rows)}"


def _paper_paragraphs() -> Iterator[tuple[str, str]]:
    """Yield docstring paragraphs about equations, algorithms, figures, tables, and choices that papers leave open."""
    for room in _ROOMS:
        for path in ROOT.glob(f"{room}/**/*.py"):
            for name, docstring in _docstrings_in(path):
                # A list behind "Args:" stays with its heading.
                paragraphs = re.split(r"(?<!:)\n\n", docstring)
                sourced = [paragraph for paragraph in paragraphs if _PLACE.search(paragraph)]
                if sourced:
                    yield f"`{path.relative_to(ROOT)}{name}`", " ".join(sourced)


def _docstrings_in(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the docstrings of a module, its functions and classes, and their methods, with `:Class.method` as name.

    The source is read and not imported, so that no optional package is needed.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield "", ast.get_docstring(tree) or ""
    for node in tree.body:
        if isinstance(node, _NAMED):
            yield f":{node.name}", ast.get_docstring(node) or ""
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, _NAMED):
                    yield f":{node.name}.{member.name}", ast.get_docstring(member) or ""


def pages() -> dict[str, str]:
    """Return the texts of the pages of `docs/reference/` by name.

    `python -m tripletune.docs` writes them, and `tests/test_docs.py` compares them with the files.
    """
    texts = _program_pages()
    texts["tasks"] = _tasks_page()
    texts["systems"] = "An option is `--set NAME=VALUE`.\n\n" + "\n".join(map(_system_section, system_names()))
    readers = [(f"`{name}`", _first_line_of_module(f"{_READERS}.{name}")) for name in names_in(_READERS)]
    texts["readers"] = _markdown_table(("reader", "what"), readers)
    files = [*sorted(ROOT.glob("recipes/[!_]*.py")), *sorted(ROOT.glob("recipes/configs/**/*.yaml"))]
    recipes = [(f"`{path.relative_to(ROOT)}`", _head_of(path)) for path in files]
    texts["recipes"] = _markdown_table(("file", "what"), recipes)
    texts["train"] += (
        "\n## Names in other trainers\n\ntransformers, TRL, axolotl, LLaMA-Factory, Unsloth and ms-swift.\n\n"
    )
    texts["train"] += _names_in_other_trainers()
    texts["papers"] = _markdown_table(("code", "what it says of its paper"), sorted(_paper_paragraphs()))
    links = [f"- [{name}]({name}.md)\n" for name in sorted(texts)]
    texts["README"] = "".join(links)
    return {name: f"# {name.replace('README', 'Reference')}\n\n{NOTE}\n\n{text}" for name, text in texts.items()}


def _program_pages() -> dict[str, str]:
    """The pages of programs; programs with the same first word, such as "build", share a page."""
    sections: dict[str, list[str]] = {}
    for name, (_, line) in PROGRAMS.items():
        page = name.split()[0]
        for title, parser in _commands_of(tuple(name.split())):
            about = (parser.description or line).strip()
            sections.setdefault(page, []).append(f"## {title}\n\n{about}\n\n{_option_tables(parser)}")
    return {page: "\n".join(texts) for page, texts in sections.items()}


def _tasks_page() -> str:
    """The text of the page of tasks and metrics."""
    rows = []
    heads = about_tasks()
    for name in task_names():
        task = load_task(name)
        rows.append((f"`{task.name}`", f"`{task.reader}`", ", ".join(task.metrics), heads[name]))
    tasks = _markdown_table(("task", "reader", "scores, headline first", "what"), rows)
    metrics = [(f"`{name}`", metric.explanation) for name, metric in find_metrics().items()]
    return f"{tasks}\n## Metrics\n\n{_markdown_table(('metric', 'what'), metrics)}"


def _names_in_other_trainers() -> str:
    """The table of other trainers' names, in which users look for theirs, and what each is here.

    Names with the same meaning share a row.
    """
    names_of: dict[Elsewhere, list[str]] = {}
    for name, meaning in other_trainers().items():
        names_of.setdefault(meaning, []).append(f"`{name}`")
    rows = []
    for meaning, names in names_of.items():
        settings = " or ".join(f"`{setting}`" for setting in meaning.settings)
        here = settings or meaning.note
        if settings and meaning.note:
            here = f"{settings}: {meaning.note}"
        rows.append((", ".join(names), here))
    return _markdown_table(("there", "here"), rows)


if __name__ == "__main__":
    for page, content in pages().items():
        (ROOT / f"docs/reference/{page}.md").write_text(content, encoding="utf-8")
