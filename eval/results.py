"""A results file that survives a kill: one flushed JSON line a row, repaired and continued when it is opened again."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tripletune.models.data.records import read_jsonl
from tripletune.models.files import lock_folder, write_json
from tripletune.models.llm.backends.api import redact

logger = logging.getLogger(__name__)

ASIDE = ".old"
RESULTS = "results.jsonl"
SETTINGS = "settings.json"
METRICS = "metrics.json"
ABOUT = "run.json"
_FILES = (RESULTS, METRICS, SETTINGS, ABOUT)


class ResultLog:
    """The rows of one run in `folder/results.jsonl`, each with a unique "id".

    Args:
        folder: The output folder.
        settings: What the rows depend on; a folder is only continued with the same settings.
        overwrite: Start anew, whatever the folder holds of an earlier run. Its files are set aside under names that end
            in `.old`; they go with the first new row, and come back when there is none.
        retry_errors: Forget rows with an "error", so that they are run again.

    Raises:
        ValueError: the folder was made with other settings, its results are damaged before the last line, or another
            process writes into it.
    """

    def __init__(
        self, folder: str | Path, settings: dict[str, Any], overwrite: bool = False, retry_errors: bool = False
    ) -> None:
        self.folder = Path(folder)
        self.path = self.folder / RESULTS
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"output {self.folder} is a file: name a folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(
            self.folder, f"another process writes into {self.folder}: wait for it or stop it, or give another --output"
        )
        try:
            self._open(settings, overwrite, retry_errors)
        except BaseException:
            self._let_go()
            raise

    def _open(self, settings: dict[str, Any], overwrite: bool, retry_errors: bool) -> None:
        if (self.folder / (RESULTS + ASIDE)).exists() and not (self.path.exists() and self.path.stat().st_size):
            self._bring_back()  # a kill came before the first new row
        self._aside = overwrite and self._set_aside()
        self._check_settings(json.loads(json.dumps(settings)))
        self._repair()
        if retry_errors:
            self._rewrite(row for row in self.rows() if not row.get("error"))
        self.done = {row["id"] for row in self.rows()}
        self._file = self.path.open("a", encoding="utf-8")

    def note(self, command: Sequence[str], questions: int, **about: Any) -> None:
        """Write down what makes these rows, for reports; nothing is compared with it later.

        Args:
            command: The words of the command line; what looks like a key is struck out.
            questions: How many rows a complete run has.
            **about: What else a report may say, as JSON values.
        """
        words = [redact(word) for word in command]
        write_json(self.folder / ABOUT, {"command": words, "questions": questions, **about})

    def append(self, row: dict[str, Any]) -> None:
        """Add a row; it is in the file when this returns."""
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()
        self.done.add(row["id"])
        if self._aside:
            self._forget_aside()

    def rows(self) -> Iterator[dict[str, Any]]:
        """Stream the rows in the order of the file."""
        yield from read_rows(self.path)

    def finish(self, order: Iterable[str]) -> None:
        """Close the file with its rows in `order`, so that it does not depend on which was ready first.

        Raises:
            ValueError: an id of `order` has no row.
        """
        self._file.close()
        offsets: dict[str, int] = {}
        position = 0
        with self.path.open("rb") as lines:
            for line in lines:
                offsets[json.loads(line)["id"]] = position
                position += len(line)
        scratch = self.path.with_name(RESULTS + ".tmp")
        with self.path.open("rb") as source, scratch.open("wb") as target:
            for name in order:
                if name not in offsets:
                    raise ValueError(f"{self.path} has no row for {name!r}: run the same command again to complete it")
                source.seek(offsets[name])
                target.write(source.readline())
        os.replace(scratch, self.path)

    def close(self) -> None:
        """Close the file as it is; without a new row what was there before comes back."""
        self._file.close()
        if self._aside:
            self._bring_back()
        self._let_go()

    def _let_go(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def _set_aside(self) -> bool:
        found = [name for name in _FILES if (self.folder / name).exists()]
        for name in found:
            os.replace(self.folder / name, self.folder / (name + ASIDE))
        return bool(found)

    def _forget_aside(self) -> None:
        self._aside = False
        for name in _FILES:
            (self.folder / (name + ASIDE)).unlink(missing_ok=True)

    def _bring_back(self) -> None:
        self._aside = False
        for name in _FILES:
            (self.folder / name).unlink(missing_ok=True)
            if (self.folder / (name + ASIDE)).exists():
                os.replace(self.folder / (name + ASIDE), self.folder / name)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        path = self.folder / SETTINGS
        if not path.exists():
            if self.path.exists():
                raise ValueError(
                    f"{self.folder} holds {RESULTS} and no {SETTINGS}: pass --overwrite or another --output"
                )
            write_json(path, settings)
            return
        found = json.loads(path.read_text(encoding="utf-8"))
        changed = [key for key in sorted(found.keys() | settings.keys()) if found.get(key) != settings.get(key)]
        if changed and not (self.path.exists() and self.path.stat().st_size):
            # A call that failed before its first answer, such as one with a misspelled model, binds nobody.
            write_json(path, settings)
            return
        if changed:
            details = "; ".join(f"{key} was {found.get(key)!r} and is {settings.get(key)!r}" for key in changed)
            raise ValueError(
                f"{self.folder} holds results of another run: {details}. "
                "Pass --overwrite to start anew, or another --output"
            )

    def _repair(self) -> None:
        """Cut off a last line that was not written to its end."""
        if not self.path.exists():
            self.path.touch()
            return
        with self.path.open("rb+") as file:
            good = 0
            for line in file:
                if not line.endswith(b"\n"):
                    break
                good += len(line)
            file.seek(0, os.SEEK_END)
            if file.tell() != good:
                logger.warning("%s: the last line was cut off; its question runs again", self.path)
                file.truncate(good)

    def _rewrite(self, rows: Iterable[dict[str, Any]]) -> None:
        scratch = self.path.with_name(RESULTS + ".tmp")
        with scratch.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        os.replace(scratch, self.path)


def read_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """Stream a results file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not a row with an id; the message has its number.
    """
    for where, row in read_jsonl(path):
        if "id" not in row:
            raise ValueError(f"{where}: the row has no id; the file is damaged, pass --overwrite to make it again")
        yield row
