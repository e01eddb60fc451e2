"""The HTTP side of a server: OpenAI's routes over the models of a shelf, metrics, and the page.

A loop's reply has the answer as its content and all else under `tripletune`: the trace, passages, triples. In a stream
each plan and each round of retrieval comes when it happens, as an object of that name and, for other clients, as a line
of `reasoning_content`; then the answer, then the whole trace. Errors have OpenAI's shape. Neither questions nor answers
are logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import prometheus_client as prometheus
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tripletune.models.llm import CallError, PromptTooLong
from tripletune.rag import TraceAction, TraceStep
from tripletune.serve.door import Door, Refused, closing
from tripletune.serve.protocol import Body, Layout, read_body
from tripletune.serve.served import Answer, Shelf

logger = logging.getLogger(__name__)
_SERVE = Path(__file__).parent
_FILES = {
    "/": (_SERVE / "page.html", "text/html"),
    "/page.css": (_SERVE / "page.css", "text/css"),
    "/page.js": (_SERVE / "page.js", "text/javascript"),
    "/trace.css": (_SERVE.parent / "rag/trace.css", "text/css"),
    "/trace.js": (_SERVE.parent / "rag/trace.js", "text/javascript"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
# Seconds in which a body must have arrived; the status of a client that has hung up, which only metrics see.
_BODY_SECONDS, _GONE = 30.0, 499
Handler = Callable[[Request], Awaitable[Response]]
Event = TraceAction | TraceStep


class Service:
    """The routes and what they share.

    Args:
        key: What clients must send as their key; empty: no key.
        most: Largest body of a request, in bytes.
        hosts: Names by which clients may reach the server; empty: any.
    """

    def __init__(self, shelf: Shelf, door: Door, key: str = "", most: int = 2**20, hosts: tuple[str, ...] = ()) -> None:
        self.shelf, self.door, self._key, self._most = shelf, door, key.encode(), most
        self._started = int(time.time())
        self._metrics = prometheus.CollectorRegistry()
        about: Any = {"registry": self._metrics, "namespace": "tripletune"}
        self._counted = prometheus.Counter("questions", "Questions by model and status", ["model", "status"], **about)
        self._seconds = prometheus.Histogram(
            "question_seconds", "Seconds of answered questions, waiting included", ["model"],
            buckets=(0.1, 0.3, 1, 3, 10, 30, 100), **about,
        )  # fmt: skip
        self._tokens = prometheus.Counter("tokens", "Tokens read and written by models", ["model", "kind"], **about)
        for name in ("under_way", "waiting"):
            gauge = prometheus.Gauge(f"questions_{name}", f"Questions that are {name.replace('_', ' ')}", **about)
            gauge.set_function(partial(getattr, door, name))
        api = {
            "/v1/chat/completions": (self._chat, "POST"), "/v1/completions": (self._complete, "POST"),
            "/v1/models": (self._list, "GET"), "/v1/models/{model}": (self._about, "GET"),
            "/metrics": (self._measured, "GET"),
        }  # fmt: skip
        self.app = Starlette(
            routes=[
                *(Route(path, self._guarded(handle), methods=[method]) for path, (handle, method) in api.items()),
                *(Route(path, _file(*found)) for path, found in _FILES.items()),
                Route("/healthz", _alive),
                Route("/readyz", self._ready),
            ],
            exception_handlers={HTTPException: _http_error},
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts) or ["*"], www_redirect=False)],
        )

    # Routes -----------------------------------------------------------------------------------------------------------

    def _guarded(self, handle: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            try:
                self._admit(request)
                return await handle(request)
            except Refused as refusal:
                return JSONResponse(refusal.to_json(), refusal.status, refusal.headers)

        return guarded

    def _admit(self, request: Request) -> None:
        origin = request.headers.get("origin")
        if origin and origin.partition("://")[2] != request.headers.get("host"):
            raise Refused(403, "requests from pages of other origins are not answered", "other_origin")
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip().encode()
        if self._key and not secrets.compare_digest(given, self._key):
            raise Refused(401, "this server wants its key as 'Authorization: Bearer KEY'", "invalid_api_key")

    async def _chat(self, request: Request) -> Response:
        return await self._reply(request, chat=True)

    async def _complete(self, request: Request) -> Response:
        return await self._reply(request, chat=False)

    async def _list(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._entry(name) for name in self.shelf.models]})

    async def _about(self, request: Request) -> Response:
        self._find(name := request.path_params["model"])
        return JSONResponse(self._entry(name))

    def _entry(self, name: str) -> dict[str, Any]:
        about = {"id": name, "object": "model", "created": self._started, "owned_by": "tripletune"}
        return about | {"tripletune": {"kind": self.shelf.models[name].kind}}

    def _find(self, name: str) -> None:
        if name not in self.shelf.models:
            known = ", ".join(self.shelf.models)
            why = f"; {name} can't run here: {self.shelf.left_out[name]}" if name in self.shelf.left_out else ""
            raise Refused(404, f"there is no model {name[:100]!r}, only {known}{why}", "model_not_found", "model")

    async def _measured(self, _: Request) -> Response:
        return Response(prometheus.generate_latest(self._metrics), media_type=prometheus.CONTENT_TYPE_LATEST)

    async def _ready(self, _: Request) -> Response:
        closed = self.door.closed
        return JSONResponse({"status": "shutting down" if closed else "ready"}, 503 if closed else 200)

    # Questions --------------------------------------------------------------------------------------------------------

    async def _reply(self, request: Request, chat: bool) -> Response:
        body = await self._body(request, chat)
        self._find(body.model)
        layout, events = Layout(body), self._events(request, body)
        # Errors before the first event have their status also where the reply is a stream.
        event = await anext(events)
        if body.stream:
            return _Stream(_lines(event, events, layout), media_type="text/event-stream")
        async with aclosing(events):
            while not isinstance(event, Answer):
                event = await anext(events)
        return JSONResponse(layout.whole(event))

    async def _body(self, request: Request, chat: bool) -> Body:
        found, size = bytearray(), request.headers.get("content-length", "0")
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for part in request.stream():
                    found += part
                    if len(found) > self._most or (size.isdigit() and int(size) > self._most):
                        raise Refused(413, f"the body has more than {self._most:,} bytes", "too_large")
        except TimeoutError:
            raise Refused(408, "the body of the request did not arrive in time", "timeout") from None
        except ClientDisconnect:
            raise Refused(_GONE, "the client has hung up") from None
        return read_body(bytes(found), chat)

    async def _events(self, request: Request, body: Body) -> AsyncGenerator[Event | Answer, None]:
        """What happens on the way to an answer, and the answer; the work ends when the client hangs up."""
        seen = asyncio.Queue[Any]()
        work = asyncio.create_task(self._work(body, seen.put_nowait))
        work.add_done_callback(seen.put_nowait)
        gone = asyncio.create_task(_hung_up(request))
        gone.add_done_callback(lambda _: work.cancel())
        try:
            while (event := await seen.get()) is not work:
                yield event
            if work.cancelled():
                raise Refused(_GONE, "the client has hung up") if gone.done() else closing()
            yield work.result()
        finally:
            gone.cancel()
            work.cancel()

    async def _work(self, body: Body, watch: Callable[[Event], None]) -> Answer:
        started, status = time.perf_counter(), _GONE
        try:
            async with self.door.place():
                answer = await self.shelf.models[body.model].answer(body.asked, watch)
            self._seconds.labels(body.model).observe(time.perf_counter() - started)
            self._tokens.labels(body.model, "prompt").inc(answer.prompt_tokens)
            self._tokens.labels(body.model, "completion").inc(answer.completion_tokens)
            status = 200
            return replace(answer, text=body.cut(answer.text))
        except Exception as error:
            refusal = _refusal(error)
            status = refusal.status
            raise refusal from None
        finally:
            self._counted.labels(body.model, str(status)).inc()


class _Stream(StreamingResponse):
    """A stream that does not watch the connection, since `Service` does."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            with suppress(OSError):
                await self.stream_response(send)


