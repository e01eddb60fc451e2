"""Callbacks of a run: checkpoints at a signal or after some minutes, and the logs of steps in the run folder.

transformers calls the methods `on_…` with all that it knows; `kwargs` are what a callback does not read.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tripletune.core.files import finite, json_line, write_json, write_text
from tripletune.core.program import signals_handled
from tripletune.models.run_folders import PREEMPTED, STOP_SIGNALS, Preempted, first_not_finite
from tripletune.train.resume import newest_checkpoint

logger = logging.getLogger(__name__)
# Steps in a row without a finite loss or gradient norm, after which a run ends.
_PATIENCE = 3
# Metrics of an evaluation that say how fast it was.
_SPEED = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


class Diverged(RuntimeError):
    """A run whose losses or weights are no longer finite numbers."""

    exit_code = 1


class Keeper(TrainerCallback):
    """Saves a checkpoint at a signal or after `minutes`, and ends the run after a signal.

    A signal to one process counts for all processes. Checkpoints lie only at multiples of `together` optimiser steps.
    """

    def __init__(self, minutes: float | None, together: int) -> None:
        self.minutes = minutes
        self.together = together
        # Name of the signal that came, or "".
        self.signal_name = ""
        # Whether `listening` is active. The evaluation of a finished run is outside of it.
        self._listens = False
        # Whether a signal ends what runs at once.
        self._is_interruptible = False
        self._saved_at = time.perf_counter()

    @contextmanager
    def listening(self, args: TrainingArguments) -> Iterator[None]:
        """Listen for signals in a `with` block; at its end, raise `Preempted` if a signal came.

        The trainer asks after each step whether a signal came, saves and stops. Earlier handlers come back at the end,
        also after an error.
        """

        def remember(number: int, frame: FrameType | None) -> None:
            """Only note the signal in a step: saving inside of a handler would interrupt it at any place."""
            self.signal_name = signal.Signals(number).name
            if self._is_interruptible:
                raise self._error_of_stopped_run(args)

        try:
            with signals_handled(STOP_SIGNALS, remember) as self._listens:
                yield
        finally:
            self._listens = False
        if self._signal_came_anywhere(args):
            raise self._error_of_stopped_run(args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log, evaluate and save at the current intervals, and do an evaluation that a signal prevented."""
        self._saved_at = time.perf_counter()
        # A resumed state holds the intervals of its start.
        state.compute_steps(args, state.max_steps)
        is_resumed = state.global_step > 0
        has_begun = is_resumed and args.eval_strategy == "steps" and state.global_step >= args.eval_delay
        is_due = has_begun and state.global_step % state.eval_steps == 0
        evaluated_steps = [row["step"] for row in state.log_history if "eval_loss" in row]
        args.eval_on_start = is_due and state.global_step not in evaluated_steps

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ask for a checkpoint if a signal came or the last one is too old; after a signal, also end the run.

        An evaluation could take longer than the time that is left after a signal, so it is done when the run continues.
        """
        if state.global_step % self.together:
            return  # inside of a rollout; its runs would be lost
        is_late = self.minutes is not None and time.perf_counter() - self._saved_at > 60 * self.minutes
        stop, is_late = _on_any_process(args, bool(self.signal_name), is_late)
        if stop or is_late:
            control.should_save = True
        if stop:
            control.should_training_stop = True
            control.should_evaluate = False

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the minutes to the next checkpoint from this one, whoever asked for it."""
        self._saved_at = time.perf_counter()

    def on_prediction_step(self, args: TrainingArguments, *_: Any, **kwargs: Any) -> None:
        """End an evaluation after a signal: it may take longer than the machine's manager waits."""
        if self._listens and self._signal_came_anywhere(args):
            raise self._error_of_stopped_run(args)

    @contextmanager
    def interruptible(self, args: TrainingArguments) -> Iterator[None]:
        """Let a signal end an evaluation at once in a `with` block, because the replies of a batch take minutes.

        Only without other processes, which would wait for this one for ever.
        """
        self._is_interruptible = self._listens and args.world_size == 1
        try:
            # A signal during the last batch of losses must not start the block.
            self.on_prediction_step(args)
            yield
        finally:
            self._is_interruptible = False

    def _signal_came_anywhere(self, args: TrainingArguments) -> bool:
        """Whether a signal came to any process; all processes must call it."""
        (came,) = _on_any_process(args, bool(self.signal_name))
        return came

    def _error_of_stopped_run(self, args: TrainingArguments) -> Preempted:
        """The error of a stopped run, which also leaves a file for queues that do not see the exit code."""
        if args.process_index == 0:
            write_json(Path(args.output_dir) / PREEMPTED, {"signal": self.signal_name or None})
        name = self.signal_name or "a signal"
        return Preempted(f"{name}: a checkpoint is saved; the same command continues from it")


