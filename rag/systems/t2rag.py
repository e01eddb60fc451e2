"""T2RAG: a question becomes triples with unknowns, which triples of the corpus fill round by round (section 4.3).

Where the paper leaves a choice:

- `?name` is the same unknown in all clues: a value that fills it in one clue fills it in all. Each `?` is separate.
- A clue is searched once in each wording; while it has unknowns, later rounds also show it to the model.
- A round has at most `top_k` passages. A proposition that several passages state takes one of these places, as in
  algorithm 2; its other passages follow if places are left (`all_chunks`: they take places at once).
- A clue is searchable if it has one unknown, counted by names: "?a and ?b" are two also in one field.
- A reply can fill unknowns and add clues, but cannot change known fields of a clue. A row that spells a known field
  differently, or states the fact from its other end, still fills the clue whose number it has; a row that has nothing
  in common with that clue is a new clue.
- Clues without any unknown are a guess about the answer (algorithm 1 takes them as resolved). They are searched, and
  the model answers from what was found, not from the guess.
- If the reply with the clues is unreadable, the question is searched as if it had no searchable clues; if no clue is
  filled in the end, the model answers from the last findings.
- Scores of BM25 and fused rankings are divided by the best score of their query before all rows are ranked together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Literal, TypeVar

import regex as re

from tripletune.core.calls import UnusableReply
from tripletune.core.data.records import Step, one_line
from tripletune.core.data.triples import Triple
from tripletune.core.options import setting
from tripletune.llm.question_client import QuestionClient, load_prompts
from tripletune.llm.reading.lines import unquoted
from tripletune.llm.reading.rows import FieldRow, below_header, field_rows, unknowns_in
from tripletune.llm.refusals import is_refusal
from tripletune.rag import Trace
from tripletune.rag.chat_generator import COMMON_READER, bare_answer, finish, prompt_files, show_passages
from tripletune.rag.evidence import Found, passages_by_round
from tripletune.rag.search.retrievers import CorpusRetriever, Retrieved, fact_lines, hits_of, passages_of_hits
from tripletune.rag.search.text_index import shares
from tripletune.rag.search.triple_index import TripleIndex, entity_key
from tripletune.rag.systems import AnswerOptions, System, Tools, client_of, need

_PROMPTS = ("t2rag_decompose", "t2rag_resolve", "t2rag_answer")
_NAMES = (*_PROMPTS, *COMMON_READER)
# A question mark directly after a word ("Who's Afraid of Virginia Woolf?") is no unknown.
_UNKNOWN = re.compile(r"(?<![^\s(\"'\[<{])\?\w*")
# A value that says that there is none, also with a reason: "unknown (the passages do not say)".
_NOTHING = re.compile(
    r"\W+|\W*(unknown|none|n/?a|tbd|not (known|found|given|specified|stated|mentioned|available))"
    r"(\W*| (in|by) the (passages?|propositions?|text)\W*|\s*[(,;:–—-].*)",
    re.IGNORECASE,
)
# Words without which two predicates are compared: "was born in" is "born in".
_AUXILIARIES = frozenset(("is", "are", "was", "were", "be", "been", "has", "have", "had", "does", "did", "do"))
_PREPOSITIONS = frozenset(("of", "in", "at", "on", "by", "to", "from", "with", "for"))
_ENDS = (0, 2)  # places of subject and object
T = TypeVar("T")
Call = Literal["decompose", "resolve", "answer"]


@dataclass(frozen=True, slots=True)
class T2RAGOptions(AnswerOptions):
    """Settings of a run."""

    max_rounds: int = setting(3, 'N, maximum rounds; 1: ablation "single round" (figure 5)', at_least=1)
    top_k: int = setting(5, "k, passages per round", at_least=1)
    candidates: int = setting(100, "propositions to retrieve per clue, before all are ranked together", at_least=1)
    passages: bool = setting(True, 'no: show only propositions to the model ("w/o chunk", figure 5)')
    unit: Literal["triples", "passages"] = setting("triples", 'search triples, or passages (table 5, "chunk-based")')
    fallback: Literal["once", "always", "stop"] = setting("once", "what to do if no clue can be searched: search the "
        "question once or always (section 4.3), or stop (D.3)")  # fmt: skip
    all_chunks: bool = setting(False, "all passages that state a proposition take places of top_k, not one of them")
    question_too: bool = setting(
        False, "also search the question in every round (the public code does so, without its question words)"
    )
    repairs: int = setting(
        0, "maximum repair turns if a reply has no clues (the public code: another prompt, at most twice)", at_least=0
    )
    prompts: str | None = setting(None, "folder of custom prompts: any of t2rag_*.md")
    max_decompose_tokens: int = setting(512, "maximum tokens of a reply with a question's clues", at_least=1)
    max_resolve_tokens: int = setting(1024, "maximum tokens of a reply with filled clues", at_least=1)


class ClueKind(IntEnum):
    """Kinds of clues by their number of unknowns; FUZZY has two or more."""

    RESOLVED = 0
    SEARCHABLE = 1
    FUZZY = 2


# The order of the kinds in a prompt.
_SHOWN_KINDS = (ClueKind.SEARCHABLE, ClueKind.FUZZY, ClueKind.RESOLVED)


class Clue:
    """A triple with unknowns, and a number from 1, which stays when the unknowns are filled."""

    def __init__(self, number: int, fields: Sequence[str]) -> None:
        self.number = number
        self.fields = list(fields)

    def __str__(self) -> str:
        return f"[{self.number}] {' | '.join(self.fields)}"

    @property
    def kind(self) -> ClueKind:
        """The kind by the number of unknowns; a name counts once, and each `?` without a name counts."""
        names: set[str] = set()
        nameless = 0
        for field in self.fields:
            # Most fields have no question mark, which is found sooner than by the pattern.
            for unknown in _UNKNOWN.findall(field) if "?" in field else ():
                if unknown == "?":
                    nameless += 1
                else:
                    names.add(unknown.lower())
        return ClueKind(min(len(names) + nameless, 2))

    @property
    def query(self) -> str:
        """The query proposition: the known fields, separated by spaces."""
        return " ".join(_UNKNOWN.sub(" ", " ".join(self.fields)).split())

    def agrees(self, fields: Sequence[str]) -> bool:
        """Whether a reply's fields equal this clue's known fields, apart from case and articles."""
        for own, other in zip(self.fields, fields):
            if not _UNKNOWN.search(own) and entity_key(own) != entity_key(other):
                return False
        return True


def first_clues(reply: str, question: str = "") -> list[Clue]:
    """Read the clues of a question from a reply (step 1); `UnusableReply` if the reply has no clue."""
    rows, _ = field_rows(below_header(reply, "triples"))
    rows = rows or field_rows(reply)[0]
    if not rows:
        raise UnusableReply("no_clue", "The reply holds no line of the form subject | predicate | object.")
    clues = []
    for number, fields in enumerate(unknowns_in([row.fields for row in rows], question), 1):
        clues.append(Clue(number, fields))
    return clues


def update(clues: list[Clue], rows: Iterable[FieldRow]) -> None:
    """Fill unknowns from the rows of a reply, and add its new clues (step 2.3).

    What a row says wins over what another row of the same reply says of an unknown with the same name: two clues may
    share a name and have two values, as when two places are compared. So names are bound after all rows were read.
    """
    bindings: dict[str, str] = {}
    for row in rows:
        clue = _clue_of(clues, row)
        if clue is None:
            clues.append(Clue(len(clues) + 1, row.fields))
            continue
        for place, value in _values(clue, row.fields).items():
            unknown = clue.fields[place]
            value = unquoted(value)
            is_open = _UNKNOWN.search(value) or entity_key(value) == entity_key(unknown)
            if is_open or _NOTHING.fullmatch(value) or is_refusal(value):
                continue
            clue.fields[place] = value
            has_name = len(unknown) > 1 and _UNKNOWN.fullmatch(unknown)
            if has_name:
                bindings.setdefault(unknown, value)
    for name, value in bindings.items():
        _bind(clues, name, value)


def _clue_of(clues: list[Clue], row: FieldRow) -> Clue | None:
    """The clue that a row fills; None if the row is a new clue.

    A row names a clue by its number and must agree with its known fields. Models renumber rows and respell fields, so a
    clue that agrees, or alone is similar, may take the row in the place of the named one.
    """
    agreeing = sorted((clue for clue in clues if clue.agrees(row.fields)), key=lambda clue: clue.kind)
    numbered = [clue for clue in clues if str(clue.number) == row.number]
    if not numbered and agreeing:
        return agreeing[0]
    if numbered:
        (named,) = numbered
        if named in agreeing:
            return named
        # The model numbered its rows from 1, or the row spells a known field differently.
        nearly_resolved = [clue for clue in agreeing if clue.kind < ClueKind.FUZZY]
        if nearly_resolved:
            return nearly_resolved[0]
        if _has_in_common(named, row.fields):
            return named
    similar = [clue for clue in clues if _is_similar(clue, row.fields)]
    return similar[0] if len(similar) == 1 else None


def _values(clue: Clue, fields: Sequence[str]) -> dict[int, str]:
    """The values that a row gives to the unknowns of a clue, by place.

    A row with subject and object exchanged gives them exchanged back.
    """
    values = {place: fields[place] for place in range(3) if _UNKNOWN.search(clue.fields[place])}
    inverted = _inverted_place(clue, fields)
    if inverted is not None:
        values[inverted] = fields[2 - inverted]
    return values


def _inverted_place(clue: Clue, fields: Sequence[str]) -> int | None:
    """The place of the unknown that a row names at its other end, as `M | became | F` does for `?p | came from | M`."""
    for place in _ENDS:
        other = 2 - place
        own = clue.fields[other]
        if _UNKNOWN.search(clue.fields[place]) and not _UNKNOWN.search(own):
            is_inverted = entity_key(fields[place]) == entity_key(own) and not _are_alike(fields[other], own)
            if is_inverted:
                return place
    return None


def _has_in_common(clue: Clue, fields: Sequence[str]) -> bool:
    """Whether a row with a clue's number may state its fact: it shares a word of a known field, or is inverted."""
    if all(_UNKNOWN.search(clue.fields[place]) for place in _ENDS):
        return True
    for own, field in zip(clue.fields, fields):
        if not _UNKNOWN.search(own) and (_words(own) & _words(field)) - _PREPOSITIONS:
            return True
    return _inverted_place(clue, fields) is not None


