"""The run folder, which holds the settings, checkpoints and logs of one run.

Training continues only with the settings and data of its start: weights that were trained with two learning rates, or
on two data sets, would match no configuration.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import platform
import shutil
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import TrainerCallback

from tripletune.core.files import (
    LOGS,
    check_folder,
    few,
    finite,
    flatten,
    json_line,
    read_json,
    write_json,
    write_text,
)
from tripletune.core.options import default_of, leaves, read_yaml, to_yaml
from tripletune.core.program import code_version, versions
from tripletune.models.loading import with_revision
from tripletune.models.run_folders import FINAL, RESULT, check_finite, check_weights, not_finite, stored_weights

logger = logging.getLogger(__name__)
SETTINGS, ENVIRONMENT = "config.yaml", "environment.json"
LOSS_FILE, EVALUATIONS = "losses.jsonl", "evaluations.jsonl"
# Keys of `environment.json`: the number of processes, what is sharded among them, the number of rows grouped by length,
# and the digests of data, with their names in words.
PROCESSES, SHARDING, GROUPED = "processes", "sharding", "rows_grouped"
DATA = {"train_sha256": "the training data", "validation_sha256": "the validation data"}
PACKAGES = (
    "torch", "transformers", "peft", "accelerate", "torch-geometric", "datasets", "sentence-transformers", "trl",
)  # fmt: skip
# Settings that may change between two starts: they change how a run is logged, saved and computed, not what it learns.
_FREE = {
    "output_dir", "run_name", "report_to", "resume", "project", "entity", "group", "tags", "artifacts",
    "push_to_hub",
    "data.train", "data.validation", "data.validation_split", "data.max_validation_records", "data.cache",
    "train.gradient_checkpointing", "train.torch_compile", "train.logging_steps", "train.workers", "train.ddp_timeout",
    "model.attention", "train.patience", "train.eval_steps", "train.eval_batch_size",
    # Of these three, only their product counts: `check_same_run` compares the records per step.
    "train.batch_size", "train.gradient_accumulation", "train.records_per_step",
}  # fmt: skip
# Steps in a row without a finite loss or gradient norm, after which a run ends.
_PATIENCE = 3


def grouped_rows(config: Any, continues: bool) -> int:
    """Return the number of rows grouped by length: a micro-batch on all processes at the start of the run."""
    processes, file = process_count(), Path(config.output_dir) / ENVIRONMENT
    rows = int(config.train.batch_size * processes)
    if not (continues and file.is_file()):
        return rows
    # Earlier versions grouped the rows of an optimiser step.
    return int(read_json(file).get(GROUPED) or rows * config.train.micro_batches(processes))


def save_run_settings(config: Any, digest: Mapping[str, str], grouped: int | None = None) -> None:
    """Write the resolved configuration, git revision, versions and `TrainingTask.digest` into the run folder."""
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "command": sys.argv,
        "git_revision": code_version().get("commit"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions(PACKAGES),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        PROCESSES: process_count(),
        SHARDING: sharding(),
        GROUPED: grouped,
        **digest,
    }
    write_json(folder / ENVIRONMENT, about)  # first, because this file marks the folder as a run folder
    write_text(folder / SETTINGS, to_yaml(config))


def _saved_settings(folder: Path) -> dict[str, Any]:
    """The settings in a run folder, flat; settings of earlier versions are under their present names."""
    saved = flatten(read_yaml(folder / SETTINGS), ".")
    if (lora := saved.pop("model.lora", None)) is not None:  # until revision b3f73d5
        saved["model.tune"] = "lora" if lora else "graph_token" if "model.use_graph" in saved else "all"
    # Until revision a95bc5e4 hub revisions were settings of their own.
    for name, old in (("model.base", "model.revision"), ("train.teacher", "train.teacher_revision")):
        if revision := saved.pop(old, None):
            saved[name] = with_revision(str(saved[name]), str(revision))
    return saved


def check_same_run(config: Any, digest: Mapping[str, str]) -> None:
    """Make sure that the run folder's checkpoints have these settings, data, models and files."""
    folder = Path(config.output_dir)
    if not (folder / SETTINGS).is_file() or not (folder / ENVIRONMENT).is_file():
        return
    saved, now = _saved_settings(folder), flatten(dataclasses.asdict(config), ".")
    # A setting that the run's version did not have counts as its default.
    before = {**flatten(dataclasses.asdict(type(config)()), "."), **saved}
    about = read_json(folder / ENVIRONMENT)
    # Entries that were removed from a mapping count too.
    mappings = tuple(f"{name}." for name, item in leaves(type(config)).items() if isinstance(default_of(item), dict))
    # If contents are known, names do not count. Settings of scores count if a score chooses the result.
    free, scored = _FREE | (about.keys() & digest.keys()), not (config.train.best_metric or "loss").startswith("loss")
    beginnings = "train.save_" if scored else ("train.save_", "train.eval_")
    changed = [
        f"{name} was {before.get(name)!r:.60} and is {now.get(name)!r:.60}"
        for name in dict.fromkeys([*now, *(name for name in saved if name.startswith(mappings))])
        if before.get(name) != now.get(name) and name not in free and not name.startswith(beginnings)
    ]
    # Revision b3f73d5 made other rows from these settings.
    interleaved = "train.shared_prefixes" in saved and now.get("data.prompt_order") == "interleaved"
    if saved.get("train.shared_prefixes") or interleaved:
        changed.append("an earlier version made the rows in another way")
    weighed = [now.get(f"train.{name}") for name in ("loss_per", "action_weight", "answer_weight")]
    if GROUPED not in about and weighed not in ([None] * 3, ["token", 1, 1]):
        changed.append("an earlier version weighted the losses in another way")
    counts = about[PROCESSES], process_count()
    per_step = [
        one["train.records_per_step"]
        or one["train.batch_size"] * (one["train.gradient_accumulation"] or config.train.default_accumulation) * count
        for one, count in zip((before, now), counts)
    ]
    if per_step[0] != per_step[1]:
        changed.append(
            f"records per step were {per_step[0]} on {counts[0]} process(es) and are {per_step[1]} on {counts[1]}"
        )
    # Each kind of sharding saves optimiser states in other files; ZeRO saves one file per process.
    before_divided, divided = about.get(SHARDING, ""), sharding()
    if before_divided != divided or (divided.startswith("ZeRO") and counts[0] != counts[1]):
        ways = [f"{how or 'DDP or one process'} on {count}" for how, count in zip((before_divided, divided), counts)]
        changed.append(f"optimiser states were saved with {ways[0]} process(es), and this run uses {ways[1]}")
    others = [name for name, one in digest.items() if about.get(name, one) != one]
    changed += [f"the content of {DATA.get(name) or f'{name} {now[name]}'} has changed" for name in others]
    if changed:
        raise ValueError(
            f"{folder} holds checkpoints of another run: {few(changed)}. Give another --output_dir, or --resume false "
            "to start again in this folder; to continue that run, give the settings of its start"
        )


