"""Read a chat model's plan (RAS): one of three markers, with a sub-query."""

from __future__ import annotations

import re

from tripletune.core.calls import UnusableReply
from tripletune.core.data.records import Action
from tripletune.core.data.rendering import Plan
from tripletune.llm.reading.lines import COMMENT_LABELS, QUOTES, lines_of, unquoted, without_emphasis
from tripletune.llm.reply_json import without_thoughts

_MARKER = re.compile(r"\[[ \t]*(SUBQ|SUFFICIENT|NO[ _-]?RETRIEVAL)[ \t]*\]", re.IGNORECASE)
_BARE_MARKER = re.compile(r"(SUBQ|SUFFICIENT|NO_RETRIEVAL)\b(?=[ \t]*(?:[:.–—-]|\Z))")
# Models that go on with the prompt's pattern invent what a search finds.
_RUN_ON = re.compile(r"^[\s*_#]*(?:retrieved graph information|question)[ \t*_]*:", re.IGNORECASE | re.MULTILINE)
_BEFORE_QUERY = re.compile(r"\A[\s:：*_`–—-]+")


def read_plan(reply: str) -> Plan:
    """Read a chat model's plan (RAS, eq. 1): one of the three markers in any form, with the sub-query of `[SUBQ]`.

    Raises:
        UnusableReply: "no_plan", "two_plans" (different markers, or two sub-queries) or "no_subquery".
    """
    text = without_thoughts(reply)
    markers = list(_MARKER.finditer(text))
    if markers:
        run_on = _RUN_ON.search(text, markers[0].end())
        if run_on:
            text = text[: run_on.start()]
        plans = [_plan_of(text, marker) for marker in _MARKER.finditer(text)]
    else:
        plans = _bare_plans(text)
    distinct = list(dict.fromkeys(plans))
    if not distinct:
        raise UnusableReply(
            "no_plan", "There is no decision: begin with [SUBQ] and a question, [SUFFICIENT] or [NO_RETRIEVAL]."
        )
    if len(distinct) > 1:
        raise UnusableReply("two_plans", "There are several decisions: write only one, with one question.")
    if distinct[0].action is Action.SUBQ and not distinct[0].subquery:
        raise UnusableReply("no_subquery", "There is no question after [SUBQ]: write [SUBQ] and the question.")
    return distinct[0]


def _plan_of(text: str, marker: re.Match[str]) -> Plan:
    action = _action_of(marker[1])
    if action is not Action.SUBQ:
        return Plan(action)
    rest = text[marker.end() :].splitlines()
    own = _subquery(rest[0]) if rest else ""
    if own:
        return Plan(action, own)
    # `[SUBQ]` alone on its line: the question is the next line.
    following = [line for line in lines_of("\n".join(rest[1:])) if line.text and line.label not in COMMENT_LABELS]
    return Plan(action, unquoted(following[0].text) if following else "")


def _bare_plans(text: str) -> list[Plan]:
    """Plans without brackets, which begin a line in capital letters: `SUBQ: x`, `SUFFICIENT`."""
    plans = []
    for line in lines_of(text):
        marker = _BARE_MARKER.match(line.text)
        if marker:
            action = _action_of(marker[1])
            plans.append(Plan(action, _subquery(line.text[marker.end() :]) if action is Action.SUBQ else ""))
    return plans


def _action_of(name: str) -> Action:
    return Action(f"[{re.sub('[ -]', '_', name.upper())}]")


def _subquery(text: str) -> str:
    """The sub-query in the text after its marker, without the closing marks of what was opened before the marker."""
    text = _BEFORE_QUERY.sub("", text)
    text = without_emphasis(text.rstrip("*_` \t"))
    unpaired = text[-1:] in QUOTES.values() and text.count(text[-1:]) == 1 and text[0] not in QUOTES
    if unpaired and text[-1] not in "'’":
        text = text[:-1]
    return unquoted(text)
