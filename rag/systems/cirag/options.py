"""Settings of CIRAG; the defaults are the paper's (section 4.3 and B.4), every ablation of section 4.5 is an option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Granularity = Literal["triples", "sentences", "passages"]
Extraction = Literal["two_step", "joint", "store"]
History = Literal["chat", "section"]
GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)
# The prompt for triples, and the one for entities before it.
EXTRACTION_PROMPTS: dict[Extraction, tuple[str, str | None]] = {
    "two_step": ("cirag_triples", "cirag_entities"),
    "joint": ("cirag_joint", None),
}
INTEGRATION_PROMPT, FIRST_THOUGHT_PROMPT = "cirag_integrate", "cirag_first_thought"
PROMPT_NAMES = (
    "cirag_entities",
    "cirag_triples",
    "cirag_joint",
    INTEGRATION_PROMPT,
    FIRST_THOUGHT_PROMPT,
    *(f"cirag_answer_{granularity}" for granularity in GRANULARITIES),
)


@dataclass(frozen=True, slots=True)
class CiragOptions:
    """Settings of a run.

    Attributes:
        max_rounds: L, most rounds (figure 8 varies it).
        top_k: K, passages a round.
        candidates: N, triples that are left after reranking (figure 7: 10 to 100).
        rerank: False shows the integrator all triples of the round ("w/o reranker", table 2).
        granularities: The levels of the cascade, in order. One level is a single granularity, two are a two-level
            cascade (table 3): "triples,passages" is "w/o Sentence".
        extraction: Triples of a passage in "two_step" (figures 9 and 10), from one "joint" prompt, or from a "store"
            of triples extracted before.
        history: How the integrator reads earlier rounds: as turns of the "chat", in which one sequence holds a whole
            trajectory, or as the "section" historical_context of one turn (figure 11).
        first_thought: Let the integrator think about the question alone first, and begin its first decision with that
            (`rag/systems/cirag/first_thought.py`); for teachers.
        repairs: Most repair turns for a reply that can't be used; with 0 there are none, as in the paper.
        prompts: Folder with prompts of one's own: any of `cirag_*.md`.
        max_prompt_tokens: Longest prompt of the integrator: candidates of the oldest rounds are left out first, as in
            its training (`history.py`). It needs an integrator on this machine, whose tokens can be counted; None
            shows all candidates of all rounds, as in the paper.
        max_extraction_tokens: Longest reply with entities or triples.
        max_integration_tokens: Longest reply of the integrator.
        max_generation_tokens: Longest reply of the generator, its thought included.

    Raises:
        ValueError: a value is out of range; all problems are named at once.
    """

    max_rounds: int = 4
    top_k: int = 10
    candidates: int = 30
    rerank: bool = True
    granularities: tuple[str, ...] = GRANULARITIES
    extraction: Extraction = "two_step"
    history: History = "chat"
    first_thought: bool = False
    repairs: int = 1
    prompts: str | None = None
    max_prompt_tokens: int | None = None
    max_extraction_tokens: int = 1536
    max_integration_tokens: int = 1024
    max_generation_tokens: int = 512

    def __post_init__(self) -> None:
        least = {"repairs": 0}
        problems = []
        for name in (
            "max_rounds", "top_k", "candidates", "repairs", "max_extraction_tokens", "max_integration_tokens",
            "max_generation_tokens", "max_prompt_tokens",
        ):  # fmt: skip
            value, lowest = getattr(self, name), least.get(name, 1)
            if value is not None and value < lowest:
                problems.append(f"{name} is {value}: it must be at least {lowest}")
        chosen = [name for name in GRANULARITIES if name in self.granularities]
        if list(self.granularities) != chosen or not chosen:
            problems.append(
                f"granularities is {','.join(self.granularities)!r}: name one or more of {', '.join(GRANULARITIES)}, "
                "in this order and each once"
            )
        for name, known in (("extraction", Extraction), ("history", History)):
            if getattr(self, name) not in get_args(known):
                problems.append(f"{name} is {getattr(self, name)!r}: it must be one of {', '.join(get_args(known))}")
        if problems:
            raise ValueError("; ".join(problems))
