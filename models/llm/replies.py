"""From a reply's text to what a caller needs: JSON and triples inside prose, and repair turns for bad replies.

A repair turn is a chat with the bad reply and what is wrong with it. It is a call of its own in the ledger, under the
role with `.repair` at its end, so that its cost shows.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tripletune.models.data.records import whole_characters
from tripletune.models.data.triples import FoundTriples, Triple, parse_triples, plain_markers
from tripletune.models.llm import LLMClient, Message, Sampling

T = TypeVar("T")
PROMPTS = Path(__file__).parents[1] / "prompts"
REPAIR_ROLE = ".repair"
_REPAIR_PROMPT = (PROMPTS / "repair.md").read_text(encoding="utf-8").strip()
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n`]*\n(.*?)(?:^[ \t]*\1|\Z)", re.MULTILINE | re.DOTALL)
_KINDS: dict[type[Any], tuple[str, str, str]] = {dict: ("object", "{", "}"), list: ("array", "[", "]")}
_BRACKET = re.compile(r"[\[{]")
_JSON_START = re.compile(r"([\[{])\s*([\"'\[{])")
_TRAILING_COMMA = re.compile(r",(?=\s*[\]}])")
_LONGEST_REPAIRED = 20_000
_ROW = re.compile(
    r"^[\s*-]*(?:Triples?:\s*)?(?:\[(\d+)\]\s*|\d+[.)]\s+)?([^|\n]+)\|([^|\n]+)\|([^|\n]+)$", re.MULTILINE
)
_FIELDS = re.compile(r"()\bSubject:(.+?)\bPredicate:(.+?)\bObject:(.+?)$", re.MULTILINE | re.DOTALL)
REPAIRED = "JSON that was repaired"
_MARKER = re.compile(r"\(\s*S>|\|\s*[PO]>")
_NO_FACTS = re.compile(r"\W*(none|no (facts?|triples?)( found| stated)?)\W*", re.IGNORECASE)
_REFUSAL = re.compile(
    r"\b(unanswerable|not answerable"
    r"|(can ?not|can't|could not|couldn't) (be )?(determined?|answer(ed)?|infer(red)?|found?|tell)"
    r"|(unable|impossible|not possible) to (determine|answer|infer|find|tell|say)"
    r"|(not enough|insufficient|no (relevant|further|such|sufficient)) (information|evidence|context|facts)"
    r"|no information (is )?(about|on|given|provided|available)|(do not|don't) know( |\W*\Z)"
    r"|not (mentioned|specified|stated|provided|given|available)( (in|by) |\W*\Z)"
    r"|(do|does|did)(n't| not) (mention|specify|state|provide|contain|say|give|include))"
    r"|\A\W*(unknown|n/?a|none|no answer)\W*\Z",
    re.IGNORECASE,
)
_LONGEST_REFUSAL = 40
# Where a chat template writes the opening tag, the reply has the closing one alone.
_THOUGHT = re.compile(r"\A(?:(?!<think).)*?</think(?:ing)?>|<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.DOTALL)


class UnusableReply(ValueError):
    """A reply that a parser rejected.

    Args:
        reason: A short name to count by, for example "index_out_of_range".
        explanation: What is wrong, in a sentence for the model that wrote it.

    Attributes:
        repairs: Repair turns that were tried.
        reply: The reply, where `ask` raises it.
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
    """Ask a model and parse its reply; a reply that can't be used is sent back with what is wrong.

    Args:
        parse: Turns the reply's text into a value, or raises `UnusableReply`.
        repairs: Most repair turns.
        repaired: Counts the reasons of replies for which a repair turn was needed, whether it helped or not.

    Raises:
        UnusableReply: no reply could be used; that of the last one, with the repairs tried in `repairs`.
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
    """The results of calls that are made together; a failure is raised when all are made, so a batch holds all."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found  # type: ignore[return-value]


