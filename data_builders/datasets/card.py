"""The data set card: what was built from what and by whom, its numbers beside the paper's, and samples."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tripletune.data_builders.datasets.shards import CARD, DROPPED, STATISTICS, Format, front_matter, write_text
from tripletune.data_builders.datasets.stats import YES_NO, Histogram, Statistics, table_rows
from tripletune.models.data.records import Action

__all__ = ["YES_NO", "BuildFacts", "Histogram", "Statistics", "card_body", "file_digest", "table_rows", "write_card"]

_LONGEST_SAMPLE = 2000


@dataclass
class BuildFacts:
    """What a card says besides the numbers.

    Attributes:
        title: Heading of the card.
        summary: One paragraph on what the records are.
        teachers: By source, who labelled it.
        drops: By source, questions left out by reason.
        questions: By source, questions that gave records.
        repairs: By source, replies that were right only after a repair turn, by stage.
        refused: By source, replies that were turned down, those of repair turns included, by stage and reason.
        recovered: By source, replies in another form than was asked for that were read all the same.
        examples: By reason, some of the questions that were left out (`data_builders.dropped`).
        issues: Oddities of the input that cost no question.
        files: Input files and their SHA-256.
        options: The options of the build.
        prompts: Prompt files of the teacher and their SHA-256.
        models: By role (teacher, text-to-triples, direct answers), the model that had it.
        calls: By stage, numbers of calls and tokens. Nothing that differs between two runs of one build belongs here.
        notes: Sentences to be printed as they are.
    """

    title: str
    summary: str
    teachers: dict[str, str] = field(default_factory=dict)
    drops: dict[str, dict[str, int]] = field(default_factory=dict)
    questions: dict[str, int] = field(default_factory=dict)
    repairs: dict[str, dict[str, int]] = field(default_factory=dict)
    refused: dict[str, dict[str, int]] = field(default_factory=dict)
    recovered: dict[str, dict[str, int]] = field(default_factory=dict)
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    issues: dict[str, int] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, str] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    calls: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def card_body(facts: BuildFacts, statistics: dict[str, Any]) -> str:
    """The card's text below the YAML head, in Markdown."""
    parts = [f"# {facts.title}", facts.summary, *facts.notes, "## Records"]
    if statistics["records"]:
        parts += _records(facts, statistics)
    else:
        parts.append("**None: no question could be labelled.** What follows says why.")
    for heading, counts in (
        ("Questions left out", _by_source(facts.drops)),
        ("Replies turned down", _by_source(facts.refused)),
        ("Replies mended in a second turn", _by_source(facts.repairs)),
        ("Replies read though they were not in the form asked for", _by_source(facts.recovered)),
        ("Oddities of the input", facts.issues),
    ):
        if counts:
            parts += [f"## {heading}", table(["what", "count"], [[name, f"{n:,}"] for name, n in counts.items()])]
    if facts.examples:
        parts += _examples(facts.examples)
    if facts.models:
        parts += ["## Models", table(["role", "model"], [[role, f"`{name}`"] for role, name in facts.models.items()])]
    if facts.calls:
        columns = list(dict.fromkeys(name for numbers in facts.calls.values() for name in numbers))
        rows = [
            [stage, *(f"{numbers[name]:,}" if name in numbers else "-" for name in columns)]
            for stage, numbers in facts.calls.items()
        ]
        parts += ["## Calls of the teacher", table(["stage", *(name.replace("_", " ") for name in columns)], rows)]
    if facts.prompts:
        rows = [[f"`{name}`", f"`{digest}`"] for name, digest in facts.prompts.items()]
        parts += ["## Prompts", table(["prompt", "SHA-256"], rows)]
    if facts.files:
        rows = [[f"`{name}`", f"`{digest}`"] for name, digest in facts.files.items()]
        parts += ["## Input files", table(["file", "SHA-256"], rows)]
    if facts.options:
        rows = [[f"`{name}`", f"`{value}`"] for name, value in facts.options.items()]
        parts += ["## Options", table(["option", "value"], rows)]
    if statistics.get("samples"):
        parts += ["## Samples", *_samples(statistics["samples"])]
    return "\n\n".join(parts) + "\n"


