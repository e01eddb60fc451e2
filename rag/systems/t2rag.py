"""T2RAG: a question becomes triples with unknowns, which triples of the corpus fill round by round (section 4.3).

Where the paper leaves a choice:

- `?name` is the same unknown in all clues: a value that fills it in one clue fills it in all. Each `?` is separate.
- A clue is searched once in each wording; while it has unknowns, later rounds also show it to the model.
- A round has at most `top_k` passages; of the passages that state a proposition, the first in the corpus count.
- A reply can fill unknowns and add clues, but cannot change known fields of a clue.
- If the reply with the clues is unreadable, the question is searched as if it had no searchable clues; if no clue is
  filled in the end, the model answers from the last findings.
- Scores of BM25 and fused rankings are divided by the best score of their query before all rows are ranked together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

import regex as re

from tripletune.core.calls import UnusableReply
from tripletune.core.data.records import Step, one_line
from tripletune.core.data.triples import Triple
from tripletune.core.options import setting
from tripletune.llm.question_client import QuestionClient, load_prompts
from tripletune.llm.reply_triples import triple_rows
from tripletune.rag import Trace
from tripletune.rag.chat_generator import READER, Found, bare_answer, finish, prompt_files, show_passages
from tripletune.rag.search.retrievers import Retrieved
from tripletune.rag.search.text_index import shares
from tripletune.rag.search.triple_index import TripleIndex, entity_key
from tripletune.rag.systems import AnswerOptions, System, Tools, client_of, need

_PROMPTS = ("t2rag_decompose", "t2rag_resolve", "t2rag_answer")
_NAMES = (*_PROMPTS, READER)
# A question mark directly after a word ("Who's Afraid of Virginia Woolf?") is no unknown.
_UNKNOWN = re.compile(r"(?<![^\s(\"'\[<{])\?\w*")
_BLANK = re.compile(r"[\[<{(\s]*(?:(\?\w*)|_+|unknown)[\]>})\s]*", re.IGNORECASE)
_NOTHING = re.compile(r"\W*(unknown|none|n/?a|not (known|found|given|specified|mentioned|available))\W*", re.IGNORECASE)
T = TypeVar("T")
_KINDS = (("Searchable", 1), ("Fuzzy", 2), ("Resolved", 0))


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
    question_too: bool = setting(False, "also search the question in every round, as the public code does")
    repairs: int = setting(0, "maximum repair turns if a reply has no clues; 2 in the public code", at_least=0)
    prompts: str | None = setting(None, "folder of custom prompts: any of t2rag_*.md")
    max_decompose_tokens: int = setting(512, "maximum tokens of a reply with a question's clues", at_least=1)
    max_resolve_tokens: int = setting(1024, "maximum tokens of a reply with filled clues", at_least=1)


class Clue:
    """A triple with unknowns, and a number from 1, which stays when the unknowns are filled."""

    def __init__(self, number: int, fields: Sequence[str]) -> None:
        self.number, self.fields = number, list(fields)

    def __str__(self) -> str:
        return f"[{self.number}] {' | '.join(self.fields)}"

    @property
    def kind(self) -> int:
        """The number of fields with an unknown: 0 is resolved, 1 searchable, 2 (or more) fuzzy."""
        return min(2, sum("?" in text and bool(_UNKNOWN.search(text)) for text in self.fields))

    @property
    def query(self) -> str:
        """The query proposition: the known fields, separated by spaces."""
        return " ".join(_UNKNOWN.sub(" ", " ".join(self.fields)).split())

    def agrees(self, fields: Sequence[str]) -> bool:
        """Whether a reply's fields equal this clue's known fields."""
        return all(_UNKNOWN.search(a) or entity_key(a) == entity_key(b) for a, b in zip(self.fields, fields))


def first_clues(reply: str) -> list[Clue]:
    """Read the clues of a question from a reply (step 1); `UnusableReply` if the reply has no clue."""
    if rows := triple_rows(reply):
        blanks = ([(_BLANK.fullmatch(text), text) for text in fields] for _, fields in rows)
        read = [[(blank[1] or "?") if blank else text for blank, text in fields] for fields in blanks]
        return [Clue(number, fields) for number, fields in enumerate(read, 1)]
    raise UnusableReply("no_clue", "The reply holds no line of the form subject | predicate | object.")


def update(clues: list[Clue], rows: Iterable[tuple[str, list[str]]]) -> None:
    """Fill unknowns from the rows of a reply, and add its new clues (step 2.3)."""
    for number, fields in rows:
        agreeing = sorted((clue for clue in clues if clue.agrees(fields)), key=lambda clue: clue.kind)
        named = next((clue for clue in clues if str(clue.number) == number), None)
        if named and named not in agreeing:
            # The row spells a known field differently, or the model numbered its rows from 1.
            agreeing = [clue for clue in agreeing if clue.kind < 2] or [named]
        clue = named if named in agreeing else next(iter(agreeing), None)
        if clue is None:
            clues.append(Clue(len(clues) + 1, fields))
            continue
        for place, value in enumerate(fields):
            old = clue.fields[place]
            if _UNKNOWN.search(old) and not _UNKNOWN.search(value) and not _NOTHING.fullmatch(value):
                clue.fields[place] = value
                if len(old) > 1 and _UNKNOWN.fullmatch(old):
                    _bind(clues, old, value)


def _bind(clues: list[Clue], name: str, value: str) -> None:
    same = re.compile(rf"{re.escape(name)}(?!\w)", re.IGNORECASE)
    for clue in clues:
        clue.fields = [same.sub(lambda _: value, text) for text in clue.fields]


async def t2rag(question: str, search: str, tools: Tools, options: T2RAGOptions) -> Trace:
    """Answer one question with T2RAG (algorithm 1); see `System.run`."""
    trace, asked = Trace(question), set[str]()
    llm = client_of("t2rag", tools, trace, load_prompts(_NAMES, options.prompts), options.repairs)
    main = f"Question: {one_line(question)}"
    try:
        clues = await _ask("decompose", main, llm, options, trace, first_clues)
    except UnusableReply:
        clues, trace.malformed = [], 1
    evidence = list[str]()
    while not trace.stop_reason:
        kinds: list[list[Clue]] = [[], [], []]
        for clue in clues:
            kinds[clue.kind].append(clue)
        # Only clues that became searchable in the last round are searched.
        queries = [clue.query for clue in kinds[1] if clue.query not in asked]
        falls_back = options.fallback == "always" or (options.fallback == "once" and search not in asked)
        if clues and not kinds[1] + kinds[2]:
            trace.stop_reason = "sufficient"
        elif len(trace.steps) == options.max_rounds:
            trace.stop_reason = "max_rounds"
        elif not queries and not (falls_back and (kinds[2] or not clues)):
            trace.stop_reason = "no_searchable" if clues else "malformed"
        else:
            queries += [search] if options.question_too or not queries else []
            asked.update(queries)
            evidence = await _search(queries, tools, options, trace)
            parts = [main, *(f"{name} clues:\n{_lines(kinds[kind])}" for name, kind in _KINDS), *evidence]
            update(clues, await _ask("resolve", "\n\n".join(parts), llm, options, trace, triple_rows))

    told = [str(clue) for clue in clues if clue.kind < 2]
    if not told and not evidence:
        evidence = await _search([search], tools, options, trace)
    known = "\n\n".join([main, f"Clues:\n{_lines(told)}", *([] if told else evidence)])
    trace.details["clues"] = [clue.fields for clue in clues]
    read = partial(bare_answer, long=options.answer == "long")
    own = partial(_ask, "answer", known, llm, options, trace, read)
    return await finish(trace, options, llm, Found(list(trace.found.values()), told), own)


async def _search(queries: list[str], tools: Tools, options: T2RAGOptions, trace: Trace) -> list[str]:
    """Return the propositions and passages that queries find, as text for prompts; the trace records them."""
    triples, hits = await _retrieve(list(dict.fromkeys(queries)), tools, options)
    trace.add_step(Step("; ".join(queries), tuple(triples)), hits)
    shown = [show_passages(hit.passage for hit in hits)] if options.passages else []
    return [f"Propositions:\n{_lines(' | '.join(triple.as_list()) for triple in triples)}", *shown]


async def _retrieve(queries: list[str], tools: Tools, options: T2RAGOptions) -> tuple[list[Triple], list[Retrieved]]:
    if options.unit == "triples":
        triples: TripleIndex = need(tools, "triples", "t2rag")
        rows, passages = await triples.gather(queries, options.top_k, options.candidates)
        hits = [Retrieved(triples.passages[position], score, position) for position, score in passages.items()]
        return [triples[row] for row in rows], hits
    retriever, found = need(tools, "retriever", "t2rag"), list[Retrieved]()
    for query in queries:
        hits = await retriever.retrieve(query, options.top_k)
        scores = [hit.score for hit in hits]
        scores = scores if getattr(retriever, "comparable", True) else shares(scores)
        found += [replace(hit, score=score) for hit, score in zip(hits, scores)]
    best = {hit.passage.id: hit for hit in sorted(found, key=lambda hit: hit.score)}
    return [], sorted(best.values(), key=lambda hit: -hit.score)[: options.top_k]


async def _ask(
    call: str, user: str, llm: QuestionClient, options: T2RAGOptions, trace: Trace, read: Callable[[str], T]
) -> T:
    def parse(reply: str) -> T:
        if call != "answer":
            trace.add_action(reply, call)
        return read(reply)

    return await llm.ask(call, user, parse, getattr(options, f"max_{call}_tokens"))


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
