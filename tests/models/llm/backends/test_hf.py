import asyncio
import functools
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tripletune.models.llm.backends.hf import HFBackend, _Call
from tripletune.models.llm.backends.hf_sampling import Draw
from tripletune.models.llm.client import CallError, Message, Sampling
from tripletune.models.local.generation import Completion

GREEDY = Sampling(max_tokens=12)
WARM = Sampling(temperature=0.8, top_p=0.9, max_tokens=12, seed=1)


def chat(text: str) -> list[Message]:
    return [{"role": "system", "content": "Plan."}, {"role": "user", "content": text}]


CHATS = [chat("word " * (7 * n % 5 + 1) + f"question {n}") for n in range(9)]


@pytest.fixture
def backend(tiny_llama: Path) -> Iterator[HFBackend]:
    made = HFBackend(str(tiny_llama), batch_size=4, dtype="float32")
    yield made
    asyncio.run(made.close())


@pytest.fixture
def sizes(backend: HFBackend, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches that `generate` was run with."""
    found: list[int] = []
    original = backend._generate

    def spy(calls: Any) -> Any:
        found.append(len(calls))
        return original(calls)

    monkeypatch.setattr(backend, "_generate", spy)
    return found


def together(backend: HFBackend, calls: list[tuple[list[Message], Sampling]]) -> list[Any]:
    async def go() -> list[Any]:
        return await asyncio.gather(*(backend.complete(*call) for call in calls), return_exceptions=True)

    return asyncio.run(go())


def alone(backend: HFBackend, calls: list[tuple[list[Message], Sampling]]) -> list[Any]:
    return [together(backend, [call])[0] for call in calls]


def essence(replies: list[Completion]) -> list[tuple[Any, ...]]:
    return [(r.text, r.prompt_tokens, r.completion_tokens, r.finish_reason) for r in replies]


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gemma2"])
def test_a_reply_does_not_depend_on_its_batch(
    tiny_model: Callable[[str], Path], family: str, sampling: Sampling
) -> None:
    backend = HFBackend(str(tiny_model(family)), batch_size=4, dtype="float32")
    calls = [(item, sampling) for item in CHATS]
    expected = essence(alone(backend, calls))
    assert essence(together(backend, calls)) == expected
    assert len({text for text, *_ in expected}) > 2
    asyncio.run(backend.close())


def test_calls_meet_in_batches_of_like_length(backend: HFBackend, sizes: list[int]) -> None:
    replies = together(backend, [(item, WARM) for item in CHATS])
    assert sorted(sizes) == [1, 4, 4]
    assert all(reply.seconds > 0 for reply in replies)
    sizes.clear()

    async def loop(item: list[Message]) -> None:
        await backend.complete(item, WARM)
        await asyncio.sleep(0)
        await backend.complete(item, WARM)

    async def everything() -> None:
        await asyncio.gather(*(loop(item) for item in CHATS[:4]))

    asyncio.run(everything())
    assert sizes == [4, 4]


def test_calls_with_other_settings_are_not_in_one_batch(backend: HFBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[Any]] = []
    original = backend._generate

    def spy(calls: Any) -> Any:
        seen.append({call.batch_key for call in calls})
        return original(calls)

    monkeypatch.setattr(backend, "_generate", spy)
    # The greedy ones have a batch of their own kind.
    settings = [GREEDY, WARM, replace(WARM, max_tokens=5), replace(WARM, stop=("a",)), replace(WARM, top_p=0.5)]
    calls = [(item, sampling) for item in CHATS[:3] for sampling in settings]
    expected = essence(alone(backend, calls))
    seen.clear()
    assert essence(together(backend, calls)) == expected
    assert len(seen) == 4
    assert all(len(keys) == 1 for keys in seen)


def test_seeds(backend: HFBackend, sizes: list[int]) -> None:
    def drawn(seeds: list[int | None]) -> list[str]:
        calls = [(CHATS[0], Sampling(temperature=1.5, max_tokens=12, seed=seed)) for seed in seeds]
        return [reply.text for reply in together(backend, calls)]

    first = drawn([1, 2, 3, 1])
    # Calls that differ in nothing but the seed share a batch.
    assert sizes == [4]
    assert first[0] == first[3]
    assert len(set(first)) == 3
    assert drawn([3, 1]) == [first[2], first[0]]
    assert len(set(drawn([None] * 4))) == 4


def test_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    rows, sampling = 4000, Sampling(temperature=0.5, top_p=0.98)
    draw = Draw(sampling, list(range(rows)), torch.device("cpu"))
    ids = torch.zeros(rows, 1, dtype=torch.long)
    counts = torch.bincount(draw(ids, logits.expand(rows, 4)).argmax(-1), minlength=4) / rows
    # At temperature 0.5 the shares are 0.865, 0.117, 0.016, 0.002; top_p drops the last, and 0.98 is met by two.
    kept = (logits / 0.5).softmax(-1)[:2]
    assert torch.allclose(counts[:2], kept / kept.sum(), atol=0.02)
    assert counts[2:].sum() == 0
    again = Draw(sampling, list(range(rows)), torch.device("cpu"))
    assert torch.equal(torch.bincount(again(ids, logits.expand(rows, 4)).argmax(-1), minlength=4) / rows, counts)


def test_greedy_is_what_generate_says(backend: HFBackend) -> None:
    tokenizer = backend._tokenizer
    text = tokenizer.apply_chat_template(CHATS[2], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    output = backend._lm.generate(**ids, max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=3)
    row = output[0, ids["input_ids"].shape[1] :]
    reply = together(backend, [(CHATS[2], GREEDY)])[0]
    assert reply.text == tokenizer.decode(row, skip_special_tokens=True)
    assert reply.prompt_tokens == ids["input_ids"].shape[1]
    assert reply.completion_tokens == len(row)


@pytest.mark.parametrize("place", [0, 3])
def test_stop_texts(backend: HFBackend, place: int) -> None:
    full = together(backend, [(CHATS[1], Sampling(max_tokens=40))])[0]
    stop = full.text[place : place + 3]
    cut = together(backend, [(CHATS[1], Sampling(max_tokens=40, stop=("never there", stop)))])[0]
    assert cut.text == full.text[: full.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert 0 < cut.completion_tokens < full.completion_tokens
    # The same beside others, which go on.
    calls = [(item, Sampling(max_tokens=40, stop=(stop,))) for item in CHATS[:4]]
    assert essence(together(backend, calls)) == essence(alone(backend, calls))


def test_how_a_reply_ended(backend: HFBackend) -> None:
    future: Any = None
    call = _Call([1, 2, 3], 9, sampling=Sampling(stop=("!",)), future=future)
    yes, mark, end, pad = (*(backend._tokenizer(text)["input_ids"] for text in ("Yes", "!")), 2, 3)
    cases = [
        ([*yes, end, pad, pad], None, ("Yes", 3, len(yes) + 1, "stop")),
        ([*yes], None, ("Yes", 3, len(yes), "length")),
        ([*yes, *mark, end], len(yes) + 1, ("Yes", 3, len(yes) + 1, "stop")),
        ([*yes, *mark, pad], len(yes) + 1, ("Yes", 3, len(yes) + 1, "stop")),
    ]
    for row, ended, expected in cases:
        assert essence([backend._completion(call, row, ended, 0.1)]) == [expected]


def test_a_prompt_that_is_too_long(backend: HFBackend) -> None:
    found = together(backend, [(CHATS[0], GREEDY), (chat("word " * 3000), GREEDY), (CHATS[1], GREEDY)])
    assert isinstance(found[1], CallError)
    assert "context 1024" in str(found[1])
    assert essence([found[0], found[2]]) == essence(alone(backend, [(CHATS[0], GREEDY), (CHATS[1], GREEDY)]))


def test_a_reply_ends_with_the_context(backend: HFBackend) -> None:
    empty = together(backend, [(chat(""), GREEDY)])[0].prompt_tokens
    word = len(backend._tokenizer("word word", add_special_tokens=False)["input_ids"]) - len(
        backend._tokenizer("word", add_special_tokens=False)["input_ids"]
    )
    reply = together(backend, [(chat(" word" * ((1020 - empty) // word)), Sampling(max_tokens=500))])[0]
    assert reply.prompt_tokens + reply.completion_tokens <= 1024
    if reply.finish_reason == "length":
        assert reply.prompt_tokens + reply.completion_tokens == 1024


def test_the_models_own_generation_settings_do_not_leak_in(
    tiny_llama: Path, tmp_path: Path, backend: HFBackend
) -> None:
    from transformers import GenerationConfig

    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    GenerationConfig(
        repetition_penalty=3.0, do_sample=True, temperature=5.0, no_repeat_ngram_size=1, eos_token_id=[2, 5]
    ).save_pretrained(folder)
    other = HFBackend(str(folder), batch_size=4, dtype="float32")
    # All but the tokens that end a reply.
    assert other._ends == [2, 5]
    other._ends = backend._ends
    calls = [(item, GREEDY) for item in CHATS[:4]]
    assert essence(together(other, calls)) == essence(together(backend, calls))
    asyncio.run(other.close())


def test_out_of_memory_halves_the_batch(
    backend: HFBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = [(item, WARM) for item in CHATS]
    expected = essence(alone(backend, calls))
    original = backend._generate
    sizes: list[int] = []

    def small(items: Any) -> Any:
        if len(items) > 2:
            raise torch.OutOfMemoryError("full")
        sizes.append(len(items))
        return original(items)

    monkeypatch.setattr(backend, "_generate", small)
    assert essence(together(backend, calls)) == expected
    assert backend.batch_size == 2
    assert sizes == [2, 2, 2, 2, 1]
    assert "out of GPU memory with 4 calls" in caplog.text

    def none(items: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(backend, "_generate", none)
    found = together(backend, calls[:3])
    assert all(isinstance(error, CallError) and "don't fit the GPU" in str(error) for error in found)
    assert backend.batch_size == 1


def test_one_failing_call_does_not_fail_its_neighbours(backend: HFBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [(item, WARM) for item in CHATS[:4]]
    expected = essence(alone(backend, calls))
    original = backend._generate
    bad = backend._chat.encode(CHATS[2])

    def picky(items: Any) -> Any:
        if any(item.prompt == bad for item in items):
            raise RuntimeError("odd one")
        return original(items)

    monkeypatch.setattr(backend, "_generate", picky)
    found = together(backend, calls)
    assert isinstance(found.pop(2), RuntimeError)
    assert essence(found) == [expected[0], expected[1], expected[3]]


class Gate:
    """Holds batches in the worker thread until it is opened."""

    def __init__(self, backend: HFBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        original = backend._generate

        def held(calls: Any) -> Any:
            self.entered.set()
            self.open.wait(10)
            return original(calls)

        monkeypatch.setattr(backend, "_generate", held)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, 10)


def test_cancelled_calls(backend: HFBackend, monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> None:
    expected = essence(alone(backend, [(item, WARM) for item in CHATS[:4]]))
    sizes.clear()
    gate = Gate(backend, monkeypatch)

    async def go() -> list[Completion]:
        running = [asyncio.create_task(backend.complete(item, WARM)) for item in CHATS[:2]]
        await gate.reached()
        waiting = [asyncio.create_task(backend.complete(item, WARM)) for item in CHATS[2:4]]
        await asyncio.sleep(0)
        running[0].cancel()
        waiting[0].cancel()
        await asyncio.sleep(0)
        gate.open.set()
        return [await running[1], await waiting[1]]

    assert essence(asyncio.run(go())) == [expected[1], expected[3]]
    # The call that was cancelled while it waited was not run.
    assert sizes == [2, 1]


def test_a_batch_that_nobody_waits_for_is_given_up(backend: HFBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(backend, monkeypatch)
    steps: list[int] = []
    original = backend._lm.forward

    def counted(*arguments: Any, **options: Any) -> Any:
        steps.append(1)
        return original(*arguments, **options)

    monkeypatch.setattr(backend._lm, "forward", counted)

    async def go() -> Completion:
        task = asyncio.create_task(backend.complete(CHATS[0], replace(WARM, max_tokens=500)))
        await gate.reached()
        task.cancel()
        await asyncio.sleep(0)
        gate.open.set()
        return await backend.complete(CHATS[1], replace(WARM, max_tokens=1))

    assert asyncio.run(go()).completion_tokens == 1
    assert len(steps) == 2


def test_closing_ends_the_thread_and_what_waits(backend: HFBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(backend, monkeypatch)

    async def go() -> list[Any]:
        running = asyncio.create_task(backend.complete(CHATS[0], replace(WARM, max_tokens=500)))
        await gate.reached()
        waiting = asyncio.create_task(backend.complete(CHATS[1], WARM))
        await asyncio.sleep(0)
        closing = asyncio.create_task(backend.close())
        await asyncio.sleep(0)
        gate.open.set()
        await closing
        return await asyncio.gather(running, waiting, return_exceptions=True)

    found = asyncio.run(go())
    assert all(isinstance(error, CallError) and "was closed" in str(error) for error in found)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hf-backend")]
    # It can be used again, in another event loop.
    assert together(backend, [(CHATS[0], WARM)])[0].completion_tokens


def rows_of(backend: HFBackend, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what the model reads, step by step."""
    shapes: list[tuple[int, ...]] = []
    original = backend._lm.forward

    @functools.wraps(original)
    def counted(*arguments: Any, **options: Any) -> Any:
        shapes.append(tuple(options["input_ids"].shape))
        return original(*arguments, **options)

    monkeypatch.setattr(backend._lm, "forward", counted)
    return shapes


def test_greedy_calls_share_a_batch_that_new_ones_join(backend: HFBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = essence(alone(backend, [(item, GREEDY) for item in CHATS]))
    shapes = rows_of(backend, monkeypatch)

    async def go() -> list[Completion]:
        first = [asyncio.create_task(backend.complete(item, GREEDY)) for item in CHATS[:2]]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        return await asyncio.gather(*first, *(backend.complete(item, GREEDY) for item in CHATS[2:]))

    assert essence(asyncio.run(go())) == expected
    steps = [rows for rows, columns in shapes if columns == 1]
    assert max(steps) == 4
    assert len(steps) < sum(tokens for _, _, tokens, _ in expected)


def test_a_system_prompt_is_read_once(backend: HFBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    long = [{"role": "system", "content": "Plan the next step for the question. " * 4}]
    calls = [([*long, *item[1:]], GREEDY) for item in CHATS[:4]]
    expected = essence(alone(backend, calls))
    other = HFBackend(backend.model.removeprefix("hf:"), batch_size=4, dtype="float32")
    shapes = rows_of(other, monkeypatch)
    assert essence(together(other, calls)) == expected
    assert essence(together(other, calls)) == expected
    beginnings = [columns for rows, columns in shapes if rows == 1 and columns > 1]
    assert len(beginnings) == 1
    assert beginnings[0] > 20
    widest = max(prompt for _, prompt, _, _ in expected)
    assert {columns for rows, columns in shapes if rows == 4 and columns > 1} == {widest - beginnings[0]}
    asyncio.run(other.close())


def test_greedy_calls_that_nobody_waits_for_are_given_up(backend: HFBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = rows_of(backend, monkeypatch)

    async def go() -> Completion:
        task = asyncio.create_task(backend.complete(CHATS[0], Sampling(max_tokens=900)))
        while not shapes:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.sleep(0)
        return await backend.complete(CHATS[1], Sampling(max_tokens=3))

    assert asyncio.run(go()).completion_tokens <= 3
    assert len(shapes) < 500
    assert not backend._running


def test_an_event_loop_that_ended_leaves_the_next_one_in_peace(backend: HFBackend) -> None:
    expected = essence(alone(backend, [(CHATS[1], GREEDY)]))

    async def left() -> None:
        asyncio.get_running_loop().create_task(backend.complete(CHATS[0], Sampling(max_tokens=900)))
        await asyncio.sleep(0.02)

    for _ in range(3):
        asyncio.run(left())
        assert essence(together(backend, [(CHATS[1], GREEDY)])) == expected


def test_one_failing_greedy_call_does_not_fail_its_neighbours(
    backend: HFBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = [(item, GREEDY) for item in CHATS[:4]]
    expected = essence(alone(backend, calls))
    ids, original = backend._chat.encode(CHATS[2]), backend._lm.forward
    bad = ids[backend._chat.shared(CHATS[2], ids) :]

    @functools.wraps(original)
    def picky(*arguments: Any, **options: Any) -> Any:
        if bad in options["input_ids"][:, -len(bad) :].tolist():
            raise RuntimeError("odd one")
        return original(*arguments, **options)

    monkeypatch.setattr(backend._lm, "forward", picky)
    found = together(backend, calls)
    assert isinstance(found.pop(2), RuntimeError)
    assert essence(found) == [expected[0], expected[1], expected[3]]
    assert "odd one; the 4 calls under way run one by one" in caplog.text
    monkeypatch.undo()
    assert essence(together(backend, calls)) == expected, "later calls share a batch again"


def test_closing_ends_greedy_calls_too(backend: HFBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = rows_of(backend, monkeypatch)

    async def go() -> list[Any]:
        calls = [asyncio.create_task(backend.complete(item, Sampling(max_tokens=900))) for item in CHATS[:2]]
        while not shapes:
            await asyncio.sleep(0.001)
        await backend.close()
        return await asyncio.gather(*calls, return_exceptions=True)

    assert all(isinstance(error, CallError) and "was closed" in str(error) for error in asyncio.run(go()))
    assert len(shapes) < 500
    assert together(backend, [(CHATS[0], GREEDY)])[0].completion_tokens


def with_template(folder: Path, target: Path, template: str | None) -> Path:
    from transformers import AutoTokenizer

    shutil.copytree(folder, target)
    for file in target.glob("chat_template*"):
        file.unlink()
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(target)
    return target


def test_a_base_model(tiny_llama: Path, tmp_path: Path) -> None:
    folder = with_template(tiny_llama, tmp_path / "base", None)
    with pytest.raises(ValueError, match=r"no chat template.*set plain=True"):
        HFBackend(str(folder), dtype="float32")
    backend = HFBackend(str(folder), dtype="float32", plain=True)
    assert together(backend, [(chat("Who?"), GREEDY)])[0].completion_tokens
    asyncio.run(backend.close())


def test_options_of_the_template(tiny_llama: Path, tmp_path: Path) -> None:
    folder = with_template(tiny_llama, tmp_path / "loud", "{{ messages[-1]['content'] }}{% if loud %}!!!{% endif %}")
    backend = HFBackend(str(folder), dtype="float32", template_options={"loud": True})
    assert backend._tokenizer.decode(backend._chat.encode(chat("Who?"))) == "Who?!!!"
    assert backend.model == f'hf:{folder} {{"loud":true}}'


def test_options_that_make_no_sense(tiny_llama: Path) -> None:
    with pytest.raises(ValueError, match="batch_size 0"):
        HFBackend(str(tiny_llama), batch_size=0)
    with pytest.raises(ValueError, match="dtype 'int8'"):
        HFBackend(str(tiny_llama), dtype="int8")
    with pytest.raises(FileNotFoundError):
        HFBackend("./no/such/model")


def test_what_it_is_called(backend: HFBackend, tiny_llama: Path) -> None:
    assert backend.model == f"hf:{tiny_llama}"
    assert repr(backend) == f"HFBackend('hf:{tiny_llama}', batch_size=4)"
