#!/usr/bin/env bash
# `OpenAILike(…).chat(messages)` of llama-index-llms-openai-like 0.8.1 does not ask for a chat: its default
# `is_chat_model=False` makes it post the text "user: …\nassistant: " to /completions, so that a server takes the names of
# the roles for the prompt. With `is_chat_model=True` it posts the messages to /chat/completions.
# Expected: `chat` asks for a chat, or an error says that the option is missing.
#
# Seen on 29 November 2026 with Python 3.11.7 and llama-index-core 0.14.25 on Linux x86_64:
#     0.8.1, default: POST /v1/completions 'user: Who?\nassistant: '
#     0.8.1, is_chat_model=True: POST /v1/chat/completions [{'role': 'user', 'content': 'Who?'}]
set -euo pipefail
unset PYTHONPATH

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "llama-index-llms-openai-like==0.8.1" \
    "llama-index-core==0.14.25"

cat > "$folder/ask.py" <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

NAME = version("llama-index-llms-openai-like")
seen = []


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        seen.append((self.path, body.get("prompt") or body.get("messages")))
        choice = {"index": 0, "finish_reason": "stop", "text": "x", "message": {"role": "assistant", "content": "x"}}
        reply = {"id": "x", "object": "x", "created": 0, "model": "m", "choices": [choice]}
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
for options in ({}, {"is_chat_model": True}):
    OpenAILike(api_base=url, api_key="none", model="m", **options).chat([ChatMessage(role="user", content="Who?")])
    path, sent = seen[-1]
    named = ", ".join(f"{name}={value}" for name, value in options.items()) or "default"
    print(f"{NAME}, {named}: POST {path} {sent!r}")
PYTHON

said=$("$folder/venv/bin/python" -W ignore "$folder/ask.py" 2> /dev/null)
echo "$said"
if ! grep -q 'default: POST /v1/completions' <<< "$said"; then
    echo "changed: chat no longer asks /completions by default"
    exit 1
fi
