"""What a change in a file may break: the modules that import it, and the tests nearest to it.

    python tests/of.py rag/evidence.py [FILE ...]
    python tests/of.py rag/evidence.py:by_worth       also every place where this name stands, in code and tests
    make test OF=rag/evidence.py                      runs these tests

Tests mirror the tree, but one file of tests may cover several modules, and a module may be tested through the modules
that use it. The nearest tests of a module are those that import or name it. If there are none, they are those of each
module that imports it, and so on upwards, and of a program that nobody imports those of its folder.
`tests/test_architecture.py` holds that this finds tests for each module.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Modules of these folders are found by their place and named in options, so that nobody imports them.
PLUGINS = (
    "data_builders/adapt/builders",
    "data_builders/readers",
    "eval/metrics",
    "eval/suites",
    "rag/systems",
    "recipes",
    "train/tasks",
    "tripletune/llm/backends",
)

# These look at the whole tree, and name files as examples.
OF_THE_TREE = ("tests/test_architecture.py", "tests/test_habits.py", "tests/test_docs.py")


def listed(*patterns):
    """The tracked files of some patterns."""
    command = ["git", "-C", ROOT, "ls-files", *patterns]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def module_of(path):
    """The name under which a file is imported: "tripletune.rag.evidence" for "rag/evidence.py"."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if name.split(".")[0] in ("tripletune", "tests"):
        return name
    return f"tripletune.{name}"


def imported_by(path):
    """The modules, or names of modules, that a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


class Map:
    """Which files import and name which, for the package and its tests."""

    def __init__(self):
        modules = listed("*.py")
        self.modules = [path for path in modules if not path.startswith(("tests/", "docs/", "examples/"))]
        tests = listed("tests/**/test_*.py", "tests/test_*.py")
        self.tests = [path for path in tests if path not in OF_THE_TREE]
        importers = defaultdict(set)
        for path in [*self.modules, *self.tests]:
            for name in imported_by(path):
                importers[name].add(path)
        self.importers = {path: importers[module_of(path)] - {path} for path in self.modules}
        self.texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in self.tests}

    def users(self, path):
        """The modules that import a file."""
        return sorted(set(self.importers[path]) - set(self.tests))

    def own_tests(self, path):
        """The tests that import a file, have its name, or name it: its path, or a plugin by its name in quotes."""
        stem = Path(path).stem
        words = [path]
        if str(Path(path).parent) in PLUGINS:
            name = stem.replace("_", "-")
            words += [f"{quote}{shown}{end}" for quote in "\"'" for shown in {stem, name} for end in "\"':"]
        tests = self.importers[path] & set(self.tests)
        for test, text in self.texts.items():
            mirrors = Path(test).stem == f"test_{stem.strip('_')}" and Path(test).parent.name == Path(path).parent.name
            if mirrors or any(word in text for word in words):
                tests.add(test)
        return tests

    def nearest_tests(self, path):
        """The tests of a file, or the nearest ones of each module that imports it; else those of its folder."""
        tests = self._tests_above(path, set())
        if not tests:
            folder = f"tests/{Path(path).parent}/".replace("/tripletune/", "/")
            tests = {test for test in self.tests if test.startswith(folder)}
        return sorted(tests)

    def _tests_above(self, path, seen):
        """The own tests of a file, or those of the modules above it; `seen` gets the files that were looked at."""
        tests = self.own_tests(path)
        seen.add(path)
        if not tests:
            for user in self.users(path):
                if user not in seen:
                    tests |= self._tests_above(user, seen)
        return tests

    def places_of(self, name):
        """`file:line` of everything in modules and tests that has a name: its definition, its calls and its imports."""
        places = []
        for path in [*self.modules, *self.tests]:
            text = self.texts.get(path) or (ROOT / path).read_text(encoding="utf-8")
            if name not in text:
                continue
            lines = set()
            for node in ast.walk(ast.parse(text)):
                is_local = isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
                if not is_local and name in [getattr(node, key, None) for key in ("id", "attr", "name")]:
                    lines.add(node.lineno)
            places += [f"{path}:{line}" for line in sorted(lines)]
        return places


def main(words):
    """Print users and tests of each file, and all places of `FILE:NAME`; with `--tests` only the tests, for `make`."""
    tree = Map()
    only_tests = "--tests" in words
    named = [word.removeprefix("./").partition(":") for word in words if word != "--tests"]
    unknown = [path for path, _, _ in named if path not in tree.modules]
    if unknown or not named:
        sys.exit(f"error: {', '.join(unknown) or 'no file'}: name files of the package, such as rag/evidence.py")
    tests = set()
    for path, _, name in named:
        nearest = tree.nearest_tests(path)
        tests.update(nearest)
        if only_tests:
            continue
        users = ", ".join(tree.users(path)) or "no module: it is found by its place, or a program"
        print(f"{path}\n  imported by: {users}")
        print(f"  nearest tests: {' '.join(nearest) or 'none'}")
        if name:
            print(f"  {name} stands in: {' '.join(tree.places_of(name)) or 'no place'}")
    if only_tests:
        print(" ".join(sorted(tests)))


if __name__ == "__main__":
    main(sys.argv[1:])
