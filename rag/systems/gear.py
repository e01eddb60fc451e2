"""GEAR: retrieval expanded along a graph of triples, and an agent with a gist memory (sections 4 and 5).

`variant` "agent" is the whole system; "naive" and "sync" only retrieve once (NaiveGE, SyncGE). Where the paper leaves a
choice: a triple leads to all passages that state it; a round reads the 15 best passages of its fused list; a next
question that was searched before ends the loop, and so does a verdict that cannot be read after a repair turn; the
memory keeps each triple once (eq. 5 repeats it); the answer comes from the 5 best passages (table 3). An iteration
makes two calls to read and one call to reason; every iteration except the last also makes one call to rewrite.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

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
    verbalise_all,
)
from tripletune.rag.search.text_index import Ranking, reciprocal_rank_fusion
from tripletune.rag.search.triple_index import TripleIndex
from tripletune.rag.systems import System, Tools, client_of, need
from tripletune.rag.systems._beams import Compare, Scoring, breadth_first, diverse_beam_search
from tripletune.rag.systems._rounds import RoundOptions

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
    best = agent.first_passages(ranking, options.read_k)
    facts_by_round = [fact_lines(triples) for triples in agent.gist_by_round]
    answer = partial(answer_from, question, best, agent.llm, options)
    return await finish(trace, options, agent.llm, Found([best], facts_by_round), answer)


class _Reading(NamedTuple):
    """What the model has read: the question, the ids of the passages, and the triples of its reply."""

    question: str
    passage_ids: frozenset[str]
    triples: list[Triple]


class _Gear:
    """The searches, the gist memory and the calls of one question; methods add to `gist` and `trace`.

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
        self.retriever: Retriever = need(tools.retriever, "retriever", "gear")
        self.triples: TripleIndex = need(tools.triples, "triples", "gear")
        self.similarity: Compare = need(tools.reranker, "reranker", "gear").scores
        self.llm = client_of("gear", tools, self.trace, load_prompts(_NAMES, options.prompts), options.repairs)
        self.passages = self.triples.passages
        self.gist: list[Triple] = []
        self.gist_by_round: list[list[Triple]] = []
        self._readings: list[_Reading] = []

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
            shown = self.first_passages(rankings[-1], self.options.max_passages)
            proximal = await self.read_proximal_triples(self.question, shown, self.gist)
            new = [triple for triple in proximal if triple not in self.gist]
            self.gist += new
            self.gist_by_round.append(new)
            verdict = await self.judge_gist()
            if verdict is None:
                self.trace.stop_reason = "malformed"
            elif verdict.is_answerable:
                self.trace.stop_reason = "sufficient"
            elif len(rankings) == self.options.max_rounds:
                self.trace.stop_reason = "max_rounds"
            else:
                query = await self.next_query(verdict.reason)
                if asks_nothing(query):
                    self.trace.stop_reason = "no_question"
                elif normalize_answer(query) in queries_so_far:
                    self.trace.stop_reason = "repeated_subquery"
            if self.trace.stop_reason:
                break
        self.trace.details["gist"] = [triple.as_list() for triple in self.gist]
        return reciprocal_rank_fusion([*await self.rankings_of_gist(), *rankings])

    async def expand(self, query: str) -> Ranking:
        """Retrieve, expand along the graph (section 4, eq. 1 to 3), and return positions of passages, best first."""
        hits = await self.retriever.retrieve(query, self.options.top_k)
        seeds = await self.seed_rows(query, hits)
        beams = await diverse_beam_search(query, seeds, self.triples, self.similarity, self.options)
        rows = breadth_first(beams)
        fused = reciprocal_rank_fusion([self.passages_of(rows), ranking_of(hits)])
        triples = tuple(self.triples[row] for row in rows)
        self.trace.add_step(Step(query, triples), hits_of(fused, self.passages))
        return fused

    async def seed_rows(self, query: str, hits: Sequence[Retrieved]) -> list[int]:
        """Rows of the triples from which the graph is expanded: all of the passages, or those the model read."""
        rows: list[int] = []
        if self.options.variant == "naive":
            for hit in hits:
                rows += [int(row) for row in self.triples.rows_of(hit.position)]
            return rows
        proximal = await self.read_proximal_triples(query, passages_of_hits(hits))
        if proximal:
            # tripleLink (eq. 2): the stored triple that is most like each proximal triple.
            for ranking in await self.triples.search(verbalise_all(proximal), 1):
                rows += [row for row, _ in ranking]
        return rows

    async def rankings_of_gist(self) -> list[Ranking]:
        """passageLink (eq. 8 to 11): rank the passages for each remembered triple, found directly and by triples."""
        k = self.options.top_k
        texts = verbalise_all(self.gist)
        rankings: list[Ranking] = []
        for text, by_triples in zip(texts, await self.passages_by_triples(texts, k)):
            directly = ranking_of(await self.retriever.retrieve(text, k))
            rankings.append(reciprocal_rank_fusion([directly, by_triples])[:k])
        return rankings

    async def passages_by_triples(self, texts: Sequence[str], k: int) -> list[Ranking]:
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

    async def read_proximal_triples(
        self, question: str, passages: Sequence[Passage], gist: Sequence[Triple] = ()
    ) -> list[Triple]:
        """The proximal triples of passages (eq. 1, and with the memory `gist` eq. 4); empty if no reply is readable.

        A reading of the same question is used again if it covered all these passages, which saves a call per round.
        """
        ids = frozenset(passage.id for passage in passages)
        for reading in self._readings:
            if reading.question == one_line(question) and ids <= reading.passage_ids:
                return reading.triples
        facts = f"Facts found before:\n{_fact_lists(gist)}\n\n" if gist else ""
        user = f"{show_passages(passages)}\n\n{facts}Question: {one_line(question)}"
        try:
            reply = await self.llm.ask("read", user, read_facts, self.options.max_thought_tokens)
        except UnusableReply as error:
            self.trace.tally(f"read.{error.reason}")
            return []
        self._readings.append(_Reading(one_line(question), ids, list(reply.triples)))
        return list(reply.triples)

    async def judge_gist(self) -> AnswerableVerdict | None:
        """Ask whether the memory answers the question (eq. 6), and record the reply; None if it is unreadable.

        An unreadable reply counts as malformed and ends the loop.
        """
        replies: list[str] = []

        def read(text: str) -> AnswerableVerdict:
            """Keep a reply, which becomes the recorded action, and read its verdict."""
            replies.append(text)
            return answerable_verdict(text)

        user = f"Facts:\n{_fact_lists(self.gist)}\n\nQuestion: {one_line(self.question)}"
        try:
            verdict = await self.llm.ask("reason", user, read, self.options.max_thought_tokens)
        except UnusableReply:
            self.trace.malformed += 1
            self.trace.add_action(replies[-1], None)
            return None
        self.trace.add_action(replies[-1], "answerable" if verdict.is_answerable else "not_answerable")
        return verdict

    async def next_query(self, reason: str) -> str:
        """Ask for the next query (eq. 7); after an empty reply it is the question."""
        user = f"Facts:\n{_fact_lists(self.gist)}\n\nQuestion: {one_line(self.question)}\n\nReason: {one_line(reason)}"
        asked = "\n".join(step.query for step in self.trace.steps)
        user = f"{user}\n\nAsked before:\n{asked}"
        query = await self.llm.ask("rewrite", user, next_question, self.options.max_thought_tokens) or self.question
        self.trace.actions[-1].subquery = query
        return query

    def first_passages(self, ranking: Ranking, count: int) -> list[Passage]:
        """The first `count` passages of a ranking, best first."""
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


def _fact_lists(triples: Sequence[Triple]) -> str:
    """Facts as GEAR's prompts show them: a JSON list of three fields per line."""
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
