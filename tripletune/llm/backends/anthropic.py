"""Call Anthropic's Messages API, with prompt caching.

The provider caches the part of a prompt up to a mark: writing the cache costs a quarter more than plain input, reading
it within five minutes costs a tenth (https://platform.claude.com/docs/en/build-with-claude/prompt-caching).
The mark is put after the system prompt, which a builder's calls share. Below a length that depends on the model (512 to
4,096 tokens) the provider ignores the mark, at no cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tripletune.core.calls import Completion, Message, Sampling, SetupError
from tripletune.llm.backends import BackendKind, LLMOptions
from tripletune.llm.backends._responses import error_beside, finish_reason_of, sum_of_counts
from tripletune.llm.backends.openai import HostedBackend, sampling_fields

_VERSION = "2026-10-21"
# The API version that accepts temperature and top_p, which newer ones do not.
_SAMPLING_VERSION = "2023-06-01"
_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
}


def read_message(body: Mapping[str, Any]) -> Completion | None:
    """Read the reply from the body of a message; None if the body has no reply.

    Batch files hold the same bodies, so both ways give equal completions.
    """
    blocks = body.get("content")
    if not isinstance(blocks, list):
        return None
    # Other blocks hold thoughts and calls of tools.
    texts = []
    for block in blocks:
        if isinstance(block, dict) and block.get("type") == "text":
            texts.append(str(block.get("text") or ""))
    usage = body.get("usage")
    reason = finish_reason_of(body, "stop_reason", "end_turn")
    error = error_beside(body)
    return Completion(
        text="".join(texts),
        # `input_tokens` does not count tokens that were written to or read from the cache.
        prompt_tokens=sum_of_counts(usage, "input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"),
        completion_tokens=sum_of_counts(usage, "output_tokens"),
        cache_read=sum_of_counts(usage, "cache_read_input_tokens"),
        cache_written=sum_of_counts(usage, "cache_creation_input_tokens"),
        finish_reason="error" if error else _REASONS.get(reason, reason),
        error=error,
    )


class AnthropicBackend(HostedBackend):
    """Call Anthropic's API; see `HostedBackend`. The seed is not sent, because the API has no seed.

    The newest API version and models reject temperature and top_p, so they are not sent by default. With
    `send_temperature` "yes", they are sent through an older API version.
    """

    default_url = "https://api.anthropic.com"
    url_variable = "ANTHROPIC_BASE_URL"
    key_variable = "ANTHROPIC_API_KEY"
    hosts = ("anthropic.com",)
    path = "/v1/messages"
    read = staticmethod(read_message)

    def __init__(self, options: LLMOptions, api_key: str | None = None, _: object = None) -> None:
        super().__init__(options, api_key, options.send_temperature == "yes")
        self.body = partial(messages_body, options)

    def headers(self, key: str) -> dict[str, str]:
        """The key, and the version of the API that takes what is sent."""
        version = _SAMPLING_VERSION if self.send_temperature else _VERSION
        return {"x-api-key": key, "anthropic-version": version}


def messages_body(options: LLMOptions, messages: Sequence[Message], sampling: Sampling) -> dict[str, Any]:
    """The body of a call to the Messages API, in which several system messages are joined by a blank line.

    The system message is marked as the end of what the provider caches, since all calls of a role share it.

    Raises:
        SetupError: The sampling has a JSON schema.
    """
    instructions = []
    turns = []
    for message in messages:
        if message["role"] == "system":
            instructions.append(message["content"])
        else:
            turns.append({"role": message["role"], "content": message["content"]})
    system = "\n\n".join(instructions)
    if sampling.schema is not None:
        raise SetupError("a JSON schema is set, but this backend cannot enforce one: leave out the schema option")
    if sampling.scored:
        raise SetupError(
            "log-probabilities of the answer are asked for, but Anthropic's API has none: take confidence samples or "
            "support, or a model behind OpenAI's API or on this machine"
        )
    fields = sampling_fields(sampling, options.send_temperature == "yes")
    if fields.get("top_p") == 1:
        # Some models accept either temperature or top_p, but not both.
        del fields["top_p"]
    body: dict[str, Any] = {"model": options.model, "messages": turns, "max_tokens": sampling.max_tokens, **fields}
    if system:
        body["system"] = [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
    return {**body, **(options.extra_fields or {})}


BACKEND = BackendKind(AnthropicBackend, key_variable=AnthropicBackend.key_variable)
