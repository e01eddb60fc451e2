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
from functools import partial
from itertools import count as count_from
from pathlib import Path
from typing import Any, NamedTuple

from tripletune.core.calls import Backend, CallError, Completion, Message, RepliesPending, Sampling, redact
from tripletune.core.data.records import read_jsonl
from tripletune.core.files import new_file, private
from tripletune.llm.backends import BackendKind, LLMOptions
from tripletune.llm.backends.anthropic import messages_body, read_message
from tripletune.llm.backends.openai import ACCESS, TRANSIENT, chat_body, read_chat
from tripletune.llm.ledger import FAILED, NOW, OK, PENDING, PUT, Call, Ledger, make_call, row_of, sampling_of
from tripletune.llm.replies import FINAL, has_text, silence

REFUSED = "refused in a batch: "
# Maximum requests and bytes per file (200 and 256 MB, with a megabyte of 1,000,000 bytes).
ROOMS: Mapping[str, tuple[int, int]] = {"openai": (50_000, 200_000_000), "anthropic": (100_000, 256_000_000)}
# Errors in Anthropic's batches that the same request would cause again.
_PERMANENT = frozenset({"invalid_request_error", "not_found_error", "request_too_large"})


class BatchBackend(Backend):
    """Collect calls and write them to request files; no call is answered at once.

    Its ledger name and its meaning of "auto" are those of `OpenAIBackend` or `AnthropicBackend`, so that both backends
    share replies. `room`: maximum requests and bytes per file.
    """

    def __init__(self, options: LLMOptions, ledger: Ledger | None, room: tuple[int, int] | None = None) -> None:
        if ledger is None:
            raise ValueError("backend batch needs a ledger: set a file, for example runs/ledger.sqlite")
        self.model, self.layout = options.ledger_name, options.batch_layout
        self.folder = Path(f"{ledger.path}.batch")
        self._ledger, self._room = ledger, room or ROOMS[self.layout]
        self._body = partial(chat_body, options, True)
        if self.layout == "anthropic":
            self._body = partial(messages_body, options)

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Store a call as pending and raise `RepliesPending`; `CallError` if the provider refused it before."""
        # A call that can't be sent fails here, before the file is written.
        self._body(messages, sampling)
        call = make_call(self.model, sampling, messages)
        status, detail = self._ledger.state(call.key) or ("", "")
        if status == FAILED and detail.startswith(REFUSED):
            raise CallError(detail)
        if status != PENDING:
            self._ledger.wait_for(call)
        raise RepliesPending(f"call {call.key} waits for a batch")

    async def close(self) -> None:
        """Write pending calls to request files."""
        self.write()

    def write(self) -> None:
        """Write all pending calls that are in no request file yet."""
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
            lines = ((row[0], self._line(*row[1:])) for row in rows)
            for file, ids in list(_write_files(lines, names, self._room)):
                connection.execute(
                    f"INSERT INTO batches (file, requests, time) VALUES (?, ?, {NOW})", (str(file), len(ids))
                )
                connection.executemany("UPDATE calls SET detail = ? WHERE id = ?", [(str(file), one) for one in ids])

    def pending_message(self) -> str | None:
        """Write request files, and say how many calls wait in which files and what to do; None if no call waits."""
        self.write()
        found = {file: calls for file, model, calls in waiting(self._ledger) if model == self.model}
        if not found:
            return None
        return (
            f"{sum(found.values()):,} calls wait for replies. Send {', '.join(found)} to the provider's Batch API, "
            f"run `tripletune batch import --ledger {self._ledger.path} --replies FILE` for each reply file, then run "
            "the same command again"
        )

    def _line(self, key: str, sampling: str, messages: str) -> bytes:
        body = self._body(json.loads(messages), sampling_of(sampling))
        if self.layout == "openai":
            request = {"custom_id": key, "method": "POST", "url": "/v1/chat/completions", "body": body}
        else:
            request = {"custom_id": key, "params": body}
        return json.dumps(request, ensure_ascii=False).encode("utf-8") + b"\n"


def _write_files(
    lines: Iterator[tuple[int, bytes]], names: Iterator[Path], room: tuple[int, int]
) -> Iterator[tuple[Path, list[int]]]:
    """Write lines with row ids to as few files as `room` allows; yield each file with its ids."""
    line = next(lines, None)
    while line is not None:
        path, ids, size = next(names), list[int](), 0
        with new_file(path) as scratch, open(scratch, "wb", opener=private) as file:
            # A request larger than `room` gets a separate file, and the provider reports the error.
            while line is not None and (not ids or (len(ids) < room[0] and size + len(line[1]) <= room[1])):
                file.write(line[1])
                ids.append(line[0])
                size += len(line[1])
                line = next(lines, None)
        yield path, ids


def waiting(ledger: Ledger) -> list[tuple[str, str, int]]:
    """Return file, model and number of a ledger's pending calls; calls that are in no file yet come last."""
    query = (
        "SELECT iif(detail = '', '(no file yet)', detail), model, count(*) FROM calls WHERE status = 'pending' "
        "GROUP BY 1, 2 ORDER BY detail = '', 1, 2"
    )
    with ledger.connected() as connection:
        return connection.execute(query).fetchall()


