"""Read the reply files of Batch APIs, in the layouts of OpenAI and Anthropic; see `backends.batch`.

Tested in `tests/llm/backends/test_batch.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tripletune.core.calls import Completion, redact
from tripletune.llm.backends._responses import read_chat
from tripletune.llm.backends.anthropic import read_message
from tripletune.llm.backends.openai import ACCESS, TRANSIENT
from tripletune.llm.replies import failure_of, would_fail_again

# Errors in Anthropic's batches that the same request would cause again.
_PERMANENT = frozenset({"invalid_request_error", "not_found_error", "request_too_large"})


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


def batch_reply(line: Mapping[str, Any]) -> BatchReply:
    """Read one line of a reply file in either layout, or raise a `ValueError`.

    A reply that would fail again the same way is marked as refused: it is not asked for again until the user says so.
    """
    key = line.get("custom_id")
    if not isinstance(key, str):
        raise ValueError("not a reply of a batch: the line has no custom_id")
    if "result" in line:
        outcome = _anthropic_outcome(_object_at(line, "result"))
    elif "response" in line or "error" in line:
        outcome = _openai_outcome(line)
    else:
        raise ValueError("not a reply of a batch: the line has no response, error or result (is this a request file?)")
    if outcome.fault:
        return BatchReply(key, None, _short_quote(outcome.fault), outcome.refused)
    completion = outcome.completion
    if completion is None:
        return BatchReply(key, None, "a response without a reply")
    failure = failure_of(completion)
    if failure:
        return BatchReply(key, None, _short_quote(failure), refused=would_fail_again(completion))
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
    completion = read_message(_object_at(result, "message"))
    if result.get("type") == "succeeded":
        return _Outcome(completion)
    error = _object_at(result, "error", "error") or _object_at(result, "error")
    kind = str(error.get("type") or result.get("type") or "error")
    return _Outcome(completion, f"{kind}: {error.get('message') or 'no words'}", kind in _PERMANENT)


def _openai_outcome(line: Mapping[str, Any]) -> _Outcome:
    """The outcome of a line in OpenAI's layout, which many servers write each in their own way.

    Only a status of the request itself means that it would fail again; without a status it is sent again.
    """
    response = _object_at(line, "response")
    status = response.get("status_code")
    body = _object_at(response, "body")
    completion = read_chat(body)
    if status == 200 and not line.get("error"):
        return _Outcome(completion)
    error = _object_at(line, "error") or _object_at(body, "error")
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


def _short_quote(text: str) -> str:
    """A provider's words on one line, without keys, cut to 500 characters."""
    return redact(" ".join(text.split()))[:500]


def _object_at(value: Mapping[str, Any], *path: str) -> dict[str, Any]:
    """The object at a path; an empty object if the path is missing, as in the errors of some providers."""
    for name in path:
        inner = value.get(name)
        value = inner if isinstance(inner, dict) else {}
    return dict(value)
