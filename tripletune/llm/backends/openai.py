"""The backend for servers with OpenAI's chat-completions API: OpenAI, vLLM, Ollama, llama.cpp and many more.

`HostedBackend` is the base class of backends that use a provider's SDK: client, one attempt at a call, errors.
"""

from __future__ import annotations

import email.utils
import importlib
import json
import logging
import math
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

from tripletune.core.calls import (
    UNFINISHED,
    Backend,
    CallError,
    Completion,
    Message,
    PromptTooLong,
    Sampling,
    SetupError,
    TransientError,
    redact,
)
from tripletune.llm.backends import URL_FORM, BackendKind, LLMOptions, is_plain_url

# 425: the server asks for the same request later. All 5xx (also Anthropic's 529) are retried.
TRANSIENT = frozenset({408, 409, 425, 429})
# These errors concern the key, the account, the model's name or a setting, so every call would fail.
ACCESS = frozenset({401, 402, 403, 404})
_TOO_LONG = ("context", "prompt is too long")
_SETTINGS = ("max_tokens", "max_completion_tokens", "temperature", "top_p")
# Gateways also answer 403 to a text that they block.
_MODERATED = ("moderation", "flagged")
# Codes of 429 that waiting does not fix.
_NO_CREDIT = ("insufficient_quota", "billing_hard_limit_reached", "credit balance is too low")
_PAY = "the account has no credit left: add credit, then run the same command again; stored replies are kept"
_SHORTEN = "the prompt and max_tokens don't fit the model: shorten the prompt or lower max_tokens"
_SEE = "the request was refused: read the server's message"
_AS_ASKED = "set token_field or send_temperature as the server's message says, or lower the setting"
_HINTS: Mapping[int, str] = {
    401: "check the key (its environment variable)",
    402: _PAY,
    403: "this key may not use this model: check the key's rights and the model's name",
    404: "check the model's name, and that url is the base URL (for Anthropic without /v1, for most servers with /v1)",
    413: "the request is too large: shorten the prompt",
}
_LONGEST_QUOTE = 500
logger = logging.getLogger(__name__)


