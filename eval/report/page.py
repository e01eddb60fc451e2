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
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from tripletune.core.data.passages import corpus_file, read_corpus
from tripletune.core.files import file_digest
from tripletune.core.tables import Table
from tripletune.eval.report.groups import Group
from tripletune.eval.report.tables import NOTE, Section, about_of, group_title
from tripletune.rag.results import RESULTS, read_runs

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_COLUMNS = ("prediction", "failed", "rounds", "stop", "calls", "tokens_read", "tokens_written", "seconds")
# Fields of a trace on the page, and details that the columns and the tables already show.
_TRACE, _ELSEWHERE = ("steps", "actions", "details", "error"), ("tokens", "calls", "read", "index", "ranking")
# Maximum characters of a passage.
_LONGEST = 2000


def write_page(
    path: Path,
    report: Mapping[str, Any],
    groups: Sequence[Group],
    sections: Sequence[Section],
    traces: int,
    corpora: Sequence[str],
) -> None:
    """Write the page with at most `traces` questions' traces per group, and texts of passages from `corpora`."""
    found = [_questions(group, traces) for group in groups]
    texts = _corpora_of(groups, corpora)
    data = {
        "note": NOTE,
        "figures": report,
        "sections": [{**vars(section), "blocks": list(map(_block, section.blocks))} for section in sections],
        "groups": [
            {
                **questions,
                "title": group_title(figures),
                "about": about_of(figures),
                "corpora": [texts.get(_corpus(run), ("", None))[0] for run in group.runs],
            }
            for questions, figures, group in zip(found, report["groups"], groups)
        ],
    }
    html = (_HERE / "page.html").read_text(encoding="utf-8")
    style, script = (
        "".join((_ROOT / f"{name}.{end}").read_text(encoding="utf-8") for name in ("rag/trace", "eval/report/page"))
        for end in ("css", "js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    html = html.replace("{{digest}}", digest).replace("{{style}}", style)
    before, between, after = html.replace("{{script}}", script).split("{{data}}")
    with path.open("wb") as file:
        file.write(before.replace("{{title}}", escape(report["title"])).encode("utf-8", "replace"))
        file.write(_json(data))
        file.write(between.encode())
        for key, value in _lines(groups, found, texts):
            file.write(key.encode() + b"\t" + _json(value) + b"\n")
        file.write(after.encode())


def _block(block: str | Table) -> Any:
    return block if isinstance(block, str) else {"head": block.head, "rows": block.rows}


def _json(value: Any) -> bytes:
    """JSON that cannot end a script element; unpaired surrogates are escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").encode("utf-8", "backslashreplace")


def _questions(group: Group, traces: int) -> dict[str, Any]:
    """Every question of a group, and for each run one column per figure, with None for questions without a result."""
    tables = [run.rows.set_index("id") for run in group.runs]
    every = pd.concat(tables)
    every = every[~every.index.duplicated()]
    metrics = group.metrics
    headline = pd.DataFrame({n: table[metrics[0]] for n, table in enumerate(tables)})
    names = ("question", "answers", "type", "hops")
    return {
        "ids": list(every.index),
        **{name: _plain(every[name]) for name in names},
        "runs": [{name: _plain(one[name].reindex(every.index)) for name in (*_COLUMNS, *metrics)} for one in tables],
        "traced": _telling(headline.reindex(every.index), traces),
    }


def _plain(column: pd.Series) -> list[Any]:
    return [value if isinstance(value, list) or pd.notna(value) else None for value in column.tolist()]


def _telling(scores: pd.DataFrame, most: int) -> list[int]:
    """Indices of the most telling questions: largest difference of runs first, then fewest right, then data order."""
    order = pd.DataFrame({"spread": scores.min(axis=1) - scores.max(axis=1), "mean": scores.mean(axis=1)})
    order = order.round(6).reset_index(drop=True).sort_values(["spread", "mean"], kind="stable")
    return sorted(order.index[:most].tolist())


def _corpus(run: Any) -> str:
    """The identity of a corpus: its digest, or the folder with the questions' contexts."""
    return str(run.settings.get("corpus") or run.folder)


def _corpora_of(groups: Sequence[Group], corpora: Sequence[str]) -> dict[str, tuple[str, str]]:
    """`_corpus` of a run -> the key of its texts on the page, and the file of the texts."""
    runs = [run for group in groups for run in group.runs]
    known = {_corpus(run) for run in runs}
    found = {file_digest(path): str(path) for path in map(corpus_file, corpora)}
    for digest, path in found.items():
        if digest not in known:
            raise ValueError(f"--corpus {path}: no run of this report used this file, or the file has changed since")
    for run in runs:
        # `eval run` writes this corpus if none was named.
        own = [one / "corpus.jsonl" for one in (Path(run.folder), Path(run.folder).parent)]
        if not run.settings.get("corpus") and run.settings.get("retriever"):
            found |= {_corpus(run): str(one) for one in own[::-1] if one.is_file()}
    return {name: (f"c{number}", path) for number, (name, path) in enumerate(found.items())}


def _lines(
    groups: Sequence[Group], found: Sequence[Mapping[str, Any]], texts: Mapping[str, tuple[str, str]]
) -> Iterator[tuple[str, Any]]:
    """Yield traces by "group.run.question", then the texts of their passages by corpus."""
    wanted: dict[str, set[str]] = {name: set() for name in texts}
    for number, (group, questions) in enumerate(zip(groups, found)):
        chosen = {questions["ids"][place]: place for place in questions["traced"]}
        for place, run in enumerate(group.runs):
            for _, row in read_runs(Path(run.folder) / RESULTS, partial=True):
                if row["id"] not in chosen:
                    continue
                trace = {name: row["trace"].get(name) for name in _TRACE}
                trace["details"] = {name: one for name, one in trace["details"].items() if name not in _ELSEWHERE}
                yield f"{number}.{place}.{chosen[row['id']]}", trace | {"supporting": row.get("supporting") or []}
                if _corpus(run) in wanted:
                    wanted[_corpus(run)] |= {one["id"] for step in trace["steps"] for one in step["passages"]}
    for name, (key, path) in texts.items():
        yield key, {one.id: one.text[:_LONGEST] for one in read_corpus(path) if one.id in wanted[name]}
