"""Model cards: what a model is, how it was trained and scored, and how to load it, as the README.md of its folder.

A card is rendered from `Provenance`, which is collected from the run and kept beside the card as `provenance.json`,
so that a merged folder can tell the same story without the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePath
from typing import Any, Literal

import yaml

from tripletune.models.run_folders import is_text_model, public, read_json

CARD = "README.md"
PROVENANCE = "provenance.json"
Kind = Literal["adapter", "merged", "language_model"]
# Of models trained on plain text: `checkpoints.text_card`.
TextKind = Literal["text_adapter", "text_merged"]

_TITLES = {
    "adapter": "Graph-LLM adapter",
    "merged": "Graph-LLM with merged adapter",
    "language_model": "Language model of a Graph-LLM",
}
_SUMMARIES = {
    "adapter": "A PEFT adapter for `{base}`: {parts}. It plans sub-queries and answers questions over retrieved "
    "triples as in RAS (section 3.4).",
    "merged": "`{base}` with its trained parts built in ({parts}); it needs no PEFT. It plans sub-queries and answers "
    "questions over retrieved triples as in RAS (section 3.4).",
    "language_model": "`{base}` with the LoRA weights of a Graph-LLM merged into it, as a plain transformers model. "
    "{caution}",
}
_CAUTION = (
    "**The graph token is lost:** it was trained with a graph encoder whose output this model does not see, so its "
    "replies differ from those of the Graph-LLM. Use it only as a starting point or for comparison."
)
_NO_CAUTION = "It was trained without graph token, so it says the same as the Graph-LLM when it gets the same prompt."
_LOAD_GRAPH_LLM = """\
from tripletune.models.local.generator import load_generator
from tripletune.models.data.records import ModelInput, Step
from tripletune.models.data.triples import Triple

generator = load_generator("{folder}")
facts = (Triple("The Glass Harbour", "written by", "Ida Morn"), Triple("Ida Morn", "born in", "Velsund"))
history = (Step("Who wrote The Glass Harbour?", facts),)
sample = ModelInput("answering", "Where was the author of The Glass Harbour born?", history)
print(generator.generate_many([sample], max_new_tokens=64)[0].text)"""
_LOAD_LANGUAGE_MODEL = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{folder}")
model = AutoModelForCausalLM.from_pretrained("{folder}")
inputs = tokenizer("Question: Where was Ida Morn born?", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))"""


