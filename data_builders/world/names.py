"""Coined names for the fictional world of `data_builders.world`: words built from syllables that name nothing real.

Every coined word belongs to exactly one split, decided by a digest of the word itself. So train, validation and test
share no name whatever their sizes and seeds, and no split has to be generated to know what another one contains.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

SPLITS: tuple[str, ...] = ("train", "validation", "test")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Endings that make few real words (a plain "on", "in" or "ula" would spell London, Berlin and nebula), no sounds that
# spell a slur, and few letters: a small language model has to copy these names, and each costs it two to four tokens.
_ONSETS = _words("b d f h l m n p r s t v br dr gr tr")
_VOWELS = "aeiou"
_MIDDLES = _words("l m n r v s d t b nd st lm")
_ENDINGS = _words("ira ovo ilo esh osh eth oth avi uva")
_KIND_ENDINGS = {"town": _words("iburg oford astad ewick aby umouth eham"), "country": _words("ordia uland ovania")}
_NOUNS = _words("Lamp Orchard Letter Garden Winter Mirror Voyage Clock Shadow Harvest Secret Road Song Fire Door Storm")
_ADJECTIVES = _words("Silver Quiet Golden Broken Hidden Distant Blue Empty Wild Gentle Last Crimson")
_BAND_NOUNS = _words("Echo Quartet Parade Circus Signal Express")
_COMPANY_NOUNS = _words("Works Group Company Brothers Industries Holdings")
_CLUB_NOUNS = _words("United Rovers Athletic Wanderers")
_UNIVERSITY_NOUNS = _words("University College Academy")
_NICKNAMES = _words("Moss Ace Red Doc Sunny Flint")
_WOMEN = _words(
    "Anna Clara Maria Julia Emma Laura Nora Sara Helen Alice Martha Rosa Eva Lena Ida Vera Olga Irene Diana Ruth Ella "
    "Mia Lucy Grace Amy Jane Kate Nina Paula Rita"
)
_MEN = _words(
    "Peter Paul Martin Simon Oscar Victor Felix Hugo Leo Max Daniel David Mark Thomas Robert Henry Albert Ernest "
    "George Frank Carl Otto Ivan Adam Eric Walter Ralph Louis James Samuel"
)
_CYRILLIC = str.maketrans("abcdefghiklmnoprstuvwyABDFGHLMNPRSTV", "абцдефгхиклмнопрстувўйАБДФГХЛМНПРСТВ")
_ACCENTS = str.maketrans("aeiou", "áéíóú")
_KANA = "アイウエオカキクケコサシスタテトナニノハヒマミムモヤユヨラリルレロワ"


class Name(NamedTuple):
    """A title, the short form that later sentences may use, and the pronoun ("He", "She" or "It")."""

    title: str
    alias: str
    pronoun: str


def split_of(text: str, shares: tuple[int, ...] = (1, 1, 1)) -> str:
    """The one split that a coined word or a question text belongs to.

    Args:
        text: Any text; upper and lower case count as the same.
        shares: Relative sizes of `SPLITS`.

    Returns:
        A member of `SPLITS`, the same on every machine and for every seed.

    Raises:
        ValueError: `shares` does not give every split its share.
    """
    if len(shares) != len(SPLITS) or min(shares) < 0 or sum(shares) == 0:
        raise ValueError(f"shares {shares!r} must be {len(SPLITS)} whole numbers, none negative and one above 0")
    digest = hashlib.blake2b(text.lower().encode(), digest_size=8).digest()
    place = int.from_bytes(digest, "big") % sum(shares)
    return SPLITS[bisect_right(list(accumulate(shares)), place)]


class Namer:
    """Makes names that are new in their split and in no other split.

    Args:
        rng: Source of chance; the same state gives the same names.
        split: A member of `SPLITS`.
        noise: Share of names with commas, brackets, quotes, accents or another script, 0 to 1.
    """

    def __init__(self, rng: random.Random, split: str, noise: float) -> None:
        self._rng = rng
        self._split = split
        self._noise = noise
        self._words: set[str] = set()
        self._titles: set[str] = set()
        self._surnames: list[str] = []

    def coin(self, endings: Sequence[str] = _ENDINGS) -> str:
        """A new capitalised word with one of `endings`; words grow longer when the short ones run out."""
        attempts = 0
        while True:
            syllables = 1 + attempts // 200
            stem = "".join(self._syllable() for _ in range(syllables))
            word = (stem + self._rng.choice(endings)).capitalize()
            attempts += 1
            if word not in self._words and split_of(word) == self._split:
                self._words.add(word)
                return word

    def name(self, kind: str) -> Name:
        """A new name for an entity of `kind`, for example "film"."""
        while True:
            name = self._person() if kind == "person" else self._thing(kind)
            if name.title not in self._titles:
                self._titles.add(name.title)
                return name

    def _syllable(self) -> str:
        return self._rng.choice(_ONSETS) + self._rng.choice(_VOWELS) + self._rng.choice(_MIDDLES)

    def _person(self) -> Name:
        # Family names repeat, so that a name must be read as a whole.
        if self._surnames and self._rng.random() < 0.25:
            surname = self._rng.choice(self._surnames)
        else:
            surname = self._odd_script(self.coin())
            self._surnames.append(surname)
        woman = self._rng.random() < 0.5
        given = self._rng.choice(_WOMEN if woman else _MEN)
        title = f"{given} {surname}"
        if self._rng.random() < self._noise / 2:
            title = self._rng.choice([f"{title}, Jr.", f'{given} "{self._rng.choice(_NICKNAMES)}" {surname}'])
        return Name(title, surname, "She" if woman else "He")

    def _thing(self, kind: str) -> Name:
        word = self._odd_script(self.coin(_KIND_ENDINGS.get(kind, _ENDINGS)))
        title = self._odd_title(kind, word) if self._rng.random() < self._noise / 2 else self._plain_title(kind, word)
        # Questions say "country", so articles do not; see `data_builders.world_relations`.
        noun = "nation" if kind == "country" else kind
        return Name(title, f"the {noun}", "It")

    def _plain_title(self, kind: str, word: str) -> str:
        choice = self._rng.choice
        if kind in ("film", "novel", "album"):
            return choice(
                [f"The {choice(_NOUNS)} of {word}", f"{choice(_ADJECTIVES)} {word}", f"{word} {choice(_NOUNS)}"]
            )
        if kind == "band":
            return choice([f"{choice(_ADJECTIVES)} {word}", f"{word} {choice(_BAND_NOUNS)}"])
        patterns = {
            "river": "{} River",
            "lake": "Lake {}",
            "bridge": "{} Bridge",
            "company": "{} " + choice(_COMPANY_NOUNS),
            "club": "{} " + choice(_CLUB_NOUNS),
            "university": "{} " + choice(_UNIVERSITY_NOUNS),
        }
        return patterns.get(kind, "{}").format(word)

    def _odd_title(self, kind: str, word: str) -> str:
        choice = self._rng.choice
        if kind in ("film", "novel", "album"):
            noun = choice(_NOUNS)
            return choice([f'The "{word}" {noun}', f"{noun}, {word}, {noun}", f"{word} ({noun})"])
        if kind == "company":
            return f"{word}, {self.coin()} & Co."
        return f"{word} ({kind})"

    def _odd_script(self, word: str) -> str:
        if self._rng.random() >= self._noise / 2:
            return word
        style = self._rng.randrange(3)
        if style == 0:
            return word.translate(_CYRILLIC)
        if style == 1:
            return word.translate(_ACCENTS)
        while True:
            word = "".join(self._rng.choices(_KANA, k=self._rng.randint(3, 5)))
            if word not in self._words and split_of(word) == self._split:
                self._words.add(word)
                return word
