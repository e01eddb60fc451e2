"""A server of chat completions and embeddings, as OpenAI's API has them, that replies by rule."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.parity.stand_ins import vectors_of

Body = dict[str, Any]
_WIDTH = 256


class FakeServer:
    """The server; use it in a `with` statement.

    Attributes:
        url: The base URL of its API.
        chats: The bodies of all chat requests, in order.
        texts: The texts of all requests for embeddings, in order.
    """

    def __init__(self, reply: Callable[[Body], str]) -> None:
        self.reply = reply
        self.chats: list[Body] = []
        self.texts: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = outer.embeddings(body) if self.path.endswith("/embeddings") else outer.completion(body)
                data = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def embeddings(self, body: Body) -> Body:
        """The reply to a request for embeddings."""
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        self.texts += texts
        rows = []
        for number, vector in enumerate(vectors_of(texts, _WIDTH)):
            rows.append({"object": "embedding", "index": number, "embedding": vector.tolist()})
        return {"object": "list", "data": rows, "model": "fake", "usage": {"prompt_tokens": 1, "total_tokens": 1}}

    def completion(self, body: Body) -> Body:
        """The reply to a chat request."""
        self.chats.append(body)
        message = {"role": "assistant", "content": self.reply(body)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return {
            "id": "0",
            "object": "chat.completion",
            "created": 0,
            "model": "fake",
            "choices": [choice],
            "usage": usage,
        }

    def clear(self) -> None:
        """Forget what was asked."""
        self.chats.clear()
        self.texts.clear()

    def __enter__(self) -> "FakeServer":
        """Start the server in a thread."""
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the server, and free its port."""
        self._server.shutdown()
        self._server.server_close()