def _on_any_process(args: TrainingArguments, *flags: bool) -> list[bool]:
    """Return for each flag whether it is set on any process; all processes must call it.

    A signal may reach only one process, but a checkpoint needs all of them at the same step.
    """
    if args.world_size == 1:
        return list(flags)
    shared = torch.tensor(flags, dtype=torch.int32, device=args.device)
    torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX)
    return [bool(flag) for flag in shared]


class StepLog(TrainerCallback):
    """A file with JSON lines in the order of steps; after a resume, it holds no step twice."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write rows behind the lines of the file; each has a `step`, by which `keep_until` finds it."""
        with self.path.open("a", encoding="utf-8") as out:
            out.writelines(json_line(finite(row)) for row in rows)

    def keep_until(self, step: int) -> None:
        """Remove the lines of later steps, and a line that a kill has cut off.

        The steps after the checkpoint run again, and would otherwise be there twice.
        """
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines()
        write_text(self.path, "".join(line + "\n" for line in lines if _step_of(line) <= step))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove the lines of steps after the checkpoint, since these steps run again."""
        if state.is_world_process_zero:
            self.keep_until(state.global_step)


def _step_of(line: str) -> float:
    """The step of a line; infinity for a line that was cut off, which is thereby after every step."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def scores_of(metrics: dict[str, float]) -> dict[str, float]:
    """Return loss and scores of an evaluation under their names in `evaluations.jsonl`, without the speed.

    Only names with transformers' prefix are of the evaluation; the epoch stands among them without it.
    """
    scores = {}
    for name, value in metrics.items():
        score = name.removeprefix("eval_")
        if score != name and score not in _SPEED:
            scores[score] = value
    return scores


def weights_broken(model: torch.nn.Module) -> bool:
    """Whether a trained weight is not finite on any process; all processes must call it.

    A process of a sharded model holds only some of the weights, so the others' answers count too.
    """
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    broken = torch.tensor(float(bool(first_not_finite(trained))), device=trained[0][1].device)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(broken)
    return bool(broken)


class StepSums(NamedTuple):
    """Loss and tokens of an optimiser step, on all processes together."""

    loss: float
    tokens: int


