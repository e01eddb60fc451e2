"""The integration phase of CIRAG: the integrator's prompt and its decision (section 3.3, eq. 1 and 2).

A decision y_t = (r_t, core triples, a_{t+1}) is written in marked sections (figure 11):

    [[## thought ##]]
    ...

    [[## fact_after_filter ##]]
    {"fact": [["subject", "predicate", "object"], ...]}

    [[## question ##]]
    the next query, or <no question>

A deviation from this form or from the paper's rules is counted as a named fault. It is repaired if the meaning is
plain, else dropped. The integrator sees its earlier decisions in repaired form.
"""

from __future__ import annotations

import contextlib
import json
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import regex as re

from tripletune.core.calls import Message, UnusableReply
from tripletune.core.data.triples import Triple, triple_of
from tripletune.llm.refusals import QUERY_START, asks_nothing
from tripletune.llm.reply_json import find_json, json_values, without_json, without_thoughts

History = Literal["chat", "section"]
INTEGRATION_PROMPT = "cirag_integrate"
INTEGRATE_ROLE = "cirag.integrate"
NO_QUESTION = "<no question>"
THOUGHT, CORE, QUESTION = "thought", "fact_after_filter", "question"
CANDIDATES, MAIN_QUESTION, HISTORY = "fact_before_filter", "Original Query", "historical_context"
_OUTPUTS = (THOUGHT, CORE, QUESTION)
_INPUTS = tuple(_name.lower().replace(" ", "_") for _name in (CANDIDATES, MAIN_QUESTION, HISTORY))

_MARKER = re.compile(r"\[\[\s*#{1,4}\s*([A-Za-z][A-Za-z_ -]{0,40}?)\s*#{0,4}\s*\]\]:?")
_STRICT_MARKER = re.compile(r"\[\[## [a-z_]+ ##\]\]:?")
_NUMBER = re.compile(r"^(?:[-*•]|\d{1,2}[.)])\s+")
_QUOTED = re.compile(r"[\"“]([^\"“”]*)[\"”]")
# A lower-case word after a question mark continues the query ("Quo Vadis? in 1895"), unless it is a question word.
# After a full stop, a new query must begin with a word of queries (unlike in "Dr. Who").
_NEXT_QUERY = re.compile(
    r"(?<=\?)[\"'”’]?\s+(?=[^a-z\s]|(?:and |or )?[\"'“‘]?(?:who|whom|whose|what|when|where|which|why|how)\b)"
    r"|(?<=[.;!])(?<!\b(?:Dr|Mrs?|Ms|St|Jr|Sr|No|vs|Prof|Gen|Col|Lt|Mt|\w)\.)[\"'”’]?\s+"
    rf"(?=(?i:(?:(?:and|then|also|\d{{1,2}}[.)]) )*{QUERY_START}))|\s+(?=\d{{1,2}}[.)] (?i:{QUERY_START}))"
)
_QUERY = re.compile(rf"(?i)(?:\d{{1,2}}[.)] |(?:and|then|also) |\W)*{QUERY_START}")
_NOT_A_WORD = re.compile(r"[\W_]+")
# Two brackets before a number sign occur only in a JSON string or in prose.
_OPENS_MARKER = re.compile(r"\[\[(?=\s*#)")
_HEADING = f"[[## {CANDIDATES} ##]]\n"
# Candidates of earlier rounds, in the section historical_context (_FOUND) or in earlier turns (_SHOWN).
_FOUND = re.compile(r"^(facts found: )(.*)$", re.MULTILINE)
_SHOWN = re.compile(rf"^({re.escape(_HEADING)})(.*)$", re.MULTILINE)
FORM = (
    f"write the three sections [[## {THOUGHT} ##]], [[## {CORE} ##]] and [[## {QUESTION} ##]], and in the last one a "
    f"single question or {NO_QUESTION}"
)


