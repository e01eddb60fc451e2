"""What a change in a file may break: the modules that import it, and the tests nearest to it.

    python tests/of.py rag/evidence.py [FILE ...]
    python tests/of.py rag/evidence.py:by_worth       also where this function stands, the nearest places first
    python tests/of.py rag/triple_store.py:TripleStore.get      the same of a method
    make test OF=rag/evidence.py                      runs these tests

Tests mirror the tree, but one file of tests may cover several modules, and a module may be tested through the modules
that use it. The nearest tests of a module are those that import or name it, and those that it names itself, in a line
"Tested in `tests/...`". If there are none, they are those of each module that imports it, and so on upwards, and of a
program that nobody imports those of its folder. `tests/test_architecture.py` holds that this finds tests for each
module.

The places of a function are its uses in its file, in the modules that import the file, and in its nearest tests; then
the places of the same name in the rest of the tree, which may be another thing. A function that no near test uses is
tested through the functions, classes and tables that use it: the places of the nearest of these are listed instead. If
that ends without a test (a plugin that is found by its name, a program), the tests that run its module are listed.
"""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.uses import Place, Symbol, uses_in  # noqa: E402 -- started as a program, only this folder is known

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
OF_THE_TREE = ("tests/test_architecture.py", "tests/test_habits.py", "tests/test_docs.py", "tests/test_of.py")
# A class with its bases, or a function of a module with what it returns.
HEAD = re.compile(r"^(?:class|def|async def) (\w+)(\([^)]*\):|\((?:[^()]|\([^()]*\))*\) -> [^\n]+:)$", re.M)
OF_PYTHONS_TYPES = {name for kind in (str, list, dict, set, Path) for name in dir(kind)}
# So many places are listed of one name in one set of files.
SHOWN_PLACES = 12


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


