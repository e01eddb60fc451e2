"""The command `tripletune serve`: what it refuses before the port opens, and how a signal ends it."""

import os
import re
import signal
import socket
import threading

import pytest

from tests.cli import run
from tests.serve.conftest import QUESTION, until

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")


LLM = ["--llm", "openai:m"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*LLM, "--corpus", "nofile.jsonl"], "no such file: nofile.jsonl"),
        ([*LLM, "--systems", "cirag"], "--system cirag retrieves: give --corpus"),
        ([*LLM, "--systems", "cira"], "mean cirag"),
        ([*LLM, "--corpus", "{corpus}", "--api-key-env", "NOT_SET"], "NOT_SET: this environment variable is not set"),
        ([*LLM, "--corpus", "{corpus}", "--integrator", "runs/student"], "has no effect, since the system cirag"),
        (["--llm", "batch:m", "--corpus", "{corpus}"], "does not answer at once"),
        ([*LLM, "--corpus", "{corpus}", "--port", "{used}"], "already in use"),
        ([*LLM, "--places", "0"], "places"),
        (["nofolder", "--corpus", "{corpus}"], "nofolder"),
        (["--corpus", "{corpus}"], "ras needs a model"),
    ],
)
def test_what_can_not_work_is_said_before_the_port_opens(model, files, monkeypatch, words, says):
    monkeypatch.delenv("NOT_SET", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as used:
        known = {"{used}": str(used.getsockname()[1]), "{corpus}": files["corpus"]}
        port = [] if "--port" in words else ["--port", "0"]
        ran = run("serve", "--triples", files["triples"], *port, *(known.get(word, word) for word in words))
    assert ran.code == 2
    assert re.search(says, ran.err), ran.err
    assert "ready on" not in ran.err


def test_a_signal_under_load_ends_it_with_0(model, files, monkeypatch):
    model.delay = 0.4
    monkeypatch.setenv("SERVE_KEY", "secret")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found, url, key = [], f"http://127.0.0.1:{port}", {"Authorization": "Bearer secret"}
    asked = {"model": "ras", "messages": [{"role": "user", "content": QUESTION}]}

    def ask():
        found.append(httpx.post(f"{url}/v1/chat/completions", json=asked, headers=key))

    def client():
        def ready():
            try:
                return httpx.get(f"{url}/readyz").status_code == 200
            except httpx.ConnectError:
                return False

        try:
            until(ready, 60)
            asking = [threading.Thread(target=ask) for _ in range(8)]
            for one in asking:
                one.start()
            until(lambda: "questions_waiting 2.0" in httpx.get(f"{url}/metrics", headers=key).text)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
        for one in asking:
            one.join()

    loaded = threading.Thread(target=client)
    loaded.start()
    ran = run("serve", "--llm", "openai:m", "--corpus", files["corpus"], "--triples", files["triples"], "--port", port,
              "--api-key-env", "SERVE_KEY", "--systems", "ras", "--top-k", "1", "--places", "6")  # fmt: skip
    loaded.join()
    assert ran.code == 0
    assert f"ready on http://127.0.0.1:{port}" in ran.err
    assert [one.json()["choices"][0]["message"]["content"] for one in found] == ["Velsund"] * 8
    assert model.closed
    assert not [word for word in ("secret", QUESTION) if word in ran.err]
