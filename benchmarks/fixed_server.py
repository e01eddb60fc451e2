"""A server that gives every chat the same reply after a fixed time: so cheap that the client has the core to itself.

The mock server of the tests reads, hashes and counts every request, which takes more processor time than the client
that is measured. This one finds the end of a request and sends bytes that were made beforehand. Since every reply waits
equally long, replies leave in the order of their requests and one timer serves them all.

    python benchmarks/fixed_server.py --delay 0.1

prints its port, and ends when its standard input does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

TEXT = '{"documents": [1, 2], "answerable": true}'


def response() -> bytes:
    """The whole HTTP response, as OpenAI's chat completions have it."""
    body = {
        "id": "chatcmpl-fixed",
        "object": "chat.completion",
        "created": 1,
        "model": "fixed",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 200, "completion_tokens": 12, "total_tokens": 212},
    }
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


class Replies:
    """Sends the reply to every request when its time has come.

    Args:
        delay: Seconds from a request to its reply.
    """

    def __init__(self, delay: float) -> None:
        self._delay, self._bytes = delay, response()
        self._waiting: deque[tuple[float, asyncio.WriteTransport]] = deque()

    def add(self, transport: asyncio.WriteTransport) -> None:
        """A request has come on this connection."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self._delay
        self._waiting.append((due, transport))
        if len(self._waiting) == 1:
            loop.call_at(due, self._send)

    def _send(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._waiting and self._waiting[0][0] <= now:
            self._waiting.popleft()[1].write(self._bytes)
        if self._waiting:
            loop.call_at(self._waiting[0][0], self._send)


class Connection(asyncio.Protocol):
    """One connection: waits for the end of each request."""

    def __init__(self, replies: Replies) -> None:
        self._replies, self._data = replies, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            size = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0] or 0)
            if len(self._data) < end + 4 + size:
                return
            self._data = self._data[end + 4 + size :]
            self._replies.add(self._transport)  # type: ignore[arg-type]


@contextmanager
def fixed_server(delay: float) -> Iterator[str]:
    """The server as a process of its own; gives its base URL (with /v1). It ends with the block or with us."""
    command = [sys.executable, __file__, "--delay", str(delay)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None or not (port := process.stdout.readline().strip()):
                raise RuntimeError("the server did not start")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.kill()


async def _serve(delay: float) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    replies = Replies(delay)
    server = await loop.create_server(lambda: Connection(replies), "127.0.0.1", 0, backlog=1024)
    wait = lambda: (sys.stdin.read(), loop.call_soon_threadsafe(stop.set))  # noqa: E731
    threading.Thread(target=wait, daemon=True).start()
    print(server.sockets[0].getsockname()[1], flush=True)
    await stop.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, default=0.1, help="seconds until a reply (default: %(default)s)")
    asyncio.run(_serve(parser.parse_args().delay))
