"""Report a run's settings, sample replies and result to trackers, in addition to transformers' scalars.

Each tracker is transformers' callback of that name, configured by its own environment variables. Only W&B and MLflow
get sample replies and the result. A run keeps their ids, so a killed run continues in them. transformers calls the
methods `on_…` with all that it knows; `kwargs` are what they do not read.
"""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import WandbCallback

from tripletune.core import libraries
from tripletune.core.data.jsonl import read_jsonl, record_files
from tripletune.core.files import flatten, read_json, write_json
from tripletune.core.program import code_version, versions
from tripletune.models.run_folders import Preempted, without_private_data
from tripletune.train.callbacks import StepLog
from tripletune.train.resume import PACKAGES, process_count
from tripletune.train.rows.cache import rows_meta
from tripletune.train.sources import Examples
from tripletune.train.tasks import TrainingTask

libraries.check_use("trackers")
SAMPLES = "samples.jsonl"
_COLUMNS = ("step", "prompt", "expected", "reply")
# The file with the runs' ids in the trackers.
_IDS = "trackers.json"
# transformers' name of the optimiser step in W&B.
_STEP = "train/global_step"
# The exit code of a program that Ctrl-C stopped.
_INTERRUPTED = 130
# What is uploaded on request; see the setting `artifacts`.
ArtifactKind = Literal["model", "dataset"]


class ArtifactFile(NamedTuple):
    """A file, and its path inside an artifact."""

    place: str
    path: Path


def settings_of(task: TrainingTask) -> dict[str, Any]:
    """Return a run's settings, data digests, row counts and code versions under flat names, without secrets.

    Flat, because trackers show and compare flat names only.
    """
    digests = {}
    counts = {}
    for split, source, rows in (
        ("train", task.sources.train, task.train),
        ("validation", task.sources.validation, task.validation),
    ):
        if source is not None:
            digests[split] = source.digest
        if rows is not None:
            counts[split] = rows_meta(rows)
    about = {
        **dataclasses.asdict(task.config),
        "git_revision": code_version().get("commit"),
        "versions": versions(PACKAGES),
        "processes": process_count(),
        "sha256": digests,
        "rows": counts,
    }
    # MLflow refuses names with brackets, such as those of [SUBQ].
    return {re.sub(r"[][]", "", name): value for name, value in without_private_data(flatten(about, ".")).items()}


