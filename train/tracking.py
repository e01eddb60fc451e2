"""Report a run's settings, sample replies and result to trackers, in addition to transformers' scalars.

Each tracker is transformers' callback of that name, configured by its own environment variables. Only W&B and MLflow
get sample replies and the result. A run keeps their ids, so a killed run continues in them.
"""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers.integrations import WandbCallback

from tripletune.core import libraries
from tripletune.core.data.jsonl import read_jsonl, record_files
from tripletune.core.files import flatten, read_json, write_json
from tripletune.core.program import code_version, versions
from tripletune.models.run_folders import public
from tripletune.train.batches import rows_meta
from tripletune.train.resume import PACKAGES, StepLog, process_count
from tripletune.train.tasks import Examples

libraries.check_use("trackers")
rewrite_logs = libraries.take("transformers.integrations:rewrite_logs")
NO_UPLOAD = libraries.take("transformers.integrations.integration_utils:WandbLogModel.FALSE")
SAMPLES = "samples.jsonl"
_COLUMNS = ("step", "prompt", "expected", "reply")
_IDS, _STEP = "trackers.json", "train/global_step"


def settings_of(task: Any) -> dict[str, Any]:
    """Return a run's settings, data digests, row counts and code versions under flat names, without secrets."""
    sources = {"train": task.sources[0], "validation": task.sources[1]}
    rows = {name: rows_meta(getattr(task, name)) for name in sources if getattr(task, name) is not None}
    about = {
        **dataclasses.asdict(task.config),
        "git_revision": code_version().get("commit"),
        "versions": versions(PACKAGES),
        "processes": process_count(),
        "sha256": {name: one.digest for name, one in sources.items() if one},
        "rows": rows,
    }
    # MLflow refuses names with brackets, such as those of [SUBQ].
    return {re.sub(r"[][]", "", name): value for name, value in public(flatten(about, ".")).items()}


class Reports(StepLog):
    """Writes sample replies of evaluations to `samples.jsonl` and reports to trackers, on the main process only."""

    def __init__(self, task: Any, args: Any) -> None:
        super().__init__(Path(task.config.output_dir) / SAMPLES)
        self.task, self.config, self.args = task, task.config, args
        self.trackers = set(task.config.report_to) - {"none"}
        if self.trackers:
            # Every tracker reads the configuration from `args.to_dict`.
            args.to_dict = partial(dict, args.to_dict() | settings_of(task))

    def open(self, callbacks: list[Any]) -> None:
        """Start or continue the trackers' runs; the run folder must be locked."""
        if not self.trackers:
            return
        config, file = self.config, Path(self.config.output_dir) / _IDS
        self.ids = read_json(file) if config.resume and file.is_file() else {"id": secrets.token_hex(4)}
        self.args.project = project = config.project or os.environ.get("WANDB_PROJECT", "tripletune")
        if "mlflow" in self.trackers and (mlflow := import_module("mlflow")).active_run() is None:
            # transformers would end it before the last evaluation, which would begin another.
            number = os.environ.pop("MLFLOW_RUN_ID", self.ids.get("mlflow"))
            if not number:
                mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", project))
            self.ids["mlflow"] = mlflow.start_run(number, run_name=self.args.run_name).info.run_id
        write_json(file, self.ids)
        for callback in (one for one in callbacks if isinstance(one, WandbCallback)):
            callback._log_model = NO_UPLOAD  # its upload holds a pickle, and lacks files that a model needs
        if "wandb" in self.trackers and (wandb := import_module("wandb")).run is None:
            about = {name: value for name in ("entity", "group", "tags") if (value := getattr(config, name))}
            number = os.environ.get("WANDB_RUN_ID", self.ids["id"])
            wandb.init(id=number, resume="allow", name=self.args.run_name, project=project, **about)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove lines of steps that will run again; log the steps before a kill to an offline W&B run again."""
        super().on_train_begin(args, state, control)
        told = state.is_world_process_zero and "wandb" in self.trackers
        if not told or not (run := import_module("wandb").run).offline:
            return
        for row in state.log_history:
            run.log(rewrite_logs({name: value for name, value in row.items() if name != "step"}) | {_STEP: row["step"]})
        kept = (row for _, row in read_jsonl(self.path)) if self.path.exists() else ()
        for step, rows in groupby(kept, key=lambda row: row["step"]):
            self._show(step, list(rows))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and self.task.samples:
            rows = [{"step": state.global_step, **row} for row in self.task.samples]
            self.keep_until(state.global_step - 1)
            self.append(rows)
            if "wandb" in self.trackers:
                self._show(state.global_step, rows)
            if "mlflow" in self.trackers:
                import_module("mlflow").log_artifact(str(self.path))

    def _show(self, step: int, rows: list[dict[str, Any]]) -> None:
        wandb, cells = import_module("wandb"), [[row[name] for name in _COLUMNS] for row in rows]
        wandb.log({"eval/samples": wandb.Table(columns=list(_COLUMNS), data=cells)} | {_STEP: step})

    def keep(self, final: Path) -> None:
        """Upload the result and, on request, the data, and finish the trackers' runs."""
        if "mlflow" in self.trackers:
            mlflow = import_module("mlflow")
            for kind in self.config.artifacts:
                for place, path in self._files(kind, final):
                    mlflow.log_artifact(str(path), str(Path(kind, place).parent))
            mlflow.end_run()
        if "wandb" not in self.trackers:
            return
        wandb, about = import_module("wandb"), public(read_json(final / "training.json"))
        for kind in self.config.artifacts:
            artifact = wandb.Artifact(f"{kind}-{self.ids['id']}", type=kind, metadata=about)
            for place, path in self._files(kind, final):
                artifact.add_file(str(path), place)
            # W&B records what a run uses only online.
            used = kind == "dataset" and not wandb.run.offline
            (wandb.run.use_artifact if used else wandb.log_artifact)(artifact)
        wandb.finish()

    def _files(self, kind: str, final: Path) -> Iterator[tuple[str, Path]]:
        """Yield the files of an artifact, each with its path inside the artifact."""
        if kind == "model":
            yield from ((str(file.relative_to(final)), file) for file in sorted(final.rglob("*")) if file.is_file())
            return
        for name, source in zip(("train", "validation"), self.task.sources):
            for number, path in enumerate(source.paths if isinstance(source, Examples) else ()):
                for file in record_files(path, source.split):
                    yield f"{name}/{f'{number}/' if number else ''}{file.name}", file
