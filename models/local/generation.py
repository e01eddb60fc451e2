"""What a loop asks of a model: the `Generator` protocol and the `Completion` it gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tripletune.models.data.records import ModelInput


@dataclass(frozen=True, slots=True)
class Completion:
    """A model's reply and what it cost.

    Attributes:
        text: The reply without end-of-sequence text.
        prompt_tokens: Tokens read, the graph token included.
        completion_tokens: Tokens written.
        seconds: Wall-clock seconds of the batch the call was part of, divided by the calls in it.
        truncated_triples: Triples left out so that the prompt fits.
        finish_reason: "stop" when the model ended its reply, "length" when it was cut off.
        retries: Attempts that failed before this one.
        cached: Whether it came from the ledger, so that nothing was paid for it now.
        truncated_words: Words of raw text left out so that the prompt fits.
    """

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    truncated_triples: int = 0
    finish_reason: str = "stop"
    retries: int = 0
    cached: bool = False
    truncated_words: int = 0


class Generator(Protocol):
    """Anything that plans and answers: the Graph-LLM here, an API later, a script in tests."""

    async def generate(self, sample: ModelInput, max_new_tokens: int, evidence: str | None = None) -> Completion:
        """Reply to one input, greedily.

        Args:
            sample: Task, question and history; rendered by the implementation with `models.prompts.rendering.render`.
            max_new_tokens: Longest reply, in tokens.
            evidence: "triples" or "text"; `None` keeps the model's own setting.
        """
        ...
