"""Which elements of HTML a reader sees as text."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

BLOCKS = re.compile(
    "address|article|aside|blockquote|body|caption|d[dlt]|details|div|fig(caption|ure)|footer|form|header|hr|html|li|main|"
    "ol|p|pre|section|summary|table|t(body|foot|head|r)|ul|h[1-6]"
)
# Elements whose text a browser does not show, or shows as a control.
SKIPPED_TAGS = re.compile(
    "script|style|template|svg|nav|title|noscript|select|button|textarea|iframe|datalist|noframes|noembed|canvas|audio|"
    "video|annotation|annotation-xml"
)
# Of these, elements whose text is left out also without an end tag; what others hold may be the rest of the page.
_NEVER_TEXT = re.compile("script|style|template")
# What programs hide until the page is ready.
_WHOLE_PAGE = re.compile("html|body|main")
_DELETED = re.compile("del|s|strike")
_HIDING_STYLE = re.compile(
    r"(?:^|;)\s*(?:display\s*:\s*none|visibility\s*:\s*(?:hidden|collapse)|(?:opacity|font-size)\s*:\s*0(?![.\d]*[1-9])|"
    r"(?:left|top|text-indent)\s*:\s*-\d{3,}|clip(?:-path)?\s*:\s*(?:rect\(\s*0|inset\(\s*50))",
    re.IGNORECASE,
)
_STRIKING_STYLE = re.compile(r"(?:^|;)\s*text-decoration(?:-line)?\s*:[^;]*line-through", re.IGNORECASE)
_SECTIONS = frozenset({"article", "main", "section", "blockquote"})


def why_left_out(tag: str, given: Mapping[str, str], around: Collection[str]) -> str:
    """Why the text of an element is left out: "skipped", "menu", "hidden" or "deleted"; "" if it is read.

    Args:
        given: Its attributes.
        around: The tags of the elements around it.
    """
    style = given.get("style", "")
    if _NEVER_TEXT.fullmatch(tag):
        return "skipped"
    is_page_footer = tag == "footer" and _SECTIONS.isdisjoint(around)
    has_menu_role = given.get("role") in ("navigation", "contentinfo")
    if is_page_footer or has_menu_role or SKIPPED_TAGS.fullmatch(tag) or tag == "rp":
        return "menu"
    if _WHOLE_PAGE.fullmatch(tag):
        return ""
    if _DELETED.fullmatch(tag) or _STRIKING_STYLE.search(style):
        return "deleted"
    is_hidden = "hidden" in given and given["hidden"] != "until-found"
    # Icons and the drawn form of a formula are hidden from screen readers; a block is, while a dialog covers it.
    is_drawing = given.get("aria-hidden") == "true" and not BLOCKS.fullmatch(tag)
    is_closed = tag == "dialog" and "open" not in given
    in_formula = tag == "math" or "math" in around
    if is_hidden or is_drawing or is_closed or (_HIDING_STYLE.search(style) and not in_formula):
        return "hidden"
    return ""
