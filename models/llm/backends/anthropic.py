"""Anthropic's Messages API through its SDK, with prompt caching where it saves money.

The provider stores the part of a prompt up to a mark: writing costs a quarter more than reading it plainly, reading
it again within five minutes costs a tenth (https://platform.claude.com/docs/en/build-with-claude/prompt-caching).
So the system prompt, the part that a builder's calls share, is marked from its second call on: a system prompt
that never comes again is never paid for twice. Below a length that depends on the model (512 to 4,096 tokens) the
provider ignores the mark, at no cost.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tripletune.models.llm.backends.api import (
    Connection,
    count,
    find_server,
    import_sdk,
    ledger_name,
    sampling_fields,
    split_system,
)
from tripletune.models.llm.client import CallError, Message, Sampling, TransientError
from tripletune.models.local.generation import Completion

logger = logging.getLogger(__name__)
DEFAULT_URL = "https://api.anthropic.com"
KEY_VARIABLE = "ANTHROPIC_API_KEY"
# 512 tokens, the lowest of the models' limits, are hardly less than this many bytes in any script.
SMALLEST_CACHED = 1536
REMEMBERED = 4096
# The API version that still takes temperature and top_p (the SDK's own does from 2.0 on not).
SAMPLING_VERSION = "2023-06-01"
REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
}
HINTS: dict[int | str, str] = {
    "temperature": "this model draws with its own settings: set the backend's send_temperature=False",
    "top_p": "this model draws with its own settings: set the backend's send_temperature=False",
    "prompt is too long": "shorten the prompt: it does not fit the model",
    "max_tokens": "max_tokens is more than this model writes: lower it",
    401: f"check the key ({KEY_VARIABLE})",
    402: "the account has no credit left: add some, then start again; what was answered is not asked again",
    403: "this key may not use this model: check its rights and the model's name",
    404: "check the model's name, and that the url is the base URL without /v1",
    413: "the request is too large: shorten the prompt",
}


class AnthropicBackend:
    """Messages through Anthropic's SDK; one attempt a call.

    Args:
        model: The provider's name of the model.
        url: The server's base URL, without /v1; `None` means `ANTHROPIC_BASE_URL`, else Anthropic's own.
        api_key: The key; `None` means `ANTHROPIC_API_KEY`, but only without `url`.
        timeout: Seconds for one attempt.
        cache_system: Whether a long system prompt that comes again is marked for the provider's cache.
        send_temperature: Whether temperature and top_p (if below 1) are sent, over the API version that takes them.
            The newest API version and models refuse both, so by default they draw with their own settings, also
            where the loops and builders ask for greedy replies.
        extra: More fields of the request body, for example {"thinking": {"type": "disabled"}}. They change replies, so
            they are part of the ledger's name.

    Attributes:
        model: "anthropic:<model>" and the extra fields.

    Raises:
        ValueError: an option makes no sense, the key is missing, or the SDK is not installed.
    """

    def __init__(
        self,
        model: str,
        url: str | None = None,
        api_key: str | None = None,
        timeout: float = 120.0,
        cache_system: bool = True,
        send_temperature: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        if not model:
            raise ValueError("model: it must be the provider's name of the model")
        sdk = import_sdk("anthropic")
        variables = ("ANTHROPIC_BASE_URL", KEY_VARIABLE)
        address, api_key, _ = find_server(url, api_key, DEFAULT_URL, variables, ("anthropic.com",))
        self.model = ledger_name("anthropic", model, extra)
        self.name = model
        self.cache_system = cache_system
        self.send_temperature = send_temperature
        self._extra = dict(extra or {})
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        headers = {"anthropic-version": SAMPLING_VERSION} if send_temperature else {}
        self._connection = Connection(sdk, "AsyncAnthropic", address, api_key, timeout, HINTS, headers)
        if not send_temperature:
            logger.info("%s: temperature is not sent; replies are drawn with the provider's settings", self.model)

    def __repr__(self) -> str:
        return f"AnthropicBackend({self.model!r}, host={self._connection.address.host!r})"

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Reply to a chat; see `models.llm.client.Backend`. The seed is not sent: the provider takes none."""
        body = messages_body(
            self.name, messages, sampling, self.send_temperature, self._extra,
            lambda system: self.cache_system and self._comes_again(system),
        )  # fmt: skip
        start = time.perf_counter()
        found = await self._connection.post("/v1/messages", body)
        seconds = time.perf_counter() - start
        blocks = found.get("content")
        if not isinstance(blocks, list):
            raise TransientError(f"{self._connection.address.host} sent a reply without content")
        texts = [str(b.get("text") or "") for b in blocks if isinstance(b, dict) and b.get("type") == "text"]
        usage = found.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        reason = str(found.get("stop_reason") or "end_turn")
        return Completion(
            text="".join(texts),
            # `input_tokens` leaves out what was written to or read from the cache.
            prompt_tokens=count(usage, "input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"),
            completion_tokens=count(usage, "output_tokens"),
            seconds=seconds,
            finish_reason=REASONS.get(reason, reason),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._connection.close()

    def _comes_again(self, system: str) -> bool:
        data = system.encode()
        if len(data) < SMALLEST_CACHED:
            return False
        digest = hashlib.sha256(data).digest()
        known = digest in self._seen
        self._seen[digest] = None
        self._seen.move_to_end(digest)
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return known


def messages_body(
    model: str,
    messages: Sequence[Message],
    sampling: Sampling,
    send_temperature: bool,
    extra: Mapping[str, Any],
    is_cached: Callable[[str], bool],
) -> dict[str, Any]:
    """The body of a call to the Messages API.

    Args:
        model: The provider's name of the model.
        messages: The chat.
        sampling: How the reply is drawn; its seed is not sent.
        send_temperature: As in `AnthropicBackend`.
        extra: As in `AnthropicBackend`.
        is_cached: Whether a system prompt is marked for the provider's cache.

    Raises:
        CallError: the chat has no turn of the user.
        SetupError: a temperature was asked for that is not sent.
    """
    system, turns = split_system(messages)
    if not turns:
        raise CallError("the chat has no user turn: Anthropic's API wants one beside the system prompt")
    fields = sampling_fields(sampling, send_temperature, "send_temperature")
    if fields.get("top_p") == 1:
        # Some models take one of the two and not both.
        del fields["top_p"]
    body: dict[str, Any] = {"model": model, "messages": turns, "max_tokens": sampling.max_tokens, **fields}
    if system:
        body["system"] = system
        if is_cached(system):
            body["system"] = [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
    if sampling.stop:
        body["stop_sequences"] = list(sampling.stop)
    return {**body, **extra}
