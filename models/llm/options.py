"""What a program needs to know to call a model: `--teacher-backend openai --teacher-model NAME ...` and the client.

Keys are read from the environment when the client is opened, and are never part of the options.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import types
import typing
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tripletune.models.llm.client import Backend, Sampling
from tripletune.models.llm.ledger import Ledger
from tripletune.models.llm.ledger_client import LedgerClient, Retry
from tripletune.models.llm.limits import Limits

BACKENDS = ("openai", "anthropic", "hf", "batch")
KEY_VARIABLES = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}
_LOCAL = ("hf",)
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")


def _option(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class LLMOptions:
    """How to call a model; the fields' help texts say what they mean.

    Raises:
        ValueError: options make no sense; all problems in one message, which never quotes a key or an address.
    """

    backend: str = _option("openai", "where the model runs", BACKENDS)
    model: str = _option("", "the model's name there; for hf a hub id, a folder or pypi:NAME")
    url: str | None = _option(None, "base URL of the server (default: the provider's)")
    api_key_env: str | None = _option(None, "name of the environment variable with the key (default: the provider's)")
    ledger: str | None = _option(None, "SQLite file of the call ledger: cache, resume and account of all calls")
    concurrency: int = _option(64, "most calls under way")
    requests_per_minute: float | None = _option(None, "most calls a minute")
    tokens_per_minute: float | None = _option(None, "most tokens a minute, prompts and replies together")
    timeout: float = _option(120.0, "seconds for one attempt at a call over the network")
    attempts: int = _option(8, "most attempts at a call that fails for now")
    temperature: float = _option(0.0, "0 is greedy")
    top_p: float = _option(1.0, "nucleus sampling; 1 keeps every token")
    seed: int | None = _option(None, "seed for servers that take one; another seed is another call")
    send_temperature: str = _option(
        "auto", "whether temperature and top_p are sent; hosted reasoning models refuse them", ("auto", "yes", "no")
    )
    token_field: str = _option(
        "auto", "name of the reply's limit in requests", ("auto", "max_tokens", "max_completion_tokens")
    )
    extra: str | None = _option(
        None, 'more fields of the request body as JSON, for example {"reasoning_effort": "low"}'
    )
    batch_layout: str = _option("openai", "layout of request files", ("openai", "anthropic"))
    batch_folder: str | None = _option(None, "folder of request files (default: the ledger's name with .batch)")
    batch_size: int = _option(32, "most calls in one forward pass of a local model")
    dtype: str = _option("auto", "number type of a local model: auto, float32, bfloat16 or float16")

    def __post_init__(self) -> None:
        found = self.problems()
        if found:
            raise ValueError("; ".join(found))

    def problems(self) -> list[str]:
        """What makes no sense, one sentence each."""
        found = []
        for item in fields(self):
            choices = item.metadata["choices"]
            if choices and getattr(self, item.name) not in choices:
                found.append(f"{item.name} {getattr(self, item.name)!r} is not one of {', '.join(choices)}")
        if not self.model:
            found.append("model is not set: name the model")
        if self.api_key_env is not None and not _VARIABLE.fullmatch(self.api_key_env):
            # Not quoted: it may be the key.
            found.append("api_key_env must be the NAME of an environment variable, in capitals, not the key itself")
        if self.url is not None and not _is_plain(self.url):
            found.append("url must look like http://host:port/v1, without user, password or query")
        if self.backend == "batch" and not self.ledger:
            found.append("backend batch needs a ledger: name a file, such as runs/ledger.sqlite")
        for name in ("concurrency", "requests_per_minute", "tokens_per_minute", "timeout", "attempts", "batch_size"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                found.append(f"{name} {value}: it must be above 0")
        try:
            _extra(self.extra)
        except ValueError as error:
            found.append(str(error))
        try:
            self.sampling(1)
        except ValueError as error:
            found.append(str(error))
        return found

    def sampling(self, max_tokens: int, stop: tuple[str, ...] = ()) -> Sampling:
        """The sampling of a call.

        Args:
            max_tokens: Longest reply, in tokens.
            stop: The reply ends before any of these texts.
        """
        return Sampling(self.temperature, self.top_p, max_tokens, stop, self.seed)


def add_arguments(parser: argparse.ArgumentParser, prefix: str = "teacher", **defaults: Any) -> None:
    """Give a parser an option for each field of `LLMOptions`.

    Args:
        parser: The parser.
        prefix: The options are called `--<prefix>-<field>`.
        **defaults: Other defaults than those of the fields.
    """
    group = parser.add_argument_group(f"{prefix} model")
    kinds = typing.get_type_hints(LLMOptions)
    for item in fields(LLMOptions):
        default = defaults.get(item.name, item.default)
        # Help formatters that add the default themselves leave a text with "%(default)" alone; ".0" shows nothing.
        shown = " (default: %(default)s)" if default not in (None, "") else "%(default).0s"
        group.add_argument(
            f"--{prefix}-{item.name.replace('_', '-')}",
            type=_kind(kinds[item.name]),
            default=default,
            choices=item.metadata["choices"],
            help=item.metadata["help"].replace("%", "%%") + shown,
        )


def from_arguments(arguments: argparse.Namespace, prefix: str = "teacher") -> LLMOptions:
    """The options of a parsed command line.

    Args:
        arguments: From a parser that `add_arguments` was called on.
        prefix: As given there.

    Raises:
        ValueError: see `LLMOptions`.
    """
    name = prefix.replace("-", "_")
    try:
        return LLMOptions(**{item.name: getattr(arguments, f"{name}_{item.name}") for item in fields(LLMOptions)})
    except ValueError as error:
        # The fields' names alone would leave open whose they are: builders have a --concurrency of their own.
        raise ValueError(f"options --{prefix}-...: {error}") from None


def open_client(options: LLMOptions, environment: Mapping[str, str] = os.environ) -> LedgerClient:
    """Open backend and ledger.

    Args:
        options: What to open.
        environment: Where the key is read from.

    Returns:
        A client; `close` closes the ledger too.

    Raises:
        ValueError: a key or a package is missing, or the backend or the ledger can't be opened.
    """
    # The key before the ledger: a run that can't start leaves no file behind.
    key = _key(options, environment)
    ledger = Ledger(options.ledger) if options.ledger else None
    try:
        backend = _backend(options, key, ledger)
    except BaseException:
        if ledger is not None:
            ledger.close()
        raise
    limits = Limits(
        # Local backends group what waits, so nothing may wait before them; a batch sends nothing.
        concurrency=options.concurrency if options.backend in KEY_VARIABLES else None,
        requests_per_minute=options.requests_per_minute if options.backend != "batch" else None,
        tokens_per_minute=options.tokens_per_minute if options.backend != "batch" else None,
        timeout=None if options.backend in _LOCAL else options.timeout,
    )
    return LedgerClient(backend, ledger, limits, Retry(options.attempts), secrets=[key] if key else ())


def _backend(options: LLMOptions, key: str | None, ledger: Ledger | None) -> Backend:
    """The backend; its module is imported here, so that no other backend's packages are needed."""
    more: dict[str, Any] = {"extra": _extra(options.extra)}
    if options.send_temperature != "auto":
        more["send_temperature"] = options.send_temperature == "yes"
    if options.backend == "openai":
        from tripletune.models.llm.backends.openai import OpenAIBackend

        field: Any = options.token_field
        return OpenAIBackend(options.model, options.url, key, options.timeout, token_field=field, **more)
    if options.backend == "anthropic":
        from tripletune.models.llm.backends.anthropic import AnthropicBackend

        return AnthropicBackend(options.model, options.url, key, options.timeout, **more)
    if options.backend == "hf":
        from tripletune.models.llm.backends.hf import HFBackend

        return HFBackend(options.model, options.batch_size, options.dtype, template_options=more["extra"])
    from tripletune.models.llm.backends.batch import BatchBackend

    if ledger is None:
        raise ValueError("backend batch needs a ledger")
    folder = options.batch_folder or f"{options.ledger}.batch"
    layout: Any = options.batch_layout
    field = options.token_field
    return BatchBackend(options.model, layout, Path(folder), ledger, token_field=field, **more)


def _key(options: LLMOptions, environment: Mapping[str, str]) -> str | None:
    default = KEY_VARIABLES.get(options.backend)
    if default is None:
        return None
    name = options.api_key_env
    if name is None and options.url is not None:
        # A server of one's own: the provider's key is not sent to it.
        return None
    key = environment.get(name or default, "").strip()
    if name is not None and not key:
        raise ValueError(f"the environment variable {name}, named by api_key_env, is not set")
    # Without a name the backend knows whether its server wants a key.
    return key or None


def _kind(hint: Any) -> Callable[[str], Any]:
    """The type that an option's text is turned into: that of the field, without its `None`."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in hint.__args__ if part is not types.NoneType)
    kind: Callable[[str], Any] = hint
    return kind


def _is_plain(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return (
            parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc and not parts.query
        )
    except ValueError:
        return False


def _extra(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError('extra must be a JSON object, for example {"reasoning_effort": "low"}')
    return found
