from typing import Any

import pytest

from models.llm.chat import ChatEncoder, join_system
from models.llm.client import CallError, Message

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
    assert tokenizer.decode(ChatEncoder(tokenizer, "m", plain=True).encode(CHAT)) == "Plan.\n\nWho?\n\n"


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


def test_joining_the_system_text() -> None:
    system, user, reply = (
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
    )
    assert join_system([system, user, reply]) == [{"role": "user", "content": "S\n\nU"}, reply]
    assert join_system([system, reply]) == [{"role": "user", "content": "S"}, reply]
    assert join_system([user]) == [user]
