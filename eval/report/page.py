"""The report as one HTML file that loads nothing from a network: figures, answers, and traces of some questions.

The page is made of `page.html`, `page.css` and `page.js` beside this file, and of `rag/trace.css` and `rag/trace.js`,
which the page of `tripletune serve` also uses. The data is in two blocks that a browser does not run: one JSON value,
and lines of key and JSON value that are read on demand. The blocks contain no `<`, and the page shows data as text
nodes. The page's content security policy allows this one script and no loading.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from tripletune.core.data.passages import corpus_file, read_corpus
from tripletune.core.files import file_digest
from tripletune.core.tables import Table
from tripletune.eval.report.contents import Report
from tripletune.eval.report.groups import Group
from tripletune.eval.report.runs import Run
from tripletune.eval.report.tables import NOTE, Section, about_of
from tripletune.rag.results import RESULTS, ResultRow, fields_as_json, read_result_rows

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
# Columns of `Run.rows` that the page has of every question and of every run.
_OF_QUESTION = ("question", "answers", "type", "hops")
_OF_RUN = ("prediction", "failed", "rounds", "stop", "calls", "tokens_read", "tokens_written", "seconds")
# Details of a trace that these columns and the tables already show.
_ELSEWHERE = ("tokens", "calls", "read", "index", "ranking")
# Maximum characters of a passage.
_LONGEST = 2000


@dataclass(frozen=True, slots=True)
class Questions:
    """Every question of a group; a list has one value per question, None for questions without a result.

    Attributes:
        columns: By name, what the page has of every question.
        runs: For each run, a list of values by name.
        traced: Places of the questions whose traces are on the page.
    """

    ids: list[str]
    columns: dict[str, list[Any]]
    runs: list[dict[str, list[Any]]]
    traced: list[int]

    def to_json(self) -> dict[str, Any]:
        """The questions as `page.js` reads them; a name changed here must be changed there."""
        return {"ids": self.ids, **self.columns, "runs": self.runs, "traced": self.traced}


@dataclass(frozen=True, slots=True)
class Corpus:
    """A file of passages, and the key of its texts on the page."""

    key: str
    file: str


class KeyedLine(NamedTuple):
    """A line of the page's second block, which the browser reads when it needs the key."""

    key: str
    value: dict[str, Any]


def write_page(
    path: Path,
    report: Report,
    groups: Sequence[Group],
    sections: Sequence[Section],
    traces: int,
    corpora: Sequence[str],
) -> None:
    """Write the page with at most `traces` questions' traces per group, and texts of passages from `corpora`.

    Traces and texts are most of the page. They are written one by one behind the data, so that memory does not grow
    with them, and the browser reads a line only when somebody opens its question.

    Args:
        path: The file to write.
        report: All figures; its groups are those of `groups`, in the same order.
        groups: The runs behind the figures, whose folders hold the traces.
        sections: The tables, as `tables.sections_of` makes them.
        traces: Maximum questions with traces per group.
        corpora: Files or folders of passages; an error if no run used one of them.
    """
    questions = [_questions_of_group(group, traces) for group in groups]
    texts = _corpora_of(groups, corpora)
    shown_groups = []
    for asked, reported, group in zip(questions, report.groups, groups, strict=True):
        keys = []
        for run in group.runs:
            corpus = texts.get(_corpus_identity(run))
            keys.append(corpus.key if corpus else "")
        about = {"title": reported.title, "about": about_of(reported), "corpora": keys}
        shown_groups.append(asked.to_json() | about)
    data = {
        "note": NOTE,
        "figures": report.to_json(),
        "sections": list(map(_section_json, sections)),
        "groups": shown_groups,
    }
    style = _read_source("rag/trace.css") + _read_source("eval/report/page.css")
    script = _read_source("rag/trace.js") + _read_source("eval/report/page.js")
    # The page's content security policy allows the script with this digest, and no other.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    html = _read_source("eval/report/page.html")
    html = html.replace("{{digest}}", digest).replace("{{style}}", style).replace("{{script}}", script)
    before, between, after = html.split("{{data}}")
    with path.open("wb") as file:
        file.write(before.replace("{{title}}", escape(report.title)).encode("utf-8", "replace"))
        file.write(_script_safe_json(data))
        file.write(between.encode())
        for key, value in _traces_and_texts(groups, questions, texts):
            file.write(key.encode() + b"\t" + _script_safe_json(value) + b"\n")
        file.write(after.encode())


def _read_source(name: str) -> str:
    """The text of a file of this repository that becomes part of the page."""
    return (_ROOT / name).read_text(encoding="utf-8")


def _section_json(section: Section) -> dict[str, Any]:
    """A section as `page.js` reads it."""
    return {"title": section.title, "heading": section.heading, "blocks": list(map(_block_json, section.blocks))}


def _block_json(block: str | Table) -> str | dict[str, Any]:
    """A sentence as a text, a table as its head and rows, which `page.js` tells apart by their types."""
    if isinstance(block, str):
        return block
    return {"head": block.head, "rows": block.rows}


