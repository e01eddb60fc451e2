"""Front matter of Markdown: what tools write about a page at its beginning, in YAML, TOML or JSON."""

from __future__ import annotations

import json
import re

# What stands between three hyphens or plus signs; pandoc's lines of title, authors and date.
_FENCED = re.compile(
    r"\A\s*?(---|\+\+\+|;;;)[ \t]*\n(?P<lines>.*?)^(?:\1|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE
)
_PANDOC = re.compile(r"\A(?:%[^\n]*\n(?:[ \t]+\S[^\n]*\n)*){1,3}")
_COMMENT = re.compile(r"\s*(?:#|//).*|\s*")
# Lines of YAML or TOML: a key; what belongs to the key before it: an indented line, an item, a bracket; a table.
_KEY = re.compile(r"(?P<key>\"[^\"]+\"|'[^']+'|[\w$@][^:=\"'.!?]*?)\s*(?::(?=\s|$)|=)(?P<value>.*)")
_DOTTED_KEY = re.compile(r"(?P<key>[\w.-]+)\s*(?::(?=\s|$)|=)(?P<value>.*)")
_CONTINUED = re.compile(r"[ \t].*|-(?:\s.*)?|[\]}][,\]}]*|\[\[?[\w.\"' -]+\]?\]")
_TRIPLE_QUOTES = re.compile(r"(\"\"\"|''').*?\1", re.DOTALL)


def without_front_matter(text: str) -> str:
    """A Markdown text without the front matter at its beginning.

    Text between two thematic breaks is kept: its lines are no keys, or blank lines stand inside both breaks and its
    keys are no single words.
    """
    fenced = _FENCED.match(text)
    if fenced and _is_front_matter(fenced["lines"]):
        return text[fenced.end() :]
    pandoc = _PANDOC.match(text)
    if pandoc:
        return text[pandoc.end() :]
    return _without_json_object(text)


def _is_front_matter(content: str) -> bool:
    """Whether the lines between two fences are keys, what belongs to keys, and comments; see `without_front_matter`.

    One other line decides against it: text that is lost is worse than a few keys in a passage.
    """
    lines = _TRIPLE_QUOTES.sub("", content).split("\n")[:-1]
    is_between_breaks = len(lines) > 1 and not lines[0].strip() and not lines[-1].strip()
    has_key = False
    for line in lines:
        key = _DOTTED_KEY.fullmatch(line) or _KEY.fullmatch(line)
        if key:
            if is_between_breaks and " " in key["key"].strip():
                return False
            has_key = True
        elif not _COMMENT.fullmatch(line) and not (has_key and _CONTINUED.fullmatch(line)):
            return False
    return has_key


def _without_json_object(text: str) -> str:
    """A text without a JSON object at its beginning, which ends on a line of its own.

    Braces may also begin a template or code, so only a whole object that parses is taken off.
    """
    if not text.startswith("{"):
        return text
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return text
    if value and text[end : end + 1] in ("\n", ""):
        return text[end:]
    return text
