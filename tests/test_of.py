"""What `tests/of.py` finds for a function, on a tree of three files."""

import pytest

from tests import of
from tests.uses import uses_in

FILES = {
    "rag/evidence.py": """def best(rows):
    return _by_worth(rows)


def _by_worth(rows):
    worth = rows
    return worth
""",
    "rag/loop.py": "from tripletune.rag.evidence import best\n\nfound = best([])\n",
    "tests/rag/test_evidence.py": "def test_best():\n    run('best')\n",
    "eval/best.py": "def best():\n    pass\n",
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """The map of `FILES`."""
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    def listed(*patterns):
        return [path for path in FILES if patterns == ("*.py",) or path.startswith("tests/")]

    monkeypatch.setattr(of, "ROOT", tmp_path)
    monkeypatch.setattr(of, "listed", listed)
    return of.Map()


def test_the_places_of_a_function_come_by_nearness(tree, capsys):
    of.print_places(tree, "rag/evidence.py", "best")
    assert capsys.readouterr().out.splitlines() == [
        "  best in the file: rag/evidence.py:1 (its definition)",
        "  best in its importers: rag/loop.py:1, rag/loop.py:3 (found)",
        "  best, in the nearest tests: tests/rag/test_evidence.py:2 (test_best)",
        "  best elsewhere, perhaps another thing: eval/best.py:1 (its definition)",
    ]


def test_a_helper_is_tested_through_the_function_that_uses_it(tree, capsys):
    of.print_places(tree, "rag/evidence.py", "_by_worth")
    assert capsys.readouterr().out.splitlines() == [
        "  _by_worth in the file: rag/evidence.py:2 (best), rag/evidence.py:5 (its definition)",
        "  _by_worth in its importers: no place",
        "  best, which uses _by_worth, in the nearest tests: tests/rag/test_evidence.py:2 (test_best)",
    ]


def test_a_local_is_no_place_and_an_unknown_name_an_error(tree):
    assert "worth" not in uses_in("x.py", FILES["rag/evidence.py"])
    with pytest.raises(SystemExit, match=r"rag/evidence\.py has no by_wort"):
        of.print_places(tree, "rag/evidence.py", "by_wort")


def symbols_tested(path, name):
    """What a name of the tree is tested through, with the tests: "Stack.push" with ["tests/test_stack.py"]."""
    tree = of.Map()
    tested = {}
    for symbol in tree.symbols_of(path, name):
        for used, places in tree.tested_through(symbol).items():
            tested[str(used)] = sorted({place.path for place in places})
    return tested


METHODS = {
    "rag/stack.py": """class Stack:
    def __init__(self):
        self.rows = []

    def count(self):
        return len(self.rows)

    def run(self):
        return self.count()


class Other:
    def run(self):
        pass


def open_stack() -> Stack:
    return Stack()
""",
    "tests/rag/test_stack.py": """from tripletune.rag.stack import open_stack


def test_rows():
    assert open_stack().count() == 0
""",
    "tests/rag/test_words.py": "def test_words():\n    assert 'a'.count('a') == engine.run()\n",
}


@pytest.fixture
def methods(tree, tmp_path, monkeypatch):
    for path, text in METHODS.items():
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(of, "listed", lambda *patterns: listed_of(METHODS, patterns))


def listed_of(files, patterns):
    return [path for path in files if patterns == ("*.py",) or "/test_" in path]


def test_a_constructor_is_tested_where_its_class_is_made(methods):
    assert symbols_tested("rag/stack.py", "Stack.__init__") == {"open_stack": ["tests/rag/test_stack.py"]}


def test_a_method_is_not_a_namesake_of_another_type(methods):
    assert symbols_tested("rag/stack.py", "count") == {"Stack.count": ["tests/rag/test_stack.py"]}
    # Both tests have a `run`, but neither has this class; so it leads to what is tested of its own class.
    assert symbols_tested("rag/stack.py", "Stack.run") == {"open_stack": ["tests/rag/test_stack.py"]}


PLUGIN = {
    "rag/systems/loop.py": "def _first_step():\n    pass\n\n\nSYSTEM = [_first_step]\n",
    "eval/page.py": '"""A page.\n\nTested in tests/eval/test_site.py.\n"""\n\n\ndef write():\n    pass\n',
    "tests/rag/test_answers.py": "def test_answers():\n    run('eval run', '--system', 'loop')\n",
    "tests/eval/test_site.py": "def test_site():\n    pass\n",
}


def test_what_no_test_names_is_tested_by_what_runs_its_module(tree, tmp_path, monkeypatch):
    for path, text in PLUGIN.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(of, "listed", lambda *patterns: listed_of(PLUGIN, patterns))
    assert symbols_tested("rag/systems/loop.py", "_first_step") == {
        "rag/systems/loop.py": ["tests/rag/test_answers.py"]
    }
    assert symbols_tested("eval/page.py", "write") == {"eval/page.py": ["tests/eval/test_site.py"]}
