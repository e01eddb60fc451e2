"""GEAR: retrieval expanded along a graph of triples, and an agent with a gist memory (sections 4 and 5).

`variant` takes a part alone: "naive" and "sync" retrieve once (NaiveGE, SyncGE), "agent" is all of it. Where the paper
leaves a choice: a triple that several passages state leads to all of them; a round reads the 15 best passages of its
fused list; a next question that was searched before ends the loop; the answer is read from the 5 best passages
(table 3). An iteration takes two calls to read, one to reason, and one to rewrite unless it is the last.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tripletune.models.data.records import Passage, Step, normalize_answer, one_line
from tripletune.models.data.triples import Triple
from tripletune.models.llm.replies import UnusableReply, ask, find_triples, without_thoughts
from tripletune.models.options import require, setting
from tripletune.rag.chat_generator import READER, answer_from, prompt_files, prompts_of, show_passages
from tripletune.rag.graph import Scoring, breadth_first, diverse_beam_search
from tripletune.rag.retrievers import Retrieved, verbalise
from tripletune.rag.systems import QuestionClient, System, Tools, need
from tripletune.rag.text_index import Ranking, reciprocal_rank_fusion
from tripletune.rag.trace import Trace, TraceAction

Variant = Literal["agent", "sync", "naive"]
_NAMES = ("gear_read", "gear_reason", "gear_rewrite", READER)
_TUPLE = re.compile(r"\((\s*\".*?\"\s*)\)")
_ANSWERABLE = re.compile(r"answerable[ \t*_]*:[ \t*_]*(yes|no)\b(.*)", re.IGNORECASE | re.DOTALL)
_NEXT = re.compile(r"\A(?:next )?question[ \t*_]*:\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GearOptions:
    """Settings of a run; the defaults are the paper's (appendix C).

    Raises:
        ValueError: a value is out of range; all problems are named at once.
    """

    variant: Variant = setting("agent", "the agent, or one retrieval expanded from what a model reads (sync), or from "
                               "all triples of the passages (naive)", choices=get_args(Variant))  # fmt: skip
    max_rounds: int = setting(4, "most rounds of the agent: 4 on MuSiQue, 2 on HotpotQA and 2Wiki", at_least=1)
    top_k: int = setting(10, "passages of a retrieval before it is expanded, and that a gist triple leads to", at_least=1)
    max_passages: int = setting(15, "most passages that a round reads", at_least=1)
    read_k: int = setting(5, "passages that the answer is read from (table 3)", at_least=1)
    width: int = setting(10, "beams", at_least=1)
    length: int = setting(2, "triples in a beam", at_least=1)
    neighbours: int = setting(100, "most neighbours that a beam is extended by", at_least=1)
    gamma: float = setting(20.0, "from this rank on an extension weighs 1/e; 0 is 'w/o diversity' (table 7)", at_least=0)
    scoring: Scoring = setting("concat", "what is compared with the query: a whole beam, or the mean of its triples, "
                               "which takes far fewer embeddings", choices=get_args(Scoring))  # fmt: skip
    repairs: int = setting(1, "most repair turns for a reply that can't be used; the paper has none", at_least=0)
    prompts: str | None = setting(None, "folder with prompts of one's own: gear_*.md, answer_passages.md")
    max_read_tokens: int = setting(512, "longest reply with facts", at_least=1)
    max_reason_tokens: int = setting(256, "longest reply of the other steps", at_least=1)
    max_answer_tokens: int = setting(100, "longest answer", at_least=1)

    def __post_init__(self) -> None:
        require(self)


async def gear(question: str, search: str, tools: Tools, options: GearOptions) -> Trace:
    """Answer one question with GEAR; see `System.run`."""
    started = time.perf_counter()
    agent = _Gear(question, tools, options)
    ranking = await agent.answer_questions(search) if options.variant == "agent" else await agent.expand(search)
    trace = agent.trace
    trace.details["ranking"] = [agent.passages[position].id for position, _ in ranking]
    trace.answer = await answer_from(
        "gear", question, agent.first(ranking, options.read_k), agent.llm, agent.prompts, options.max_answer_tokens
    )
    trace.seconds = time.perf_counter() - started
    return trace


class _Gear:
    """One question: its searches, its gist memory and its calls."""

    def __init__(self, question: str, tools: Tools, options: GearOptions) -> None:
        self.question, self.options, self.trace = question, options, Trace(question, stop_reason="single_pass")
        self.retriever, self.triples = need(tools, "retriever", "gear"), need(tools, "triples", "gear")
        self.similarity = need(tools, "reranker", "gear").scores
        self.llm = QuestionClient(need(tools, "llm", "gear"), self.trace, tools.question_id, tools.sampling)
        self.prompts, self.passages = prompts_of(options.prompts, _NAMES), self.triples.passages
        self.gist: list[Triple] = []

    async def answer_questions(self, query: str) -> Ranking:
        """The agent (section 5): retrieve, remember, reason and rewrite; then all that the memory leads to (eq. 9)."""
        asked, rankings = set[str](), list[Ranking]()
        self.trace.stop_reason = ""
        while not self.trace.stop_reason:
            asked.add(normalize_answer(query))
            rankings.append(await self.expand(query))
            found = await self.read(self.question, self.first(rankings[-1], self.options.max_passages), self.gist)
            self.gist += [triple for triple in found if triple not in self.gist]
            why = await self.reason()
            if self.trace.stop_reason or len(rankings) == self.options.max_rounds:
                self.trace.stop_reason = self.trace.stop_reason or "max_rounds"
                break
            query = await self.rewrite(why)
            if normalize_answer(query) in asked:
                self.trace.stop_reason = "repeated_subquery"
        self.trace.details["gist"] = [triple.as_list() for triple in self.gist]
        return reciprocal_rank_fusion([*await self.link(self.gist), *rankings])

    async def expand(self, query: str) -> Ranking:
        """Retrieval expanded along the graph (section 4, eq. 1 to 3); positions of passages, best first."""
        hits: list[Retrieved] = await self.retriever.retrieve(query, self.options.top_k)
        if self.options.variant == "naive":
            seeds = [int(row) for hit in hits for row in self.triples.rows_of(hit.position)]
        else:
            proximal = await self.read(query, [hit.passage for hit in hits])
            linked = await self.triples.search([verbalise(triple) for triple in proximal], 1) if proximal else []
            seeds = [row for ranking in linked for row, _ in ranking]
        options = self.options
        beams = await diverse_beam_search(
            query, seeds, self.triples, self.similarity, width=options.width, length=options.length,
            neighbours=options.neighbours, gamma=options.gamma, scoring=options.scoring,
        )  # fmt: skip
        rows = breadth_first(beams)
        initial = [(hit.position, hit.score) for hit in hits]
        fused = reciprocal_rank_fusion([self.passages_of(rows), initial])
        found = [Retrieved(self.passages[position], score, position) for position, score in fused]
        self.trace.add_step(Step(query, tuple(self.triples[row] for row in rows)), found)
        return fused

    async def link(self, triples: Sequence[Triple]) -> list[Ranking]:
        """passageLink (eq. 10 and 11): the passages that a triple finds, and those of the triples that it finds."""
        if not triples:
            return []
        texts, k = [verbalise(triple) for triple in triples], self.options.top_k
        rankings = []
        for text, rows in zip(texts, await self.triples.search(texts, k)):
            hits = await self.retriever.retrieve(text, k)
            direct = [(hit.position, hit.score) for hit in hits]
            rankings.append(reciprocal_rank_fusion([direct, self.passages_of(row for row, _ in rows)])[:k])
        return rankings

    async def read(self, question: str, passages: Sequence[Passage], known: Sequence[Triple] = ()) -> list[Triple]:
        """The proximal triples of passages; none where no reply could be read."""
        facts = f"Facts found before:\n{_shown(known)}\n\n" if known else ""
        user = f"{show_passages(passages)}\n\n{facts}Question: {one_line(question)}"
        reader, limit = self.llm.up_to(self.options.max_read_tokens), self.options.repairs
        try:
            return await ask(self.llm, self.prompts.chat("gear_read", user), _read_triples, role="gear.read",
                             sampling=reader, repairs=limit)  # fmt: skip
        except UnusableReply as error:
            self.trace.tally(f"read.{error.reason}")
            return []

    async def reason(self) -> str:
        """Why the memory does not answer the question (eq. 6); the trace says when it does, or nothing can be read."""
        replies: list[str] = []

        def parse(text: str) -> re.Match[str]:
            replies.append(text)
            if match := _ANSWERABLE.search(without_thoughts(text)):
                return match
            raise UnusableReply("no_verdict", 'Begin with the line "Answerable: Yes" or "Answerable: No".')

        user = f"Facts:\n{_shown(self.gist)}\n\nQuestion: {one_line(self.question)}"
        limits = {"sampling": self.llm.up_to(self.options.max_reason_tokens), "repairs": self.options.repairs}
        try:
            match = await ask(self.llm, self.prompts.chat("gear_reason", user), parse, role="gear.reason", **limits)
        except UnusableReply:
            self.trace.stop_reason, match = "malformed", None
        answerable = match is not None and match[1].lower() == "yes"
        self.trace.malformed += match is None
        action = None if match is None else "answerable" if answerable else "not_answerable"
        self.trace.actions.append(TraceAction(replies[-1], action))
        if answerable:
            self.trace.stop_reason = "sufficient"
        return re.sub(r"\A\W*why\W*", "", match[2], flags=re.IGNORECASE).strip() if match else ""

    async def rewrite(self, why: str) -> str:
        """The next query (eq. 7); an empty reply asks the question again."""
        user = f"Facts:\n{_shown(self.gist)}\n\nQuestion: {one_line(self.question)}\n\nReason: {one_line(why)}"
        reply = await self.llm.chat(self.prompts.chat("gear_rewrite", user), role="gear.rewrite",
                                    sampling=self.llm.up_to(self.options.max_reason_tokens))  # fmt: skip
        lines = _NEXT.sub("", without_thoughts(reply.text).strip()).splitlines()
        self.trace.actions[-1].subquery = lines[0].strip() if lines else self.question
        return self.trace.actions[-1].subquery

    def first(self, ranking: Ranking, count: int) -> list[Passage]:
        """The best passages of a ranking."""
        return [self.passages[position] for position, _ in ranking[:count]]

    def passages_of(self, rows: Iterable[int]) -> Ranking:
        """The passages that state triples, in the order of the triples, each once."""
        return [(position, 0.0) for position in
                dict.fromkeys(int(one) for row in rows for one in self.triples.passages_of(row))]  # fmt: skip


def _shown(triples: Sequence[Triple]) -> str:
    return "\n".join(json.dumps(triple.as_list(), ensure_ascii=False) for triple in triples) or "(none)"


def _read_triples(text: str) -> list[Triple]:
    """Triples as JSON lists, or as Python tuples, as in the paper's prompt."""
    return list(find_triples(_TUPLE.sub(r"[\1]", text)).triples)


SYSTEM = System(
    name="gear",
    summary="expands retrieval along the graph of triples, remembers facts, asks on until they answer",
    run=gear,
    needs_corpus=lambda options: True,
    needs_triples=lambda options: True,
    needs_reranker=lambda options: True,
    options=GearOptions,
    model="llm",
    files=prompt_files(*_NAMES, names=_NAMES),
)
