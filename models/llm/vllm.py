"""vLLM's engine inside this process, for machines with a GPU and the extra `vllm`.

Written against the documented interface of vLLM 0.10 to 0.32 (`AsyncLLM`, `AsyncEngineArgs`, `SamplingParams`) and
tested with a stand-in alone: it has NOT been run on a real engine. The tried way to the same models is `vllm serve`
and the `openai` backend, which also reaches more than one machine.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from models.generation import Completion
from models.llm.api import ledger_name
from models.llm.chat import ChatEncoder
from models.llm.client import CallError, Message, Sampling, TransientError
from models.sources import load_tokenizer, resolve

# What is needed, and the modules that have held it.
NEEDED = {
    "AsyncEngineArgs": ("vllm", "vllm.engine.arg_utils"),
    "SamplingParams": ("vllm", "vllm.sampling_params"),
    "RequestOutputKind": ("vllm.sampling_params",),
    "AsyncLLM": ("vllm.v1.engine.async_llm",),
}


class VLLMBackend:
    """An engine of vLLM; it batches the calls that are under way by itself.

    Args:
        model: Hub id, folder or `pypi:package`.
        engine: More arguments of vLLM's `AsyncEngineArgs`, for example {"tensor_parallel_size": 2}.
        template_options: More arguments of the chat template; part of the ledger's name.
        plain: For base models, which have no chat template: the turns' texts, with a blank line after each.

    Attributes:
        model: "vllm:<model>" and the template's options.

    Raises:
        FileNotFoundError: no such model.
        ValueError: vLLM is not installed or too old, an engine argument is unknown, or there is no chat template.
    """

    def __init__(
        self,
        model: str,
        engine: Mapping[str, Any] | None = None,
        template_options: Mapping[str, Any] | None = None,
        plain: bool = False,
    ) -> None:
        self._vllm = find_vllm()
        self.model = ledger_name("vllm", str(model), template_options)
        self._chat = ChatEncoder(load_tokenizer(model), self.model, template_options, plain)
        try:
            self._arguments = self._vllm["AsyncEngineArgs"](model=resolve(model), **(engine or {}))
        except TypeError as error:
            raise ValueError(f"engine {dict(engine or {})}: vLLM's AsyncEngineArgs refuses it: {error}") from None
        self._engine: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        return f"VLLMBackend({self.model!r})"

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Reply to a chat; see `models.llm.client.Backend`.

        `seconds` is the call's own time in the engine, which serves others meanwhile.
        """
        prompt = {"prompt_token_ids": self._chat.encode(messages)}
        settings = self._vllm["SamplingParams"](
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            stop=list(sampling.stop) or None,
            seed=sampling.seed,
            output_kind=self._vllm["RequestOutputKind"].FINAL_ONLY,
        )
        start = time.perf_counter()
        last: Any = None
        try:
            async for output in self._open().generate(prompt, settings, f"call-{next(self._numbers)}"):
                last = output
        except ValueError as error:
            # What vLLM finds wrong with a request, a prompt longer than the context first of all.
            raise CallError(f"{self.model}: vLLM refuses the request: {error}") from None
        except Exception as error:
            if not type(error).__name__.startswith("Engine"):
                raise
            if type(error).__name__ == "EngineDeadError":
                # The next attempt starts a new one.
                self._shut_down()
            raise TransientError(f"{self.model}: vLLM's engine failed: {type(error).__name__} {error}") from error
        if last is None or not last.finished or not last.outputs:
            raise TransientError(f"{self.model}: vLLM's engine ended the call without a reply")
        reply = last.outputs[0]
        return Completion(
            text=reply.text,
            prompt_tokens=len(last.prompt_token_ids or ()),
            completion_tokens=len(reply.token_ids),
            seconds=time.perf_counter() - start,
            finish_reason=reply.finish_reason or "stop",
        )

    async def close(self) -> None:
        """End the engine; the next call starts a new one."""
        self._shut_down()

    def _open(self) -> Any:
        # An engine belongs to the event loop it was first used in.
        loop = asyncio.get_running_loop()
        if self._engine is None or self._loop is not loop:
            self._shut_down()
            self._engine, self._loop = self._vllm["AsyncLLM"].from_engine_args(self._arguments), loop
        return self._engine

    def _shut_down(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()


def find_vllm() -> dict[str, Any]:
    """The parts of vLLM that are used.

    Raises:
        ValueError: it is not installed, or lacks one of them.
    """
    try:
        package = importlib.import_module("vllm")
    except ImportError as error:
        raise ValueError(
            f"the vllm backend needs vLLM and a GPU ({error}); run: pip install 'tripletune[vllm]', or start "
            "`vllm serve MODEL` where there is one and use the openai backend with its url"
        ) from None
    found: dict[str, Any] = {}
    for name, modules in NEEDED.items():
        for module in modules:
            try:
                part = getattr(importlib.import_module(module), name, None)
            except ImportError:
                continue
            if part is not None:
                found[name] = part
                break
        else:
            version = getattr(package, "__version__", "of unknown version")
            raise ValueError(
                f"vLLM {version} has no {name} in {' or '.join(modules)}: this backend is written for 0.10 to 0.32; "
                "use `vllm serve MODEL` and the openai backend with its url"
            )
    return found
