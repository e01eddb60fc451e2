"""Settings of CIRAG; the defaults are the paper's (section 4.3 and B.4), every ablation of section 4.5 is an option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tripletune.models.options import require, setting

Granularity = Literal["triples", "sentences", "passages"]
Extraction = Literal["two_step", "joint", "store"]
History = Literal["chat", "section"]
GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)
# The prompt for triples, and the one for entities before it.
EXTRACTION_PROMPTS: dict[Extraction, tuple[str, str | None]] = {
    "two_step": ("cirag_triples", "cirag_entities"),
    "joint": ("cirag_joint", None),
}
INTEGRATION_PROMPT = "cirag_integrate"
PROMPT_NAMES = (
    "cirag_entities",
    "cirag_triples",
    "cirag_joint",
    INTEGRATION_PROMPT,
    *(f"cirag_answer_{granularity}" for granularity in GRANULARITIES),
)


@dataclass(frozen=True, slots=True)
class CiragOptions:
    """Settings of a run.

    Raises:
        ValueError: a value is out of range; all problems are named at once.
    """

    max_rounds: int = setting(4, "L, most rounds (figure 8 varies it)", at_least=1)
    top_k: int = setting(10, "K, passages per round", at_least=1)
    candidates: int = setting(30, "N, triples that are left after reranking (figure 7: 10 to 100)", at_least=1)
    rerank: bool = setting(True, 'no shows the integrator all triples of the round ("w/o reranker", table 2)')
    granularities: tuple[str, ...] = setting(
        GRANULARITIES,
        "levels of the cascade, in order; one is a single granularity, two are a two-level cascade (table 3): "
        'triples,passages is "w/o Sentence"',
        choices=GRANULARITIES,
    )
    extraction: Extraction = setting(
        "two_step",
        "triples of a passage: in two steps (figures 9 and 10), from one joint prompt, or from a store",
        choices=get_args(Extraction),
    )
    history: History = setting(
        "chat",
        "how the integrator reads earlier rounds: as turns of the chat, in which one sequence holds a whole "
        "trajectory, or as the section historical_context of one turn (figure 11)",
        choices=get_args(History),
    )
    repairs: int = setting(1, "most repair turns for a reply that can't be used; the paper has none", at_least=0)
    prompts: str | None = setting(None, "folder with prompts of one's own: any of cirag_*.md")
    max_prompt_tokens: int | None = setting(
        None,
        "longest prompt of the integrator: candidates of the oldest rounds are left out first, as in its training; it "
        "needs an integrator on this machine; none shows all candidates of all rounds, as in the paper",
        at_least=1,
    )
    max_extraction_tokens: int = setting(1536, "longest reply with entities or triples", at_least=1)
    max_integration_tokens: int = setting(1024, "longest reply of the integrator", at_least=1)
    max_generation_tokens: int = setting(512, "longest reply of the generator, its thought included", at_least=1)

    def __post_init__(self) -> None:
        require(self)

    def check(self) -> list[str]:
        """What `setting` can't say: the levels of the cascade have an order."""
        chosen = [name for name in GRANULARITIES if name in self.granularities]
        if list(self.granularities) == chosen and chosen:
            return []
        return [
            f"granularities is {','.join(self.granularities)!r}: name one or more of {', '.join(GRANULARITIES)}, "
            "in this order and each once"
        ]
