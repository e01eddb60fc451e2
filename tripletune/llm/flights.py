"""A call of the ledger client in progress: who waits for it, its attempts so far, and the tokens that these cost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tripletune.core.calls import Completion, Message, Sampling
from tripletune.llm.ledger import Call


def with_tokens_of(reply: Completion, other: Completion | None) -> Completion:
    """A reply with the tokens of another one added, which was paid for as well."""
    if other is None:
        return reply
    return replace(
        reply,
        prompt_tokens=reply.prompt_tokens + other.prompt_tokens,
        completion_tokens=reply.completion_tokens + other.completion_tokens,
    )


class AskedCall(NamedTuple):
    """A call, for whom it is made, and its messages and sampling as they were asked for.

    Attributes:
        role: The role in a loop or builder, such as "t2rag.resolve".
        question_id: The question that the call is for; "" if it is for none.
    """

    call: Call
    messages: Sequence[Message]
    sampling: Sampling
    role: str
    question_id: str


class Flight:
    """A call in progress.

    Attributes:
        task: The task that makes the call.
        waiting: Number of callers that wait for the reply.
        sent: When the current attempt was sent (`time.perf_counter`); 0 if it was not sent yet.
    """

    task: asyncio.Task[Completion]
    waiting = 0
    sent = 0.0


@dataclass
class Attempts:
    """The attempts at one call so far.

    Attributes:
        count: Number of attempts.
        failed: Number of replies without text, or that broke off.
        unusable: The last of these replies, with the tokens of all of them; None if there is none.
    """

    count: int = 0
    failed: int = 0
    unusable: Completion | None = None
