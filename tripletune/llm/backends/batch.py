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
from typing import Any, NamedTuple

from tripletune.core.calls import (
    SENT_SINCE,
    Backend,
    CallError,
    Completion,
    Message,
    RepliesPending,
    Sampling,
    redact,
)
from tripletune.core.data.jsonl import read_jsonl
from tripletune.core.files import new_file, private
from tripletune.llm.backends import BackendKind, LLMOptions
from tripletune.llm.backends.anthropic import messages_body, read_message
from tripletune.llm.backends.openai import ACCESS, TRANSIENT, chat_body, read_chat
from tripletune.llm.ledger import FAILED, NOW, OK, PENDING, PUT, Call, Ledger, make_call, row_of, sampling_of
from tripletune.llm.replies import failure_of, is_reply, would_fail_again

REFUSED = "refused in a batch: "
# Maximum requests and bytes per file (200 and 256 MB, with a megabyte of 1,000,000 bytes).
ROOMS: Mapping[str, tuple[int, int]] = {"openai": (50_000, 200_000_000), "anthropic": (100_000, 256_000_000)}
# Errors in Anthropic's batches that the same request would cause again.
_PERMANENT = frozenset({"invalid_request_error", "not_found_error", "request_too_large"})


class BatchBackend(Backend):
    """Collect calls and write them to request files; no call is answered at once.

    Its ledger name and its meaning of "auto" are those of `OpenAIBackend` or `AnthropicBackend`, so that both backends
    share replies.

    Args:
        room: Maximum requests and bytes per file; by default those that the provider accepts.
    """

    def __init__(self, options: LLMOptions, ledger: Ledger | None, room: tuple[int, int] | None = None) -> None:
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
        status, detail = self._ledger.state(call.key) or ("", "")
        if status == FAILED and detail.startswith(REFUSED):
            raise CallError(detail)
        if status != PENDING:
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
        """Write pending calls to request files."""
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
            lines = ((row_id, self._line(key, sampling, messages)) for row_id, key, sampling, messages in rows)
            for file, ids in list(_write_files(lines, names, self._room)):
                connection.execute(
                    f"INSERT INTO batches (file, requests, time) VALUES (?, ?, {NOW})", (str(file), len(ids))
                )
                rows_of_file = [(str(file), row_id) for row_id in ids]
                connection.executemany("UPDATE calls SET detail = ? WHERE id = ?", rows_of_file)
                self._new_files.add(str(file))

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

    def _line(self, key: str, sampling: str, messages: str) -> bytes:
        """The line of a request file for a call of the ledger."""
        body = self._body(json.loads(messages), sampling_of(sampling))
        if self.layout == "openai":
            request = {"custom_id": key, "method": "POST", "url": "/v1/chat/completions", "body": body}
        else:
            request = {"custom_id": key, "params": body}
        return json.dumps(request, ensure_ascii=False).encode("utf-8") + b"\n"


def _write_files(
    lines: Iterator[tuple[int, bytes]], names: Iterator[Path], room: tuple[int, int]
) -> Iterator[tuple[Path, list[int]]]:
    """Write lines with row ids to as few files as `room` allows; yield each file with its ids.

    One line is read ahead, because only the next line shows that a file is full, and it then begins the next one.
    """
    most_requests, most_bytes = room
    line = next(lines, None)
    while line is not None:
        path = next(names)
        ids: list[int] = []
        size = 0
        with new_file(path) as scratch, open(scratch, "wb", opener=private) as file:
            while line is not None:
                row_id, request = line
                is_full = len(ids) == most_requests or size + len(request) > most_bytes
                # A request larger than a file may be gets a file of its own, and the provider reports the error.
                if ids and is_full:
                    break
                file.write(request)
                ids.append(row_id)
                size += len(request)
                line = next(lines, None)
        yield path, ids


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


