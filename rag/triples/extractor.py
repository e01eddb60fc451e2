"""What extraction asks of a text-to-triples model, and a chat model that does it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Protocol

from tripletune.models.llm.client import LLMClient, Sampling
from tripletune.models.local.generation import Completion
from tripletune.rag.triples.prompt import ExtractionPrompt

ROLE = "extract.triples"
MAX_TOKENS = 1536


class TextExtractor(Protocol):
    """A text-to-triples model: a teacher behind an LLM client, or a local model.

    Attributes:
        model: Its name, part of the store's key. A local model's name changes with its weights.
        settings: Everything else that its replies depend on, as text: prompt, sampling.
        batch_size: Texts that it wants at once; they come sorted by length.
        concurrency: Batches that it wants under way.
    """

    model: str
    settings: str
    batch_size: int
    concurrency: int

    async def extract(self, texts: Sequence[str]) -> list[str]:
        """Reply to each text, made by `models.extraction_pairs.render_source`; `read_reply` reads the replies.

        Raises:
            CallError: a text can't be answered. The batch is then tried one text at a time.
        """
        ...

    async def complete(self, texts: Sequence[str]) -> list[Completion]:
        """The same with what each reply cost."""
        ...

    async def close(self) -> None:
        """Let go of connections and memory."""
        ...


class ChatExtractor:
    """A chat model behind an `LLMClient`; one call a text.

    Args:
        client: The model, with cache, limits and retries.
        prompt: What it is asked.
        sampling: How replies are drawn; None: greedy, at most `MAX_TOKENS` tokens.
        concurrency: Calls under way; a client has its own limit besides.
        name: The model's name in the store; None: the client's.
    """

    batch_size = 1

    def __init__(
        self,
        client: LLMClient,
        prompt: ExtractionPrompt,
        sampling: Sampling | None = None,
        concurrency: int = 64,
        name: str | None = None,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency {concurrency}: it must be at least 1")
        self.model, self.concurrency = name or client.model, concurrency
        self._client, self._prompt = client, prompt
        self._sampling = sampling or Sampling(max_tokens=MAX_TOKENS)
        self.settings = json.dumps({**prompt.to_json(), **asdict(self._sampling)}, ensure_ascii=False)

    async def extract(self, texts: Sequence[str]) -> list[str]:
        """See `TextExtractor`."""
        return [completion.text for completion in await self.complete(texts)]

    async def complete(self, texts: Sequence[str]) -> list[Completion]:
        """See `TextExtractor`."""
        calls = (self._client.chat(self._prompt.chat(text), role=ROLE, sampling=self._sampling) for text in texts)
        return list(await asyncio.gather(*calls))

    def pending_message(self) -> str | None:
        """What to do about calls that wait for a batch's replies; None for other backends."""
        message = getattr(self._client, "pending_message", None)
        return message() if message is not None else None

    async def close(self) -> None:
        """Close the client."""
        await self._client.close()
