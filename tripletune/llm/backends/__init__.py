"""Options to call a model (`--teacher openai --teacher-model NAME ...`), and the client that they open.

A backend is a module in `tripletune/llm/backends/` whose `BACKEND` says what the backend needs and how to open it. Keys
are read from the environment when the client is opened, never from options.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from tripletune.core.calls import Backend, Sampling, ledger_name
from tripletune.core.command_line import add_arguments
from tripletune.core.options import CheckedOptions, not_one_of, rare, setting
from tripletune.core.plugins import load_from, names_in
from tripletune.models.specs import DTYPE_HELP, DTYPES, usual_dtype

if TYPE_CHECKING:
    from tripletune.llm.ledger import Ledger
    from tripletune.llm.ledger_client import LedgerClient
    from tripletune.llm.limits import Limits

_BACKENDS = "tripletune.llm.backends"
URL_FORM = "must look like http://host:port/v1, without user, password or query"
# Fields that `extra` may not set, because an option or the program sets them.
_OWN_FIELDS = {"model", "messages", "system", "stream", "n", "temperature", "top_p", "seed"}
_SPEC = re.compile(r"(?:(?P<role>[\w.]+)=)?(?P<backend>\w+):(?P<model>.+?)(?:@(?P<url>https?://.+))?")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")


@dataclass(frozen=True)
class LLMOptions(CheckedOptions):
    """How to call a model; the help texts explain the fields."""

    backend: str = setting("openai", f"backend that runs the model: {', '.join(names_in(_BACKENDS))}", is_prefix=True)
    model: str = setting(
        "", "name of the model, for example gpt-4o-mini; for hf owner/name[@revision], a folder or pypi:NAME"
    )
    url: str | None = setting(
        None, "base URL of the server (default: the provider's); several servers, separated by commas, share the calls"
    )
    api_key_env: str | None = rare(None, "name of the environment variable with the key (default: the provider's)")
    ledger: str | None = setting(None, "SQLite file that stores all calls, to resume a run and count costs")
    concurrency: int = setting(64, "maximum calls at once", above=0)
    requests_per_minute: float | None = rare(None, "maximum calls per minute", above=0)
    tokens_per_minute: float | None = rare(None, "maximum tokens per minute, prompts and replies together", above=0)
    timeout: float = setting(120.0, "timeout in seconds of one attempt at a call", above=0)
    attempts: int = rare(8, "maximum attempts at a call that fails for a temporary reason", above=0)
    temperature: float = setting(0.0, "sampling temperature; 0 is greedy", at_least=0)
    top_p: float = rare(1.0, "top-p of nucleus sampling; 1 keeps every token", above=0, at_most=1)
    seed: int | None = setting(None, "sampling seed, for servers that accept one; part of the ledger key")
    send_temperature: str = rare("auto", "whether to send temperature and top_p, which hosted reasoning models reject",
        choices=("auto", "yes", "no"))  # fmt: skip
    token_field: str = rare(
        "auto", "request field that limits the reply's tokens", choices=("auto", "max_tokens", "max_completion_tokens")
    )
    extra: str | None = rare(None, 'more fields of the request body as JSON, for example {"reasoning_effort": "low"}')
    batch_layout: str = rare("openai", "layout of request files", choices=("openai", "anthropic"))
    batch_size: int = setting(32, "maximum calls per forward pass of a local model", above=0)
    dtype: str | None = setting(None, f"for a local model: {DTYPE_HELP}", choices=DTYPES)

    def check(self) -> list[str]:
        """Return the problems that choices and ranges do not cover, one sentence each.

        No sentence holds a key, since messages end up in logs.
        """
        messages = []
        if self.backend not in backend_names():
            messages.append(not_one_of("backend", self.backend, backend_names()))
        if not self.model:
            messages.append("model is not set: name the model")
        if self.api_key_env is not None and not _VARIABLE.fullmatch(self.api_key_env):
            # The value is not printed, because it may be the key.
            messages.append("api_key_env must be the NAME of an environment variable, in capitals, not the key itself")
        if not all(url is None or is_plain_url(url) for url in self.urls):
            messages.append(f"url {URL_FORM}")
        elif self.url is not None and self.backend in backend_names() and self.is_local:
            messages.append(f"url {self.url} has no effect with backend {self.backend}, which runs the model here")
        try:
            self.extra_fields  # noqa: B018
        except ValueError as error:
            messages.append(str(error))
        return messages

    @property
    def urls(self) -> list[str | None]:
        """The base URLs; None stands for the provider's URL."""
        if self.url is None:
            return [None]
        return [url.strip() for url in self.url.split(",")]

    @cached_property
    def extra_fields(self) -> dict[str, Any] | None:
        """The fields of `extra`; None if it is not set.

        They go into the body of each call, and into its key in the ledger.

        Raises:
            ValueError: It is no JSON object, or it sets a field that an option or the program sets.
        """
        if self.extra is None:
            return None
        try:
            extra = json.loads(self.extra)
            # JSON itself has no NaN, so servers reject it.
            json.dumps(extra, allow_nan=False)
        except (ValueError, RecursionError):
            extra = None
        if not isinstance(extra, dict):
            raise ValueError('extra must be a JSON object, for example {"reasoning_effort": "low"}, without NaN')
        own = sorted(_OWN_FIELDS & extra.keys())
        if own:
            raise ValueError(
                f"extra holds {', '.join(own)}: remove these fields; model, temperature, top_p and seed have options, "
                "and the program sets the other fields"
            )
        return extra

    @property
    def ledger_name(self) -> str:
        """The model's name in the ledger, without opening the model.

        It is part of the key of every call, so a change here would make a ledger's replies useless: they would be paid
        again.
        """
        kind = self.backend
        if not load_backend(kind).sends:
            # Replies of a batch file serve runs that call the same provider, and the other way round.
            kind = self.batch_layout
        dtype = usual_dtype(self.dtype) if self.is_local else None
        return ledger_name(kind, self.model, self.extra_fields, dtype)

    @property
    def is_local(self) -> bool:
        """Whether the model runs on this machine."""
        return load_backend(self.backend).local

    def sampling(self, max_tokens: int) -> Sampling:
        """The sampling of a call whose reply has at most `max_tokens` tokens."""
        return Sampling(self.temperature, self.top_p, max_tokens, self.seed)


