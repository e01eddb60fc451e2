"""Any server that speaks OpenAI's chat completions: hosted, vLLM, Ollama, llama.cpp and many more."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from tripletune.models.llm.backends._hosted import HostedBackend, count, sampling_fields
from tripletune.models.llm.client import Completion, Message, Sampling
from tripletune.models.llm.options import BackendKind, LLMOptions

logger = logging.getLogger(__name__)


def read_chat(found: Mapping[str, Any]) -> Completion | None:
    """The reply in the body of a chat completion; None when there is none."""
    try:
        choice = found["choices"][0]
        text, refusal = choice["message"].get("content"), choice["message"].get("refusal")
    except (KeyError, IndexError, TypeError, AttributeError):
        return None
    if isinstance(text, list):  # parts, as some servers send
        text = "".join(str(part.get("text") or "") for part in text if isinstance(part, dict))
    usage = found.get("usage")
    return Completion(
        text=text if isinstance(text, str) else "",
        prompt_tokens=count(usage, "prompt_tokens"),
        completion_tokens=count(usage, "completion_tokens"),
        finish_reason="refusal" if refusal and not text else str(choice.get("finish_reason") or "stop"),
    )


class OpenAIBackend(HostedBackend):
    """Chat completions through OpenAI's SDK; see `HostedBackend`.

    Hosted reasoning models refuse `max_tokens`, many other servers don't know `max_completion_tokens`: where the
    options say "auto", the second goes to openai.com and azure.com and the first elsewhere. Without a temperature
    models draw with their own settings, also where the loops and builders ask for greedy replies.
    """

    kind, client_class = "openai", "AsyncOpenAI"
    default_url, url_variable, key_variable = "https://api.openai.com/v1", "OPENAI_BASE_URL", "OPENAI_API_KEY"
    hosts, read, sends_temperature = ("openai.com", "azure.com"), staticmethod(read_chat), True

    def __init__(self, options: LLMOptions, api_key: str | None = None, _: object = None) -> None:
        super().__init__(options, api_key)
        self.token_field = options.token_field
        if self.token_field == "auto":
            self.token_field = "max_completion_tokens" if self.official else "max_tokens"
        if not self.send_temperature:
            logger.warning("%s: temperature is not sent; replies are drawn with the server's own settings", self.model)

    def body(self, messages: Sequence[Message], sampling: Sampling) -> dict[str, Any]:
        """The body of a chat completion; see `chat_body`."""
        return chat_body(self.name, messages, sampling, self.token_field, self.send_temperature, self.extra)

    def create(self, client: Any, body: dict[str, Any]) -> Awaitable[Any]:
        """`client.chat.completions.create`; fields that a server adds to OpenAI's go with the rest."""
        chat = {name: body.pop(name) for name in ("model", "messages")}
        created: Awaitable[Any] = client.chat.completions.with_raw_response.create(**chat, extra_body=body)
        return created


def chat_body(
    model: str,
    messages: Sequence[Message],
    sampling: Sampling,
    token_field: str,
    send_temperature: bool,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """The body of a chat completion.

    Raises:
        SetupError: a temperature was asked for that is not sent.
    """
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": message["role"], "content": message["content"]} for message in messages],
        token_field: sampling.max_tokens,
        **sampling_fields(sampling, send_temperature),
    }
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.schema is not None:
        schema = {"name": "reply", "strict": True, "schema": json.loads(sampling.schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return {**body, **extra}


BACKEND = BackendKind(OpenAIBackend, key_variable=OpenAIBackend.key_variable)
