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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import regex as re

from tripletune.core.calls import Message, UnusableReply
from tripletune.core.data.triples import Triple, triple_of
from tripletune.llm.refusals import QUERY_START, asks_nothing
from tripletune.llm.reply_json import find_json, json_values, without_json, without_thoughts

T = TypeVar("T")
History = Literal["chat", "section"]
INTEGRATION_PROMPT = "cirag_integrate"
INTEGRATE_ROLE = "cirag.integrate"
NO_QUESTION = "<no question>"
THOUGHT, CORE, QUESTION = "thought", "fact_after_filter", "question"
CANDIDATES, MAIN_QUESTION, HISTORY = "fact_before_filter", "Original Query", "historical_context"
# Sections of the integrator's reply, and those of its prompt as a reply may name them.
_OUTPUTS = (THOUGHT, CORE, QUESTION)
_INPUTS = (CANDIDATES, "original_query", HISTORY)

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
CANDIDATES_HEADING = f"[[## {CANDIDATES} ##]]\n"
MAIN_QUESTION_HEADING = f"[[## {MAIN_QUESTION} ##]]\n"
QUERY_HEADING = f"[[## {QUESTION} ##]]\n"
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


class _ReadPart(NamedTuple, Generic[T]):
    """What was read in a part of a reply, and the faults of its form; `read_decision` lists them."""

    value: T
    faults: list[str]


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
    asked = _marked_section(MAIN_QUESTION, _on_one_line(question))
    newest = _marked_section(CANDIDATES, triples_as_json(candidates))
    if layout == "section":
        sections = [asked, newest]
        if history:
            rounds = [_round_text(number, round_) for number, round_ in enumerate(history, 1)]
            sections.append(_marked_section(HISTORY, "\n\n".join(rounds)))
        return [system, {"role": "user", "content": "\n\n".join(sections)}]
    messages = [system]
    for round_ in history:
        messages.append({"role": "user", "content": _marked_section(CANDIDATES, triples_as_json(round_.candidates))})
        messages.append({"role": "assistant", "content": decision_text(round_.decision)})
    messages.append({"role": "user", "content": newest})
    messages[1]["content"] = f"{asked}\n\n{messages[1]['content']}"
    return messages


def _round_text(number: int, round_: Round) -> str:
    """An earlier round in the section historical_context; `shortening` finds the candidates in it by these words."""
    decision = round_.decision
    return (
        f"Round {number}\nfacts found: {triples_as_json(round_.candidates)}\n"
        f"thought: {_on_one_line(decision.thought)}\n"
        f"facts kept: {triples_as_json(decision.core)}\nquestion: {_on_one_line(decision.query or NO_QUESTION)}"
    )


def triples_as_json(triples: Iterable[Triple]) -> str:
    """Triples as `{"fact": [[subject, predicate, object], ...]}` on one line.

    A name may hold `[[ ##`, which `read_decision` would take for the beginning of a section. So its first bracket is
    written as JSON's escape, which is read back as the same name.
    """
    text = json.dumps({"fact": [triple.as_list() for triple in triples]}, ensure_ascii=False)
    return _OPENS_MARKER.sub(r"[\\u005b", text)


