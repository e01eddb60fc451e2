"""The documents against the code: links, commands and references must exist."""

import ast
import asyncio
import functools
import importlib
import io
import json
import re
import runpy
import shlex
import sys
import warnings
from contextlib import redirect_stdout
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.cli import write_lines
from tripletune import docs
from tripletune.__main__ import PROGRAMS
from tripletune.core.data.pairs import Trajectory
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import Question
from tripletune.core.data.records import Record
from tripletune.data_builders.subq import label_question
from tripletune.data_builders.subq.recorded import RecordedTeacher
from tripletune.eval import load_task
from tripletune.train.tasks.ras import GraphConfig

SECTIONS = [item for item in fields(GraphConfig) if is_dataclass(getattr(GraphConfig(), item.name))]
ROOT = Path(__file__).resolve().parents[1]
NAMES = ("README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
DOCUMENTS = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").rglob("*.md")), *(ROOT / "skills").rglob("*.md")]
ROOMS = (
    "recipes",
    "train",
    "eval",
    "data_builders",
    "rag",
    "serve",
    "checkpoints",
    "models",
    "benchmarks",
    "docs",
    "tests",
)

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_REFERENCE = re.compile(r"`([\w./]+\.py):([\w.]+)`")
_PATH = re.compile(rf"`((?:{'|'.join(ROOMS)})/[\w./-]+)(?::[\w.]+)?`")
_CHOICES = re.compile(r"(--[\w.-]+),?(?: [A-Z_]+)? \{([^}]*)\}")
_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")


class Command(NamedTuple):
    """One command of a document."""

    where: str
    text: str

    @property
    def words(self):
        """The words of the command without variables in front of it."""
        words = shlex.split(self.text, comments=True)
        while words and _ASSIGNMENT.fullmatch(words[0]):
            words.pop(0)
        return words


def text_of(path):
    return path.read_text(encoding="utf-8")


def prose(text):
    return _FENCE.sub("", text)


def anchors(text):
    headings = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands_in(text, where):
    found = []
    for language, block in _FENCE.findall(text):
        if language != "bash":
            continue
        lines = block.replace("\\\n", " ").splitlines()
        found += [Command(where, part.strip()) for line in lines for part in line.split(" && ") if part.strip()]
    return [command for command in found if program(command.words)]


def blocks(name, language):
    return [block for kind, block in _FENCE.findall(text_of(ROOT / name)) if kind == language]


def program(words):
    """What `--help` is asked of: `-m module subcommand`, or a script; empty for other programs."""
    if words[:2] == ["accelerate", "launch"]:
        return tuple(next(([word] for word in words if word.startswith("recipes/") and word.endswith(".py")), ()))
    if words[:1] == ["tripletune"]:
        length = 2 if " ".join(words[1:3]) in PROGRAMS else 1
        subcommand = [word for word in words[1 + length : 2 + length] if not word.startswith("-")]
        return ("-m", *words[: 1 + length], *subcommand)
    if not words or Path(words[0]).name not in ("python", "python3"):
        return ()
    if words[1:2] != ["-m"]:
        return tuple(words[1:2])
    if words[2].removeprefix("tripletune.").split(".")[0] not in ROOMS:
        return ()
    subcommand = words[3:4] if len(words) > 3 and not words[3].startswith("-") else []
    return ("-m", words[2], *subcommand)


@functools.cache
def help_of(call):
    module, shown, code = call[0] == "-m", io.StringIO(), None
    words = [*call[module:], "--help"]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), redirect_stdout(shown):
        patch.setattr(sys, "argv", words)
        warnings.simplefilter("ignore", RuntimeWarning)  # runpy's, of modules that are imported already
        try:
            if module:
                runpy.run_module(words[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        except SystemExit as stop:
            code = stop.code
    assert not code, f"{' '.join(call)} --help"
    return " ".join(shown.getvalue().split())


def own_arguments(words):
    """The words after the program itself: those before it are the launcher's."""
    last = program(words)[-1]
    return words[words.index(last) + 1 :]


def required_flags(usage):
    """Flags that a usage line shows outside of brackets; `[OPTIONS]` ends it."""
    line, is_ours, _ = usage.partition("[OPTIONS]")
    if not is_ours:
        return []
    without_groups = re.sub(r"\([^()]*\)", "", line)
    return re.findall(r"--[a-z][\w-]*", re.sub(r"\[[^\[\]]*\]", "", without_groups))


def troubles_of(command):
    """Flags that the program does not have or misses, and values that it does not take."""
    usage = help_of(program(command.words))
    # `-h, --help` and `--licence ID, --license ID` are two flags each; a flag ends where a name can't go on.
    known = set(re.findall(r"(?<![\w-])--[A-Za-z][\w.-]*", usage))
    listed = usage.partition("more settings, by --SECTION.FIELD")[2]
    known |= {f"--{name}" for name in re.findall(r"(?<![\w.])(?:[a-z]+\.[a-z]\w*|run_name|push_to_hub)", listed)}
    choices = {flag: values.split(",") for flag, values in _CHOICES.findall(usage)}
    found = []
    arguments = own_arguments(command.words)
    for number, word in enumerate(arguments):
        flag, _, value = word.partition("=")
        if not flag.startswith("--") or " " in flag:  # a value may hold another program's words
            continue
        if flag not in known:
            found.append(f"{command.where}: {' '.join(program(command.words))} has no {flag}")
        value = value or (arguments[number + 1] if number + 1 < len(arguments) else "")
        is_ours = "benchmarks" not in command.words
        if is_ours and flag == "--set" and re.match(r"[\w.-]+=[^=,]*,[\w.-]+=", value):
            found.append(f"{command.where}: --set {value} holds several options")
        if flag in choices and value not in choices[flag]:
            found.append(f"{command.where}: {flag} {value} is not one of {', '.join(choices[flag])}")
    # `eval` shows the usual flags without brackets, but has other forms (--systems, --tasks).
    needed = [] if "eval" in command.words else required_flags(usage)
    for flag in needed:
        if not any(word.partition("=")[0] == flag for word in arguments):
            found.append(f"{command.where}: {' '.join(program(command.words))} needs {flag}")
    for word in command.words:
        if word.split("/")[0] in ("recipes", "benchmarks") and not (ROOT / word).exists():
            found.append(f"{command.where}: there is no file {word}")
    return found


def symbols(path):
    """Functions, classes, methods, attributes and constants of a module, read without importing it."""
    found: set[str] = set()

    def visit(body, prefix):
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(prefix + node.target.id)
            elif isinstance(node, ast.Assign):
                found.update(prefix + target.id for target in node.targets if isinstance(target, ast.Name))

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


def dangling(text, root=ROOT):
    """`file:function` references and paths in backticks that name nothing."""
    found = []
    for file, name in _REFERENCE.findall(text):
        if not (root / file).is_file():
            found.append(f"{file}: no such file")
        elif name not in symbols(root / file):
            found.append(f"{file} has no {name}")
    found += [f"{path}: no such file" for path in _PATH.findall(text) if not (root / path).exists()]
    return sorted(set(found))


def test_relative_links_resolve():
    broken = []
    for path in DOCUMENTS:
        for target in _LINK.findall(prose(text_of(path))):
            name, _, anchor = target.partition("#")
            file = path.parent / name if name else path
            if not target.startswith(("http://", "https://", "mailto:")) and not (
                file.exists() and (not anchor or file.suffix != ".md" or anchor in anchors(text_of(file)))
            ):
                broken.append(f"{path.name}: {target}")
    assert broken == []


def test_named_files_and_functions_exist():
    # The changelog names files as they were called then.
    texts = {str(path): text_of(path) for path in DOCUMENTS if path.name != "CHANGELOG.md"}
    assert {name: found for name, text in texts.items() if (found := dangling(text))} == {}


def test_commands_have_their_flags():
    commands = [one for path in DOCUMENTS for one in commands_in(text_of(path), str(path.relative_to(ROOT)))]
    assert len(commands) > 50
    assert [trouble for command in commands for trouble in troubles_of(command)] == []


def encoder_table():
    """The encoders in the guide's table, without revision and server, and whether they load here."""
    section = text_of(ROOT / "docs/guide/systems.md").partition("\n## Encoders\n")[2].partition("\n## ")[0]
    rows = [row.strip("| ").split(" | ") for row in section.splitlines() if row.startswith("| `")]
    return {row[0].strip("`").partition("@")[0]: row[-1] for row in rows}


def test_a_hub_name_of_an_encoder_is_a_promise():
    """Who copies a name from a page or a recipe must not meet an encoder that does not load."""
    table, named = encoder_table(), set[str]()
    assert table["nvidia/NV-Embed-v2"].startswith("no ")
    for path in DOCUMENTS:
        named |= set(re.findall(r"(?:--encoder|--model\.encoder) `?([\w:.-]+/[\w.-]+)", text_of(path)))
    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        named |= set(re.findall(r"^  encoder: ([\w:.-]+/[\w.-]+)", text_of(path), re.MULTILINE))
    named.add(GraphConfig().model.encoder)
    local = {name for name in named if not name.startswith(("openai:", "models/", "pypi:", "owner/"))}
    assert len(local) >= 4
    assert local <= table.keys()
    assert not [name for name in local if table[name].startswith("no")]


def test_reference_is_what_the_code_declares():
    written = {path.stem: text_of(path) for path in (ROOT / "docs/reference").glob("*.md")}
    made = docs.pages()
    stale = [name for name in made.keys() | written.keys() if made.get(name) != written.get(name)]
    assert stale == [], "run `python -m tripletune.docs`"
    shown = re.findall(r"--[a-z]\w+\.\w+", help_of(("-m", "tripletune", "train", "ras")))
    assert "--model.base" in shown
    assert [flag for flag in shown if flag not in made["train"]] == []


def test_a_page_covers_one_job():
    documents = [*DOCUMENTS, ROOT / "examples/README.md"]
    read = [path for path in documents if path.parent.name not in ("evidence", "reference")]
    lines = {path: text_of(path).count("\n") for path in read}
    # A change log only grows.
    assert [path for path, number in lines.items() if number > 160 and path.name != "CHANGELOG.md"] == []
    assert lines[ROOT / "README.md"] <= 110
    guides = {path.name: text_of(path) for path in (ROOT / "docs/guide").glob("*.md") if path.stem != "architecture"}
    # A page begins with a command that works, and ends with what to do when one does not.
    assert [name for name, text in guides.items() if not re.match(r"# .+\n\n```bash\n", text)] == []
    assert [name for name, text in guides.items() if re.findall(r"^## (.+)", text, re.M)[-1] != "If it fails"] == []


def test_the_skill_has_the_head_that_agents_read():
    """See https://agentskills.io/specification: agents choose by name and description, and refuse other heads."""
    path = ROOT / "skills/tripletune/SKILL.md"
    _, head, body = text_of(path).split("---\n", 2)
    fields = yaml.safe_load(head)
    assert fields["name"] == path.parent.name
    assert 100 < len(fields["description"]) <= 1024
    assert len(fields["compatibility"]) <= 500
    assert fields.keys() <= {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
    # It is copied alone.
    assert not _LINK.search(body)


def test_paper_index_covers_the_equations_of_ras():
    rows = "\n".join(row for row in text_of(ROOT / "docs/reference/papers.md").splitlines() if "RAS" in row)
    numbers = set()
    for first, last in re.findall(r"\beq\. (\d+)(?:-(\d+))?", rows):
        numbers |= set(range(int(first), int(last or first) + 1))
    assert numbers >= set(range(1, 14))


def test_citation_file_is_whole():
    citation = yaml.safe_load(text_of(ROOT / "CITATION.cff"))
    assert (citation["cff-version"], citation["license"]) == ("1.2.0", "Apache-2.0")
    assert all(entry["title"] and entry["authors"] for entry in (citation, *citation["references"]))


def test_examples_on_the_pages_are_read_by_the_code(tmp_path):
    teacher, record = (json.loads(block) for block in blocks("docs/guide/data.md", "json"))
    shown = Record.from_json(record)
    assert shown.to_json() == record
    replies = tmp_path / "teacher.jsonl"
    write_lines(replies, [teacher])
    passages = tuple(Passage(title, "text") for title in teacher["helpful"])
    question = Question(teacher["_id"], shown.question, shown.answers, passages, (0, 1), "", "hotpotqa")
    labelled = asyncio.run(label_question(question, RecordedTeacher(replies), direct_answer=False))
    assert [one.label for one in labelled] == [f"[SUBQ] {shown.question}", shown.label, "[SUFFICIENT]", "Velsund"]
    pairs = blocks("docs/guide/own_data.md", "json")[0].splitlines()
    assert [Trajectory.from_json(json.loads(line)).rejected for line in pairs][1:] == ["I can't say.", "33"]
    task = tmp_path / "my_task.yaml"
    task.write_text(blocks("docs/guide/extend.md", "yaml")[0], encoding="utf-8")
    assert load_task(str(task)).metrics[0] == "exact_match"


def test_python_examples_import_what_exists():
    examples = [block for path in DOCUMENTS for block in blocks(str(path.relative_to(ROOT)), "python")]
    imports = [n for example in examples for n in ast.walk(ast.parse(example)) if isinstance(n, ast.ImportFrom)]
    assert len(imports) > 5
    for node in imports:
        module = importlib.import_module(str(node.module))
        assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)


def test_fields_named_on_the_training_page_exist():
    known = {f"{part.name}.{item.name}" for part in SECTIONS for item in fields(getattr(GraphConfig(), part.name))}
    named = set(re.findall(r"`(?:--)?((?:model|data|train)\.[a-z_]+)(?=[` :])", text_of(ROOT / "docs/guide/train.md")))
    assert len(named) > 15
    assert named <= known


# What these checks find, so that they can't pass by finding nothing.


@pytest.mark.parametrize(
    ("text", "trouble"),
    [
        ("tripletune eval run --sistem ras", "has no --sistem"),
        ("tripletune eval run --retriever bm2", "--retriever bm2 is not one of"),
        ("tripletune rag index --corpus c --index i --set encoder_dtype=auto,vectors=ivf", "holds several options"),
        ("tripletune build passages FOLDER --output mine", "needs --documents"),
        ("accelerate launch recipes/ras_multitask.py --config recipes/configs/none.yaml", "there is no file"),
        ("accelerate launch recipes/ras_multitask.py --train.learning_rat 1", "has no --train.learning_rat"),
    ],
)
def test_wrong_commands_are_found(text, trouble):
    found = troubles_of(Command("here", text))
    assert len(found) == 1
    assert trouble in found[0]


def test_dangling_references_are_found(tmp_path):
    (tmp_path / "rag").mkdir()
    (tmp_path / "rag/x.py").write_text(
        "LIMIT = 3\nclass A:\n    size: int\n    def go(self): ...\nasync def run(): ...\n"
    )
    good = "`rag/x.py:A.go` `rag/x.py:A.size` `rag/x.py:LIMIT` `rag/x.py:run` `rag/x.py`"
    assert dangling(good, tmp_path) == []
    found = dangling("`rag/x.py:B` `rag/y.py:run` `rag/gone.md`", tmp_path)
    assert found == ["rag/gone.md: no such file", "rag/x.py has no B", "rag/y.py: no such file"]
