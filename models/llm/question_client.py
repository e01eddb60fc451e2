"""The client of one question: an `LLMClient` that adds what its calls cost to the question's trace."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from tripletune.models.llm import Completion, LLMClient, Message, Sampling
from tripletune.models.llm.prompts import PromptSet
from tripletune.models.llm.replies import ask

T = TypeVar("T")

NO_PROMPTS = PromptSet({}, {})
# Letters of a call's key that a trace notes.
CALL_NAME = 16


class CallNotes(Protocol):
    """What a `QuestionClient` writes to: the trace of a question (`tripletune.rag.Trace`)."""

    details: dict[str, Any]
    cached: dict[str, list[int]]

    def count(self, completion: Completion) -> None:
        """Add the cost of one model call."""

    def tally(self, name: str, count: int = 1) -> None:
        """Count something by its name."""


class QuestionClient(LLMClient):
    """An `LLMClient` for one question; closing it does nothing, for the client belongs to the run.

    Args:
        client: Answers the calls.
        trace: Calls and tokens are added to it; to its tallies the calls of each role (`calls.<role>`) and the
            replies that were cut off at their limit (`cut_off.<role>`); to its details, under "tokens", the tokens
            that each role read and wrote, and under "calls" how the keys of its calls in the ledger begin; to `cached`
            what of them was not sent.
        question_id: The question, for the ledger.
        sampling: How replies are drawn; their length is each call's own.
        system: The system that asks, for the roles of `ask`.
        prompts: Its prompts, `<system>_<call>` each.
        repairs: Most repair turns of `ask`.
    """

    def __init__(
        self,
        client: LLMClient,
        trace: CallNotes,
        question_id: str = "",
        sampling: Sampling | None = None,
        *,
        system: str = "",
        prompts: PromptSet = NO_PROMPTS,
        repairs: int = 1,
    ) -> None:
        self.model = client.model
        self._client, self._trace, self._question_id = client, trace, question_id
        self.system, self.prompts, self._repairs = system, prompts, repairs
        self._sampling = sampling or Sampling()

    def up_to(self, max_tokens: int) -> Sampling:
        """The sampling of a call whose reply has at most `max_tokens` tokens."""
        return replace(self._sampling, max_tokens=max_tokens)

    async def ask(self, call: str, asked: str | Sequence[Message], parse: Callable[[str], T], max_tokens: int) -> T:
        """Ask and parse the reply, with repair turns; see `models.llm.replies.ask`.

        Args:
            call: What the call is for: its role is `<system>.<call>`.
            asked: The chat, or the user turn that follows the prompt `<system>_<call>`.
            parse: Turns the reply's text into a value, or raises `UnusableReply`.
            max_tokens: Longest reply.
        """
        if isinstance(asked, str):
            asked = self.prompts.chat(f"{self.system}_{call}", asked)
        role = f"{self.system}.{call}"
        return await ask(self, asked, parse, role=role, sampling=self.up_to(max_tokens), repairs=self._repairs)

    async def chat(
        self, messages: Sequence[Message], *, role: str, sampling: Sampling | None = None, question_id: str = ""
    ) -> Completion:
        """Reply to a chat; see `LLMClient.chat`. The question's own id counts where none is given."""
        completion = await self._client.chat(
            messages, role=role, sampling=sampling or self._sampling, question_id=question_id or self._question_id
        )
        self._trace.count(completion)
        self._trace.tally(f"calls.{role}")
        # Sorted: in which order calls made together are answered is no part of a result.
        insort(self._trace.details.setdefault("calls", {}).setdefault(role, []), completion.key[:CALL_NAME])
        tokens = self._trace.details.setdefault("tokens", {}).setdefault(role, [0, 0])
        tokens[0] += completion.prompt_tokens
        tokens[1] += completion.completion_tokens
        if completion.cached:
            spared = self._trace.cached.setdefault(role, [0, 0, 0])
            for place, count in enumerate((1, completion.prompt_tokens, completion.completion_tokens)):
                spared[place] += count
        if completion.finish_reason == "length":
            self._trace.tally(f"cut_off.{role}")
        return completion

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """See `Endpoint.count_tokens`."""
        return self._client.count_tokens(messages)