def _is_similar(clue: Clue, fields: Sequence[str]) -> bool:
    """Whether a row states an open clue's fact under a longer or shorter name, as the passages may have it."""
    if clue.kind is ClueKind.RESOLVED or _words(clue.fields[1]) != _words(fields[1]):
        return False
    ends = [place for place in _ENDS if not _UNKNOWN.search(clue.fields[place])]
    return bool(ends) and all(_are_alike(clue.fields[place], fields[place]) for place in ends)


def _are_alike(name: str, other: str) -> bool:
    """Whether two names may be one thing's: all words of one are in the other ("The Daily News (Palo Alto)")."""
    words = set(entity_key(name).split())
    others = set(entity_key(other).split())
    return bool(words and others) and (words <= others or others <= words)


def _words(text: str) -> set[str]:
    return set(entity_key(text).split()) - _AUXILIARIES


def _bind(clues: list[Clue], name: str, value: str) -> None:
    """Fill a named unknown in all clues."""
    same = re.compile(rf"{re.escape(name)}(?!\w)", re.IGNORECASE)
    for clue in clues:
        clue.fields = [same.sub(lambda _: value, text) for text in clue.fields]


async def t2rag(question: str, search: str, tools: Tools, options: T2RAGOptions) -> Trace:
    """Answer one question with T2RAG (algorithm 1); see `System.run`.

    The question becomes clues, triples with unknown fields. Each round searches the clues with one unknown, and the
    model fills them from what was found. The answer is read from the resolved clues, or from the last evidence if there
    are none.
    """
    trace = Trace(question)
    llm = client_of("t2rag", tools, trace, load_prompts(_NAMES, options.prompts), options.repairs)
    asked = f"Question: {one_line(question)}"
    try:
        clues = await _ask("decompose", asked, llm, options, trace, partial(first_clues, question=question))
    except UnusableReply:
        clues = []
        trace.malformed = 1
    evidence: list[str] = []
    is_guess = bool(clues) and all(clue.kind is ClueKind.RESOLVED for clue in clues)
    if is_guess:
        trace.tally("decompose.no_unknown")
        trace.details["guess"] = [clue.fields for clue in clues]
        trace.stop_reason = "no_searchable"
        evidence = await _search([clue.query for clue in clues], tools, options, trace)
        clues = []
    queries_so_far: set[str] = set()
    while not trace.stop_reason:
        kinds = _by_kind(clues)
        queries, trace.stop_reason = _next_queries(clues, kinds, search, queries_so_far, len(trace.steps), options)
        if trace.stop_reason:
            break
        queries_so_far.update(queries)
        evidence = await _search(queries, tools, options, trace)
        shown = [f"{kind.name.capitalize()} clues:\n{_lines(kinds[kind])}" for kind in _SHOWN_KINDS]
        user = "\n\n".join([asked, *shown, *evidence])
        rows, unclear = await _ask("resolve", user, llm, options, trace, field_rows)
        if unclear:
            trace.tally("resolve.unclear_rows", unclear)
        update(clues, rows)

    trace.details["clues"] = [clue.fields for clue in clues]
    told = [str(clue) for clue in clues if clue.kind < ClueKind.FUZZY]
    parts = [asked, f"Clues:\n{_lines(told)}"]
    if not told:
        if not evidence:
            evidence = await _search([search], tools, options, trace)
        parts += evidence
    read = partial(bare_answer, long=options.answer == "long")
    answer = partial(_ask, "answer", "\n\n".join(parts), llm, options, trace, read)
    # A clue that is still open says nothing that was found.
    resolved = [str(clue) for clue in clues if clue.kind is ClueKind.RESOLVED]
    return await finish(trace, options, llm, Found(passages_by_round(trace), [resolved]), answer)


