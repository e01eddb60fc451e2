"""Question answering systems, one file or package each, and their common parts.

A new system is one file in this folder that defines `SYSTEM`: it is found by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from tripletune.models.data.records import Passage
from tripletune.models.data.rendering import Evidence
from tripletune.models.llm import Generator, LLMClient, Message, Sampling
from tripletune.models.llm.question_client import NO_PROMPTS, PromptSet, QuestionClient, less_evidence
from tripletune.models.options import CheckedOptions, no_option, rare, set_values, setting
from tripletune.models.program import load_from, names_in
from tripletune.rag import Trace
from tripletune.rag.embedding import Embedder
from tripletune.rag.extract import CorpusExtraction
from tripletune.rag.retrievers import Retriever
from tripletune.rag.text_index import KeptTexts
from tripletune.rag.triple_index import TripleIndex
from tripletune.rag.triple_store import StoredTriples

FirstQuery = Literal["main_question", "generated"]
Context = Literal["none", "first", "static"]
SHORT = "--top-k 5 is short for --set top_k=5; the default is the paper's"
_PACKAGE = "tripletune.rag.systems"


@dataclass(frozen=True, slots=True)
class Tools:
    """Models and indexes of a system; `System.model` says which model it needs.

    Attributes:
        planner: The Graph-LLM that plans, usually the same as `answerer` (figure 3 of the RAS paper swaps them); None
            where `llm` does.
        answerer: The Graph-LLM that answers; None where `llm` does.
        llm: Answers the prompts of a prompt-based system.
        integrator: Replaces `llm` in CIRAG's integration phase, for example a distilled student.
        sampling: Sampling of `llm` and `integrator`; None is greedy.
        integrator_sampling: Sampling of `integrator`, if different.
        gold: The passages that support the question, for an upper bound; set per question, as the next.
        context: The passages that came with the question under way.
        keep: Opens texts that `reranker` compares with many queries; their vectors stay in the run's folder.
        question_id: The question under way, for the ledger.
    """

    planner: Generator | None = None
    answerer: Generator | None = None
    retriever: Retriever | None = None
    store: StoredTriples | CorpusExtraction | None = None
    llm: LLMClient | None = None
    integrator: LLMClient | None = None
    sampling: Sampling | None = None
    integrator_sampling: Sampling | None = None
    reranker: Embedder | None = None
    gold: tuple[Passage, ...] = ()
    context: tuple[Passage, ...] = ()
    triples: TripleIndex | None = None
    keep: Callable[[Sequence[str]], KeptTexts] | None = None
    question_id: str = ""


@dataclass(frozen=True, slots=True)
class AnswerOptions(CheckedOptions):
    """How a system's last call answers; a task says how long answers are, and whether they have paragraphs."""

    reader: Literal["paper", "common"] = setting(
        "paper", "prompt that answers from what was found: the system's (paper), or one for all systems (common)"
    )
    reader_tokens: int = rare(2000, "maximum evidence tokens of the common reader, 4 bytes each", at_least=1)
    answer: Literal["short", "long"] = rare("short", "keep all paragraphs of a long answer")
    max_answer_tokens: int = setting(100, "maximum tokens of an answer", at_least=1)


