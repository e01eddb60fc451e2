"""GEAR: retrieval expanded along a graph of triples, and an agent with a gist memory (sections 4 and 5).

`variant` "agent" is the whole system; "naive" and "sync" only retrieve once (NaiveGE, SyncGE). Where the paper leaves a
choice: a triple leads to all passages that state it; a round reads the 15 best passages of its fused list; a next
question that was searched before ends the loop, and so does a verdict that cannot be read after a repair turn; the
memory keeps each triple once (eq. 5 repeats it); the answer comes from the 5 best passages (table 3). An iteration
makes two calls to read and one call to reason; every iteration except the last also makes one call to rewrite.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from heapq import nsmallest
from itertools import zip_longest
from typing import Literal

from tripletune.core.calls import UnusableReply
from tripletune.core.data.answers import normalize_answer
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import Step, one_line
from tripletune.core.data.triples import Triple
from tripletune.core.options import setting
from tripletune.llm.question_client import load_prompts
from tripletune.llm.refusals import asks_nothing
from tripletune.llm.reply_json import without_thoughts
from tripletune.llm.reply_triples import find_triples
from tripletune.rag import Trace
from tripletune.rag.chat_generator import READER, Found, answer_from, finish, prompt_files, show_passages
from tripletune.rag.search.retrievers import Retrieved, verbalise, words_in
from tripletune.rag.search.text_index import Ranking, reciprocal_rank_fusion
from tripletune.rag.search.triple_index import TripleIndex
from tripletune.rag.systems import System, Tools, client_of, need
from tripletune.rag.systems._rounds import RoundOptions

Scoring = Literal["concat", "mean"]
Compare = Callable[[str, Sequence[str]], Awaitable[Sequence[float]]]
_NAMES = ("gear_read", "gear_reason", "gear_rewrite", READER)
_ANSWERABLE = re.compile(r"answerable[ \t*_]*:[ \t*_]*(yes|no)\b(.*)", re.IGNORECASE | re.DOTALL)
_NEXT = re.compile(r"\A(?:next )?question[ \t*_]*:\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GearOptions(RoundOptions):
    """Options of GEAR; defaults are the paper's (appendix C), which allows 4 rounds on MuSiQue, 2 elsewhere."""

    variant: Literal["agent", "sync", "naive"] = setting(
        "agent", "agent: the whole loop; expand once from facts that the model read (sync) or from all facts (naive)"
    )
    top_k: int = setting(10, "passages to retrieve before an expansion, and per remembered triple", at_least=1)
    read_k: int = setting(5, "passages to answer from (table 3)", at_least=1)
    width: int = setting(10, "number of beams", at_least=1)
    length: int = setting(2, "triples in a beam", at_least=1)
    neighbours: int = setting(100, "maximum neighbours that extend a beam", at_least=1)
    gamma: float | None = setting(
        None, "rank from which an extension has the weight 1/e; none: 2 * width; 0: 'w/o diversity'", at_least=0
    )
    scoring: Scoring = setting("concat", "compare the query with whole beams (concat), or with each triple (mean)")
    max_thought_tokens: int = setting(512, "maximum tokens of a reply with facts, a verdict or a question", at_least=1)


async def gear(question: str, search: str, tools: Tools, options: GearOptions) -> Trace:
    """Answer one question with GEAR; see `System.run`."""
    agent = _Gear(question, tools, options)
    ranking = await agent.answer_questions(search) if options.variant == "agent" else await agent.expand(search)
    trace = agent.trace
    trace.details["ranking"] = [agent.passages[position].id for position, _ in ranking]
    best, facts = agent.first(ranking, options.read_k), [" | ".join(triple.as_list()) for triple in agent.gist]
    own = partial(answer_from, question, best, agent.llm, options)
    return await finish(trace, options, agent.llm, Found(best, facts), own)


