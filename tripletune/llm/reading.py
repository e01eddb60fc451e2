"""One reading of replies for all loops: what a model meant, behind the form in which chat models write it.

A prompt asks for one line, a list or a marker. Strong models wrap it in bold type, code fences, bullets, numbers,
labels, quotation marks, and sentences before or after. `lines_of` takes these off, in one way for all roles; the
readers below it only look for what their role asks for. What is ambiguous is refused with an `UnusableReply`, never
guessed.

`tests/llm/test_reading.py` has the table of forms, one row per form and role.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from tripletune.core.calls import UnusableReply
from tripletune.core.data.records import Action
from tripletune.core.data.rendering import Plan
from tripletune.llm.reply_json import json_values, without_thoughts

# Labels that models put before a line, by what follows them.
_REPLY_LABELS = ("reply", "response", "output", "result")
_PLAN_LABELS = ("plan", "action", "decision", "next action", "next step")
_ANSWER_LABELS = ("answer", "final answer", "short answer", "the answer")
_THOUGHT_LABELS = ("thought", "next thought")
_QUESTION_LABELS = (
    "question", "next question", "new question", "follow-up question", "query", "next query", "new query",
    "search query", "search", "sub-query", "subquery", "sub-question", "follow up", "follow-up",
)  # fmt: skip
_LIST_LABELS = ("triples", "clues", "facts", "new facts", "rows", "topics", "subtopics")
_VERDICT_LABELS = ("answerable", "verdict")
# What follows these labels explains the reply and is not part of it.
COMMENT_LABELS = ("reasoning", "reason", "explanation", "note", "analysis", "rationale", "why", "comment", "because")
_LABELS = (
    *_REPLY_LABELS, *_PLAN_LABELS, *_ANSWER_LABELS, *_THOUGHT_LABELS, *_QUESTION_LABELS, *_LIST_LABELS,
    *_VERDICT_LABELS, *COMMENT_LABELS,
)  # fmt: skip

_FENCE = re.compile(r"^[ \t]*(?:`{3,}|~{3,})[\w-]*[ \t]*$")
_EMPHASIS = re.compile(r"(\*{2,3}|_{2,3}|`+)(?=\S)(.+?)(?<=\S)\1")
_WHOLE_EMPHASIS = re.compile(r"([*_])(?=[^\s*_])([^*_]+)(?<=\S)\1")
_BULLET = re.compile(r"(?:[•·‣▪◦●]\s*|[-*+–—>]\s+|#{1,6}\s+)")
_NUMBER = re.compile(r"(?:\[(\d{1,3})\][ \t]*[:.)]?|\((\d{1,3})\)[ \t]*[:.]?|(\d{1,3})[.):](?=\s))[ \t]*")
_LABEL = re.compile(
    rf"({'|'.join(sorted(_LABELS, key=len, reverse=True))})(?: \d{{1,2}})?[ \t]*(?::|：|[ \t][-–—][ \t])[ \t]*",
    re.IGNORECASE,
)
_QUOTES = {'"': '"', "“": "”", "«": "»", "'": "'", "‘": "’", "„": "“"}


class Line(NamedTuple):
    """A line of a reply without its decoration.

    Attributes:
        text: What the line says.
        number: The digits of its number, as in `[2]`, `(2)`, `2.` or `2:`; "" without number.
        label: Its label in lower case, as in `**Answer:** x`; "" without label.
    """

    text: str
    number: str = ""
    label: str = ""


def lines_of(reply: str) -> list[Line]:
    """The lines of a reply that say something, without thoughts, code fences, bullets, numbers, labels and bold type.

    A label alone on its line, as in "Triples:", is kept as a line without text.
    """
    lines = []
    for raw in without_thoughts(reply).splitlines():
        if not _FENCE.match(raw):
            line = read_line(raw)
            if line.text or line.label:
                lines.append(line)
    return lines


def read_line(raw: str) -> Line:
    """Take the decoration off one line; see `Line`."""
    text = without_emphasis(raw)
    number = label = ""
    while True:
        before = text
        # A bullet, a number and a label may stand in any order, as in `- **1.** Query: x`.
        text = _BULLET.sub("", text, count=1) if _BULLET.match(text) else text
        numbered = _NUMBER.match(text)
        if numbered and not number:
            number = next(digits for digits in numbered.groups() if digits)
            text = text[numbered.end() :]
        labelled = _LABEL.match(text)
        if labelled and not label:
            label = labelled[1].lower()
            text = text[labelled.end() :]
        text = without_emphasis(text)
        if text == before:
            return Line(text, number, label)


def without_emphasis(text: str) -> str:
    """A line without bold type, italics of the whole line, and backticks; single stars inside a line are text."""
    text = text.strip()
    while True:
        before = text
        text = _EMPHASIS.sub(r"\2", text)
        whole = _WHOLE_EMPHASIS.fullmatch(text)
        text = whole[2] if whole else text
        # A reply that was cut off may lack the closing stars.
        text = text.removeprefix("**").removesuffix("**").strip()
        if text == before:
            return text


def unquoted(text: str) -> str:
    """A text without one pair of quotation marks around all of it; quotation marks inside stay."""
    text = text.strip()
    if len(text) > 2 and _QUOTES.get(text[0]) == text[-1] and text[-1] not in text[1:-1] and text[0] not in text[1:-1]:
        return text[1:-1].strip()
    return text


# --- a plan (RAS) ---

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
    unpaired = text[-1:] in _QUOTES.values() and text.count(text[-1:]) == 1 and text[0] not in _QUOTES
    if unpaired and text[-1] not in "'’":
        text = text[:-1]
    return unquoted(text)


# --- rows of three fields (T2RAG, GEAR) ---


class FieldRow(NamedTuple):
    """A row `subject | predicate | object`, with the digits of its number or ""."""

    number: str
    fields: tuple[str, str, str]


_TABLE_RULE = re.compile(r"[ \t|:]*--[ \t|:-]*")
_NAMED_FIELDS = re.compile(r"\bSubject:(.+?)\bPredicate:(.+?)\bObject:(.+?)$", re.MULTILINE | re.DOTALL)
_BRACKETED_ROW = re.compile(r"[(<\[{](.*\|.*\|.*)[)>\]}]")
# Where a fact comes from is no part of its object.
_SOURCE = re.compile(
    r"\s*(?:[(\[](?:from|see|source|per|according to|passages?)\b[^)\]]*[)\]]|,? (?:as|which is) "
    r"(?:stated|mentioned|given|described|noted|said|shown)\b.*)\s*\Z",
    re.IGNORECASE,
)


def field_rows(reply: str) -> tuple[list[FieldRow], int]:
    """Read rows `subject | predicate | object`, in lists, tables and JSON; return them with the number of unclear rows.

    A row is unclear if it has another number of fields than three: nobody can say which of them belong together.
    """
    text = without_thoughts(reply)
    rows = []
    unclear = 0
    raw_lines = text.splitlines()
    heads = {position - 1 for position, raw in enumerate(raw_lines) if "|" in raw and _TABLE_RULE.fullmatch(raw)}
    for position, raw in enumerate(raw_lines):
        if "|" not in raw or position in heads or _TABLE_RULE.fullmatch(raw):
            continue
        line = read_line(raw.strip().strip("|") if raw.strip().startswith("|") else raw)
        if line.label in COMMENT_LABELS:
            continue
        fields = _fields(line.text)
        number = line.number
        if len(fields) == 4 and not number and re.fullmatch(r"[\[(]?\d{1,3}[\])]?[.:]?", fields[0]):
            number = re.sub(r"\D", "", fields[0])
            fields = fields[1:]
        if len(fields) == 3:
            rows.append(FieldRow(number, (fields[0], fields[1], fields[2])))
        elif len(fields) > 3:
            unclear += 1
    for match in _NAMED_FIELDS.finditer(text):
        named = [_field(field) for field in match.groups()]
        if all(named):
            rows.append(FieldRow("", (named[0], named[1], named[2])))
    return rows or _json_rows(text), unclear


def _fields(text: str) -> list[str]:
    bracketed = _BRACKETED_ROW.fullmatch(text)
    if bracketed:
        text = bracketed[1]
    text = text.strip().rstrip("|").rstrip()
    fields = [_field(field) for field in re.split(r"\|+", text)]
    if fields:
        fields[-1] = _field(_SOURCE.sub("", fields[-1]))
    return fields if all(fields) else []


def _field(text: str) -> str:
    return without_emphasis(" ".join(text.split())).strip("*` ,;")


def _json_rows(text: str) -> list[FieldRow]:
    rows = []
    for value in _nested_lists(json_values(text)):
        fields = [_field(field) for field in value if isinstance(field, str)]
        if len(value) == len(fields) == 3 and all(fields):
            rows.append(FieldRow("", (fields[0], fields[1], fields[2])))
    return rows


def _nested_lists(values: Iterable[object]) -> list[list[object]]:
    """All lists inside JSON values, from left to right."""
    lists: list[list[object]] = []
    for value in values:
        if isinstance(value, list):
            lists.append(value)
            lists += _nested_lists(value)
        elif isinstance(value, dict):
            lists += _nested_lists(value.values())
    return lists


_UNKNOWN_FIELD = re.compile(
    r"\?[ \t]*(\w*)"  # ?c, ? c, ?
    r"|\$(\w+)"  # $c
    r"|[\[<{]\??[ \t]*([A-Za-z][\w '-]*)[\]>}]"  # [director], <person>, {?c}
    r"|_{2,}|\.{3}|…|unknown"
    r"|([X-Z]\d?)",  # X
    re.IGNORECASE,
)
_INNER_UNKNOWN = re.compile(r"(?<!\S)\$(?=[A-Za-z])")


def unknown_field(field: str, question: str = "") -> str:
    """A field of a T2RAG clue with its unknown in the paper's spelling: `?name`, or `?` for an unknown without name.

    A single X, Y or Z is an unknown unless the question names it. Other fields are returned as they are.
    """
    match = _UNKNOWN_FIELD.fullmatch(field.strip())
    if match is None:
        return _INNER_UNKNOWN.sub("?", field)
    letter = match[4]
    if letter and (letter != letter.upper() or re.search(rf"\b{letter}\b", question)):
        return field
    name = match[1] or match[2] or match[3] or letter or ""
    return "?" + re.sub(r"\W+", "_", name.strip())


# --- a verdict (GEAR) ---

_VERDICT = re.compile(
    r"\banswerable\b[\"'*_]*[ \t]*(?:[?:=–—-][ \t\"'*_]*)+(yes|no|true|false|partial(?:ly)?|partly|not)\b[\"'*_.,]*",
    re.IGNORECASE,
)
_FIRST_WORD = re.compile(r"(yes|no|partial(?:ly)?|partly)\b[.,:;!*_]*\s*", re.IGNORECASE)
_NOT_ANSWERABLE = re.compile(
    r"\b(?:not|un)[ -]?answerable\b|\b(?:can ?not|can't|can not) (?:yet )?be answered\b", re.IGNORECASE
)
_IS_ANSWERABLE = re.compile(r"\bis answerable\b|\bcan (?:now )?be answered\b", re.IGNORECASE)


class Verdict(NamedTuple):
    """Whether the facts answer the question, and the reason that the model gives."""

    answerable: bool
    reason: str


def answerable_verdict(reply: str) -> Verdict:
    """Read whether facts answer a question (GEAR, eq. 6); "partially" means no.

    Raises:
        UnusableReply: "no_verdict", or "two_verdicts" if the reply says yes and no.
    """
    for value in json_values(reply, dict):
        values = {str(key).lower(): item for key, item in value.items()}
        if str(values.get("answerable")).lower() in ("true", "false", "yes", "no", "partially", "partly"):
            reason = values.get("why") or values.get("reason") or ""
            return Verdict(str(values["answerable"]).lower() in ("true", "yes"), str(reason))
    text = without_thoughts(reply)
    named = list(_VERDICT.finditer(text))
    said = {match[1].lower() in ("yes", "true") for match in named}
    if len(said) > 1:
        raise UnusableReply("two_verdicts", 'Write only one line "Answerable: Yes" or "Answerable: No".')
    if named:
        return Verdict(said.pop(), _reason(text[named[-1].end() :]))
    lines = lines_of(text)
    first = _FIRST_WORD.match(lines[0].text) if lines else None
    if first:
        rest = [lines[0].text[first.end() :], *(line.text for line in lines[1:])]
        return Verdict(first[1].lower() == "yes", _reason("\n".join(rest)))
    if _NOT_ANSWERABLE.search(text):
        return Verdict(False, _reason(text))
    if _IS_ANSWERABLE.search(text):
        return Verdict(True, _reason(text))
    raise UnusableReply("no_verdict", 'Begin with the line "Answerable: Yes" or "Answerable: No".')


def _reason(text: str) -> str:
    return " ".join(line.text for line in lines_of(text.lstrip(" \t\n*_,.:;-–—")) if line.text)


# --- a question to search (GEAR, IRCoT's relatives) ---

_INTRODUCTION = re.compile(
    r"(?:sure|okay|ok|certainly|of course|here(?:'s| is| are)|the (?:next|following|rewritten|new)|based on|to find"
    r"|i (?:will|would)|let me|let us|let's|we (?:still )?need)\b[^?]*",
    re.IGNORECASE,
)


def next_question(reply: str) -> str:
    """Read the question of a reply: the line labelled so, else the first line that asks, else the first line.

    Introductions ("Here is the question to search for.") and quotation marks are no part of it; "" for an empty reply.
    """
    lines = [line for line in lines_of(reply) if line.label not in COMMENT_LABELS]
    labelled = [line.text for line in lines if line.label in _QUESTION_LABELS and line.text]
    if labelled:
        return unquoted(labelled[0])
    texts = [line.text for line in lines if line.text and not line.text.endswith(":")]
    own = [text for text in texts if not _INTRODUCTION.fullmatch(text)] or texts
    if not own:
        return ""
    return unquoted(own[0])


# --- an answer ---

_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_ANSWER_TAG = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.IGNORECASE | re.DOTALL)
ANSWER_PHRASE = re.compile(
    r"(?:\b(?:so|thus|therefore|hence),?[ \t]+)?\bthe[ \t]+(?:final |short |correct )?answer[ \t*_]*"
    r"(?:is|would be|must be)[ \t*_]*:?[ \t*_]*",
    re.IGNORECASE,
)
_REMARK = re.compile(
    r"(?:sure|okay|ok|certainly|of course|let me|let us|let's|here(?:'s| is)|based on|looking at|first"
    r"|i (?:will|need))\b.*",
    re.IGNORECASE | re.DOTALL,
)
_EXPLAINS = re.compile(
    r"(?:because|since|this is|this was|that is|explanation|reason|note|according to|as stated"
    r"|the (?:passages?|facts?|text|triples?))\b",
    re.IGNORECASE,
)


def marked_answer(text: str) -> str | None:
    r"""The answer in `\boxed{…}` or `<answer>`; None if the text has neither."""
    marks = _BOXED.findall(text) or _ANSWER_TAG.findall(text)
    return marks[-1].strip() if marks else None


def phrased_answer(text: str) -> str | None:
    """The answer in "So the answer is: X." or "The answer is X."; None if the text has no such sentence."""
    phrases = list(ANSWER_PHRASE.finditer(text))
    if not phrases:
        return None
    rest = text[phrases[-1].end() :].splitlines()
    answer = without_emphasis(rest[0].rstrip("*_` \t")) if rest else ""
    return unquoted(_without_period(answer)) or None


def _without_period(text: str) -> str:
    """A text without its final period, unless that belongs to an abbreviation such as "U.S." or "Jr."."""
    if text.endswith(".") and not re.search(r"(?:\b\w\.|\b(?:Jr|Sr|Inc|Ltd|Co|St|Mr|Dr))\Z", text[:-1] + "."):
        return text[:-1].rstrip()
    return text


def unlabelled_answer(text: str) -> str:
    """The answer of a reply without "Answer:": its first block that is no remark, without an explanation below it."""
    blocks = [block.strip() for block in re.split(r"\n\s*\n", text) if block.strip()]
    while len(blocks) > 1 and _REMARK.fullmatch(blocks[0]):
        blocks = blocks[1:]
    if not blocks:
        return ""
    lines = blocks[0].splitlines()
    if len(lines) > 1 and _EXPLAINS.match(read_line(lines[1]).text or lines[1].strip("*_ ")):
        return lines[0]
    return blocks[0]


# --- labels of a list (TH-RAG) ---


def read_labels(reply: str, allowed: Collection[str], advice: str) -> list[str]:
    """Read the labels that a reply selects from `allowed` (compared without case), from JSON, bullets, or commas.

    Of several lists, that with most allowed labels counts, so that a list of reasons is not taken for the selection.
    Labels that are not allowed are returned, too, so that the caller can count them. An empty list is a valid reply.

    Raises:
        UnusableReply: "no_labels": the reply has no list and names no allowed label; `advice` is sent to the model.
    """
    names = {_plain_label(name) for name in allowed}
    values = json_values(reply, dict, list)
    lists = [_labels_in(value) for value in _nested_lists(values)]
    if not lists and values:
        raise UnusableReply("no_labels", f"There is no list in the JSON; {advice}.")
    if not lists:
        texts = [line.text for line in lines_of(reply) if line.text]
        by_line = [unquoted(text.rstrip(",;.")) for text in texts]
        lists = [[label for label in by_line if _plain_label(label) in names]]
        for text in texts:
            lists.append([unquoted(label) for label in re.split(r"[,;]", text.rstrip("."))])

    def chosen(labels: Sequence[str]) -> int:
        return sum(_plain_label(label) in names for label in labels)

    best = max(lists, key=chosen)
    if not values and not chosen(best):
        raise UnusableReply("no_labels", f"There is no list of labels; {advice}.")
    return best


def _plain_label(label: str) -> str:
    return " ".join(label.split()).casefold()


def _labels_in(values: Sequence[object]) -> list[str]:
    labels = []
    for value in values:
        if isinstance(value, dict):
            value = next(iter(value.values()), None)
        if isinstance(value, str | int | float):
            labels.append(str(value))
    return labels
