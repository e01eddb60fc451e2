"""The result of a run: the weights of the best step, its `final/` with `training.json`, and the files of checkpoints.

Tested in `tests/train/test_engine.py` and `tests/train/test_callbacks.py`.
"""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tripletune.core import libraries
from tripletune.core.files import finite, new_folder, write_json
from tripletune.models.lora import rewrite_for_unchanged_base
from tripletune.models.run_folders import FINAL, check_finite, seconds_until, stored_weights
from tripletune.train import resume
from tripletune.train.callbacks import scores_of
from tripletune.train.evaluation import Evaluation, EvaluationMixin
from tripletune.train.rows.cache import rows_meta
from tripletune.train.tracking import Reports

if TYPE_CHECKING:
    from datasets import Dataset

    from tripletune.train.sources import Examples
    from tripletune.train.tasks import TrainingTask
    from tripletune.train.tasks.grpo import LoopQuestions

logger = logging.getLogger(__name__)


class ResultMixin(EvaluationMixin):
    """What `train.engine.EngineMixin` keeps of a run."""

    reports: Reports
    # Seconds of training since the last start.
    _seconds: float

    def _last_metrics(self) -> dict[str, float]:
        """The metrics of the last evaluation, or of the best step's after `_take_best`; empty without one."""
        return self.last_evaluation.metrics if self.last_evaluation else {}

    def _take_best(self) -> None:
        """Load the weights of the best step and make that step's evaluation the last evaluation.

        transformers would do this inside of `train`, before the last step is evaluated, which may be the best.
        """
        metric = self.config.train.best_metric
        best_step = self.state.best_global_step
        if best_step is None:
            if metric:
                logger.warning("train.best_metric: no evaluation has %s, so the last step is the result", metric)
            return
        if best_step == self.state.global_step:
            return
        checkpoint = Path(self.config.output_dir) / f"checkpoint-{best_step}"
        if not checkpoint.is_dir():
            raise FileNotFoundError(f"{checkpoint}, which has the best {metric}, no longer exists")
        self.state.best_model_checkpoint = str(checkpoint)
        self._load_best_model()
        self.last_evaluation = Evaluation(best_step, self.evaluated_steps()[best_step])

    def save_result(self) -> None:
        """Write the trained model and its `training.json` to `final/`.

        The main process writes to a scratch folder that is renamed at the end, so `final/` is complete or absent; a
        model with weights that are not finite becomes no result.
        """
        folder = Path(self.config.output_dir) / FINAL
        facts = self._facts_of_run(folder)
        if self.is_world_process_zero():
            with self.reports.ended_by_errors():
                self._write_result(folder, facts)
                self.reports.upload_result(folder)
        else:
            self.save_model(str(folder))  # all processes take part in saving sharded weights
        earlier = facts["seconds"] - self._seconds
        before = f" (and {earlier:.0f} s before the restart)" if earlier >= 1 else ""
        self._log_scores()
        logger.info("trained for %d s%s; the result is in %s", self._seconds, before, folder)
        if self.task.next_command:
            run = shlex.quote(self.config.output_dir)
            logger.info("next: %s", self.task.next_command.replace("{run}", run))

    def _log_scores(self) -> None:
        """Log the metrics of the result's evaluation below the numbers of rows and replies that they are means of."""
        metrics = self._last_metrics()
        if not metrics:
            return
        task = self.task
        measured = f"losses on {rows_meta(task.validation)['rows']:,} validation {task.unit}"
        if task.scored:
            measured += f", scores of {len(task.scored):,} replies"
        logger.info("the result has %s:", measured)
        for name, value in sorted(metrics.items()):
            logger.info("%s = %.4g", name, value)

    def _write_result(self, folder: Path, facts: dict[str, Any]) -> None:
        """Write the model and its facts to a folder that is complete or absent."""
        with new_folder(folder, ["*"], overwrite=True) as scratch:
            self.save_model(str(scratch))
            # With `init_lora_weights` such as pissa, the adapter was trained on a changed base.
            start = getattr(self.accelerator.unwrap_model(self.model), "start", None)
            if start:
                rewrite_for_unchanged_base(scratch, start)
            check_finite(stored_weights(scratch), folder)
            write_json(scratch / "training.json", finite(facts))

    def _facts_of_run(self, folder: Path) -> dict[str, Any]:
        """Return the contents of `training.json`: data, rows, steps, seconds and scores of the result.

        `tripletune checkpoints export` makes the model card of them.
        """
        task = self.task
        steps = self.state.global_step
        # The seconds before a kill count too.
        seconds = max(self._seconds, seconds_until(folder.parent / resume.LOSS_FILE, steps))
        facts: dict[str, Any] = {
            task.unit: rows_meta(task.train)["rows"],
            "steps": steps,
            "seconds": round(seconds, 1),
            "data": {
                "train": _paths_and_digest(task.sources.train),
                "validation": _paths_and_digest(task.sources.validation),
            },
            "tokenised": {"train": _stored_counts(task, task.train)},
        }
        if task.validation is not None:
            facts["tokenised"]["validation"] = _stored_counts(task, task.validation)
        facts |= task.facts()
        facts |= self._facts_of_best_step()
        facts["evaluation"] = {f"eval_{name}": value for name, value in scores_of(self._last_metrics()).items()}
        return facts

    def _facts_of_best_step(self) -> dict[str, Any]:
        """Return the step with the best metric, for `training.json`; nothing if the last weights were kept."""
        metric = self.config.train.best_metric
        state = self.state
        if metric is None or state.best_global_step is None:
            return {}
        extreme = "lowest" if self.config.train.lower_is_better() else "highest"
        return {
            "weights_of_step": state.best_global_step,
            f"{extreme}_{metric}": state.best_metric,
            "evaluations": len(self.evaluated_steps()),
            "stopped_early": state.global_step < state.max_steps,
        }

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Save weights as transformers does, and the task's files; remove files that would be wrong or unsafe."""
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        if self.args.should_save:
            # A pickle that nothing here reads; the run's own YAML holds the settings.
            training_args_name = libraries.take("transformers.trainer:TRAINING_ARGS_NAME")
            (folder / training_args_name).unlink(missing_ok=True)
            # PEFT's empty model card; `tripletune checkpoints export` writes a full one.
            (folder / "README.md").unlink(missing_ok=True)
            self.task.save(folder)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no card; `tripletune checkpoints export` writes it."""


def _stored_counts(task: TrainingTask, rows: Dataset) -> dict[str, int]:
    """The counts of rows for `training.json`, in the task's words, without those that its output hides."""
    counts = {}
    for name, count in rows_meta(rows).items():
        if name not in task.words:
            counts[name] = count
        elif task.words[name]:
            counts[task.words[name].replace(" ", "_")] = count
    return counts


def _paths_and_digest(source: Examples | LoopQuestions | None) -> dict[str, str] | None:
    """Paths and fingerprint of a source, for `training.json`."""
    if source is None:
        return None
    return {"path": ", ".join(source.paths), "sha256": source.digest}