@dataclass(frozen=True, slots=True)
class Decision:
    """The integrator's decision y_t of one round.

    Attributes:
        thought: The reasoning trace r_t.
        core: The core triples, all of them among the round's candidates.
        query: The next query a_{t+1}; empty for `<no question>`; None if the reply states neither.
        left_out: Number of candidates of earlier rounds that were left out of the prompt.
    """

    thought: str
    core: tuple[Triple, ...] = ()
    query: str | None = None
    faults: tuple[str, ...] = ()
    reply: str = ""
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """One element of the history H_<t (eq. 2): the candidates of a round and the decision on them."""

    candidates: tuple[Triple, ...]
    decision: Decision


def messages_of(
    prompt: str, question: str, candidates: Sequence[Triple], history: Sequence[Round], layout: History = "chat"
) -> list[Message]:
    """The integrator's chat of instruction I, main question x and candidates.

    `layout` "chat" writes each earlier round as a user and an assistant turn; "section" writes earlier rounds into the
    section historical_context of the only user turn.
    """
    system: Message = {"role": "system", "content": prompt}
    asked = _section(MAIN_QUESTION, _plain(question))
    if layout == "section":
        parts = [asked, _section(CANDIDATES, write_triples(candidates))]
        earlier = (
            f"Round {number}\nfacts found: {write_triples(one.candidates)}\nthought: {_plain(one.decision.thought)}\n"
            f"facts kept: {write_triples(one.decision.core)}\nquestion: {_plain(one.decision.query or NO_QUESTION)}"
            for number, one in enumerate(history, 1)
        )
        parts += [_section(HISTORY, "\n\n".join(earlier))] if history else []
        return [system, {"role": "user", "content": "\n\n".join(parts)}]
    messages = [system]
    for round_ in history:
        messages.append({"role": "user", "content": _section(CANDIDATES, write_triples(round_.candidates))})
        messages.append({"role": "assistant", "content": write_decision(round_.decision)})
    messages.append({"role": "user", "content": _section(CANDIDATES, write_triples(candidates))})
    messages[1]["content"] = f"{asked}\n\n{messages[1]['content']}"
    return messages


def write_triples(triples: Iterable[Triple]) -> str:
    """Write triples as `{"fact": [[subject, predicate, object], ...]}` on one line."""
    text = json.dumps({"fact": [triple.as_list() for triple in triples]}, ensure_ascii=False)
    return _OPENS_MARKER.sub(r"[\\u005b", text)


def write_decision(decision: Decision) -> str:
    """Write a decision in the marked sections, which `read_decision` reads."""
    query = NO_QUESTION if decision.query == "" else _plain(decision.query or "")
    sections = ((THOUGHT, _plain(decision.thought)), (CORE, write_triples(decision.core)), (QUESTION, query))
    return "\n\n".join(_section(name, text) for name, text in sections)


def read_decision(text: str, candidates: Sequence[Triple], earlier: Iterable[Triple] = ()) -> Decision:
    """Read a reply of the integrator; `earlier` are candidates of earlier rounds.

    Returns:
        The decision with its faults: `empty_reply`; `missing_thought`, `missing_fact_after_filter`, `missing_question`
        (a section is missing); `empty_question` (no letter and no digit); `contradictory_question` (a question and
        `<no question>`); `several_questions` (the first question is used); `loose_question` (numbered, or
        `<no question>` in other words); `text_before_sections` (dropped, or used as missing thought); `unknown_section`
        (dropped); `runs_on` (the reply continues with the next round, which is dropped); `section_order`;
        `loose_marker`; `loose_facts` (JSON in another form); `several_fact_lists` (all lists are used);
        `unreadable_facts` (no valid JSON; complete triples are used); `malformed_triple`, `invented_triple`,
        `earlier_triple` (from another round; all three are dropped); `respelled_triple` (differs from a candidate in
        case or punctuation; the candidate's spelling is used); `repeated_triple`.
    """
    text_read = without_thoughts(text).strip()
    if not text_read:
        return Decision("", (), None, ("empty_reply",), text)
    sections, faults = _split(text_read)
    core, core_faults = _read_core(sections.get(CORE), candidates, earlier)
    query, query_faults = _read_query(sections[QUESTION]) if QUESTION in sections else (None, ["missing_question"])
    return Decision(_plain(sections.get(THOUGHT, "")), core, query, (*faults, *core_faults, *query_faults), text)