class _Gear:
    """The searches, the gist memory and the calls of one question."""

    def __init__(self, question: str, tools: Tools, options: GearOptions) -> None:
        self.question, self.options, self.trace = question, options, Trace(question, stop_reason="single_pass")
        self.retriever, self.triples = need(tools, "retriever", "gear"), need(tools, "triples", "gear")
        self.similarity = need(tools, "reranker", "gear").scores
        self.llm = client_of("gear", tools, self.trace, load_prompts(_NAMES, options.prompts), options.repairs)
        self.passages = self.triples.passages
        self.gist: list[Triple] = []

    async def answer_questions(self, query: str) -> Ranking:
        """The agent (section 5): retrieve, remember, reason, rewrite; then find the memory's passages (eq. 9)."""
        asked, rankings = set[str](), list[Ranking]()
        self.trace.stop_reason = ""
        while not self.trace.stop_reason:
            asked.add(normalize_answer(query))
            rankings.append(await self.expand(query))
            found = await self.read(self.question, self.first(rankings[-1], self.options.max_passages), self.gist)
            self.gist += [triple for triple in found if triple not in self.gist]
            why = await self.reason()
            if not self.trace.stop_reason and len(rankings) == self.options.max_rounds:
                self.trace.stop_reason = "max_rounds"
            if not self.trace.stop_reason and asks_nothing(query := await self.rewrite(why)):
                self.trace.stop_reason = "no_question"
            elif normalize_answer(query) in asked and not self.trace.stop_reason:
                self.trace.stop_reason = "repeated_subquery"
        self.trace.details["gist"] = [triple.as_list() for triple in self.gist]
        return reciprocal_rank_fusion([*await self.link(), *rankings])

    async def expand(self, query: str) -> Ranking:
        """Retrieve, expand along the graph (section 4, eq. 1 to 3), and return positions of passages, best first."""
        hits: list[Retrieved] = await self.retriever.retrieve(query, self.options.top_k)
        if self.options.variant == "naive":
            seeds = [int(row) for hit in hits for row in self.triples.rows_of(hit.position)]
        else:
            proximal = await self.read(query, [hit.passage for hit in hits])
            linked = await self.triples.search([verbalise(triple) for triple in proximal], 1) if proximal else []
            seeds = [row for ranking in linked for row, _ in ranking]
        beams = await diverse_beam_search(query, seeds, self.triples, self.similarity, self.options)
        rows = breadth_first(beams)
        fused = reciprocal_rank_fusion([self.passages_of(rows), [(hit.position, hit.score) for hit in hits]])
        found = [Retrieved(self.passages[position], score, position) for position, score in fused]
        self.trace.add_step(Step(query, tuple(self.triples[row] for row in rows)), found)
        return fused

    async def link(self) -> list[Ranking]:
        """passageLink (eq. 8 to 11): rank the passages for each remembered triple, found directly and by triples."""
        texts, k, rankings = [verbalise(triple) for triple in self.gist], self.options.top_k, list[Ranking]()
        for text, stating in zip(texts, await self.gather(texts, k)):
            direct = [(hit.position, hit.score) for hit in await self.retriever.retrieve(text, k)]
            rankings.append(reciprocal_rank_fusion([direct, stating])[:k])
        return rankings

    async def gather(self, texts: Sequence[str], k: int) -> list[Ranking]:
        """The first `k` distinct passages of the triples that each text finds (eq. 10)."""
        found, depth, ended = list[Ranking](), k, not texts
        while not ended:
            rankings = await self.triples.search(texts, depth)
            found = [self.passages_of(row for row, _ in ranking)[:k] for ranking in rankings]
            ended = all(len(one) == k or len(ranking) < depth for one, ranking in zip(found, rankings))
            depth *= 4
        return found

    async def read(self, question: str, passages: Sequence[Passage], known: Sequence[Triple] = ()) -> list[Triple]:
        """The proximal triples of passages (eq. 1 and 4); empty if no reply could be read."""
        facts = f"Facts found before:\n{_shown(known)}\n\n" if known else ""
        user = f"{show_passages(passages)}\n\n{facts}Question: {one_line(question)}"
        try:
            return list((await self.llm.ask("read", user, find_triples, self.options.max_thought_tokens)).triples)
        except UnusableReply as error:
            self.trace.tally(f"read.{error.reason}")
            return []

    async def reason(self) -> str:
        """Ask whether the memory answers the question (eq. 6); return why it does not, and record the verdict."""
        user = f"Facts:\n{_shown(self.gist)}\n\nQuestion: {one_line(self.question)}"
        try:
            verdict = await self.llm.ask("reason", user, _read_verdict, self.options.max_thought_tokens)
        except UnusableReply as error:
            self.trace.malformed += 1
            self.trace.add_action(error.reply, None)
            self.trace.stop_reason = "malformed"
            return ""
        answerable = verdict[1].lower() == "yes"
        self.trace.add_action(verdict.string, "answerable" if answerable else "not_answerable")
        self.trace.stop_reason = "sufficient" if answerable else ""
        return re.sub(r"\A\W*why\W*", "", verdict[2], flags=re.IGNORECASE).strip()

    async def rewrite(self, why: str) -> str:
        """Ask for the next query (eq. 7); after an empty reply it is the question."""
        user = f"Facts:\n{_shown(self.gist)}\n\nQuestion: {one_line(self.question)}\n\nReason: {one_line(why)}"
        query = await self.llm.ask("rewrite", user, read_query, self.options.max_thought_tokens)
        self.trace.actions[-1].subquery = query or self.question
        return self.trace.actions[-1].subquery

    def first(self, ranking: Ranking, count: int) -> list[Passage]:
        return [self.passages[position] for position, _ in ranking[:count]]

    def passages_of(self, rows: Iterable[int]) -> Ranking:
        """The distinct passages that state triples, in the order of the triples."""
        return [(one, 0.0) for one in dict.fromkeys(int(one) for row in rows for one in self.triples.passages_of(row))]


