"""What a plug-in consists of: its modules, its author's other code, the prompts beside them."""

import sys

import pytest

from tripletune.core import plugins
from tripletune.core.files import PROMPTS
from tripletune.core.plugins import code_digests, error_place, load_from

SYSTEMS = "tripletune.rag.systems"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A function that writes the files of a package which adds systems, and installs it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def install(files, *entries):
        about = {"METADATA": "Metadata-Version: 2.1\nName: added\nVersion: 1.0\n"}
        about["entry_points.txt"] = "\n".join([f"[{SYSTEMS}]", *entries])
        for name, text in about.items():
            files[f"added-1.0.dist-info/{name}"] = text
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        plugins._added_modules.cache_clear()
        return tmp_path

    yield install
    plugins._added_modules.cache_clear()
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("mine", "helper", "lone"):
            del sys.modules[name]


def test_a_packages_code_is_its_modules_its_other_code_and_its_prompts(installed):
    files = {
        "mine/__init__.py": "",
        "mine/loop.py": "import json, numpy\nfrom tripletune.rag import Trace\nfrom . import words\nimport helper\n",
        "mine/words.py": "def count():\n    from mine.deep.table import ROWS\n",
        "mine/deep/__init__.py": "",
        "mine/deep/table.py": "ROWS = 1\n",
        "mine/unused.py": "",
        "mine/prompts/reword.md": "Reword.",
        "mine/prompts/.draft.md": "",
        "mine/results.jsonl": "{}",
        "helper.py": "",
        "stranger.py": "",
    }
    folder = installed(files, "mine = mine.loop")
    used = ["helper.py", "mine/__init__.py", "mine/deep/__init__.py", "mine/deep/table.py", "mine/loop.py"]
    used += ["mine/prompts/reword.md", "mine/words.py"]
    digests = code_digests(SYSTEMS, "mine")
    assert list(digests) == used
    for name in used:
        (folder / name).write_text(files[name] + "\n# changed")
        changed = code_digests(SYSTEMS, "mine")
        assert {own for own in used if changed[own] != digests[own]} == {name}
        (folder / name).write_text(files[name])


def test_a_single_modules_files_are_those_that_it_names(installed):
    files = {
        "lone.py": 'NAMES = ("say", "self_ask", "ask.md", "texts")\nNOTHING = ["", ".", "..", "/", "a\\nb"]\n',
        "ask.md": "Ask.",
        "texts/a.txt": "A",
        "texts/a.bin": "B",
        "say.md": "Say.",
        "notes.md": "not named",
    }
    installed(files, "lone = lone")
    used = ["ask.md", "lone.py", "say.md", "texts/a.txt"]
    assert list(code_digests(SYSTEMS, "lone")) == used
    assert sorted(code_digests(SYSTEMS, "lone", PROMPTS / "systems")) == sorted([*used, "prompts/self_ask.md"])


def test_a_file_in_our_folder_is_known_by_its_own_code(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("from tripletune.rag import Trace\n")
    (tmp_path / "other.py").write_text("")
    systems = __import__(SYSTEMS, fromlist=["x"])
    monkeypatch.setattr(systems, "__path__", [*systems.__path__, str(tmp_path)])
    assert [name.rpartition("/")[2] for name in code_digests(SYSTEMS, "mine")] == ["mine.py"]


def test_an_import_that_fails_names_its_line(installed):
    installed({"mine/__init__.py": "", "mine/loop.py": "\n\nnothing\n"}, "mine = mine.loop")
    with pytest.raises(ValueError, match=r"package added\): NameError: .*\(mine/loop.py, line 3\)"):
        load_from(SYSTEMS, "mine", "system")
    installed({"mine/loop.py": "def broken(:\n"}, "mine = mine.loop")
    with pytest.raises(ValueError, match=r"SyntaxError: .*loop.py, line 1\)"):
        load_from(SYSTEMS, "mine", "system")
    assert error_place(ValueError("never raised")) == "place unknown"
