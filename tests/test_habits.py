"""Habits of the code that make it hard to read once, by name and place; sizes are no matter here, but for functions.

`python tests/test_habits.py` prints the densities per 1,000 code lines that docs/guide/architecture.md speaks of.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)
LONGEST_FUNCTION = 70
# Comprehensions inside comprehensions that read at once, each with its reason.
NESTED = {}


def sources():
    """Path and syntax tree of every module outside tests, documents and examples."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "*.py"], capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.split() if not name.startswith(("tests/", "examples/", "docs/"))]
    return {name: ast.parse((ROOT / name).read_text(encoding="utf-8")) for name in names if (ROOT / name).is_file()}


TREES = sources()


def places(is_habit):
    """`file:line` of every node of which `is_habit` is true."""
    rows = []
    for path, tree in TREES.items():
        rows += [f"{path}:{node.lineno}" for node in ast.walk(tree) if is_habit(node)]
    return rows


def is_text_or_row(node):
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    return isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple))


def is_condition(node):
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("bool", "isinstance", "any", "all")
    return isinstance(node, (ast.Compare, ast.BoolOp)) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    )


def is_times_condition(node):
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return False
    sides = (node.left, node.right)
    return any(is_text_or_row(side) for side in sides) and any(is_condition(side) for side in sides)


def is_packed_literal(node):
    """`**{"a": 1}` inside a dictionary, or `*("a", "b")` inside a list: several entries on one line for no reason."""
    if isinstance(node, ast.Dict):
        return any(key is None and isinstance(value, ast.Dict) for key, value in zip(node.keys, node.values))
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        starred = [entry.value for entry in node.elts if isinstance(entry, ast.Starred)]
        return any(isinstance(value, (ast.List, ast.Tuple, ast.Set)) for value in starred)
    return False


def nested_comprehensions():
    rows = []

    def walk(node, path, inside):
        for child in ast.iter_child_nodes(node):
            is_one = isinstance(child, COMPREHENSIONS)
            if is_one and (inside or len(child.generators) > 1):
                rows.append(f"{path}:{child.lineno}")
            walk(child, path, inside or is_one)

    for path, tree in TREES.items():
        walk(tree, path, False)
    return rows


def walrus_outside_heads():
    """Assignments with `:=` that are not in the head of an `if` or `while`."""
    rows = []
    for path, tree in TREES.items():
        heads = set()
        for node in ast.walk(tree):
            if isinstance(node, (ast.If, ast.While)):
                heads |= {id(inner) for inner in ast.walk(node.test)}
        for node in ast.walk(tree):
            if isinstance(node, ast.NamedExpr) and id(node) not in heads:
                rows.append(f"{path}:{node.lineno}")
    return rows


def densities(paths):
    """Habits per 1,000 code lines of some files: comprehensions, nested ones, conditional expressions, walrus."""
    counts = Counter()
    for path in paths:
        tree = TREES[path]
        documented = set()
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
                documented |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
            counts["comprehensions"] += isinstance(node, COMPREHENSIONS)
            counts["conditional expressions"] += isinstance(node, ast.IfExp)
            counts["walrus"] += isinstance(node, ast.NamedExpr)
        code = set()
        blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
        for token in tokenize.generate_tokens(io.StringIO((ROOT / path).read_text(encoding="utf-8")).readline):
            if token.type not in blank:
                code |= set(range(token.start[0], token.end[0] + 1))
        counts["code"] += len(code - documented)
    nested = [row.split(":")[0] for row in nested_comprehensions()]
    counts["nested comprehensions"] = sum(path in paths for path in nested)
    lines = counts.pop("code")
    return {habit: round(1000 * count / lines, 1) for habit, count in sorted(counts.items())}


def test_no_text_or_row_is_multiplied_by_a_condition():
    assert places(is_times_condition) == []


def test_no_literal_is_packed_into_a_literal():
    assert places(is_packed_literal) == []


def test_no_comprehension_is_inside_another():
    assert [row for row in nested_comprehensions() if row.split(":")[0] not in NESTED] == []


def test_walrus_is_in_the_head_of_if_or_while():
    assert walrus_outside_heads() == []


def test_no_function_is_long():
    def is_long(node):
        return isinstance(node, FUNCTIONS) and node.end_lineno - node.lineno >= LONGEST_FUNCTION

    assert places(is_long) == []


def test_the_checks_see_what_they_look_for():
    bad = ast.parse("a = 'x' * (b > 1)\nc = {**{'d': 1}}\ne = [*('f', 'g')]\nh = [1] * bool(i)")
    assert [is_times_condition(node.value) for node in bad.body] == [True, False, False, True]
    assert [is_packed_literal(node.value) for node in bad.body] == [False, True, True, False]
    good = ast.parse("a = 'x' * 3\nc = {**d}\ne = [*f]")
    assert not any(is_times_condition(node) or is_packed_literal(node) for node in ast.walk(good))


if __name__ == "__main__":
    for room in ("", "eval/report/"):
        rows = densities([path for path in TREES if path.startswith(room)])
        sys.stdout.write(f"{room or 'all':12} " + ", ".join(f"{habit} {rate}" for habit, rate in rows.items()) + "\n")