class HostedBackend(Backend):
    """A model behind a provider's SDK, called in one attempt. The default url comes from the environment.

    The model's name in the ledger has no host, since a model may move to another host.

    Args:
        options: Model, server, attempts and fields.
        api_key: The key, or None for servers without one.
        send_temperature: Whether bodies have temperature and top_p.
    """

    # The name of the SDK's module.
    kind: ClassVar[str]
    client_class: ClassVar[str]
    default_url: ClassVar[str]
    url_variable: ClassVar[str]
    key_variable: ClassVar[str]
    # The provider's own hosts, which need a key.
    hosts: ClassVar[tuple[str, ...]]
    # The path of a call below the address.
    path: ClassVar[str]
    headers: Mapping[str, str] = {}
    # Makes the body of a request from messages and sampling.
    body: Callable[[Sequence[Message], Sampling], dict[str, Any]]
    # Reads the reply from the body of a response; None if the body has no reply.
    read: Callable[[Mapping[str, Any]], Completion | None]

    def __init__(self, options: LLMOptions, api_key: str | None, send_temperature: bool) -> None:
        self.sdk = importlib.import_module(self.kind)
        self.address = options.url or os.environ.get(self.url_variable) or self.default_url
        if not is_plain_url(self.address):
            raise ValueError(f"{self.url_variable} {URL_FORM}")
        url = urllib.parse.urlsplit(self.address)
        self.host = url.netloc
        name = str(url.hostname)
        self.official = any(name == host or name.endswith(f".{host}") for host in self.hosts)
        if self.official and not api_key:
            raise ValueError(f"{name} needs a key: set {self.key_variable}, or api_key_env if you set url yourself")
        # The key is kept in functions, so that printing this object does not show it.
        self._key = lambda: api_key or "none"
        self._redact = lambda text: redact(text, [api_key or ""])
        self.model = options.ledger_name
        self.send_temperature = send_temperature
        # The SDK's HTTP library: httpx or, in newer SDKs, httpx2.
        library = self.sdk.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0]
        self._http = importlib.import_module(library)
        self._clients: list[Any] = []
        self._idle_clients: list[Any] = []
        if not send_temperature:
            logger.info("%s: temperature is not sent; replies are sampled with the provider's settings", self.model)

    @cached_property
    def _certificates(self) -> Any:
        """The SSL context of all clients, since reading the certificates takes 20 ms and a megabyte."""
        return self._http.create_ssl_context()

    def _open_client(self) -> Any:
        """A client of the SDK; it neither retries nor limits the time, because the ledger client does."""
        client_class = getattr(self.sdk, self.client_class)
        client = client_class(
            api_key=self._key(),
            base_url=self.address,
            timeout=None,
            max_retries=0,
            default_headers=dict(self.headers) or None,
            # A redirect would send prompts to another server than the user named.
            http_client=self.sdk.DefaultAsyncHttpxClient(follow_redirects=False, verify=self._certificates),
        )
        self._clients.append(client)
        return client

    async def _post(self, request: dict[str, Any]) -> Any:
        """Send a request, and return the response of the HTTP library.

        Each call in progress has a client, and thus a connection, for itself: a shared pool looks at all of its
        connections at each call, which took a quarter of the time of a call that is answered at once. The SDK's
        functions of an endpoint are not used, because their conversion of the fields took another quarter.
        """
        client = self._idle_clients.pop() if self._idle_clients else self._open_client()
        try:
            return await client.post(self.path, cast_to=self._http.Response, body=request)
        finally:
            self._idle_clients.append(client)

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Reply to a chat; see `core.calls.Backend`.

        The SDK sends the call, and its errors become ours. The body is read here, because servers that only resemble
        OpenAI's leave out fields.
        """
        request = self.body(messages, sampling)
        start = time.perf_counter()
        try:
            response = await self._post(request)
        except self.sdk.APIError as error:
            # The cause is dropped, because an SDK's exception may hold request headers.
            raise self._translate(error) from None
        seconds = time.perf_counter() - start
        # Decode the JSON here, because the SDK's models fail on servers that leave out fields.
        try:
            body = json.loads(response.content)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise TransientError(f"{self.host} sent a reply that is not a JSON object: {self._quote(response.text)}")
        completion = self.read(body)
        if completion is None:
            detail = ""
            if body.get("error"):
                # Some gateways wrap an upstream failure into a response with status 200.
                detail = f": {self._quote(body['error'])}"
            raise TransientError(f"{self.host} sent a response without a reply{detail}")
        return replace(completion, seconds=seconds)

    async def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        clients = self._clients
        self._clients = []
        self._idle_clients = []
        for client in clients:
            await client.close()

    def _quote(self, text: object) -> str:
        """A server's words on one line, without the key and not too long, for an error message."""
        line = self._redact(" ".join(str(text).split()))
        if len(line) <= _LONGEST_QUOTE:
            return line
        return line[:_LONGEST_QUOTE] + " …"

    def _translate(self, error: Any) -> CallError | TransientError:
        """Turn an SDK's error into one that says whether to retry, and if not, what to do.

        The first case that fits decides. Missing credit comes before the status, because it is sent as 429, which
        would be retried for nothing. A header `x-should-retry` overrides what the status would mean.
        """
        if isinstance(error, self.sdk.APIConnectionError):
            # The SDK says only "Connection error."; the cause says which.
            cause = str(error.__cause__ or "")
            shown = self._quote(cause or error)
            return TransientError(f"no connection to {self.host}, or the connection broke: {shown}")
        if not isinstance(error, self.sdk.APIStatusError):
            return TransientError(f"{self.host} sent a reply that cannot be read: {self._quote(error)}")
        status = error.status_code
        text = self._quote(error)
        headers = error.response.headers
        if 300 <= status < 400:
            target = self._quote(headers.get("location", "nowhere"))
            return SetupError(
                f"{self.host} redirects to {target}, and prompts are not sent there: if this server is right, set url"
            )

        def failure(kind: type[CallError], advice: str) -> CallError:
            return kind(f"{self.host}: {text}. What to do: {advice}")

        if any(code in f"{getattr(error, 'code', '')} {text}" for code in _NO_CREDIT):
            return failure(SetupError, _PAY)
        wish = headers.get("x-should-retry")
        is_temporary = status in TRANSIENT or status >= 500 or wish == "true"
        if is_temporary and wish != "false":
            return TransientError(f"{self.host}: {text}", retry_after(headers))
        if status in (400, 422):
            # "max_tokens and the prompt exceed the context" is about this prompt.
            if any(words in text for words in _TOO_LONG):
                return failure(PromptTooLong, _SHORTEN)
            if any(name in text for name in _SETTINGS):
                return failure(SetupError, _AS_ASKED)
        advice = _HINTS.get(status, _SEE)
        is_moderated = status == 403 and any(mark in text.lower() for mark in _MODERATED)
        if status in ACCESS and not is_moderated:
            return failure(SetupError, advice)
        return failure(CallError, advice)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Read the seconds to wait from `retry-after-ms`, or `retry-after` (seconds or a date); None if both are absent.

    The header in milliseconds is exacter, so it comes first. What cannot be read, is negative or has no end counts as
    absent: the caller then waits as after an error without a header.
    """
    for name, scale in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        text = headers.get(name, "")
        try:
            seconds = float(text) / scale
        except ValueError:
            try:
                seconds = max(email.utils.parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
            except (ValueError, TypeError, OverflowError, OSError):
                continue
        if 0 <= seconds < math.inf:
            return seconds
    return None


def sampling_fields(sampling: Sampling, send: bool) -> dict[str, float]:
    """The temperature and top_p of a request body.

    If they are not sent, temperature must be 0 (the default) or 1 (the provider's setting), and top_p must be 1.
    """
    if send:
        return {"temperature": sampling.temperature, "top_p": sampling.top_p}
    if sampling.temperature in (0, 1) and sampling.top_p == 1:
        return {}
    raise SetupError(
        f"temperature {sampling.temperature} and top_p {sampling.top_p} are not sent because of send_temperature. Set "
        "send_temperature to yes if this model accepts them, else set temperature and top_p to 1"
    )


def count(usage: Any, *names: str) -> int:
    """The sum of token counts, which may be integers, floats or texts; other values count as 0."""
    if not isinstance(usage, dict):
        return 0
    total = 0
    for name in names:
        value = str(usage.get(name))
        if re.fullmatch(r"\d{1,15}(\.\d*)?", value):
            total += int(float(value))
    return total


def finish_reason_of(fields: Mapping[str, Any], name: str, usual: str) -> str:
    """The finish reason in a field, `usual` where a server has no such field; null stands for half a stream."""
    return str(fields.get(name, usual) or UNFINISHED)


def error_beside(*places: Any) -> str:
    """What a server says went wrong in a field "error" beside a text, on one line; "" if nothing did.

    A server that fails while it writes may answer with status 200, the text so far and such a field. Without a look at
    it the text would count as the whole reply.

    Args:
        places: The objects of a response that may have the field, the innermost first, since it says most. Values of
            other types have none: a server decides what it sends.
    """
    for place in places:
        error = place.get("error") if isinstance(place, dict) else None
        if isinstance(error, dict):
            # OpenAI's form; other servers send the text itself.
            error = error.get("message") or error
        if error:
            return " ".join(str(error).split())[:_LONGEST_QUOTE]
    return ""


def read_chat(body: Mapping[str, Any]) -> Completion | None:
    """Read the reply from the body of a completion, of a chat or a prompt; None if the body has no reply.

    Batch files hold the same bodies. Text beside an error is kept, but `finish_reason` is then "error", and the client
    treats the call as failed.
    """
    try:
        choice = body["choices"][0]
        if "message" in choice:
            message = choice["message"]
        else:
            # The completion of a prompt.
            message = {"content": choice["text"]}
        text = message.get("content")
        refusal = message.get("refusal")
    except (KeyError, IndexError, TypeError, AttributeError):
        return None
    if isinstance(text, list):  # some servers send the text in several objects
        text = "".join(str(item.get("text") or "") for item in text if isinstance(item, dict))
    if not isinstance(text, str):
        text = ""
    finish_reason = finish_reason_of(choice, "finish_reason", "stop")
    if refusal and not text:
        finish_reason = "refusal"
    error = error_beside(choice, message, body)
    if error:
        finish_reason = "error"
    usage = body.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    return Completion(
        text=text,
        prompt_tokens=count(usage, "prompt_tokens"),
        completion_tokens=count(usage, "completion_tokens"),
        cache_read=count(details, "cached_tokens") or count(usage, "prompt_cache_hit_tokens"),
        cache_written=count(details, "cache_creation_tokens", "cache_write_tokens"),
        finish_reason=finish_reason,
        error=error,
    )


class OpenAIBackend(HostedBackend):
    """Chat completions through OpenAI's SDK; see `HostedBackend`.

    Hosted reasoning models reject `max_tokens`, and many other servers don't know `max_completion_tokens`. With
    `token_field` "auto", `max_completion_tokens` is sent to openai.com and azure.com, and `max_tokens` to other
    servers. If no temperature is sent, models use their own settings, even for calls that should be greedy.
    """

    enforces_schemas = True
    kind = "openai"
    client_class = "AsyncOpenAI"
    default_url = "https://api.openai.com/v1"
    url_variable = "OPENAI_BASE_URL"
    key_variable = "OPENAI_API_KEY"
    hosts = ("openai.com", "azure.com")
    path = "/chat/completions"
    read = staticmethod(read_chat)

    def __init__(self, options: LLMOptions, api_key: str | None = None, _: object = None) -> None:
        super().__init__(options, api_key, options.send_temperature != "no")
        self.body = partial(chat_body, options, self.official)


def chat_body(options: LLMOptions, official: bool, messages: Sequence[Message], sampling: Sampling) -> dict[str, Any]:
    """The body of a chat completion; `official`: the server is OpenAI's or Azure's.

    Fields are only sent if they are set, as many servers refuse fields that they do not know. `extra_fields` come last,
    so that a user can override every other field.
    """
    token_field = options.token_field
    if token_field == "auto":
        token_field = "max_completion_tokens" if official else "max_tokens"
    body: dict[str, Any] = {
        "model": options.model,
        "messages": [{"role": message["role"], "content": message["content"]} for message in messages],
        token_field: sampling.max_tokens,
        **sampling_fields(sampling, options.send_temperature != "no"),
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.schema is not None:
        schema = {"name": "reply", "strict": True, "schema": json.loads(sampling.schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return {**body, **(options.extra_fields or {})}


BACKEND = BackendKind(OpenAIBackend, key_variable=OpenAIBackend.key_variable)
