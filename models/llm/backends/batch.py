"""Calls through a provider's Batch API: half the price, an answer within a day, and files instead of connections.

A call that the ledger can't answer is stored there as pending and raises `RepliesPending`. At the end of a run the
pending calls are written to request files in the provider's layout. Send them, import the reply files, and run the
same command again: what was answered comes from the ledger. A build of many rounds runs again until nothing waits.

    tripletune batch status --ledger FILE
    tripletune batch import --ledger FILE --replies FILE
    tripletune batch reset --ledger FILE --file REQUESTS

Only the ledger knows what waits. A request file appears complete or not at all, in the transaction that notes what it
holds, so a process that is killed neither loses a call nor writes it twice.

Layouts: https://platform.openai.com/docs/guides/batch and
https://platform.claude.com/docs/en/build-with-claude/batch-processing
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

from tripletune.models.llm.backends.anthropic import messages_body
from tripletune.models.llm.backends.api import ledger_name
from tripletune.models.llm.backends.openai import TokenField, chat_body
from tripletune.models.llm.client import CallError, Message, RepliesPending, Sampling
from tripletune.models.llm.ledger import FAILED, PENDING, Ledger, make_call, now, sampling_of
from tripletune.models.local.generation import Completion

Layout = Literal["openai", "anthropic"]
LAYOUTS: tuple[Layout, ...] = ("openai", "anthropic")
REFUSED = "refused in a batch: "


class Room(NamedTuple):
    """What a provider takes in one file."""

    requests: int
    size: int


# 200 and 256 MB, counted as the smaller of the two kinds of megabyte.
ROOMS: Mapping[str, Room] = {"openai": Room(50_000, 200_000_000), "anthropic": Room(100_000, 256_000_000)}


class Written(NamedTuple):
    """A request file: its name, the first and last of its calls' row ids, and how many there are."""

    file: Path
    first: int
    last: int
    requests: int


class Waiting(TypedDict):
    """Pending calls by the file they wait in; no file means that the next run writes them."""

    file: str
    model: str
    calls: int