async def _lines(
    event: Event | Answer, events: AsyncGenerator[Event | Answer, None], layout: Layout
) -> AsyncGenerator[str, None]:
    """The events as lines of a stream."""
    line = lambda value: f"data: {json.dumps(value, ensure_ascii=False)}\n\n"  # noqa: E731
    async with aclosing(events):
        try:
            while not isinstance(event, Answer):
                yield line(layout.event(event))
                event = await anext(events)
            for part in layout.parts(event):
                yield line(part)
        except Refused as refusal:
            yield line(refusal.to_json())
    yield "data: [DONE]\n\n"


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refusal(error: Exception) -> Refused:
    if isinstance(error, Refused):
        return error
    if isinstance(error, PromptTooLong):
        return Refused(400, str(error), "context_length_exceeded", "messages")
    # No texts of errors in the log: they may quote what was asked.
    if isinstance(error, CallError):
        logger.warning("a question failed: the model behind it gave no reply (%s)", type(error).__name__)
        return Refused(502, f"the model behind this one gave no reply: {error}", "upstream_error")
    places = "".join(traceback.format_tb(error.__traceback__))
    logger.error("a question failed by a fault of this program: %s at\n%s", type(error).__name__, places)
    return Refused(500, "the question failed by a fault of the server; its log says where", "internal_error")


def _http_error(_: Request, error: Exception) -> Response:
    """A path or a method that does not exist."""
    status, told = getattr(error, "status_code", 500), getattr(error, "detail", "")
    refusal = Refused(status, f"{told}: the routes are GET /v1/models, POST /v1/chat/completions, POST /v1/completions")
    return JSONResponse(refusal.to_json(), status, getattr(error, "headers", None))


async def _alive(_: Request) -> Response:
    return JSONResponse({"status": "alive"})


def _file(path: Path, kind: str) -> Handler:
    text = path.read_text(encoding="utf-8")

    async def send(_: Request) -> Response:
        return Response(text, media_type=kind, headers={**_HEADERS, "Cache-Control": "no-cache"})

    return send


class Server(uvicorn.Server):
    """Ends at a signal when the questions under way are answered or `grace` is over; at a second one, at once."""

    def __init__(self, config: uvicorn.Config, door: Door, grace: float) -> None:
        super().__init__(config)
        self._door, self._grace, self._loop = door, grace, asyncio.get_running_loop()
        self._ending: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: Any) -> None:
        """A signal has come."""
        self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._ending is None:
            logger.info("ending: no new questions; %d are under way", self._door.under_way + self._door.waiting)
            self._ending = asyncio.create_task(self._door.close(self._grace))
            self._ending.add_done_callback(lambda _: setattr(self, "should_exit", True))
        else:
            self.should_exit = self.force_exit = True
