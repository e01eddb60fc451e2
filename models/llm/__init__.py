"""Interfaces of model calls; a `Completion` is the answer.

Loops and builders call an `LLMClient`, loops with graphs a `Generator`. Both call a `Backend`, which talks to one
model, through `models.llm.ledger_client`: cache, limits, retries.

"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from tripletune.models.data.records import ModelInput, whole_characters

_KEY_SHAPE = re.compile(r"\bsk-[A-Za-z0-9_*.-]{4,}|(?<=[Bb]earer )[^\s\"']+|(?<=//)[^\s/@]+(?=@)")

# The role of the call under way, for the few backends that reply by it, such as an oracle.
CALL_ROLE: ContextVar[str] = ContextVar("role", default="")
# Message of the cancellation of a call that took too long; one that nobody waits for any more is cancelled without.
TIMED_OUT = "timed out"


class Message(TypedDict):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a reply is drawn; part of the ledger's key.

    Attributes:
        temperature: 0 is greedy.
        seed: For servers that take one. Replies to the same messages under two seeds are two calls.
        schema: A JSON schema, as JSON text, for servers that enforce one.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 512
    seed: int | None = None
    schema: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The settings as keys of ledgers and triple stores have them.

        To keep earlier keys, newer fields are left out at their default, and "stop" of earlier versions stays.
        """
        # 0 and 0.0 are the same temperature and must be the same text.
        found = {"temperature": float(self.temperature), "top_p": float(self.top_p), "max_tokens": self.max_tokens}
        later = {} if self.schema is None else {"schema": self.schema}
        return {**found, "stop": [], "seed": self.seed, **later}


class Endpoint:
    """The common part of backends and clients.

    Attributes:
        behind: What this one calls, the usual one first; it passes on what is asked of it, and closes them.
        model: Its name in the ledger's keys, for example "openai:gpt-4o-mini", without secrets.
        send_temperature: Whether replies are drawn as `Sampling` says, not with a provider's settings.
        address: Where the model's server is; "" for one on this machine.
        may_be_silent: Whether a reply may be empty, as from a model on this machine.
    """

    behind: Sequence[Endpoint] = ()
    model: str
    send_temperature: bool = True
    address: str = ""
    may_be_silent: bool = False

    def load(self) -> None:
        """Load a model on this machine now; otherwise the first call does."""
        for one in self.behind:
            one.load()

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """Tokens of a chat as the model reads it."""
        if self.behind:
            return self.behind[0].count_tokens(messages)
        raise ValueError(
            f"max_prompt_tokens is set, and the tokens of {self.model} can't be counted here: leave it out, or name a "
            "local model with --integrator"
        )

    def pending_message(self) -> str | None:
        """Advice for the end of a run on calls that wait for a batch; None when none waits."""
        return " ".join(filter(None, (one.pending_message() for one in self.behind))) or None

    async def close(self) -> None:
        """Wait for pending writes, then release connections and threads."""
        await asyncio.gather(*(one.close() for one in self.behind))


class Backend(Endpoint):
    """One model, one attempt: no cache, no retry, no limit."""

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Reply to a chat, or raise a `TransientError` or a `CallError`."""
        raise NotImplementedError


class LLMClient(Endpoint):
    """The client of loops and builders."""

    async def chat(
        self, messages: Sequence[Message], *, role: str, sampling: Sampling | None = None, question_id: str = ""
    ) -> Completion:
        """Reply to a chat, from the ledger if the same call was answered before.

        Args:
            messages: The chat; its last turn is the user's.
            role: The call's purpose, for example "subq.filter"; accounting and trajectories group by it.
            sampling: `None`: greedy, at most 512 tokens.
            question_id: The question it belongs to, for trajectories.
        """
        raise NotImplementedError


class CallError(RuntimeError):
    """A call that another attempt will not answer (refused key, unknown model); the message says what to do."""

    exit_code = 1


class PromptTooLong(CallError):
    """A prompt with more tokens than the model or its server takes."""


class SetupError(CallError):
    """Key, account, address, model name or a setting is wrong, so every call would fail."""


class TransientError(RuntimeError):
    """A call that failed for now (429, 5xx, time-out); `retry_after` is the server's requested wait in seconds."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RepliesPending(RuntimeError):
    """A call that waits for a batch file to be answered."""

    exit_code = 3


def ledger_name(kind: str, model: str, extra: Mapping[str, Any] | None, dtype: str | None = None) -> str:
    """A model's name in the ledger: kind, name, request fields that change its replies, and a type but float32."""
    extra = {**(extra or {}), **({"dtype": dtype} if dtype not in (None, "float32") else {})}
    settings = json.dumps(dict(extra), sort_keys=True, ensure_ascii=False, separators=(",", ":")) if extra else ""
    return f"{kind}:{model}{' ' + settings if settings else ''}"


def redact(text: str, secrets: Sequence[str] = ()) -> str:
    """A text with `***` for the given secrets and whatever looks like a key or password."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "***")
    return _KEY_SHAPE.sub("***", text)


@dataclass(frozen=True, slots=True)
class Completion:
    """A model's reply and what it cost.

    Attributes:
        text: The reply without end-of-sequence text; an unpaired surrogate, which no file can hold, is replaced.
        prompt_tokens: Tokens read, the graph token included.
        seconds: Wall-clock seconds of the call; of a batch, its share.
        truncated_triples: Left out so that the prompt fits, as are `truncated_words` of raw text.
        finish_reason: "stop" when the model ended its reply, "length" when it was cut off.
        retries: Attempts that failed before this one.
        cached: Whether it came from the ledger, so that nothing was paid for it now.
        key: The call's key in the ledger; "" without one.
        cache_read: Prompt tokens that the provider read from its cache; `cache_written`: those it put there. They have
            other prices.
    """

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    truncated_triples: int = 0
    finish_reason: str = "stop"
    retries: int = 0
    cached: bool = False
    truncated_words: int = 0
    key: str = ""
    cache_read: int = 0
    cache_written: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", whole_characters(self.text))


def in_role(values: Mapping[str, Any], role: str, default: Any = None) -> Any:
    """The value of the longest name that is the role or a dotted prefix of it: "cirag", "cirag.integrate"."""
    names = [name for name in values if f"{role}.".startswith(f"{name}.")]
    return values[max(names, key=len)] if names else default


class RoleClients(LLMClient):
    """An `LLMClient` that gives the calls of some roles, see `in_role`, to their own clients."""

    def __init__(self, default: LLMClient, roles: Mapping[str, LLMClient]) -> None:
        self.model, self.default, self.roles = default.model, default, dict(roles)
        self.behind, self.send_temperature = (default, *roles.values()), default.send_temperature

    async def chat(
        self, messages: Sequence[Message], *, role: str, sampling: Sampling | None = None, question_id: str = ""
    ) -> Completion:
        """Reply to a chat; see `LLMClient.chat`."""
        client: LLMClient = in_role(self.roles, role, self.default)
        return await client.chat(messages, role=role, sampling=sampling, question_id=question_id)


class Generator(Endpoint):
    """Anything that plans and answers: a Graph-LLM, a chat model with prompts, a script in tests."""

    async def generate(self, sample: ModelInput, max_new_tokens: int, evidence: str | None = None) -> Completion:
        """Reply to one input; without `evidence` ("triples" or "text") by the model's own setting."""
        raise NotImplementedError