def reset(ledger: Ledger, file: str | None) -> int:
    """Mark the calls of a lost request file, or (None) refused calls, to be written again."""
    which, value = "status = 'pending' AND detail = ?", file
    if file is None:
        which, value = "status = 'failed' AND detail GLOB ?", f"{REFUSED}*"
    with ledger.transaction() as connection:
        return connection.execute(f"UPDATE calls SET status = 'pending', detail = '' WHERE {which}", (value,)).rowcount


class BatchReply(NamedTuple):
    """One line of a reply file; `refused` says that the same request would fail again."""

    key: str
    completion: Completion | None
    reason: str = ""
    refused: bool = False


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
            counts[_store(connection, reply, ledger.path)] += 1
        total = counts.total()
        if total == counts["unknown"]:
            raise ValueError(
                f"{path}: none of its {total} replies belongs to a call in {ledger.path}; is this the right ledger?"
            )
        connection.execute(f"INSERT INTO imports (digest, replies, time) VALUES (?, ?, {NOW})", (digest, total))
    return counts


def batch_reply(line: Mapping[str, Any]) -> BatchReply:
    """Read one line of a reply file in either layout, or raise a `ValueError`."""
    key, result, response = line.get("custom_id"), _object(line, "result"), _object(line, "response")
    if not isinstance(key, str):
        raise ValueError("not a reply of a batch: the line has no custom_id")
    status = response.get("status_code")
    if "result" in line:
        error = _object(result, "error", "error") or _object(result, "error")
        good, kind = result.get("type") == "succeeded", str(error.get("type") or result.get("type") or "error")
        completion = read_message(_object(result, "message"))
        refused = kind in _PERMANENT
    elif "response" in line or "error" in line:
        body = _object(response, "body")
        # Some servers put the message beside "error" (vLLM), or make "error" a text.
        places = ((one.get("error"), one.get("message"), one.get("detail")) for one in (line, body))
        words = next((text for found in places for text in found if isinstance(text, str)), None)
        error = _object(line, "error") or _object(body, "error") or {"code": body.get("code"), "message": words}
        good, kind = status == 200 and not line.get("error"), str(error.get("code") or status or "error")
        completion = read_chat(body)
        # After a rejected key or missing rights, the request itself can be sent again.
        refused = type(status) is int and 400 <= status < 500 and status not in TRANSIENT | (ACCESS - {404})
    else:
        raise ValueError("not a reply of a batch: the line has no response, error or result (is this a request file?)")
    silent = silence(completion) if good and completion else ""
    if good and completion and not silent:
        return BatchReply(key, completion)
    said = silent or ("a response without a reply" if good else f"{kind}: {error.get('message') or 'no words'}")
    refused = completion is not None and completion.finish_reason in FINAL if good else refused
    return BatchReply(key, None, redact(" ".join(said.split()))[:500], refused)


def _store(connection: sqlite3.Connection, reply: BatchReply, ledger: Path) -> str:
    """Put a reply into the ledger; returns the name of its count."""
    query = "SELECT model, sampling, messages, status, text FROM calls WHERE key = ?"
    row = connection.execute(query, (reply.key,)).fetchone()
    if row is None or (row[3] == OK and has_text(row[4])):
        return "unknown" if row is None else "known"
    if reply.completion is not None:
        connection.execute(PUT, row_of(Call(reply.key, *row[:3]), reply.completion))
        return "stored"
    if row[3] == PENDING and not reply.refused:
        connection.execute("UPDATE calls SET detail = '' WHERE key = ?", (reply.key,))
        return "again"
    if row[3] == PENDING:
        advice = f"to send it again, run `tripletune batch reset --ledger {ledger} --refused`"
        detail = f"{REFUSED}{reply.reason}; {advice}"
        connection.execute("UPDATE calls SET status = 'failed', detail = ? WHERE key = ?", (detail, reply.key))
    return "refused"


def _object(value: Mapping[str, Any], *path: str) -> dict[str, Any]:
    """The object at a path; an empty object if the path is missing."""
    for name in path:
        found = value.get(name)
        value = found if isinstance(found, dict) else {}
    return dict(value)


BACKEND = BackendKind(lambda options, key, ledger: BatchBackend(options, ledger), sends=False)
