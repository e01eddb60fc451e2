"""The style of an element of HTML: its own, and that of simple rules in the page's `<style>` elements.

A page may hide or strike text by a class, so that its elements alone do not tell what is seen. Rules for a tag, a class
or an id are read, such as `.draft { display: none }` and `p.old`. Rules in `@media` and other blocks, which hold only
sometimes, selectors of several parts, and style sheets in files of their own are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_COMMENT = re.compile(r"/\*.*?\*/|<!--|-->", re.DOTALL)
# A rule that begins with @, with the rules inside it.
_AT_RULE = re.compile(r"@[^{};]*(?:;|\{(?:[^{}]|\{[^{}]*\})*\})")
_RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")
_SELECTOR = re.compile(r"(?P<tag>[\w-]*)(?:\.(?P<class>[\w-]+)|#(?P<id>[\w-]+))?")


class StyleSheets:
    """The declarations of the rules that were read so far, by their selectors."""

    def __init__(self) -> None:
        self._rules: dict[str, dict[str, str]] = {}

    def add_rules(self, text: str) -> None:
        """Add the rules of a `<style>` element."""
        text = _AT_RULE.sub("", _COMMENT.sub("", text))
        for selectors, declarations in _RULE.findall(text):
            for selector in map(str.strip, selectors.split(",")):
                if selector and _SELECTOR.fullmatch(selector):
                    self._rules.setdefault(selector, {}).update(_read_declarations(declarations))

    def style_of(self, tag: str, attributes: Mapping[str, str]) -> str:
        """The style of an element: its own declarations win, then those of rules for its id, classes and tag."""
        own = attributes.get("style", "")
        if not self._rules:
            return own
        declared: dict[str, str] = {}
        for selector in _matching_selectors(tag, attributes):
            declared |= self._rules.get(selector, {})
        declared |= _read_declarations(own)
        return ";".join(f"{name}:{value}" for name, value in declared.items())


def _matching_selectors(tag: str, attributes: Mapping[str, str]) -> Iterator[str]:
    """The selectors that fit an element, from the weakest to the strongest."""
    yield tag
    for name in attributes.get("class", "").split():
        yield f".{name}"
        yield f"{tag}.{name}"
    if attributes.get("id"):
        yield f"#{attributes['id']}"
        yield f"{tag}#{attributes['id']}"


def _read_declarations(declarations: str) -> dict[str, str]:
    """Declarations by their property; `!important` is dropped."""
    declared = {}
    for declaration in declarations.split(";"):
        name, colon, value = declaration.partition(":")
        if colon:
            declared[name.strip().lower()] = value.replace("!important", "").strip()
    return declared
