"""Progress of a long pass: a bar on a terminal, a plain line a minute elsewhere (logs of schedulers, pipes)."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

logger = logging.getLogger(__name__)
T = TypeVar("T")
_SECONDS = 60.0


def progress(items: Iterable[T], name: str, unit: str = "questions") -> Iterator[T]:
    """Hand on items and show how many there were.

    Args:
        items: What is worked on.
        name: What the pass is called.
        unit: What the items are, in the plural.
    """
    if sys.stderr.isatty():
        return iter(tqdm(items, name, unit=f" {unit}"))
    return logged(items, name, unit)


def logged(
    items: Iterable[T], name: str, unit: str, every: float = _SECONDS, clock: Callable[[], float] = time.monotonic
) -> Iterator[T]:
    """Hand on items and log their number whenever `every` seconds have gone by; a short pass logs nothing."""
    last = clock()
    for number, item in enumerate(items, 1):
        yield item
        now = clock()
        if now - last >= every:
            last = now
            logger.info("%s: %s %s so far", name, f"{number:,}", unit)
