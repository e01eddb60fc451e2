"""Lay out the pages of the site in `site/`, where zensical builds it: `make docs` runs both.

The site shows the repository's own pages at their own paths, so that one link works here and on a git host: README.md,
the files of docs/, and every file that one of them links. Two pages are made here: the Python reference and the example
report, which comes from runs on a fictional world. A section of the navigation is a README with the pages that it
links, in the README's order.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from posixpath import dirname, join, normpath

import yaml

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "site"
# The runs behind the example report.
RUNS = "runs/site"
COMMANDS = f"""\
tripletune build world --output {RUNS}/world --seed 3 --train 0 --validation 0 --test 40
tripletune eval run --system standard,ircot,t2rag --task hotpotqa --output {RUNS}/runs --data {RUNS}/world/test.jsonl \\
    --corpus {RUNS}/world/test.corpus.jsonl --triples {RUNS}/world/test.triples.jsonl --oracle {RUNS}/world/test
tripletune eval report {RUNS}/runs --corpus {RUNS}/world/test.corpus.jsonl --output {RUNS}/report
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
::: tripletune.rag.system_options.SystemOptions
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
::: tripletune.train.settings.TrainSection
::: tripletune.models.graph_llm.GraphLLM

## Systems and scores
::: tripletune.rag.systems.System
::: tripletune.rag.systems.LoopOptions
::: tripletune.eval.suites.records.score_predictions
::: tripletune.eval.controls.Rule
"""


def lay_out(site: Path) -> None:
    """Write the pages into `site/pages`, and `docs/site.yml` with their navigation as `site/site.yml`."""
    pages = site / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    paths = repository_files()
    for path in paths:
        target = pages / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(".md"):
            target.write_text(adapted(path, (ROOT / path).read_text(encoding="utf-8")), encoding="utf-8")
        else:
            shutil.copy(ROOT / path, target)
    for path, text in {"docs/python.md": PYTHON, "docs/example_report.md": REPORT}.items():
        (pages / path).write_text(adapted(path, text), encoding="utf-8")

    settings = (ROOT / "docs/site.yml").read_text(encoding="utf-8")
    navigation = yaml.safe_dump({"nav": navigation_of(paths)}, sort_keys=False)
    (site / "site.yml").write_text(f"{settings}\n{navigation}", encoding="utf-8")


def repository_files() -> list[str]:
    """Return the paths of README.md, of the files of docs/ and of all files that one of these links."""
    shown = ["README.md"]
    for path in sorted((ROOT / "docs").rglob("*.*")):
        if path.suffix in (".md", ".svg", ".css"):
            shown.append(path.relative_to(ROOT).as_posix())
    # The list grows while it is read: a linked page links further files.
    for page in shown:
        for link in links_of(page):
            if link not in shown and (ROOT / link).is_file():
                shown.append(link)
    return shown


def navigation_of(paths: list[str]) -> list[dict[str, str | list[str]]]:
    """Return the tabs of the site, each with its pages.

    Raises:
        ValueError: No README links a page, so that no tab would show it.
    """
    evidence = section("docs/evidence/README.md")
    reference = section("docs/reference/README.md")
    guide = [page for page in section("docs/README.md") if page not in evidence + reference]
    pages = [path for path in paths if path.endswith(".md") and path != "README.md"]
    project = [page for page in pages if not page.startswith("docs/")]
    for page in pages:
        if page not in guide + evidence + reference + project:
            raise ValueError(f"{page}: no README of docs/ links this page, so the site has no place for it: link it")
    return [
        {"Start": "README.md"},
        {"Guide": guide},
        {"Evidence": evidence},
        {"Reference": reference},
        {"Python": "docs/python.md"},
        {"Report": "docs/example_report.md"},
        {"Project": project},
    ]


def section(readme: str) -> list[str]:
    """Return a README of docs/ and the pages of docs/ that it links, in its order."""
    links = [link for link in links_of(readme) if link.startswith("docs/") and link.endswith(".md")]
    return [readme, *links]


def links_of(page: str) -> list[str]:
    """Return the paths in the repository that a page links, each once."""
    if not page.endswith(".md"):
        return []
    links = re.findall(r"\]\(([^)\s#:]+)[)#]", (ROOT / page).read_text(encoding="utf-8"))
    return list(dict.fromkeys(normpath(join(dirname(page), link)) for link in links))


def adapted(path: str, markdown: str) -> str:
    r"""Return a page as the site needs it.

    In the code of a table, GitHub needs `\|` for `|`, and Python-Markdown would show the backslash. Pages that are a
    tab by themselves have no navigation beside them, so that they are wider.
    """
    lines = markdown.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if line.startswith("|"):
            lines[number] = re.sub("`[^`]*`", lambda code: code[0].replace(r"\|", "|"), line)
    text = "".join(lines)
    if path in ("README.md", "docs/python.md", "docs/example_report.md"):
        return f"---\nhide: [navigation]\n---\n\n{text}"
    return text


def make_report() -> None:
    """Run the commands of the example report.

    Raises:
        ChildProcessError: A command failed.
    """
    shutil.rmtree(ROOT / RUNS, ignore_errors=True)
    for command in COMMANDS.replace("\\\n", "").splitlines():
        words = [sys.executable, "-m", *shlex.split(command)]
        process = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        if process.returncode:
            raise ChildProcessError(f"{command}\n{process.stderr}")


if __name__ == "__main__":
    make_report()
    lay_out(SITE)
    report = ROOT / RUNS / "report"
    shutil.copy(report / "report.html", SITE / "pages/docs")
    shutil.make_archive(str(SITE / "pages/docs/report"), "zip", report)
