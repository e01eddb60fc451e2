"""The HTTP routes of a server: OpenAI's API, metrics, and the page.

Neither questions nor answers are logged.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import prometheus_client as prometheus
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tripletune.core import libraries
from tripletune.rag import TraceAction, TraceStep
from tripletune.serve.limits import Door, Refused, refusal_at_shutdown, refusal_of
from tripletune.serve.models import Shelf
from tripletune.serve.protocol import Answer, Asked, AskedChat, AskedText, ChatLayout, Layout, read_request
from tripletune.serve.responses import AskedResponse, Kept, ResponseLayout

libraries.check_use("serve")
_ROOT = Path(__file__).parents[1]
# The page's files by path; the view of a trace is that of the report.
_FILES = {
    "/": "serve/page.html",
    "/page.css": "serve/page.css",
    "/page.js": "serve/page.js",
    "/trace.css": "rag/trace.css",
    "/trace.js": "rag/trace.js",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
# Seconds in which a body must arrive: our choice, far more than a body below the size limit takes. It applies before a
# question has a place, so `Door.seconds` does not end a client that sends nothing.
_BODY_SECONDS = 30.0
# The status for a client that disconnected, which only metrics show.
_GONE = 499
Handler = Callable[[Request], Awaitable[Response]]
Event = TraceAction | TraceStep


class Service:
    """The routes and their shared state.

    Args:
        door: Lets a limited number of questions in.
        key: The key that clients must send; "": none.
        most: Maximum size of a body in bytes.
        hosts: Host names that clients may use; empty: any.
    """

    def __init__(self, shelf: Shelf, door: Door, key: str = "", most: int = 2**20, hosts: tuple[str, ...] = ()) -> None:
        """Make the app with its routes, and the metrics that read the door."""
        self.shelf = shelf
        self.door = door
        self._key = key.encode()
        self._most_bytes = most
        self._started = int(time.time())
        self._kept = Kept()
        self._metrics = prometheus.CollectorRegistry()
        about: Any = {"registry": self._metrics, "namespace": "tripletune"}
        self._seconds = prometheus.Histogram(
            "question_seconds", "Seconds of questions, waiting included", ["model", "status"],
            buckets=(0.1, 0.3, 1, 3, 10, 30, 100), **about,
        )  # fmt: skip
        self._tokens = prometheus.Counter("tokens", "Tokens read and written by models", ["model", "kind"], **about)
        for name in ("under_way", "waiting"):
            gauge = prometheus.Gauge(f"questions_{name}", f"Questions that are {name.replace('_', ' ')}", **about)
            gauge.set_function(partial(getattr, door, name))
        routes = [
            self._guarded_route("/v1/chat/completions", partial(self._answer_request, AskedChat), "POST"),
            self._guarded_route("/v1/completions", partial(self._answer_request, AskedText), "POST"),
            self._guarded_route("/v1/responses", partial(self._answer_request, AskedResponse), "POST"),
            self._guarded_route("/v1/models", self._list_models),
            self._guarded_route("/v1/models/{name}", self._list_models),
            self._guarded_route("/metrics", self._metrics_page),
            *(Route(path, partial(_page_file, _ROOT / name)) for path, name in _FILES.items()),
            Route("/healthz", lambda _: JSONResponse({"status": "alive"})),
            Route("/readyz", self._readiness),
        ]
        self.app = Starlette(
            routes=routes,
            exception_handlers={Refused: _error_response, HTTPException: _error_response},
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts) or ["*"], www_redirect=False)],
        )

    def _guarded_route(self, path: str, handle: Handler, method: str = "GET") -> Route:
        """A route that only answers requests with the right key and origin."""
        return Route(path, partial(self._handle_if_allowed, handle), methods=[method])

    async def _handle_if_allowed(self, handle: Handler, request: Request) -> Response:
        """Handle a request with the right key that does not come from a page of another origin.

        A browser sends requests of any page to this machine, so any page could use the models. Programs send no origin.
        """
        origin = request.headers.get("origin")
        if origin and origin.partition("://")[2] != request.headers.get("host"):
            raise Refused(403, "requests from pages of other origins are not answered", "other_origin")
        if self._key and not self._has_key(request):
            raise Refused(401, "this server requires a key: send 'Authorization: Bearer KEY'", "invalid_api_key")
        return await handle(request)

    def _has_key(self, request: Request) -> bool:
        """Whether a request has the server's key; compared in constant time, so that the time tells nothing of it."""
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and secrets.compare_digest(sent.strip().encode(), self._key)

    async def _list_models(self, request: Request) -> Response:
        """All models, or the one that the path names, as OpenAI's API lists them."""
        name = request.path_params.get("name")
        if name:
            self._refuse_unknown_model(name)
            return JSONResponse(self._model_object(name))
        return JSONResponse({"object": "list", "data": [self._model_object(name) for name in self.shelf.names]})

    def _model_object(self, name: str) -> dict[str, Any]:
        """A model as OpenAI's API describes it."""
        about = {"id": name, "object": "model", "created": self._started, "owned_by": "tripletune"}
        return {**about, "tripletune": {"kind": self.shelf.names[name]}}

    def _refuse_unknown_model(self, name: str) -> None:
        """Refuse a request for a model that is not offered, and say why not."""
        if name in self.shelf.names:
            return
        text = f"there is no model {name[:100]!r}; the models are {', '.join(self.shelf.names)}"
        if name in self.shelf.left_out:
            text += f"; why it is missing: {self.shelf.left_out[name]}"
        raise Refused(404, text, "model_not_found", "model")

    async def _readiness(self, _: Request) -> Response:
        """Whether the server takes questions: after a signal to stop, 503 sends a load balancer elsewhere."""
        if self.door.closed:
            return JSONResponse({"ready": False}, 503)
        return JSONResponse({"ready": True})

    async def _metrics_page(self, _: Request) -> Response:
        """The counts of questions and tokens, as Prometheus reads them; they hold no texts."""
        return Response(prometheus.generate_latest(self._metrics), media_type=prometheus.CONTENT_TYPE_LATEST)

    async def _answer_request(self, kind: type[Asked], request: Request) -> Response:
        """Answer a question, as one JSON object or as a stream of events.

        Both forms draw from the same events, so that both end the work when the client disconnects. Guarded by
        `test_who_hangs_up_frees_the_place_and_ends_the_call`.
        """
        asked = read_request(await self._read_body(request), kind)
        self._refuse_unknown_model(asked.model)
        layout: Layout = ChatLayout(asked)
        if isinstance(asked, AskedResponse):
            self._kept.complete(asked)
            layout = ResponseLayout(asked)
        events = self._steps_and_answer(request, asked)
        # An error before the first event sets the HTTP status, even if the reply is a stream.
        event = await anext(events)
        if asked.stream:
            return _Stream(_event_lines(event, events, layout), media_type="text/event-stream")
        async with aclosing(events):
            while not isinstance(event, Answer):
                layout.step(event)
                event = await anext(events)
        return JSONResponse(layout.whole(event))

    async def _read_body(self, request: Request) -> bytes:
        """The body of a request, refused as soon as it is too large or late.

        The bytes are counted as they arrive, since the header `Content-Length` may be absent or wrong, and a body that
        is first read whole could fill the memory.
        """
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self._most_bytes:
                        # What follows is not read, so the connection cannot be used again.
                        close = {"Connection": "close"}
                        raise Refused(
                            413, f"the body has more than {self._most_bytes:,} bytes", "too_large", headers=close
                        )
        except TimeoutError:
            raise Refused(408, "the body of the request did not arrive in time", "timeout") from None
        except ClientDisconnect:
            raise Refused(_GONE, "the client has disconnected") from None
        return bytes(body)

    async def _steps_and_answer(self, request: Request, asked: Asked) -> AsyncGenerator[Event | Answer, None]:
        """Yield the steps to an answer, then the answer; the work is cancelled if the client disconnects.

        The work is a task of its own, because the server has to listen to the connection while a model is called:
        Starlette reports a disconnect only to a task that waits for it.
        """
        # The queue gets the steps, and at the end the task itself, which then holds the answer or the error. The task
        # comes last because its callback runs when no further step can follow.
        seen = asyncio.Queue[Any]()
        work = asyncio.create_task(self._answer_in_turn(asked, seen.put_nowait))
        work.add_done_callback(seen.put_nowait)
        gone = asyncio.create_task(_wait_for_disconnect(request))
        gone.add_done_callback(lambda _: work.cancel())
        try:
            while (event := await seen.get()) is not work:
                yield event
            if work.cancelled():
                raise Refused(_GONE, "the client has disconnected") if gone.done() else refusal_at_shutdown()
            yield work.result()
        finally:
            gone.cancel()
            work.cancel()

    async def _answer_in_turn(self, asked: Asked, watch: Callable[[Event], None]) -> Answer:
        """Answer a request when it is its turn, and measure it.

        Every error leaves as a `Refused`, so that a stream can send it as an event. A cancelled task raises no
        `Exception`, so its status stays `_GONE`.
        """
        started = time.perf_counter()
        status = _GONE
        try:
            async with self.door.place():
                answer = await self.shelf.answer(asked, watch)
            if isinstance(asked, AskedResponse):
                self._kept.add(asked, answer.text)
            for kind in ("prompt", "completion"):
                self._tokens.labels(asked.model, kind).inc(answer.usage[f"{kind}_tokens"])
            status = 200
            return answer
        except Exception as error:
            refusal = refusal_of(error)
            refusal.param = asked.own_names.get(refusal.param or "", refusal.param)
            status = refusal.status
            raise refusal from None
        finally:
            self._seconds.labels(asked.model, str(status)).observe(time.perf_counter() - started)


