"""A script instead of a provider of batches."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def answer_batch(requests: Path, replies: Path, reply: Callable[[dict[str, Any]], str]) -> int:
    """Answer a request file in the layout of OpenAI's Batch API; `reply` gets the body of each request."""
    lines = []
    for line in requests.read_text(encoding="utf-8").splitlines():
        request = json.loads(line)
        message = {"role": "assistant", "content": reply(request["body"])}
        body = {
            "choices": [{"message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1},
        }
        row = {"custom_id": request["custom_id"], "response": {"status_code": 200, "body": body}, "error": None}
        lines.append(json.dumps(row) + "\n")
    replies.write_text("".join(lines), encoding="utf-8")
    return len(lines)
