"""A server that gives every chat the same reply after a fixed time: so cheap that the client has the core to itself.

The mock server of the tests reads, hashes and counts every request, which takes more processor time than the client
that is measured. This one finds the end of a request and sends bytes that were made beforehand.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_BODY = json.dumps(
    {
        "id": "chatcmpl-fixed",
        "object": "chat.completion",
        "created": 1,
        "model": "fixed",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": '{"documents": [1, 2], "answerable": true}'},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 200, "completion_tokens": 12, "total_tokens": 212},
    }
)
_RESPONSE = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(_BODY)}\r\n\r\n{_BODY}".encode()


class Connection(asyncio.Protocol):
    """One connection: a reply to each request, so many seconds after its end."""

    def __init__(self, delay: float) -> None:
        self._delay, self._data = delay, b""

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
            asyncio.get_running_loop().call_later(self._delay, self._transport.write, _RESPONSE)  # type: ignore[attr-defined]


@contextmanager
def fixed_server(delay: float) -> Iterator[str]:
    """The server as a process of its own; gives its base URL (with /v1). It ends with the block or with us."""
    command = [sys.executable, "-m", __name__, str(delay)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None or not (port := process.stdout.readline().strip()):
                raise RuntimeError("the server did not start")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.kill()


async def _serve(delay: float) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Connection(delay), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # which ends when the process that started us does


if __name__ == "__main__":
    asyncio.run(_serve(float(sys.argv[1])))
