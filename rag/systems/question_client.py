"""LLM calls of one question: each stands in the ledger under the question's id and is counted in its trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tripletune.models.llm.client import LLMClient, Message, Sampling
from tripletune.models.local.generation import Completion
from tripletune.rag.trace import Trace


class QuestionClient:
    """An `LLMClient` for one question.

    Args:
        client: Answers the calls.
        trace: Calls and tokens are added to it; to its tallies the calls of each role (`calls.<role>`) and the
            replies that were cut off at their limit (`cut_off.<role>`); to its details, under "tokens", the tokens
            that each role read and wrote.
        question_id: The question, for the ledger.
        sampling: How replies are drawn; their length is each call's own.

    Attributes:
        model: As in `LLMClient`.
    """

    def __init__(
        self, client: LLMClient, trace: Trace, question_id: str = "", sampling: Sampling | None = None
    ) -> None:
        self.model = client.model
        self._client, self._trace, self._question_id = client, trace, question_id
        self._sampling = sampling or Sampling()

    def up_to(self, max_tokens: int) -> Sampling:
        """The sampling of a call whose reply has at most `max_tokens` tokens."""
        return replace(self._sampling, max_tokens=max_tokens)

    async def chat(
        self, messages: Sequence[Message], *, role: str, sampling: Sampling | None = None, question_id: str = ""
    ) -> Completion:
        """Reply to a chat; see `LLMClient.chat`. The question's own id counts where none is given."""
        completion = await self._client.chat(
            messages, role=role, sampling=sampling or self._sampling, question_id=question_id or self._question_id
        )
        self._trace.count(completion)
        self._trace.tally(f"calls.{role}")
        tokens = self._trace.details.setdefault("tokens", {}).setdefault(role, [0, 0])
        tokens[0] += completion.prompt_tokens
        tokens[1] += completion.completion_tokens
        if completion.finish_reason == "length":
            self._trace.tally(f"cut_off.{role}")
        return completion

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """Tokens of a chat as the model reads it.

        Raises:
            ValueError: the model is not on this machine, so its tokens can't be counted.
        """
        count: Callable[[Sequence[Message]], int] | None = getattr(self._client, "count_tokens", None)
        if count is None:
            raise ValueError(
                f"max_prompt_tokens is set, and the tokens of {self.model} can't be counted here: leave it out, or "
                "name a local model with --integrator"
            )
        return count(messages)

    async def close(self) -> None:
        """Nothing: the client belongs to the run, not to the question."""
