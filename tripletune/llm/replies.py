"""Parse replies (JSON and triples inside prose), and ask for a better reply in repair turns.

A repair turn is a chat with the bad reply and its fault. It is a separate call in the ledger, with `.repair` at the end
of its role.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from tripletune.core.calls import Completion, LLMClient, Message, Sampling
from tripletune.core.data.records import whole_characters
from tripletune.core.data.triples import FoundTriples, names_subject, parse_triples, plain_markers, triple_of
from tripletune.core.files import PROMPTS, refuse_constant

T = TypeVar("T")
REPAIR_ROLE = ".repair"
_REPAIR_PROMPT = (PROMPTS / "models" / "repair.md").read_text(encoding="utf-8").strip()
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n`]*\n(.*?)(?:^[ \t]*\1|\Z)", re.MULTILINE | re.DOTALL)
_KINDS: dict[type[Any], tuple[str, str]] = {dict: ("object", "{"), list: ("array", "[")}
_BRACKET = re.compile(r"[\[{]|\((?=\s*[\"'“])")
_JSON_START = re.compile(r"[\[{]\s*[\"'“\[{(]")
_ROW_START = re.compile(r"\[\s*[\"'“]|\{\s*[\"'](?:subject|head)\b", re.IGNORECASE)
_CLOSING = {"[": "]", "{": "}", "(": ")"}
_PYTHON = {"True": True, "False": False, "None": None}
_VALUE = re.compile(
    r"""\s*(?:([\[{(])|("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|“(?:[^”\\]|\\.)*”)|([-+.\w]+))""", re.DOTALL
)
_SIGN = re.compile(r"\s*([]}),:])")
# A JSON escape; \'; a control character's escape unless it looks like LaTeX or a path (`\beta`, `C:\temp`), but `\n` is
# common, so `\nabla` is a line break too; a lone backslash.
_ESCAPE = re.compile(r"""\\(?:(u[0-9a-fA-F]{4}|["\\/])|(')|([bfrt](?![a-z])|n)|)|(")""")
_LATEX = re.compile(r"(?<!\\)(?:\\\\)*\\[bfrt][a-z]")
# Marks the key of the list of triples in an object with several lists.
_LISTED = re.compile("triple|fact", re.IGNORECASE)
_DEEPEST = 50
_ROW = re.compile(
    r"^[\s*|-]*(?:Triples?:\s*)?(?:\d+ ?[.)|]\s+)?(?:\*{0,2}\[(\d+)\][\s|]*)?([^|\n]+)\|([^|\n]+)\|([^|\n]+?)\|?\s*$",
    re.MULTILINE,
)
# The head of a Markdown table and the rule below it.
_TABLE_HEAD = re.compile(r"^(?:.*\n)?[ \t|:]*--[ \t|:-]*\|[ \t|:-]*$", re.MULTILINE)
_FIELDS = re.compile(r"()\bSubject:(.+?)\bPredicate:(.+?)\bObject:(.+?)$", re.MULTILINE | re.DOTALL)
REPAIRED = "JSON that was repaired"
_MARKER = re.compile(r"\(\s*S>|\|\s*[PO]>")
_NO_FACTS = re.compile(r"\W*(none|no (facts?|triples?)( found| stated)?)\W*", re.IGNORECASE)
_KNOWN = r"(?:information|info|facts?|evidence|triples|context|details?|data)\b"
_REFUSAL = re.compile(
    r"\b(unanswerable|not answerable|not sure|inconclusive|insufficient info\b"
    r"|(can ?not|can't|could not|couldn't) (be )?(determined?|answer(ed)?|infer(red)?|found|find|tell|say|know|conclude"
    r"|confirm(ed)?|verif(y|ied)|establish(ed)?|identif(y|ied)|decided?)"
    r"|(unable|impossible|not possible|not able|no way) to (determine|answer|infer|find|tell|say|know|confirm|verify)"
    rf"|(not|((do|does|is|are)n't))( have| contain| provide)? (enough|sufficient)( \w+)? {_KNOWN}"
    rf"|(insufficient|lacks?( the)?|no (relevant|further|such|sufficient)) {_KNOWN}"
    rf"|{_KNOWN}( \w+)? (is|are) (not (enough|sufficient|available|given)|insufficient|lacking)"
    r"|no information (is )?(about|on|given|provided|available)|no answer (can|could|is|was)|no mention of"
    rf"|(there is|there are|gives?|provides?|contains?|have|has) no (answer|{_KNOWN})|answer is not (in|given|there)"
    r"|(none|nothing|neither) (of|in) .{1,30} (mention|answer|provide|state|say|specif|contain)"
    r"|(do not|don't) know( |\W*\Z)|not clear( |\W*\Z)|(is|s|remains) (unclear|uncertain|unknown)( |\W*\Z)"
    r"|not (mentioned|specified|stated|provided|given|available)( (in|by) |\W*\Z)"
    r"|(do|does|did)(n't| not) (mention|specify|state|provide|contain|say|give|include))"
    r"|\A\W*(unknown|n/?a|none|no answer|unsure|unclear)\W*\Z",
    re.IGNORECASE,
)
# How a query begins, and texts that say instead that no query is left.
QUERY_START = (
    r"(?:find|search|look|identify|determine|list|retrieve|check|get|ask|name|tell|give|who|whom|whose|what|when|where"
    r"|which|why|how|is|are|was|were|do|does|did|has|have|had|can|could)\b"
)
_ENOUGH = (
    r"(?:(?:sufficient|enough|adequate|answered|answerable)(?=\W*\Z| (?:to|for|now|by|with|and|as)\b)"
    r"|(?:complete|known|found)(?=\W*\Z| now\b))"
)
_NOTHING_LEFT = re.compile(
    r"(?:(?:so|thus|therefore|hence|now|since|because|as|given that|and|i think|there(?:'s| is| are)) )*(?:"
    r"no (?:(?:more|further|additional|other|new|next|follow[- ]?up) )*(?:question|quer|sub-?quer|search|retrieval)\w*"
    r"(?: (?:is|are|needed|required|necessary|left|remain|to )|\Z)|no need (?:for|to)\b|that is all\Z"
    rf"|no (?:more|further|additional|other) {_KNOWN}|nothing(?: (?:more|else|further))?"
    r"(?: (?:is|to|remains)(?: to be)? (?:needed|required|necessary|missing|left|ask|search|find|found)\w*"
    r"| left(?: to \w+)?)?\Z"
    rf"|(?:(?:the|these|those|all|our|my|what|this|that|it|every)\w*\b.{{0,60}}?|{_KNOWN}) (?:is|are|be|been) "
    rf"(?:(?!not|never|hardly)\w+ )?{_ENOUGH}"
    rf"|(?:\w+ ){{0,3}}{_KNOWN}.{{0,20}}? (?:suffice|answers? the (?:\w+ )?(?:question|query))\b"
    rf"|all .{{0,60}}?{_KNOWN} .{{0,30}}?(?:available|there|gathered|collected)\b"
    rf"|(?:(?:we|i|you) (?:now |already )?have |that is )?(?:enough|sufficient) {_KNOWN}"
    r"|(?:we|i|you) (?:now |already )?(?:have|know) (?:everything|all|enough|the answer)\b"
    r"|(?:we|i|you) (?:can (?:now )?answer|(?:do not|don't) need (?:any|to (?:ask|search)|more|further|another))\b"
    r"|(?:it is )?(?:not|no longer) (?:necessary|needed|required)\b|(?-i:[Tt]he (?:final )?answer (?:is|has|can))\b"
    r"|(?:(?:further|more|additional|another) )?(?:question|quer|search|retrieval)\w* (?:is|are) (?:not|un))",
    re.IGNORECASE,
)
_STOPS = re.compile(
    r"(?:query )?(?:none|null|n/?a|no|no more|done|stop|end|finish(?:ed)?|completed?|enough|sufficient)"
    r"(?: needed| required)?",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r"([.,;!?\n]+|\b(?:but|though|although|however)\b)", re.IGNORECASE)
_LONGEST_REFUSAL = 40
NO_TEXT = "the reply holds no text"
# Finish reasons that a repeated call would have again.
FINAL = ("length", "refusal")
# If the chat template writes the opening tag, the reply has only the closing tag. A tag in quotation marks or alone in
# a field is a name, and so is an opening tag inside a line without a closing tag.
_OPEN, _CLOSE = (
    rf"(?<![|>] )(?:(?<![\"'`]){tag}|{tag}(?![\"'`]))" for tag in (r"<think(?:ing)?>", r"</think(?:ing)?>")
)
_THOUGHT = re.compile(
    rf"\A(?:(?!<think).)*?{_CLOSE}|{_OPEN}.*?</think(?:ing)?>|(?:^\s*|(?<=[\]}})])){_OPEN}.*\Z",
    re.DOTALL | re.MULTILINE,
)


class UnusableReply(ValueError):
    """A parser rejected a reply; `reason` is a short name for counts, `explanation` is sent to the model.

    `ask` sets the reply and the number of repair turns.
    """

    def __init__(self, reason: str, explanation: str) -> None:
        super().__init__(f"{reason}: {explanation}")
        self.reason, self.explanation = reason, explanation
        self.repairs, self.reply = 0, ""


async def ask(
    client: LLMClient,
    messages: Sequence[Message],
    parse: Callable[[str], T],
    *,
    role: str,
    sampling: Sampling | None = None,
    question_id: str = "",
    repairs: int = 1,
    repaired: Counter[str] | None = None,
) -> T:
    """Call a model and parse its reply; if `parse` raises an `UnusableReply`, send the explanation in a repair turn.

    The `UnusableReply` of the last reply is raised. `repaired` counts the reasons of all repair turns.
    """
    turns, tried = list(messages), 0
    while True:
        name = role + REPAIR_ROLE if tried else role
        completion = await client.chat(turns, role=name, sampling=sampling, question_id=question_id)
        try:
            return parse(completion.text)
        except UnusableReply as error:
            error.repairs, error.reply = tried, completion.text
            if tried == repairs:
                raise
            if repaired is not None:
                repaired[error.reason] += 1
            turns = repair_turns(turns, completion.text, error.explanation)
            tried += 1


async def all_of(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of concurrent calls; a failure is raised after all calls, so that a batch holds every call."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found  # type: ignore[return-value]


async def in_workers(work: Callable[[], Coroutine[Any, Any, None]], count: int) -> None:
    """Run `count` copies of the work concurrently; the first failure cancels the other copies and is raised."""
    workers = [asyncio.create_task(work()) for _ in range(count)]
    try:
        await asyncio.gather(*workers)
    finally:
        for one in workers:
            one.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def repair_turns(messages: Sequence[Message], reply: str, explanation: str) -> list[Message]:
    """Build the chat that asks for a better reply."""
    request = _REPAIR_PROMPT.replace("{explanation}", explanation)
    if reply.strip():
        return [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": request}]
    # No service accepts an empty turn, and some chat templates reject two user turns in a row.
    last = messages[-1]
    return [*messages[:-1], {"role": last["role"], "content": f"{last['content']}\n\n{request}"}]


def without_thoughts(text: str) -> str:
    """Remove text between `<think>` tags, or before a closing tag without opening tag; tags inside JSON are text."""
    thoughts = list(_THOUGHT.finditer(without_json(text))) if "think" in text else []
    for thought in reversed(thoughts):
        text = text[: thought.start()] + text[thought.end() :]
    return text


def has_text(reply: str) -> bool:
    """Whether a reply has text besides white space and thoughts."""
    tail = re.split("</think(?:ing)?>", reply)[-1]
    # Thoughts are long, so check only the text after the last closing tag if no thought begins there.
    if "<think" not in tail and tail.strip():
        return True
    return bool(without_thoughts(reply).strip())


def silence(completion: Completion) -> str:
    """Say why a reply without text is a failed call; "" if the reply has text."""
    more = "; allow it more tokens" if completion.finish_reason == "length" else ""
    return "" if has_text(completion.text) else f"{NO_TEXT} (finish_reason {completion.finish_reason}{more})"


def is_refusal(answer: str) -> bool:
    """Whether a short answer says that there is no answer: "Unanswerable", "It cannot be determined." """
    return len(answer.split()) <= _LONGEST_REFUSAL and bool(_REFUSAL.search(answer.replace("\u2019", "'")))


def asks_nothing(query: str) -> bool:
    """Whether a text says that no query is left: "There are no more questions.", "Enough facts."

    A text with a question mark, or a clause that begins like a query, is a query.
    """
    whole, *clauses = (
        one.strip("\"'`*<>()[]-.,;:! \n") for one in (query, *re.split(r"[.,;:!\n]+", query.replace("\u2019", "'")))
    )
    asks = "?" in query or any(re.match(QUERY_START, one, re.IGNORECASE) for one in clauses)
    return not asks and (bool(_STOPS.fullmatch(whole)) or any(_NOTHING_LEFT.match(one) for one in clauses))


def without_refusals(text: str) -> str:
    """Remove the clauses that say that there is no answer; punctuation and words like "but" end a clause."""
    parts = _CLAUSE.split(text)
    return text if not any(map(is_refusal, parts)) else "".join(" " if is_refusal(one) else one for one in parts)


def find_json(text: str, *kinds: type[Any], advice: str = "", notes: Counter[str] | None = None) -> Any:
    """Find the JSON object or array of a reply that may have code fences and prose around it.

    Only outermost values count: `[{"a": 1}]` holds an array and no object. Of several values, those in a code fence are
    preferred, then the last one, since models answer at the end. Text between `<think>` tags is skipped. If no value is
    valid JSON, a value with trailing commas or in Python's form (single quotes, True, tuples) is read, but never a
    value that is cut off. If a string has a backslash that begins no JSON escape, all its backslashes are text (LaTeX,
    paths). Without `kinds`, objects and arrays count; `notes` counts `REPAIRED`.
    """
    wanted, plain = kinds or (dict, list), without_thoughts(text)
    found = _scan(plain)[0]
    fences = [match.span(2) for match in _FENCE.finditer(_masked(plain, found))]
    # Valid JSON is preferred to repaired JSON.
    ranked = [
        (not one.repaired, max((n for n, (start, end) in enumerate(fences) if start <= one.start < end), default=-1), n)
        for n, one in enumerate(found)
        if isinstance(one.value, wanted) and plain[one.start] != "("
    ]
    if ranked:
        best = found[max(ranked)[-1]]
        if notes is not None and best.repaired:
            notes[REPAIRED] += 1
        return best.value
    name = " or ".join(_KINDS[kind][0] for kind in wanted)
    if any(_KINDS[kind][1] in plain for kind in wanted):
        raise UnusableReply("bad_json", _explain(text, f"the JSON {name} in it is cut off or malformed", advice))
    raise UnusableReply("no_json", _explain(text, f"there is no JSON {name} in it", advice))


def json_values(text: str, *kinds: type[Any]) -> list[Any]:
    """Return all outermost JSON objects and arrays of a reply, from left to right.

    Tuples with three items count too; numbers are returned as text.
    """
    found = _scan(without_thoughts(text), _AS_WRITTEN)[0]
    return [one.value for one in found if isinstance(one.value, kinds or (dict, list))]


def without_json(text: str) -> str:
    """Replace JSON by closing brackets of the same length, so that no marker is found there."""
    return _masked(text, _scan(text)[0])


def find_triples(text: str, advice: str = "") -> FoundTriples:
    """Find the triples of a reply in any form that models write; every valid triple of a bad reply is kept.

    The forms are RAS's `(S> s| P> p| O> o)`, WikiOFGraph's angled markers, and JSON rows `[s, p, o]` or objects with
    "subject", "predicate" and "object" (`core.data.triples.triple_of`). JSON rows may stand in an object (under
    "triples" or in its only list), in a list, or one after another. All lists are read. `UnusableReply` is raised if
    the reply has no triple and does not say that there are no facts ("NONE", an empty list).
    """
    # A reply that begins with a triple holds no thoughts and no JSON; later tags or brackets belong to names.
    begins = _MARKER.match(plain_markers(text).lstrip())
    plain = text if begins else without_thoughts(text)
    found, vain = ([], []) if begins else _scan(plain, _AS_WRITTEN)
    marked, rest = (one if _MARKER.search(one) else plain_markers(one) for one in (plain, _masked(plain, found)))
    rows = _meant([one.value for one in found])
    read = [
        parse_triples(plain_markers(row)).triples if isinstance(row, str) else [triple_of(row)] for row in rows or ()
    ]
    triples = tuple(triple for one in read for triple in one if triple)
    if _MARKER.search(rest) or (not triples and _MARKER.search(marked)):
        parsed = parse_triples(marked)
        # Predicate or object markers without a subject marker count as one malformed triple.
        return FoundTriples(parsed.triples, parsed.malformed or int(not parsed.triples))
    if _NO_FACTS.fullmatch(plain):
        return FoundTriples(())
    if vain and (key := text.rfind('"triples"')) > 0:
        # Skip entities before the triples: since the outer object is incomplete, they would be read as triples.
        return find_triples(text[key:], advice)
    malformed = sum(bool(_ROW_START.match(plain, start)) for start in vain)
    if rows is None and not malformed:
        raise UnusableReply("no_triples", _explain(text, "there is no list of triples in it", advice))
    return FoundTriples(triples, sum(not any(one) for one in read) + malformed, bool(vain))


def triple_rows(text: str) -> list[tuple[str, list[str]]]:
    """Read rows `subject | predicate | object` of a reply, also of a Markdown table, and with a number, as in `[2]`.

    "Subject: … Predicate: … Object: …" is read too. Return the number, or "", and three non-empty fields of each row.
    """
    text = _TABLE_HEAD.sub("", without_thoughts(text))
    rows = [match.groups() for pattern in (_ROW, _FIELDS) for match in pattern.finditer(text)]
    found = [(number or "", [" ".join(part.split()).strip("*` ,;") for part in fields]) for number, *fields in rows]
    return [(number, fields) for number, fields in found if all(fields)]


def _explain(text: str, wrong: str, advice: str) -> str:
    if not advice:
        return f"{wrong}."
    return f"{f'In the reply: {wrong}' if text.strip() else 'The reply is empty'}; {advice}."


class _Found(NamedTuple):
    """A value, its position, and whether it had to be repaired."""

    value: Any
    start: int
    end: int
    repaired: bool


def _masked(text: str, found: Iterable[_Found]) -> str:
    parts, end = [], 0
    for one in found:
        parts += [text[end : one.start], "}" * (one.end - one.start)]
        end = one.end
    return "".join(parts) + text[end:]


def _meant(values: Sequence[Any]) -> list[Any] | None:
    """The rows of all lists of triples, and single triples; None if there are no lists and no triples."""
    alone = all(map(_is_row, values))  # "[1]" cites a passage
    meant = (one for one in values if not _is_row(one) or triple_of(one) or (alone and len(one) > 1))
    known = [rows for one in meant if (rows := _rows_in(one)) is not None]
    return [row for rows in known for row in rows] if known else None


def _is_row(value: Any) -> bool:
    """Whether a value is one triple, valid or malformed: an object with a subject, or a list of plain values."""
    if isinstance(value, dict):
        return names_subject(value)
    holds = (isinstance(one, (list, dict)) or _MARKER.match(plain_markers(str(one)).lstrip()) for one in value)
    return bool(value) and not any(holds)


def _rows_in(value: Any, depth: int = 0) -> list[Any] | None:
    """Valid and malformed triples in an object or array; None if it is unclear which values are triples."""
    if _is_row(value) or depth > _DEEPEST:
        return [value]
    if isinstance(value, list):
        found: list[Any] = []
        for one in value:
            nested = isinstance(one, dict) or (isinstance(one, list) and {list, dict}.issuperset(map(type, one or [0])))
            inner = _rows_in(one, depth + 1) if nested else None
            found += [one] if inner is None else inner
        return found
    named = {key: one for key, one in value.items() if _LISTED.search(key)}
    lists = [one for one in (named or value).values() if isinstance(one, (list, dict))]
    parts = [(one, rows) for one in lists if (rows := _rows_in(one, depth + 1)) is not None]
    if len(lists) > 1 and not named:
        parts = [(one, rows) for one, rows in parts if not _is_row(one) and any(map(triple_of, rows))]
    return [row for _, rows in parts for row in rows] if parts or not (named or any(value.values())) else None


def _scan(text: str, decoder: json.JSONDecoder | None = None) -> tuple[list[_Found], list[int]]:
    """The outermost objects, arrays and tuples of a text, and the positions of unreadable values."""
    found: list[_Found] = []
    vain: list[int] = []
    position = 0
    while bracket := _BRACKET.search(text, position):
        start = bracket.start()
        try:
            try:
                value, end = (decoder or _JSON).raw_decode(text, start)
                repaired = bool(_LATEX.search(text, start, end))
            except ValueError:
                repaired = True
            if repaired:
                value, end = _loose(text, start, decoder or _JSON)
            # JSON can spell a surrogate without its partner.
            value = whole_characters(value)
        except RecursionError:
            # A thousand brackets in a row come from a model that loops, and trying each bracket takes long.
            break
        except ValueError:
            position = start + 1
            vain += [start] if _JSON_START.match(text, start) else []
            continue
        # In prose, a bracket before a quotation mark may not begin a tuple.
        if text[start] != "(" or len(value) == 3:
            found.append(_Found(value, start, end, repaired))
        position = end
    return found, vain


def _loose(text: str, position: int, decoder: json.JSONDecoder, depth: int = 0) -> tuple[Any, int]:
    """Read a value in JSON's or Python's form, also with trailing commas; return the value and its end."""
    if depth > _DEEPEST or (token := _VALUE.match(text, position)) is None:
        raise ValueError("no value")
    mark, string, word = token.groups()
    if string:
        return _string(string), token.end()
    if word:
        return _PYTHON[word] if word in _PYTHON else decoder.decode(word), token.end()
    items: list[Any] = []
    position, wanted = token.end(), ":" if mark == "{" else ","
    while (sign := _SIGN.match(text, position)) is None or sign[1] != _CLOSING[mark]:
        item, position = _loose(text, position, decoder, depth + 1)
        items.append(item)
        sign = _SIGN.match(text, position)
        if sign is None or sign[1] not in (wanted, _CLOSING[mark]):
            raise ValueError("no comma")
        position = sign.end() if sign[1] == wanted else position
        wanted = ":" if mark == "{" and wanted == "," else ","
    if mark != "{":
        return items, sign.end()
    if len(items) % 2 or not all(isinstance(key, str) for key in items[::2]):
        raise ValueError("no pairs")
    return dict(zip(items[::2], items[1::2])), sign.end()


def _string(written: str) -> str:
    """Read a string in any quotation marks; if a backslash begins no escape, all backslashes are text."""
    text = written[1:-1]
    lone = any(match.lastindex is None for match in _ESCAPE.finditer(text))
    kept = lambda match: match[1] or (match[3] and not lone)  # noqa: E731
    text = _ESCAPE.sub(lambda match: "'" if match[2] else match[0] if kept(match) else f"\\{match[0]}", text)
    return str(_JSON.decode(f'"{text}"'))


# Not strict, because models put raw line breaks into strings.
_JSON = json.JSONDecoder(parse_constant=refuse_constant, strict=False)
_AS_WRITTEN = json.JSONDecoder(parse_constant=refuse_constant, strict=False, parse_int=str, parse_float=str)


def repair_digest() -> dict[str, str]:
    """SHA-256 of the repair prompt by its file, for cards."""
    return {"tripletune/prompts/models/repair.md": hashlib.sha256(_REPAIR_PROMPT.encode()).hexdigest()}
