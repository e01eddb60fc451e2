"""Where the names of a Python file stand, and what is around each; `tests/of.py` follows them to the tests."""

import ast
import re
from collections import defaultdict
from functools import cache
from typing import NamedTuple


class Symbol(NamedTuple):
    """A function, class or table of a file; `owner` is the class of a method, else ""."""

    path: str
    name: str
    owner: str = ""

    def __str__(self):
        return f"{self.owner}.{self.name}" if self.owner else self.name

    def is_special(self):
        """Whether Python calls the method, so that its name stands nowhere: `__init__`, `__str__`."""
        return bool(self.owner) and self.name.startswith("__") and self.name.endswith("__")


class Place(NamedTuple):
    """A line that has a name, and what is around it.

    `inside` is the innermost function or class, or the table that a line of the module fills; "" is none of them.
    `owner` is the class around `inside`. `kind` is one of

    - "definition", "import", "name";
    - "attribute", "module attribute" (of something imported), "own attribute" (of `self`);
    - "command" (a word that a test gives a program: `run("data stats", ...)`), "word" (of any argument in quotes);
    - "argument" (of a function, as tests name their fixtures);
    - "file" (as a whole).
    """

    path: str
    line: int
    inside: str
    owner: str
    kind: str

    def __str__(self):
        return self.path if self.kind == "file" else f"{self.path}:{self.line}"


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.ClassDef)


def locals_of(function):
    """The names that a function binds: its arguments and what it assigns, so that they mean no function of the file."""
    names = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


class Uses(ast.NodeVisitor):
    """Collects the places of every name of one file, by name."""

    def __init__(self, path, tree):
        self.path = path
        self.classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        aliases = [node for node in ast.walk(tree) if isinstance(node, ast.alias)]
        self.imported = {alias.asname or alias.name for alias in aliases}
        self.places = defaultdict(list)
        self.inside, self.owner = "", ""
        self.hidden = frozenset()

    def add(self, name, node, kind):
        self.places[name].append(Place(self.path, node.lineno, self.inside, self.owner, kind))

    def visit(self, node):
        if isinstance(node, SCOPES):
            self.visit_scope(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and not self.inside:
            self.visit_table(node)
        else:
            self.note(node)
            self.generic_visit(node)

    def visit_scope(self, node):
        self.add(node.name, node, "definition")
        outer = self.inside, self.owner, self.hidden
        if isinstance(node, ast.ClassDef):
            self.inside, self.owner = node.name, ""
        else:
            # A function in a function belongs to the outer one: only there it has a name.
            is_method = self.inside and not self.owner and self.inside in self.classes
            self.owner = self.inside if is_method else self.owner
            self.inside = node.name if is_method or not self.inside else self.inside
            self.hidden = self.hidden | locals_of(node)
        self.generic_visit(node)
        self.inside, self.owner, self.hidden = outer

    def visit_table(self, node):
        """A line of the module that assigns: what stands in it is used by the table of this name."""
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if isinstance(targets[0], ast.Name):
            self.add(targets[0].id, node, "definition")
            self.inside = targets[0].id
        self.generic_visit(node)
        self.inside = ""

    def note(self, node):
        """Add the places that one node makes."""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in self.hidden:
            self.add(node.id, node, "name")
        elif isinstance(node, ast.Attribute):
            base = node.value.id if isinstance(node.value, ast.Name) else ""
            is_imported = base in self.imported and base not in self.hidden
            kind = "own attribute" if base in ("self", "cls") else "attribute"
            self.add(node.attr, node, "module attribute" if is_imported else kind)
        elif isinstance(node, ast.alias):
            self.add(node.name.rpartition(".")[2], node, "import")
        elif isinstance(node, ast.arg):
            self.add(node.arg, node, "argument")
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            for argument in node.args:
                for text in ast.walk(argument):
                    if isinstance(text, ast.Constant) and isinstance(text.value, str):
                        self.add_words(text, "command" if called in ("run", "main") else "word")

    def add_words(self, node, kind):
        """Add the first words of a text: "data stats" names a program and its command, "lightrag:FOLDER" a builder."""
        for word in re.split(r"[\s:]+", node.value)[:4]:
            self.add(word, node, kind)


@cache
def uses_in(path, text):
    """The places of every name of a file, by name, in order."""
    tree = ast.parse(text)
    uses = Uses(path, tree)
    uses.visit(tree)
    return {name: sorted(set(places), key=lambda place: place.line) for name, places in uses.places.items()}
