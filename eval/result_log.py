"""A results file that survives a kill: each row is a flushed JSON line, and reopening repairs and continues the file.

If a run has several processes, each writes a file, and the first process joins them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

from tripletune.core.files import (
    LOCK,
    check_folder,
    few,
    flatten,
    json_line,
    lock_folder,
    new_file,
    private,
    read_json,
    short_value,
    write_json,
)
from tripletune.core.program import code_version
from tripletune.eval.results import ABOUT, METRICS, ORACLE, SCORES, SETTINGS, RunAbout, Session, read_results
from tripletune.rag.results import RESULTS

logger = logging.getLogger(__name__)

# What an output folder may hold before the run: an index, a ledger, logs of launchers, hidden files.
_OTHERS = (LOCK, "index", "*.sqlite*", "*.log", "*.out", "*.err", ".*")
# The beginning of a model's name, such as "hf:FOLDER" of 'hf:FOLDER {"dtype": "bfloat16"} 0123456789abcdef'.
_SPEC = re.compile(r"^.*?(?=( \{.*\})?( [0-9a-f]{16})?$)", re.DOTALL)
# The fingerprint of weights at the end of such a name.
_FINGERPRINT = re.compile(r" [0-9a-f]{16}$")


class ProcessPart(NamedTuple):
    """What a process after the first one of a launcher writes: a file of its own, named by its number.

    Attributes:
        done: Ids of the items that had a row when the first process opened the folder.
    """

    number: int
    done: set[str]


class ResultLog:
    """The rows of one run in `folder/results.jsonl`, each with a unique "id".

    Args:
        settings: Settings of the rows; a folder continues only with equal settings.
        overwrite: Start again; the first new row removes the earlier run.
        retry_errors: Forget the failed rows, so that their items run again.
        part: For processes after the first; None for the first process, which checks and repairs the folder.
        about: The content of `run.json`; the first row adds this session to its sessions.
        sources: Files and folders that the run reads, which must not be its output.

    Attributes:
        done: Ids of the items that have a row.
    """

    def __init__(
        self,
        folder: str | Path,
        settings: dict[str, Any],
        overwrite: bool = False,
        retry_errors: bool = False,
        part: ProcessPart | None = None,
        about: RunAbout | None = None,
        sources: Sequence[str | Path] = (),
    ) -> None:
        self.folder = Path(folder)
        self.path = self.folder / RESULTS
        self.done: set[str] = set()
        # As they will be read again: tuples become lists.
        self._settings = json.loads(json.dumps(settings))
        self._about = about or RunAbout()
        began = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._session = Session.from_json({"began": began, **code_version()})
        self._is_first = part is None
        self._replaces = False
        self._lock: IO[str] | None = None
        # The name depends on the settings, so rows of other settings are never joined.
        self._parts = f"results.{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]}"
        if part is not None:
            self.done = part.done
            self._file = (self.folder / f"{self._parts}.{part.number}.jsonl").open("w", encoding="utf-8")
            return
        check_folder(self.folder, _OTHERS, overwrite=True, sources=sources, continues=SETTINGS)
        self._lock = lock_folder(
            self.folder, f"another process writes into {self.folder}: wait for it or stop it, or give another --output"
        )
        with ExitStack() as locked:
            locked.enter_context(self._lock)
            self._open_for_more_rows(overwrite, retry_errors)
            locked.pop_all()

    def _open_for_more_rows(self, overwrite: bool, retry_errors: bool) -> None:
        """Check and repair what an earlier session has left, and open the file for more rows.

        With `overwrite`, the earlier rows stay until the first new row is there (`append`), so that a command that
        fails at once has deleted nothing. The sessions of the rows that stay are kept, since the report judges by all
        of them whether the seconds count.
        """
        if overwrite:
            for left in self.folder.glob(f"{self._parts}.*"):
                left.unlink()
        has_rows = self.path.exists() and self.path.stat().st_size > 0
        self._replaces = overwrite and has_rows
        continues = self._has_same_settings(has_rows) and not overwrite
        if continues and (self.folder / ABOUT).is_file():
            earlier = RunAbout.from_json(read_json(self.folder / ABOUT))
            self._about.passes = earlier.passes
            if has_rows:
                self._about.sessions = earlier.sessions
        if not has_rows:
            # A run that failed before its first answer, for example for a misspelled model, fixes no settings.
            write_json(self.folder / SETTINGS, self._settings)
            self.path.touch()
        self._cut_unfinished_line()
        if not self._replaces:
            if retry_errors:
                self._forget_errors()
            self.done = {row["id"] for row in read_results(self.path)}
        self._file = self.path.open("a", encoding="utf-8")
        self.append_rows_of_processes(errors=not retry_errors)
        self.write_about()

    def _has_same_settings(self, has_rows: bool) -> bool:
        """Whether an earlier call had the same settings.

        Raises an error if the folder belongs to another program, or its rows to a run with other settings.

        Settings that share no name are those of another program, such as a training run, whose folder must not be
        changed.
        """
        path = self.folder / SETTINGS
        before = flatten(read_json(path), ".") if path.exists() else {}
        now = flatten(self._settings, ".")
        if before and not before.keys() & now.keys():
            raise FileExistsError(f"{path} does not belong to an evaluation: give another --output")
        changed = changed_settings(before, now)
        if has_rows and changed and not self._replaces:
            details = few([_change(name, before, now) for name in changed])
            raise ValueError(
                f"{self.folder} holds results of another run: {details}. "
                "Pass --overwrite to start again, or another --output"
            )
        return not changed

    def _cut_unfinished_line(self) -> None:
        """Remove a last line that a kill has cut off, since the next row would be appended to it."""
        with self.path.open("rb+") as lines:
            whole = sum(len(line) for line in lines if line.endswith(b"\n"))
            lines.seek(0, os.SEEK_END)
            if lines.tell() != whole:
                logger.warning("%s: the last line was cut off; its item runs again", self.path)
                lines.truncate(whole)

    def _forget_errors(self) -> None:
        """Remove the rows of failed items, and the metrics, which counted them, until the rows are complete again."""
        (self.folder / METRICS).unlink(missing_ok=True)
        with new_file(self.path) as scratch, scratch.open("w", encoding="utf-8") as file:
            for row in read_results(self.path):
                if not row.get("error"):
                    file.write(json_line(row))

    def append_rows_of_processes(self, errors: bool = True) -> None:
        """Append the rows that other processes have written, and remove their files.

        Files of processes may also be left from a killed session, so an item that has a row by now is skipped.

        Args:
            errors: Also rows of failed items, which are otherwise asked again.
        """
        for file in sorted(self.folder.glob(f"{self._parts}.*")):
            for row in read_results(file, partial=True):
                if row["id"] not in self.done and (errors or not row.get("error")):
                    self.append(row)
            file.unlink()

    def append(self, row: dict[str, Any]) -> None:
        """Add a row; it is in the file when this returns, so that a kill loses at most the items in progress.

        The first row after `--overwrite` removes the earlier results, and none is removed before: a run that fails at
        its start leaves them as they were.
        """
        if self._replaces:
            self._replaces = False
            self._file.truncate(0)
            (self.folder / METRICS).unlink(missing_ok=True)
            write_json(self.folder / SETTINGS, self._settings)
        if self._session not in self._about.sessions:
            self._about.sessions.append(self._session)
            self.write_about()
        self._file.write(json_line(row))
        self._file.flush()
        self.done.add(row["id"])
        # Added scores must cover all rows, so a new row removes them.
        (self.folder / SCORES).unlink(missing_ok=True)

    @property
    def pass_number(self) -> int:
        """Which pass over a Batch API this call is, from 1."""
        return len(self._about.passes) + 1

    @property
    def began(self) -> str:
        """When the first pass of the run began, in UTC, in ISO format."""
        return [*self._about.passes, self._session.began][0]

    def note_waiting_pass(self) -> None:
        """Write `run.json` with the fact that this call leaves items waiting for a Batch API."""
        self._about.passes.append(self._session.began)
        self.write_about()

    def write_about(self, *, embedded: int | None = None, alone: bool | None = None) -> None:
        """Write `run.json` with facts on this session (see `Session`); those that are not named stay as they are.

        Only the first process writes it, and not before a first new row has replaced an earlier run.
        """
        if embedded is not None:
            self._session.embedded = embedded
        if alone is not None:
            self._session.alone = alone
        if self._is_first and not self._replaces:
            write_json(self.folder / ABOUT, self._about.to_json())

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows, streamed."""
        yield from read_results(self.path)

    def sort_and_close(self, order: Iterable[str]) -> None:
        """Close the file and sort its rows by `order`, the ids of all items.

        Rows were written as items ended; sorted, the file is the same for any concurrency. Only the places of lines are
        held in memory, as traces of many questions would not fit.
        """
        self._file.close()
        offsets: dict[str, int] = {}
        position = 0
        with self.path.open("rb") as lines:
            for line in lines:
                offsets[json.loads(line)["id"]] = position
                position += len(line)
        with new_file(self.path) as scratch, self.path.open("rb") as source, scratch.open("wb") as target:
            for name in order:
                if name not in offsets:
                    raise ValueError(f"{self.path} has no row for {name!r}: run the same command again to complete it")
                source.seek(offsets[name])
                target.write(source.readline())

    def close(self) -> None:
        """Close the file as it is; the same command continues it."""
        self._file.close()
        if self._lock is not None:
            self._lock.close()