class _Stream(StreamingResponse):
    """A stream that does not watch the connection, since `Service` does.

    Of two readers, one would take the message that the other waits for.
    """

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the stream by ASGI's `send`, and end the work behind it in any case."""
        # Closing the iterator ends the work behind it; an `OSError` means that the client has disconnected.
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            with suppress(OSError):
                await self.stream_response(send)


async def _event_lines(
    event: Event | Answer, events: AsyncGenerator[Event | Answer, None], layout: Layout
) -> AsyncGenerator[str, None]:
    """Yield server-sent events: each step, the answer in chunks, and the end mark of the route.

    An error is an event, too, because the status 200 was sent with the first one.
    """
    async with aclosing(events):
        try:
            for value in layout.start():
                yield layout.line(value)
            while not isinstance(event, Answer):
                for value in layout.step(event):
                    yield layout.line(value)
                event = await anext(events)
            for value in layout.finish(event):
                yield layout.line(value)
        except Refused as refusal:
            yield layout.line(layout.fail(refusal))
    if layout.end:
        yield layout.end


async def _wait_for_disconnect(request: Request) -> None:
    """Wait until the client disconnects; the body was read before, so no other message can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _error_response(_: Request, error: Exception) -> Response:
    """An error in OpenAI's form, also one that Starlette raises, since clients read no other form."""
    if isinstance(error, HTTPException):  # no such path or method
        routes = "the routes are GET /v1/models, POST /v1/chat/completions, /v1/completions and /v1/responses"
        error = Refused(error.status_code, f"{error.detail}: {routes}", headers=error.headers)
    refusal = cast(Refused, error)  # the handler is registered for these two
    return JSONResponse(refusal.to_json(), refusal.status, refusal.headers)


async def _page_file(path: Path, _: Request) -> Response:
    """A file of the page, with headers that let it load nothing from elsewhere."""
    return FileResponse(path, headers=_HEADERS)


class Server(uvicorn.Server):
    """Stop at a signal after the running questions or after `grace` seconds; stop at once at a second signal.

    Args:
        config: uvicorn's configuration.
        door: Knows the running questions, and refuses new ones once it is closed.
    """

    def __init__(self, config: uvicorn.Config, door: Door, grace: float) -> None:
        super().__init__(config)
        self._loop = asyncio.get_running_loop()
        self._door = door
        self._grace = grace
        self._ending: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal, which may come in the middle of any statement: the loop calls `end` between two."""
        self._loop.call_soon_threadsafe(self.end)

    def end(self) -> None:
        """Stop after the running questions; at a second call, stop at once."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._door.close(self._grace))
            self._ending.add_done_callback(lambda _: setattr(self, "should_exit", True))
        else:
            self.should_exit = self.force_exit = True