class Reports(StepLog):
    """Writes sample replies of evaluations to `samples.jsonl` and reports to trackers, on the main process only.

    Args:
        task: The task that is trained.
        args: The trainer's arguments, with the folder of the run.
    """

    def __init__(self, task: TrainingTask, args: TrainingArguments) -> None:
        """Give the trackers the run's settings, by replacing `args.to_dict`, which each of them reads."""
        super().__init__(Path(task.config.output_dir) / SAMPLES)
        self.task = task
        self.config = task.config
        self.args = args
        self.trackers = set(task.config.report_to) - {"none"}
        # Whether this object has started the trackers' runs; it leaves those of the caller's program open.
        self._owns_mlflow_run = False
        self._owns_wandb_run = False
        if self.trackers:
            # Every tracker reads the configuration from `args.to_dict`.
            args.to_dict = partial(dict, args.to_dict() | settings_of(task))

    def open(self, callbacks: list[TrainerCallback]) -> None:
        """Start or continue the trackers' runs; the run folder must be locked.

        The order matters: MLflow adds its run's id to the ids before they are written, and the ids are written before
        W&B starts, so that a run that is killed while W&B starts has the id that W&B may already know.
        """
        if not self.trackers:
            return
        file = Path(self.config.output_dir) / _IDS
        # The id of the run in W&B, and after `_open_mlflow` its id in MLflow.
        self.ids = {"id": secrets.token_hex(4)}
        if self.config.resume and file.is_file():
            self.ids = read_json(file)
        # transformers' callbacks read the project here.
        self.args.project = self.config.project or os.environ.get("WANDB_PROJECT", "tripletune")
        if "mlflow" in self.trackers:
            self._open_mlflow()
        write_json(file, self.ids)
        for callback in callbacks:
            if isinstance(callback, WandbCallback):
                # Its upload holds a pickle, and lacks files that a model needs.
                callback._log_model = libraries.take("transformers.integrations.integration_utils:WandbLogModel.FALSE")
        if "wandb" in self.trackers:
            self._open_wandb()

    def _open_mlflow(self) -> None:
        """Start or continue the run in MLflow, unless the caller's program has started one already."""
        mlflow = import_module("mlflow")
        if mlflow.active_run() is not None:
            return
        # With the variable, transformers would end the run before the last evaluation, which would begin another.
        run_id = os.environ.pop("MLFLOW_RUN_ID", self.ids.get("mlflow"))
        if not run_id:
            mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", self.args.project))
        self.ids["mlflow"] = mlflow.start_run(run_id, run_name=self.args.run_name).info.run_id
        self._owns_mlflow_run = True

    @contextmanager
    def ended_by_errors(self) -> Iterator[None]:
        """If the block ends with an error or a signal, end the trackers' runs as failed or stopped.

        At the end of the process, MLflow would call the run FINISHED; in a notebook, a later training would log into
        the open run of W&B. W&B calls a run that a signal stopped "preempted", and reads the exit code of others.
        """
        try:
            yield
        except BaseException as error:
            is_preempted = isinstance(error, Preempted)
            is_stopped = is_preempted or isinstance(error, KeyboardInterrupt)
            if self._owns_mlflow_run:
                import_module("mlflow").end_run("KILLED" if is_stopped else "FAILED")
            if self._owns_wandb_run:
                wandb = import_module("wandb")
                if is_preempted:
                    wandb.run.mark_preempting()
                wandb.finish(exit_code=getattr(error, "exit_code", _INTERRUPTED if is_stopped else 1))
            raise

    def _open_wandb(self) -> None:
        """Start or continue the run in W&B, unless the caller's program has started one already."""
        wandb = import_module("wandb")
        if wandb.run is not None:
            return
        about = {}
        for name in ("entity", "group", "tags"):
            value = getattr(self.config, name)
            if value:
                about[name] = value
        run_id = os.environ.get("WANDB_RUN_ID", self.ids["id"])
        wandb.init(id=run_id, resume="allow", name=self.args.run_name, project=self.args.project, **about)
        self._owns_wandb_run = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove lines of steps that will run again; log the steps before a kill to an offline W&B run again.

        An offline run is a file, and a resumed run writes a new one, which would begin in the middle.
        """
        super().on_train_begin(args, state, control)
        if not state.is_world_process_zero or "wandb" not in self.trackers:
            return
        run = import_module("wandb").run
        if not run.offline:
            return
        for row in state.log_history:
            logs = {name: value for name, value in row.items() if name != "step"}
            rewrite_logs = libraries.take("transformers.integrations:rewrite_logs")
            run.log(rewrite_logs(logs) | {_STEP: row["step"]})
        if self.path.exists():
            samples = (row for _, row in read_jsonl(self.path))
            for step, rows in groupby(samples, key=lambda row: row["step"]):
                self._send_samples_to_wandb(step, list(rows))

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the evaluation's sample replies, and send them to the trackers.

        Lines of this step from an evaluation before a kill are replaced, not repeated.
        """
        if not state.is_world_process_zero or not self.task.samples:
            return
        rows = [{"step": state.global_step, **sample} for sample in self.task.samples]
        self.keep_until(state.global_step - 1)
        self.append(rows)
        if "wandb" in self.trackers:
            self._send_samples_to_wandb(state.global_step, rows)
        if "mlflow" in self.trackers:
            import_module("mlflow").log_artifact(str(self.path))

    def _send_samples_to_wandb(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Send sample replies of a step to W&B as a table, under the step's number in a column.

        W&B's own step only grows, and a resumed run sends earlier steps again.
        """
        wandb = import_module("wandb")
        table = wandb.Table(columns=list(_COLUMNS))
        for row in rows:
            table.add_data(*[row[name] for name in _COLUMNS])
        wandb.log({"eval/samples": table, _STEP: step})

    def upload_result(self, final: Path) -> None:
        """Upload the result and, on request, the data, and finish the runs that this object has started."""
        if "mlflow" in self.trackers:
            self._upload_to_mlflow(final)
        if "wandb" in self.trackers:
            self._upload_to_wandb(final)

    def _upload_to_mlflow(self, final: Path) -> None:
        """Upload the files, each kind to a folder of its name, and finish the run as a successful one.

        A run of the caller's program stays open: the program may log more into it.
        """
        mlflow = import_module("mlflow")
        for kind in self.config.artifacts:
            for file in self._files_of_artifact(kind, final):
                mlflow.log_artifact(str(file.path), str(Path(kind, file.place).parent))
        if self._owns_mlflow_run:
            mlflow.end_run()

    def _upload_to_wandb(self, final: Path) -> None:
        """Upload an artifact of each kind, with the facts of the training, and finish the run.

        Args:
            final: The folder of the finished model.
        """
        wandb = import_module("wandb")
        facts = without_private_data(read_json(final / "training.json"))
        for kind in self.config.artifacts:
            artifact = wandb.Artifact(f"{kind}-{self.ids['id']}", type=kind, metadata=facts)
            for file in self._files_of_artifact(kind, final):
                artifact.add_file(str(file.path), file.place)
            # W&B records what a run uses only online.
            if kind == "dataset" and not wandb.run.offline:
                wandb.run.use_artifact(artifact)
            else:
                wandb.log_artifact(artifact)
        if self._owns_wandb_run:
            wandb.finish()

    def _files_of_artifact(self, kind: ArtifactKind, final: Path) -> Iterator[ArtifactFile]:
        """The files that an artifact of this kind uploads: the result, or the data that it was trained on."""
        return _model_files(final) if kind == "model" else self._data_files()

    def _data_files(self) -> Iterator[ArtifactFile]:
        """Yield the files of the run's data; the loop's questions are only named, in the settings."""
        sources = self.task.sources
        for split, source in (("train", sources.train), ("validation", sources.validation)):
            if not isinstance(source, Examples):
                continue
            for number, path in enumerate(source.paths):
                # Places after the first have a folder each, because names of shards repeat.
                folder = f"{split}/{number}" if number else split
                for file in record_files(path, source.split):
                    yield ArtifactFile(f"{folder}/{file.name}", file)


def _model_files(final: Path) -> Iterator[ArtifactFile]:
    """Yield all files of the trained model, each under its path in the result's folder."""
    for file in sorted(final.rglob("*")):
        if file.is_file():
            yield ArtifactFile(str(file.relative_to(final)), file)
