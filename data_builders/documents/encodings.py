"""Open a text file in its encoding, which is marked, declared or guessed."""

from __future__ import annotations

import codecs
import re
from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO

from tripletune.data_builders.documents import Unreadable

# The longer mark of UTF-32 begins with that of UTF-16, so it comes first.
_MARKS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe\0\0": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
# Encodings of a text whose non-ASCII words have few, or mostly, bytes that are not ASCII.
_LATIN = ["cp1252", "cp1250", "cp1254", "cp1257"]
_OTHERS = ["cp1251", "koi8_r", "cp1253", "cp1255", "cp1256", "cp932", "euc_jp", "gb18030", "big5", "euc_kr"]
# Bytes that are read at once, and that decide the encoding.
_SAMPLE = 1 << 16
# Lines that are not ASCII from which an encoding is guessed.
_LINES = 200
# The encoding that HTML declares; UTF-16 would have a byte-order mark.
_DECLARED = re.compile(rb"<(?:meta|\?xml)\s[^<>]*?(?:charset|encoding)\s*=\s*[\"']?(?!utf)([\w-]+)", re.IGNORECASE)
_CONTROL = re.compile("[\x80-\x9f]")


def open_text(path: Path, notes: Counter[str], newline: str | None = None, may_declare: bool = False) -> IO[str]:
    """Open a text file; `notes` counts another encoding than UTF-8, and bytes that are not UTF-8.

    Args:
        newline: As of `open`.
        may_declare: Whether the file may declare its encoding, as HTML does.
    """
    encoding = _encoding_of(path, notes, may_declare)
    if not encoding.startswith("utf-8"):
        notes[f"read as {encoding}"] += 1
    return path.open(encoding=encoding, errors="replace", newline=newline)


def _encoding_of(path: Path, notes: Counter[str], may_declare: bool) -> str:
    """The encoding of a text file: from its byte-order mark, UTF-8 if most of it is valid, as declared, or a guess.

    `notes` counts the bytes that UTF-8 has to replace.

    Raises:
        Unreadable: The file is binary.
    """
    with path.open("rb") as file:
        sample = file.read(_SAMPLE)
        for mark, encoding in _MARKS.items():
            if sample.startswith(mark):
                return encoding
        # Text without a mark has no zero bytes.
        if sample.count(0) > len(sample) / 100:
            raise Unreadable("binary")
        valid_bytes = 0
        characters = 0
        for text in codecs.iterdecode(chain([sample], iter(partial(file.read, _SAMPLE), b"")), "utf-8", "ignore"):
            valid_bytes += len(text.encode())
            characters += len(text)
        invalid_bytes = file.tell() - valid_bytes
        # In UTF-8, a character that is not ASCII has one to three more bytes.
        if invalid_bytes <= valid_bytes - characters:
            notes["bytes that are not UTF-8"] += invalid_bytes
            return "utf-8"
        if may_declare:
            declared = _declared_encoding(path, sample)
            if declared:
                return declared
        file.seek(0)
        lines = iter(partial(file.readline, _SAMPLE), b"")
        return _guessed_encoding(b"".join(islice((line for line in lines if not line.isascii()), _LINES)))


def _declared_encoding(path: Path, sample: bytes) -> str | None:
    """The encoding that HTML declares in its first bytes, if the file can be read in it."""
    declaration = _DECLARED.search(sample)
    if not declaration:
        return None
    with suppress(LookupError, UnicodeError), path.open(encoding=declaration[1].decode()) as file:
        for text in iter(partial(file.read, _SAMPLE), ""):
            # Windows pages declare ISO 8859, in which their punctuation would be control characters.
            if _CONTROL.search(text):
                return None
        return file.encoding
    return None


def _guessed_encoding(sample: bytes) -> str:
    """The encoding that fits the sample best, of those of its kind of script."""
    from charset_normalizer import from_bytes

    words = b"".join(word for word in sample.split() if not word.isascii())
    is_latin = sum(byte > 127 for byte in words) < len(words) / 2
    matches = from_bytes(sample, cp_isolation=_LATIN if is_latin else _OTHERS)
    best = matches.best()
    if best is None:
        raise Unreadable("binary")
    # A short text does not tell the accents of Western languages from those of other languages.
    for match in matches:
        is_as_good = (match.chaos, match.coherence) == (best.chaos, best.coherence)
        if is_as_good and "cp1252" in match.could_be_from_charset:
            return "cp1252"
    return best.encoding
