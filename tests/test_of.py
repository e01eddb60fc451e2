"""What `tests/of.py` finds for a function, on a tree of three files."""

import pytest

from tests import of

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
        "  best in its importers: rag/loop.py:1, rag/loop.py:3",
        "  best, in the nearest tests: tests/rag/test_evidence.py:2 (test_best)",
        "  best elsewhere, perhaps another thing: eval/best.py:1",
    ]


def test_a_helper_is_tested_through_the_function_that_uses_it(tree, capsys):
    of.print_places(tree, "rag/evidence.py", "_by_worth")
    assert capsys.readouterr().out.splitlines() == [
        "  _by_worth in the file: rag/evidence.py:2 (best), rag/evidence.py:5 (its definition)",
        "  _by_worth in its importers: no place",
        "  best, which uses _by_worth, in the nearest tests: tests/rag/test_evidence.py:2 (test_best)",
    ]


def test_a_local_is_no_place_and_an_unknown_name_an_error(tree):
    assert [place.line for place in of.places_in("x.py", FILES["rag/evidence.py"], "worth")] == [7]
    with pytest.raises(SystemExit, match=r"rag/evidence\.py has no by_wort"):
        of.print_places(tree, "rag/evidence.py", "by_wort")
