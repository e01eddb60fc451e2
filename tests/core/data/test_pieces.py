import random
from itertools import pairwise

import pytest

from tripletune.core.data.pieces import about_tokens, joined, pack, sentences, split_passage, windows

WORDS = [f"w{n}" for n in range(400)]


def text(count, seed=0):
    rng = random.Random(seed)
    return " ".join(f"The {rng.choice(WORDS)} has {rng.choice(WORDS)} and {rng.choice(WORDS)}." for _ in range(count))


def pieces(body, limit=300):
    return [joined(piece) for piece in pack(sentences(body, limit), limit, by_content=True)]


def test_pieces_by_content_keep_their_ends_after_an_edit():
    body = text(300)
    before, after = pieces(body), pieces("A new sentence stands at the beginning, longer than the others. " + body)
    assert " ".join(before) == body
    assert all(len(one) <= 300 for one in before)
    assert sum(map(len, before)) / len(before) > 150
    assert len(set(after) - set(before)) <= 8 < len(before) / 4
    # Filled to the limit, hardly a piece stays.
    assert len(set(split_passage("A new sentence. " + body, 300)) & set(split_passage(body, 300))) < len(before) / 4


def test_a_piece_ends_with_a_paragraph_where_one_does():
    paragraphs = [text(4, seed) for seed in range(9)]
    spans, start = [], 0
    for one in paragraphs:
        spans += sentences(one, 300, start=start)
        start += len(one) + 1
    found = ["\n".join(paragraphs)[piece[0].start : piece[-1].end] for piece in pack(spans, 300, by_content=True)]
    assert found == [joined(piece) for piece in pack(spans, 300, by_content=True)]
    ends = [one.endswith(tuple(paragraphs)) or one in paragraphs for one in found]
    assert all(ends)


@pytest.mark.parametrize(
    ("body", "found"), [("你好。天气很好。我们走", ["你好。", "天气很好。", "我们走"]), ("aaaa b", ["aaaa", "b"])]
)
def test_what_has_no_spaces_is_put_together_without(body, found):
    assert split_passage(body, 5) == found
    assert split_passage(body, 100) == [body]


def test_windows_join_passages_up_to_their_size():
    passages = [(f"Title {number}", text(5, number)) for number in range(20)]
    for overlap in (0, 40):
        made = list(windows(passages, 120, overlap, about_tokens))
        assert all(sum(map(about_tokens, window.text.splitlines())) <= 120 for window in made)
        assert made[0].text.startswith("Title 0\nThe ")
        assert sorted({number for window in made for number in window.passages}) == list(range(20))
        for number, (_, body) in enumerate(passages):
            for sentence in body.split(". "):
                holding = [window for window in made if sentence in window.text]
                assert holding, "no sentence is cut"
                assert all(number in window.passages for window in holding)
    plain, overlapping = (list(windows(passages, 120, overlap, about_tokens)) for overlap in (0, 40))
    assert " ".join(window.text.replace("\n", " ") for window in plain) == " ".join(" ".join(part) for part in passages)
    assert len(overlapping) > len(plain)
    for window, following in pairwise(overlapping):
        first_sentence = following.text.splitlines()[0].split(". ")[0]
        assert first_sentence in window.text, "a window repeats the end of the one before"


def test_windows_count_the_tokens_of_a_tokenizer():
    passages = [("", "One two three. Four five six. Seven eight nine.")]
    made = list(windows(passages, 6, 0, lambda sentence: len(sentence.split())))
    assert [window.text for window in made] == ["One two three. Four five six.", "Seven eight nine."]
