from typing import Any

import pytest

from tripletune.models.llm.client import CallError, Message
from tripletune.models.local.chat import ChatEncoder, join_system

CHAT: list[Message] = [{"role": "system", "content": "Plan."}, {"role": "user", "content": "Who?"}]


def test_a_template_is_followed(tokenizer: Any) -> None:
    ids = ChatEncoder(tokenizer, "m").encode(CHAT)
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nPlan.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    )
    # The markers are tokens of their own.
    assert [ids.count(number) for number in (1, 2)] == [3, 2]


def test_a_base_model(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"model m has no chat template.*set plain=True"):
        ChatEncoder(tokenizer, "m")
    assert tokenizer.decode(ChatEncoder(tokenizer, "m", plain=True).encode(CHAT)) == "Plan.\n\nWho?"


def test_a_template_without_a_system_role(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('not by turns') }}{% endif %}"
        "<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if loud %}!{% endif %}"
    )
    encoder = ChatEncoder(tokenizer, "m", {"loud": True})
    assert tokenizer.decode(encoder.encode(CHAT)) == "<user>Plan.\n\nWho?!"
    twice: list[Message] = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(CallError, match="refuses the turns user, user: not by turns"):
        encoder.encode(twice)


def test_a_template_that_writes_the_day_always_writes_the_same(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y %H:%M:%S:%f') %}{% endif %}"
        "Today: {{ date_string }}. {% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    assert tokenizer.decode(ChatEncoder(tokenizer, "m").encode(CHAT)) == "Today: 26 Jul 2024. Plan.Who?"
    other = ChatEncoder(tokenizer, "m", {"date_string": "1 Jan"})
    assert tokenizer.decode(other.encode(CHAT)) == "Today: 1 Jan. Plan.Who?"


def test_joining_the_system_text() -> None:
    system, user, reply = (
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
    )
    assert join_system([system, user, reply]) == [{"role": "user", "content": "S\n\nU"}, reply]
    assert join_system([system, reply]) == [{"role": "user", "content": "S"}, reply]
    assert join_system([user]) == [user]


def test_what_chats_with_one_system_turn_begin_with(tokenizer: Any) -> None:
    encoder = ChatEncoder(tokenizer, "m")
    ids = encoder.encode(CHAT)
    shared = encoder.shared(CHAT, ids)
    assert tokenizer.decode(ids[:shared]) == "<|im_start|>system\nPlan.<|im_end|>\n<|im_start|>user\n"
    other: list[Message] = [CHAT[0], {"role": "user", "content": "What then?"}, {"role": "assistant", "content": "x"}]
    assert encoder.shared(other, encoder.encode(other)) == shared
    assert encoder.encode(other)[:shared] == ids[:shared]
    assert encoder.shared(CHAT[1:], encoder.encode(CHAT[1:])) == 0, "no system turn"
    assert encoder.shared(CHAT, [9, *ids]) == 0, "tokens of something else"
    # Texts that are joined to the first turn are shared as well.
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    )
    joined = ChatEncoder(tokenizer, "m")
    ids = joined.encode(CHAT)
    assert tokenizer.decode(ids[: joined.shared(CHAT, ids)]) == "<user>Plan.\n\n"