@dataclass(frozen=True)
class BackendKind:
    """The `BACKEND` of a module of `tripletune/llm/backends/`.

    Attributes:
        open: Opens the backend with the options, the key (or None) and the ledger (or None).
        key_variable: The environment variable with the key; None for a backend without keys.
        local: Whether the model runs on this machine, so that calls are batched and need no limits.
        sends: Whether calls are answered at once; False for a backend that only writes them to batch files.
    """

    open: Callable[[LLMOptions, str | None, Ledger | None], Backend]
    key_variable: str | None = None
    local: bool = False
    sends: bool = True


def backend_names() -> list[str]:
    """The names of all backends."""
    return names_in(_BACKENDS)


def load_backend(name: str) -> BackendKind:
    """The `BackendKind` of a backend; imports only its module."""
    return load_from(_BACKENDS, name, "backend").BACKEND


class ModelFields(TypedDict):
    """Fields of `LLMOptions` that a model's spec names; the url is None if it has none."""

    backend: str
    model: str
    url: str | None


class ModelSpec(NamedTuple):
    """A parsed spec `[ROLE=]BACKEND:MODEL[@URL,URL]`; the role is "" if it has none."""

    role: str
    fields: ModelFields


def read_spec(spec: str) -> ModelSpec:
    """Parse `[ROLE=]BACKEND:MODEL[@URL,URL]`.

    Raises:
        ValueError: The text has another form, or names no backend.
    """
    match = _SPEC.fullmatch(spec)
    if match is None or match["backend"] not in backend_names():
        raise ValueError(
            f"--llm {spec}: write [ROLE=]BACKEND:MODEL[@URL,URL], for example t2rag.resolve=hf:runs/student, "
            f"where BACKEND is one of {', '.join(backend_names())}"
        )
    if match["backend"] != "hf" and re.search("@[^@]*[:/]", match["model"]):
        raise ValueError(f"--llm {spec}: write the URL with http:// or https://")
    named = ModelFields(backend=match["backend"], model=match["model"], url=match["url"])
    return ModelSpec(match["role"] or "", named)


