"""A mock of the hosted model APIs on loopback, in a thread: replies, delays, faults and a record.

It speaks OpenAI's chat completions (`/v1/chat/completions`) and Anthropic's messages (`/v1/messages`); requests for
completions and embeddings (`/v1/completions`, `/v1/embeddings`) are answered by a raw body. A reply function gets the
request's JSON body and gives back a text or a `Reply`. Which fault meets a request depends on the seed, the request's
body and its attempt number alone, never on the order in which requests arrive.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aiohttp import web

Body = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """A reply with more than a text: another finish reason, an error status, or a body of its own."""

    text: str = ""
    finish_reason: str | None = None
    status: int = 200
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    raw: str | None = None


@dataclass
class Faults:
    """Probabilities of what goes wrong.

    `at_most` faults meet the same request body, then it is answered: a client with more attempts always gets through.
    """

    rate_limit: float = 0.0  # 429 with Retry-After
    server_error: float = 0.0  # 500
    hang: float = 0.0  # nothing for `hang_seconds`: the client's time-out
    cut_off: float = 0.0  # a whole HTTP response with half a JSON body
    broken_off: float = 0.0  # half the promised bytes, then the connection ends
    drop: float = 0.0  # the connection ends without a response
    empty: float = 0.0  # an empty reply
    seed: int = 0
    at_most: int = 3
    retry_after: float = 0.01
    hang_seconds: float = 30.0

    KINDS = ("rate_limit", "server_error", "hang", "cut_off", "broken_off", "drop", "empty")

    def draw(self, key: str, attempt: int) -> str | None:
        """The fault of a request's n-th attempt (from 0), or None."""
        if attempt >= self.at_most:
            return None
        left = random.Random(f"{self.seed} {key} {attempt}").random()
        for kind in self.KINDS:
            left -= getattr(self, kind)
            if left < 0:
                return kind
        return None