def _split(text: str) -> tuple[dict[str, str], list[str]]:
    """The sections of a reply by name, and the faults; sections of a next round are dropped."""
    markers = list(_MARKER.finditer(without_json(text)))
    faults: list[str] = []
    before = text[: markers[0].start() if markers else len(text)].strip()
    sections: dict[str, str] = {}
    for marker, following in zip(markers, [*markers[1:], None]):
        name = re.sub(r"[ -]+", "_", marker.group(1).lower())
        if name in sections or (name in _INPUTS and any(known in sections for known in _OUTPUTS)):
            faults.append("runs_on")
            break
        if name not in (*_OUTPUTS, *_INPUTS):
            faults.append("unknown_section")
            continue
        if not _STRICT_MARKER.fullmatch(marker.group()):
            faults.append("loose_marker")
        sections[name] = text[marker.end() : following.start() if following else len(text)].strip()
    if any(name in sections for name in _INPUTS):
        faults.append("unknown_section")
    found = [name for name in sections if name in _OUTPUTS]
    if found != sorted(found, key=_OUTPUTS.index):
        faults.append("section_order")
    if before:
        faults.append("text_before_sections")
    if not sections.get(THOUGHT):
        faults.append("missing_thought")
        sections[THOUGHT] = before
    return sections, faults


def _read_core(
    section: str | None, candidates: Sequence[Triple], earlier: Iterable[Triple]
) -> tuple[tuple[Triple, ...], list[str]]:
    if section is None:
        return (), [f"missing_{CORE}"]
    rows, faults = _rows(section)
    alike = {_key(triple): triple for triple in reversed(candidates)}
    other_rounds = {_key(triple) for triple in earlier}
    core: dict[Triple, None] = {}
    for row in rows:
        triple = triple_of(row)
        if triple is None:
            faults.append("malformed_triple")
            continue
        if triple not in candidates:
            if (respelled := alike.get(_key(triple))) is None:
                faults.append("earlier_triple" if _key(triple) in other_rounds else "invented_triple")
                continue
            triple = respelled
            faults.append("respelled_triple")
        if triple in core:
            faults.append("repeated_triple")
        core[triple] = None
    return tuple(core), faults


def _rows(section: str) -> tuple[list[Any], list[str]]:
    value = None
    with contextlib.suppress(UnusableReply):
        value = find_json(section)
    found = [one["fact"] for one in json_values(section, dict) if isinstance(one.get("fact"), list)]
    if len(found) > 1:
        # Some models write an object for each triple.
        return [row for rows in found for row in rows], ["several_fact_lists"]
    if isinstance(value, dict):
        if list(value) == ["fact"] and isinstance(value["fact"], list):
            return value["fact"], []
        value = next((value[name] for name in ("fact", "facts", "triples") if name in value), None)
    if isinstance(value, list) and not any(isinstance(row, str) for row in value):
        return value, ["loose_facts"]
    # Python tuples or a list that was cut off: use the complete triples.
    return [row for row in json_values(section, list) if triple_of(row)], ["unreadable_facts"]


def _read_query(section: str) -> tuple[str | None, list[str]]:
    text = _plain(section)
    if text == NO_QUESTION:
        return "", []
    if not _says_something(text):
        return None, ["empty_question"]
    if asks_nothing(text):
        return "", ["loose_question"]
    rest = re.sub(re.escape(NO_QUESTION), " ", text, flags=re.IGNORECASE)
    if rest != text:
        return (None, ["contradictory_question"]) if "?" in rest else ("", ["loose_question"])
    faults = []
    parts = [one for one in _NEXT_QUERY.split(text) if ("?" in one or _QUERY.match(one)) and _says_something(one)]
    if len(parts) > 1:
        faults.append("several_questions")
        text = parts[0]
    bare = _undressed(text)
    if bare != text:
        faults.append("loose_question")
    return (bare, faults) if _says_something(bare) else (None, [*faults, "empty_question"])


