"""Interfaces of model calls; every call returns a `Completion`.

Loops and builders call an `LLMClient`; loops with graphs call a `Generator`. Both of them call a `Backend`, which calls
one model. `llm.ledger_client` adds cache, limits and retries.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar

from tripletune.core.data.jsonl import whole_characters
from tripletune.core.data.records import ModelInput

T = TypeVar("T")
_KEY_SHAPE = re.compile(r"\bsk-[A-Za-z0-9_*.-]{4,}|(?<=[Bb]earer )[^\s\"']+|(?<=//)[^\s/@]+(?=@)")

# Reasons with which a model ends its reply, as servers name them; with any other reason, the text is a part of a reply.
_ENDS = frozenset(
    {"stop", "end_turn", "stop_sequence", "eos", "eos_token", "endoftext", "complete", "completed", "finish"}
)
# Reasons with which a server gives up a reply, so that the same call may succeed later.
_BREAKS = frozenset({"error", "abort", "aborted", "cancelled", "canceled"})
# The reason of a reply whose server says that it has not ended.
UNFINISHED = "unfinished"
# The role of the current call, for the few backends whose reply depends on the role, such as an oracle.
CALL_ROLE: ContextVar[str] = ContextVar("role", default="")
# Since when replies of a Batch API count as paid for by the current run, in ISO format; "" counts all of them.
SENT_SINCE: ContextVar[str] = ContextVar("sent_since", default="")
# Seed with which the current task draws its replies at temperature 1, to see whether samples of an answer agree; None:
# replies are drawn as their client says.
SAMPLE_SEED: ContextVar[int | None] = ContextVar("sample_seed", default=None)
# The message with which a call that took too long is cancelled; other cancellations have no message.
TIMED_OUT = "timed out"


class Message(TypedDict):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a reply is sampled; part of the ledger's key.

    Attributes:
        temperature: 0 is greedy.
        seed: For servers that accept a seed. The same messages with two seeds are two calls.
        schema: A JSON schema, as JSON text, for servers that enforce a schema.
        scored: Ask for the `TokenScores` of the reply.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 512
    seed: int | None = None
    schema: str | None = None
    scored: bool = False

    def to_json(self) -> dict[str, Any]:
        """The settings as they are part of keys in ledgers and triple stores.

        So that old keys stay valid, newer fields are left out at their default, and the old field "stop" is kept.
        """
        # 0 and 0.0 are the same temperature and must be the same text.
        values = {
            "temperature": float(self.temperature),
            "top_p": float(self.top_p),
            "max_tokens": self.max_tokens,
            "stop": [],
            "seed": self.seed,
        }
        if self.schema is not None:
            values["schema"] = self.schema
        if self.scored:
            values["scored"] = True
        return values


def with_sample_seed(sampling: Sampling) -> Sampling:
    """The sampling of a call, at temperature 1 if the current task draws samples; see `SAMPLE_SEED`."""
    seed = SAMPLE_SEED.get()
    if seed is None:
        return sampling
    return replace(sampling, temperature=1.0, seed=seed)


class TokenScores(NamedTuple):
    """How sure a model was of the tokens of a reply, without the end-of-sequence token, which servers do not report.

    Attributes:
        logprob: Mean of the tokens' natural log-probabilities, at most 0.
        margin: Mean difference between the two largest log-probabilities at each token, which equals the difference
            between the two largest logits.
    """

    logprob: float
    margin: float

    @classmethod
    def of(cls, logprobs: Sequence[float], margins: Sequence[float]) -> TokenScores | None:
        """The means over the tokens of a reply; None for a reply without tokens."""
        if not logprobs or not margins:
            return None
        return cls(sum(logprobs) / len(logprobs), sum(margins) / len(margins))


class Endpoint:
    """The common base class of backends and clients.

    Attributes:
        behind: The endpoints that this endpoint calls and closes; the first of them is the default.
        model: The model's name in the ledger's keys, for example "openai:gpt-4o-mini", without secrets.
        send_temperature: Whether replies are sampled with the settings in `Sampling`, not with the provider's.
        address: Address of the model's server; "" for a model on this machine.
        enforces_schemas: Whether the model's server keeps replies to the JSON schema of a `Sampling`.
        may_be_silent: Whether an empty reply is valid, as from a model on this machine.
    """

    behind: Sequence[Endpoint] = ()
    model: str
    send_temperature: bool = True
    address: str = ""
    enforces_schemas: bool = False
    may_be_silent: bool = False

    def load(self) -> None:
        """Load a model on this machine now; otherwise the first call loads it."""
        for endpoint in self.behind:
            endpoint.load()

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """The number of tokens of a chat, as the model's template writes it.

        Raises:
            ValueError: The model is on a server, and its tokenizer is not known here.
        """
        if self.behind:
            return self.behind[0].count_tokens(messages)
        raise ValueError(
            f"max_prompt_tokens is set, but the tokens of {self.model} can't be counted here: leave out "
            "max_prompt_tokens, or name a local model with --integrator"
        )

    def pending_message(self) -> str | None:
        """Say what to do about calls that wait for a batch, at the end of a run; None if no call waits."""
        messages = [endpoint.pending_message() for endpoint in self.behind]
        return " ".join(message for message in messages if message) or None

    async def close(self) -> None:
        """Wait for pending writes, then release connections and threads."""
        # Imported here, since options and `--help` need this module, and no event loop.
        import asyncio

        await asyncio.gather(*(endpoint.close() for endpoint in self.behind))


class Backend(Endpoint):
    """One attempt to call one model, without cache, retries or limits."""

    def has_sent(self, stored: Completion, role: str, question_id: str) -> bool:
        """Whether a stored reply was paid for by this call, since it came with a file that an earlier pass wrote."""
        return False

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Reply to a chat, or raise a `TransientError` or a `CallError`."""
        raise NotImplementedError


