"""The house rules that a machine can check: imports go one way, a name has one home, every module says what it is."""

import ast
from collections import defaultdict
from pathlib import Path

import networkx as nx

from tests import of

ROOT = Path(__file__).resolve().parents[1]
# From the top down: a package imports from itself and from those behind it, so `core` imports nothing of ours.
# Nobody imports `checkpoints` and `serve`.
ORDER = ("recipes", "train", "eval", "data_builders", "rag", "llm", "models", "core")
PACKAGES = (*ORDER, "checkpoints", "serve")
# The rooms that lie in the package's own folder; the others are links to folders at the top.
INNER = ("core", "llm")
ENTRIES = 16
# What programs call their parts.
HOOKS = {"main", "add_arguments", "run"}
# Modules of these folders are found by their place, and called under the same names.
PLUGINS = (
    "data_builders/readers",
    "data_builders/adapt/builders",
    "tripletune/llm/backends",
    "rag/systems",
    "train/tasks",
)

TREES = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
    for package in PACKAGES
    for path in sorted((ROOT / ("tripletune" if package in INNER else "") / package).rglob("*.py"))
}


def module_name(path):
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name.removeprefix("tripletune.")


MODULES = {module_name(path): path for path in TREES}


def imported(tree):
    """What a module imports from this project, wherever in the file it stands; not what only a type checker reads."""
    found: set[str] = set()
    skipped = [
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    ]
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("tripletune.") for name in found if name.startswith("tripletune.")}


def home(name):
    """The module that an imported name comes from: itself, or the module in front of its last dot."""
    return next((place for place in (name, name.rpartition(".")[0]) if place in MODULES), None)


def test_imports_go_one_way():
    below = {package: {package, *ORDER[number + 1 :]} for number, package in enumerate(ORDER)}
    below["checkpoints"] = {"checkpoints", "models", "core"}
    below["serve"] = {"serve", "rag", "llm", "models", "core"}
    wrong = {
        path: sorted(upward)
        for path, tree in TREES.items()
        if (upward := {name.split(".")[0] for name in imported(tree)} - below[module_name(path).split(".")[0]])
    }
    assert not wrong


def test_no_module_imports_in_a_circle():
    graph = nx.DiGraph((module, home(name)) for module, path in MODULES.items() for name in imported(TREES[path]))
    circles = [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1]
    assert not circles


def test_no_folder_is_a_heap():
    inside: dict[str, set[str]] = defaultdict(set)
    for path in map(Path, TREES):
        for folder, entry in zip([*path.parents][::-1], path.parts):
            if not entry.startswith("__"):  # whose names say nothing of the folder
                inside[str(folder)].add(entry)
    # What is found by its place may become as many as there are benchmarks or systems.
    free = {".", *PLUGINS}
    heaps = {
        folder: len(entries) for folder, entries in inside.items() if len(entries) > ENTRIES and folder not in free
    }
    assert not heaps


def test_a_public_name_has_one_home():
    homes: dict[str, set[str]] = defaultdict(set)
    for path, tree in TREES.items():
        for node in ast.iter_child_nodes(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name[0] != "_":
                homes[node.name].add(next((folder for folder in PLUGINS if path.startswith(folder)), path))
    several = {name: sorted(places) for name, places in homes.items() if len(places) > 1 and name not in HOOKS}
    assert not several


def test_modules_are_imported_absolutely():
    relative = [
        path
        for path, tree in TREES.items()
        if any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree))
    ]
    assert not relative


def test_every_module_says_what_it_is():
    assert not [path for path, tree in TREES.items() if not ast.get_docstring(tree)]


def test_every_module_has_tests():
    tree = of.Map()
    without = {path for path in TREES if not tree.nearest_tests(path)}
    # Only docstrings.
    assert without == {"recipes/papers/__init__.py", "tripletune/llm/reading/__init__.py"}
    documents = [f"tests/data_builders/test_{name}.py" for name in ("documents", "markup", "pages")]
    assert tree.nearest_tests("data_builders/documents/marks.py") == documents
    assert "tests/data_builders/test_pair_readers.py" in tree.nearest_tests("data_builders/readers/genwiki.py")


def test_library_code_does_not_assert():
    assert not [path for path, tree in TREES.items() if any(isinstance(node, ast.Assert) for node in ast.walk(tree))]


def test_nothing_names_the_development_machine():
    assert not [path for path in TREES if "/work/" in (ROOT / path).read_text(encoding="utf-8")]


def test_the_checker_finds_imports_in_functions():
    source = """
import os
if TYPE_CHECKING:
    from tripletune.eval import Task
def f():
    from tripletune.train.settings import RunConfig
    import tripletune.eval.metrics
"""
    assert imported(ast.parse(source)) == {"train.settings.RunConfig", "eval.metrics"}
