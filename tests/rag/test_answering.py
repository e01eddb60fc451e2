import asyncio
import gc
from pathlib import Path
from threading import Thread

import pytest

from tests.cli import write_lines
from tests.fakes import Client
from tripletune.llm.backends import LLMOptions
from tripletune.rag import Trace, TraceAction, TraceStep
from tripletune.rag.answering import open_system
from tripletune.rag.ask import event_lines
from tripletune.rag.system_options import SystemOptions

PASSAGES = [("Glass Harbour", "A novel by Ida Morn."), ("Ida Morn", "Born in Velsund.")]


class Slow(Client):
    """A model that others can run beside."""

    async def chat(self, *args, **options):
        await asyncio.sleep(0.001)
        return await super().chat(*args, **options)


@pytest.fixture
def client(monkeypatch):
    def reply(asked):
        if asked.role == "ras.answer":
            return "Velsund"
        return "[SUFFICIENT]" if "Ida Morn" in asked.text else "[SUBQ] Where was Ida Morn born?"

    found = Slow(answer=reply)
    monkeypatch.setattr("tripletune.rag.answering.open_client", lambda options: found)
    return found


@pytest.fixture
def system(tmp_path, client):
    corpus, triples = tmp_path / "corpus.jsonl", tmp_path / "triples.jsonl"
    rows = [{"title": title, "text": text} for title, text in PASSAGES]
    write_lines(corpus, rows)
    write_lines(triples, ({**row, "triples": [[row["title"], "in", "Oslo"]]} for row in rows))
    options = SystemOptions.of(corpus=str(corpus), triples=str(triples), top_k=1, first_query="generated")
    return open_system(options, LLMOptions(backend="openai", model="m"))


def test_what_is_no_option_of_search_is_one_of_the_system():
    options = SystemOptions.of(system="cirag", corpus="c", granularities=("triples", "passages"), set=["candidates=3"])
    assert (options.corpus, options.set) == ("c", ["candidates=3", "granularities=triples,passages"])


def test_each_step_is_seen_when_it_happens(system, client):
    async def run():
        seen = []
        async with system:
            async for event in system.steps("Where was the author born?", question_id="q1"):
                seen.append((type(event), len(client.asked)))
                last = event
            again = await asyncio.gather(*(system.answer_async("Where was the author born?") for _ in range(3)))
        return seen, last, again

    seen, trace, again = asyncio.run(run())
    assert seen == [(TraceAction, 1), (TraceStep, 1), (TraceAction, 2), (Trace, 3)]
    assert (trace.answer, trace.steps[0].triples) == ("Velsund", [["Ida Morn", "in", "Oslo"]])
    assert {client.asked[0].question_id, client.asked[-1].question_id} == {"q1", ""}
    assert [one.answer for one in again] == ["Velsund"] * 3
    assert client.closed
    assert not Path(system.scratch.name).exists(), "the indexes were made for this system alone"


def test_who_stops_listening_ends_the_answer(system, client):
    async def run():
        async with system:
            async for _ in system.steps("Where?"):
                break
            await asyncio.sleep(0.05)

    asyncio.run(run())
    assert "ras.answer" not in client.roles


def test_a_system_that_is_closed_is_freed_and_threads_may_share_an_open_one(system):
    found: list[Trace] = []
    threads = [Thread(target=lambda: found.append(system.answer("Ida Morn?"))) for _ in range(3)]
    for step in (Thread.start, Thread.join):
        for thread in threads:
            step(thread)
    assert [trace.answer for trace in found] == ["Velsund"] * 3
    gc.freeze()
    system.close()
    assert not gc.get_freeze_count()


def test_a_failure_is_raised_after_what_was_seen(system, client):
    client.answer = lambda asked: RuntimeError("gone") if asked.role == "ras.answer" else "[NO_RETRIEVAL]"

    async def run():
        return [event async for event in system.steps("Where?")]

    with pytest.raises(RuntimeError, match="gone"):
        asyncio.run(run())


def test_all_that_is_missing_is_in_one_message():
    with pytest.raises(ValueError, match=r"ras retrieves: .*needs triples: .*--system ras needs a model"):
        open_system(SystemOptions())


def test_a_folder_of_passages_is_a_corpus_whose_sources_are_cited(tmp_path, client):
    rows = [
        {"title": "a.pdf › Authors", "text": "Ida Morn was born in Velsund.", "document": "a.pdf", "page": 3,
         "heading": "Authors", "position": [0, 29]},
        {"text": "Ida Morn wrote " + "many long novels about the sea " * 3, "document": {"odd": 1}},
    ]  # fmt: skip
    write_lines(tmp_path / "mine" / "corpus.jsonl", rows)
    options = SystemOptions.of(system="standard", corpus=str(tmp_path / "mine"), top_k=2)
    with open_system(options, LLMOptions(backend="openai", model="m")) as system:
        trace = system.answer("Where was Ida Morn born?")
    passages = {one["title"]: one.get("source") for one in trace.to_json()["steps"][0]["passages"]}
    assert passages == {
        "a.pdf › Authors": {"document": "a.pdf", "page": 3, "heading": "Authors"},
        "Ida Morn wrote many long novels about the sea many long…": None,
    }
    _, retrieved = event_lines(trace.steps[0])
    assert retrieved.startswith("  retrieve  [a.pdf › Authors, p. 3], Ida Morn wrote")


def test_a_folder_without_a_corpus_names_the_program_that_makes_one(tmp_path, client):
    options = SystemOptions.of(system="standard", corpus=str(tmp_path), top_k=2)
    with pytest.raises(FileNotFoundError, match=r"without corpus\.jsonl: .*build passages --documents"):
        open_system(options, LLMOptions(backend="openai", model="m"))
