"""Read the responses of servers with OpenAI's API: replies, token counts, errors and the wish to wait.

Many servers only resemble OpenAI's, so a field may be missing or of another type; what it then means is said here.

Tested in `tests/llm/backends/test_hosted.py`.
"""

from __future__ import annotations

import email.utils
import json
import math
import re
import time
from collections.abc import Mapping
from typing import Any

from tripletune.core.calls import UNFINISHED, Completion
from tripletune.llm.token_scores import scores_in

# Characters of a server's words in a message.
LONGEST_QUOTE = 500


def read_chat(body: Mapping[str, Any]) -> Completion | None:
    """Read the reply from the body of a completion, of a chat or a prompt; None if the body has no reply.

    Batch files hold the same bodies. Text beside an error is kept, but `finish_reason` is then "error", and the client
    treats the call as failed.
    """
    try:
        choice = body["choices"][0]
        if "message" in choice:
            message = choice["message"]
        else:
            # The completion of a prompt.
            message = {"content": choice["text"]}
        text = message.get("content")
        refusal = message.get("refusal")
    except (KeyError, IndexError, TypeError, AttributeError):
        return None
    if isinstance(text, list):  # some servers send the text in several objects
        text = "".join(str(item.get("text") or "") for item in text if isinstance(item, dict))
    if not isinstance(text, str):
        text = ""
    finish_reason = finish_reason_of(choice, "finish_reason", "stop")
    if refusal and not text:
        finish_reason = "refusal"
    error = error_beside(choice, message, body)
    if error:
        finish_reason = "error"
    usage = body.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    return Completion(
        text=text,
        prompt_tokens=sum_of_counts(usage, "prompt_tokens"),
        completion_tokens=sum_of_counts(usage, "completion_tokens"),
        cache_read=sum_of_counts(details, "cached_tokens") or sum_of_counts(usage, "prompt_cache_hit_tokens"),
        cache_written=sum_of_counts(details, "cache_creation_tokens", "cache_write_tokens"),
        finish_reason=finish_reason,
        error=error,
        scores=scores_in(choice.get("logprobs")),
    )


def finish_reason_of(fields: Mapping[str, Any], name: str, usual: str) -> str:
    """The finish reason in a field, `usual` where a server has no such field; null stands for half a stream."""
    return str(fields.get(name, usual) or UNFINISHED)


def error_beside(*places: object) -> str:
    """What a server says went wrong in a field "error" beside a text, on one line; "" if nothing did.

    A server that fails while it writes may answer with status 200, the text so far and such a field. Without a look at
    it the text would count as the whole reply.

    Args:
        places: The objects of a response that may have the field, the innermost first, since it says most. Values of
            other types have none: a server decides what it sends.
    """
    for place in places:
        error = place.get("error") if isinstance(place, dict) else None
        if isinstance(error, dict):
            # OpenAI's form; other servers send the text itself.
            error = error.get("message") or error
        if error:
            return " ".join(str(error).split())[:LONGEST_QUOTE]
    return ""


def sum_of_counts(usage: object, *names: str) -> int:
    """The sum of the token counts under some names, which may be integers, floats or texts; other values count as 0.

    Servers differ in what they send: `usage` is any JSON value, and only an object has counts.
    """
    if not isinstance(usage, dict):
        return 0
    total = 0
    for name in names:
        value = str(usage.get(name))
        if re.fullmatch(r"\d{1,15}(\.\d*)?", value):
            total += int(float(value))
    return total


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Read the seconds to wait from `retry-after-ms`, or `retry-after` (seconds or a date); None if both are absent.

    The header in milliseconds is exacter, so it comes first. What cannot be read, is negative or has no end counts as
    absent: the caller then waits as after an error without a header.
    """
    for name, scale in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        text = headers.get(name, "")
        try:
            seconds = float(text) / scale
        except ValueError:
            try:
                seconds = max(email.utils.parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
            except (ValueError, TypeError, OverflowError, OSError):
                continue
        if 0 <= seconds < math.inf:
            return seconds
    return None


def json_or_none(content: bytes) -> Any:
    """The JSON of a response; None if it is not JSON."""
    try:
        return json.loads(content)
    except ValueError:
        return None
