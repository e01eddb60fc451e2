"""A callback that saves a checkpoint at a signal or after some minutes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback

# A machine's manager sends SIGTERM before it takes the machine away; SLURM's `--signal=USR1@300` sends SIGUSR1.
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]


class Preempted(RuntimeError):
    """A run was stopped by a signal after it saved a checkpoint; the exit code `EX_TEMPFAIL` means: try again."""

    exit_code = 75


class Keeper(TrainerCallback):
    """Saves a checkpoint at a signal or after `minutes`, and ends the run after a signal.

    A signal to one process counts for all processes. Checkpoints lie only at multiples of `together` optimiser steps.
    """

    def __init__(self, minutes: float | None, together: int) -> None:
        self.minutes, self.together = minutes, together
        self.asked = ""
        self._listens = False
        self._saved = time.perf_counter()

    @contextmanager
    def listening(self, args: Any) -> Iterator[None]:
        """Listen for signals in a `with` block; at its end, raise `Preempted` if a signal came."""

        def ask(number: int, frame: Any) -> None:
            self.asked = signal.Signals(number).name

        self._listens = threading.current_thread() is threading.main_thread()
        before = {one: signal.signal(one, ask) for one in _SIGNALS if self._listens}
        try:
            yield
        finally:
            self._listens = False
            for one, handler in before.items():
                signal.signal(one, handler)
        if self._agreed(args, bool(self.asked))[0]:
            raise self._preempted()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log, evaluate and save at the current intervals, and do an evaluation that a signal prevented."""
        self._saved = time.perf_counter()
        state.compute_steps(args, state.max_steps)
        due = args.eval_strategy == "steps" and state.global_step and state.global_step % state.eval_steps == 0
        known = (row["step"] for row in state.log_history if "eval_loss" in row)
        args.eval_on_start = bool(due) and state.global_step not in known

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.together:
            return
        late = self.minutes is not None and time.perf_counter() - self._saved > 60 * self.minutes
        stop, late = self._agreed(args, bool(self.asked), late)
        control.should_save |= stop or late
        if stop:
            control.should_training_stop, control.should_evaluate = True, False

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saved = time.perf_counter()

    def on_prediction_step(self, args: Any, *_: Any, **kwargs: Any) -> None:
        if self._listens and self._agreed(args, bool(self.asked))[0]:
            raise self._preempted()

    def _preempted(self) -> Preempted:
        return Preempted(f"{self.asked or 'a signal'}: a checkpoint is saved; the same command continues from it")

    def _agreed(self, args: Any, *wishes: bool) -> list[bool]:
        if args.world_size == 1:
            return list(wishes)
        found = torch.tensor(wishes, dtype=torch.int32, device=args.device)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
        return [bool(one) for one in found]
