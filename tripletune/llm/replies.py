"""Ask for a better reply in repair turns; replies without text.

A repair turn is a chat with the bad reply and its fault. It is a separate call in the ledger, with `.repair` at the end
of its role.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from tripletune.core.calls import Completion, LLMClient, Message, Sampling, UnusableReply
from tripletune.core.files import PROMPTS
from tripletune.llm.reply_json import without_thoughts

T = TypeVar("T")
REPAIR_ROLE = ".repair"
NO_TEXT = "the reply holds no text"
# Finish reasons that a repeated call would have again.
FINAL = ("length", "refusal")
_REPAIR_PROMPT = (PROMPTS / "models" / "repair.md").read_text(encoding="utf-8").strip()


async def ask(
    client: LLMClient,
    messages: Sequence[Message],
    parse: Callable[[str], T],
    *,
    role: str,
    sampling: Sampling | None = None,
    question_id: str = "",
    repairs: int = 1,
    repaired: Counter[str] | None = None,
) -> T:
    """Call a model and parse its reply; if `parse` raises an `UnusableReply`, send the explanation in a repair turn.

    The `UnusableReply` of the last reply is raised. `repaired` counts the reasons of all repair turns.
    """
    turns = list(messages)
    tried = 0
    while True:
        name = role + REPAIR_ROLE if tried else role
        completion = await client.chat(turns, role=name, sampling=sampling, question_id=question_id)
        try:
            return parse(completion.text)
        except UnusableReply as error:
            error.repairs, error.reply = tried, completion.text
            if tried == repairs:
                raise
            if repaired is not None:
                repaired[error.reason] += 1
            turns = repair_turns(turns, completion.text, error.explanation)
            tried += 1


def repair_turns(messages: Sequence[Message], reply: str, explanation: str) -> list[Message]:
    """Build the chat that asks for a better reply."""
    request = _REPAIR_PROMPT.replace("{explanation}", explanation)
    if reply.strip():
        return [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": request}]
    # No service accepts an empty turn, and some chat templates reject two user turns in a row.
    last = messages[-1]
    return [*messages[:-1], {"role": last["role"], "content": f"{last['content']}\n\n{request}"}]


def has_text(reply: str) -> bool:
    """Whether a reply has text besides white space and thoughts."""
    tail = re.split("</think(?:ing)?>", reply)[-1]
    # Thoughts are long, so check only the text after the last closing tag if no thought begins there.
    if "<think" not in tail and tail.strip():
        return True
    return bool(without_thoughts(reply).strip())


def silence(completion: Completion) -> str:
    """Say why a reply without text is a failed call; "" if the reply has text."""
    if has_text(completion.text):
        return ""
    advice = "; allow it more tokens" if completion.finish_reason == "length" else ""
    return f"{NO_TEXT} (finish_reason {completion.finish_reason}{advice})"


def repair_digest() -> dict[str, str]:
    """SHA-256 of the repair prompt by its file, for cards."""
    return {"tripletune/prompts/models/repair.md": hashlib.sha256(_REPAIR_PROMPT.encode()).hexdigest()}
