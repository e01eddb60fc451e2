"""Progress of a long run: a bar on a terminal, a plain log line every half minute elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType

from tqdm import tqdm

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 30.0


class Progress:
    """Counts finished items; use it as a context manager.

    Args:
        total: Items in all.
        done: Items finished before.
        unit: What an item is called.
    """

    def __init__(self, total: int, done: int = 0, unit: str = "question") -> None:
        self._total, self._done, self._unit = total, done, unit
        self._started = self._last = time.monotonic()
        self._before = done
        self._bar = tqdm(total=total, initial=done, unit=unit) if sys.stderr.isatty() else None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, items: int = 1) -> None:
        """Count finished items."""
        self._done += items
        if self._bar is not None:
            self._bar.update(items)
            return
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_LINES or self._done == self._total:
            rate = (self._done - self._before) / max(now - self._started, 1e-9)
            logger.info("%d of %d %ss, %.2f a second", self._done, self._total, self._unit, rate)
            self._last = now