def _script_safe_json(value: object) -> bytes:
    """JSON that cannot end a script element; unpaired surrogates are escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").encode("utf-8", "backslashreplace")


def _questions_of_group(group: Group, traces: int) -> Questions:
    """The questions of a group, `traces` of them with traces.

    A stopped run lacks some questions of the others, so every question that any run has is shown, with gaps.
    """
    tables = [run.rows.set_index("id") for run in group.runs]
    asked = pd.concat(tables)
    asked = asked[~asked.index.duplicated()]
    metrics = group.metrics
    runs = []
    for table in tables:
        aligned = table.reindex(asked.index)
        runs.append({name: _values_or_none(aligned[name]) for name in (*_OF_RUN, *metrics)})
    headline = pd.DataFrame({place: table[metrics[0]] for place, table in enumerate(tables)})
    columns = {name: _values_or_none(asked[name]) for name in _OF_QUESTION}
    return Questions(list(asked.index), columns, runs, _most_telling(headline.reindex(asked.index), traces))


def _values_or_none(column: pd.Series) -> list[Any]:
    """The values of a column, with None for those that are not known, since JSON has no NaN."""
    return [value if isinstance(value, list) or pd.notna(value) else None for value in column.tolist()]


def _most_telling(scores: pd.DataFrame, most: int) -> list[int]:
    """Places of the most telling questions: largest difference of runs first, then fewest right, then data order.

    A trace is far longer than the figures of its question, so the page has only the traces in which the runs differ.
    """
    order = pd.DataFrame({"spread": scores.min(axis=1) - scores.max(axis=1), "mean": scores.mean(axis=1)})
    order = order.round(6).reset_index(drop=True).sort_values(["spread", "mean"], kind="stable")
    return sorted(order.index[:most].tolist())


def _corpus_identity(run: Run) -> str:
    """The identity of a corpus: its digest, or the folder with the questions' contexts."""
    return run.settings.corpus or run.folder


def _corpora_of(groups: Sequence[Group], corpora: Sequence[str]) -> dict[str, Corpus]:
    """The corpora with texts on the page, by the identity that `_corpus_identity` gives for their runs.

    A file is matched to runs by its digest, not its name, because a changed file would show other texts under the ids
    that a run found. The contexts of the questions need no `--corpus`: `eval run` wrote them beside the results.
    """
    runs: list[Run] = []
    for group in groups:
        runs += group.runs
    used = {_corpus_identity(run) for run in runs}
    files: dict[str, str] = {}
    for path in map(corpus_file, corpora):
        digest = file_digest(path)
        if digest not in used:
            raise ValueError(f"--corpus {path}: no run of this report used this file, or the file has changed since")
        files[digest] = str(path)
    for run in runs:
        if not run.settings.corpus and run.settings.retriever:
            contexts = _corpus_of_contexts(Path(run.folder))
            if contexts is not None:
                files[_corpus_identity(run)] = str(contexts)
    texts = {}
    for number, (identity, file) in enumerate(files.items()):
        texts[identity] = Corpus(f"c{number}", file)
    return texts


def _corpus_of_contexts(folder: Path) -> Path | None:
    """The corpus of the questions' contexts, which `eval run` writes into the folder of a run, or of several runs."""
    for place in (folder, folder.parent):
        if (place / "corpus.jsonl").is_file():
            return place / "corpus.jsonl"
    return None


def _traces_and_texts(
    groups: Sequence[Group], questions: Sequence[Questions], texts: dict[str, Corpus]
) -> Iterator[KeyedLine]:
    """Yield traces by "group.run.question", then the texts of their passages by corpus.

    The texts come last, since only the traces say which passages of a corpus the page shows.
    """
    shown: dict[str, set[str]] = {identity: set() for identity in texts}
    for number, (group, asked) in enumerate(zip(groups, questions, strict=True)):
        places = {asked.ids[place]: place for place in asked.traced}
        for run_number, run in enumerate(group.runs):
            for _, values in read_result_rows(Path(run.folder) / RESULTS, partial=True):
                row = ResultRow.from_json(values)
                if row.id not in places:
                    continue
                yield KeyedLine(f"{number}.{run_number}.{places[row.id]}", _trace_json(row))
                if _corpus_identity(run) in shown:
                    shown[_corpus_identity(run)].update(*row.trace.passage_rounds)
    for identity, corpus in texts.items():
        passages = read_corpus(corpus.file)
        shown_texts = {passage.id: passage.text[:_LONGEST] for passage in passages if passage.id in shown[identity]}
        yield KeyedLine(corpus.key, shown_texts)


def _trace_json(row: ResultRow) -> dict[str, Any]:
    """A trace as `rag/trace.js` draws it; a name that is changed here must be changed there."""
    trace = row.trace
    return {
        "steps": list(map(fields_as_json, trace.steps)),
        "actions": list(map(fields_as_json, trace.actions)),
        "details": {name: value for name, value in trace.details.items() if name not in _ELSEWHERE},
        "error": trace.error,
        "supporting": row.supporting,
    }
