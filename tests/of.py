"""What a change in a file may break: the modules that import it, and the tests nearest to it.

    python tests/of.py rag/evidence.py [FILE ...]
    python tests/of.py rag/evidence.py:by_worth       also where this function stands, the nearest places first
    make test OF=rag/evidence.py                      runs these tests

Tests mirror the tree, but one file of tests may cover several modules, and a module may be tested through the modules
that use it. The nearest tests of a module are those that import or name it. If there are none, they are those of each
module that imports it, and so on upwards, and of a program that nobody imports those of its folder.
`tests/test_architecture.py` holds that this finds tests for each module.

The places of a function are listed as its file, the modules that import the file, and its nearest tests have them; then
the rest of the tree, where the same name may mean another thing. A helper that no near test names is tested through the
functions that use it, so the places of the nearest of these functions in their tests are listed instead.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

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
    if name.split(".")[0] in ("tripletune", "tests", "benchmarks"):
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


class Place(NamedTuple):
    """A line that has a name, and the innermost function or class around it; "" outside of all."""

    path: str
    line: int
    inside: str
    is_definition: bool

    def __str__(self):
        return f"{self.path}:{self.line}"


SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def places_in(path, text, name, is_test=False):
    """Where a file defines, uses or imports a name, in order; assignments to a local of this name do not count.

    In a test the name may also stand in quotes, as a word of a command line.
    """
    places = {}

    def walk(node, inside):
        for child in ast.iter_child_nodes(node):
            is_local = isinstance(child, ast.Name) and not isinstance(child.ctx, ast.Load)
            is_named = name in [getattr(child, key, None) for key in ("id", "attr", "name")]
            is_quoted = is_test and isinstance(child, ast.Constant) and child.value == name
            if is_quoted or (is_named and not is_local):
                places.setdefault(child.lineno, Place(path, child.lineno, inside, isinstance(child, SCOPES)))
            walk(child, child.name if isinstance(child, SCOPES) else inside)

    walk(ast.parse(text), "")
    return [places[line] for line in sorted(places)]


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
        return sorted(tests) or self.tests_of_folder(path)

    def tests_of_folder(self, path):
        """The tests that mirror a file's folder."""
        folder = f"tests/{Path(path).parent}/".replace("/tripletune/", "/")
        return sorted(test for test in self.tests if test.startswith(folder))

    def _tests_above(self, path, seen):
        """The own tests of a file, or those of the modules above it; `seen` gets the files that were looked at."""
        tests = self.own_tests(path)
        seen.add(path)
        if not tests:
            for user in self.users(path):
                if user not in seen:
                    tests |= self._tests_above(user, seen)
        return tests

    def places_of(self, name, paths):
        """The places of a name in some files."""
        places = []
        for path in paths:
            text = self.texts.get(path) or (ROOT / path).read_text(encoding="utf-8")
            if name in text:
                places += places_in(path, text, name, is_test=path in self.texts)
        return places

    def tested_through(self, path, name):
        """The places of a name in its nearest tests, or else in those of its folder, by name.

        If these tests do not have the name, they are the places of the nearest functions that use it, in its file and
        in the modules that import the file, and of the class of a method.
        """
        return self._tested_above(path, name, self.nearest_tests) or self._tested_above(
            path, name, self.tests_of_folder
        )

    def _tested_above(self, path, name, tests_of):
        """The places of the name, or of the nearest names above it, in the tests that `tests_of` gives for its file."""
        level = [(path, name)]
        seen = set(level)
        while level:
            tested = defaultdict(list)
            for module, used in level:
                tested[used] += self.places_of(used, tests_of(module))
            tested = {used: places for used, places in tested.items() if places}
            if tested:
                return tested
            above = []
            for module, used in level:
                for place in self.places_of(used, [module, *self.users(module)]):
                    user = (place.path, place.inside)
                    if place.inside and user not in seen:
                        seen.add(user)
                        above.append(user)
            level = above
        return {}


def listed_places(places):
    """Places on one line, each with the function around it."""
    shown = []
    for place in places:
        around = "its definition" if place.is_definition else place.inside
        shown.append(f"{place} ({around})" if around else str(place))
    return ", ".join(shown) or "no place"


def print_places(tree, path, name):
    """Print where a function stands, the nearest places first; an unknown name is an error."""
    own = tree.places_of(name, [path])
    if not own:
        sys.exit(f"error: {path} has no {name}")
    users = tree.users(path)
    print(f"  {name} in the file: {listed_places(own)}")
    print(f"  {name} in its importers: {listed_places(tree.places_of(name, users))}")
    tested = tree.tested_through(path, name)
    if not tested:
        print(f"  {name} in its nearest tests: none names it, nor a function that uses it")
    for tested_name, places in tested.items():
        through = "" if tested_name == name else f", which uses {name}"
        print(f"  {tested_name}{through}, in the nearest tests: {listed_places(places)}")
    near = {path, *users, *tree.nearest_tests(path), *tree.tests_of_folder(path)}
    others = [other for other in (*tree.modules, *tree.tests) if other not in near]
    elsewhere = tree.places_of(name, others)
    if elsewhere:
        print(f"  {name} elsewhere, perhaps another thing: {' '.join(map(str, elsewhere))}")


def main(words):
    """Print users and tests of each file, and the places of `FILE:NAME`; with `--tests` only the tests, for `make`."""
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
            print_places(tree, path, name)
    if only_tests:
        print(" ".join(sorted(tests)))


if __name__ == "__main__":
    main(sys.argv[1:])
