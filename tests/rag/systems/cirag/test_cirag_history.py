from __future__ import annotations

import pytest

from tripletune.models.data.passages import Passage
from tripletune.models.data.triples import Triple
from tripletune.models.llm.client import Message
from tripletune.rag.systems.cirag.integration import Decision, Round, messages_of, shorten, shown_candidates
from tripletune.rag.triples.sentences import Fact

PASSAGE = Passage("Kelm", "Kelm is a town.")


def facts(number: int, count: int = 3) -> tuple[Fact, ...]:
    return tuple(Fact(Triple(f"s{number}", "[[## p ##]]", f"o {n}"), PASSAGE, "") for n in range(count))


def chat(rounds: int = 3, layout: str = "chat") -> list[Message]:
    history = [Round(facts(n), Decision("t", facts(n)[:1], f"q{n}?")) for n in range(rounds - 1)]
    return messages_of("Prompt.", "Who?", facts(rounds - 1), history, layout)


def words(messages: list[Message]) -> int:
    return sum(len(turn["content"].split()) for turn in messages)


def shown(messages: list[Message]) -> list[int]:
    return [len(shown_candidates(turn["content"]) or ()) for turn in messages if turn["role"] == "user"]


def test_the_oldest_candidates_go_first_and_the_newest_never() -> None:
    whole = chat()
    assert shorten(whole, words, words(whole)) == (whole, 0)
    found = []
    for limit in range(words(whole) - 1, 0, -1):
        short, left_out = shorten(whole, words, limit)
        assert words(short) <= limit or left_out == 6
        assert [turn["role"] for turn in short] == [turn["role"] for turn in whole]
        assert [turn for turn in short if turn["role"] != "user"] == [turn for turn in whole if turn["role"] != "user"]
        assert short[-1] == whole[-1]
        assert "Who?" in short[1]["content"]
        found.append((shown(short), left_out))
    assert [*dict.fromkeys(map(str, found))] == [
        str(item)
        for item in [([2, 3, 3], 1), ([1, 3, 3], 2), ([0, 3, 3], 3), ([0, 2, 3], 4), ([0, 1, 3], 5), ([0, 0, 3], 6)]
    ]


def test_what_is_left_is_written_as_the_loop_writes_it() -> None:
    short, _ = shorten(chat(), words, words(chat()) - 1)
    history = [
        Round(facts(0)[:2], Decision("t", facts(0)[:1], "q0?")),
        Round(facts(1), Decision("t", facts(1)[:1], "q1?")),
    ]
    assert short == messages_of("Prompt.", "Who?", facts(2), history)


def test_other_layouts_stay_as_they_are() -> None:
    section = chat(layout="section")
    assert shorten(section, words, 1) == (section, 0)
    plain: list[Message] = [{"role": "user", "content": "a b"}, {"role": "user", "content": "c"}]
    assert shorten(plain, words, 1) == (plain, 0)
    assert shown_candidates("nothing") is None


def test_a_section_that_is_not_ours() -> None:
    broken: list[Message] = [{"role": "user", "content": "[[## fact_before_filter ##]]\nnone"}, *chat()]
    with pytest.raises(ValueError, match="the section fact_before_filter of a turn can't be read"):
        shorten(broken, words, 1)
