"""A teacher behind a server that gives the log-probability of each token of a prompt.

The completions endpoint of vLLM and SGLang does so with `echo` and `logprobs`. It gives the probability of the written
tokens alone, not of all others. llama.cpp's server only gives those of tokens that it writes itself (September 2026),
which is reported as an error.

Tested in `tests/train/test_served_teacher.py`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tripletune.core.calls import Completion, Message, PromptTooLong, Sampling, SetupError
from tripletune.llm.backends import LLMOptions
from tripletune.llm.backends._servers import Servers
from tripletune.llm.backends.openai import OpenAIBackend
from tripletune.llm.ledger import Ledger
from tripletune.llm.ledger_client import LedgerClient
from tripletune.llm.limits import Limits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The log-probabilities of earlier rollouts, so that a resumed run asks for nothing twice and reads the same numbers.
LEDGER = "teacher.sqlite"
_ROLE = "teacher"
# Servers may limit the temperature's effect to sampled tokens or not; 1 has no effect.
_SAMPLING = Sampling(temperature=1.0, max_tokens=1)
_LETTERS = re.compile(r"[^A-Za-z0-9]")


class Scored(NamedTuple):
    """What a server said of a prompt: the log-probabilities of its tokens (None: of the first), and their texts."""

    log_probs: list[float | None]
    texts: list[str]


class ScoringBackend(OpenAIBackend):
    """A backend for prompts of tokens: the only message of a chat is the list of ids, and the reply their scores."""

    path = "/completions"

    def __init__(self, options: LLMOptions, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(options)
        self.body = partial(_body, options.model)
        self.read = _read
        self._tokenizer = tokenizer

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Score a prompt; the reply's text is a list of a number per token.

        It is checked here, before it is stored, because a wrong server may be replaced by a right one.

        Raises:
            SetupError: The server gives no scores of prompts, or its tokenizer is another one.
        """
        completion = await super().complete(messages, sampling)
        ids = json.loads(messages[0]["content"])
        scored = Scored(*json.loads(completion.text))
        found = [value for value in scored.log_probs[1 : len(ids)] if value is not None]
        if len(found) < len(ids) - 1:
            raise SetupError(
                f"train.teacher: {self.host} gave log-probabilities of {len(found)} of {len(ids) - 1} prompt tokens; "
                "serve the teacher with vLLM or SGLang, which give those of a prompt (echo and logprobs)"
            )
        read = "".join(scored.texts[: len(ids)])
        if read and not self._is_text_of(ids, read):
            raise SetupError(
                f"train.teacher: {self.host} has another tokenizer than train.teacher_tokenizer: it read "
                f"{read[-60:]!r} where {self._tokenizer.decode(ids)[-60:]!r} was sent; name the tokenizer of the model "
                "on the server"
            )
        return replace(completion, text=json.dumps([None, *found]))

    def _is_text_of(self, ids: Sequence[int], read: str) -> bool:
        """Whether a server read the text of these tokens; it may leave out control tokens and write other spaces."""
        letters = _LETTERS.sub("", read)
        texts = [self._tokenizer.decode(ids, skip_special_tokens=skip) for skip in (False, True)]
        return any(_LETTERS.sub("", text) == letters for text in texts)


def _body(model: str, messages: Sequence[Message], sampling: Sampling) -> dict[str, Any]:
    """The request's body: the prompt again, with log-probabilities, and one more token, since some servers want one."""
    return {
        "model": model,
        "prompt": json.loads(messages[0]["content"]),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "echo": True,
        "logprobs": 1,
    }


def _read(body: Mapping[str, Any]) -> Completion | None:
    """The scores in a response, as JSON; None if it is no completion. A server without `echo` gives too few."""
    try:
        scores = body["choices"][0]["logprobs"] or {}
        scored = Scored(scores.get("token_logprobs") or [], scores.get("tokens") or [])
    except (KeyError, IndexError, TypeError, AttributeError):
        return None
    return Completion(text=json.dumps(scored))


@dataclass(frozen=True)
class ServedTeacher:
    """A teacher on a server.

    Attributes:
        model: Its name there.
        url: The base URL of the server, or of several servers of the model, separated by commas.
        folder: The run's folder, for the ledger.
        tokenizer: The tokenizer of the model on the server.
    """

    model: str
    url: str
    folder: Path
    tokenizer: PreTrainedTokenizerBase

    def score(self, prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]]) -> list[list[float] | None]:
        """The log-probability of each token of each reply after its prompt; None where both are too long together.

        The client is opened for one rollout: between two, a step of the student may take minutes.
        """
        return asyncio.run(self._score_all(prompts, replies))

    async def _score_all(
        self, prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]]
    ) -> list[list[float] | None]:
        """Score all replies of a rollout at once."""
        options = LLMOptions(model=self.model, url=self.url)
        limits = Limits(options.concurrency, timeout=options.timeout)
        backends = [ScoringBackend(replace(options, url=url), self.tokenizer) for url in options.urls]
        backend = backends[0] if len(backends) == 1 else Servers(backends)
        async with LedgerClient(backend, Ledger(self.folder / LEDGER), limits) as client:
            calls = [_score(client, prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)]
            return await asyncio.gather(*calls)


async def _score(client: LedgerClient, prompt: Sequence[int], reply: Sequence[int]) -> list[float] | None:
    """The log-probability of each token of a reply; None if the server says that the prompt is too long."""
    chat: list[Message] = [{"role": "user", "content": json.dumps([*prompt, *reply])}]
    try:
        completion = await client.chat(chat, role=_ROLE, sampling=_SAMPLING)
    except PromptTooLong:
        return None
    return list(json.loads(completion.text)[len(prompt) :])
