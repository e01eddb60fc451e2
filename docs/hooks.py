"""Hooks of MkDocs that build the site from the repository's own pages, at their own paths, so that links work.

README.md is the first page. A section of the navigation is a README and the pages that it links, in the README's order.
When a build starts, the example report is made from runs on a fictional world.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from posixpath import dirname, join, normpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
HOME = "runs/site"
COMMANDS = f"""\
tripletune build world --output {HOME}/world --seed 3 --train 0 --validation 0 --test 40
tripletune eval run --system standard,ircot,t2rag --task hotpotqa --output {HOME}/runs --data {HOME}/world/test.jsonl \\
    --corpus {HOME}/world/test.corpus.jsonl --triples {HOME}/world/test.triples.jsonl --oracle {HOME}/world/test
tripletune eval report {HOME}/runs --corpus {HOME}/world/test.corpus.jsonl --output {HOME}/report
"""
REPORT = f"""\
# An example report

`tripletune eval report` made this report from the commands below ([how to read it](guide/reports.md)). An oracle that
knows the fictional world replaces the language model, so the figures say nothing about a system. <a href="report.html">
Open only the report</a>, or <a href="report.zip">its whole folder</a> with the tables in Markdown, LaTeX and CSV.

<iframe src="report.html" title="An example report"></iframe>

```bash
{COMMANDS}```
"""

PYTHON = """\
# Python

Functions and classes that programs and notebooks import. [Extend](guide/extend.md) shows how to add a part as one file.

## Answer, load, evaluate
::: tripletune.load_system
::: tripletune.load_model
::: tripletune.evaluate
::: tripletune.rag.answering.OpenSystem
::: tripletune.rag.answering.SystemOptions
::: tripletune.rag.Trace

## Data
::: tripletune.core.data.questions.Question
::: tripletune.core.data.passages.Passage
::: tripletune.core.data.records.Record
::: tripletune.core.data.records.read_records
::: tripletune.core.data.passages.read_corpus

## Language models
::: tripletune.llm.backends.LLMOptions
::: tripletune.llm.backends.open_client
::: tripletune.llm.replies.ask
::: tripletune.core.calls.Backend
::: tripletune.llm.backends.BackendKind

## Training
::: tripletune.train.engine.Engine
::: tripletune.train.tasks.TrainingTask
::: tripletune.train.tasks.TrainSection
::: tripletune.models.graph_llm.GraphLLM

## Systems and scores
::: tripletune.rag.systems.System
::: tripletune.rag.systems.LoopOptions
::: tripletune.eval.suites.records.score_predictions
::: tripletune.eval.controls.Rule
"""


def on_startup(**_: object) -> None:
    """Make the example report."""
    shutil.rmtree(ROOT / HOME, ignore_errors=True)
    for command in COMMANDS.replace("\\\n", "").splitlines():
        words = [sys.executable, "-m", *shlex.split(command)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PluginError(f"{command}\n{done.stderr}")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ with the repository's files at the same paths, and add all files that they link."""
    pages = ["README.md", *(f"docs/{file.src_uri}" for file in files if file.src_dir == config.docs_dir)]
    for page in pages:
        pages += [link for link in _links(page) if link not in pages and (ROOT / link).is_file()]
    found = Files([file for file in files if file.src_dir != config.docs_dir])
    for page in pages:
        found.append(File(page, str(ROOT), config.site_dir, config.use_directory_urls))
    found.append(File.generated(config, "docs/python.md", content=PYTHON))
    found.append(File.generated(config, "docs/example_report.md", content=REPORT))
    made = str(ROOT / HOME / "report")
    found.append(File.generated(config, "docs/report.html", abs_src_path=f"{made}/report.html"))
    found.append(File.generated(config, "docs/report.zip", abs_src_path=shutil.make_archive(made, "zip", made)))
    config.nav = _navigation([page for page in pages if page.endswith(".md")])
    return found


def on_page_markdown(markdown: str, page: Page, **_: object) -> None:
    """Hide the navigation on a page without a section, so that the page is wider."""
    if page.parent is None:
        page.meta["hide"] = ["navigation"]


def on_page_content(html: str, **_: object) -> str:
    r"""Show `|` in table cells: GitHub needs `\|` in code, and Python-Markdown does not remove the backslash."""
    return re.sub("<td>.*?</td>", lambda cell: cell[0].replace(r"\|", "|"), html, flags=re.DOTALL)


def _navigation(pages: list[str]) -> list[dict[str, str | list[str]]]:
    evidence, reference = _section("docs/evidence/README.md"), _section("docs/reference/README.md")
    inside = [page for page in _section("docs/README.md") if page.startswith("docs/")]
    return [
        {"Start": "README.md"},
        {"Guide": [page for page in inside if page not in evidence + reference]},
        {"Evidence": evidence},
        {"Reference": reference},
        {"Python": "docs/python.md"},
        {"Report": "docs/example_report.md"},
        {"Project": [page for page in pages[1:] if not page.startswith("docs/")]},
    ]


def _section(readme: str) -> list[str]:
    return [readme, *(link for link in _links(readme) if link.endswith(".md"))]


def _links(page: str) -> list[str]:
    """Return the paths in the repository that a page links."""
    if not page.endswith(".md"):
        return []
    links = re.findall(r"\]\(([^)\s#:]+)[)#]", (ROOT / page).read_text(encoding="utf-8"))
    return list(dict.fromkeys(normpath(join(dirname(page), link)) for link in links))