class LLMClient(Endpoint):
    """The client for loops and builders."""

    async def chat(
        self, messages: Sequence[Message], *, role: str, sampling: Sampling | None = None, question_id: str = ""
    ) -> Completion:
        """Reply to a chat, from the ledger if the same call was answered before.

        Args:
            messages: The chat; its last turn is the user's.
            role: The call's purpose, for example "subq.filter"; accounting and trajectories group by it.
            sampling: By default greedy with at most 512 tokens.
            question_id: The question that the call belongs to, for trajectories.
        """
        raise NotImplementedError


class CallError(RuntimeError):
    """A call failed in a way that a retry cannot fix (refused key, unknown model); the message says what to do."""

    exit_code = 1


class PromptTooLong(CallError):
    """The prompt has more tokens than the model or its server accepts."""


class SetupError(CallError):
    """Key, account, address, model name or a setting is wrong, so every call would fail."""


class TransientError(RuntimeError):
    """A call failed temporarily (429, 5xx, time-out); `retry_after` is the wait in seconds that the server asks for."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RepliesPending(RuntimeError):
    """A call's reply will come with a batch file that is not answered yet."""

    exit_code = 3


class UnusableReply(ValueError):
    """A parser rejected a reply; `reason` is a short name for counts, `explanation` is sent to the model.

    `llm.replies.ask` sets the reply and the number of repair turns.
    """

    def __init__(self, reason: str, explanation: str) -> None:
        super().__init__(f"{reason}: {explanation}")
        self.reason = reason
        self.explanation = explanation
        self.repairs = 0
        self.reply = ""


def ledger_name(kind: str, model: str, extra: Mapping[str, Any] | None, dtype: str | None = None) -> str:
    """A model's name in the ledger: kind, name, request fields that change replies, and the type unless float32.

    The name of a model with nothing special stays short, as it was in the first ledgers, so that their keys stay valid.
    """
    settings = dict(extra or {})
    if dtype not in (None, "float32"):
        settings["dtype"] = dtype
    if not settings:
        return f"{kind}:{model}"
    return f"{kind}:{model} {json.dumps(settings, sort_keys=True, ensure_ascii=False, separators=(',', ':'))}"