def _change(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Say how a setting differs between two runs; of a file, whose digest says nothing, only that it differs."""
    if name.startswith("files."):
        if name not in before:
            return f"{name} was not read then"
        return f"{name} has changed" if name in now else f"{name} is no longer read"
    return f"{name} was {short_value(before.get(name))} and is {short_value(now.get(name))}"


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Dotted names of settings in which two runs differ, those without a dot first.

    Where the contents of a model or file are known and equal, its name may differ: a moved folder is the same model.
    """
    equal = {name for name, value in now.items() if value and before.get(name) == value}
    has_digests = any(name.startswith("files.") for name in now)

    def comparable(name: str, value: object) -> object:
        """The value to compare: paths only count where no digest says what is in them."""
        if has_digests and name in ("options.prompts", "options.answers", "options.corpus"):
            return None  # `files` and `corpus` hold digests of what these paths name
        if isinstance(value, str) and value.startswith(ORACLE):
            return Path(value.removeprefix(ORACLE)).resolve()
        if isinstance(value, str) and _has_equal_weights(name, value, equal):
            return _SPEC.sub("", value)
        return value

    # `overrides` follow from the options and the models, which are compared; earlier revisions did not note them.
    compared = {name for name in before.keys() | now.keys() if not name.startswith("overrides.")}
    names = sorted(compared, key=lambda name: ("." in name, name))
    return [name for name in names if comparable(name, before.get(name)) != comparable(name, now.get(name))]


def _has_equal_weights(name: str, value: str, equal: set[str]) -> bool:
    """Whether a setting names a model whose weights have a fingerprint, elsewhere in the settings or in the name.

    Such a name may change: the fingerprint, which is compared by itself, says whether the model is the same.
    """
    family, _, last = name.rpartition(".")
    weights = {f"{name}_weights"}
    if last in ("spec", "model", "extractor"):
        weights.add(f"{family}.weights" if family else "weights")
    return bool(equal & weights) or (last == "model" and _FINGERPRINT.search(value) is not None)


@contextmanager
def watch_for_other_evaluations() -> Iterator[Callable[[], bool | None]]:
    """Yield a function that says whether this user's evaluation has been alone on this machine; None if unknown.

    Seconds per question are only reported if it was. A shared file says so: the first evaluation locks it alone, and
    each one that starts makes it longer. Without file locks (Windows) nothing is known.
    """
    path = Path(tempfile.gettempdir()) / "tripletune-eval"
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    try:
        import fcntl

        file = os.fdopen(private(f"{path}-{os.getuid()}", flags | os.O_NOFOLLOW), "a")
    except (ImportError, OSError):
        yield lambda: None
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_first = True
        except BlockingIOError:
            is_first = False
        # Every evaluation that starts adds a letter, so that one that has ended is also noticed.
        file.write(".")
        file.flush()
        size = file.tell()
        fcntl.flock(file, fcntl.LOCK_SH)
        yield lambda: is_first and os.fstat(file.fileno()).st_size == size
