"""One run of the loop in a rollout: the integrator that records what the model wrote, and the rewards of the run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tripletune.core.calls import CallError, Completion, LLMClient, Message, Sampling
from tripletune.models.local.chat import ChatEncoder
from tripletune.models.local.requests import Draw, Request

# The parts of a run's reward, in the order of their weights.
PARTS = ("answer", "recall", "format", "searches")


class Episode(LLMClient):
    """The student as CIRAG's integrator in one run of the loop, and the row of that run.

    Args:
        reply: Answers a `models.local.requests.Request` in place; see `DecodingService.reply`.
        chat: Renders and tokenises chats.
        context: Maximum tokens of the model's context.
        temperature: Temperature of the replies.
        seed: Seed of the first reply; each later reply has the next number.

    Attributes:
        prompt: The tokens before the first reply.
        completion: The tokens after it: the student's replies, and the turns that the loop adds.
        mask: 1 for each token of `completion` that the student wrote, else 0.
        cut: Whether the row lacks a part of the run.
    """

    model = "student"

    def __init__(
        self,
        reply: Callable[[Request], Awaitable[Any]],
        chat: ChatEncoder,
        context: int,
        temperature: float,
        seed: int,
    ) -> None:
        self.prompt: list[int] = []
        self.completion: list[int] = []
        self.mask: list[int] = []
        self.cut = False
        self._reply = reply
        self._chat = chat
        self._context = context
        self._temperature = temperature
        self._seed = seed
        # The end token of the last reply in the row; None if the reply ended at its limit.
        self._end: int | None = None
        # The rendered chat with the last reply, which the next prompt should continue.
        self._text = ""

    async def chat(
        self, messages: Sequence[Message], *, role: str, sampling: Sampling | None = None, question_id: str = ""
    ) -> Completion:
        """Reply to a chat; see `LLMClient.chat`. Earlier replies keep their sampled tokens.

        Tokenised again, a reply could have other tokens than those that were sampled, and their log-probabilities
        would not be those of the student's choices. If the loop has changed the text, the row ends, but the run goes
        on.
        """
        text = self._chat.render(messages)
        if not text.startswith(self._text):
            self.cut = True
        if self.cut:
            # The row has ended, but the loop still needs a reply to its whole prompt.
            new = []
            ids = self._chat.tokens(text)
        else:
            new = self._chat.tokens(text[len(self._text) :])
            ids = self.prompt + self.completion + new
        room = self._context - len(ids)
        if room < 1:
            raise CallError(f"{role}: the prompt has {len(ids)} tokens, and the model's context has {self._context}")
        limit = min((sampling or Sampling()).max_tokens, room)
        request = Request(ids, limit, self._chat.shared_length(messages, ids), Draw(self._temperature, seed=self._seed))
        self._seed += 1
        await self._reply(request)
        if not self.cut:
            self._add_tokens(new, request.tokens)
            self._end = request.end
        reply = str(self._chat.tokenizer.decode(request.tokens, skip_special_tokens=True))
        self._text = text + self._chat.as_text(reply)
        return request.completion(reply)

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """The number of prompt tokens of a chat."""
        return len(self._chat.encode(messages))

    def finish(self, eos: int, longest: int) -> None:
        """End the row, and cut it to `longest` tokens.

        Args:
            eos: The token that ends the row if the student has not, so that TRL has a token after the prompt.
        """
        if not self.prompt:
            self.prompt = [eos]
        self._add_tokens([eos if self._end is None else self._end], [])
        longest = max(1, longest - len(self.prompt))
        if len(self.completion) > longest:
            self.cut = True
        self.completion = self.completion[:longest]
        self.mask = self.mask[:longest]

    def _add_tokens(self, read: list[int], written: list[int]) -> None:
        """Add tokens that the student read and then tokens that it wrote; the first it read are the prompt."""
        if not self.prompt:
            self.prompt = read
            read = []
        if read:
            # The first token that the template adds is the student's own if the student ended its reply with it.
            is_own = read[0] == self._end
            self.mask += [int(is_own), *[0] * (len(read) - 1)]
        self.mask += [1] * len(written)
        self.completion += read + written


def reward_parts(row: Mapping[str, Any]) -> Mapping[str, float | None]:
    """Return the rewards of a run, given its row of results; a failed run has none, so it has no advantage.

    A run fails by the loop's models and tools, for example a teacher that cannot be reached, and the student should
    learn nothing from that. A question without supporting passages has recall 0 in all its runs, which changes no
    comparison.
    """
    if row["error"]:
        return dict.fromkeys(PARTS)
    details = row["trace"]["details"]
    supporting = set(row["supporting"])
    with_core_triples = set(details.get("core_passages", ()))
    rounds = details.get("rounds", ())
    faultless = [integration for integration in rounds if not integration["faults"]]
    return {
        "answer": row["scores"]["f1"],
        "recall": len(supporting & with_core_triples) / max(len(supporting), 1),
        "format": len(faultless) / max(len(rounds), 1),
        "searches": float(len(row["trace"]["steps"])),
    }


class EpisodeResult(NamedTuple):
    """A run of the loop, and its row of results (`eval.suites.questions.QuestionSuite.score`)."""

    episode: Episode
    result: dict[str, Any]