def body_key(body: Body) -> str:
    """Short hash of a request body: the same call always has the same one."""
    text = json.dumps(body, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def texts(body: Body) -> list[str]:
    """The texts of a request in either layout, the system prompt first."""
    system = body.get("system") or []
    blocks = [{"content": system}] if isinstance(system, str) and system else [{"content": b["text"]} for b in system]
    return [message["content"] for message in (*blocks, *body["messages"])]


def echo(body: Body) -> str:
    """The reply function by default: the last message again."""
    return texts(body)[-1]


def count(text: str) -> int:
    """Tokens as the mock counts them: words."""
    return len(text.split())


class Event(NamedTuple):
    """What happened to a request: "request" when it arrived, "answered" in full and without a fault, or its fault."""

    what: str
    key: str


class MockServer:
    """The server, as a context manager that runs it in a thread; `authorizations` are the keys that clients sent."""

    def __init__(
        self, reply: Callable[[Body], str | Reply] = echo, delay: float = 0.0, faults: Faults | None = None
    ) -> None:
        self.reply, self.delay, self.port, self.faults = reply, delay, 0, faults or Faults()
        self.events: list[Event] = []
        self.bodies: list[Body] = []
        self.at_once = self.most_at_once = 0
        self.authorizations: set[str] = set()

    def count(self, what: str) -> Counter[str]:
        """How often something happened, by body key."""
        return Counter(event.key for event in list(self.events) if event.what == what)

    @property
    def root(self) -> str:
        """Base URL of the Anthropic SDK."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Base URL of the OpenAI SDK."""
        return f"{self.root}/v1"

    def __enter__(self) -> MockServer:
        """Start the server in a thread with an event loop of its own; it listens when this returns."""
        started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()

        async def run() -> None:
            app = web.Application(client_max_size=64 * 2**20)
            app.router.add_post("/v1/chat/completions", self._handle)
            app.router.add_post("/v1/completions", self._handle)
            app.router.add_post("/v1/messages", self._handle)
            app.router.add_post("/v1/embeddings", self._handle)
            # Requests that still hang when the server stops are cut at once.
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", backlog=1024, port=0).start()
            self.port = runner.addresses[0][1]
            started.set()
            await self._stop.wait()
            await runner.cleanup()
            # Requests that hang and whose client is gone are no connection's any more.
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(run()), daemon=True)
        self._thread.start()
        if not started.wait(10):
            raise RuntimeError("the mock server did not start")
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the server and its loop."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        """Note a request, and answer it; the number of requests at once is counted meanwhile."""
        body = await request.json()
        key = body_key(body)
        attempt = self.count("request")[key]
        self.events.append(Event("request", key))
        # Anthropic's package sent X-Api-Key, and sends a bearer token since.
        sent = request.headers.get("Authorization") or request.headers.get("X-Api-Key") or ""
        self.authorizations.add(sent.removeprefix("Bearer "))
        self.bodies.append(body)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self._answer(request, body, key, attempt)
        finally:
            self.at_once -= 1

    async def _answer(self, request: web.Request, body: Body, key: str, attempt: int) -> web.StreamResponse:
        """The answer to an attempt at a call, with the fault that was drawn for it."""
        anthropic, fault = request.path.endswith("/messages"), self.faults.draw(key, attempt)
        if fault:
            self.events.append(Event(fault, key))
        await asyncio.sleep(self.faults.hang_seconds if fault == "hang" else self.delay)
        if fault in ("hang", "drop"):
            return _end(request)
        found = self.reply(body)
        reply = Reply(found) if isinstance(found, str) else found
        if fault == "rate_limit":
            reply = Reply(status=429, message="slow down", headers={"Retry-After": str(self.faults.retry_after)})
        elif fault == "server_error":
            reply = Reply(status=500, message="the mock failed")
        elif fault == "empty":
            reply = Reply("")
        if reply.status != 200:
            return _error(reply, anthropic)
        layout = _message if anthropic else _completion
        text = json.dumps(layout(body, reply)) if reply.raw is None else reply.raw
        return await self._send(request, text, key, fault)

    async def _send(self, request: web.Request, text: str, key: str, fault: str | None) -> web.StreamResponse:
        """Send a body, or the part of it that the fault lets through."""
        data = text.encode()
        if fault == "cut_off":
            data = data[: len(data) // 2]
        if request.transport is None or request.transport.is_closing():
            return web.Response()
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(data))})
        await response.prepare(request)
        if fault == "broken_off":
            await response.write(data[: len(data) // 2])
            return _end(request)
        # Noted before the last byte leaves: whoever has the reply finds it there.
        if fault is None:
            self.events.append(Event("answered", key))
        await response.write(data)
        await response.write_eof()
        return response


def _completion(body: Body, reply: Reply) -> Body:
    """A reply in OpenAI's layout of chat completions."""
    message = {"role": "assistant", "content": reply.text}
    usage = {"prompt_tokens": sum(map(count, texts(body))), "completion_tokens": count(reply.text)}
    choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason or "stop"}
    return {"object": "chat.completion", "model": body.get("model", ""), "choices": [choice], "usage": usage}


def _message(body: Body, reply: Reply) -> Body:
    """A reply in Anthropic's layout of messages."""
    # Tokens of the provider's cache are counted apart.
    cached = count(texts(body)[0]) if isinstance(body.get("system"), list) else 0
    usage = {"input_tokens": sum(map(count, texts(body))) - cached, "cache_read_input_tokens": cached}
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": reply.text}] if reply.text else [],
        "stop_reason": reply.finish_reason or "end_turn",
        "usage": {**usage, "output_tokens": count(reply.text)},
    }


def _end(request: web.Request) -> web.Response:
    """Break the connection off: the client gets no answer."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def _error(reply: Reply, anthropic: bool) -> web.Response:
    """An error in the layout of OpenAI or Anthropic."""
    if reply.raw is not None:
        return web.Response(status=reply.status, headers=reply.headers, text=reply.raw)
    kind = {429: "rate_limit_error", 401: "authentication_error"}.get(reply.status, "api_error")
    error: Body = {"error": {"type": kind, "message": reply.message}}
    if anthropic:
        error["type"] = "error"
    return web.json_response(error, status=reply.status, headers=reply.headers)
