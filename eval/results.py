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
from itertools import chain
from pathlib import Path
from typing import Any

from tripletune.core.data.fields import checked, given
from tripletune.core.data.jsonl import read_jsonl
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
    write_json,
)
from tripletune.core.program import code_version
from tripletune.eval.metrics import recall
from tripletune.eval.statistics import Interval, bootstrap_means
from tripletune.rag.results import RESULTS, read_runs

logger = logging.getLogger(__name__)

SETTINGS = "settings.json"
METRICS = "metrics.json"
ABOUT = "run.json"
SCORES = "scores.jsonl"
# Rankings whose recall is measured, in words, and the numbers of passages that count.
RANKINGS = {"first": "first search", "retrieved": "all retrieved", "shown": "shown to the reader"}
BUDGETS = (2, 5, 15)
_SESSION = {"began": str, "version?": str, "commit?": str, "alone?": bool, "embedded?": int}
_ABOUT = {"questions?": int, "concurrency?": int, "command?": [str], "sessions?": [_SESSION]}
# The beginning of a model's name, such as "hf:FOLDER" of 'hf:FOLDER {"dtype": "bfloat16"} 0123456789abcdef'.
_SPEC, _FINGERPRINT = re.compile(r"^.*?(?=( \{.*\})?( [0-9a-f]{16})?$)", re.DOTALL), re.compile(r" [0-9a-f]{16}$")


class ResultLog:
    """The rows of one run in `folder/results.jsonl`, each with a unique "id".

    Args:
        settings: Settings of the rows; a folder continues only with equal settings.
        overwrite: Start again; the first new row removes the earlier run.
        part: For processes after the first: the number of the process, and the ids of finished items.
        about: The content of `run.json`; the first row adds this session to its "sessions".
    """

    def __init__(
        self,
        folder: str | Path,
        settings: dict[str, Any],
        overwrite: bool = False,
        retry_errors: bool = False,
        part: tuple[int, set[str]] | None = None,
        about: dict[str, Any] | None = None,
        sources: Sequence[str | Path] = (),
    ) -> None:
        self.folder = Path(folder)
        self.path = self.folder / RESULTS
        self._settings, self._about = json.loads(json.dumps(settings)), {**(about or {}), "sessions": []}
        self._first = part is None
        began = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._session: dict[str, Any] = {"began": began, **code_version()}
        # The name depends on the settings, so rows of other settings are never joined.
        self._parts = f"results.{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]}"
        if part is not None:
            self._lock, self._replaces, self.done = None, False, part[1]
            self._file = (self.folder / f"{self._parts}.{part[0]}.jsonl").open("w", encoding="utf-8")
            return
        # The folder may already hold an index and a ledger.
        others = (LOCK, "index", "*.sqlite*", "*.log", "*.out", "*.err", ".*")
        check_folder(self.folder, others, True, sources, continues=SETTINGS)
        self._lock = lock_folder(
            self.folder, f"another process writes into {self.folder}: wait for it or stop it, or give another --output"
        )
        with ExitStack() as locked:
            locked.enter_context(self._lock)
            for old in self.folder.glob(f"{self._parts}.*") if overwrite else ():
                old.unlink()
            path, settings = self.folder / SETTINGS, self._settings
            begun = self.path.exists() and self.path.stat().st_size > 0
            self._replaces = overwrite and begun
            found, now = flatten(read_json(path), ".") if path.exists() else {}, flatten(settings, ".")
            changed = changed_settings(found, now)
            if found and not found.keys() & now.keys():
                raise FileExistsError(f"{path} does not belong to an evaluation: give another --output")
            if begun and not overwrite and (self.folder / ABOUT).is_file():
                self._about["sessions"] = list(read_json(self.folder / ABOUT).get("sessions") or ())
            if not begun:
                # A run that failed before its first answer, for example for a misspelled model, fixes no settings.
                write_json(path, settings)
                self.path.touch()
            elif changed and not self._replaces:
                details = few([f"{name} was {found.get(name)!r:.40} and is {now.get(name)!r:.40}" for name in changed])
                raise ValueError(
                    f"{self.folder} holds results of another run: {details}. "
                    "Pass --overwrite to start again, or another --output"
                )
            with self.path.open("rb+") as lines:
                whole = sum(len(line) for line in lines if line.endswith(b"\n"))
                lines.seek(0, os.SEEK_END)
                if lines.tell() != whole:
                    logger.warning("%s: the last line was cut off; its item runs again", self.path)
                    lines.truncate(whole)
            if retry_errors and not self._replaces:
                (self.folder / METRICS).unlink(missing_ok=True)  # until the rows are complete again
                with new_file(self.path) as scratch, scratch.open("w", encoding="utf-8") as file:
                    kept = (row for row in read_results(self.path) if not row.get("error"))
                    file.writelines(json_line(row) for row in kept)
            self.done = set() if self._replaces else {row["id"] for row in read_results(self.path)}
            self._file = self.path.open("a", encoding="utf-8")
            self.join(errors=not retry_errors)
            self.note()
            locked.pop_all()

    def join(self, errors: bool = True) -> None:
        """Append the rows that other processes have written."""
        for file in sorted(self.folder.glob(f"{self._parts}.*")):
            for row in read_results(file, partial=True):
                if row["id"] not in self.done and (errors or not row.get("error")):
                    self.append(row)
            file.unlink()

    def append(self, row: dict[str, Any]) -> None:
        """Add a row; it is in the file when this returns."""
        if self._replaces:
            self._replaces = False
            self._file.truncate(0)
            (self.folder / METRICS).unlink(missing_ok=True)
            write_json(self.folder / SETTINGS, self._settings)
        if self._session not in self._about["sessions"]:
            self._about["sessions"].append(self._session)
            self.note()
        self._file.write(json_line(row))
        self._file.flush()
        self.done.add(row["id"])
        # Added scores must cover all rows, so a new row removes them.
        (self.folder / SCORES).unlink(missing_ok=True)

    def note(self, **found: Any) -> None:
        """Write `run.json` with facts on this session."""
        self._session |= found
        if self._first and not self._replaces:
            write_json(self.folder / ABOUT, self._about)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows, streamed."""
        yield from read_results(self.path)

    def finish(self, order: Iterable[str]) -> None:
        """Close the file and sort its rows by `order`."""
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
        """Close the file as it is."""
        self._file.close()
        if self._lock is not None:
            self._lock.close()


def changed_settings(found: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Dotted names of settings in which two runs differ; where contents are known, names of models and files may."""
    same = {name for name, one in now.items() if one and found.get(name) == one}
    files = any(name.startswith("files.") for name in now)

    def content(name: str, value: Any) -> Any:
        if files and name in ("options.prompts", "options.answers", "options.corpus"):
            return None  # `files` and `corpus` hold digests
        if str(value).startswith("oracle:"):
            return Path(value.removeprefix("oracle:")).resolve()
        head, _, last = f".{name}".rpartition(".")
        weights = f"{head}.weights"[1:] if last in ("spec", "model", "extractor") else ""
        known = same & {f"{name}_weights", weights} or (last == "model" and _FINGERPRINT.search(str(value)))
        return _SPEC.sub("", value) if known and isinstance(value, str) else value

    names = sorted(found.keys() | now.keys(), key=lambda name: ("." in name, name))
    return [name for name in names if content(name, found.get(name)) != content(name, now.get(name))]