@dataclass
class Provenance:
    """Where a trained model comes from; every value may be shown to others.

    Attributes:
        base_model: Spec of the base model.
        base_revision: Its hub revision, if known.
        encoder: Spec of the text encoder.
        use_graph: Whether the model reads a graph token.
        licence: Licence identifier of this folder, if its owner named one.
        config: The resolved configuration of the run.
        environment: Git revision, Python and package versions.
        training: Records, optimiser steps, seconds, data digests.
        evaluation: What the run measured at its end.
        scores: Content of metrics files, by name.
    """

    base_model: str
    base_revision: str | None = None
    encoder: str = ""
    use_graph: bool = True
    licence: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The content of `provenance.json`."""
        return asdict(self)


def collect(source: Path, scores: Sequence[str | Path] = (), licence: str | None = None) -> Provenance:
    """Gather what is known about a trained folder.

    Args:
        source: `final/` or a checkpoint of a run (the run's own files are looked for one folder up), or an export.
        scores: Files of metrics (`metrics.json` of `tripletune eval`).
        licence: Licence identifier.

    Raises:
        FileNotFoundError: a scores file is missing.
        ValueError: a file is malformed.
    """
    kept = source / PROVENANCE
    if kept.is_file():
        content = read_json(kept)
        names = {item.name for item in fields(Provenance)}
        if "base_model" not in content or not content.keys() <= names:
            raise ValueError(f"{kept}: it does not have the expected layout; export the run again")
        provenance = Provenance(**content)
    else:
        provenance = _collect_from_run(source)
    provenance.licence = licence or provenance.licence
    for file in scores:
        path = Path(file)
        if not path.is_file():
            raise FileNotFoundError(f"scores file {path}: there is no such file")
        # Files of several tasks all have the name metrics.json; their folder tells them apart.
        name = f"{path.resolve().parent.name}/{path.name}"
        provenance.scores[name] = public(read_json(path))
    return provenance


def _collect_from_run(source: Path) -> Provenance:
    if is_text_model(source):
        # Whoever exports it names the base model.
        provenance = Provenance(base_model="unknown", use_graph=False)
    else:
        config = read_json(source / "config.json")
        provenance = Provenance(
            base_model=str(config.get("base_model") or "unknown"),
            base_revision=config.get("base_revision"),
            encoder=str(config.get("encoder") or ""),
            use_graph=bool(config.get("use_graph", True)),
        )
    run = source.resolve().parent
    if (run / "config.yaml").is_file():
        try:
            provenance.config = public(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))) or {}
        except yaml.YAMLError as error:
            raise ValueError(f"{run / 'config.yaml'}: not valid YAML ({' '.join(str(error).split())})") from None
    if (run / "environment.json").is_file():
        about = read_json(run / "environment.json")
        # The command line and the machine are nobody's business.
        provenance.environment = {key: about[key] for key in ("git_revision", "python", "versions") if key in about}
    if (source / "training.json").is_file():
        training = public(read_json(source / "training.json"))
        provenance.evaluation = training.pop("evaluation", None) or {}
        provenance.training = training
    elif (source / "trainer_state.json").is_file():
        step = int(read_json(source / "trainer_state.json").get("global_step", 0))
        provenance.training = {"steps": step, "note": "an intermediate checkpoint"}
        seconds = seconds_until(run / "losses.jsonl", step)
        if seconds:
            provenance.training["seconds"] = round(seconds, 1)
    return provenance


def seconds_until(losses: Path, step: int) -> float:
    """Seconds of the optimiser steps up to `step`, of all starts of a run, by its loss log; 0 without one."""
    if not losses.is_file():
        return 0.0
    total = 0.0
    with losses.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                row = json.loads(line)
                total += float(row["seconds"]) if row["step"] <= step else 0.0
            except (ValueError, KeyError, TypeError):
                continue  # a run that was killed, or still trains, leaves a cut-off line
    return total


def render_card(provenance: Provenance, kind: Kind, name: str) -> str:
    """Write a model card.

    Args:
        provenance: The facts.
        kind: What the folder holds.
        name: Name of the folder, for title and example.

    Returns:
        Markdown with a YAML head as on the Hugging Face hub.
    """
    base = public(provenance.base_model)
    revision = f", revision `{provenance.base_revision}`" if provenance.base_revision else ""
    lora = (provenance.config.get("model") or {}).get("lora", True)
    parts = ("LoRA weights, " if lora else "") + ("graph encoder and projector" if provenance.use_graph else "no graph")
    summary = _SUMMARIES[kind].format(base=base, parts=parts, caution=_CAUTION if provenance.use_graph else _NO_CAUTION)
    example = _LOAD_LANGUAGE_MODEL if kind == "language_model" else _LOAD_GRAPH_LLM
    needs = "" if kind == "language_model" else "With TripleTune installed:\n\n"
    facts = [f"- Base model: `{base}`{revision}"]
    if provenance.use_graph and kind != "language_model":
        facts.append(f"- Text encoder of nodes and edges: `{public(provenance.encoder)}`")
    sections = [
        f"# {_TITLES[kind]}: {name}",
        summary,
        "\n".join(facts),
        "## How to load it",
        f"{needs}```python\n{example.format(folder=name)}\n```",
        "## How it was trained",
        *training_section(provenance),
        "## Scores",
        *scores_section(provenance),
    ]
    if kind != "language_model":
        sections += ["## Is it intact?", VERIFY.format(folder=name)]
    sections += ["## Licence", licence_note(provenance, base)]
    return "\n\n".join([front_matter(provenance, kind, base), *sections]) + "\n"


VERIFY = """\
`verify.json` holds what the trained model said in float32 to a few made-up inputs. This loads the folder in a new
process and compares prompts, logits and greedy replies:

    tripletune checkpoints verify {folder}"""


def front_matter(provenance: Provenance, kind: Kind | TextKind, base: str, task: str = "") -> str:
    """The YAML head of a card."""
    is_adapter = kind in ("adapter", "text_adapter")
    tags = ["tripletune", "retrieval-augmented-generation", "knowledge-graph"]
    if kind in ("text_adapter", "text_merged"):
        tags += [task.replace("_", "-")]
    else:
        tags.insert(1, "ras")
        tags += ["graph-llm"] if kind != "language_model" else []
    tags += ["lora"] if is_adapter else []
    head: dict[str, Any] = {
        "base_model": base,
        "base_model_relation": "adapter" if is_adapter else "finetune",
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": tags,
    }
    if provenance.licence:
        head["license"] = provenance.licence
    else:
        head |= {"license": "other", "license_name": "not-stated", "license_link": "README.md#licence"}
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---"


def licence_note(provenance: Provenance, base: str) -> str:
    """What is known of the licence."""
    own = f"This folder: {provenance.licence}." if provenance.licence else "No licence was named for this folder."
    return (
        f"{own} It is derived from `{base}` and from the training data above; the licences of both apply. Check them "
        "before you use or pass on these weights."
    )


def training_section(provenance: Provenance) -> Iterator[str]:
    """How the model was trained: a table and the resolved configuration."""
    training, environment = provenance.training, provenance.environment
    rows = [
        [name.replace("_", " "), _cell(value)]
        for name, value in training.items()
        if not isinstance(value, dict) and value is not None
    ]
    for split, about in (training.get("data") or {}).items():
        if isinstance(about, dict):
            rows.append([f"{split} data", f"`{about.get('path')}`, SHA-256 `{about.get('sha256')}`"])
    rows += [
        [f"trajectories of `{teacher}`", f"{count}"] for teacher, count in (training.get("teachers") or {}).items()
    ]
    if environment.get("git_revision"):
        rows.append(["git revision of TripleTune", f"`{environment['git_revision']}`"])
    versions = {"python": environment.get("python"), **(environment.get("versions") or {})}
    shown = ", ".join(f"{package} {version}" for package, version in versions.items() if version)
    if shown:
        rows.append(["versions", shown])
    yield _table(["what", "value"], rows) if rows else "The run left no record of its training."
    if provenance.config:
        text = yaml.safe_dump(provenance.config, sort_keys=False, allow_unicode=True).rstrip()
        yield f"The resolved configuration:\n\n```yaml\n{text}\n```"


def scores_section(provenance: Provenance) -> Iterator[str]:
    """Tables of what was measured."""
    nothing = True
    if provenance.evaluation:
        nothing = False
        yield "Measured by the run on its validation records:"
        yield _table(
            ["metric", "value"], [[f"`{name}`", _cell(value)] for name, value in provenance.evaluation.items()]
        )
    for name, content in provenance.scores.items():
        nothing = False
        about = [f"{key} `{content[key]}`" for key in ("system", "task", "split", "questions") if content.get(key)]
        if isinstance(content.get("data"), str):
            # The folder or file alone: where it lay is nobody's business.
            about.insert(0, f"data `{PurePath(content['data']).name}`")
        yield f"`{name}`" + (f" ({', '.join(about)})" if about else "") + ":"
        intervals = [
            [f"`{metric}`", f"{value['mean']:.4g}", f"{value['low']:.4g} to {value['high']:.4g}", _cell(value.get("n"))]
            for metric, value in _intervals(content)
        ]
        if intervals:
            yield _table(["metric", "mean", "95 % interval", "n"], intervals)
        else:
            yield _table(["metric", "value"], [[f"`{metric}`", _cell(value)] for metric, value in _numbers(content)])
    if nothing:
        yield "None are recorded. Evaluate with `tripletune eval`, then export again with `--scores …/metrics.json`."


def _intervals(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every {"mean", "low", "high"} of a metrics file that was measured on anything."""
    for key, value in content.items():
        if isinstance(value, dict):
            if all(isinstance(value.get(part), (int, float)) for part in ("mean", "low", "high")):
                if value.get("n", 1):
                    yield f"{prefix}{key}", value
            else:
                yield from _intervals(value, f"{prefix}{key}.")


def _numbers(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}{key}", value


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) and abs(value) < 1000 else str(value)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
