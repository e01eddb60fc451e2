"""The backend for servers with OpenAI's chat-completions API: OpenAI, vLLM, Ollama, llama.cpp and many more.

`HostedBackend` is the base class of backends of a provider's API: connections, one attempt at a call, errors. It does
not use the providers' SDKs, with which a call took ten times the processor time, and the start two seconds more.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import ssl
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

from tripletune.core.calls import (
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
from tripletune.llm.backends._responses import LONGEST_QUOTE, json_or_none, read_chat, retry_after
from tripletune.llm.token_scores import ASKED

if TYPE_CHECKING:
    import yarl
    from aiohttp import ClientSession

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
_HEADERS = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "tripletune"}
# Headers of an account with several organisations or projects, and their variables.
_ACCOUNT = {"OpenAI-Organization": "OPENAI_ORG_ID", "OpenAI-Project": "OPENAI_PROJECT_ID"}
logger = logging.getLogger(__name__)


class HostedBackend(Backend):
    """A model behind a provider's API, called in one attempt. The default url comes from the environment.

    The model's name in the ledger has no host, since a model may move to another host.

    Args:
        options: Model, server, attempts and fields.
        api_key: The key, or None for servers without one.
        send_temperature: Whether bodies have temperature and top_p.
    """

    default_url: ClassVar[str]
    url_variable: ClassVar[str]
    key_variable: ClassVar[str]
    # The provider's own hosts, which need a key.
    hosts: ClassVar[tuple[str, ...]]
    # The path of a call below the address.
    path: ClassVar[str]
    # Makes the body of a request from messages and sampling.
    body: Callable[[Sequence[Message], Sampling], dict[str, Any]]
    # Reads the reply from the body of a response; None if the body has no reply.
    read: Callable[[Mapping[str, Any]], Completion | None]

    def __init__(self, options: LLMOptions, api_key: str | None, send_temperature: bool) -> None:
        """Check address and key; connections are opened by the first call.

        Raises:
            ValueError: The URL has another form, or the provider's own host gets no key.
        """
        # Now, so that a missing package is not found at the first call.
        self._aiohttp = importlib.import_module("aiohttp")
        self._yarl = importlib.import_module("yarl")
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
        self._session: ClientSession | None = None
        if not send_temperature:
            logger.info("%s: temperature is not sent; replies are sampled with the provider's settings", self.model)

    def headers(self, key: str) -> dict[str, str]:
        """The headers that a provider asks for."""
        raise NotImplementedError

    def _open_session(self) -> ClientSession:
        """Connections for calls at once; the ledger client limits number and time of calls, and retries."""
        http = self._aiohttp
        context: ssl.SSLContext | bool = True
        if self.address.startswith("https:"):
            import certifi

            context = ssl.create_default_context()
            # Some builds of Python find no certificates of the system.
            context.load_verify_locations(certifi.where())
        return http.ClientSession(
            headers=_HEADERS | self.headers(self._key()),
            connector=http.TCPConnector(limit=0, ssl=context),
            timeout=http.ClientTimeout(total=None, sock_connect=None),
            cookie_jar=http.DummyCookieJar(),
            # Not trust_env: it looks for proxies and reads .netrc at every call, in threads, which took a quarter of a
            # call's processor time, and it sends a password of .netrc instead of the key.
            proxy=self._proxy_of_environment(),
        )

    def _proxy_of_environment(self) -> str | None:
        """The proxy that HTTP_PROXY, HTTPS_PROXY and NO_PROXY set for the address, if any."""
        if urllib.request.proxy_bypass(self.host):
            return None
        scheme = urllib.parse.urlsplit(self.address).scheme
        return urllib.request.getproxies().get(scheme)

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Reply to a chat; see `core.calls.Backend`.

        Fields that a server leaves out are no error, because many servers only resemble OpenAI's.
        """
        request = json.dumps(self.body(messages, sampling), ensure_ascii=False).encode()
        if self._session is None:
            self._session = self._open_session()
        start = time.perf_counter()
        try:
            # A redirect would send prompts to another server than the user named.
            async with self._session.post(self._call_url, data=request, allow_redirects=False) as response:
                content = await response.read()
        except (self._aiohttp.ClientError, OSError) as error:
            # The cause is dropped, because an exception may hold request headers.
            reason = self._quote_server(error or type(error).__name__)
            raise TransientError(f"no connection to {self.host}, or the connection broke: {reason}") from None
        seconds = time.perf_counter() - start
        if not 200 <= response.status < 300:
            raise self._error_for_status(response.status, response.headers, content)
        body = json_or_none(content)
        if not isinstance(body, dict):
            text = self._quote_server(content.decode(errors="replace"))
            raise TransientError(f"{self.host} sent a reply that is not a JSON object: {text}")
        completion = self.read(body)
        if completion is None:
            detail = ""
            if body.get("error"):
                # Some gateways wrap an upstream failure into a response with status 200.
                detail = f": {self._quote_server(body['error'])}"
            raise TransientError(f"{self.host} sent a response without a reply{detail}")
        return replace(completion, seconds=seconds)

    @cached_property
    def _call_url(self) -> yarl.URL:
        """The URL of a call, as it was written: yarl would else escape it again."""
        return self._yarl.URL(f"{self.address.rstrip('/')}{self.path}", encoded=True)

    async def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        session = self._session
        self._session = None
        if session is not None:
            await session.close()

    def _quote_server(self, text: object) -> str:
        """A server's words on one line, without the key and not too long, for an error message."""
        line = self._redact(" ".join(str(text).split()))
        if len(line) <= LONGEST_QUOTE:
            return line
        return line[:LONGEST_QUOTE] + " …"

    def _error_for_status(self, status: int, headers: Mapping[str, str], content: bytes) -> CallError | TransientError:
        """Turn a refusal into an error that says whether to retry, and if not, what to do.

        The first case that fits decides. Missing credit comes before the status, because it is sent as 429, which
        would be retried for nothing. A header `x-should-retry` overrides what the status would mean.
        """
        body = json_or_none(content)
        said = content.decode(errors="replace") if body is None else body
        text = self._quote_server(f"Error code: {status} - {said}" if said else f"Error code: {status}")
        if 300 <= status < 400:
            target = self._quote_server(headers.get("location", "nowhere"))
            return SetupError(
                f"{self.host} redirects to {target}, and prompts are not sent there: if this server is right, set url"
            )

        def failure(kind: type[CallError], advice: str) -> CallError:
            """An error that no retry fixes, with the server's words and what to do."""
            return kind(f"{self.host}: {text}. What to do: {advice}")

        if any(code in str(said) for code in _NO_CREDIT):
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


