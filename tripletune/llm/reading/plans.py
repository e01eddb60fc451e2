"""Read a chat model's plan (RAS): one of three markers, with a sub-query."""

from __future__ import annotations

import re

from tripletune.core.calls import UnusableReply
from tripletune.core.data.records import Action
from tripletune.core.data.rendering import Plan
from tripletune.llm.reading.lines import (
    COMMENT_LABELS,
    QUESTION_LABELS,
    QUOTES,
    lines_of,
    plain_text,
    read_line,
    unquoted,
    without_emphasis,
)
from tripletune.llm.reply_json import json_values

_NAMES = r"(SUB-?Q(?:UERY)?|SUFFICIENT|NO[ _-]?RETRIEVAL)"
_MARKER = re.compile(rf"\\?\[[ \t]*{_NAMES}[ \t]*\\?\]", re.IGNORECASE)
# "(sufficient)" may be prose, so other brackets count around capital letters only, or as tags.
_OTHER_BRACKETS = re.compile(rf"[({{]{_NAMES}[)}}]")
_TAG = re.compile(rf"<{_NAMES}\s*/?>", re.IGNORECASE)
_CLOSING_TAG = re.compile(rf"[<\[]/{_NAMES}[>\]]", re.IGNORECASE)
_QUERY_IN_BRACKETS = re.compile(r"\[(SUBQ)\b[ \t:–—-]+([^\[\]\n]+)\]")
_BARE_MARKER = re.compile(r"(SUB-?Q(?:UERY)?\b|(?:SUFFICIENT|NO_RETRIEVAL)\b(?=[ \t]*(?:[:.–—-]|\Z)))")
_MARKER_NAME = re.compile(rf"\[?{_NAMES}\]?", re.IGNORECASE)
# Models that go on with the prompt's pattern invent what a search finds.
_RUN_ON = re.compile(r"^[\s*_#]*(?:retrieved graph information|question)[ \t*_]*:", re.IGNORECASE | re.MULTILINE)
# "Question:" may repeat the question of the prompt.
_SUBQUERY_LABELS = tuple(label for label in QUESTION_LABELS if label != "question")
# Values that deny their name in JSON: {"sufficient": "no"}.
_NOT = ("", "no", "false", "none", "null")
_BEFORE_QUERY = re.compile(r"\A[\s:：*_`–—→➜⇒>=-]+")


def read_plan(reply: str) -> Plan:
    """Read a chat model's plan (RAS, eq. 1): one of the three markers in any form, with the sub-query of `[SUBQ]`.

    Raises:
        UnusableReply: "no_plan", "two_plans" (different markers, or two sub-queries) or "no_subquery".
    """
    distinct = list(dict.fromkeys(_json_plans(reply) or _marked_plans(reply)))
    if not distinct:
        raise UnusableReply(
            "no_plan", "There is no decision: begin with [SUBQ] and a question, [SUFFICIENT] or [NO_RETRIEVAL]."
        )
    if len(distinct) > 1:
        raise UnusableReply("two_plans", "There are several decisions: write only one, with one question.")
    if distinct[0].action is Action.SUBQ and not distinct[0].subquery:
        raise UnusableReply("no_subquery", "There is no question after [SUBQ]: write [SUBQ] and the question.")
    return distinct[0]


def _marked_plans(reply: str) -> list[Plan]:
    """All plans in the text of a reply: with their markers in brackets, else with bare markers, else with labels."""
    text = _CLOSING_TAG.sub("\n", plain_text(reply))
    text = _OTHER_BRACKETS.sub(r"[\1]", _TAG.sub(r"[\1]", text))
    text = _QUERY_IN_BRACKETS.sub(r"[\1] \2", text)
    first = _MARKER.search(text)
    if first is None:
        return _bare_plans(text) or _labelled_plans(text)
    run_on = _RUN_ON.search(text, first.end())
    if run_on:
        text = text[: run_on.start()]
    return [_plan_of(text, marker) for marker in _MARKER.finditer(text)]


def _plan_of(text: str, marker: re.Match[str]) -> Plan:
    """The plan of a marker; what follows a marker without sub-query is an explanation, and not read."""
    action = _action_of(marker[1])
    if action is not Action.SUBQ:
        return Plan(action)
    rest = text[marker.end() :].splitlines()
    own = _clean_subquery(rest[0]) if rest else ""
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
            plans.append(Plan(action, _clean_subquery(line.text[marker.end() :]) if action is Action.SUBQ else ""))
    return plans


def _json_plans(reply: str) -> list[Plan]:
    """Plans in JSON: `{"action": "SUBQ", "query": "x"}`, `{"SUBQ": "x"}` or `{"sufficient": false, "query": "x"}`.

    A marker may be the name of a field or its value. Fields that say no are dropped first, since `"sufficient": false`
    is no decision to answer. A field "question" may repeat the main question, so it counts only without a field that
    must be a sub-query. Guarded by tests/llm, which have one reply per form.
    """
    plans = []
    for value in json_values(reply, dict):
        fields = {str(name).lower(): str(field).strip() for name, field in value.items()}
        fields = {name: field for name, field in fields.items() if field.lower() not in _NOT}
        subqueries = [field for name, field in fields.items() if name in _SUBQUERY_LABELS]
        subquery = subqueries[0] if subqueries else fields.get("question", "")
        actions = []
        for name, field in fields.items():
            named = _MARKER_NAME.fullmatch(name)
            marker = named or _MARKER_NAME.fullmatch(field)
            if marker:
                actions.append(_action_of(marker[1]))
            if named and actions[-1] is Action.SUBQ:
                subquery = field
        if not actions and subqueries:
            actions = [Action.SUBQ]
        for action in actions:
            plans.append(Plan(action, unquoted(subquery) if action is Action.SUBQ else ""))
    return plans


def _labelled_plans(text: str) -> list[Plan]:
    """Plans without marker whose label says that they ask: `Sub-query: x`."""
    labelled = [line for line in lines_of(text) if line.label in _SUBQUERY_LABELS and line.text]
    return [Plan(Action.SUBQ, unquoted(line.text)) for line in labelled]


def _action_of(name: str) -> Action:
    """The action of a marker's name, which a model may shorten or spell in small letters."""
    name = name.upper()
    if name.startswith("SUB"):
        return Action.SUBQ
    return Action.SUFFICIENT if name == "SUFFICIENT" else Action.NO_RETRIEVAL


def _clean_subquery(text: str) -> str:
    """The sub-query in the text after its marker, without the closing marks of what was opened before the marker."""
    text = _BEFORE_QUERY.sub("", text)
    line = read_line(text)
    if line.label in QUESTION_LABELS:
        text = line.text
    text = without_emphasis(text.rstrip("*_` \t"))
    is_unpaired = text[-1:] in QUOTES.values() and text.count(text[-1:]) == 1 and text[0] not in QUOTES
    # An apostrophe may end a name: "the Beatles'".
    if is_unpaired and text[-1] not in "'’":
        text = text[:-1]
    return unquoted(text)
