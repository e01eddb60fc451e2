"""Any server that speaks OpenAI's chat completions: hosted, vLLM, Ollama, llama.cpp and many more."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tripletune.models.llm.backends.api import Connection, count, find_server, import_sdk, ledger_name, sampling_fields
from tripletune.models.llm.client import Message, Sampling, TransientError
from tripletune.models.local.generation import Completion

logger = logging.getLogger(__name__)
DEFAULT_URL = "https://api.openai.com/v1"
KEY_VARIABLE = "OPENAI_API_KEY"
TokenField = Literal["auto", "max_tokens", "max_completion_tokens"]
HINTS: dict[int | str, str] = {
    # vLLM names max_tokens in this message too, so it stands first.
    "context_length": "the prompt and max_tokens don't fit the model: shorten the prompt or lower max_tokens",
    "context length": "the prompt and max_tokens don't fit the model: shorten the prompt or lower max_tokens",
    "max_tokens": "set the backend's token_field to the name that the server asks for",
    "max_completion_tokens": "set the backend's token_field to the name that the server asks for",
    "temperature": "this model draws with its own settings: set the backend's send_temperature=False",
    "top_p": "this model draws with its own settings: set the backend's send_temperature=False",
    401: f"check the key ({KEY_VARIABLE}, or the server's own)",
    402: "the account has no credit left: add some, then start again; what was answered is not asked again",
    403: "this key may not use this model: check its rights and the model's name",
    404: "check the model's name, and that the url is the base URL (most end with /v1)",
    413: "the request is too large: shorten the prompt",
}


class OpenAIBackend:
    """Chat completions through OpenAI's SDK; one attempt a call.

    Args:
        model: The name that the server knows the model by.
        url: The server's base URL; `None` means `OPENAI_BASE_URL`, else OpenAI's own. `user:password@` in it is sent as
            a header and shown nowhere.
        api_key: The key; `None` means `OPENAI_API_KEY`, but only without `url`: a key for OpenAI is not sent to other
            servers by accident. Servers that want none get a placeholder.
        timeout: Seconds for one attempt.
        token_field: How the longest reply is asked for. Hosted reasoning models refuse `max_tokens`, many other
            servers don't know `max_completion_tokens`. "auto" sends the second to openai.com and azure.com and the
            first elsewhere.
        send_temperature: Whether temperature and top_p are sent. Reasoning models refuse them: set it to false, and
            they draw with their own settings, also where the loops and builders ask for greedy replies.
        extra: More fields of the request body, for example {"reasoning_effort": "low"}. They change replies, so they
            are part of the ledger's name; keys don't belong here.

    Attributes:
        model: "openai:<model>" and the extra fields. Not the host: a model that moves to another port is the same
            model, and what it answered is not asked again.

    Raises:
        ValueError: an option makes no sense, the key is missing, or the SDK is not installed.
    """

    def __init__(
        self,
        model: str,
        url: str | None = None,
        api_key: str | None = None,
        timeout: float = 120.0,
        token_field: TokenField = "auto",
        send_temperature: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        if not model:
            raise ValueError("model: it must be the name that the server knows the model by")
        if token_field not in ("auto", "max_tokens", "max_completion_tokens"):
            raise ValueError(f"token_field {token_field!r} is not one of auto, max_tokens, max_completion_tokens")
        sdk = import_sdk("openai")
        variables = ("OPENAI_BASE_URL", KEY_VARIABLE)
        address, api_key, official = find_server(url, api_key, DEFAULT_URL, variables, ("openai.com", "azure.com"))
        self.model = ledger_name("openai", model, extra)
        self.name = model
        self.send_temperature = send_temperature
        self.token_field = token_field
        if token_field == "auto":
            self.token_field = "max_completion_tokens" if official else "max_tokens"
        self._extra = dict(extra or {})
        self._connection = Connection(sdk, "AsyncOpenAI", address, api_key, timeout, HINTS)
        if not send_temperature:
            logger.warning("%s: temperature is not sent; replies are drawn with the server's own settings", self.model)

    def __repr__(self) -> str:
        return f"OpenAIBackend({self.model!r}, host={self._connection.address.host!r})"

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Reply to a chat; see `models.llm.client.Backend`."""
        body = chat_body(self.name, messages, sampling, self.token_field, self.send_temperature, self._extra)
        start = time.perf_counter()
        found = await self._connection.post("/chat/completions", body)
        seconds = time.perf_counter() - start
        try:
            choice = found["choices"][0]
            message = choice["message"]
            text, refusal = message.get("content"), message.get("refusal")
        except (KeyError, IndexError, TypeError, AttributeError):
            # Some gateways wrap an upstream failure into a response with status 200.
            error = found.get("error")
            detail = f": {self._connection.quote(error)}" if error else ""
            raise TransientError(f"{self._connection.address.host} sent a reply without choices{detail}") from None
        usage = found.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        reason = choice.get("finish_reason") or "stop"
        return Completion(
            text=_flat(text),
            prompt_tokens=count(usage, "prompt_tokens"),
            completion_tokens=count(usage, "completion_tokens"),
            seconds=seconds,
            finish_reason="refusal" if refusal and not text else str(reason),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._connection.close()


def chat_body(
    model: str,
    messages: Sequence[Message],
    sampling: Sampling,
    token_field: str,
    send_temperature: bool,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """The body of a chat completion.

    Args:
        model: The name that the server knows the model by.
        messages: The chat.
        sampling: How the reply is drawn.
        token_field: The name of the longest reply's field.
        send_temperature: As in `OpenAIBackend`.
        extra: As in `OpenAIBackend`.

    Raises:
        SetupError: a temperature was asked for that is not sent.
    """
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": message["role"], "content": message["content"]} for message in messages],
        token_field: sampling.max_tokens,
        **sampling_fields(sampling, send_temperature, "send_temperature"),
    }
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.schema is not None:
        schema = {"name": "reply", "strict": True, "schema": json.loads(sampling.schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return {**body, **extra}


def _flat(content: Any) -> str:
    # A text, nothing, or a list of parts as some servers send.
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
