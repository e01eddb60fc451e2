from dataclasses import fields

import pytest

from tripletune.core.calls import Sampling
from tripletune.core.command_line import CommandParser, add_arguments, from_arguments, to_arguments
from tripletune.llm.backends import LLMOptions, add_chat_model, open_client

SECRET = "sk-hunter2-0123456789"


def test_every_field_is_an_option():
    given = LLMOptions(
        *("anthropic", "m", "http://127.0.0.1:1/v1", "MY_KEY", "l.sqlite", 3, 60.0, 1e5, 7.5, 2, 0.5, 0.9, 4, "yes"),
        *("max_tokens", '{"a": 1}', "anthropic", 8, "float32"),
    )
    assert all(getattr(given, field.name) != field.default for field in fields(LLMOptions))
    parser = CommandParser()
    add_arguments(parser, LLMOptions, "teacher")
    assert from_arguments(LLMOptions, parser.parse_args(to_arguments(given, "teacher")), "teacher") == given
    assert given.sampling(64) == Sampling(0.5, 0.9, 64, 4)


def test_one_text_names_a_chat_model(capsys):
    def read(*words):
        parser = CommandParser()
        add_chat_model(parser.add_argument_group("model"))
        return from_arguments(LLMOptions, parser.parse_args(words), "teacher")

    assert read("--llm", "openai:a:7b@http://h/v1,http://i/v1") == LLMOptions(
        "openai", "a:7b", "http://h/v1,http://i/v1"
    )
    assert read("--llm", "hf:runs/x", "--teacher-seed", "3") == LLMOptions("hf", "runs/x", seed=3)
    for words, problem in (
        (("--llm", "m"), "write [ROLE=]BACKEND:MODEL[@URL,URL]"),
        (("--llm", "nope:m"), "BACKEND is one of anthropic, batch, hf, openai"),
        (("--llm", "answer=openai:m"), "leave out answer="),
        (("--llm", "openai:m@localhost:8000/v1"), "write the URL with http://"),
        (("--llm", "openai:m", "--teacher-model", "n"), "leave out --teacher-model"),
        (("--teacher-url", "http://h/v1", "--llm", "openai:m"), "leave out --teacher-url"),
        (("--llm", "openai:m", "--teacher", "hf"), "leave out --teacher"),
    ):
        with pytest.raises(SystemExit) as caught:
            read(*words)
        assert caught.value.code == 2
        assert problem in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        *(
            (f'{{"{name}": 1, "a": 2}}', f"extra holds {name}: ")
            for name in ("model", "messages", "stream", "n", "seed")
        ),
        *(
            (f'{{"a": {value}}}', "extra must be a JSON object")
            for value in ("NaN", "[-Infinity]", "1e999", "1" * 6000)
        ),
        ("[" * 100_000, "extra must be a JSON object"),
    ],
)
def test_fields_of_requests_that_are_not_the_users(extra, words):
    with pytest.raises(ValueError, match=words):
        LLMOptions(model="m", extra=extra)


def test_a_named_variable_must_be_set(tmp_path):
    ledger = tmp_path / "l.sqlite"
    with pytest.raises(ValueError, match="api_key_env names the environment variable MY_KEY, but it is not set"):
        open_client(LLMOptions(model="m", api_key_env="MY_KEY", ledger=str(ledger)), {})
    with pytest.raises(ValueError, match="MY_KEY holds characters that no API key has"):
        open_client(LLMOptions(model="m", api_key_env="MY_KEY", ledger=str(ledger)), {"MY_KEY": "sk-ключ"})
    with pytest.raises(ValueError, match="OPENAI_API_KEY"):
        open_client(LLMOptions(model="m", ledger=str(ledger)), {})
    with pytest.raises(ValueError, match="backend batch needs a ledger"):
        open_client(LLMOptions("batch", "m"), {})
    assert not ledger.exists()