class _ChatModel(argparse.Action):
    """Set `--teacher`, `--teacher-model` and `--teacher-url`."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Set the three fields, unless one is also set by a flag of its own.

        The words of the command line (`CommandParser.words`) are looked at, since the namespace does not tell a default
        from a flag. A role has no place here: there is one chat model. `values` is the flag's one text.
        """
        try:
            role, spec = read_spec(values)
        except ValueError as error:
            parser.error(str(error))
        flags = {word.split("=")[0] for word in getattr(parser, "words", ())}
        superfluous = sorted(flags & {"--teacher", "--teacher-model", "--teacher-url"})
        if role:
            superfluous.append(f"{role}=")
        if superfluous:
            parser.error(f"--llm {values} already names the only chat model, so leave out {', '.join(superfluous)}")
        namespace.teacher = spec["backend"]
        namespace.teacher_model = spec["model"]
        if spec["url"]:
            namespace.teacher_url = spec["url"]


def add_chat_model(group: argparse._ActionsContainer, *others: str) -> None:
    """Add `--llm` and `--teacher-…` to a group of a parser, except the fields in `others`."""
    add_llm(group)
    names = [item.name for item in fields(LLMOptions) if item.name not in others]
    add_arguments(group, LLMOptions, "teacher", only=names)


def add_llm(group: argparse._ActionsContainer) -> None:
    """Add `--llm` to a group of a parser that has `--teacher-…`."""
    about = "chat model, BACKEND:MODEL[@URL,URL], for example openai:gpt-4o-mini, instead of --teacher…"
    group.add_argument("--llm", action=_ChatModel, metavar="MODEL", help=about)


def open_client(options: LLMOptions, environment: Mapping[str, str] = os.environ) -> LedgerClient:
    """Open backend and ledger; closing the client closes both.

    Args:
        options: The model, its servers and limits. Several URLs are several servers of one model.
        environment: Holds the API key, whose name is in the options.

    Raises:
        SetupError, ValueError: The key or a library is missing, or the options do not fit the backend.
    """
    # Imported here, since every program has these options in its `--help`, which calls no model.
    from tripletune.llm.backends._servers import Servers
    from tripletune.llm.ledger import Ledger
    from tripletune.llm.ledger_client import LedgerClient, Retry

    kind = load_backend(options.backend)
    key = _key_from_environment(options, kind, environment)
    ledger = Ledger(options.ledger) if options.ledger else None
    try:
        backends = [kind.open(replace(options, url=url), key, ledger) for url in options.urls]
        backend = backends[0]
        if len(backends) > 1:
            backend = Servers(backends)
    except BaseException:
        if ledger is not None:
            ledger.close()
        raise
    secrets = [key] if key else []
    return LedgerClient(backend, ledger, _limits_of(options, kind), Retry(options.attempts), secrets)


def _limits_of(options: LLMOptions, kind: BackendKind) -> Limits:
    """The limits that the options set, as far as they make sense for a kind of backend."""
    from tripletune.llm.limits import Limits

    if not kind.sends:
        # Calls are only written to files.
        return Limits(timeout=options.timeout)
    rates = (options.requests_per_minute, options.tokens_per_minute)
    if kind.local:
        # A local backend batches the calls that wait, so no limit on concurrency may hold them back.
        return Limits(None, *rates)
    return Limits(options.concurrency, *rates, options.timeout)


def _key_from_environment(options: LLMOptions, kind: BackendKind, environment: Mapping[str, str]) -> str | None:
    """The key from the environment; None if the backend needs none, or if none is set."""
    if kind.key_variable is None or (options.api_key_env is None and options.url is not None):
        # The provider's key is not sent to another server.
        return None
    name = options.api_key_env or kind.key_variable
    key = environment.get(name, "").strip()
    if options.api_key_env is not None and not key:
        raise ValueError(f"api_key_env names the environment variable {name}, but it is not set")
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"the environment variable {name} holds characters that no API key has: set it again")
    # Without api_key_env the backend knows whether its server needs a key.
    return key or None


def is_plain_url(url: str) -> bool:
    """Whether a base URL is http(s) and holds no secret; see `URL_FORM`."""
    try:
        split = urllib.parse.urlsplit(url)
        port = split.port
    except ValueError:
        return False
    if split.scheme not in ("http", "https") or not split.hostname or port == 0:
        return False
    # User and password stand before an @, and some gateways take a key in the query.
    return "@" not in split.netloc and not split.query
