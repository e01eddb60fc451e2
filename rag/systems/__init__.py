"""Question answering systems, one file or package each, and their common parts.

To add a system, put a file that defines `SYSTEM` into this folder; the file's name is the system's name.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from tripletune.core.calls import Generator, LLMClient, Message, Sampling
from tripletune.core.data.passages import Passage
from tripletune.core.data.rendering import Evidence
from tripletune.core.files import PROMPTS
from tripletune.core.options import CheckedOptions, no_option, rare, set_values, setting
from tripletune.core.plugins import code_digests, entry_point, load_from, names_in
from tripletune.llm.question_client import NO_PROMPTS, PromptSet, QuestionClient, less_evidence
from tripletune.rag import Trace
from tripletune.rag.triples.names import EntityNames

if TYPE_CHECKING:
    from tripletune.rag.search.embedding import Embedder
    from tripletune.rag.search.retrievers import CorpusRetriever, Retriever
    from tripletune.rag.search.text_index import KeptTexts
    from tripletune.rag.search.triple_index import TripleIndex
    from tripletune.rag.triple_store import TripleSource

T = TypeVar("T")
FirstQuery = Literal["main_question", "generated"]
Context = Literal["none", "first", "static"]
Stop = Literal["adaptive", "fixed"]
SHORT = "--top-k 5 abbreviates --set top_k=5; the defaults are the paper's"
SYSTEMS = "tripletune.rag.systems"


@dataclass(frozen=True, slots=True)
class Tools:
    """Models and indexes of a system; `System.model` says which model it needs.

    Attributes:
        planner: The Graph-LLM that plans, usually the same as `answerer` (figure 3 of the RAS paper swaps planners);
            None if `llm` plans.
        answerer: The Graph-LLM that answers; None if `llm` answers.
        llm: The chat model of a prompt-based system.
        integrator: Replaces `llm` in CIRAG's integration phase, for example a distilled student.
        sampling: Sampling of `llm` and `integrator`; None: greedy.
        integrator_sampling: Sampling of `integrator`, if it differs.
        gold: The passages that support the current question, for an upper bound.
        context: The passages that came with the current question.
        keep: Opens texts that `reranker` compares with many queries; their vectors are stored in the run's folder.
        question_id: The id of the current question, for the ledger.
        names: Names to read in place of others, for a system with triples of its own; `store` and `triples` have them.
        scored_role: The role of the answer, if its log-probabilities are needed; see `QuestionClient`.
    """

    planner: Generator | None = None
    answerer: Generator | None = None
    retriever: Retriever | None = None
    store: TripleSource | None = None
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
    names: EntityNames = field(default_factory=EntityNames)
    scored_role: str = ""


@dataclass(frozen=True, slots=True)
class AnswerOptions(CheckedOptions):
    """Options of a system's last call; a task sets the length of answers and whether they have paragraphs."""

    reader: Literal["paper", "common"] = setting(
        "paper", "prompt that answers from the evidence: the system's (paper), or one prompt for all systems (common)"
    )
    reader_tokens: int = rare(2000, "maximum evidence tokens of the common reader, 4 bytes each", at_least=1)
    answer: Literal["short", "long"] = rare("short", "length of answers; long: keep all paragraphs")
    max_answer_tokens: int = setting(100, "maximum tokens of an answer", at_least=1)
    abstain: float | None = setting(
        None, 'answer "I don\'t know" if the confidence is below this number from 0 to 1', at_least=0, at_most=1
    )
    confidence: Literal["probability", "agreement", "support"] = setting(
        "probability",
        "what abstain reads: the mean probability of the answer's tokens, how many answer_samples agree with it, or "
        "whether what was read names it",
    )
    answer_samples: int = rare(0, "answers to sample at temperature 1, to see whether they agree", at_least=0)
    logprobs: bool = rare(
        False, "ask a chat model for log-probabilities of answers (a Graph-LLM gives them without this option)"
    )

    @property
    def abstains_by_scores(self) -> bool:
        """Whether an answer without log-probabilities could be neither given nor withheld."""
        return self.abstain is not None and self.confidence == "probability"

    @property
    def needs_scores(self) -> bool:
        """Whether chat models are asked how sure they are of an answer; many servers refuse the question."""
        return self.logprobs or self.abstains_by_scores

    def check(self) -> list[str]:
        """Problems of options that need each other."""
        if self.abstain is not None and self.confidence == "agreement" and not self.answer_samples:
            return ["confidence agreement needs answers to compare: set answer_samples, for example to 5"]
        return []


