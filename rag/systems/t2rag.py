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
from functools import partial
from typing import Literal, NamedTuple, TypeVar

from tripletune.core.calls import UnusableReply
from tripletune.core.data.records import Step, one_line
from tripletune.core.data.triples import Triple
from tripletune.core.options import setting
from tripletune.llm.question_client import QuestionClient, load_prompts
from tripletune.llm.reading.rows import field_rows
from tripletune.rag import Trace
from tripletune.rag.chat_generator import COMMON_READER, bare_answer, finish, prompt_files, show_passages
from tripletune.rag.evidence import Found, passages_by_round
from tripletune.rag.search.retrievers import Retrieved, fact_lines, hits_of, passages_of_hits
from tripletune.rag.search.text_index import shares_of_best
from tripletune.rag.search.triple_index import TripleIndex
from tripletune.rag.systems import AnswerOptions, System, Tools, client_of, corpus_retriever, need
from tripletune.rag.systems._clues import Clue, ClueKind, fill_clues, first_clues

_PROMPTS = ("t2rag_decompose", "t2rag_resolve", "t2rag_answer")
_NAMES = (*_PROMPTS, *COMMON_READER)
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


# The order of the kinds in a prompt.
_SHOWN_KINDS = (ClueKind.SEARCHABLE, ClueKind.FUZZY, ClueKind.RESOLVED)


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
        clues = await _ask_and_record("decompose", asked, llm, options, trace, partial(first_clues, question=question))
    except UnusableReply:
        clues = []
        trace.malformed = 1
    evidence: list[str] = []
    is_guess = bool(clues) and all(clue.kind is ClueKind.RESOLVED for clue in clues)
    if is_guess:
        trace.tally("decompose.no_unknown")
        trace.details["guess"] = [clue.fields for clue in clues]
        trace.stop_reason = "no_searchable"
        evidence = await _find_evidence([clue.query for clue in clues], tools, options, trace)
        clues = []
    queries_so_far: set[str] = set()
    while not trace.stop_reason:
        kinds = _by_kind(clues)
        queries, trace.stop_reason = _queries_or_stop(clues, kinds, search, queries_so_far, len(trace.steps), options)
        if trace.stop_reason:
            break
        queries_so_far.update(queries)
        evidence = await _find_evidence(queries, tools, options, trace)
        shown = [f"{kind.name.capitalize()} clues:\n{_lines_or_none(kinds[kind])}" for kind in _SHOWN_KINDS]
        user = "\n\n".join([asked, *shown, *evidence])
        rows, unclear = await _ask_and_record("resolve", user, llm, options, trace, field_rows)
        if unclear:
            trace.tally("resolve.unclear_rows", unclear)
        fill_clues(clues, rows)

    trace.details["clues"] = [clue.fields for clue in clues]
    clues_to_read = [str(clue) for clue in clues if clue.kind < ClueKind.FUZZY]
    sections = [asked, f"Clues:\n{_lines_or_none(clues_to_read)}"]
    if not clues_to_read:
        if not evidence:
            evidence = await _find_evidence([search], tools, options, trace)
        sections += evidence
    read = partial(bare_answer, long=options.answer == "long")
    answer = partial(_ask_and_record, "answer", "\n\n".join(sections), llm, options, trace, read)
    # A clue that is still open says nothing that was found.
    resolved = [str(clue) for clue in clues if clue.kind is ClueKind.RESOLVED]
    return await finish(trace, options, llm, Found(passages_by_round(trace), [resolved]), answer)


def _by_kind(clues: Iterable[Clue]) -> dict[ClueKind, list[Clue]]:
    """The clues by kind, in their order; every kind has a list."""
    kinds: dict[ClueKind, list[Clue]] = {ClueKind.RESOLVED: [], ClueKind.SEARCHABLE: [], ClueKind.FUZZY: []}
    for clue in clues:
        kinds[clue.kind].append(clue)
    return kinds


class _NextSearch(NamedTuple):
    """The queries of the next round, or the reason to stop; the other of the two is empty."""

    queries: list[str]
    stop_reason: str = ""


def _queries_or_stop(
    clues: Sequence[Clue],
    kinds: Mapping[ClueKind, list[Clue]],
    search: str,
    queries_so_far: set[str],
    rounds: int,
    options: T2RAGOptions,
) -> _NextSearch:
    """What the next round searches: clues with one unknown; without any, the question, as `fallback` says.

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
        return _NextSearch([], "sufficient")
    if rounds == options.max_rounds:
        return _NextSearch([], "max_rounds")
    # Only clues that became searchable in the last round are searched.
    queries = [clue.query for clue in kinds[ClueKind.SEARCHABLE] if clue.query not in queries_so_far]
    if queries:
        return _NextSearch([*queries, search] if options.question_too else queries)
    falls_back = options.fallback == "always" or (options.fallback == "once" and search not in queries_so_far)
    if falls_back and (kinds[ClueKind.FUZZY] or not clues):
        return _NextSearch([search])
    return _NextSearch([], "no_searchable" if clues else "malformed")


async def _find_evidence(queries: list[str], tools: Tools, options: T2RAGOptions, trace: Trace) -> list[str]:
    """Search, add the search to the trace as a step, and return the propositions and passages as text for prompts."""
    distinct = list(dict.fromkeys(queries))
    triples: list[Triple] = []
    if options.unit == "triples":
        triples, hits = await _find_triples(distinct, tools, options)
    else:
        hits = await _find_passages(distinct, tools, options)
    trace.add_step(Step("; ".join(queries), tuple(triples)), hits)
    evidence = [f"Propositions:\n{_lines_or_none(fact_lines(triples))}"]
    if options.passages:
        evidence.append(show_passages(passages_of_hits(hits)))
    return evidence


class _StatedTriples(NamedTuple):
    """Triples, best first, and the passages that state them."""

    triples: list[Triple]
    hits: list[Retrieved]


async def _find_triples(queries: list[str], tools: Tools, options: T2RAGOptions) -> _StatedTriples:
    """The best triples of all queries together, and the passages that state them (algorithm 2)."""
    index: TripleIndex = need(tools.triples, "triples", "t2rag")
    rows, scores = await index.gather(queries, options.top_k, options.candidates, options.all_chunks)
    return _StatedTriples([index[row] for row in rows], hits_of(list(scores.items()), index.passages))


async def _find_passages(queries: list[str], tools: Tools, options: T2RAGOptions) -> list[Retrieved]:
    """The best passages of all queries together, each with its best score.

    Scores of some retrievers depend on the query (BM25), and are then compared as shares of the query's best.
    """
    retriever = corpus_retriever(tools, "t2rag")
    hits_of_all: list[Retrieved] = []
    for query in queries:
        hits = await retriever.retrieve(query, options.top_k)
        scores = [hit.score for hit in hits]
        if not retriever.comparable:
            scores = shares_of_best(scores)
        hits_of_all += [replace(hit, score=score) for hit, score in zip(hits, scores)]
    best: dict[str, Retrieved] = {}
    for hit in sorted(hits_of_all, key=lambda hit: hit.score):
        best[hit.passage.id] = hit
    return sorted(best.values(), key=lambda hit: -hit.score)[: options.top_k]


async def _ask_and_record(
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


def _lines_or_none(rows: Iterable[object]) -> str:
    """Clues or facts as a prompt shows them, one per line; a section is never left empty."""
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