def decision_text(decision: Decision) -> str:
    """A decision in the marked sections, which `read_decision` reads."""
    query = NO_QUESTION if decision.query == "" else _on_one_line(decision.query or "")
    sections = ((THOUGHT, _on_one_line(decision.thought)), (CORE, triples_as_json(decision.core)), (QUESTION, query))
    return "\n\n".join(_marked_section(name, text) for name, text in sections)


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
        case, punctuation or spaces; the candidate's spelling is used); `repeated_triple`.
    """
    text_read = without_thoughts(text).strip()
    if not text_read:
        return Decision("", (), None, ("empty_reply",), text)
    sections, faults = _split_into_sections(text_read)
    core, core_faults = _read_core(sections.get(CORE), candidates, earlier)
    query, query_faults = _read_query(sections.get(QUESTION))
    return Decision(_on_one_line(sections.get(THOUGHT, "")), core, query, (*faults, *core_faults, *query_faults), text)


def _split_into_sections(text: str) -> _ReadPart[dict[str, str]]:
    """The sections of a reply by name; sections of a next round are dropped.

    A reply may go on with a next round, whose candidates were never retrieved: reading stops at a repeated section, or
    at a section of the prompt after one of the reply. Text before the first section stands for a missing thought.
    """
    markers = list(_MARKER.finditer(without_json(text)))
    faults: list[str] = []
    before = text[: markers[0].start() if markers else len(text)].strip()
    sections: dict[str, str] = {}
    for marker, following in zip(markers, [*markers[1:], None]):
        name = re.sub(r"[ -]+", "_", marker.group(1).lower())
        starts_next_round = name in _INPUTS and any(output in sections for output in _OUTPUTS)
        if name in sections or starts_next_round:
            faults.append("runs_on")
            break
        if name not in (*_OUTPUTS, *_INPUTS):
            faults.append("unknown_section")
            continue
        if not _STRICT_MARKER.fullmatch(marker.group()):
            faults.append("loose_marker")
        end = following.start() if following else len(text)
        sections[name] = text[marker.end() : end].strip()
    if any(name in sections for name in _INPUTS):
        faults.append("unknown_section")
    outputs = [name for name in sections if name in _OUTPUTS]
    if outputs != sorted(outputs, key=_OUTPUTS.index):
        faults.append("section_order")
    if before:
        faults.append("text_before_sections")
    if not sections.get(THOUGHT):
        faults.append("missing_thought")
        sections[THOUGHT] = before
    return _ReadPart(sections, faults)


def _read_core(
    section: str | None, candidates: Sequence[Triple], earlier: Iterable[Triple]
) -> _ReadPart[tuple[Triple, ...]]:
    """The core triples of a section (None: it is missing).

    A triple counts only if it is a candidate of this round, apart from case, Unicode form and punctuation: it is then
    written as the candidate. Others are named by fault: invented, or taken from an earlier round.
    """
    if section is None:
        return _ReadPart((), [f"missing_{CORE}"])
    rows, faults = _fact_rows(section)
    candidate_of = {_comparison_key(triple): triple for triple in reversed(candidates)}
    other_rounds = {_comparison_key(triple) for triple in earlier}
    core: dict[Triple, None] = {}
    for row in rows:
        triple = triple_of(row)
        if triple is None:
            faults.append("malformed_triple")
            continue
        if triple not in candidates:
            key = _comparison_key(triple)
            if key not in candidate_of:
                faults.append("earlier_triple" if key in other_rounds else "invented_triple")
                continue
            triple = candidate_of[key]
            faults.append("respelled_triple")
        if triple in core:
            faults.append("repeated_triple")
        core[triple] = None
    return _ReadPart(tuple(core), faults)


def _fact_rows(section: str) -> _ReadPart[list[Any]]:
    """The rows of a section's lists of facts, as JSON holds them: `triple_of` says which are triples.

    The prompt asks for one object with a list "fact"; whatever else can be read without guessing is read, and named as
    a fault.
    """
    fact_lists = []
    for value in json_values(section, dict):
        if isinstance(value.get("fact"), list):
            fact_lists.append(value["fact"])
    if len(fact_lists) > 1:
        # Some models write an object for each triple.
        return _ReadPart(list(chain.from_iterable(fact_lists)), ["several_fact_lists"])
    value = None
    with contextlib.suppress(UnusableReply):
        value = find_json(section)
    if isinstance(value, dict):
        if list(value) == ["fact"] and isinstance(value["fact"], list):
            return _ReadPart(value["fact"], [])
        names = [name for name in ("fact", "facts", "triples") if name in value]
        value = value[names[0]] if names else None
    if isinstance(value, list) and not any(isinstance(row, str) for row in value):
        return _ReadPart(value, ["loose_facts"])
    # Python tuples or a list that was cut off: use the complete triples.
    return _ReadPart([row for row in json_values(section, list) if triple_of(row)], ["unreadable_facts"])


def _read_query(section: str | None) -> _ReadPart[str | None]:
    """The next query of a section (None: it is missing), as in `Decision.query`.

    Three results differ in what the loop does: a query is searched, "" ends the loop (the model asks nothing), and None
    is repaired (it is not clear what the model wants). Of several questions the first counts, and words around a
    question are removed.
    """
    if section is None:
        return _ReadPart(None, ["missing_question"])
    text = _on_one_line(section)
    if text == NO_QUESTION:
        return _ReadPart("", [])
    if not _says_something(text):
        return _ReadPart(None, ["empty_question"])
    if asks_nothing(text):
        return _ReadPart("", ["loose_question"])
    without_marker = re.sub(re.escape(NO_QUESTION), " ", text, flags=re.IGNORECASE)
    if without_marker != text:
        if "?" in without_marker:
            return _ReadPart(None, ["contradictory_question"])
        return _ReadPart("", ["loose_question"])
    faults = []
    questions = _questions_in(text)
    if len(questions) > 1:
        faults.append("several_questions")
        text = questions[0]
    bare = _bare_question(text)
    if bare != text:
        faults.append("loose_question")
    if not _says_something(bare):
        return _ReadPart(None, [*faults, "empty_question"])
    return _ReadPart(bare, faults)


def _questions_in(text: str) -> list[str]:
    """The pieces of a text that ask something, for a reply with several questions or words around one."""
    questions = []
    for piece in _NEXT_QUERY.split(text):
        is_query = "?" in piece or _QUERY.match(piece)
        if is_query and _says_something(piece):
            questions.append(piece)
    return questions


def _says_something(text: str) -> bool:
    """Whether a text has a letter or a digit."""
    return bool(_NOT_A_WORD.sub("", text))


def _bare_question(text: str) -> str:
    """Remove list number, emphasis and quotation marks around a question, in any order and number."""
    while True:
        bare = _NUMBER.sub("", text).strip("`* ")
        quoted = _QUOTED.fullmatch(bare)
        if quoted:
            bare = quoted.group(1).strip()
        if bare == text:
            return bare
        text = bare


def _comparison_key(triple: Triple) -> tuple[str, ...]:
    """A key that ignores case, Unicode form, punctuation and spaces; a field with only punctuation keeps its text.

    It decides which triples of a reply are candidates (`_read_core`), so a looser key would accept invented triples.
    """
    key = []
    for field in triple.as_list():
        folded = unicodedata.normalize("NFKC", field).casefold()
        key.append(_NOT_A_WORD.sub("", folded) or folded)
    return tuple(key)


def _marked_section(name: str, text: str) -> str:
    """A section of a prompt or a reply, under the marker that `_MARKER` finds."""
    return f"[[## {name} ##]]\n{text}"


def _on_one_line(text: str) -> str:
    """Put a text on one line, and break up markers in it."""
    return _OPENS_MARKER.sub("[ [", " ".join(text.split()))
