import asyncio
import json
import shutil
from dataclasses import replace

import pytest
import torch

from tests.fakes import flip_last_byte, on_forward, shapes_read
from tripletune.core.calls import CallError, Sampling, SetupError
from tripletune.eval.suites._run_settings import chat_model_setting
from tripletune.llm.backends import LLMOptions, open_client
from tripletune.llm.backends.hf import HFBackend
from tripletune.models.fingerprints import model_fingerprint
from tripletune.models.loading import load_causal_lm
from tripletune.models.local.requests import Draw, Request
from tripletune.models.lora import add_lora
from tripletune.rag.extractor import teacher_extractor

GREEDY = Sampling(max_tokens=12)
WARM = Sampling(temperature=0.8, top_p=0.9, max_tokens=12, seed=1)


def chat(text):
    return [{"role": "system", "content": "Plan."}, {"role": "user", "content": text}]


CHATS = [chat("word " * (7 * n % 5 + 1) + f"question {n}") for n in range(9)]


@pytest.fixture
def backend(tiny_llama):
    made = HFBackend(str(tiny_llama), batch_size=4, dtype="float32")
    made.load()
    yield made
    asyncio.run(made.close())


def together(backend, calls):
    async def go():
        return await asyncio.gather(*(backend.complete(*call) for call in calls), return_exceptions=True)

    return asyncio.run(go())


def alone(backend, calls):
    return [together(backend, [call])[0] for call in calls]


def essence(replies):
    return [(r.text, r.prompt_tokens, r.completion_tokens, r.finish_reason) for r in replies]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gemma2", "gemma3"])
def test_a_reply_does_not_depend_on_its_batch(tiny_model, family):
    backend = HFBackend(str(tiny_model(family)), batch_size=4, dtype="float32")
    settings = [GREEDY, WARM, replace(WARM, max_tokens=5), replace(WARM, top_p=0.5)]
    calls = [(item, sampling) for item in CHATS[:4] for sampling in settings]
    expected = essence(alone(backend, calls))
    assert essence(together(backend, calls)) == expected
    # The tiny one that forgets says the same to everything.
    assert len({text for text, *_ in expected}) > 2 or family == "gemma3"
    asyncio.run(backend.close())