class BatchBackend:
    """A `Backend` that answers nothing itself: it collects calls and writes them to request files.

    Args:
        model: The provider's name of the model.
        layout: "openai" or "anthropic".
        folder: Where request files go.
        ledger: The ledger of the client it works under.
        token_field: As in `OpenAIBackend`; "auto" is `max_completion_tokens`.
        send_temperature: As in `OpenAIBackend` and `AnthropicBackend`; `None` is what they do by default.
        extra: As in both of them.
        room: What fits in one file; `None` is the provider's limit.

    Attributes:
        model: The name that `OpenAIBackend` and `AnthropicBackend` have, so that replies serve both ways of calling.

    Raises:
        ValueError: an option makes no sense.
    """

    def __init__(
        self,
        model: str,
        layout: Layout,
        folder: str | Path,
        ledger: Ledger,
        token_field: TokenField = "auto",
        send_temperature: bool | None = None,
        extra: Mapping[str, Any] | None = None,
        room: Room | None = None,
    ) -> None:
        if layout not in LAYOUTS:
            raise ValueError(f"batch layout {layout!r} is not one of {', '.join(LAYOUTS)}")
        if not model:
            raise ValueError("model: it must be the provider's name of the model")
        self.model = ledger_name(layout, model, extra)
        self.name, self.layout, self.folder = model, layout, Path(folder)
        self._ledger, self._room = ledger, room or ROOMS[layout]
        self._token_field = "max_completion_tokens" if token_field == "auto" else token_field
        self.send_temperature = layout == "openai" if send_temperature is None else send_temperature
        self._extra = dict(extra or {})

    def __repr__(self) -> str:
        return f"BatchBackend({self.model!r}, folder={str(self.folder)!r})"

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Note that a call waits.

        Raises:
            RepliesPending: always, but for
            CallError: the call can't be sent, or the provider refused it in an earlier batch.
        """
        # What can't be sent fails now and not when the file is written.
        self._body(messages, sampling)
        call = make_call(self.model, sampling, messages)
        status, detail = self._ledger.state(call.key) or ("", "")
        if status == FAILED and detail.startswith(REFUSED):
            raise CallError(detail)
        if status != PENDING:
            await self._ledger.wait_for(call)
        raise RepliesPending(f"call {call.key} waits for a batch")

    async def close(self) -> None:
        """Write what waits to request files."""
        self.write()

    def write(self) -> list[Path]:
        """Write all pending calls that are in no request file yet.

        Returns:
            The new files.
        """
        return self._ledger.transact(self._write)

    def pending_message(self) -> str | None:
        """Write request files, and say how many calls wait, where, and what to do; `None` when nothing waits."""
        self.write()
        found = [row for row in waiting(self._ledger) if row["model"] == self.model]
        if not found:
            return None
        calls = sum(row["calls"] for row in found)
        files = ", ".join(row["file"] for row in found)
        ledger = self._ledger.path
        return (
            f"{calls:,} calls wait for replies. Send {files} to the provider's Batch API, then run "
            f"`tripletune batch import --ledger {ledger} --replies FILE` for each file of replies "
            "and the same command again"
        )

    def _write(self, connection: sqlite3.Connection) -> list[Path]:
        rows = connection.execute(
            "SELECT id, key, sampling, messages FROM calls WHERE status = 'pending' AND model = ? AND detail = '' "
            "ORDER BY id",
            (self.model,),
        )
        # A file of a transaction that was never committed has this number too, and is replaced.
        number = connection.execute("SELECT coalesce(max(id), 0) + 1 FROM batches").fetchone()[0]
        names = (self.folder / f"{self._ledger.path.stem}-requests-{n:04d}.jsonl" for n in _count_from(number))
        written = list(_write_files(((row[0], self._line(*row[1:])) for row in rows), names, self._room))
        for file, first, last, requests in written:
            connection.execute(
                "INSERT INTO batches (file, requests, time) VALUES (?, ?, ?)", (str(file), requests, now())
            )
            connection.execute(
                "UPDATE calls SET detail = ? WHERE status = 'pending' AND model = ? AND detail = '' "
                "AND id BETWEEN ? AND ?",
                (str(file), self.model, first, last),
            )
        return [one.file for one in written]

    def _line(self, key: str, sampling: str, messages: str) -> bytes:
        body = self._body(json.loads(messages), sampling_of(sampling))
        if self.layout == "openai":
            request = {"custom_id": key, "method": "POST", "url": "/v1/chat/completions", "body": body}
        else:
            request = {"custom_id": key, "params": body}
        return json.dumps(request, ensure_ascii=False).encode("utf-8") + b"\n"

    def _body(self, messages: Sequence[Message], sampling: Sampling) -> dict[str, Any]:
        if self.layout == "openai":
            return chat_body(self.name, messages, sampling, self._token_field, self.send_temperature, self._extra)
        # Calls of one batch that share a system prompt share the provider's cache where they meet it in time.
        return messages_body(
            self.name, messages, sampling, self.send_temperature, self._extra, is_cached=lambda _: True
        )


def waiting(ledger: Ledger) -> list[Waiting]:
    """The pending calls of a ledger by file and model, those in no file last."""
    query = "SELECT detail, model, count(*) FROM calls WHERE status = 'pending' GROUP BY detail, model"
    rows = ledger.transact(lambda connection: connection.execute(query).fetchall())
    rows.sort(key=lambda row: (not row[0], row))
    return [{"file": file or "(no file yet)", "model": model, "calls": calls} for file, model, calls in rows]


def reset(ledger: Ledger, file: str | None) -> int:
    """Let calls be written to a new request file: those of a lost file, or those that were refused.

    Args:
        ledger: The ledger.
        file: The request file as `waiting` names it; `None` means the refused ones.

    Returns:
        How many calls there were.
    """

    def run(connection: sqlite3.Connection) -> int:
        if file is not None:
            change = "UPDATE calls SET detail = '' WHERE status = 'pending' AND detail = ?"
            return connection.execute(change, (file,)).rowcount
        change = "UPDATE calls SET status = 'pending', detail = '' WHERE status = 'failed' AND substr(detail, 1, ?) = ?"
        return connection.execute(change, (len(REFUSED), REFUSED)).rowcount

    return ledger.transact(run)


def _write_files(lines: Iterator[tuple[int, bytes]], names: Iterator[Path], room: Room) -> Iterator[Written]:
    """Write lines with row ids to as few files as there is room for; a file is renamed when it is complete."""
    line = next(lines, None)
    while line is not None:
        path = next(names)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.tmp")
        first, last, requests, size = line[0], line[0], 0, 0
        with partial.open("wb") as file:
            # A request that is too large by itself gets a file of its own, and the provider's own words.
            while line is not None and (
                not requests or (requests < room.requests and size + len(line[1]) <= room.size)
            ):
                file.write(line[1])
                last, requests, size = line[0], requests + 1, size + len(line[1])
                line = next(lines, None)
        os.replace(partial, path)
        yield Written(path, first, last, requests)


def _count_from(number: int) -> Iterator[int]:
    while True:
        yield number
        number += 1


if __name__ == "__main__":
    from tripletune.models.llm.backends.batch_cli import main

    sys.exit(main())