class LossLog(StepLog):
    """`losses.jsonl`: loss, gradient norm, tokens and seconds of every optimiser step, without gaps after a resume.

    The run ends if loss or norm is not finite in `_PATIENCE` steps in a row, or in one step that breaks the weights.

    Args:
        path: The file, in the run's folder.
        flush_every: Steps between two writes.

    Attributes:
        norm: Norm of the gradient before clipping; None if the launcher does not report it.
    """

    def __init__(self, path: Path, flush_every: int) -> None:
        """Start with an empty step; the file is written first when lines wait."""
        super().__init__(path)
        self.flush_every = flush_every
        self.norm: torch.Tensor | float | None = None
        # Of the running optimiser step: the losses of its micro-batches, and their tokens.
        self._losses: list[torch.Tensor] = []
        self._tokens = 0
        # Steps in a row without a finite loss or norm.
        self._broken = 0
        # Lines that are not yet written.
        self._rows: list[dict[str, Any]] = []
        # When training began, when the last step ended, and when training last continued after an evaluation or a save.
        self._began = self._step_ended = self._continued = time.perf_counter()
        self._first_step = 0
        # Tokens and seconds of training since the last line of the log.
        self._logged_tokens = 0
        self._logged_seconds = 0.0

    def add_loss(self, loss: torch.Tensor, tokens: int) -> None:
        """Add a micro-batch's share of the step's loss, and its tokens."""
        self._losses.append(loss.detach())
        self._tokens += tokens

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clocks; the time of loading is not training. After a resume, steps count from the checkpoint."""
        super().on_train_begin(args, state, control)
        self._began = self._step_ended = self._continued = time.perf_counter()
        self._first_step = state.global_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note the step's line, and end the run if its numbers are broken.

        A single step without a finite loss may come from an odd record and not reach the weights, so the run ends only
        after several such steps, unless the weights are broken already.
        """
        now = time.perf_counter()
        loss, tokens = self._sum_of_processes(args)
        norm = None if self.norm is None else float(self.norm)
        seconds = round(now - self._step_ended, 3)
        self._rows.append(
            {"step": state.global_step, "loss": loss, "grad_norm": norm, "tokens": tokens, "seconds": seconds}
        )
        self._logged_tokens += tokens
        self._logged_seconds += now - self._continued
        self._begin_step(now)
        if _is_sound(loss, norm):
            self._broken = 0
        else:
            self._broken += 1
        if self._broken == _PATIENCE or (self._broken and weights_broken(kwargs["model"])):
            self.end(state, state.global_step - self._broken + 1)
        # Written before a checkpoint: a kill between the checkpoint and the lines would leave a gap after a resume.
        if control.should_save or len(self._rows) >= self.flush_every:
            self._write_waiting_lines(state)

    def _begin_step(self, now: float) -> None:
        """Forget what was added in the last step; `add_loss` and the trainer's norm fill it again in the next."""
        self._step_ended = now
        self._continued = now
        self._losses = []
        self._tokens = 0
        self.norm = None

    def _sum_of_processes(self, args: TrainingArguments) -> StepSums:
        """The sums of the running step's micro-batches; all processes must call it."""
        loss = torch.stack(self._losses).sum()
        if args.world_size == 1:
            return StepSums(loss.item(), self._tokens)
        # Each process has seen its own rows; its loss is already multiplied by the number of processes.
        tokens = loss.new_tensor(self._tokens, dtype=torch.double)
        shared = torch.stack([loss.double() / args.world_size, tokens])
        torch.distributed.all_reduce(shared)
        return StepSums(shared[0].item(), int(shared[1]))

    def speed(self, state: TrainerState) -> dict[str, float]:
        """Tokens per second since the last call, remaining seconds, and peak GPU memory in GB; begins a new count."""
        seconds_per_step = (time.perf_counter() - self._began) / max(state.global_step - self._first_step, 1)
        speed = {
            "tokens_per_second": self._logged_tokens / max(self._logged_seconds, 1e-9),
            "seconds_left": seconds_per_step * (state.max_steps - state.global_step),
        }
        self._logged_tokens = 0
        self._logged_seconds = 0.0
        if torch.cuda.is_available():
            speed["gpu_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        return speed

    def on_evaluate(self, *_: Any, **kwargs: Any) -> None:
        """Leave the time of an evaluation, or below of a save, out of the tokens per second."""
        self._continued = time.perf_counter()

    on_save = on_evaluate

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Print a line of the loss or of an evaluation.

        transformers calls this on every process after each log, also for logs that are neither, which are left alone.
        """
        state.log_history[-1:] = finite(state.log_history[-1:])  # a checkpoint holds it as JSON
        if logs and "loss" in logs:
            _log_loss(state, logs)
        elif logs and "eval_loss" in logs:
            scores = "  ".join(f"{name} {value:.3f}" for name, value in scores_of(logs).items())
            logger.info("evaluation at step %d/%d  %s", state.global_step, state.max_steps, scores)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the last lines; a run whose last steps were broken has no result, however few they were."""
        self._write_waiting_lines(state)
        if self._broken:
            self.end(state, state.global_step - self._broken + 1)

    def end(self, state: TrainerState, since: int) -> NoReturn:
        """Raise `Diverged`: numbers of the run are not finite since a step."""
        self._write_waiting_lines(state)
        checkpoint = newest_checkpoint(self.path.parent)
        raise Diverged(
            f"loss, gradient norm or logits are not finite since step {since} (see {self.path}): training stopped "
            f"without a result; the newest checkpoint with finite weights is {checkpoint or 'none'}. Lower "
            "train.learning_rate, set train.max_grad_norm, or look at the records of that step"
        )

    def _write_waiting_lines(self, state: TrainerState) -> None:
        """Write the lines that wait; all processes forget theirs, but only the main process has a file."""
        if state.is_world_process_zero and self._rows:
            self.append(self._rows)
        self._rows = []


def _is_sound(loss: float, norm: float | None) -> bool:
    """Whether loss and norm of a step are finite; None is no norm, and DeepSpeed's -1 a norm that is not finite."""
    is_norm_sound = norm is None or (math.isfinite(norm) and norm >= 0)
    return math.isfinite(loss) and is_norm_sound


def _log_loss(state: TrainerState, logs: dict[str, float]) -> None:
    """Print the line of a step; some launchers report no gradient norm, and only a GPU has memory to report."""
    memory = f"  {logs['gpu_memory_gb']:.1f} GB" if "gpu_memory_gb" in logs else ""
    logger.info(
        "step %d/%d  loss %.3f  gradient norm %.3g  learning rate %.2e  %s tokens/s%s  about %s left",
        state.global_step,
        state.max_steps,
        logs["loss"],
        logs.get("grad_norm", math.nan),
        logs["learning_rate"],
        f"{logs['tokens_per_second']:,.0f}",
        memory,
        timedelta(seconds=round(logs["seconds_left"])),
    )