def test_a_chat_that_goes_on_is_read_on_from_where_it_was(backend, tiny_llama, monkeypatch):
    shapes = shapes_read(backend._language_model, monkeypatch)
    turns = chat("long " * 20)
    for number in range(4):
        shapes.clear()
        reply = together(backend, [(turns, GREEDY)])
        fresh = HFBackend(str(tiny_llama), dtype="float32")
        assert essence(reply) == essence(together(fresh, [(turns, GREEDY)]))
        asyncio.run(fresh.close())
        # From the first reply on a chat is known to be one that grows.
        assert (max(width for _, width in shapes) < reply[0].prompt_tokens / 2) == (number > 1)
        turns = [*turns, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": f"And {number}?"}]


def test_seeds(backend):
    def drawn(seeds):
        calls = [(CHATS[0], Sampling(temperature=1.5, max_tokens=12, seed=seed)) for seed in seeds]
        return [reply.text for reply in together(backend, calls)]

    first = drawn([1, 2, 3, 1])
    assert first[0] == first[3]
    assert len(set(first)) == 3
    assert drawn([3, 1]) == [first[2], first[0]]
    assert len(set(drawn([None] * 4))) == 4


def test_sampling_follows_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    draw = Draw(temperature=0.5, top_p=0.98, seed=7)
    rows = 4000
    drawn = [int(draw(logits).argmax()) for _ in range(rows)]
    counts = torch.bincount(torch.tensor(drawn), minlength=4) / rows
    # At temperature 0.5 the shares are 0.865, 0.117, 0.016, 0.002; top_p drops the last, and 0.98 is met by two.
    kept = (logits / 0.5).softmax(-1)[:2]
    assert torch.allclose(counts[:2], kept / kept.sum(), atol=0.02)
    assert counts[2:].sum() == 0
    # What begins again draws the same.
    Request([0], 1, draw=draw).restart()
    assert [int(draw(logits).argmax()) for _ in range(50)] == drawn[:50]


def test_a_prompt_that_is_too_long(backend):
    found = together(backend, [(CHATS[0], GREEDY), (chat("word " * 3000), GREEDY), (CHATS[1], GREEDY)])
    assert isinstance(found[1], CallError)
    assert "context 1024" in str(found[1])
    assert essence([found[0], found[2]]) == essence(alone(backend, [(CHATS[0], GREEDY), (CHATS[1], GREEDY)]))


def test_a_reply_ends_with_the_context(backend):
    empty = together(backend, [(chat(""), GREEDY)])[0].prompt_tokens
    word = len(backend._tokenizer("word word", add_special_tokens=False)["input_ids"]) - len(
        backend._tokenizer("word", add_special_tokens=False)["input_ids"]
    )
    reply = together(backend, [(chat(" word" * ((990 - empty) // word)), Sampling(max_tokens=500))])[0]
    assert reply.prompt_tokens + reply.completion_tokens <= 1024
    if reply.finish_reason == "length":
        assert reply.prompt_tokens + reply.completion_tokens == 1024


def test_a_call_that_does_not_fit_the_memory(backend, monkeypatch):
    def full(passed):
        raise torch.OutOfMemoryError("full")

    on_forward(backend._language_model, monkeypatch, full)
    found = together(backend, [(item, GREEDY) for item in CHATS[:3]])
    assert all(isinstance(error, CallError) and "don't fit the memory" in str(error) for error in found)


def test_greedy_calls_share_a_batch_that_new_ones_join(backend, monkeypatch):
    expected = essence(alone(backend, [(item, GREEDY) for item in CHATS]))
    shapes = shapes_read(backend._language_model, monkeypatch)

    async def go():
        first = [asyncio.create_task(backend.complete(item, GREEDY)) for item in CHATS[:2]]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        return await asyncio.gather(*first, *(backend.complete(item, GREEDY) for item in CHATS[2:]))

    assert essence(asyncio.run(go())) == expected
    steps = [rows for rows, columns in shapes if columns == 1]
    assert max(steps) == 4
    assert len(steps) < sum(tokens for _, _, tokens, _ in expected)


def test_calls_that_nobody_waits_for_are_given_up(backend, monkeypatch):
    shapes = shapes_read(backend._language_model, monkeypatch)

    async def go():
        task = asyncio.create_task(backend.complete(CHATS[0], Sampling(max_tokens=900)))
        while not shapes:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.sleep(0)
        return await backend.complete(CHATS[1], Sampling(max_tokens=3))

    assert asyncio.run(go()).completion_tokens <= 3
    assert len(shapes) < 500


def test_an_event_loop_that_ended_leaves_the_next_one_in_peace(backend):
    expected = essence(alone(backend, [(CHATS[1], GREEDY)]))

    async def left():
        asyncio.get_running_loop().create_task(backend.complete(CHATS[0], Sampling(max_tokens=900)))
        await asyncio.sleep(0.02)

    for _ in range(3):
        asyncio.run(left())
        assert essence(together(backend, [(CHATS[1], GREEDY)])) == expected


def test_one_failing_call_does_not_fail_its_neighbours(backend, monkeypatch, caplog):
    calls = [(item, GREEDY) for item in CHATS[:4]]
    expected = essence(alone(backend, calls))
    ids = backend._chat.encode(CHATS[2])
    bad = ids[backend._chat.shared_length(CHATS[2], ids) :]

    def picky(passed):
        if bad in passed["input_ids"][:, -len(bad) :].tolist():
            raise RuntimeError("odd one")

    on_forward(backend._language_model, monkeypatch, picky)
    found = together(backend, calls)
    assert isinstance(found.pop(2), RuntimeError)
    assert essence(found) == [expected[0], expected[1], expected[3]]
    assert "odd one; the 4 waiting calls now run one by one" in caplog.text
    monkeypatch.undo()
    assert essence(together(backend, calls)) == expected, "later calls share a batch again"


def test_closing_ends_calls_too(backend, monkeypatch):
    shapes = shapes_read(backend._language_model, monkeypatch)

    async def go():
        calls = [asyncio.create_task(backend.complete(item, Sampling(max_tokens=900))) for item in CHATS[:2]]
        while not shapes:
            await asyncio.sleep(0.001)
        await backend.close()
        return await asyncio.gather(*calls, return_exceptions=True)

    assert all(isinstance(error, CallError) and "was closed" in str(error) for error in asyncio.run(go()))
    assert len(shapes) < 500
    assert together(backend, [(CHATS[0], GREEDY)])[0].completion_tokens


def test_a_base_model_and_options_of_the_template(tiny_llama, tmp_path):
    folder = shutil.copytree(tiny_llama, tmp_path / "base")
    template = folder / "chat_template.jinja"
    template.unlink()
    backend = HFBackend(str(folder), dtype="float32", plain=True)
    assert together(backend, [(chat("Who?"), GREEDY)])[0].completion_tokens
    asyncio.run(backend.close())
    template.write_text("{{ messages[-1]['content'] }}{% if loud %}!!!{% endif %}")
    backend = HFBackend(str(folder), dtype="float32", template_options={"loud": True})
    assert backend._tokenizer.decode(backend._chat.encode(chat("Who?"))) == "Plan.\n\nWho?!!!"
    name, _, weights = backend.model.partition("@")
    assert name == f'hf:{folder} {{"loud":true}}'
    assert weights


def _edit(name, **fields):
    def change(folder):
        file = folder / name
        found = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(found | fields))

    return change


# What a reply depends on -> how it becomes another one: in the folder of a model, or an argument.
CHANGES = {
    "weights": lambda folder: flip_last_byte(folder / "model.safetensors"),
    "dtype": {"dtype": "bfloat16"},
    "another dtype": {"dtype": "float16"},
    "template": lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}!"),
    "template in the tokenizer's file": _edit("tokenizer_config.json", chat_template="{{ messages[-1]['content'] }}!"),
    "template options": {"template_options": {"loud": True}},
    "no template": {"plain": True},
    "quantisation": _edit("config.json", quantization_config={"load_in_4bit": True}),
    "a Graph-LLM's instruction": _edit("processor_config.json", planning_instruction="Plan."),
    "a student's prompt": lambda folder: (folder / "prompt.md").write_text("Extract."),
    "added tokens": _edit("added_tokens.json", more=99),
    "settings of generation": _edit("generation_config.json", eos_token_id=3),
    "beams": {"beams": 2},
}


@pytest.mark.parametrize("field", CHANGES)
@pytest.mark.filterwarnings("ignore")
def test_one_identity(tiny_llama, tmp_path, field):
    """The name in the ledger's key and in cards, that of settings and that of stores change with what replies do."""
    folder, change = shutil.copytree(tiny_llama, tmp_path / "model"), CHANGES[field]

    def key(**arguments):
        return HFBackend(str(folder), **arguments).model

    def names():
        extra = given.get("template_options")
        options = LLMOptions("hf", str(folder), dtype=given.get("dtype"), extra=extra and json.dumps(extra))
        client = open_client(options, {})
        return {
            json.dumps(chat_model_setting(options).to_json()),
            teacher_extractor(client, options).model,
            client.model,
        }

    given: dict = {}
    before = (key(), names())
    if callable(change):
        change(folder)
        assert key() != before[0]
    else:
        assert key(**change) != before[0] == key()
        given = change
    if field not in ("beams", "no template"):
        assert not before[1] & names()


def test_an_adapter_is_another_model_when_its_base_is(tiny_llama, tmp_path):
    base, adapter = shutil.copytree(tiny_llama, tmp_path / "base"), tmp_path / "adapter"
    model, _ = load_causal_lm(str(base))
    add_lora(model, rank=1, alpha=1, dropout=0.0, targets=["q_proj"], base=str(base)).save_pretrained(adapter)
    # A copy, as of `cp`, git or a second run of a finished training, has other times.
    found = [
        model_fingerprint(adapter),
        model_fingerprint(shutil.copytree(adapter, tmp_path / "copy", copy_function=shutil.copyfile)),
    ]
    assert len({*found}) == 1
    for change in (
        lambda: flip_last_byte(base / "model.safetensors"),
        lambda: flip_last_byte(adapter / "adapter_model.safetensors"),
        lambda: _edit("adapter_config.json", lora_alpha=3)(adapter),
        lambda: (base / "chat_template.jinja").write_text("x"),
    ):
        change()
        found.append(model_fingerprint(adapter))
    assert len({*found}) == 5


SCHEMA = json.dumps({"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]})


def test_a_schema_is_kept_by_a_grammar(tiny_llama):
    pytest.importorskip("xgrammar", reason="the extra `grammar` is not installed")
    backend = HFBackend(str(tiny_llama), batch_size=4, dtype="float32")
    with_schema = replace(GREEDY, schema=SCHEMA, max_tokens=40)
    free, kept = together(backend, [(CHATS[0], GREEDY), (CHATS[1], with_schema)])
    assert json.loads(kept.text).keys() == {"yes"}
    assert essence([free]) == essence(alone(backend, [(CHATS[0], GREEDY)]))
    (bad,) = together(backend, [(CHATS[0], replace(GREEDY, schema='{"type": "nothing"}'))])
    assert isinstance(bad, CallError)
    assert "can't be used as a grammar" in str(bad)


def test_a_schema_that_can_not_be_kept_is_refused(tiny_llama):
    backend = HFBackend(str(tiny_llama), dtype="float32", beams=2)
    (refused,) = together(backend, [(CHATS[0], replace(GREEDY, schema=SCHEMA))])
    assert isinstance(refused, SetupError)
    assert "tripletune[grammar]" in str(refused)
