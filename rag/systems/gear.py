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
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from heapq import nsmallest
from itertools import chain, zip_longest
from typing import Literal

from tripletune.core.calls import UnusableReply
from tripletune.core.data.answers import normalize_answer
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import Step, one_line
from tripletune.core.data.triples import FoundTriples, Triple
from tripletune.core.options import setting
from tripletune.llm.question_client import load_prompts
from tripletune.llm.reading.questions import next_question
from tripletune.llm.reading.verdicts import AnswerableVerdict, answerable_verdict
from tripletune.llm.refusals import asks_nothing, is_refusal
from tripletune.llm.reply_triples import find_triples
from tripletune.rag import Trace
from tripletune.rag.chat_generator import COMMON_READER, answer_from, finish, prompt_files, show_passages
from tripletune.rag.evidence import Found
from tripletune.rag.search.retrievers import (
    Retrieved,
    Retriever,
    fact_lines,
    hits_of,
    passages_of_hits,
    ranking_of,
    verbalise,
    verbalise_all,
    words_in,
)
from tripletune.rag.search.text_index import Ranking, reciprocal_rank_fusion
from tripletune.rag.search.triple_index import TripleIndex
from tripletune.rag.systems import System, Tools, client_of, need
from tripletune.rag.systems._rounds import RoundOptions

Scoring = Literal["concat", "mean"]
Compare = Callable[[str, Sequence[str]], Awaitable[Sequence[float]]]
_NAMES = ("gear_read", "gear_reason", "gear_rewrite", *COMMON_READER)


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
    """Answer one question with GEAR; see `System.run`.

    The variant "agent" searches in rounds with a memory of facts, the other one expands the question's triples once.
    Both end with a ranking of passages, of which the first `read_k` are read.
    """
    agent = _Gear(question, tools, options)
    if options.variant == "agent":
        ranking = await agent.rank_in_rounds(search)
    else:
        ranking = await agent.expand(search)
    trace = agent.trace
    trace.details["ranking"] = [agent.passages[position].id for position, _ in ranking]
    best = agent.first(ranking, options.read_k)
    facts_by_round = [fact_lines(triples) for triples in agent.gist_by_round]
    answer = partial(answer_from, question, best, agent.llm, options)
    return await finish(trace, options, agent.llm, Found([best], facts_by_round), answer)