def _records(facts: BuildFacts, statistics: dict[str, Any]) -> list[str]:
    parts = [table(["split", "records"], [[name, f"{n:,}"] for name, n in statistics["splits"].items()])]
    head = ["", "planning", "planning, paper", "answering", "answering, paper"]
    parts += [
        f"Beside table 4 of RAS. Lengths here are {statistics['unit']}; the paper counts LLaMA-2 tokens. A graph is "
        "that of one step: nodes are its distinct subjects and objects, and each triple is an edge and its reverse.",
        table(head, [list(row) for row in table_rows(statistics)]),
    ]
    if statistics["sources"]:
        parts += ["## Sources", _source_table(facts, statistics["sources"])]
        parts.append(
            "“Answer in triples” counts the answering records with a history whose triples name a gold answer "
            "(normalised, whole words); yes/no answers are left out of it."
        )
    return parts


def _examples(examples: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Questions that the teacher could not label: where it failed, and how its reply begins."""
    parts = [
        "## Examples of questions left out",
        f"Picked by a hash of their ids; all of them are in `{DROPPED}`, the whole replies in the ledger.",
    ]
    for reason, rows in examples.items():
        lines = []
        for row in rows:
            lines.append(f"{row['question_id']}  {row['stage']}  {row['detail']}".rstrip())
            lines.append(f"    {' '.join(row['reply'].split()) or '(no reply)'}")
        text = "\n".join(lines)
        fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
        parts += [f"### {reason[:1].upper()}{reason[1:]}", f"{fence}text\n{text}\n{fence}"]
    return parts


def write_card(folder: str | Path, facts: BuildFacts, statistics: Statistics, format: Format) -> None:
    """Write `README.md` and `statistics.json` into a data set folder that holds its shards."""
    folder, numbers = Path(folder), statistics.to_json()
    head = front_matter(list(numbers["splits"]), format, facts.title)
    write_text(folder / CARD, f"{head}\n{card_body(facts, numbers)}")
    content = {"statistics": numbers, "build": dataclasses.asdict(facts)}
    write_text(folder / STATISTICS, json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _source_table(facts: BuildFacts, sources: dict[str, dict[str, int]]) -> str:
    actions = [action.value for action in Action]
    head = ["source", "teacher", "questions", *actions, "answering", "with triples", "yes/no", "answer in triples"]
    keys = [*actions, "answering", "answering with triples", "yes/no answer", "answer in triples"]
    return table(
        head,
        [
            [name, facts.teachers.get(name, "-"), f"{facts.questions.get(name, 0):,}"]
            + [f"{counts.get(key, 0):,}" for key in keys]
            for name, counts in sources.items()
        ],
    )


def _samples(samples: dict[str, list[dict[str, str]]]) -> list[str]:
    """Records of each label as a model sees them; long ones are cut, the whole record is what `peek` shows."""
    parts = [
        "Records picked by a hash of their ids, "
        "as the model sees them below the instruction, and the label it learns. Whole ones, and their graphs: "
        "`tripletune data peek FOLDER --id ID`."
    ]
    for label, records in samples.items():
        parts.append(f"### {label}")
        for record in records:
            shown = _shortened(record["input"])
            fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", shown + record["label"])), default=0))
            label_text = _shortened(record["label"])
            parts.append(f"`{record['id']}`\n\n{fence}text\n{shown}\n=> {label_text}\n{fence}")
    return parts


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST_SAMPLE:
        return text
    # The question stands last, so the middle is what can be spared.
    tail = _LONGEST_SAMPLE // 3
    left_out = len(text) - _LONGEST_SAMPLE
    return f"{text[: _LONGEST_SAMPLE - tail]} [... {left_out:,} characters ...] {text[-tail:]}"


def _by_source(counts: dict[str, dict[str, int]]) -> dict[str, int]:
    return {f"{source}: {what}": n for source, numbers in counts.items() for what, n in numbers.items()}


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