def _by_kind(clues: Iterable[Clue]) -> dict[ClueKind, list[Clue]]:
    """The clues by kind, in their order; every kind has a list."""
    kinds: dict[ClueKind, list[Clue]] = {ClueKind.RESOLVED: [], ClueKind.SEARCHABLE: [], ClueKind.FUZZY: []}
    for clue in clues:
        kinds[clue.kind].append(clue)
    return kinds


def _next_queries(
    clues: Sequence[Clue],
    kinds: Mapping[ClueKind, list[Clue]],
    search: str,
    queries_so_far: set[str],
    rounds: int,
    options: T2RAGOptions,
) -> tuple[list[str], str]:
    """The queries of the next round, or the reason to stop; the other of the two is empty.

    Args:
        clues: All clues.
        kinds: The same by kind.
        search: The question as a query, which `fallback` and `question_too` search.
        queries_so_far: Queries of earlier rounds, which are not searched again.
        rounds: Number of rounds so far.
        options: The options of the system.
    """
    unresolved = kinds[ClueKind.SEARCHABLE] + kinds[ClueKind.FUZZY]
    if clues and not unresolved:
        return [], "sufficient"
    if rounds == options.max_rounds:
        return [], "max_rounds"
    # Only clues that became searchable in the last round are searched.
    queries = [clue.query for clue in kinds[ClueKind.SEARCHABLE] if clue.query not in queries_so_far]
    if queries:
        return [*queries, search] if options.question_too else queries, ""
    falls_back = options.fallback == "always" or (options.fallback == "once" and search not in queries_so_far)
    if falls_back and (kinds[ClueKind.FUZZY] or not clues):
        return [search], ""
    return [], "no_searchable" if clues else "malformed"


