import asyncio
import logging
from pathlib import Path

import pytest

from tripletune.models.llm import CallError, Sampling
from tripletune.models.llm.backends import LLMOptions, open_client
from tripletune.models.llm.backends.batch import BatchBackend
from tripletune.models.options import CommandParser, add_arguments, from_arguments

SECRET = "sk-hunter2-0123456789"


def test_every_field_is_an_option():
    parser = CommandParser()
    add_arguments(parser, LLMOptions, "teacher")
    words = (
        *("--teacher", "anthropic", "--teacher-model", "m", "--teacher-url", "http://127.0.0.1:1/v1"),
        *("--teacher-ledger", "l.sqlite", "--teacher-concurrency", "3", "--teacher-timeout", "7.5"),
        *("--teacher-temperature", "0.5", "--teacher-seed", "4", "--teacher-batch-size", "8"),
        *("--teacher-dtype", "float32"),
    )
    rare = (
        *("api_key_env=MY_KEY", "requests_per_minute=60", "tokens_per_minute=1e5", "attempts=2", "top_p=0.9"),
        *("send_temperature=yes", "token_field=max_tokens", 'extra={"a": 1}', "batch_layout=anthropic"),
    )
    words += tuple(word for one in rare for word in ("--set", f"teacher.{one}"))
    found = from_arguments(LLMOptions, parser.parse_args(words), "teacher")
    assert found == LLMOptions(
        *("anthropic", "m", "http://127.0.0.1:1/v1", "MY_KEY", "l.sqlite", 3, 60.0, 1e5, 7.5, 2, 0.5, 0.9, 4, "yes"),
        *("max_tokens", '{"a": 1}', "anthropic", 8, "float32"),
    )
    assert found.sampling(64) == Sampling(0.5, 0.9, 64, 4)


def test_all_problems_are_told_at_once():
    with pytest.raises(ValueError, match=r"backend: 'opneai' is not one of .*did you mean openai") as caught:
        LLMOptions("opneai", concurrency=0, requests_per_minute=-1, top_p=2, extra="[1]", token_field="y")
    words = ("model is not set", "concurrency: 0", "requests_per_minute: -1", "top_p: 2", "extra must", "token_field")
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("name", [SECRET, "lower_case", "A B", ""])
def test_a_key_in_place_of_its_name_is_not_shown(name):
    with pytest.raises(ValueError, match="must be the NAME of an environment variable") as caught:
        LLMOptions(model="m", api_key_env=name)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url", [f"https://user:{SECRET}@host/v1", f"https://host/v1?key={SECRET}", "host/v1", "http://[", ""]
)
def test_an_address_with_secrets_is_refused_and_not_shown(url):
    with pytest.raises(ValueError, match="url must look like") as caught:
        LLMOptions(model="m", url=url)
    assert SECRET not in str(caught.value)


def test_a_named_variable_must_be_set(tmp_path):
    ledger = tmp_path / "l.sqlite"
    with pytest.raises(ValueError, match="the environment variable MY_KEY, named by api_key_env, is not set"):
        open_client(LLMOptions(model="m", api_key_env="MY_KEY", ledger=str(ledger)), {})
    with pytest.raises(ValueError, match="MY_KEY holds characters that no key has"):
        open_client(LLMOptions(model="m", api_key_env="MY_KEY", ledger=str(ledger)), {"MY_KEY": "sk-ключ"})
    with pytest.raises(ValueError, match="OPENAI_API_KEY"):
        open_client(LLMOptions(model="m", ledger=str(ledger)), {})
    assert not ledger.exists()


def test_the_batch_backend_is_opened(tmp_path):
    ledger = tmp_path / "l.sqlite"
    options = LLMOptions("batch", "m", ledger=str(ledger), batch_layout="anthropic", extra='{"a": 1}')
    client = open_client(options, {})
    assert isinstance(client.backend, BatchBackend)
    assert client.model == 'anthropic:m {"a":1}'
    assert client.backend.folder == Path(f"{ledger}.batch")
    asyncio.run(client.close())
    with pytest.raises(ValueError, match="backend batch needs a ledger"):
        open_client(LLMOptions("batch", "m"), {})
    with pytest.raises(ValueError, match="is a folder"):
        open_client(LLMOptions("batch", "m", ledger=str(tmp_path)), {})


@pytest.mark.parametrize("backend", ["openai", "anthropic"])
def test_backends_over_the_network_are_opened(monkeypatch, backend):
    pytest.importorskip(backend)
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    options = LLMOptions(backend, "m", send_temperature="no")
    client = open_client(options, {f"{backend.upper()}_API_KEY": SECRET})
    assert client.model == f"{backend}:m"
    assert not client.backend.send_temperature
    assert SECRET not in repr(client) + repr(client.backend) + repr(options)
    asyncio.run(client.close())
    with pytest.raises(ValueError, match=f"{backend.upper()}_API_KEY"):
        open_client(LLMOptions(backend, "m"), {})


def test_the_providers_key_does_not_go_to_another_server(monkeypatch):
    pytest.importorskip("openai")
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    from tests.models.llm.server import MockServer

    async def main(url):
        async with open_client(LLMOptions(model="m", url=url)) as client:
            await client.chat([{"role": "user", "content": "hi"}], role="r")

    with MockServer() as server:
        asyncio.run(main(server.url))
        assert not [text for text in server.authorizations if SECRET in text]


@pytest.mark.parametrize("status", [200, 401])
def test_a_key_reaches_no_file_no_log_line_and_no_error(tmp_path, monkeypatch, caplog, capfd, status):
    pytest.importorskip("openai")
    from tests.models.llm.server import MockServer, Reply

    monkeypatch.setenv("MY_KEY", SECRET)
    caplog.set_level(logging.DEBUG)
    ledger = tmp_path / "l.sqlite"
    shown = []

    async def main(url):
        options = LLMOptions(model="m", url=url, api_key_env="MY_KEY", ledger=str(ledger))
        client = open_client(options)
        shown.extend([repr(options), repr(client), repr(client.backend), repr(vars(client.backend))])
        try:
            await client.chat([{"role": "user", "content": "hi"}], role="r")
        except CallError as error:
            shown.append(str(error))
        # Read while the WAL is there: closing moves it into the file.
        shown.extend(file.read_bytes().decode("latin-1") for file in tmp_path.iterdir())
        await client.close()

    with MockServer(reply=lambda body: Reply("yes", status=status, message=f"wrong key {SECRET}")) as server:
        asyncio.run(main(server.url))
        assert [text for text in server.authorizations if SECRET in text]
    shown.extend(file.read_bytes().decode("latin-1") for file in tmp_path.iterdir())
    shown.extend([caplog.text, *capfd.readouterr()])
    assert len(shown) > 6
    assert not [text for text in shown if SECRET in text]
    assert any(("yes" if status == 200 else "wrong key") in text for text in shown)
