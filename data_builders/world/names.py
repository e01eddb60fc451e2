"""Names of the fictional world: coined words in patterns of names, some in odd spellings and other scripts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

from tripletune.data_builders.world import WORLD, Entity, Split, split_of_word

# Lists of syllables and words by name.
_NAMES = {name: tuple(words.split()) for name, words in WORLD["names"].items()}
_CYRILLIC = str.maketrans("abcdefghiklmnoprstuvwyABDFGHLMNPRSTV", "абцдефгхиклмнопрстувўйАБДФГХЛМНПРСТВ")
_ACCENTS = str.maketrans("aeiou", "áéíóú")
_KANA = "アイウエオカキクケコサシスタテトナニノハヒマミムモヤユヨラリルレロワ"
# Words that were refused before a longer word is tried.
_ATTEMPTS = 200
_WORKS = ("film", "novel", "album")


class Namer:
    """Makes names that are unique in all splits; for `noise` see `build.WorldOptions`.

    Words belong to a split by their digest (`split_of_word`), so splits can be made apart and yet share no name.
    """

    def __init__(self, rng: random.Random, split: Split, noise: float) -> None:
        self._rng = rng
        self._split = split
        self._noise = noise
        self._words: set[str] = set()
        self._titles: set[str] = set()
        self._surnames: list[str] = []

    def coin(self, endings: Sequence[str] = _NAMES["endings"]) -> str:
        """A new capitalised word with one of `endings`; words grow longer when short words run out."""
        for attempts in count():
            syllables = ("onsets", "vowels", "middles") * (1 + attempts // _ATTEMPTS)
            stem = "".join(map(self._draw_word, syllables))
            word = (stem + self._rng.choice(endings)).capitalize()
            if self._take_if_new(word):
                break
        return word

    def entity(self, kind: str) -> Entity:
        """A new entity of `kind`, without facts; names are drawn until one is new, since titles identify articles."""
        while True:
            entity = self._new_person() if kind == "person" else self._new_thing(kind)
            if entity.title not in self._titles:
                self._titles.add(entity.title)
                return entity

    def _draw_word(self, names: str) -> str:
        """Draw a word or syllable from one of the lists of names in `world.yaml`."""
        return self._rng.choice(_NAMES[names])

    def _take_if_new(self, word: str) -> bool:
        """Take a word for a name, if it belongs to the split and was not taken before; return whether it was taken."""
        if word in self._words or split_of_word(word) != self._split:
            return False
        self._words.add(word)
        return True

    def _draw_oddness(self) -> bool:
        """Draw whether a name becomes odd; it has two chances, its script and its form, each with half of the share."""
        return self._rng.random() < self._noise / 2

    def _new_person(self) -> Entity:
        """A person, whose title may be taken; family names repeat, so that a name must be read as a whole."""
        if self._surnames and self._rng.random() < 0.25:
            surname = self._rng.choice(self._surnames)
        else:
            surname = self._odd_script(self.coin())
            self._surnames.append(surname)
        is_woman = self._rng.random() < 0.5
        given_name = self._draw_word("women" if is_woman else "men")
        title = f"{given_name} {surname}"
        if self._draw_oddness():
            title = self._rng.choice([f"{title}, Jr.", f'{given_name} "{self._draw_word("nicknames")}" {surname}'])
        return Entity(title, "person", surname, "She" if is_woman else "He")

    def _new_thing(self, kind: str) -> Entity:
        """An entity that is no person; its alias for countries is "the nation", since questions say "country"."""
        endings = _NAMES.get(f"{kind}_endings", _NAMES["endings"])
        word = self._odd_script(self.coin(endings))
        title = self._odd_title(kind, word) if self._draw_oddness() else self._plain_title(kind, word)
        # Articles do not say "country", since questions do; see `relations` in world.yaml.
        alias = "the nation" if kind == "country" else f"the {kind}"
        return Entity(title, kind, alias, "It")

    def _plain_title(self, kind: str, word: str) -> str:
        """A title in the usual form of its kind, so that readers of the article expect what it is about."""
        if kind in _WORKS:
            return self._rng.choice([
                f"The {self._draw_word('nouns')} of {word}",
                f"{self._draw_word('adjectives')} {word}",
                f"{word} {self._draw_word('nouns')}",
            ])  # fmt: skip
        if kind == "band":
            return self._rng.choice([f"{self._draw_word('adjectives')} {word}", f"{word} {self._draw_word('bands')}"])
        # A second word of each list is drawn for every kind, since another order of draws would change the world.
        second_words = {name: self._draw_word(name) for name in ("company", "club", "university")}
        if kind in second_words:
            return f"{word} {second_words[kind]}"
        patterns = {"river": "{} River", "lake": "Lake {}", "bridge": "{} Bridge"}
        return patterns.get(kind, "{}").format(word)

    def _odd_title(self, kind: str, word: str) -> str:
        """A title with quotation marks, commas or brackets, which break careless parsers of triples."""
        if kind in _WORKS:
            noun = self._draw_word("nouns")
            return self._rng.choice([f'The "{word}" {noun}', f"{noun}, {word}, {noun}", f"{word} ({noun})"])
        if kind == "company":
            return f"{word}, {self.coin()} & Co."
        return f"{word} ({kind})"

    def _odd_script(self, word: str) -> str:
        """The word in Cyrillic letters or with accents, or a word of kana; mostly the word as it is."""
        if not self._draw_oddness():
            return word
        style = self._rng.choice(("Cyrillic", "accents", "kana"))
        if style == "Cyrillic":
            return word.translate(_CYRILLIC)
        if style == "accents":
            return word.translate(_ACCENTS)
        while True:
            word = "".join(self._rng.choices(_KANA, k=self._rng.randint(3, 5)))
            if self._take_if_new(word):
                return word
