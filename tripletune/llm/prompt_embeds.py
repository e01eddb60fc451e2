"""A Graph-LLM whose language model runs in vLLM; graph encoder, projector and token embeddings run in this process.

`vllm serve MERGED --enable-prompt-embeds` serves the merged language model (`checkpoints merge --language-model-only`).
Each prompt is sent to the completions endpoint as vectors: a tensor saved by torch, in base64.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tripletune.core.calls import Completion, Message, Sampling
from tripletune.core.data.records import ModelInput
from tripletune.llm.backends import LLMOptions, is_plain_url
from tripletune.llm.backends.openai import OpenAIBackend
from tripletune.llm.graph_generator import LocalGenerator
from tripletune.llm.ledger_client import LedgerClient
from tripletune.llm.limits import Limits

if TYPE_CHECKING:
    from tripletune.models.graph_llm.processor import EncodedInput


class PromptEmbedsBackend(OpenAIBackend):
    """A backend for prompts that are vectors: the only message of a chat is the tensor in base64."""

    path = "/completions"

    def __init__(self, options: LLMOptions) -> None:
        super().__init__(options)
        self.body = partial(_completion_body, self.body)


def _completion_body(
    chat: Callable[[Sequence[Message], Sampling], dict[str, Any]], messages: Sequence[Message], sampling: Sampling
) -> dict[str, Any]:
    """The body of a completion from that of a chat; vLLM ignores the empty prompt."""
    body = chat(messages, sampling)
    body["prompt_embeds"] = body.pop("messages")[0]["content"]
    body["prompt"] = ""
    if "top_logprobs" in body:
        # For the completion of a prompt, one field has the number.
        body["logprobs"] = body.pop("top_logprobs")
    return body


class PromptEmbedsGenerator(LocalGenerator):
    """Generate with a `GraphLLM` whose layers after the embeddings run in vLLM; calls run concurrently.

    Args:
        local: The complete model in this process.
        where: The vLLM server, `NAME@URL`.
    """

    def __init__(self, local: LocalGenerator, where: str, ledger: str | Path | None = None) -> None:
        """Connect two clients: this generator's own with the ledger, and within it that of the server, without one.

        Raises:
            ValueError: `where` is not `NAME@URL`.
        """
        served_name, _, url = where.rpartition("@")
        if not served_name or not is_plain_url(url):
            raise ValueError(f"prompt_embeds {where}: write NAME@URL, for example merged@http://127.0.0.1:8000/v1")
        name = f"{local.model} in {served_name}"
        super().__init__(local.graph_llm, local.processor, local.batch_size, local.embeddings, name, ledger)
        stop = json.dumps({"stop_token_ids": [local.processor.tokenizer.eos_token_id]})
        options = LLMOptions(model=served_name, url=url, extra=stop)
        limits = Limits(options.concurrency, timeout=options.timeout)
        self.address = url
        # Without a ledger: prompts are vectors here, and this generator's own ledger keeps the replies.
        self._server = LedgerClient(PromptEmbedsBackend(options), limits=limits)
        # As with any chat model, calls succeed again when the server is back.
        self._server.ends_run = False

    async def decode(self, sample: ModelInput, sampling: Sampling, evidence: str | None = None) -> Completion:
        """Like `generate`, without the ledger; the prompt is sent as vectors, not as text."""
        encoded = self._encode_with_beginning(sample, evidence)
        vectors = await self._in_thread(partial(self._encode_vectors, encoded))
        sampling = replace(sampling, scored=sample.task == "answering")
        chat: list[Message] = [{"role": "user", "content": vectors}]
        completion = await self._server.chat(chat, role=f"ras.{sample.task}", sampling=sampling)
        return replace(
            completion,
            text=f"{sample.begun}{completion.text}".strip(),
            truncated_triples=encoded.truncated_triples,
            truncated_words=encoded.truncated_words,
        )

    @torch.no_grad()
    def _encode_vectors(self, encoded: EncodedInput) -> str:
        """The embeddings (T, W) of a prompt, in base64."""
        model = self.graph_llm
        graph_tokens = None
        if encoded.graphs:
            graph_tokens = model.projector(model.graph_encoder(self._graph_arguments(encoded.graphs)["graphs"]))
        ids = torch.tensor([encoded.input_ids], device=model.device)
        buffer = io.BytesIO()
        torch.save(model.embed_inputs(ids, graph_tokens)[0].cpu(), buffer)
        return base64.b64encode(buffer.getvalue()).decode()

    async def close(self) -> None:
        """Close the connections and the ledger."""
        await self._server.close()
        await super().close()