class BatchReply(NamedTuple):
    """One line of a reply file.

    Attributes:
        key: The call's key in the ledger.
        completion: The reply; None if the call failed.
        reason: Why the call failed; "" with a reply.
        refused: Whether the same request would fail again.
    """

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
    """Read one line of a reply file in either layout, or raise a `ValueError`.

    A reply that would fail again the same way is marked as refused: it is not asked for again until the user says so.
    """
    key = line.get("custom_id")
    if not isinstance(key, str):
        raise ValueError("not a reply of a batch: the line has no custom_id")
    if "result" in line:
        outcome = _anthropic_outcome(_object(line, "result"))
    elif "response" in line or "error" in line:
        outcome = _openai_outcome(line)
    else:
        raise ValueError("not a reply of a batch: the line has no response, error or result (is this a request file?)")
    if outcome.fault:
        return BatchReply(key, None, _quoted(outcome.fault), outcome.refused)
    completion = outcome.completion
    if completion is None:
        return BatchReply(key, None, "a response without a reply")
    failure = failure_of(completion)
    if failure:
        return BatchReply(key, None, _quoted(failure), refused=would_fail_again(completion))
    return BatchReply(key, completion)


class _Outcome(NamedTuple):
    """What a provider says about one request.

    Attributes:
        completion: The reply, if there is one.
        fault: Why the request failed; "" if it succeeded.
        refused: Whether the same request would fail again.
    """

    completion: Completion | None
    fault: str = ""
    refused: bool = False


def _anthropic_outcome(result: Mapping[str, Any]) -> _Outcome:
    """The outcome of a line in Anthropic's layout, whose `type` says how the request ended."""
    completion = read_message(_object(result, "message"))
    if result.get("type") == "succeeded":
        return _Outcome(completion)
    error = _object(result, "error", "error") or _object(result, "error")
    kind = str(error.get("type") or result.get("type") or "error")
    return _Outcome(completion, f"{kind}: {error.get('message') or 'no words'}", kind in _PERMANENT)


def _openai_outcome(line: Mapping[str, Any]) -> _Outcome:
    """The outcome of a line in OpenAI's layout, which many servers write each in their own way.

    Only a status of the request itself means that it would fail again; without a status it is sent again.
    """
    response = _object(line, "response")
    status = response.get("status_code")
    body = _object(response, "body")
    completion = read_chat(body)
    if status == 200 and not line.get("error"):
        return _Outcome(completion)
    error = _object(line, "error") or _object(body, "error")
    if not error:
        # Some servers put the message beside "error" (vLLM), or make "error" a text.
        error = {"code": body.get("code"), "message": _loose_message(line) or _loose_message(body)}
    kind = str(error.get("code") or status or "error")
    # After a rejected key or missing rights, the request itself can be sent again.
    is_refused = type(status) is int and 400 <= status < 500 and status not in TRANSIENT | (ACCESS - {404})
    return _Outcome(completion, f"{kind}: {error.get('message') or 'no words'}", is_refused)


def _loose_message(fields: Mapping[str, Any]) -> str | None:
    """The first text among the fields in which servers put the message of an error; None if there is none."""
    for name in ("error", "message", "detail"):
        text = fields.get(name)
        if isinstance(text, str):
            return text
    return None


def _quoted(text: str) -> str:
    """A provider's words on one line, without keys, cut to 500 characters."""
    return redact(" ".join(text.split()))[:500]


def _store(connection: sqlite3.Connection, reply: BatchReply, ledger: Path) -> str:
    """Put a reply into the ledger; returns the name of its count (`import_replies`).

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


def _object(value: Mapping[str, Any], *path: str) -> dict[str, Any]:
    """The object at a path; an empty object if the path is missing, as in the errors of some providers."""
    for name in path:
        inner = value.get(name)
        value = inner if isinstance(inner, dict) else {}
    return dict(value)


BACKEND = BackendKind(lambda options, key, ledger: BatchBackend(options, ledger), sends=False)