def _says_something(text: str) -> bool:
    return bool(_NOT_A_WORD.sub("", text))


def _undressed(text: str) -> str:
    """Remove list number, emphasis and quotation marks around a question."""
    while True:
        bare = _NUMBER.sub("", text).strip("`* ")
        quoted = _QUOTED.fullmatch(bare)
        bare = quoted.group(1).strip() if quoted else bare
        if bare == text:
            return bare
        text = bare


def _key(triple: Triple) -> tuple[str, ...]:
    """A key that ignores case, Unicode form and punctuation; a field with only punctuation keeps its text."""
    folded = (unicodedata.normalize("NFKC", field).casefold() for field in triple.as_list())
    return tuple(" ".join(_NOT_A_WORD.sub(" ", field).split()) or field for field in folded)


def _section(name: str, text: str) -> str:
    return f"[[## {name} ##]]\n{text}"


def _plain(text: str) -> str:
    """Put a text on one line, and break up markers in it."""
    return _OPENS_MARKER.sub("[ [", " ".join(text.split()))


def shorten(
    messages: Sequence[Message], count: Callable[[Sequence[Message]], int], limit: int
) -> tuple[list[Message], int]:
    """Drop candidates of earlier rounds until a chat has at most `limit` tokens; return it and how many were dropped.

    Candidates of the oldest round are dropped first, and within a round those with the lowest rank. The question, the
    candidates of the newest round and the integrator's turns stay, so the result can still be too long.
    """
    if count(messages) <= limit:
        return list(messages), 0
    most = sum(len(_triples(line)) for _, _, line in _earlier(messages))
    # If the chat never fits, all earlier candidates are dropped.
    fewest = bisect_left(range(most), True, key=lambda number: count(_without(messages, number)) <= limit)
    return _without(messages, fewest), fewest


def fewer_candidates(messages: Sequence[Message]) -> list[Message] | None:
    """Shorten a chat by about 15 %: drop earlier candidates, or else the last new ones; None if only one is left."""
    size = sum(len(turn["content"]) for turn in messages)
    kept, left_out = shorten(messages, lambda chat: sum(len(turn["content"]) for turn in chat), int(0.85 * size))
    turn = messages[-1]["content"]
    newest = shown_candidates(turn) or []
    if left_out or len(newest) < 2:
        return kept if left_out else None
    fewer = write_triples(newest[: int(0.85 * len(newest))])
    return [*messages[:-1], {"role": "user", "content": turn.replace(write_triples(newest), fewer, 1)}]


def shown_candidates(turn: str) -> list[Triple] | None:
    """The candidates in a user turn of the integrator's chat, in order; None if the turn has no candidates."""
    _, found, rest = turn.partition(_HEADING)
    return _triples(rest.split("\n", 1)[0]) if found else None


def _triples(line: str) -> list[Triple]:
    try:
        return [Triple(*row) for row in json.loads(line)["fact"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the section {CANDIDATES} of a turn cannot be read: {error}") from None


def _earlier(messages: Sequence[Message]) -> list[tuple[int, str, str]]:
    """Index of the turn, preceding text and line of each list of earlier candidates, in either layout."""
    users = [place for place, turn in enumerate(messages) if turn["role"] == "user"]
    found = (
        (place, (_FOUND if place == users[-1] else _SHOWN).finditer(messages[place]["content"])) for place in users
    )
    return [(place, match[1], match[2]) for place, matches in found for match in matches]


def _without(messages: Sequence[Message], number: int) -> list[Message]:
    """Drop the oldest `number` candidates of earlier rounds from a chat."""
    kept = list(messages)
    for place, before, line in _earlier(messages):
        if number and (candidates := _triples(line)):
            left = candidates[: max(0, len(candidates) - number)]
            number -= len(candidates) - len(left)
            text = kept[place]["content"].replace(f"{before}{line}", f"{before}{write_triples(left)}", 1)
            kept[place] = {"role": "user", "content": text}
    return kept
