"""A lock on a folder, which the system lets go of when its process ends in any way."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)
LOCK = ".lock"


def lock_folder(folder: str | Path, refusal: str) -> IO[str] | None:
    """Lock a folder, which is made when it is missing.

    Args:
        folder: The folder.
        refusal: The message when another process holds it.

    Returns:
        The open lock file: closing it lets go. None where there are no such locks (Windows).

    Raises:
        ValueError: another process holds the folder.
    """
    try:
        import fcntl
    except ImportError:
        return None
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / LOCK).open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(refusal) from None
    except OSError as error:
        logger.warning("%s can't be locked (%s): let no second process write into it", folder, error)
    return file