async def _search(queries: list[str], tools: Tools, options: T2RAGOptions, trace: Trace) -> list[str]:
    """Return the propositions and passages that queries find, as text for prompts; the trace records them."""
    distinct = list(dict.fromkeys(queries))
    triples: list[Triple] = []
    if options.unit == "triples":
        triples, hits = await _find_triples(distinct, tools, options)
    else:
        hits = await _find_passages(distinct, tools, options)
    trace.add_step(Step("; ".join(queries), tuple(triples)), hits)
    evidence = [f"Propositions:\n{_lines(fact_lines(triples))}"]
    if options.passages:
        evidence.append(show_passages(passages_of_hits(hits)))
    return evidence


async def _find_triples(
    queries: list[str], tools: Tools, options: T2RAGOptions
) -> tuple[list[Triple], list[Retrieved]]:
    """The best triples of all queries together, and the passages that state them (algorithm 2)."""
    index: TripleIndex = need(tools, "triples", "t2rag")
    rows, scores = await index.gather(queries, options.top_k, options.candidates, options.all_chunks)
    return [index[row] for row in rows], hits_of(list(scores.items()), index.passages)


async def _find_passages(queries: list[str], tools: Tools, options: T2RAGOptions) -> list[Retrieved]:
    """The best passages of all queries together, each with its best score.

    Scores of some retrievers depend on the query (BM25), and are then compared as shares of the query's best.
    """
    retriever: CorpusRetriever = need(tools, "retriever", "t2rag")
    hits_of_all: list[Retrieved] = []
    for query in queries:
        hits = await retriever.retrieve(query, options.top_k)
        scores = [hit.score for hit in hits]
        if not retriever.comparable:
            scores = shares(scores)
        hits_of_all += [replace(hit, score=score) for hit, score in zip(hits, scores)]
    best: dict[str, Retrieved] = {}
    for hit in sorted(hits_of_all, key=lambda hit: hit.score):
        best[hit.passage.id] = hit
    return sorted(best.values(), key=lambda hit: -hit.score)[: options.top_k]


async def _ask(
    call: Call, user: str, llm: QuestionClient, options: T2RAGOptions, trace: Trace, read: Callable[[str], T]
) -> T:
    """Make a call with the role `t2rag.<call>`, and record its replies, except answers, as actions.

    Raises:
        UnusableReply: `read` accepts none of the replies, also not after repairs.
    """

    def parse(reply: str) -> T:
        """Read a reply, after it is recorded: replies that are repaired are in the trace, too."""
        if call != "answer":
            trace.add_action(reply, call)
        return read(reply)

    limits = {
        "decompose": options.max_decompose_tokens,
        "resolve": options.max_resolve_tokens,
        "answer": options.max_answer_tokens,
    }
    return await llm.ask(call, user, parse, limits[call])


def _lines(rows: Iterable[object]) -> str:
    return "\n".join(map(str, rows)) or "(none)"


SYSTEM = System(
    name="t2rag",
    run=t2rag,
    needs_triples=lambda options: options.unit == "triples",
    searches_triples=lambda options: options.unit == "triples",
    options=T2RAGOptions,
    model="llm",
    files=prompt_files(*_PROMPTS, names=_NAMES),
)