@dataclass(frozen=True, slots=True)
class RetrievalOptions(AnswerOptions):
    """Options of a system that answers from passages, and the default of `System.options`."""

    top_k: int = setting(5, "passages per search", at_least=1)
    prompts: str | None = setting(None, "folder of custom prompts for a chat model")


@dataclass(frozen=True, slots=True)
class LoopOptions(AnswerOptions):
    """Options of a loop; the defaults are the RAS paper's (sections 4.1, F.2).

    `--set NAME=VALUE` sets any option; options that are not `rare` also have a flag (`core.program.add_short_flags`).
    """

    max_rounds: int = setting(5, "maximum rounds of retrieval; with 0 the question is answered directly", at_least=0)
    top_k: int = setting(5, "passages per round", at_least=1)
    planning: bool = setting(True, 'no: retrieve once, then answer (ablation "without planning")')
    retrieval: bool = setting(True, 'no: answer directly (ablation "without retrieval")')
    evidence: Evidence = setting(
        "triples",
        "what a step shows: its triples or its text; graph: only the graph token (a Graph-LLM: as in its training)",
    )
    stop: Stop = setting(
        "adaptive",
        "what ends the searches: the planner (adaptive), or only max_rounds (fixed) (a Graph-LLM: as in its training)",
    )
    first_query: FirstQuery = setting(
        "main_question",
        "q_0: main question (paper), or the planner's first sub-query (a Graph-LLM: as in its training data)",
    )
    context: Context = rare(
        "none",
        "use of passages that come with a question: none; first: as t_0, instead of the first search (PopQA, "
        "TriviaQA); static: one passage per round, without plans and searches (ASQA, ELI5)",
    )
    answer_history: Literal["steps", "merged"] = rare(
        "steps",
        "what the answer reads: each step with its sub-query (eq. 8), or all that was found as one step of the "
        "question, as if one search had found it (merged)",
    )
    triples_per_step: int | None = rare(None, "maximum triples per step; none: all", at_least=1)
    triples_chosen: Literal["first", "closest"] = rare(
        "first", "which triples_per_step stay: the first in passage order, or the closest to sub-query and question"
    )
    triples_share: float = rare(1.0, "share of a step's triples to keep, at random (figure 4)", above=0, at_most=1)
    triples_shuffled: bool = rare(False, "show randomly kept triples in random order, as in figure 4")
    share_seed: int = rare(0, "seed of triples_share; the paper averages over five seeds")
    graph: bool = rare(True, 'no: leave out the graph token (ablation "No GraphEncode" at inference)')
    max_plan_tokens: int = setting(64, "maximum tokens of a plan; labels in table 4 have up to 62", at_least=1)
    prompts: str | None = setting(None, "folder of custom prompts for a chat model: ras_*.md, answer_*.md")


