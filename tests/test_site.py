"""The site: zensical builds every page that docs/layout.py lays out. It ignores in silence what it does not know."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from docs import layout


def pages_in(navigation):
    """The pages of all tabs."""
    pages = []
    for tab in navigation:
        for shown in tab.values():
            pages += [shown] if isinstance(shown, str) else shown
    return pages


def built_name(page):
    folder, name = os.path.split(page)
    return os.path.join(folder, "index.html" if name == "README.md" else name.replace(".md", ".html"))


@pytest.mark.slow
def test_every_page_of_the_navigation_is_built_and_found_by_the_search(tmp_path):
    layout.lay_out(tmp_path)
    for report in ("report.html", "report.zip"):
        (tmp_path / "pages/docs" / report).touch()
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", tmp_path / "site.yml"]
    environment = {**os.environ, "PYTHONPATH": str(layout.ROOT)}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr

    pages = pages_in(yaml.safe_load((tmp_path / "site.yml").read_text())["nav"])
    assert len(pages) == len(set(pages)) > 50
    written = [path.relative_to(tmp_path / "pages").as_posix() for path in (tmp_path / "pages").rglob("*.md")]
    assert sorted(pages) == sorted(written)

    html = tmp_path / "html"
    assert [page for page in pages if not (html / built_name(page)).is_file()] == []
    start = (html / "index.html").read_text()
    tabs = re.findall(r'<a href="([^"]+)" class="md-tabs__link"', start)
    assert len(tabs) == len(layout.navigation_of(layout.repository_files()))
    places = {entry["location"].partition("#")[0] for entry in json.loads((html / "search.json").read_text())["items"]}
    assert {built_name(page) for page in pages} <= {place or "index.html" for place in places}
    python = (html / "docs/python.html").read_text()
    for name in re.findall("^::: (.+)", layout.PYTHON, re.MULTILINE):
        assert f'id="{name}"' in python
    assert "<code>(S&gt; s| P&gt; p| O&gt; o)</code>" in (html / "docs/reference/papers.html").read_text()


def test_a_page_that_no_readme_links_has_no_place():
    paths = layout.repository_files()
    with pytest.raises(ValueError, match=r"docs/guide/new\.md: no README of docs/ links this page"):
        layout.navigation_of([*paths, "docs/guide/new.md"])


def test_links_are_files_of_the_repository_each_once(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "ROOT", tmp_path)
    page = "[a](b.md) [b](../c.py#L3) ![c](d.svg) [d](https://a.b/c.md) [e](#words) [f](b.md#x)"
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.md").write_text(page)
    assert layout.links_of("docs/a.md") == ["docs/b.md", "c.py", "docs/d.svg"]


def test_pipes_in_the_code_of_tables_lose_their_backslash():
    page = "`a\\|b`\n\n| option |\n|---|\n| `--x A\\|B` or \\| |\n"
    assert layout.adapted("docs/x.md", page) == "`a\\|b`\n\n| option |\n|---|\n| `--x A|B` or \\| |\n"
    assert layout.adapted("README.md", "# A\n").startswith("---\nhide: [navigation]\n---\n")
