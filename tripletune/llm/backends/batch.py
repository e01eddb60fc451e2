"""Calls through a provider's Batch API, which costs half the price, replies within a day, and exchanges files.

A call that the ledger can't answer is stored there as pending and raises `RepliesPending`. At the end of a run the
pending calls are written to request files in the provider's layout. Send these files, import the reply files, and run
the same command again, until no call waits.

Only the ledger stores which calls wait. One transaction writes a complete request file and records its calls, so a
killed process neither loses a call nor writes it twice. A reply file is imported completely or not at all, and only
once.

Layouts: https://platform.openai.com/docs/guides/batch and
https://platform.claude.com/docs/en/build-with-claude/batch-processing
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count as count_from
from pathlib import Path
from typing import NamedTuple

from tripletune.core.calls import (
    SENT_SINCE,
    Backend,
    CallError,
    Completion,
    Message,
    RepliesPending,
    Sampling,
)
from tripletune.core.data.jsonl import read_jsonl
from tripletune.core.files import new_file, private
from tripletune.llm.backends import BackendKind, LLMOptions
from tripletune.llm.backends._batch_replies import BatchReply, batch_reply
from tripletune.llm.backends.anthropic import messages_body
from tripletune.llm.backends.openai import chat_body
from tripletune.llm.ledger import FAILED, NOW, OK, PENDING, PUT, Call, Ledger, make_call, row_of, sampling_of
from tripletune.llm.replies import is_reply

REFUSED = "refused in a batch: "


class FileRoom(NamedTuple):
    """How much a provider accepts in one request file."""

    requests: int
    bytes: int


class RequestFile(NamedTuple):
    """A written request file, and the row ids of its calls in the ledger."""

    path: Path
    row_ids: list[int]


# Maximum requests and bytes per file (200 and 256 MB, with a megabyte of 1,000,000 bytes).
ROOMS: Mapping[str, FileRoom] = {
    "openai": FileRoom(50_000, 200_000_000),
    "anthropic": FileRoom(100_000, 256_000_000),
}


class BatchBackend(Backend):
    """Collect calls and write them to request files; no call is answered at once.

    Its ledger name and its meaning of "auto" are those of `OpenAIBackend` or `AnthropicBackend`, so that both backends
    share replies.

    Args:
        room: Maximum requests and bytes per file; by default those that the provider accepts.
    """

    def __init__(self, options: LLMOptions, ledger: Ledger | None, room: FileRoom | None = None) -> None:
        """Set the ledger's file as the place of the request files, which lie in a folder beside it."""
        if ledger is None:
            raise ValueError("backend batch needs a ledger: set a file, for example runs/ledger.sqlite")
        self.model = options.ledger_name
        self.layout = options.batch_layout
        self.folder = Path(f"{ledger.path}.batch")
        self._ledger = ledger
        self._room = room or ROOMS[self.layout]
        self._body = partial(chat_body, options, True)
        if self.layout == "anthropic":
            self._body = partial(messages_body, options)
        # The request files that this run has written.
        self._new_files: set[str] = set()
        # Keys of the imported replies that were counted as sent.
        self._counted: set[str] = set()

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Store a call as pending and raise `RepliesPending`; `CallError` if the provider refused it before."""
        # A call that can't be sent fails here, before the file is written.
        self._body(messages, sampling)
        call = make_call(self.model, sampling, messages)
        state = self._ledger.state(call.key)
        if state is not None and state.status == FAILED and state.detail.startswith(REFUSED):
            raise CallError(state.detail)
        if state is None or state.status != PENDING:
            self._ledger.wait_for(call)
        raise RepliesPending(f"call {call.key} waits for a batch")

    def has_sent(self, stored: Completion, role: str, question_id: str) -> bool:
        """Whether a reply was imported for this call; the first call for the same reply counts, and counts once."""
        if not stored.batch or stored.key in self._counted:
            return False
        first = self._ledger.first_use(stored.key)
        if first is not None:
            if (first.role, first.question_id) != (role, question_id):
                return False
            # The ledger notes whole seconds.
            if first.time[:19] < SENT_SINCE.get()[:19]:
                return False
        self._counted.add(stored.key)
        return True

    async def close(self) -> None:
        """Write pending calls to request files, or they would be lost with the run."""
        self.write()

    def write(self) -> None:
        """Write all pending calls that are in no request file yet.

        Files are written inside the transaction that notes them: if the program stops in between, no call is noted for
        a file, and the next run writes a file of the same name again.
        """
        if not self._ledger.path.exists():
            return
        with self._ledger.transaction() as connection:
            query = (
                "SELECT id, key, sampling, messages FROM calls WHERE status = 'pending' AND model = ? AND detail = ''"
            )
            rows = connection.execute(f"{query} ORDER BY id", (self.model,))
            # A file with this number from an uncommitted transaction is replaced.
            number = connection.execute("SELECT coalesce(max(id), 0) + 1 FROM batches").fetchone()[0]
            names = (self.folder / f"{self._ledger.path.stem}-requests-{n:04d}.jsonl" for n in count_from(number))
            lines = ((row_id, self._request_line(key, sampling, messages)) for row_id, key, sampling, messages in rows)
            for file in list(_write_request_files(lines, names, self._room)):
                name = str(file.path)
                connection.execute(
                    f"INSERT INTO batches (file, requests, time) VALUES (?, ?, {NOW})", (name, len(file.row_ids))
                )
                rows_of_file = [(name, row_id) for row_id in file.row_ids]
                connection.executemany("UPDATE calls SET detail = ? WHERE id = ?", rows_of_file)
                self._new_files.add(name)

    def pending_message(self) -> str | None:
        """Write request files, and say how many calls wait in which files and what to do; None if no call waits.

        It is called once all calls of a run were asked, so that one file holds as many as possible.
        """
        self.write()
        files = [row for row in waiting(self._ledger) if row.model == self.model]
        if not files:
            return None
        sentences = [f"Calls that wait for replies: {sum(row.calls for row in files):,}."]
        new = [row.file for row in files if row.file in self._new_files]
        earlier = [row for row in files if row.file not in self._new_files]
        if new:
            sentences.append(f"New: send {', '.join(new)} to the provider's Batch API.")
        if earlier:
            # A file that was sent must not be sent again: its calls would be paid for twice.
            listed = ", ".join(f"{row.file} (waiting: {row.calls:,} of its {row.requests:,} calls)" for row in earlier)
            sentences.append(f"Written by an earlier run: {listed}; send only what you have not sent yet.")
        sentences.append(
            f"Run `tripletune batch import --ledger {self._ledger.path} --replies FILE` for each reply file, then run "
            "the same command again"
        )
        return " ".join(sentences)

    def _request_line(self, key: str, sampling: str, messages: str) -> bytes:
        """The line of a request file for a call of the ledger."""
        body = self._body(json.loads(messages), sampling_of(sampling))
        if self.layout == "openai":
            request = {"custom_id": key, "method": "POST", "url": "/v1/chat/completions", "body": body}
        else:
            request = {"custom_id": key, "params": body}
        return json.dumps(request, ensure_ascii=False).encode("utf-8") + b"\n"


def _write_request_files(
    lines: Iterator[tuple[int, bytes]], names: Iterator[Path], room: FileRoom
) -> Iterator[RequestFile]:
    """Write lines, each with its row id in the ledger, to as few files as `room` allows; yield each written file.

    One line is read ahead, because only the next line shows that a file is full, and it then begins the next one.
    """
    line = next(lines, None)
    while line is not None:
        path = next(names)
        ids: list[int] = []
        size = 0
        with new_file(path) as scratch, open(scratch, "wb", opener=private) as file:
            while line is not None:
                row_id, request = line
                is_full = len(ids) == room.requests or size + len(request) > room.bytes
                # A request larger than a file may be gets a file of its own, and the provider reports the error.
                if ids and is_full:
                    break
                file.write(request)
                ids.append(row_id)
                size += len(request)
                line = next(lines, None)
        yield RequestFile(path, ids)


class Waiting(NamedTuple):
    """Calls of a request file that have no reply yet.

    Attributes:
        file: The request file; "" for calls that are in no file yet.
        model: Their model's name in the ledger.
        calls: Number of calls that wait.
        requests: Number of calls in the file.
    """

    file: str
    model: str
    calls: int
    requests: int


def waiting(ledger: Ledger) -> list[Waiting]:
    """The waiting calls of a ledger by request file and model; calls that are in no file yet come last."""
    query = (
        "SELECT detail, model, count(*), coalesce((SELECT max(requests) FROM batches WHERE file = detail), 0) "
        "FROM calls WHERE status = 'pending' GROUP BY 1, 2 ORDER BY detail = '', 1, 2"
    )
    with ledger.connected() as connection:
        return [Waiting(*row) for row in connection.execute(query)]


def reset(ledger: Ledger, file: str | None) -> int:
    """Mark the calls of a lost request file, or (None) refused calls, to be written again."""
    if file is None:
        condition = "status = 'failed' AND detail GLOB ?"
        value = f"{REFUSED}*"
    else:
        condition = "status = 'pending' AND detail = ?"
        value = file
    update = f"UPDATE calls SET status = 'pending', detail = '' WHERE {condition}"
    with ledger.transaction() as connection:
        return connection.execute(update, (value,)).rowcount


def import_replies(ledger: Ledger, path: str | Path) -> Counter[str] | None:
    """Put a provider's reply or error file into the ledger.

    Returns:
        None if the file was imported before. Otherwise counts of "stored" (new) replies; "known" replies; "again":
        calls that failed temporarily (provider errors, expired, canceled, no text), which the next run repeats;
        "refused": calls that fail until `reset`; "unknown": calls that the ledger does not have.
    """
    with Path(path).open("rb") as file:
        digest = hashlib.file_digest(file, "blake2b").hexdigest()[:40]
    with ledger.transaction() as connection:
        if connection.execute("SELECT 1 FROM imports WHERE digest = ?", (digest,)).fetchone():
            return None
        counts: Counter[str] = Counter()
        for where, line in read_jsonl(path):
            try:
                reply = batch_reply(line)
            except ValueError as error:
                raise ValueError(f"{where}: {error}. Nothing was imported") from None
            counts[_store_reply(connection, reply, ledger.path)] += 1
        total = counts.total()
        if total == counts["unknown"]:
            raise ValueError(
                f"{path}: none of its {total} replies belongs to a call in {ledger.path}; is this the right ledger?"
            )
        connection.execute(f"INSERT INTO imports (digest, replies, time) VALUES (?, ?, {NOW})", (digest, total))
    return counts


def _store_reply(connection: sqlite3.Connection, reply: BatchReply, ledger: Path) -> str:
    """Put a reply into the ledger that `connection` has open, and return the name of its count (`import_replies`).

    A reply that is stored is never replaced, so that a file that is imported late changes nothing. A reply counts for
    any call, also one that failed. A failure only counts for a call that waits: other calls have been reset, or failed,
    in the meantime.
    """
    query = "SELECT model, sampling, messages, status, text, finish_reason FROM calls WHERE key = ?"
    row = connection.execute(query, (reply.key,)).fetchone()
    if row is None:
        return "unknown"
    model, sampling, messages, status, text, finish_reason = row
    if status == OK and is_reply(text, finish_reason):
        return "known"
    if reply.completion is not None:
        call = Call(reply.key, model, sampling, messages)
        connection.execute(PUT, row_of(call, replace(reply.completion, batch=True)))
        return "stored"
    if status == PENDING and not reply.refused:
        connection.execute("UPDATE calls SET detail = '' WHERE key = ?", (reply.key,))
        return "again"
    if status == PENDING:
        advice = f"to send it again, run `tripletune batch reset --ledger {ledger} --refused`"
        detail = f"{REFUSED}{reply.reason}; {advice}"
        connection.execute("UPDATE calls SET status = 'failed', detail = ? WHERE key = ?", (detail, reply.key))
    return "refused"


BACKEND = BackendKind(lambda options, key, ledger: BatchBackend(options, ledger), sends=False)