@dataclass(frozen=True, slots=True)
class LoopOptions(AnswerOptions):
    """Options of a loop; the defaults are the RAS paper's (sections 4.1, F.2).

    `--set NAME=VALUE` gives each, and those that are not `rare` have a flag (`models.program.add_short_flags`).
    """

    max_rounds: int = setting(5, "maximum rounds of retrieval; with 0 the question is answered directly", at_least=0)
    top_k: int = setting(5, "passages per round", at_least=1)
    planning: bool = setting(True, 'no: retrieve once, then answer (ablation "without planning")')
    retrieval: bool = setting(True, 'no: answer directly (ablation "without retrieval")')
    evidence: Evidence = setting("triples", "read a step's triples (the default) or its text")
    first_query: FirstQuery = setting("main_question", "q_0: main question (paper), or the planner's first sub-query")
    context: Context = rare(
        "none",
        "use of passages that come with a question: none; first, as t_0 instead of the first search (PopQA, "
        "TriviaQA); static, one per round without plans and searches (ASQA, ELI5)",
    )
    triples_per_step: int | None = rare(None, "maximum triples per step, in passage order; none keeps all", at_least=1)
    triples_share: float = rare(1.0, "share of a step's triples to keep, at random (figure 4)", above=0, at_most=1)
    triples_shuffled: bool = rare(False, "show drawn triples in the order of the draw, as in figure 4")
    share_seed: int = rare(0, "seed of the draw; the paper averages over five")
    graph: bool = rare(True, 'no: leave out the graph token (ablation "No GraphEncode" at inference)')
    max_plan_tokens: int = setting(64, "maximum tokens of a plan; table 4 has labels of up to 62", at_least=1)
    prompts: str | None = rare(None, "folder of custom prompts for a chat model: ras_*.md, answer_*.md")


@dataclass(frozen=True, slots=True)
class System:
    """A way of answering questions; what it needs depends on its options.

    Attributes:
        run: `(question, search, tools, options) -> Trace`; `search` is the question without the instruction or choices
            of a task.
        needs_corpus: Whether it retrieves.
        needs_triples: Whether it reads the triples of passages.
        needs_reranker: Whether it ranks triples by a query.
        searches_triples: Whether it searches the triples of the corpus, not its passages.
        searches_both: Whether one that searches triples searches passages, too.
        options: The class of its options; the fields' defaults are its paper's.
        model: Its model: "any" (a Graph-LLM or a chat model), an "llm" that it prompts, or "none".
        files: Digests by name of the files that change its results with a chat model.
        plans: Whether one model may plan and another answer.
        needs_gold: Whether it reads the passages that support a question.
    """

    name: str
    run: Callable[[str, str, Tools, Any], Coroutine[Any, Any, Trace]]
    needs_corpus: Callable[[Any], bool] = lambda options: True
    needs_triples: Callable[[Any], bool] = lambda options: False
    needs_reranker: Callable[[Any], bool] = lambda options: False
    searches_triples: Callable[[Any], bool] = lambda options: False
    options: type[Any] = LoopOptions
    model: Literal["any", "llm", "none"] = "any"
    files: Callable[[Any], Mapping[str, str]] = lambda options: {}
    searches_both: bool = False
    plans: bool = False
    needs_gold: bool = False


def system_names() -> list[str]:
    """Names of all systems; none is imported."""
    return names_in(_PACKAGE)


def find_system(name: str) -> System:
    """Import a system by name."""
    return load_from(_PACKAGE, name, "system").SYSTEM


def make_options(system: System, settings: Sequence[str] = (), **values: Any) -> Any:
    """An instance of `system.options`, by default the paper's; `settings`, `NAME=VALUE` texts, go before `values`."""
    owner = f"system {system.name!r}"
    given, problems = set_values(system.options, settings, owner)
    known = [item.name for item in fields(system.options)]
    problems += [no_option(owner, name, known) for name in values if name not in known]
    if problems:
        raise ValueError("; ".join(problems))
    return system.options(**{**values, **given})


def client_of(
    system: str, tools: Tools, trace: Trace, prompts: PromptSet = NO_PROMPTS, repairs: int = 1,
    shorten: Callable[[Sequence[Message]], list[Message] | None] = less_evidence,
) -> QuestionClient:  # fmt: skip
    """The chat model of a system for one question, whose calls `trace` notes; prompts too long for it lose evidence."""
    given = need(tools, "llm", system), trace, tools.question_id, tools.sampling
    return QuestionClient(*given, system=system, prompts=prompts, repairs=repairs, shorten=shorten)


def need(tools: Tools, name: str, system: str) -> Any:
    """A tool that a system can't do without."""
    tool = getattr(tools, name)
    if tool is None or tool == ():
        raise ValueError(f"system {system!r} needs {name!r}, which neither its options nor the question give")
    return tool
