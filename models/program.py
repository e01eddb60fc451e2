"""What every program does around its work: logging, exit codes, one line for an error, and things found by
their place: a module in the folder of backends, readers, systems or tasks is one more of them.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from tripletune.models.options import nearest
from tripletune.models.tables import printable

# Third parties that log each HTTP request and index build.
NOISY = ("absl", "anthropic", "bm25s", "faiss", "httpcore", "httpcore2", "httpx", "httpx2", "openai",
         "sentence_transformers", "urllib3")  # fmt: skip
# Packages that not everybody has, and the extra that brings them.
EXTRAS = {"openai": "teachers", "ray": "ray"}


def run_program(
    program: Callable[[], int | None],
    *,
    verbose: bool = False,
    form: str = "%(message)s",
    level: int = logging.INFO,
    stopped: str = "stopped; run the same command again to continue",
) -> int:
    """Run a program; what goes wrong becomes one line on stderr and an exit code.

    Args:
        program: What to run; it may return an exit code.
        verbose: Log everything, with tracebacks.
        form: Format of log lines.
        level: Lowest level that is logged.
        stopped: What Ctrl-C prints.

    Returns:
        0; 2 for bad input; 1 when the disk is full; 130 when it was interrupted; for an exception with an attribute
        `exit_code`, that one.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Printable(form, datefmt="%H:%M:%S"))
    root, before = logging.getLogger(), logging.getLogger().level
    # A program may run another one, as the demo does.
    if not any(isinstance(one.formatter, _Printable) for one in root.handlers):
        root.addHandler(handler)
    root.setLevel(logging.DEBUG if verbose else level)
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        code = program() or 0
        # What a pipe refuses must show here, not when the interpreter closes it.
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of a pipe, `head` for one, has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _say(stopped, 130)
    except Exception as error:
        found = getattr(error, "exit_code", 2 if isinstance(error, (ValueError, OSError, ImportError)) else None)
        if found is None:
            raise
        if verbose:
            logging.getLogger(__name__).exception("traceback")
        if isinstance(error, ImportError) and error.name in EXTRAS:
            return _say(f"error: {error}: pip install 'tripletune[{EXTRAS[error.name]}]'", found)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _say(f"error: no space left on the disk ({error}); free some and run the command again", 1)
        if isinstance(error, OSError) and error.filename and error.strerror:
            return _say(f"error: {error.filename}: {error.strerror}", found)
        # Higher codes say how a run ended well: replies are waited for.
        return _say(f"error: {error}" if found < 3 else str(error), found)
    finally:
        root.removeHandler(handler)
        root.setLevel(before)


def _say(line: str, code: int) -> int:
    print(printable(line), file=sys.stderr)  # noqa: T201
    return code


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def progress(items: Iterable[Any] | None = None, name: str = "", unit: str = "question", **more: Any) -> Any:
    """A bar of tqdm on a terminal, and elsewhere (logs, pipes) a line a minute; `more` are tqdm's arguments."""
    from tqdm import tqdm

    seconds = 0.1 if sys.stderr.isatty() else 60.0
    # A bar that is redrawn every `seconds` and not before that time: a short pass shows none in a log.
    more |= {"mininterval": seconds, "maxinterval": max(seconds, 10.0), "delay": seconds}
    return tqdm(items, name, unit=f" {unit}s", **more)


def names_in(package: str) -> list[str]:
    """Names of the modules in a package whose name has no underscore in front; nothing but the package is imported."""
    found = pkgutil.iter_modules(importlib.import_module(package).__path__)
    return sorted(module.name for module in found if not module.name.startswith("_"))


def load_from(package: str, name: str, kind: str) -> ModuleType:
    """The module of that name in a package.

    Raises:
        ValueError: there is none; the message names the nearest and all others.
    """
    known = names_in(package)
    if name not in known:
        raise ValueError(f"{kind} {name!r} is not one of {', '.join(known)}{nearest(name, known)}")
    return importlib.import_module(f"{package}.{name}")
