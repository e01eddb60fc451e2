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

from tripletune.core.calls import Completion, LLMClient, Message, Sampling, UnusableReply, breaks_off
from tripletune.core.files import PROMPTS
from tripletune.llm.reply_json import without_thoughts
from tripletune.llm.reply_triples import without_cut_row

T = TypeVar("T")
REPAIR_ROLE = ".repair"
NO_TEXT = "the reply holds no text"
# Finish reasons that a repeated call would have again.
_FINAL = frozenset({"length", "max_tokens", "refusal"})
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
    parts: bool = False,
) -> T:
    """Call a model and parse its reply; if `parse` raises an `UnusableReply`, send the explanation in a repair turn.

    The `UnusableReply` of the last reply is raised. `repaired` counts the reasons of all repair turns. A reply that the
    model has not ended is unusable, or with `parts` parsed as far as it goes (see `kept_text`).
    """
    turns = list(messages)
    tried = 0
    while True:
        name = role + REPAIR_ROLE if tried else role
        completion = await client.chat(turns, role=name, sampling=sampling, question_id=question_id)
        try:
            if not completion.is_whole and not parts:
                raise UnusableReply(
                    "cut_off", f"The reply was cut off ({_finish_words(completion)}): write a shorter one."
                )
            return parse(kept_text(completion))
        except UnusableReply as error:
            error.repairs, error.reply = tried, completion.text
            if tried == repairs:
                raise
            if repaired is not None:
                repaired[error.reason] += 1
            turns = repair_turns(turns, completion.text, error.explanation)
            tried += 1


def repair_turns(messages: Sequence[Message], reply: str, explanation: str) -> list[Message]:
    """Build the chat that asks for a better reply, by the unreadable one and what is wrong with it.

    Trajectories recognise a repair by this form (`data_builders.trajectories.ledger_chats`).
    """
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


def is_reply(text: str, finish_reason: str) -> bool:
    """Whether a text is a reply or a part of one; a text that the server gave up, and one without words, is none."""
    return has_text(text) and not breaks_off(finish_reason)


def kept_text(completion: Completion) -> str:
    """The text of a reply; of one that was cut off, without a last row that the cut may have shortened."""
    if completion.is_whole:
        return completion.text
    return without_cut_row(completion.text)


def failure_of(completion: Completion) -> str:
    """Say why a reply is a failed call: it has no text, or its server gave it up; "" if it is a reply."""
    if is_reply(completion.text, completion.finish_reason):
        return ""
    if breaks_off(completion.finish_reason):
        return f"the reply broke off ({_finish_words(completion)})"
    advice = "; allow it more tokens" if completion.finish_reason == "length" else ""
    return f"{NO_TEXT} ({_finish_words(completion)}{advice})"


def would_fail_again(completion: Completion) -> bool:
    """Whether a repeated call would fail as this one did: the reply was cut at its limit, or refused."""
    return completion.finish_reason.casefold() in _FINAL


def _finish_words(completion: Completion) -> str:
    """The finish reason of a reply and what its server says went wrong, for messages."""
    words = f": {completion.error}" if completion.error else ""
    return f"finish_reason {completion.finish_reason}{words}"


def repair_digest() -> dict[str, str]:
    """SHA-256 of the repair prompt by its file, for cards."""
    return {"tripletune/prompts/models/repair.md": hashlib.sha256(_REPAIR_PROMPT.encode()).hexdigest()}