def imported_by(tree):
    """The modules, or names of modules, that a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


class Map:
    """Which files import and name which, for the package and its tests."""

    def __init__(self):
        files = listed("*.py")
        self.modules = [path for path in files if not path.startswith(("tests/", "docs/", "examples/"))]
        tests = listed("tests/**/test_*.py", "tests/test_*.py")
        self.tests = [path for path in tests if path not in OF_THE_TREE]
        # What several tests share: builders of rows, stubs, fixtures.
        self.helpers = [path for path in files if path.startswith("tests/") and path not in {*tests, *OF_THE_TREE}]
        self.texts = {}
        self.imports = {}
        self.heads = []
        self.declared = defaultdict(set)
        importers = defaultdict(set)
        for path in [*self.modules, *self.tests, *self.helpers]:
            self.texts[path] = (ROOT / path).read_text(encoding="utf-8")
            tree = ast.parse(self.texts[path])
            self.imports[path] = imported_by(tree)
            for name in self.imports[path]:
                importers[name].add(path)
            for line in re.findall(r"Tested in ([^\n]+)", self.texts[path]):
                self.declared[path].update(re.findall(r"tests/[\w/]+\.py", line))
        self.paths = {module_of(path): path for path in self.modules}
        self.importers = {path: importers[module_of(path)] - {path} for path in [*self.modules, *self.helpers]}

    def users(self, path):
        """The modules that import a file."""
        return sorted(self.importers[path] & set(self.modules))

    def own_tests(self, path):
        """The tests that import a file, have its name, or name it, and those that its docstring names."""
        stem = Path(path).stem
        words = [path, *self.names_in_quotes(path)]
        tests = (self.importers[path] & set(self.tests)) | self.declared[path]
        for test in self.tests:
            mirrors = Path(test).stem == f"test_{stem.strip('_')}" and Path(test).parent.name == Path(path).parent.name
            if mirrors or any(word in self.texts[test] for word in words):
                tests.add(test)
        return tests

    def names_in_quotes(self, path):
        """How a test writes a plugin's name: "lightrag" in quotes, or before a colon."""
        if str(Path(path).parent) not in PLUGINS:
            return []
        stem = Path(path).stem
        shown = {stem, stem.replace("_", "-")}
        return [f"{quote}{name}{end}" for quote in "\"'" for name in sorted(shown) for end in "\"':"]

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

    def tests_of(self, symbol):
        """The files of tests in which a symbol may be used: the nearest ones of its file, then those of its folder."""
        path = symbol.path
        if path in self.helpers:
            folder = str(Path(path).parent)
            is_below = [test for test in self.tests if test.startswith(f"{folder}/")]
            return is_below if Path(path).stem == "conftest" else sorted(self.importers[path] & set(self.tests))
        near = self.nearest_tests(path)
        mirror = f"test_{Path(path).stem.strip('_')}"
        declared = self.declared[path]
        near = sorted(near, key=lambda test: (test not in declared, Path(test).stem != mirror, test))
        return [*near, *(test for test in self.tests_of_folder(path) if test not in near)]

    def symbols_of(self, path, name):
        """What `FILE:name` or `FILE:Class.method` means: methods of several classes may have the name."""
        owner, _, name = name.rpartition(".")
        symbols = []
        for place in uses_in(path, self.texts[path]).get(name, ()):
            symbol = Symbol(path, name, place.owner or place.inside)
            if place.kind == "definition" and symbol not in symbols and owner in ("", symbol.owner):
                symbols.append(symbol)
        return symbols

    def places_of(self, symbol, paths):
        """Where some files use a symbol, and its own file defines it; a method only where its class is at hand."""
        if symbol.is_special():
            definition = [symbol] if symbol.path in paths else []
            places = [place for own in definition for place in self._named(own, own.path) if place.kind == "definition"]
            return places + self.places_of(Symbol(symbol.path, symbol.owner), paths)
        places = []
        for path in paths:
            if symbol.name in self.texts[path] and (not symbol.owner or self._has_class(path, symbol)):
                places += self._named(symbol, path)
        return places

    def _named(self, symbol, path):
        """The places of one file at which the name means the symbol, as far as can be seen from its form."""
        uses = uses_in(path, self.texts[path])
        places = uses.get(symbol.name, [])
        is_own_file = path == symbol.path
        is_imported = is_own_file or self._imports(path, symbol)
        meant = {}
        for place in places:
            is_of_class = place.owner == symbol.owner or place.inside == symbol.owner
            if place.kind == "definition":
                fits = is_own_file and (is_of_class if symbol.owner else not place.inside)
            elif place.kind == "own attribute":
                # Of an object of this class or a subclass; an unrelated class of the file may have the name, too.
                defines = [other for other in places if other.kind == "definition" and other.inside == place.owner]
                is_inherited = not defines if is_own_file else symbol.owner in self.texts[path]
                fits = bool(symbol.owner) and (is_of_class or is_inherited)
            elif place.kind == "attribute":
                fits = bool(symbol.owner)
            elif place.kind == "module attribute":
                fits = bool(symbol.owner) or module_of(symbol.path) in self.imports[path]
            elif place.kind == "argument":
                fits = Path(symbol.path).stem == "conftest"
            elif place.kind == "command":
                fits = not symbol.owner and path in self.tests
            elif place.kind == "word":
                fits = False
            elif place.kind == "import":
                fits = is_imported
            else:
                fits = not symbol.owner and is_imported
            if fits:
                meant.setdefault(place.line, place)
        return list(meant.values())

    def _imports(self, path, symbol):
        """Whether a file imports this symbol, and not a namesake; also from a module that imports it itself."""
        wanted = f"{module_of(symbol.path)}.{symbol.name}"
        for name in self.imports[path]:
            if name == wanted:
                return True
            module, _, last = name.rpartition(".")
            if last == symbol.name and wanted in self.imports.get(self.paths.get(module), ()):
                return True
        return False

    def _has_class(self, path, method):
        """Whether a file names the class of a method, a subclass, or a function that gives one, or imports its module.

        Without that, a method of this name is another class's: many have a `run` or a `check`. A `get` or `to_json`,
        which Python's own types or several classes have, may be another's even where the module is imported.
        """
        if path == method.path:
            return True
        is_common = method.name in OF_PYTHONS_TYPES or self._classes_with(method.name) > 2
        if not is_common and module_of(method.path) in self.imports[path]:
            return True
        return any(re.search(rf"\b{name}\b", self.texts[path]) for name in self._givers(method.owner))

    def _classes_with(self, name):
        """How many classes of the package define a method of this name, such as `to_json`."""
        definition = re.compile(rf"^    (?:async )?def {name}\(", re.M)
        return sum(len(definition.findall(self.texts[path])) for path in self.modules if name in self.texts[path])

    def _givers(self, class_name):
        """The names through which a file gets objects of a class: itself, its subclasses, functions that return it."""
        if not self.heads:
            for path in self.modules:
                self.heads += HEAD.findall(self.texts[path])
        is_class = re.compile(rf"\b{class_name}\b")
        return {class_name, *(name for name, rest in self.heads if class_name in rest and is_class.search(rest))}

    def namesakes(self, symbol, near):
        """Definitions of the name outside the files `near`; of a method also uses, whatever the object's class is."""
        kinds = ["definition"]
        if symbol.owner and symbol.name not in OF_PYTHONS_TYPES:
            kinds.append("attribute")
        places = []
        for path in [*self.modules, *self.tests]:
            if path not in near and symbol.name in self.texts[path]:
                uses = uses_in(path, self.texts[path]).get(symbol.name, ())
                places += [place for place in uses if place.kind in kinds]
        return places

    def tested_through(self, symbol):
        """The places of a symbol in its tests, or of the nearest symbols that use it, by symbol.

        Where that ends without a test, these are the places that run one of the modules it came to, by module.
        """
        level = [symbol]
        seen = dict.fromkeys(level)
        while level:
            tested = {}
            for used in level:
                places = self.places_of(used, self.tests_of(used))
                # A line that only imports is no test.
                places = [place for place in places if place.inside and place.kind != "import"]
                if places:
                    tested[used] = places
            if tested:
                return tested
            above = {}
            for used in level:
                above.update(dict.fromkeys(user for user in self._users_of(used) if user not in seen))
            seen.update(above)
            level = list(above)
        for path in dict.fromkeys(passed.path for passed in seen if passed.path in self.modules):
            places = self._runs_by_name(path)
            if places:
                return {path: places}
        return {symbol.path: [whole_file(test) for test in self.nearest_tests(symbol.path)]}

    def _users_of(self, symbol):
        """The functions, classes and tables that use a symbol; of a method also its class."""
        importers = sorted(self.importers[symbol.path] - set(self.tests))
        for place in self.places_of(symbol, [symbol.path, *importers]):
            if place.inside and (place.inside, place.owner) != (symbol.name, symbol.owner):
                yield Symbol(place.path, place.inside, place.owner)

    def _runs_by_name(self, path):
        """The tests that a module names, that give a plugin's or program's name to a program, or that import it."""
        if self.declared[path]:
            return [whole_file(test) for test in sorted(self.declared[path])]
        stem = Path(path).stem
        words = {stem, stem.replace("_", "-")} if str(Path(path).parent) in PLUGINS else set()
        if stem == "__main__":
            words = {Path(path).parent.name}
        folder = f"tests/{Path(path).parts[0]}/"
        tests = sorted(self.own_tests(path), key=lambda test: (not test.startswith(folder), test))
        places = []
        for test in tests:
            for word in sorted(words):
                quoted = uses_in(test, self.texts[test]).get(word, ())
                places += [place for place in quoted if place.kind in ("command", "word") and place.inside]
        return places or [whole_file(test) for test in tests]


