"""The HTTP client under the providers' SDKs: aiohttp where it is installed, and requests built without detours.

Both SDKs hand over an address, headers and a body that are complete. Their HTTP library then parses the address twice
more, merges the headers with its own and looks them up again and again, which was a quarter of the processor time of a
call. `build_request` is a public method of the library's client; here it takes what is complete as it is, and leaves
everything else (parameters, files, cookies) to the library. The request that is sent is the same.

Replies that come together are taken up one after the other (`Turns`), so that the first of them is followed by its next
call before the second is parsed. An event loop by itself would take every step of all of them together: the server gets
their next calls in one bunch too, and waits for the client meanwhile.
"""

from __future__ import annotations

import asyncio
import importlib
from collections import deque
from functools import lru_cache
from types import ModuleType
from typing import Any

# Turns of the event loop from a reply to the next request: parsed, stored, given back, asked for, sent.
_STEPS = 10


class Turns:
    """Lets replies through in the order of their arrival, each some turns of the event loop after the one before.

    A turn ends by itself, whatever becomes of its reply: nobody can keep it.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False

    async def wait(self) -> None:
        """Return when it is this reply's turn."""
        loop = asyncio.get_running_loop()
        if self._taken:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._taken = True
            loop.call_soon(self._step, loop, _STEPS)

    def _step(self, loop: asyncio.AbstractEventLoop, left: int) -> None:
        if left > 0:
            loop.call_soon(self._step, loop, left - 1)
            return
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                # One more: the reply goes on in the next turn of the loop.
                loop.call_soon(self._step, loop, _STEPS + 1)
                return
        self._taken = False


def http_client(sdk: ModuleType, timeout: float) -> Any:
    """The SDK's aiohttp client; None where aiohttp or the SDK's support of it is missing: the SDK's own default.

    The default transport walks through all its connections at every request, which at 64 calls in flight is most of a
    call's processor time; aiohttp's does not.

    Args:
        sdk: The module of `openai` or `anthropic`.
        timeout: Seconds for one attempt.
    """
    try:
        return _quick(sdk.DefaultAioHttpClient)(timeout=timeout)
    except (AttributeError, RuntimeError, ImportError):
        return None


def response_type(sdk: ModuleType) -> type[Any]:
    """The class of a plain HTTP response, which an SDK's `post` gives back undecoded when it is asked for."""
    kind: type[Any] = _library(sdk.DefaultAsyncHttpxClient).Response
    return kind


def _library(client: type[Any]) -> Any:
    """The HTTP library of an SDK's client: httpx2, or httpx under older SDKs."""
    base = next(kind for kind in client.__mro__ if kind.__name__ == "AsyncClient")
    return importlib.import_module(base.__module__.partition(".")[0])


@lru_cache(maxsize=8)
def _quick(base: type[Any]) -> type[Any]:
    """A subclass of an SDK's HTTP client whose `build_request` is quick."""
    library = _library(base)

    class QuickClient(base):  # type: ignore[misc, valid-type]
        """See the module."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self._addresses: dict[str, Any] = {}
            self._turns = Turns()

        async def send(self, request: Any, **options: Any) -> Any:
            response = await super().send(request, **options)
            await self._turns.wait()
            return response

        def build_request(
            self, method: str, url: Any, *, content: Any = None, headers: Any = None, timeout: Any = None, **rest: Any
        ) -> Any:
            special = any(value is not None for value in rest.values()) or self.cookies or self.params
            address = None if special else self._address(str(url))
            if address is None or timeout is None or not isinstance(content, (bytes, str)):
                return super().build_request(method, url, content=content, headers=headers, timeout=timeout, **rest)
            body = content.encode("utf-8") if isinstance(content, str) else content
            # As the library does: the request's own headers go before the client's.
            pairs = list(headers.multi_items() if hasattr(headers, "multi_items") else headers or ())
            own = {name.lower() for name, _ in pairs}
            first = [("host", address.netloc.decode("ascii")), ("content-length", str(len(body)))]
            both = [*first, *self.headers.multi_items()]
            pairs = [(name, value) for name, value in both if name.lower() not in own] + pairs
            request = library.Request(
                method,
                address,
                headers=library.Headers(pairs, encoding="utf-8"),
                stream=library.ByteStream(body),
                extensions={"timeout": library.Timeout(timeout).as_dict()},
            )
            request.read()
            return request

        def _address(self, url: str) -> Any:
            """The parsed address, or None for one that the library must complete. A backend uses a single one."""
            if url not in self._addresses:
                parsed = library.URL(url)
                self._addresses = {url: None if parsed.is_relative_url else parsed}
            return self._addresses[url]

    return QuickClient