def read_query(text: str) -> str:
    """Read the next query: the first line that is not an introduction ("Here is the question:")."""
    lines = (line.strip("*_# ") for line in without_thoughts(text).splitlines())
    return _NEXT.sub("", next((line for line in lines if line and not line.endswith(":")), "")).strip("*_ ")


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence of triples, each of which shares an entity with the previous triple.

    The score is the sum of the similarities of all prefixes to the query; better siblings reduce it.
    """

    rows: tuple[int, ...]
    score: float


async def diverse_beam_search(
    query: str, seeds: Sequence[int], graph: TripleIndex, similarity: Compare, options: GearOptions
) -> list[Beam]:
    """Expand a sub-graph from initial triples, the seeds (GEAR, algorithm 1, with the settings of appendix C.2).

    Where the paper leaves a choice: at most `neighbours` neighbours are kept, those that share most words with the
    query; if a step has negative scores, which a weight below 1 would raise, all scores are weighted relative to the
    lowest; equal scores keep the order of rows; if no beam has a new neighbour, the beams do not change.
    """
    width, gamma = options.width, 2 * options.width if options.gamma is None else options.gamma
    compare = partial(_similarities, query, graph, similarity, options.scoring)
    starts = [(row,) for row in sorted(set(seeds))]
    beams = _top([Beam(rows, score) for rows, score in zip(starts, await compare(starts))], width)
    for _ in range(options.length - 1):
        # This runs in a thread, because an entity may have tens of thousands of neighbours.
        longer = await asyncio.to_thread(_extensions, query, beams, graph, options.neighbours)
        scores = iter(await compare([rows for group in longer for rows in group]))
        groups = [[Beam(rows, beam.score + next(scores)) for rows in group] for beam, group in zip(beams, longer)]
        if not any(groups):
            break
        zero = min(0.0, *(beam.score for group in groups for beam in group))
        beams = _top([weighted for group in groups for weighted in _diverse(group, gamma, zero)], width)
    return beams


def _diverse(group: list[Beam], gamma: float, zero: float) -> list[Beam]:
    """Weight the extensions of one beam: the n-th best has the weight exp(-min(n, gamma) / gamma)."""
    ranked = _top(group, len(group))
    if not gamma:
        return ranked
    weights = [math.exp(-min(n, gamma) / gamma) for n in range(len(ranked))]
    return [Beam(beam.rows, (beam.score - zero) * weight + zero) for beam, weight in zip(ranked, weights)]


def _top(beams: list[Beam], count: int) -> list[Beam]:
    return sorted(beams, key=lambda beam: (-beam.score, beam.rows))[:count]


def _extensions(query: str, beams: Sequence[Beam], graph: TripleIndex, limit: int) -> list[list[tuple[int, ...]]]:
    """Extend each beam by each of its at most `limit` new neighbours."""
    visited, words = {row for beam in beams for row in beam.rows}, frozenset(words_in(query))
    near = [[row for row in map(int, graph.neighbours(beam.rows[-1])) if row not in visited] for beam in beams]
    # Beams often end at the same entity, so each neighbour is read only once.
    crowded = {row for rows in near if len(rows) > limit for row in rows}
    rank = {row: (-len(words & _words(verbalise(graph[row]))), row) for row in crowded}
    chosen = (nsmallest(limit, rows, key=rank.__getitem__) if len(rows) > limit else rows for rows in near)
    return [[(*beam.rows, row) for row in rows] for beam, rows in zip(beams, chosen)]


@lru_cache(maxsize=1 << 16)
def _words(text: str) -> frozenset[str]:
    return frozenset(words_in(text))


async def _similarities(
    query: str, graph: TripleIndex, similarity: Compare, scoring: Scoring, beams: Sequence[tuple[int, ...]]
) -> list[float]:
    if not beams:
        return []
    if scoring == "concat":
        return list(await similarity(query, [". ".join(verbalise(graph[row]) for row in rows) for rows in beams]))
    rows = sorted({row for beam in beams for row in beam})
    alone = dict(zip(rows, await similarity(query, [verbalise(graph[row]) for row in rows])))
    return [sum(alone[row] for row in beam) / len(beam) for beam in beams]


def breadth_first(beams: Sequence[Beam]) -> list[int]:
    """The distinct triples of beams: the first triple of every beam, then the second of every beam, and so on."""
    levels = zip_longest(*(beam.rows for beam in beams))
    return list(dict.fromkeys(row for level in levels for row in level if row is not None))


def _shown(triples: Sequence[Triple]) -> str:
    return "\n".join(json.dumps(triple.as_list(), ensure_ascii=False) for triple in triples) or "(none)"


def _read_verdict(text: str) -> re.Match[str]:
    if match := _ANSWERABLE.search(without_thoughts(text)):
        return match
    raise UnusableReply("no_verdict", 'Begin with the line "Answerable: Yes" or "Answerable: No".')


SYSTEM = System(
    name="gear",
    run=gear,
    needs_triples=lambda options: True,
    needs_reranker=lambda options: True,
    searches_triples=lambda options: True,
    searches_both=True,
    options=GearOptions,
    model="llm",
    files=prompt_files(*_NAMES, names=_NAMES),
)