def whole_file(test):
    """A file of tests, where no line of it can be named."""
    return Place(test, 1, "", "", "file")


def listed_places(places):
    """Places on one line, each with the function around it."""
    shown = []
    for place in places[:SHOWN_PLACES]:
        around = "its definition" if place.kind == "definition" else place.inside
        shown.append(f"{place} ({around})" if around else str(place))
    if len(places) > SHOWN_PLACES:
        shown.append(f"and {len(places) - SHOWN_PLACES} more")
    return ", ".join(shown) or "no place"


def print_places(tree, path, name):
    """Print where a function stands, the nearest places first; an unknown name is an error."""
    symbols = tree.symbols_of(path, name)
    if not symbols:
        sys.exit(f"error: {path} has no {name}")
    for symbol in symbols:
        users = tree.users(path)
        print(f"  {symbol} in the file: {listed_places(tree.places_of(symbol, [path]))}")
        print(f"  {symbol} in its importers: {listed_places(tree.places_of(symbol, users))}")
        for used, places in tree.tested_through(symbol).items():
            if isinstance(used, str):
                print(f"  {symbol} is tested by what runs {used}: {listed_places(places)}")
                continue
            through = "" if used == symbol else f", which uses {symbol}"
            print(f"  {used}{through}, in the nearest tests: {listed_places(places)}")
        near = {path, *users, *tree.tests_of(symbol)}
        elsewhere = [] if symbol.is_special() else tree.namesakes(symbol, near)
        if elsewhere:
            print(f"  {symbol} elsewhere, perhaps another thing: {listed_places(elsewhere)}")


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
