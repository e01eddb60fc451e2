"""A server in a thread, over a small corpus and a scripted chat model."""

import asyncio
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from tests.cli import write_lines
from tests.fakes import Client
from tripletune.llm.backends import LLMOptions
from tripletune.rag.system_options import SystemOptions

EVIL = "<img src=http://127.0.0.1:9/x onerror=\"document.title='broken'\">"
TEXTS = {"Glass Harbour": "A novel by Ida Morn.", "Ida Morn": "Born in Velsund.", EVIL: "Born in Velsund, too."}
FACTS = [["Glass Harbour", "author", "Ida Morn"]]
FACTS += [[name, "birthplace", "Velsund"] for name in ("Ida Morn", EVIL)]
QUESTION = "Where was the author of Glass Harbour born?"


def answer(asked):
    """A plan until Ida Morn's birthplace is shown, then the answer."""
    if asked.role == "ras.answer":
        return "Velsund"
    if asked.role != "ras.plan":
        return f"{asked.role}: {asked.text}"
    return "[SUFFICIENT]" if "birthplace" in asked.text else "[SUBQ] Where was Ida Morn born?"


class Model(Client):
    """A chat model whose replies take `delay` seconds; `ended` counts calls that nobody waits for any more."""

    delay, ended, under_way = 0.0, 0, 0

    async def chat(self, *args, **options):
        """Reply after the delay; a call that is cancelled meanwhile counts as ended."""
        self.under_way += 1
        try:
            await asyncio.sleep(self.delay)
        except asyncio.CancelledError:
            self.ended += 1
            raise
        finally:
            self.under_way -= 1
        return await super().chat(*args, **options)


@pytest.fixture
def model(monkeypatch):
    """The chat model of all servers of a test."""
    found = Model(answer=answer)
    monkeypatch.setattr("tripletune.rag.answering.open_client", lambda options: found)
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Corpus and triples, as options."""
    home = tmp_path_factory.mktemp("corpus")
    rows = [{"title": title, "text": text} for title, text in TEXTS.items()]
    corpus = write_lines(home / "corpus.jsonl", rows)
    triples = write_lines(home / "triples.jsonl", ({**row, "triples": [fact]} for row, fact in zip(rows, FACTS)))
    return {"corpus": corpus, "triples": triples}


@pytest.fixture
def running(files):
    """Runs a server: `with running(door=Door(1, 0, 5), key="k") as url`; the options are those of `Service`."""
    pytest.importorskip("uvicorn")
    import uvicorn

    from tripletune.serve.app import Server, Service
    from tripletune.serve.limits import Door
    from tripletune.serve.models import open_shelf

    @contextmanager
    def run(teacher=LLMOptions(model="m"), names=("ras", "standard"), door=None, grace=5.0, system=None, **options):  # noqa: B008
        place = socket.create_server(("127.0.0.1", 0))
        started = threading.Event()
        server = None

        async def work():
            nonlocal server
            own = SystemOptions.of(**files, **{"top_k": 1, **(system or {})})
            shelf = open_shelf(own, teacher, names)
            await shelf.warm_up()
            at = door or Door(8, 8, 30)
            config = uvicorn.Config(Service(shelf, at, **options).app, log_config=None, lifespan="off")
            server = Server(config, at, grace)
            started.set()
            await server.serve([place])
            await shelf.close()

        thread = threading.Thread(target=asyncio.run, args=(work(),), daemon=True)
        thread.start()
        while thread.is_alive() and not started.wait(0.05):
            pass
        assert server is not None
        run.end = lambda: server._loop.call_soon_threadsafe(server.end)
        try:
            yield f"http://127.0.0.1:{place.getsockname()[1]}"
        finally:
            if thread.is_alive():
                run.end()
            thread.join(10)
            assert not thread.is_alive()

    return run


def until(true, seconds=10):
    """Wait until it is."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
