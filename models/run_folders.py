"""Find the model folder of a run, and check that it is complete.

These checks are cheap (JSON and file headers), so that a damaged folder is reported before a model is loaded.

Tested in `tests/models/test_loading.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, cast

from tripletune.core.config import read_yaml
from tripletune.core.data.jsonl import read_jsonl
from tripletune.core.files import read_json

if TYPE_CHECKING:
    import torch

# The folder of the trained model in a run, and the file that is written when training has finished.
FINAL = "final"
RESULT = "final/training.json"
# The resolved settings of a run, and the settings among them that change no weight.
RUN_SETTINGS = "config.yaml"
_NO_WEIGHT = (
    "output_dir", "run_name", "project", "entity", "group", "tags", "artifacts", "report_to", "resume", "push_to_hub",
)  # fmt: skip
# The exit code of a run that a signal stopped (EX_TEMPFAIL: try again), and the file that says so until the run
# continues, because `accelerate launch` hides the exit code.
PREEMPTED_CODE = 75
PREEMPTED = "preempted.json"
# A machine's manager sends SIGTERM before it takes the machine away; SLURM's `--signal=USR1@300` sends SIGUSR1.
# Windows has no SIGUSR1.
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]
CONFIG = "config.json"
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
PROCESSOR = "processor_config.json"
# Files that describe the task of a model on plain text; a Graph-LLM has none of these files.
EXTRACTOR = "extractor.json"
STUDENT = "student.json"
TASK_FILES = (EXTRACTOR, STUDENT)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
# How a student was trained.
Method = Literal["sft", "on_policy", "grpo"]
# The instruction that a model on plain text was trained with.
PROMPT_FILE = "prompt.md"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_ABSOLUTE = re.compile(r"(?:~?/|\\\\|[A-Za-z]:[/\\]|file:)(?=.)")
# The folders of an absolute path within a text; not "//" of an address, nor "/think", which a chat template may hold.
_FOLDERS = re.compile(
    r"(?<=[\s=,:'\"(\[])(?:(?:file:|~?/(?!/))[^\s,'\"]*/|(?:[A-Za-z]:[/\\]|\\\\)[^\s,'\"]*[/\\])(?=[^\s/\\])"
)
_SECRET_KEY = re.compile(r"(?:hub|hf|api|auth|access)_?token|secret|password|api_?key|credential", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,})|(?<=://)[^/\s@]+@")


class Preempted(KeyboardInterrupt):
    """A signal stopped a run, which the same command continues.

    Not an `Exception`, because it may be raised at any place, and libraries pass over exceptions of what they try.
    """

    exit_code = PREEMPTED_CODE


class TaskFacts(TypedDict, total=False):
    """The content of `extractor.json` or `student.json`: the fields of its kind; older files lack some.

    Attributes:
        task: "text_to_triples" for an extractor, "student" for several roles, else the student's only role.
        base_model: Spec of the base model, without its revision.
        base_revision: Commit of the base model on the hub; None for folders and packages.
        base_weights: Fingerprint of the base model; see `models.adapters.check_base`.
        encoder_decoder: Whether an extractor is an encoder-decoder.
        max_source_tokens: Limit to which an extractor's texts were cut.
        max_target_tokens: Limit to which an extractor's targets were cut.
        roles: Kinds of calls that a student answers, for example "cirag.integrate".
        systems: The systems of these roles.
        method: How a student was trained.
        max_prompt_tokens: Limit to which a student's prompts were shortened; None: not shortened.
    """

    task: str
    base_model: str
    base_revision: str | None
    base_weights: str
    encoder_decoder: bool
    max_source_tokens: int
    max_target_tokens: int
    roles: list[str]
    systems: list[str]
    method: Method
    max_prompt_tokens: int | None


class Training(NamedTuple):
    """How a model was trained.

    Attributes:
        config: Digest of the settings, without the seed and what changes no weight.
        seed: The seed of the training.
    """

    config: str
    seed: int


def training_of(folder: str | Path) -> Training | None:
    """How the model of a run or checkpoint was trained; None for a folder that lacks its run's settings (an export)."""
    model = Path(folder)
    if is_run(model):
        model = trained_folder(model)
    file = model.parent / RUN_SETTINGS
    if not file.is_file() or not _holds_model(model):
        return None
    settings = read_yaml(file)
    seed = settings.pop("seed", None)
    if seed is None:
        return None
    for name in _NO_WEIGHT:
        settings.pop(name, None)
    # A checkpoint has other weights than the result of its run.
    content = json.dumps([settings, model.name], sort_keys=True, default=str)
    return Training(hashlib.sha256(content.encode()).hexdigest(), int(seed))