async def in_workers(work: Callable[[], Coroutine[Any, Any, None]], count: int) -> None:
    """Do the work `count` times side by side; the first failure ends the others and is raised."""
    workers = [asyncio.create_task(work()) for _ in range(count)]
    try:
        await asyncio.gather(*workers)
    finally:
        for one in workers:
            one.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def repair_turns(messages: Sequence[Message], reply: str, explanation: str) -> list[Message]:
    """The chat that asks for a better reply."""
    request = _REPAIR_PROMPT.replace("{explanation}", explanation)
    if reply.strip():
        return [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": request}]
    # No service takes an empty turn, and not every chat template two user turns in a row.
    last = messages[-1]
    return [*messages[:-1], {"role": last["role"], "content": f"{last['content']}\n\n{request}"}]


def without_thoughts(text: str) -> str:
    """A reply without what stands between `<think>` tags, or before a closing tag that was never opened."""
    return _THOUGHT.sub("", text)


def is_refusal(answer: str) -> bool:
    """Whether a short answer says that there is none: "Unanswerable", "It cannot be determined from the triples."

    A text of more than 40 words is an answer, whatever it says that its sources do not mention.
    """
    return len(answer.split()) <= _LONGEST_REFUSAL and bool(_REFUSAL.search(answer.replace("\u2019", "'")))


def find_json(text: str, *kinds: type[Any], advice: str = "", notes: Counter[str] | None = None) -> Any:
    """The JSON object or array of a reply that may have code fences and prose around it.

    A value inside another does not count: in `[{"a": 1}]` there is an array and no object. Where several values are
    of the right kind, one in a code fence goes before one outside, and a later one before an earlier: models think
    first and answer last. Text between `<think>` tags is passed over. Where none is valid JSON, trailing commas and
    Python's way of writing (single quotes, True, None) are repaired; what is cut off never is.

    Args:
        kinds: `dict`, `list`; nothing means both.
        notes: Counts `REPAIRED` when the JSON had to be repaired.

    Raises:
        UnusableReply: there is none ("no_json"), or it is cut off or malformed ("bad_json").
    """
    wanted = kinds or (dict, list)
    parts = _parts(text)
    for part in parts:
        found = [value for value in _scan(part)[0] if isinstance(value, wanted)]
        if found:
            return found[-1]
    for part in parts:
        if (value := _repaired(part, wanted)) is not None:
            if notes is not None:
                notes[REPAIRED] += 1
            return value
    name = " or ".join(_KINDS[kind][0] for kind in wanted)
    if any(_KINDS[kind][1] in parts[-1] for kind in wanted):
        raise UnusableReply("bad_json", _explain(text, f"the JSON {name} in it is cut off or malformed", advice))
    raise UnusableReply("no_json", _explain(text, f"there is no JSON {name} in it", advice))


def json_values(text: str, *kinds: type[Any]) -> list[Any]:
    """All JSON objects and arrays of a text that do not stand inside another, from left to right."""
    return [value for value in _scan(text)[0] if isinstance(value, kinds or (dict, list))]


def find_triples(text: str, advice: str = "") -> FoundTriples:
    """The triples of a reply, in any form that models write; every good triple of a bad reply is kept.

    The forms are RAS's `(S> s| P> p| O> o)`, WikiOFGraph's angled markers, and JSON rows `[s, p, o]` or objects with
    "subject", "predicate" and "object": in an object under "triples" or its only list, in a list, or one after another.

    Raises:
        UnusableReply: nothing in it is meant as a triple, and it does not say that there are none ("NONE", an empty
            list); `advice` says what to write instead.
    """
    # A reply that begins with a triple holds no thoughts: a tag further on is a name.
    plain = text if _MARKER.match(plain_markers(text).lstrip()) else without_thoughts(text)
    marked = plain if _MARKER.search(plain) else plain_markers(plain)
    if _MARKER.search(marked):
        parsed = parse_triples(marked)
        # Predicate or object markers without a subject's: something was meant.
        return FoundTriples(parsed.triples, parsed.malformed or int(not parsed.triples))
    if _NO_FACTS.fullmatch(plain):
        return FoundTriples(())
    values: list[Any] = []
    vain: list[str] = []
    for part in _parts(text):
        values, vain = _scan(part)
        if vain and (repaired := _repaired(part, (dict, list))) is not None:
            values, vain = [repaired], []
        if values or vain:
            break
    rows = _rows_in(values)
    malformed = sum(start in ('["', "['") for start in vain)
    if rows is None or not (values or malformed):
        raise UnusableReply("no_triples", _explain(text, "there is no list of triples in it", advice))
    triples = tuple(triple for row in rows if (triple := triple_of(row)) is not None)
    return FoundTriples(triples, len(rows) - len(triples) + malformed, bool(vain))


def triple_of(row: object) -> Triple | None:
    """A triple from `[s, p, o]` or `{"subject", "predicate", "object"}`; None when it is neither."""
    if isinstance(row, dict):
        row = [row.get("subject"), row.get("predicate"), row.get("object")]
    if not isinstance(row, (list, tuple)) or len(row) != 3:
        return None
    # A year or a number is often written without quotation marks; NaN, which a column without a value holds, is none.
    fields = [str(field) for field in row if type(field) in (str, int, float) and field == field]
    return Triple(*fields) if len(fields) == 3 and all(field.strip() for field in fields) else None


def _rows_in(values: Sequence[Any]) -> list[Any] | None:
    """The rows of the last list, or list in an object; None where it is not clear which one is meant."""
    # What is neither an object with a subject nor a flat list; those are triples outside any list.
    lists = [
        value
        for value in values
        if ("subject" not in value if isinstance(value, dict) else not value or {dict, list} & set(map(type, value)))
    ]
    if not lists:
        return list(values)
    value = lists[-1]
    if isinstance(value, dict):
        lists = [one for one in value.values() if isinstance(one, list)]
        only = lists[0] if len(lists) == 1 else None if any(value.values()) else []
        value = value.get("triples", only)
    if not isinstance(value, list):
        return None
    return [value] if triple_of(value) else value


def triple_rows(text: str) -> list[tuple[str, list[str]]]:
    """Rows `subject | predicate | object` of a reply, `[2]` before one that names a number; other lines are prose.

    "Subject: … Predicate: … Object: …" is read too. Gives the number, or nothing, and three fields, none of them empty.
    """
    text = without_thoughts(text)
    rows = [match.groups() for pattern in (_ROW, _FIELDS) for match in pattern.finditer(text)]
    found = [(number or "", [" ".join(part.split()).strip("*` ,;") for part in fields]) for number, *fields in rows]
    return [(number, fields) for number, fields in found if all(fields)]


def _explain(text: str, wrong: str, advice: str) -> str:
    if not advice:
        return f"{wrong}."
    return f"{f'In the reply: {wrong}' if text.strip() else 'The reply is empty'}; {advice}."


def _parts(text: str) -> list[str]:
    """A reply's code fences, the last one first, then all of it; thoughts left out."""
    text = without_thoughts(text)
    return [*reversed([match.group(2) for match in _FENCE.finditer(text)]), text]


def _scan(text: str) -> tuple[list[Any], list[str]]:
    """The outermost objects and arrays of a text, and the first two marks of those that can't be parsed."""
    # Not strict: models put raw line breaks into strings.
    decoder = json.JSONDecoder(parse_constant=_no_constant, strict=False)
    found: list[Any] = []
    vain: list[str] = []
    position = 0
    while bracket := _BRACKET.search(text, position):
        start = bracket.start()
        try:
            value, position = decoder.raw_decode(text, start)
            # JSON can spell a surrogate without its partner.
            found.append(whole_characters(value))
        except RecursionError:
            # A thousand brackets in a row are a model that loops; trying each of them takes long.
            break
        except ValueError:
            position = start + 1
            if match := _JSON_START.match(text, start):
                vain.append("".join(match.groups()))
    return found, vain


def _repaired(text: str, kinds: tuple[type[Any], ...]) -> Any:
    """The value from the first bracket to the last, without trailing commas or as Python writes it; None: no such."""
    for kind in sorted(kinds, key=lambda kind: text.find(_KINDS[kind][1])):
        _, first, last = _KINDS[kind]
        cut = text[text.find(first) : text.rfind(last) + 1]
        balanced = cut.count("[") == cut.count("]") and cut.count("{") == cut.count("}")
        cut_off = text.rfind(first) > text.rfind(last)
        if not balanced or cut_off or not 1 < len(cut) < _LONGEST_REPAIRED:
            continue
        ways = ((partial(json.loads, strict=False), _TRAILING_COMMA.sub("", cut)), (ast.literal_eval, cut))
        for read, written in ways:
            try:
                # To and fro: tuples become lists, and what JSON does not know is refused.
                value = json.loads(whole_characters(json.dumps(read(written), allow_nan=False, ensure_ascii=False)))
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                continue
            if isinstance(value, kind):
                return value
    return None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def repair_digest() -> dict[str, str]:
    """SHA-256 of the prompt of a repair turn, by its file, for cards of what was made with it."""
    return {"models/prompts/repair.md": hashlib.sha256(_REPAIR_PROMPT.encode()).hexdigest()}
