"""The tools of `serve --mcp`, used by the client of the package `mcp` over the stdin and stdout of a real program."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from tests.cli import run
from tests.llm.server import MockServer, Reply, texts
from tests.serve.conftest import FACTS, QUESTION

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def mcp():
    return pytest.importorskip("mcp", reason="the package mcp is not installed: pip install '.[mcp]'")


def reply(body):
    """A plan until Ida Morn's birthplace is shown, then the answer."""
    system, *_, text = texts(body)
    if "faulty" in text:
        return Reply(status=400, message="the model is away")
    if not system.startswith("You plan"):
        return "Velsund"
    return "[SUFFICIENT]" if "birthplace" in text else "[SUBQ] Where was Ida Morn born?"


@pytest.fixture
def talk(mcp, files):
    """`talk(use, *words)` is what `await use(client)` gives, with a client of a server with the options `words`."""

    def call(use, *words, systems="ras,standard", delay=0.0):
        async def ask(url):
            options = ["--llm", f"openai:m@{url}", "--systems", systems, "--top-k", "1", "--corpus", files["corpus"]]
            command = ["-m", "tripletune", "serve", "--mcp", *map(str, (*options, *words))]
            own = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
            server = mcp.StdioServerParameters(command=sys.executable, args=command, env=own)
            async with asyncio.timeout(120), mcp.Client(server) as client:
                return await use(client)

        with MockServer(reply, delay) as model:
            call.model = model
            return asyncio.run(ask(model.url))

    return call


def test_an_agent_asks_searches_and_looks_facts_up(talk, files):
    seen = []

    async def progress(done, total, message):
        seen.append((done, message))

    async def use(client):
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        asked = await client.call_tool("ask", {"question": QUESTION}, progress_callback=progress)
        found = await client.call_tool("search", {"query": "born", "top_k": 1})
        facts = await client.call_tool("facts_about", {"name": "ida morn"})
        none = await client.call_tool("facts_about", {"name": "Ida"})
        return client.instructions, tools, asked, found, facts, none

    instructions, tools, asked, found, facts, none = talk(use, "--triples", files["triples"])
    assert list(tools) == ["ask", "search", "facts_about"]
    assert "ras, standard" in instructions
    assert all(tool.description and tool.annotations.read_only_hint for tool in tools.values())

    answer = asked.structured_content
    assert json.loads(asked.content[0].text) == answer
    assert (answer["answer"], answer["stop_reason"]) == ("Velsund", "sufficient")
    assert [source["title"] for source in answer["sources"]] == ["Glass Harbour", "Ida Morn"]
    texts_by_id = {source["id"]: source["text"] for source in answer["sources"]}
    by_fact = {(fact["subject"], fact["object"]): fact["passages"] for fact in answer["facts"]}
    assert [texts_by_id[name] for name in by_fact["Ida Morn", "Velsund"]] == ["Born in Velsund."]
    assert seen == [
        (1.0, "plan  [SUBQ] Where was Ida Morn born?"),
        *seen[1:4],
        (5.0, "plan  [SUFFICIENT]"),
    ]
    assert seen[3] == (4.0, "retrieve  Where was Ida Morn born?: Ida Morn")

    (passage,) = found.structured_content["passages"]
    assert "Velsund" in passage["text"]
    stated = facts.structured_content
    triples = [[fact["subject"], fact["predicate"], fact["object"]] for fact in stated["facts"]]
    assert (triples, stated["total"]) == (FACTS[:2], 2), "as subject and as object, whatever the case"
    assert [source["title"] for source in stated["sources"]] == ["Glass Harbour", "Ida Morn"]
    assert (none.structured_content["total"], "Ida Morn" in none.structured_content["similar"]) == (0, True)


def test_what_is_wrong_reaches_the_agent_as_a_text(talk, files):
    async def use(client):
        calls = [
            ("ask", {"question": QUESTION, "top_n": 3}),
            ("ask", {"question": QUESTION, "system": "cirag"}),
            ("ask", {"question": "a faulty one"}),
            ("ask", {"question": ""}),
            ("search", {"query": "born", "top_k": 0}),
        ]
        return [await client.call_tool(name, arguments) for name, arguments in calls]

    failed = talk(use, "--triples", files["triples"])
    assert all(one.is_error for one in failed)
    said = [one.content[0].text for one in failed]
    assert "tool 'ask' has no option 'top_n'" in said[0]
    assert "the systems are ras, standard" in said[1]
    assert "the model is away" in said[2]
    assert "question" in said[3]
    assert "top_k" in said[4]


def test_without_triples_there_are_no_facts_to_look_up(talk):
    async def use(client):
        found = await client.call_tool("search", {"query": "Glass Harbour"})
        return [tool.name for tool in (await client.list_tools()).tools], found.structured_content

    names, found = talk(use, systems="standard")
    assert names == ["ask", "search"]
    assert found["passages"][0]["title"] == "Glass Harbour"


def test_a_system_that_searches_only_triples_still_has_all_tools(talk, files):
    async def use(client):
        found = await client.call_tool("search", {"query": "Glass Harbour"})
        facts = await client.call_tool("facts_about", {"name": "Velsund", "limit": 1})
        return found.structured_content, facts.structured_content

    found, facts = talk(use, "--triples", files["triples"], systems="t2rag")
    assert found["passages"][0]["title"] == "Glass Harbour"
    assert (len(facts["facts"]), facts["total"]) == (1, 2)


def test_a_client_that_waits_no_longer_frees_the_place(talk, mcp, files):
    async def use(client):
        with pytest.raises(mcp.MCPError):
            await client.call_tool("ask", {"question": QUESTION}, read_timeout_seconds=3)
        talk.model.delay = 0
        return await client.call_tool("ask", {"question": QUESTION})

    words = ["--triples", files["triples"], "--places", "1", "--queue", "0", "--timeout", "60"]
    assert talk(use, *words, delay=30).structured_content["answer"] == "Velsund"


LLM = ["--llm", "openai:m@http://127.0.0.1:9/v1"]


def test_options_of_a_port_have_no_effect(files):
    ran = run("serve", "--mcp", *LLM, "--corpus", files["corpus"], "--port", "9000", "--host", "0.0.0.0")
    assert ran.code == 2
    assert "these options have no effect: host, port" in ran.err


class _Missing:
    """Finds no package mcp."""

    def find_spec(self, name, *_):
        if name == "mcp":
            raise ModuleNotFoundError("No module named 'mcp'", name="mcp")


def test_a_missing_package_is_named(files, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "mcp" or name.endswith(".mcp_tools")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Missing(), *sys.meta_path])
    ran = run("serve", "--mcp", *LLM, "--corpus", files["corpus"])
    assert ran.code == 2
    assert "run pip install 'tripletune[mcp]'" in ran.err