def checkpoint_to_continue(config: Any, digest: Mapping[str, str]) -> Path | None:
    """Return the newest checkpoint of this run in the run folder; None for a new run, or without checkpoints."""
    check_writable(config.output_dir)
    checkpoint = newest_checkpoint(config.output_dir) if config.resume else None
    if checkpoint is not None or (config.resume and (Path(config.output_dir) / RESULT).is_file()):
        check_same_run(config, digest)
    return checkpoint


def newest_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest complete, undamaged checkpoint (its trainer state is written last)."""
    found = []
    for folder in Path(output_dir).glob("checkpoint-*"):
        try:
            state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
            found.append((int(state["global_step"]), folder))
        except (OSError, ValueError, KeyError):
            logger.warning("%s is incomplete and is skipped", folder)
    for _, folder in sorted(found, reverse=True):
        try:
            # A full disk or a failed copy may have cut files off, and weights may not be finite.
            for file in folder.glob("*.safetensors"):
                check_weights(file)
            if cut := [file for file in folder.glob("*.pt*") if not zipfile.is_zipfile(file)]:
                raise ValueError(f"{cut[0]} is cut off or damaged")
            check_finite(stored_weights(folder), folder)
            return folder
        except (OSError, ValueError) as error:
            logger.warning("%s is skipped: %s", folder, error)
    return None


def clear(config: Any, continues: bool) -> None:
    """Remove an earlier run's checkpoints and rename its result to `final.previous`; the folder must be locked.

    Trainers delete the checkpoints of the smallest steps first; these would be the new run's. The earlier result must
    not be mistaken for a result of the new settings.
    """
    for folder in sorted(Path(config.output_dir).glob("checkpoint-*")) if not config.resume else ():
        if folder.is_dir():
            logger.info("removing %s: the run starts again", folder)
            shutil.rmtree(folder)
    result = Path(config.output_dir) / FINAL
    if not continues and result.is_dir():
        aside = result.with_name(f"{FINAL}.previous")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(result, aside)
        logger.info("the result of the earlier run is now in %s", aside)


def check_writable(output_dir: str | Path) -> None:
    """Make the run folder before anything is loaded; refuse a folder that holds other files."""
    folder = Path(output_dir)
    check_folder(output_dir, ("cache", *LOGS), True, continues=ENVIRONMENT)
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"output_dir {folder} can't be written: name another folder")


class StepLog(TrainerCallback):
    """A file with JSON lines in the order of steps; after a resume, it holds no step twice."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        with self.path.open("a", encoding="utf-8") as out:
            out.writelines(json_line(finite(row)) for row in rows)

    def keep_until(self, step: int) -> None:
        """Remove the lines of later steps, and a line that a kill has cut off."""
        if not self.path.exists():
            return
        kept = [line for line in self.path.read_text(encoding="utf-8").splitlines() if _step(line) <= step]
        write_text(self.path, "".join(line + "\n" for line in kept))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.keep_until(state.global_step)


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def scores_of(metrics: dict[str, float]) -> dict[str, float]:
    """Return loss and scores of an evaluation under their names in `evaluations.jsonl`, without the speed."""
    speed = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
    return {name[5:]: value for name, value in metrics.items() if name.startswith("eval_") and name[5:] not in speed}


