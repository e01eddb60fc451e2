"""What every retrieval system has in common, and the table of systems by name.

A new system is one file that defines a `System`, and one line in `SYSTEMS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tripletune.models.llm.client import LLMClient, Sampling
from tripletune.models.local.generation import Generator
from tripletune.rag.retrieval.rerank import Reranker
from tripletune.rag.retrieval.retrievers import Retriever
from tripletune.rag.trace import Trace
from tripletune.rag.triples.store import TripleSource

Evidence = Literal["triples", "text"]
FirstQuery = Literal["main_question", "generated"]

SYSTEMS: dict[str, str] = {
    "no_retrieval": "tripletune.rag.systems.baselines:NO_RETRIEVAL",
    "standard": "tripletune.rag.systems.baselines:STANDARD",
    "ras": "tripletune.rag.systems.ras:RAS",
    "cirag": "tripletune.rag.systems.cirag.loop:CIRAG",
}


@dataclass(frozen=True, slots=True)
class Tools:
    """What a system works with; a system says in `System.model` which kind of model it needs.

    Attributes:
        planner: Plans; usually the same Graph-LLM as `answerer` (figure 3 of the RAS paper swaps them).
        answerer: Answers.
        retriever: Searches the corpus.
        store: Triples extracted before, by passage.
        llm: Answers the prompts of a prompt-based system.
        integrator: Takes the place of `llm` in CIRAG's integration phase, for example a distilled student.
        sampling: How the replies of `llm` and `integrator` are drawn; None is greedy.
        reranker: Ranks triples by a query.
        question_id: The question under way, for the ledger; the harness sets it.
    """

    planner: Generator | None = None
    answerer: Generator | None = None
    retriever: Retriever | None = None
    store: TripleSource | None = None
    llm: LLMClient | None = None
    integrator: LLMClient | None = None
    sampling: Sampling | None = None
    reranker: Reranker | None = None
    question_id: str = ""

    async def close(self) -> None:
        """Close the LLM clients: what they have received is written."""
        for client in {id(one): one for one in (self.llm, self.integrator) if one is not None}.values():
            await client.close()


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """Settings of a run; the defaults are the RAS paper's (sections 4.1, F.2).

    Attributes:
        max_rounds: Most rounds of retrieval; with 0 the question is answered directly.
        top_k: Passages a round.
        planning: False retrieves once with the question and answers (ablation "without planning").
        retrieval: False answers directly (ablation "without retrieval").
        evidence: What the model reads of a step: its "triples", or the "text" of its passages.
        first_query: q_0 is the "main_question" (paper), or the first sub-query the planner "generated".
        triples_per_step: Most triples a step, in the order of the passages; None keeps all.
        triples_share: Share of a step's triples that is kept, drawn at random, in the order of the passages (figure 4).
        share_seed: Seed of that draw; the paper averages over five.
        graph: False leaves the graph token out of the prompts (ablation "No GraphEncode" at inference).
        max_plan_tokens: Longest planning reply; table 4 has labels of up to 62 tokens.
        max_answer_tokens: Longest answer.

    Raises:
        ValueError: a value is out of range; all problems are named at once.
    """

    max_rounds: int = 5
    top_k: int = 5
    planning: bool = True
    retrieval: bool = True
    evidence: Evidence = "triples"
    first_query: FirstQuery = "main_question"
    triples_per_step: int | None = None
    triples_share: float = 1.0
    share_seed: int = 0
    graph: bool = True
    max_plan_tokens: int = 64
    max_answer_tokens: int = 100

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value}: it must be at least {least}"
            for name, value, least in (
                ("max_rounds", self.max_rounds, 0),
                ("top_k", self.top_k, 1),
                ("triples_per_step", self.triples_per_step, 1),
                ("max_plan_tokens", self.max_plan_tokens, 1),
                ("max_answer_tokens", self.max_answer_tokens, 1),
            )
            if value is not None and value < least
        ]
        if not 0 < self.triples_share <= 1:
            problems.append(f"triples_share is {self.triples_share}: it must be above 0 and at most 1")
        for name, chosen, known in (
            ("evidence", self.evidence, Evidence),
            ("first_query", self.first_query, FirstQuery),
        ):
            if chosen not in get_args(known):
                problems.append(f"{name} is {chosen!r}: it must be one of {', '.join(get_args(known))}")
        if problems:
            raise ValueError("; ".join(problems))


@dataclass(frozen=True, slots=True)
class System:
    """A way of answering questions.

    Attributes:
        name: Its name on the command line.
        summary: One sentence about it.
        run: `(question, search, tools, options) -> Trace`; `search` is the question as it is searched, without the
            instruction or the choices a task may add to it.
        needs_corpus: Whether it retrieves under these options.
        needs_triples: Whether it reads triples from a store under these options.
        needs_reranker: Whether it ranks triples by a query under these options.
        options: The class of its options; the fields' defaults are its paper's.
        model: What it works with: a "graph_llm" (planner and answerer), or an "llm" that it prompts.
        files: Digests of the files that its results depend on under these options, by name.
    """

    name: str
    summary: str
    run: Callable[[str, str, Tools, Any], Awaitable[Trace]]
    needs_corpus: Callable[[Any], bool]
    needs_triples: Callable[[Any], bool]
    needs_reranker: Callable[[Any], bool] = lambda options: False
    options: type[Any] = LoopOptions
    model: Literal["graph_llm", "llm"] = "graph_llm"
    files: Callable[[Any], Mapping[str, str]] = lambda options: {}


def load_system(name: str) -> System:
    """Import a system by name.

    Raises:
        ValueError: there is no such system.
    """
    if name not in SYSTEMS:
        raise ValueError(f"system {name!r} is not one of {', '.join(SYSTEMS)}")
    module, attribute = SYSTEMS[name].split(":")
    return getattr(importlib.import_module(module), attribute)


def need_retriever(tools: Tools, system: str) -> Retriever:
    """The retriever of `tools`.

    Raises:
        ValueError: there is none.
    """
    if tools.retriever is None:
        raise ValueError(f"system {system!r} retrieves passages, and no retriever was given: name a corpus")
    return tools.retriever


def need_models(tools: Tools, system: str) -> tuple[Generator, Generator]:
    """Planner and answerer of `tools`.

    Raises:
        ValueError: one of them is missing.
    """
    if tools.planner is None or tools.answerer is None:
        raise ValueError(f"system {system!r} works with a Graph-LLM, and none was given: name a model")
    return tools.planner, tools.answerer


def need_llm(tools: Tools, system: str) -> LLMClient:
    """The LLM client of `tools`.

    Raises:
        ValueError: there is none.
    """
    if tools.llm is None:
        raise ValueError(f"system {system!r} prompts a language model, and none was given: name a teacher")
    return tools.llm
