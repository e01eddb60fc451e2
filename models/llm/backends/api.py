"""What the backends over HTTP share: a server's address without its secrets, one attempt, an SDK's errors as ours.

Requests go through an SDK's documented `client.post`, which signs them and raises its own errors, and replies are
decoded here: the typed methods check every field against a schema, cost twice the processor time a call, and are
no help with servers that leave fields out.
"""

from __future__ import annotations

import asyncio
import base64
import email.utils
import importlib
import json
import logging
import math
import os
import re
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from tripletune.models.llm.backends.transport import http_client, response_type
from tripletune.models.llm.client import CallError, Message, Sampling, SetupError, TransientError

logger = logging.getLogger(__name__)

# 425: the server asks for the same request later. 5xx (Anthropic's 529 too) are always worth another attempt.
TRANSIENT = frozenset({408, 409, 425, 429})
# What is wrong with the key, the account, the model's name or a setting is wrong for every call, not for this one.
ACCESS = frozenset({401, 402, 403, 404})
SETTINGS = ("max_tokens", "max_completion_tokens", "temperature", "top_p")
# Gateways answer 403 to a text that they don't let through, too.
MODERATED = ("moderation", "flagged")
# Codes of 429 that no waiting cures: the account has no credit.
NO_CREDIT = ("insufficient_quota", "billing_hard_limit_reached", "credit balance is too low")
TRANSPORTS = frozenset({"aiohttp", "httpx", "httpx2", "httpcore", "httpcore2", "anyio"})
PLACEHOLDER_KEY = "none"
KEY_SHAPE = re.compile(r"\bsk-[A-Za-z0-9_*.-]{4,}|(?<=[Bb]earer )[^\s\"']+|(?<=//)[^\s/@]+(?=@)")
LONGEST_QUOTE = 500


def import_sdk(name: str) -> ModuleType:
    """Import a provider's SDK.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(
            f"the {name} backend needs the package {name}; run: pip install 'tripletune[teachers]'"
        ) from None


@dataclass(frozen=True)
class Address:
    """Where a server is.

    Attributes:
        url: Base URL without user and password.
        host: Host and port, for messages.
        headers: The header that a user and password in the URL become.
        secrets: Texts that must never be shown.
    """

    url: str
    host: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read a base URL; `user:password@` becomes a header, so that no log line of an HTTP library shows it.

        Raises:
            ValueError: it is not an http(s) URL.
        """
        try:
            parts = urllib.parse.urlsplit(url.strip())
            host = parts.hostname or ""
            port = parts.port
        except ValueError:
            parts, host, port = urllib.parse.SplitResult("", "", "", "", ""), "", None
        if parts.scheme not in ("http", "https") or not host:
            # The URL itself may hold a password, so it is not quoted.
            raise ValueError("url: it must look like http://127.0.0.1:8000/v1 or https://host/v1")
        if ":" in host:
            host = f"[{host}]"
        place = f"{host}:{port}" if port else host
        clean = urllib.parse.urlunsplit((parts.scheme, place, parts.path, parts.query, ""))
        if parts.username is None and parts.password is None:
            return cls(clean, place)
        user, password = (urllib.parse.unquote(text or "") for text in (parts.username, parts.password))
        token = base64.b64encode(f"{user}:{password}".encode()).decode()
        return cls(clean, place, {"Authorization": f"Basic {token}"}, (password or user, token))

    def join(self, path: str) -> str:
        """The whole URL of a path below the base URL; it begins with a slash."""
        parts = urllib.parse.urlsplit(self.url)
        return urllib.parse.urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}{path}"))