@contextmanager
def this_machine() -> Iterator[Callable[[], bool | None]]:
    """Yield a function that says whether this user's evaluation has been alone on this machine; None if unknown."""
    path, flags = Path(tempfile.gettempdir()) / "tripletune-eval", os.O_WRONLY | os.O_APPEND | os.O_CREAT
    try:
        import fcntl

        file = os.fdopen(private(f"{path}-{os.getuid()}", flags | os.O_NOFOLLOW), "a")
    except (ImportError, OSError):
        yield lambda: None
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            first = True
        except BlockingIOError:
            first = False
        # Every evaluation that starts adds a letter, so that one that has ended is also noticed.
        file.write(".")
        file.flush()
        size = file.tell()
        fcntl.flock(file, fcntl.LOCK_SH)
        yield lambda: first and os.fstat(file.fileno()).st_size == size


def read_results(path: str | Path, partial: bool = False) -> Iterator[dict[str, Any]]:
    """Stream a results file; `partial` ignores a last line that a kill has cut off."""
    for where, row in read_jsonl(path, partial):
        checked(row, where, {"id": str, "scores?": {"": float}})
        yield row


def read_scored(folder: str | Path, *needed: str, partial: bool = False) -> Iterator[dict[str, Any]]:
    """Like `rag.results.read_runs`, with the newer scores of `tripletune eval score`."""
    path = Path(folder) / SCORES
    added = {row["id"]: given(row, "scores") or {} for row in read_results(path)} if path.is_file() else {}
    for _, row in read_runs(Path(folder) / RESULTS, *needed, partial=partial):
        yield {**row, "scores": {**row["scores"], **added.get(row["id"], {})}}


def recalls_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Recall at each of `BUDGETS` of a question's three rankings, such as "first@5".

    The rankings are the first search, all retrieved passages round by round, and the reader's passages, which older
    traces lack. A failed question has recall 0; without known supporting passages, or a known ranking, there is none.
    """
    trace, unknown = row["trace"], row["trace"].get("details", {}).get("unknown", ())
    wanted = set(() if "passages" in unknown else row.get("supporting") or ())
    rounds = [[passage["id"] for passage in step["passages"]] for step in trace["steps"]]
    parts = dict(zip(RANKINGS, (rounds[:1], rounds, [trace["shown"]] if "shown" in trace else None)))
    found = {name: list(dict.fromkeys(chain(*part))) for name, part in parts.items() if wanted and part is not None}
    cuts = {f"{name}@{k}": ranking[:k] for name, ranking in found.items() if name not in unknown for k in BUDGETS}
    return {name: 0.0 if row["error"] else recall(ranking, wanted) for name, ranking in cuts.items()}


def mean_recalls(rows: Iterable[Mapping[str, float]]) -> dict[str, Interval]:
    """Means of `recalls_of` over the questions with recalls, for the rankings that all these questions have."""
    known = [row for row in rows if row]
    names = [name for name in (known[0] if known else ()) if all(name in row for row in known)]
    return bootstrap_means({name: [row[name] for row in known] for name in names})


def read_about(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Settings, `run.json` (with the gold links of added scores) and metrics of a folder; {} without the file."""
    found = [read_json(path / name) if (path / name).is_file() else {} for name in (SETTINGS, ABOUT, METRICS)]
    checked(found[1], str(path / ABOUT), _ABOUT)
    scored = read_results(path / SCORES) if (path / SCORES).is_file() else ()
    found[1]["gold"] = " and ".join(sorted({one for row in scored for one in row.get("links", {}).values()}))
    return found[0], found[1], found[2]


def run_folders(folders: Iterable[str | Path]) -> list[Path]:
    """Folders with results: the given folders, or the folders inside a given folder without results."""
    found: list[Path] = []
    for folder in map(Path, folders):
        inside = [folder / RESULTS] if (folder / RESULTS).is_file() else sorted(folder.rglob(RESULTS))
        if not inside:
            raise FileNotFoundError(f"{folder}: neither this folder nor a folder inside it has {RESULTS}")
        found += [path.parent for path in inside]
    return found