class OpenAIBackend(HostedBackend):
    """Chat completions of OpenAI's API; see `HostedBackend`.

    Hosted reasoning models reject `max_tokens`, and many other servers don't know `max_completion_tokens`. With
    `token_field` "auto", `max_completion_tokens` is sent to openai.com and azure.com, and `max_tokens` to other
    servers. If no temperature is sent, models use their own settings, even for calls that should be greedy.
    """

    enforces_schemas = True
    default_url = "https://api.openai.com/v1"
    url_variable = "OPENAI_BASE_URL"
    key_variable = "OPENAI_API_KEY"
    hosts = ("openai.com", "azure.com")
    path = "/chat/completions"
    read = staticmethod(read_chat)

    def __init__(self, options: LLMOptions, api_key: str | None = None, _: object = None) -> None:
        super().__init__(options, api_key, options.send_temperature != "no")
        self.body = partial(chat_body, options, self.official)

    def headers(self, key: str) -> dict[str, str]:
        """The key, and for OpenAI itself the organisation and project of the environment."""
        headers = {"Authorization": f"Bearer {key}"}
        for name, variable in _ACCOUNT.items():
            value = os.environ.get(variable)
            if value and self.official:
                headers[name] = value
        return headers


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
    if sampling.scored:
        body |= ASKED
    if sampling.schema is not None:
        schema = {"name": "reply", "strict": True, "schema": json.loads(sampling.schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return {**body, **(options.extra_fields or {})}


BACKEND = BackendKind(OpenAIBackend, key_variable=OpenAIBackend.key_variable)