def trained_folder(folder: str | Path) -> Path:
    """The folder with the trained model: `final/` of a run, else the folder itself.

    A run without a result is refused: which of its checkpoints is meant, only its user knows.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {folder}")
    if _holds_model(folder):
        return folder
    if _holds_model(folder / FINAL):
        return folder / FINAL
    checkpoints = _checkpoints_by_step(folder)
    if checkpoints:
        raise FileNotFoundError(
            f"run {folder} has no {FINAL}/, so training did not finish: finish it, or give a checkpoint: "
            f"{checkpoints[-1]}"
        )
    raise FileNotFoundError(f"{folder} has no {CONFIG}: it is not a run, checkpoint, export or merged folder")


def is_run(folder: str | Path) -> bool:
    """Whether a folder is a training run, with a result or checkpoints, and not a model.

    A folder that holds a model itself is a model, even with checkpoints in it.
    """
    folder = Path(folder)
    return not _holds_model(folder) and (_holds_model(folder / FINAL) or bool(_checkpoints_by_step(folder)))


def _checkpoints_by_step(folder: Path) -> list[Path]:
    """The checkpoints of a run, in the order of their steps: checkpoint-900 comes before checkpoint-1000."""
    return sorted(folder.glob("checkpoint-*"), key=lambda path: (len(path.name), path.name))


def _holds_model(folder: Path) -> bool:
    """Whether a folder has the main file of a model, an adapter, an encoder or an export.

    One of them is enough, since each kind lacks some: an adapter has no configuration, an encoder's root may have
    only `modules.json`.
    """
    return any((folder / name).is_file() for name in (CONFIG, ADAPTER_CONFIG, "modules.json", *TASK_FILES))


def task_of(folder: str | Path) -> TaskFacts:
    """The task of a model on plain text: the content of `extractor.json` or `student.json`; empty for a Graph-LLM."""
    for name in TASK_FILES:
        file = Path(folder) / name
        if file.is_file():
            return cast(TaskFacts, read_json(file))
    return {}


def check_model_folder(folder: str | Path) -> None:
    """Make sure that a folder can be loaded, without loading it.

    A text model's adapter needs no `config.json`, since PEFT takes the base model's. A Graph-LLM always has one, which
    describes its graph modules, and a `processor_config.json`, which holds its prompts. Every JSON file that loading
    reads is read here, so that one that was cut off is named.
    """
    folder = Path(folder)
    is_text_model = bool(task_of(folder))
    main = CONFIG
    needed: tuple[str, ...] = (CONFIG, PROCESSOR)
    if is_text_model:
        main = ADAPTER_CONFIG if is_adapter(folder) else CONFIG
        needed = (main,)
    for name in (*needed, ADAPTER_CONFIG, "tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            read_json(folder / name)
        elif name in needed:
            raise FileNotFoundError(_describe_missing_file(folder, name))
    config = read_json(folder / main)
    if not is_text_model and config.get("model_type") != "graph_llm":
        raise ValueError(
            f"{folder / CONFIG}: model_type is {config.get('model_type')!r}, not 'graph_llm': give the folder "
            "of a trained Graph-LLM (run, checkpoint, export or merged)"
        )
    if not any((folder / name).exists() for name in TOKENIZERS):
        base = config.get("base_model") or config.get("base_model_name_or_path") or "the base model"
        raise FileNotFoundError(
            f"model folder {folder} has no tokenizer ({' or '.join(TOKENIZERS)}): copy the tokenizer files of {base} "
            "into it"
        )
    for file in weight_files(folder):
        check_weights(file)


def _describe_missing_file(folder: Path, name: str) -> str:
    """The error message for a model folder without one of its JSON files.

    An adapter without our processor is complete for its own trainer, so the message says what it can be used for.
    """
    if is_adapter(folder) and not (folder / PROCESSOR).is_file():
        return (
            f"{folder} is an adapter of another trainer, or an export of --language-model-only: use it as a chat model "
            "(hf:FOLDER) or as model.base of a training; merge, export and verify need a model that was trained here"
        )
    return f"{folder} has no {name}: the model folder is not complete; copy it again"


def is_adapter(folder: str | Path) -> bool:
    """Whether the folder holds an adapter, not a whole model."""
    return (Path(folder) / ADAPTER_CONFIG).exists()


def weight_files(folder: str | Path) -> list[Path]:
    """The safetensors files that an adapter or whole model should have, missing shards included.

    So a copy that lost a shard is noticed, which a look at the files that are there would not show.
    """
    folder = Path(folder)
    if is_adapter(folder):
        return [folder / ADAPTER]
    if not (folder / INDEX).exists():
        return [folder / WEIGHTS]
    shards = read_json(folder / INDEX).get("weight_map")
    names: list[str] = []
    if isinstance(shards, dict):
        names = sorted(set(map(str, shards.values())))
    # A name with a folder in it would read a file outside the model.
    if not names or any(re.fullmatch(r"[^/\\]+\.safetensors", name) is None for name in names):
        raise ValueError(f"{folder / INDEX}: weight_map must name safetensors files there; copy the folder again")
    return [folder / name for name in names]


def check_weights(file: Path) -> None:
    """Check that a safetensors file has the length that its header says.

    A copy that was cut off is thereby found before a long job begins.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is cut off or damaged.
    """
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        raise FileNotFoundError(f"{file.parent} has no {file.name}: the weights are missing; copy the folder again")
    try:
        # Opening compares the header with the file's length; the weights stay on disk.
        with safe_open(file, framework="pt"):
            pass
    except SafetensorError as error:
        raise ValueError(
            f"the weights in {file} cannot be read ({error}): the file is cut off or damaged; use an earlier "
            "checkpoint or copy the folder again"
        ) from None


def first_not_finite(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The name of the first weight that holds a number that is not finite; "" if all are finite.

    A training that diverged is stopped by it before its checkpoint replaces a good one. Each weight is read once, by
    its smallest and its largest number, since a mask of all numbers would need as much memory as the weight.
    """
    for name, weight in weights:
        # A sharded weight (DTensor): the numbers that this process holds.
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        local = local.detach()
        # Quantised weights are integers or numbers of one byte; weights that other processes hold have no elements.
        has_numbers_here = local.is_floating_point() and local.element_size() > 1 and local.numel()
        if has_numbers_here:
            low, high = local.aminmax()
            # The difference of a number and itself is NaN if it is NaN or infinite.
            if not (low - low + high - high).isfinite():
                return name
    return ""


