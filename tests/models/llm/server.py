"""A mock of the hosted model APIs on loopback, for tests and benchmarks: replies, delays, faults and a record.

It speaks OpenAI's chat completions (`/v1/chat/completions`) and Anthropic's messages (`/v1/messages`). `MockServer`
runs in a thread, `server_process` in a process of its own.

A reply function gets the request's JSON body and gives back a text or a `Reply`. Which fault meets a request depends
on the seed, the request's body and its attempt number alone, never on the order in which requests arrive.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
    """Probabilities of what goes wrong; the sum is at most 1.

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

    def __post_init__(self) -> None:
        if sum(getattr(self, kind) for kind in self.KINDS) > 1 + 1e-9:
            raise ValueError(f"the probabilities of the faults are above 1 in sum: {self}")

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

    def flat(content: Any) -> str:
        if isinstance(content, str):
            return content
        return "".join(block.get("text", "") for block in content or [])

    system = [flat(body["system"])] if body.get("system") else []
    return system + [flat(message["content"]) for message in body.get("messages", [])]


def echo(body: Body) -> str:
    """The reply function by default: the last message again."""
    return texts(body)[-1]


def count(text: str) -> int:
    """Tokens as the mock counts them: words."""
    return len(text.split())


def read_log(path: Path) -> list[dict[str, Any]]:
    """The events of a log file, in order; a half-written last line is left out."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []:
        if line.endswith("\n"):
            events.append(json.loads(line))
    return events


class MockServer:
    """The server, as a context manager that runs it in a thread.

    Attributes:
        answered: Per body key, how often it was answered in full and without a fault.
        requests: Per body key, how often it arrived.
        faulty: Per kind of fault, how often it was served.
        most_at_once: Most requests that were under way at one time.
        authorizations: The keys that clients sent (in memory alone, never in the log).
        bodies: The last 1,000 request bodies.
    """

    def __init__(
        self,
        reply: Callable[[Body], str | Reply] = echo,
        delay: float = 0.0,
        faults: Faults | None = None,
        log: Path | str | None = None,
    ) -> None:
        self.reply, self.delay, self.port, self.faults = reply, delay, 0, faults or Faults()
        self.answered: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.faulty: Counter[str] = Counter()
        self.at_once = self.most_at_once = 0
        self.authorizations: set[str] = set()
        self.bodies: deque[Body] = deque(maxlen=1000)
        self._cached: set[str] = set()
        self._log = Path(log).open("a", encoding="utf-8") if log else None  # noqa: SIM115

    @property
    def root(self) -> str:
        """Base URL of the Anthropic SDK."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Base URL of the OpenAI SDK."""
        return f"{self.root}/v1"

    def __enter__(self) -> MockServer:
        started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()

        async def run() -> None:
            runner = await self.start()
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
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()
        if self._log:
            self._log.close()

    async def start(self) -> web.AppRunner:
        """Listen, in the running event loop."""
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/v1/chat/completions", self._handle)
        app.router.add_post("/v1/messages", self._handle)
        # Requests that still hang when the server stops are cut at once.
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port, backlog=1024)
        await site.start()
        self.port = runner.addresses[0][1]
        return runner

    def _note(self, event: str, key: str, **more: Any) -> None:
        if self._log:
            line = {"time": time.time(), "event": event, "key": key, **more}
            self._log.write(json.dumps(line) + "\n")
            self._log.flush()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        key, anthropic = body_key(body), request.path.endswith("/messages")
        attempt = self.requests[key]
        self.requests[key] += 1
        self.authorizations.add(request.headers.get("Authorization") or request.headers.get("X-Api-Key") or "")
        self.bodies.append(body)
        self._note("request", key, attempt=attempt)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self._answer(request, body, key, attempt, anthropic)
        finally:
            self.at_once -= 1

    async def _answer(
        self, request: web.Request, body: Body, key: str, attempt: int, anthropic: bool
    ) -> web.StreamResponse:
        fault = self.faults.draw(key, attempt)
        if fault:
            self.faulty[fault] += 1
            self._note("fault", key, attempt=attempt, fault=fault)
        if fault == "hang":
            await asyncio.sleep(self.faults.hang_seconds)
        elif self.delay:
            await asyncio.sleep(self.delay)
        if fault in ("hang", "drop"):
            return _end(request)
        if fault == "rate_limit":
            wait = {"Retry-After": str(self.faults.retry_after)}
            return _error(Reply(status=429, message="slow down", headers=wait), anthropic)
        if fault == "server_error":
            return _error(Reply(status=500, message="the mock failed"), anthropic)
        found = Reply("") if fault == "empty" else self.reply(body)
        reply = Reply(found) if isinstance(found, str) else found
        if reply.status != 200:
            return _error(reply, anthropic)
        if reply.raw is not None:
            return await self._send(request, reply.raw, key, attempt, fault)
        layout = self._messages if anthropic else self._completions
        return await self._send(request, json.dumps(layout(body, reply)), key, attempt, fault)

    async def _send(
        self, request: web.Request, text: str, key: str, attempt: int, fault: str | None
    ) -> web.StreamResponse:
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
        # Noted before the last byte leaves: whoever has the reply finds it in the log.
        if fault is None:
            self.answered[key] += 1
            self._note("answered", key, attempt=attempt)
        await response.write(data)
        await response.write_eof()
        return response

    def _finish(self, body: Body, reply: Reply, stops: list[str], limit: int | None) -> tuple[str, str]:
        text, reason = reply.text, "stop"
        ends = [place for stop in stops if (place := text.find(stop)) >= 0]
        if ends:
            text, reason = text[: min(ends)], "stop_sequence"
        if limit is not None and count(text) > limit:
            text, reason = " ".join(text.split()[:limit]), "length"
        return text, reason

    def _completions(self, body: Body, reply: Reply) -> Body:
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        stops = body.get("stop") or []
        text, reason = self._finish(body, reply, [stops] if isinstance(stops, str) else stops, limit)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": reply.finish_reason or ("length" if reason == "length" else "stop"),
        }
        usage = {"prompt_tokens": sum(map(count, texts(body))), "completion_tokens": count(text)}
        return {"object": "chat.completion", "model": body.get("model", ""), "choices": [choice], "usage": usage}

    def _messages(self, body: Body, reply: Reply) -> Body:
        text, reason = self._finish(body, reply, body.get("stop_sequences") or [], body["max_tokens"])
        names = {"stop": "end_turn", "length": "max_tokens", "stop_sequence": "stop_sequence"}
        system = body.get("system")
        marked = isinstance(system, list) and any("cache_control" in block for block in system)
        prompt, fixed = sum(map(count, texts(body))), 0
        usage = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": count(text)}
        if marked:
            fixed = count(texts(body)[0])
            known = texts(body)[0] in self._cached
            usage["cache_read_input_tokens" if known else "cache_creation_input_tokens"] = fixed
            self._cached.add(texts(body)[0])
        usage["input_tokens"] = prompt - fixed
        return {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": text}] if text else [],
            "stop_reason": reply.finish_reason or names[reason],
            "usage": usage,
        }


