"""The house rules that a machine can check: imports go one way, every module says what it is."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# From the top down; a package imports from itself and from those behind it.
ORDER = ("recipes", "train", "eval", "data_builders", "rag", "checkpoints", "models")
MODULES = sorted(path for package in ORDER for path in (ROOT / package).rglob("*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(tree: ast.AST) -> set[str]:
    """Folders of this project that are imported, wherever in the file it stands."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in found if name.startswith("tripletune.")}


def test_every_package_is_looked_at() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in MODULES} == set(ORDER)


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_imports_go_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    higher = set(ORDER[: ORDER.index(package)])
    assert not imported(ast.parse(path.read_text(encoding="utf-8"))) & higher


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_no_module_imports_relatively(path: Path) -> None:
    # The folders at the root are the packages: one way to name a module.
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_library_code_does_not_assert(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_nothing_names_the_development_machine(path: Path) -> None:
    assert "/work/" not in path.read_text(encoding="utf-8")


def test_the_checker_finds_imports_in_functions() -> None:
    source = (
        "import os\ndef f():\n    from tripletune.train.config import RunConfig\n    import tripletune.eval.metrics\n"
    )
    tree = ast.parse(source)
    assert imported(tree) == {"train", "eval"}
