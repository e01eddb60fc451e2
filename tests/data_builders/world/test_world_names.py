import random

import pytest

from tripletune.data_builders.world.names import SPLITS, Namer, split_of

KINDS = ("person", "town", "country", "river", "film", "company", "band", "lake")


def titles(split: str, seed: int, noise: float, each: int = 60) -> list[str]:
    namer = Namer(random.Random(seed), split, noise)
    return [namer.name(kind).title for kind in KINDS for _ in range(each)]


def test_no_split_shares_a_name_or_a_coined_word_for_any_seed():
    names = {split: {t for seed in (1, 2) for t in titles(split, seed, 0.2, each=200)} for split in SPLITS}
    assert not names["train"] & names["test"]
    assert not names["train"] & names["validation"]
    assert not names["validation"] & names["test"]
    towns = {split: {Namer(random.Random(s), split, 0).name("town").title for s in range(200)} for split in SPLITS}
    assert not towns["train"] & towns["test"]


def test_names_are_distinct_and_short():
    names = titles("train", 5, 0.0, each=400)
    assert len(set(names)) == len(names)
    assert all(name.isascii() and 1 <= len(name.split()) <= 4 for name in names)


def test_names_repeat_with_the_seed_and_change_with_it():
    assert titles("test", 5, 0.3) == titles("test", 5, 0.3)
    assert titles("test", 5, 0.3) != titles("test", 6, 0.3)


def test_noise_brings_commas_brackets_quotes_and_other_scripts():
    text = "\n".join(titles("train", 5, 1.0))
    assert all(mark in text for mark in (",", "(", '"'))
    assert any("а" <= letter <= "я" for letter in text)
    assert any("ア" <= letter <= "ン" for letter in text)
    assert any(letter in "áéíóú" for letter in text)
    odd = [t for t in titles("train", 5, 0.03, each=500) if not t.isascii() or set(t) & set(',("')]
    assert 0.01 < len(odd) / (500 * len(KINDS)) < 0.06


def test_words_grow_when_the_short_ones_run_out():
    namer = Namer(random.Random(1), "train", 0)
    words = [namer.coin(["esh"]) for _ in range(600)]
    assert len(set(words)) == 600
    assert max(map(len, words)) > max(map(len, words[:50]))


def test_a_text_belongs_to_one_split_whatever_its_case():
    assert split_of("Talovo") == split_of("talovo")
    assert {split_of(str(number)) for number in range(100)} == set(SPLITS)
    assert {split_of(str(number), (1, 0, 0)) for number in range(100)} == {"train"}
    with pytest.raises(ValueError, match="whole numbers"):
        split_of("x", (1, -5, 10))