def find_server(
    url: str | None, key: str | None, default_url: str, variables: tuple[str, str], hosts: Sequence[str]
) -> tuple[Address, str | None, bool]:
    """Where calls go, with which key, and whether it is the provider itself.

    Args:
        url: The server's base URL; None: what the environment says, else the provider's.
        key: The key. A key of the environment is only taken without `url`: it is not sent to other servers by accident.
        default_url: The provider's base URL.
        variables: Names of the environment's variables with the URL and the key.
        hosts: The provider's domains, which want a key.

    Raises:
        ValueError: the URL is none, a key is missing, or there are two ways to sign.
    """
    if url is None:
        url = os.environ.get(variables[0]) or default_url
        key = key or os.environ.get(variables[1])
    address = Address.parse(url)
    host = address.host.split(":")[0]
    official = any(host == name or host.endswith(f".{name}") for name in hosts)
    if official and not key:
        raise ValueError(f"{host} wants a key: set {variables[1]}, or api_key if you set url yourself")
    if key and address.headers:
        raise ValueError("url has a user and password and there is a key too: a server takes one of them")
    return address, key or None, official


def redact(text: str, secrets: Sequence[str] = ()) -> str:
    """A text with keys and passwords replaced by `***`: the given ones, and whatever looks like one."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "***")
    return KEY_SHAPE.sub("***", text)


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds that a response asks to wait: `retry-after-ms`, or `retry-after` in seconds or as a date.

    Args:
        headers: The response's headers, found in any case by the SDKs' own mappings.
        now: Seconds since 1970, for the date form; `None` means the clock.

    Returns:
        `None` when nothing usable is there.
    """
    for name, scale in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        text = headers.get(name)
        if not text:
            continue
        try:
            seconds = float(text) / scale
        except ValueError:
            try:
                date = email.utils.parsedate_to_datetime(text).timestamp()
            except (ValueError, TypeError, OverflowError, OSError):
                continue
            seconds = max(date - (time.time() if now is None else now), 0.0)
        if math.isfinite(seconds) and seconds >= 0:
            return seconds
    return None


def sampling_fields(sampling: Sampling, send: bool, option: str) -> dict[str, float]:
    """The temperature and top_p of a request body.

    Args:
        sampling: What is asked for.
        send: Whether this model takes them. If not, only the default (0, which stands for "not asked for" here) and
            1, the provider's own setting, can be met.
        option: Name of the backend's option, for the message.

    Raises:
        SetupError: a setting was asked for that is not sent.
    """
    if send:
        return {"temperature": sampling.temperature, "top_p": sampling.top_p}
    if sampling.temperature in (0, 1) and sampling.top_p == 1:
        return {}
    raise SetupError(
        f"temperature {sampling.temperature} and top_p {sampling.top_p} can't be had: {option} is false, so that none "
        f"is sent. Set {option}=True if this model takes them, else ask for temperature 1 and top_p 1"
    )


def ledger_name(kind: str, model: str, extra: Mapping[str, Any] | None) -> str:
    """What the ledger calls a model: kind, name, and request fields that change its replies.

    The host is not part of it: a model that moves to another port or machine is still the same model, and its
    replies are still paid for.
    """
    settings = json.dumps(dict(extra), sort_keys=True, ensure_ascii=False, separators=(",", ":")) if extra else ""
    return f"{kind}:{model}{' ' + settings if settings else ''}"


def check_timeout(timeout: float) -> float:
    """The time-out, if it is one.

    Raises:
        ValueError: it is not above 0.
    """
    if not timeout > 0 or not math.isfinite(timeout):
        raise ValueError(f"timeout {timeout}: it must be a number of seconds above 0")
    return timeout