def _end(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def _error(reply: Reply, anthropic: bool) -> web.Response:
    if reply.raw is not None:
        return web.Response(status=reply.status, headers=reply.headers, text=reply.raw)
    kind = {429: "rate_limit_error", 401: "authentication_error"}.get(reply.status, "api_error")
    error: Body = {"error": {"type": kind, "message": reply.message}}
    if anthropic:
        error["type"] = "error"
    return web.json_response(error, status=reply.status, headers=reply.headers)


@contextmanager
def server_process(
    *, reply: str | None = None, delay: float = 0.0, faults: Faults | None = None, log: Path | None = None
) -> Iterator[str]:
    """Run the server as a process of its own; gives its base URL (with /v1). It ends with the block or with us."""
    options = {"reply": reply, "delay": delay, "faults": asdict(faults or Faults()), "log": str(log) if log else None}
    command = [sys.executable, __file__, json.dumps(options)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None or not (port := process.stdout.readline().strip()):
                raise RuntimeError("the mock server did not start")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.kill()


def main() -> None:
    """Serve with the options of `server_process` until standard input closes; the first line printed is the port."""
    options = json.loads(sys.argv[1])
    sys.path.insert(0, str(Path.cwd()))
    module, _, name = (options["reply"] or "tests.models.llm.server:echo").partition(":")
    reply = getattr(importlib.import_module(module), name)
    server = MockServer(reply, options["delay"], Faults(**options["faults"]), options["log"])

    async def serve() -> None:
        runner = await server.start()
        print(server.port, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await runner.cleanup()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