def stored_weights(folder: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and weights in a folder's safetensors files, one weight in memory at a time."""
    from safetensors import safe_open

    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (it is no dictionary)
                yield name, weights.get_tensor(name)


def check_finite(weights: Iterable[tuple[str, torch.Tensor]], owner: str | Path) -> None:
    """Raise an error if weights are not finite; `owner` is the model or folder that the message names."""
    name = first_not_finite(weights)
    if name:
        raise ValueError(
            f"{owner}: weights are not finite (NaN or infinite), for example {name}: training diverged, or weights "
            "overflow in this dtype; use an earlier checkpoint, another copy or another dtype"
        )


def seconds_until(losses: Path, step: int) -> float:
    """Seconds of the optimiser steps up to `step` in a run's loss log, including restarts; 0 without a log."""
    if not losses.is_file():
        return 0.0
    return sum(float(row["seconds"]) for _, row in read_jsonl(losses, partial=True) if row["step"] <= step)


def without_private_data(value: Any, keep: tuple[str, ...] = ()) -> Any:
    """A copy of a JSON value for publication: absolute paths are cut to their last name, and secrets are "***".

    A secret is known by its key ("api_key") or by its own form (a token of the hub, a password in an address).

    Args:
        value: Any JSON value; the copy has the same type.
        keep: Texts that are not changed, such as the folder of a base model that others need.
    """
    if isinstance(value, dict):
        copied = {}
        for key, item in value.items():
            is_secret = isinstance(item, str) and item and _SECRET_KEY.search(str(key))
            copied[key] = "***" if is_secret else without_private_data(item, keep)
        return copied
    if isinstance(value, list):
        return [without_private_data(item, keep) for item in value]
    if not isinstance(value, str) or value in keep:
        return value
    if _ABSOLUTE.match(value):
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    return _SECRET_VALUE.sub("***", _FOLDERS.sub("", value))
