import base64
import email.utils
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripletune.models.llm.backends.api import (
    Address,
    count,
    import_sdk,
    ledger_name,
    redact,
    retry_after,
    sampling_fields,
    split_system,
)
from tripletune.models.llm.client import CallError, Sampling


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "7"}, 7.0),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "tomorrow"}, None),
        ({"retry-after": email.utils.formatdate(1030, usegmt=True)}, 30.0),
        ({"retry-after": email.utils.formatdate(900, usegmt=True)}, 0.0),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers, now=1000.0) == seconds


@given(st.dictionaries(st.sampled_from(["retry-after", "retry-after-ms"]), st.text()))
def test_retry_after_takes_anything(headers: dict[str, str]) -> None:
    found = retry_after(headers)
    assert found is None or (math.isfinite(found) and found >= 0)


def test_a_password_in_a_url_becomes_a_header() -> None:
    address = Address.parse("https://ann:p%40ss@host.example:8443/v1?x=1#end")
    assert address.url == "https://host.example:8443/v1?x=1"
    assert address.join("/chat") == "https://host.example:8443/v1/chat?x=1"
    assert Address.parse("http://h/v1/").join("/chat") == "http://h/v1/chat"
    assert address.host == "host.example:8443"
    assert base64.b64decode(address.headers["Authorization"].removeprefix("Basic ")) == b"ann:p@ss"
    assert "p@ss" not in repr(address)
    assert "Basic" not in repr(address)
    assert Address.parse("http://[::1]:80/v1").url == "http://[::1]:80/v1"


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://host/x", "http://", "http://u:secret@h:port/v1", "http://["]
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ValueError, match="must look like") as error:
        Address.parse(url)
    assert "secret" not in str(error.value)


@given(st.text(), st.text(alphabet=st.characters(categories=["L", "N"]), min_size=5))
def test_a_secret_is_never_left(before: str, secret: str) -> None:
    shown = redact(f"{before}{secret}, {secret}.", [secret, ""])
    assert secret not in shown.replace("***", " ")


@pytest.mark.parametrize(
    "text", ["Incorrect API key: sk-proj-abc_12*3", "Authorization: Bearer abc.def", "http://ann:word@host/v1"]
)
def test_what_looks_like_a_key_is_hidden(text: str) -> None:
    shown = redact(text)
    assert "***" in shown
    assert not any(part in shown for part in ("proj", "abc", "word"))


def test_an_ordinary_text_is_left_alone() -> None:
    text = "the model's max_tokens: 12 (see https://host/v1/x), ask-me-anything"
    assert redact(text, [""]) == text


def test_the_ledgers_name() -> None:
    assert ledger_name("openai", "m", None) == ledger_name("openai", "m", {}) == "openai:m"
    extra: dict[str, Any] = {"b": {"z": 1}, "a": "é"}
    assert ledger_name("openai", "m", extra) == 'openai:m {"a":"é","b":{"z":1}}'
    assert ledger_name("openai", "m", dict(reversed(extra.items()))) == ledger_name("openai", "m", extra)


def test_sampling_that_is_not_sent() -> None:
    assert sampling_fields(Sampling(0.7, 0.9), True, "send") == {"temperature": 0.7, "top_p": 0.9}
    assert sampling_fields(Sampling(0.0), False, "send") == {}
    assert sampling_fields(Sampling(1.0), False, "send") == {}
    for asked in (Sampling(0.7), Sampling(1.0, 0.9)):
        with pytest.raises(CallError, match="Set send=True"):
            sampling_fields(asked, False, "send")


def test_splitting_off_the_system_text() -> None:
    chat: Any = [
        {"role": "system", "content": "A"},
        {"role": "user", "content": "q"},
        {"role": "system", "content": "B"},
        {"role": "assistant", "content": "r"},
    ]
    assert split_system(chat) == ("A\n\nB", [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}])


def test_counts_that_are_none() -> None:
    assert count({"a": 3, "b": 4, "c": None, "d": "x", "e": -1, "f": True}, *"abcdefg") == 7


def test_an_sdk_that_is_missing() -> None:
    with pytest.raises(ValueError, match=r"pip install 'tripletune\[teachers\]'"):
        import_sdk("no_such_package_at_all")
