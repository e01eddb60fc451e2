"""Reply files of the Batch APIs: what each line says, and putting it into the ledger.

A file is imported as a whole or not at all, and once: a second import of the same file changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tripletune.models.llm.backends.anthropic import REASONS
from tripletune.models.llm.backends.api import TRANSIENT, count, redact
from tripletune.models.llm.backends.batch import REFUSED
from tripletune.models.llm.ledger import OK, PENDING, PUT, Call, Ledger, now, row_of
from tripletune.models.local.generation import Completion

# Errors of Anthropic's batches that the same request meets again.
PERMANENT = frozenset({"invalid_request_error", "not_found_error", "request_too_large"})
# A key that was refused, or rights that were missing: the request itself is fine.
_ACCESS = frozenset({401, 402, 403})


class BatchReply(NamedTuple):
    """One line of a reply file.

    Attributes:
        key: The call's key.
        completion: The reply, or `None`.
        reason: Why there is none.
        refused: Whether the same request would fail again.
    """

    key: str
    completion: Completion | None
    reason: str = ""
    refused: bool = False


@dataclass
class ImportCounts:
    """What an import did.

    Attributes:
        stored: Replies that are new.
        known: Lines for calls that were answered before.
        again: Calls that failed for now (errors of the provider, expired, canceled): the next run writes them again.
        refused: Calls that the provider refuses: they fail until `reset`.
        unknown: Lines for calls that the ledger does not have.
        repeated: Whether this file was imported before, so that nothing was done.
    """

    stored: int = 0
    known: int = 0
    again: int = 0
    refused: int = 0
    unknown: int = 0
    repeated: bool = False


def import_replies(ledger: Ledger, path: str | Path) -> ImportCounts:
    """Put a provider's reply or error file into the ledger.

    Args:
        ledger: The ledger that the requests were written from.
        path: JSON lines in either provider's layout.

    Returns:
        What was done.

    Raises:
        ValueError: a line can't be read, or no line belongs to this ledger; then nothing was imported.
    """
    path = Path(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "blake2b").hexdigest()[:40]

    def run(connection: sqlite3.Connection) -> ImportCounts:
        counts = ImportCounts()
        if connection.execute("SELECT 1 FROM imports WHERE digest = ?", (digest,)).fetchone():
            counts.repeated = True
            return counts
        total = 0
        for reply in read_replies(path):
            _store(connection, reply, counts, ledger.path)
            total += 1
        if not total:
            raise ValueError(f"{path} holds no reply: the file is empty")
        if total == counts.unknown:
            raise ValueError(
                f"{path}: none of its {total} replies belongs to a call of {ledger.path}; is it the right ledger?"
            )
        connection.execute("INSERT INTO imports (digest, replies, time) VALUES (?, ?, ?)", (digest, total, now()))
        return counts

    return ledger.transact(run)


def read_replies(path: Path) -> Iterator[BatchReply]:
    """The lines of a reply file.

    Raises:
        ValueError: a line is no reply of either layout; the message names it.
    """
    with path.open(encoding="utf-8", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield read_reply(json.loads(line))
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}. Nothing was imported") from None


def read_reply(line: Any) -> BatchReply:
    """Read one line of either layout.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(line, dict) or not isinstance(line.get("custom_id"), str):
        raise ValueError("it is not a reply of a batch: there is no custom_id")
    key = line["custom_id"]
    if isinstance(line.get("result"), dict):
        return _anthropic(key, line["result"])
    if "response" in line or "error" in line:
        return _openai(key, line)
    raise ValueError("it is not a reply of a batch: there is no response, error or result (is it a request file?)")


def _openai(key: str, line: dict[str, Any]) -> BatchReply:
    response, error = _object(line.get("response")), _object(line.get("error"))
    status, body = response.get("status_code"), _object(response.get("body"))
    if error or status != 200:
        found = error or _object(body.get("error"))
        reason = f"{found.get('code') or status or 'error'}: {found.get('message') or 'no words'}"
        refused = isinstance(status, int) and 400 <= status < 500 and status not in TRANSIENT | _ACCESS
        return BatchReply(key, None, _short(reason), refused)
    choices = body.get("choices")
    choice = _object(choices[0]) if isinstance(choices, list) and choices else {}
    message = choice.get("message")
    if not isinstance(message, dict):
        return BatchReply(key, None, "a reply without choices")
    text, usage = message.get("content"), _object(body.get("usage"))
    finish_reason = str(choice.get("finish_reason") or "stop")
    if message.get("refusal") and not text:
        finish_reason = "refusal"
    return _answered(key, text, count(usage, "prompt_tokens"), count(usage, "completion_tokens"), finish_reason)


def _anthropic(key: str, result: dict[str, Any]) -> BatchReply:
    if result.get("type") != "succeeded":
        error = _object(_object(result.get("error")).get("error")) or _object(result.get("error"))
        reason = ": ".join(str(error[name]) for name in ("type", "message") if error.get(name))
        return BatchReply(
            key, None, _short(reason or str(result.get("type") or "")), str(error.get("type")) in PERMANENT
        )
    message = _object(result.get("message"))
    blocks = message.get("content")
    if not isinstance(blocks, list):
        return BatchReply(key, None, "a reply without content")
    text = "".join(str(b.get("text") or "") for b in blocks if isinstance(b, dict) and b.get("type") == "text")
    usage, stop = _object(message.get("usage")), str(message.get("stop_reason") or "end_turn")
    prompt = count(usage, "input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return _answered(key, text, prompt, count(usage, "output_tokens"), REASONS.get(stop, stop))


def _answered(key: str, text: Any, prompt_tokens: int, completion_tokens: int, finish_reason: str) -> BatchReply:
    found = text if isinstance(text, str) else ""
    clean = found.encode("utf-8", "replace").decode("utf-8")
    return BatchReply(key, Completion(clean, prompt_tokens, completion_tokens, finish_reason=finish_reason))


def _store(connection: sqlite3.Connection, reply: BatchReply, counts: ImportCounts, ledger: Path) -> None:
    row = connection.execute(
        "SELECT model, sampling, messages, status FROM calls WHERE key = ?", (reply.key,)
    ).fetchone()
    if row is None:
        counts.unknown += 1
    elif row[3] == OK:
        counts.known += 1
    elif reply.completion is not None:
        connection.execute(PUT, row_of(Call(reply.key, *row[:3]), reply.completion))
        counts.stored += 1
    elif row[3] == PENDING and reply.refused:
        advice = f"`tripletune batch reset --ledger {ledger} --refused` lets it be sent again"
        detail = f"{REFUSED}{reply.reason}; {advice}"
        connection.execute("UPDATE calls SET status = 'failed', detail = ? WHERE key = ?", (detail, reply.key))
        counts.refused += 1
    elif row[3] == PENDING:
        connection.execute("UPDATE calls SET detail = '' WHERE key = ?", (reply.key,))
        counts.again += 1
    else:
        counts.refused += 1


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _short(text: str) -> str:
    return redact(" ".join(text.encode("utf-8", "replace").decode("utf-8").split()))[:500] or "no words"