def redact(text: str, secrets: Sequence[str] = ()) -> str:
    """Replace the given secrets, and all text that looks like a key or password, by `***`."""
    # The longest first: a secret may begin with another one.
    for secret in sorted(secrets, key=len, reverse=True):
        if secret:
            text = text.replace(secret, "***")
    return _KEY_SHAPE.sub("***", text)


def ends_reply(finish_reason: str) -> bool:
    """Whether a reply with this finish reason is whole; a part of a reply is never a label."""
    return finish_reason.casefold() in _ENDS


def breaks_off(finish_reason: str) -> bool:
    """Whether a server gave up a reply with this finish reason: the call has failed, whatever text it has."""
    return finish_reason.casefold() in _BREAKS


@dataclass(frozen=True, slots=True)
class Completion:
    """A model's reply and its cost.

    Attributes:
        text: The reply without end-of-sequence text; unpaired surrogates are replaced.
        prompt_tokens: Number of tokens in the prompt, the graph token included.
        seconds: Wall-clock seconds of the call; for a call in a batch, its share.
        truncated_triples: Triples dropped to make the prompt fit; `truncated_words` counts dropped words of raw text.
        finish_reason: "stop" if the model ended its reply, "length" if the reply was cut off at its limit, or another
            word of the server; see `is_whole`.
        error: What the server says went wrong, beside the text; "" if nothing did.
        retries: Attempts that failed before this reply.
        cached: Whether the reply came from the ledger and so cost nothing now.
        key: The call's key in the ledger; "" without a ledger.
        cache_read: Prompt tokens that the provider read from its cache, at another price.
        cache_written: Prompt tokens that the provider wrote to its cache, at another price.
        batch: Whether the reply came from a Batch API.
        scores: How sure the model was; None if it was not asked, or does not say.
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
    batch: bool = False
    error: str = ""
    scores: TokenScores | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", whole_characters(self.text))

    @property
    def is_whole(self) -> bool:
        """Whether the model ended its reply; else the text is only a part."""
        return ends_reply(self.finish_reason)


def in_role(values: Mapping[str, T], role: str, default: T) -> T:
    """The value of the longest name that is the role or its dotted prefix ("cirag" for "cirag.integrate")."""
    names = [name for name in values if f"{role}.".startswith(f"{name}.")]
    if not names:
        return default
    return values[max(names, key=len)]


class RoleClients(LLMClient):
    """An `LLMClient` that passes calls of some roles (see `in_role`) to separate clients."""

    def __init__(self, default: LLMClient, roles: Mapping[str, LLMClient]) -> None:
        self.model = default.model
        self.default = default
        self.roles = dict(roles)
        self.behind = (default, *roles.values())
        self.enforces_schemas = all(client.enforces_schemas for client in self.behind)
        self.send_temperature = default.send_temperature

    async def chat(
        self, messages: Sequence[Message], *, role: str, sampling: Sampling | None = None, question_id: str = ""
    ) -> Completion:
        """Reply to a chat; see `LLMClient.chat`."""
        client = self.of_role(role)
        return await client.chat(messages, role=role, sampling=sampling, question_id=question_id)

    def of_role(self, role: str) -> LLMClient:
        """The client to which calls of a role are passed."""
        return in_role(self.roles, role, self.default)


class Generator(Endpoint):
    """The model that plans and answers: a Graph-LLM, a chat model with prompts, or a script in tests."""

    async def generate(self, sample: ModelInput, max_new_tokens: int, evidence: str | None = None) -> Completion:
        """Reply to one input; the default of `evidence` ("triples" or "text") is the model's setting."""
        raise NotImplementedError
