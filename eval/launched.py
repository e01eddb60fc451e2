"""The processes of a launcher (`accelerate launch`, `torchrun`) that share one evaluation."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

logger = logging.getLogger(__name__)


class Launched:
    """The processes of a launcher, each with its own GPU; without a launcher, only this process.

    The constructor waits for the other processes, hides their GPUs from this one (in `os.environ`), and silences the
    logs of all but the first process.

    All processes must call `gather` equally often and in the same order, else they wait for each other for ever.

    Attributes:
        process: Number of this process, from 0.
        processes: Number of all processes.
    """

    def __init__(self) -> None:
        self.process = int(os.environ.get("RANK", 0))
        self.processes = int(os.environ.get("WORLD_SIZE", 1))
        if not self.is_shared:
            return
        import torch

        # Before anything uses CUDA in this process.
        self._hide_other_gpus()
        logger.info("%d processes; progress shows the part of the first process", self.processes)
        if not torch.distributed.is_initialized():
            try:
                torch.distributed.init_process_group("gloo", timeout=timedelta(minutes=10))
            except (RuntimeError, ValueError) as error:
                raise ConnectionError(
                    f"timed out waiting for the other processes (WORLD_SIZE={self.processes}): {error}"
                ) from error
        # gloo suffices, since GPUs exchange nothing. One process may end hours before another.
        self._group = torch.distributed.new_group(backend="gloo", timeout=timedelta(days=7))
        if not self.is_first:
            logging.getLogger().setLevel(logging.WARNING)

    @property
    def is_first(self) -> bool:
        """Whether this process prepares the folder, shows progress and writes the final files."""
        return self.process == 0

    @property
    def is_shared(self) -> bool:
        """Whether there are other processes."""
        return self.processes > 1

    def _hide_other_gpus(self) -> None:
        """Hide the GPUs of other processes: a new thread starts on the first visible GPU, whatever this one has set."""
        import torch

        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(device) for device in range(torch.cuda.device_count())]
        if devices:
            own = devices[int(os.environ["LOCAL_RANK"]) % len(devices)]
            os.environ |= {"CUDA_VISIBLE_DEVICES": own, "LOCAL_RANK": "0"}

    def gather(self, value: Any = None) -> list[Any]:
        """The values of all processes, in their order; waits until each has given its own.

        Any value that can be pickled is allowed, also another type in each process: None from one that only waits.
        """
        import torch

        values: list[Any] = [None] * self.processes
        try:
            torch.distributed.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise ConnectionError("another process of this evaluation has ended: see its output") from error
        return values