@dataclass(frozen=True, slots=True)
class System:
    """A question answering system; its needs may depend on its options.

    Attributes:
        run: `(question, search, tools, options) -> Trace`; `search` is the question without a task's instruction or
            choices.
        needs_corpus: Whether the system retrieves.
        needs_triples: Whether the system reads the triples of passages.
        needs_reranker: Whether the system ranks triples by a query.
        searches_triples: Whether the system searches the triples of the corpus instead of its passages.
        searches_both: Whether a system that searches triples also searches passages.
        options: The class of the system's options, a frozen dataclass that derives from `AnswerOptions`; a setting that
            is none of its fields is refused. The fields' defaults are those of its paper.
        model: The system's model: "any" (a Graph-LLM or a chat model), "llm" (a chat model), or "none".
        files: Digests by name of the prompts and other files that change the results with a chat model, mostly from
            `prompt_files`. None: those of the shared reader, of the module's code and of the files that options name.
        plans: Whether one model may plan while another model answers.
        needs_gold: Whether the system reads the passages that support a question.
        own_triples: Whether the system has triples of its own, which read `Tools.names`.
    """

    name: str
    run: Callable[[str, str, Tools, Any], Coroutine[Any, Any, Trace]]
    needs_corpus: Callable[[Any], bool] = lambda options: True
    needs_triples: Callable[[Any], bool] = lambda options: False
    needs_reranker: Callable[[Any], bool] = lambda options: False
    searches_triples: Callable[[Any], bool] = lambda options: False
    options: type[CheckedOptions] = RetrievalOptions
    model: Literal["any", "llm", "none"] = "any"
    files: Callable[[Any], Mapping[str, str]] | None = None
    searches_both: bool = False
    plans: bool = False
    needs_gold: bool = False
    own_triples: bool = False


def code_of_system(name: str, declared: bool) -> dict[str, str]:
    """Digests by file of a system's own code and prompts.

    A system of ours is known by the version of TripleTune, and by the prompts that it declares.

    Args:
        declared: Whether the system declares its files (`System.files`).
    """
    if declared and entry_point(SYSTEMS, name) is None:
        return {}
    return code_digests(SYSTEMS, name, PROMPTS / "systems")


def system_names() -> list[str]:
    """Names of all systems, without importing them."""
    return names_in(SYSTEMS)


def find_system(name: str) -> System:
    """Import a system by name."""
    return load_from(SYSTEMS, name, "system").SYSTEM


def make_options(system: System, settings: Sequence[str] = (), **values: Any) -> CheckedOptions:
    """Build the options of a system, an object of its class `system.options`; defaults are the paper's.

    Args:
        settings: Texts `NAME=VALUE` of a user, which override `values`.
        values: Options by name, such as those of an evaluation's task or of a model's training.

    Raises:
        ValueError: All unknown names and all settings that do not fit; the class itself checks ranges and choices.
    """
    owner = f"system {system.name!r}"
    set_by_user, problems = set_values(system.options, settings, owner)
    names = [item.name for item in fields(system.options)]
    problems += [no_option(owner, name, names) for name in values if name not in names]
    if problems:
        raise ValueError("; ".join(problems))
    return system.options(**{**values, **set_by_user})


def client_of(
    system: str, tools: Tools, trace: Trace, prompts: PromptSet = NO_PROMPTS, repairs: int = 1,
    shorten: Callable[[Sequence[Message]], list[Message] | None] = less_evidence,
) -> QuestionClient:  # fmt: skip
    """The client of a system's chat model for one question; `trace` records its calls, `shorten` cuts long prompts."""
    llm = need(tools.llm, "llm", system)
    return QuestionClient(
        llm,
        trace,
        tools.question_id,
        tools.sampling,
        system=system,
        prompts=prompts,
        repairs=repairs,
        shorten=shorten,
        scored_role=tools.scored_role,
    )


def need(tool: T | None, name: str, system: str) -> T:
    """Return a tool that a system needs, or raise an error if it is missing.

    Args:
        tool: A field of `Tools`; None or no passages if neither options nor question give it.
        name: The name of the field.
        system: The name of the system.
    """
    if tool is None or tool == ():
        raise ValueError(f"system {system!r} needs {name!r}, but neither its options nor the question give it")
    return tool


def corpus_retriever(tools: Tools, system: str) -> CorpusRetriever:
    """The retriever of a system that also reads passages by their place in the corpus, which a `Retriever` hides.

    `rag.answering.open_tools` opens no other kind.
    """
    return cast("CorpusRetriever", need(tools.retriever, "retriever", system))