class _Gear:
    """The searches, the gist memory and the calls of one question.

    Args:
        question: The question as the model reads it.
        tools: Models and indexes.
        options: The options of GEAR.

    Attributes:
        gist: The proximal triples that the agent remembers (G of the paper); `gist_by_round` has those of each round.
        passages: All passages of the corpus by position.
    """

    def __init__(self, question: str, tools: Tools, options: GearOptions) -> None:
        self.question = question
        self.options = options
        self.trace = Trace(question, stop_reason="single_pass")
        self.retriever: Retriever = need(tools, "retriever", "gear")
        self.triples: TripleIndex = need(tools, "triples", "gear")
        self.similarity: Compare = need(tools, "reranker", "gear").scores
        self.llm = client_of("gear", tools, self.trace, load_prompts(_NAMES, options.prompts), options.repairs)
        self.passages = self.triples.passages
        self.gist: list[Triple] = []
        self.gist_by_round: list[list[Triple]] = []
        # What was read: the question, the ids of the passages, and the triples of the reply.
        self._readings: list[tuple[str, frozenset[str], list[Triple]]] = []

    async def rank_in_rounds(self, query: str) -> Ranking:
        """The agent (section 5): retrieve, remember, reason, rewrite; then rank the memory's passages too (eq. 9).

        Sets `stop_reason` of the trace: the memory answers the question, a reply can't be read, the last round is over,
        or the rewriting asks nothing new. Each query has its ranking, and all are fused at the end.

        Args:
            query: The first query, the question itself.
        """
        queries_so_far: set[str] = set()
        rankings: list[Ranking] = []
        self.trace.stop_reason = ""
        while True:
            queries_so_far.add(normalize_answer(query))
            rankings.append(await self.expand(query))
            shown = self.first(rankings[-1], self.options.max_passages)
            proximal = await self.read(self.question, shown, self.gist)
            new = [triple for triple in proximal if triple not in self.gist]
            self.gist += new
            self.gist_by_round.append(new)
            verdict = await self.reason()
            if verdict is None:
                self.trace.stop_reason = "malformed"
            elif verdict.is_answerable:
                self.trace.stop_reason = "sufficient"
            elif len(rankings) == self.options.max_rounds:
                self.trace.stop_reason = "max_rounds"
            else:
                query = await self.rewrite(verdict.reason)
                if asks_nothing(query):
                    self.trace.stop_reason = "no_question"
                elif normalize_answer(query) in queries_so_far:
                    self.trace.stop_reason = "repeated_subquery"
            if self.trace.stop_reason:
                break
        self.trace.details["gist"] = [triple.as_list() for triple in self.gist]
        return reciprocal_rank_fusion([*await self.link(), *rankings])

    async def expand(self, query: str) -> Ranking:
        """Retrieve, expand along the graph (section 4, eq. 1 to 3), and return positions of passages, best first."""
        hits = await self.retriever.retrieve(query, self.options.top_k)
        seeds = await self.seeds(query, hits)
        beams = await diverse_beam_search(query, seeds, self.triples, self.similarity, self.options)
        rows = breadth_first(beams)
        fused = reciprocal_rank_fusion([self.passages_of(rows), ranking_of(hits)])
        triples = tuple(self.triples[row] for row in rows)
        self.trace.add_step(Step(query, triples), hits_of(fused, self.passages))
        return fused

    async def seeds(self, query: str, hits: Sequence[Retrieved]) -> list[int]:
        """Rows of the triples from which the graph is expanded: all of the passages, or those the model read."""
        rows: list[int] = []
        if self.options.variant == "naive":
            for hit in hits:
                rows += [int(row) for row in self.triples.rows_of(hit.position)]
            return rows
        proximal = await self.read(query, passages_of_hits(hits))
        if proximal:
            # tripleLink (eq. 2): the stored triple that is most like each proximal triple.
            for ranking in await self.triples.search(verbalise_all(proximal), 1):
                rows += [row for row, _ in ranking]
        return rows

    async def link(self) -> list[Ranking]:
        """passageLink (eq. 8 to 11): rank the passages for each remembered triple, found directly and by triples."""
        k = self.options.top_k
        texts = verbalise_all(self.gist)
        rankings: list[Ranking] = []
        for text, by_triples in zip(texts, await self.gather(texts, k)):
            directly = ranking_of(await self.retriever.retrieve(text, k))
            rankings.append(reciprocal_rank_fusion([directly, by_triples])[:k])
        return rankings

    async def gather(self, texts: Sequence[str], k: int) -> list[Ranking]:
        """The first `k` distinct passages of the triples that each text finds (eq. 10).

        Several triples may come from one passage, so the search goes deeper until each text has `k` passages or its
        triples are used up.
        """
        if not texts:
            return []
        depth = k  # triples that are searched; several of them may come from one passage
        while True:
            all_found = True
            passages: list[Ranking] = []
            for ranking in await self.triples.search(texts, depth):
                passages.append(self.passages_of(row for row, _ in ranking)[:k])
                if len(passages[-1]) < k and len(ranking) == depth:
                    all_found = False
            if all_found:
                return passages
            depth *= 4

    async def read(self, question: str, passages: Sequence[Passage], gist: Sequence[Triple] = ()) -> list[Triple]:
        """The proximal triples of passages (eq. 1, and with the memory `gist` eq. 4); empty if no reply is readable.

        A reading of the same question is used again if it covered all these passages, which saves a call per round.
        """
        ids = frozenset(passage.id for passage in passages)
        for asked, read_before, triples in self._readings:
            if asked == one_line(question) and ids <= read_before:
                return triples
        facts = f"Facts found before:\n{_shown(gist)}\n\n" if gist else ""
        user = f"{show_passages(passages)}\n\n{facts}Question: {one_line(question)}"
        try:
            reply = await self.llm.ask("read", user, read_facts, self.options.max_thought_tokens)
        except UnusableReply as error:
            self.trace.tally(f"read.{error.reason}")
            return []
        self._readings.append((one_line(question), ids, list(reply.triples)))
        return list(reply.triples)

    async def reason(self) -> AnswerableVerdict | None:
        """Ask whether the memory answers the question (eq. 6), and record the reply; None if it is unreadable.

        An unreadable reply counts as malformed and ends the loop.
        """
        replies: list[str] = []

        def read(text: str) -> AnswerableVerdict:
            replies.append(text)
            return answerable_verdict(text)

        user = f"Facts:\n{_shown(self.gist)}\n\nQuestion: {one_line(self.question)}"
        try:
            verdict = await self.llm.ask("reason", user, read, self.options.max_thought_tokens)
        except UnusableReply:
            self.trace.malformed += 1
            self.trace.add_action(replies[-1], None)
            return None
        self.trace.add_action(replies[-1], "answerable" if verdict.is_answerable else "not_answerable")
        return verdict

    async def rewrite(self, reason: str) -> str:
        """Ask for the next query (eq. 7); after an empty reply it is the question."""
        user = f"Facts:\n{_shown(self.gist)}\n\nQuestion: {one_line(self.question)}\n\nReason: {one_line(reason)}"
        asked = "\n".join(step.query for step in self.trace.steps)
        user = f"{user}\n\nAsked before:\n{asked}"
        query = await self.llm.ask("rewrite", user, next_question, self.options.max_thought_tokens) or self.question
        self.trace.actions[-1].subquery = query
        return query

    def first(self, ranking: Ranking, count: int) -> list[Passage]:
        """The first passages of a ranking."""
        return [self.passages[position] for position, _ in ranking[:count]]

    def passages_of(self, rows: Iterable[int]) -> Ranking:
        """The distinct passages that state triples, in the order of the triples; without scores."""
        positions: dict[int, None] = {}
        for row in rows:
            positions |= dict.fromkeys(int(position) for position in self.triples.passages_of(row))
        return [(position, 0.0) for position in positions]