class Connection:
    """One provider's SDK client, made anew for each event loop, and its errors translated.

    Args:
        sdk: The SDK's module.
        client: The name of its asynchronous client.
        address: The server.
        key: The key, which is never shown; None: a placeholder is sent to a server that wants none.
        timeout: Seconds for one attempt, from the call to the last byte.
        hints: What to do about a status code, or about a word in the message of a malformed request; the first counts.
        headers: More headers.

    Raises:
        ValueError: the timeout is not above 0.
    """

    def __init__(
        self,
        sdk: ModuleType,
        client: str,
        address: Address,
        key: str | None,
        timeout: float,
        hints: Mapping[int | str, str],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.sdk, self.address, self.timeout, self.hints = sdk, address, check_timeout(timeout), hints
        self._response = response_type(sdk)
        self._kind, self._key = getattr(sdk, client), key or PLACEHOLDER_KEY
        self._headers = {**address.headers, **(headers or {})}
        self._secrets = (*([key] if key else []), *address.secrets)
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send one request, once, and decode the reply.

        Args:
            path: Below the base URL, with a slash in front.
            body: The request.

        Raises:
            TransientError: worth another attempt.
            CallError: no attempt will do better.
        """
        try:
            async with asyncio.timeout(self.timeout):
                # The whole address: the SDK would parse and join its parts anew for every call.
                url = self.address.join(path)
                response = await self._open().post(url, body=dict(body), cast_to=self._response)
        except TimeoutError:
            raise TransientError(f"{self.address.host} gave no reply within {self.timeout:g} seconds") from None
        except self.sdk.APIError as error:
            # Without the cause: what an SDK puts into its own exceptions, request headers for one, ends here.
            raise self._translate(error) from None
        except Exception as error:
            # A few failures of the transport (a response that is no HTTP) reach us without the SDK's wrapping.
            if not isinstance(error, OSError) and type(error).__module__.split(".")[0] not in TRANSPORTS:
                raise
            raise TransientError(f"no connection to {self.address.host}: {self.quote(error)}") from None
        try:
            found = json.loads(response.content)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            shown = self.quote(response.text)
            raise TransientError(f"{self.address.host} sent a reply that is no JSON object: {shown}")
        return found

    async def close(self) -> None:
        """Close the client's connections; the next call opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _open(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._loop = loop
            self._client = self._kind(
                api_key=self._key,
                base_url=self.address.url,
                timeout=self.timeout,
                # Retries are the ledger client's.
                max_retries=0,
                default_headers=self._headers or None,
                http_client=http_client(self.sdk, self.timeout),
            )
        return self._client

    def quote(self, text: object) -> str:
        """A text in one line, shortened, without secrets."""
        found = redact(" ".join(str(text).split()), self._secrets)
        return found if len(found) <= LONGEST_QUOTE else found[:LONGEST_QUOTE] + " …"

    def _translate(self, error: Any) -> CallError | TransientError:
        host = self.address.host
        if isinstance(error, self.sdk.APIConnectionError):
            cause = error.__cause__
            return TransientError(
                f"no connection to {host}, or it broke off: {self.quote(cause if cause and str(cause) else error)}"
            )
        if not isinstance(error, self.sdk.APIStatusError):
            return TransientError(f"{host} sent a reply that can't be read: {self.quote(error)}")
        status, text, word = error.status_code, self.quote(error), None
        headers = error.response.headers
        wish = headers.get("x-should-retry")
        no_credit = any(code in f"{getattr(error, 'code', '')} {text}" for code in NO_CREDIT)
        if wish != "false" and not no_credit and (status in TRANSIENT or status >= 500 or wish == "true"):
            return TransientError(f"{host}: {text}", retry_after(headers))
        if no_credit:
            advice = "the account has no credit left: add some, then start again; what was answered is not asked again"
        else:
            words = [word for word in self.hints if isinstance(word, str)] if status in (400, 422) else []
            word = next((word for word in words if word in text), None)
            advice = self.hints.get(word or status, "the request was refused: see the server's words")
        moderated = status == 403 and any(mark in text.lower() for mark in MODERATED)
        # "max_tokens and the prompt exceed the context" is about this prompt.
        setting = word in SETTINGS and "context" not in text
        setup = no_credit or setting or (status in ACCESS and not moderated)
        kind = SetupError if setup else CallError
        return kind(f"{host}: {text}. What to do: {advice}")


def split_system(messages: Sequence[Message]) -> tuple[str, list[dict[str, str]]]:
    """A chat's system text (several are joined by a blank line) and its other turns."""
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    turns = [{"role": str(m["role"]), "content": m["content"]} for m in messages if m["role"] != "system"]
    return system, turns


def count(usage: Mapping[str, Any], *names: str) -> int:
    """Sum of token counts; one that a server leaves out or fills with something else is 0."""
    values = (usage.get(name) for name in names)
    return sum(value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0)
