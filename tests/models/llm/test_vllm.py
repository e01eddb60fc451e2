"""With a stand-in for vLLM that has the parts of its documented interface that are used."""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from models.llm.client import CallError, Message, Sampling, TransientError
from models.llm.vllm import VLLMBackend, find_vllm

CHAT: list[Message] = [{"role": "system", "content": "Plan."}, {"role": "user", "content": "Who?"}]


class EngineDeadError(Exception):
    pass


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 16
    stop: list[str] | None = None
    seed: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE


@dataclass
class AsyncEngineArgs:
    model: str
    tensor_parallel_size: int = 1


@dataclass
class CompletionOutput:
    text: str
    token_ids: list[int]
    finish_reason: str | None = "stop"


@dataclass
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


@dataclass
class AsyncLLM:
    """Says how many tokens it was given; what is in FAILURES and OUTPUTS comes first."""

    arguments: AsyncEngineArgs
    calls: list[tuple[dict[str, Any], SamplingParams, str]] = field(default_factory=list)
    under_way: int = 0
    most: int = 0
    aborted: int = 0
    open: bool = True

    @classmethod
    def from_engine_args(cls, arguments: AsyncEngineArgs) -> "AsyncLLM":
        asyncio.get_running_loop()
        engine = cls(arguments)
        ENGINES.append(engine)
        return engine

    async def generate(
        self, prompt: dict[str, Any], sampling_params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        if FAILURES:
            raise FAILURES.pop()
        self.calls.append((prompt, sampling_params, request_id))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        ids = prompt["prompt_token_ids"]
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.under_way -= 1
        if OUTPUTS:
            yield OUTPUTS.pop()
            return
        yield RequestOutput(ids, [CompletionOutput(f"{len(ids)} tokens", [1, 2], "length")])

    def shutdown(self) -> None:
        self.open = False


ENGINES: list[AsyncLLM] = []
FAILURES: list[Exception] = []
OUTPUTS: list[RequestOutput] = []


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    for kept in (ENGINES, FAILURES, OUTPUTS):
        kept.clear()
    parts: dict[str, dict[str, Any]] = {
        "vllm": {"AsyncEngineArgs": AsyncEngineArgs, "SamplingParams": SamplingParams, "__version__": "0.99"},
        "vllm.sampling_params": {"RequestOutputKind": RequestOutputKind},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
    }
    found = {}
    for name, values in parts.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
        found[name] = module
    return found


@pytest.fixture
def backend(modules: dict[str, ModuleType], tokenizer_folder: Path) -> VLLMBackend:
    return VLLMBackend(str(tokenizer_folder), engine={"tensor_parallel_size": 2})


def ask(backend: VLLMBackend, sampling: Sampling | None = None) -> Any:
    return asyncio.run(backend.complete(CHAT, sampling or Sampling()))


def test_a_reply(backend: VLLMBackend, tokenizer_folder: Path) -> None:
    reply = ask(backend, Sampling(0.5, 0.9, 7, ("END",), 3))
    prompt, settings, _ = ENGINES[0].calls[0]
    length = len(prompt["prompt_token_ids"])
    assert (reply.text, reply.prompt_tokens, reply.completion_tokens) == (f"{length} tokens", length, 2)
    assert reply.finish_reason == "length"
    assert reply.seconds > 0
    assert settings == SamplingParams(0.5, 0.9, 7, ["END"], 3, RequestOutputKind.FINAL_ONLY)
    assert backend._chat.tokenizer.decode(prompt["prompt_token_ids"]).endswith(
        "Who?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ENGINES[0].arguments == AsyncEngineArgs(str(tokenizer_folder), 2)
    assert backend.model == f"vllm:{tokenizer_folder}"
    assert str(tokenizer_folder) in repr(backend)


def test_calls_are_under_way_together_and_have_names_of_their_own(backend: VLLMBackend) -> None:
    async def go() -> None:
        await asyncio.gather(*(backend.complete(CHAT, Sampling()) for _ in range(8)))
        await backend.close()

    asyncio.run(go())
    assert len(ENGINES) == 1
    assert ENGINES[0].most == 8
    assert len({name for _, _, name in ENGINES[0].calls}) == 8
    assert ENGINES[0].calls[0][1].stop is None
    assert not ENGINES[0].open


def test_an_engine_for_each_event_loop(backend: VLLMBackend) -> None:
    assert ask(backend).text == ask(backend).text
    assert [engine.open for engine in ENGINES] == [False, True]


def test_failures(backend: VLLMBackend) -> None:
    FAILURES.append(ValueError("the prompt is longer than the context"))
    with pytest.raises(CallError, match="longer than the context"):
        ask(backend)
    FAILURES.append(EngineDeadError())
    with pytest.raises(TransientError, match="EngineDeadError"):
        ask(backend)
    assert not any(engine.open for engine in ENGINES)
    FAILURES.append(KeyError("a bug of ours"))
    with pytest.raises(KeyError):
        ask(backend)
    OUTPUTS.append(RequestOutput([1], [], finished=False))
    with pytest.raises(TransientError, match="without a reply"):
        ask(backend)
    assert ask(backend).text.endswith("tokens")


def test_a_cancelled_call_is_aborted(backend: VLLMBackend) -> None:
    async def go() -> None:
        task = asyncio.create_task(backend.complete(CHAT, Sampling()))
        while not (ENGINES and ENGINES[0].under_way):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())
    assert ENGINES[0].aborted == 1


def test_an_engine_argument_that_vllm_does_not_know(modules: dict[str, ModuleType], tokenizer_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"engine .*refuses it.*speed"):
        VLLMBackend(str(tokenizer_folder), engine={"speed": 9})


def test_without_vllm(monkeypatch: pytest.MonkeyPatch, tokenizer_folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match=r"pip install 'tripletune\[vllm\]', or start `vllm serve"):
        VLLMBackend(str(tokenizer_folder))


def test_a_vllm_without_a_part(modules: dict[str, ModuleType]) -> None:
    assert set(find_vllm()) == {"AsyncEngineArgs", "SamplingParams", "RequestOutputKind", "AsyncLLM"}
    del modules["vllm.v1.engine.async_llm"].AsyncLLM
    with pytest.raises(ValueError, match=r"vLLM 0\.99 has no AsyncLLM"):
        find_vllm()