def read_facts(text: str) -> FoundTriples:
    """Read the triples of a reply; a reply that says in any words that there are none has none."""
    try:
        return find_triples(text)
    except UnusableReply:
        if not is_refusal(text):
            raise
        return FoundTriples(())


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
    width = options.width
    gamma = 2 * options.width if options.gamma is None else options.gamma
    compare = partial(_similarities, query, graph, similarity, options.scoring)
    starts = [(row,) for row in sorted(set(seeds))]
    beams = _best([Beam(rows, score) for rows, score in zip(starts, await compare(starts))], width)
    for _ in range(options.length - 1):
        # This runs in a thread, because an entity may have tens of thousands of neighbours.
        extensions = await asyncio.to_thread(_extensions, query, beams, graph, options.neighbours)
        if not any(extensions):
            break
        scores = iter(await compare(list(chain.from_iterable(extensions))))
        groups: list[list[Beam]] = []
        zero = 0.0
        for beam, longer in zip(beams, extensions):
            groups.append([])
            for rows in longer:
                score = beam.score + next(scores)
                groups[-1].append(Beam(rows, score))
                zero = min(zero, score)
        weighted: list[Beam] = []
        for group in groups:
            weighted += _diverse(group, gamma, zero)
        beams = _best(weighted, width)
    return beams


def _diverse(group: list[Beam], gamma: float, zero: float) -> list[Beam]:
    """Weight the extensions of one beam: the n-th best, counted from 0, has the weight exp(-min(n, gamma) / gamma).

    Scores are weighted relative to `zero`. With `gamma` 0 they are not weighted.
    """
    ranked = _best(group, len(group))
    if not gamma:
        return ranked
    weighted = []
    for rank, beam in enumerate(ranked):
        weight = math.exp(-min(rank, gamma) / gamma)
        weighted.append(Beam(beam.rows, (beam.score - zero) * weight + zero))
    return weighted


def _best(beams: list[Beam], count: int) -> list[Beam]:
    """The beams with the highest scores, best first."""
    return sorted(beams, key=lambda beam: (-beam.score, beam.rows))[:count]


def _extensions(query: str, beams: Sequence[Beam], graph: TripleIndex, limit: int) -> list[list[tuple[int, ...]]]:
    """By beam, its rows extended by each of its new neighbours; at most `limit`, which share most words with the query.

    A neighbour of one beam that is in another beam is not new.
    """
    in_beams = set(chain.from_iterable(beam.rows for beam in beams))
    query_words = frozenset(words_in(query))

    @cache  # beams often end at the same entity, so they have the same neighbours
    def rank(row: int) -> tuple[int, int]:
        return -len(query_words & _words(verbalise(graph[row]))), row

    extensions = []
    for beam in beams:
        neighbours = [int(row) for row in graph.neighbours(beam.rows[-1]) if row not in in_beams]
        if len(neighbours) > limit:
            neighbours = nsmallest(limit, neighbours, key=rank)
        extensions.append([(*beam.rows, row) for row in neighbours])
    return extensions


@lru_cache(maxsize=1 << 16)
def _words(text: str) -> frozenset[str]:
    return frozenset(words_in(text))


async def _similarities(
    query: str, graph: TripleIndex, similarity: Compare, scoring: Scoring, beams: Sequence[tuple[int, ...]]
) -> list[float]:
    """The similarity of the query to each beam: to its text, or the mean over its triples.

    Args:
        query: The query.
        graph: The triples of the corpus.
        similarity: Compares a text with others.
        scoring: "concat" compares with the joined texts of a beam, else each triple is compared once for all beams.
        beams: Rows of triples of the graph.

    Returns:
        A similarity per beam, in their order.
    """
    if not beams:
        return []
    if scoring == "concat":
        texts = [". ".join(_texts(beam, graph)) for beam in beams]
        return list(await similarity(query, texts))
    rows = sorted(set(chain.from_iterable(beams)))
    score_of = dict(zip(rows, await similarity(query, _texts(rows, graph))))
    means = []
    for beam in beams:
        scores = [score_of[row] for row in beam]
        means.append(sum(scores) / len(scores))
    return means


def _texts(rows: Iterable[int], graph: TripleIndex) -> list[str]:
    return verbalise_all(graph[row] for row in rows)


def breadth_first(beams: Sequence[Beam]) -> list[int]:
    """The distinct triples of beams: the first triple of every beam, then the second of every beam, and so on."""
    levels = zip_longest(*(beam.rows for beam in beams))
    rows = dict.fromkeys(chain.from_iterable(levels))
    rows.pop(None, None)  # the place of a triple that a shorter beam lacks
    return list(rows)


def _shown(triples: Sequence[Triple]) -> str:
    return "\n".join(json.dumps(triple.as_list(), ensure_ascii=False) for triple in triples) or "(none)"


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