class Diverged(RuntimeError):
    """A run whose losses or weights are no longer finite numbers."""

    exit_code = 1


def weights_broken(model: torch.nn.Module) -> bool:
    """Whether a trained weight is not finite on any process; all processes must call it."""
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    found = torch.tensor(float(bool(not_finite(trained))), device=trained[0][1].device)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(found)
    return bool(found)


class LossLog(StepLog):
    """`losses.jsonl`: loss, gradient norm, tokens and seconds of every optimiser step, without gaps after a resume.

    The run ends if loss or norm is not finite in `_PATIENCE` steps in a row, or in one step that breaks the weights.
    """

    def __init__(self, path: Path, flush_every: int) -> None:
        super().__init__(path)
        self.flush_every = flush_every
        self._parts: list[torch.Tensor] = []
        self._tokens = self._broken = 0
        # Norm of the gradient before clipping; None if the launcher does not report it.
        self.norm: Any = None
        self._rows: list[dict[str, Any]] = []
        self._began = self._time = self._left = time.perf_counter()
        self._first = 0
        # Tokens and seconds of training since the last line of the log.
        self._pace = [0, 0.0]

    def add_loss(self, loss: torch.Tensor, tokens: int) -> None:
        self._parts.append(loss.detach())
        self._tokens += tokens

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control)
        self._began = self._time = self._left = time.perf_counter()
        self._first = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        loss, tokens = torch.stack(self._parts).sum(), self._tokens
        if args.world_size > 1:
            # Each process has seen its own rows; its loss is already multiplied by the number of processes.
            both = torch.stack([loss.double() / args.world_size, loss.new_tensor(tokens, dtype=torch.double)])
            torch.distributed.all_reduce(both)
            loss, tokens = both[0], int(both[1])
        norm, step = None if self.norm is None else float(self.norm), state.global_step
        row = {"step": step, "loss": loss.item(), "grad_norm": norm, "tokens": tokens}
        self._rows.append({**row, "seconds": round(now - self._time, 3)})
        self._pace = [self._pace[0] + tokens, self._pace[1] + now - self._left]
        self._time, self._left, self._parts, self._tokens, self.norm = now, now, [], 0, None
        # DeepSpeed reports -1 for a norm that is not finite.
        good = math.isfinite(row["loss"] + (norm or 0)) and (norm or 0) >= 0
        self._broken = 0 if good else self._broken + 1
        if self._broken == _PATIENCE or (self._broken and weights_broken(kwargs["model"])):
            self.end(state, step - self._broken + 1)
        # Written before a checkpoint: a kill between the checkpoint and the lines would leave a gap after a resume.
        if control.should_save or len(self._rows) >= self.flush_every:
            self._flush(state)

    def speed(self, state: Any) -> dict[str, float]:
        """Tokens per second since the last call, remaining seconds, and peak GPU memory in GB."""
        tokens, seconds = self._pace
        self._pace = [0, 0.0]
        each = (time.perf_counter() - self._began) / max(state.global_step - self._first, 1)
        found = {
            "tokens_per_second": tokens / max(seconds, 1e-9),
            "seconds_left": each * (state.max_steps - state.global_step),
        }
        if torch.cuda.is_available():
            found["gpu_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        return found

    def on_evaluate(self, *_: Any, **kwargs: Any) -> None:
        self._left = time.perf_counter()

    on_save = on_evaluate

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        state.log_history[-1:] = finite(state.log_history[-1:])  # a checkpoint holds it as JSON
        if logs and "loss" in logs:
            memory = f"  {logs['gpu_memory_gb']:.1f} GB" if "gpu_memory_gb" in logs else ""
            logger.info(
                "step %d/%d  loss %.3f  gradient norm %.3g  learning rate %.2e  %s tokens/s%s  about %s left",
                *(state.global_step, state.max_steps, logs["loss"], logs.get("grad_norm", math.nan)),
                *(logs["learning_rate"], f"{logs['tokens_per_second']:,.0f}", memory),
                timedelta(seconds=round(logs["seconds_left"])),
            )
        elif logs and "eval_loss" in logs:
            numbers = "  ".join(f"{name} {value:.3f}" for name, value in scores_of(logs).items())
            logger.info("evaluation at step %d/%d  %s", state.global_step, state.max_steps, numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._flush(state)
        if self._broken:
            self.end(state, state.global_step - self._broken + 1)

    def end(self, state: Any, since: int) -> NoReturn:
        """Raise `Diverged`: numbers of the run are not finite since a step."""
        self._flush(state)
        last = newest_checkpoint(self.path.parent)
        raise Diverged(
            f"loss, gradient norm or logits are not finite since step {since} (see {self.path}): training stopped "
            f"without a result; the newest checkpoint with finite weights is {last or 'none'}. Lower "
            "train.learning_rate, set train.max_grad_norm, or look at the records of that step"
        )

    def _flush(self, state: Any) -> None:
        if state.is_world_process_zero and self._rows:
            self.append(self._rows)
        self._rows = []


def process_count() -> int:
    """The number of training processes; one process with several GPUs is refused."""
    from accelerate import DistributedType, PartialState

    state = PartialState()
    if state.distributed_type is DistributedType.NO and (devices := torch.cuda.device_count()) > 1:
        # transformers would wrap the model in `nn.DataParallel`, which hands all graphs to every copy.
        raise ValueError(
            f"one process sees {devices} GPUs: start one process per GPU (accelerate launch --num_processes {devices}),"
            " or make one GPU visible (CUDA_VISIBLE_DEVICES=0)"
        )
    return int(state.num_processes)


def sharding() -> str:
    """How accelerate's launcher shards a model's states: "ZeRO-2", "ZeRO-3", "FSDP2", or ""."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        return f"ZeRO-{os.environ.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', '2')}"
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true":
        return ""
    for name, value, why in (
        ("fsdp_version", "2", "FSDP1 is not supported"),
        ("fsdp_state_dict_type", "FULL_STATE_DICT", "with any other type the result would hold no weights"),
    ):
        if (found := os.environ.get(name.upper())) != value:
            raise ValueError(
                f"the launcher's {name} is {found}, but must be {value}: {why}; see recipes/accelerate/fsdp2.yaml"
            )
    return "FSDP2"
