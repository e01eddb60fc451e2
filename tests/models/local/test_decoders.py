import copy
import random

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MiniMaxConfig,
    xLSTMConfig,
)

from tests.fakes import on_forward, shapes_read
from tripletune.core import libraries
from tripletune.core.calls import SetupError
from tripletune.models.local import GenerateBatch, decode
from tripletune.models.local.continuous_batch import ContinuousBatch
from tripletune.models.local.fitting import can_batch_continuously, has_attention
from tripletune.models.local.requests import Draw, Request

END, PAD = 2, 3
both = pytest.mark.parametrize("kind", [ContinuousBatch, GenerateBatch])
FAMILIES = ("llama", "qwen3", "granite", "gpt2", "gemma")


def load(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig()
    return model


def prompts(count, seed=0, shared=()):
    chance = random.Random(seed)
    return [[*shared, *(chance.randrange(4, 380) for _ in range(chance.randrange(1, 40)))] for _ in range(count)]


def one_at_a_time(model, given, limit, ends):
    replies = []
    for prompt in given:
        ids, options = torch.tensor([prompt]), {"eos_token_id": list(ends), "pad_token_id": PAD}
        # Without a mask `generate` would leave out padding tokens that a model has written.
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False, **options
        )[0, len(prompt) :].tolist()
        cut = next((place for place, token in enumerate(output) if token in ends), len(output))
        replies.append(output[:cut])
    return replies


def together(model, given, limit, ends, prefix=0, criterion=None, kind=ContinuousBatch, **options):
    batch = kind(model, ends, PAD, **options)
    requests = [Request(list(prompt), limit, prefix, criterion=criterion) for prompt in given]
    for request in requests:
        batch.add(request)
    done = []
    while found := batch.run():
        done += found
    assert sorted(map(id, done)) == sorted(map(id, requests)), "every request comes back once"
    return requests


def replies(*arguments, **options):
    return [one.tokens for one in together(*arguments, **options)]


@pytest.fixture(scope="module")
def llama(tiny_llama):
    return load(tiny_llama)


def several_ends(model, given, limit):
    """End tokens that make replies of very different lengths."""
    free = one_at_a_time(model, given, limit, {END})
    return {END, *(reply[place] for place, reply in zip((0, 3, 7, 15), free) if len(reply) > place)}


@pytest.mark.parametrize("family", FAMILIES)
def test_replies_are_those_of_one_at_a_time_generation(tiny_model, family):
    model, given = load(tiny_model(family)), prompts(12)
    ends = several_ends(model, given, 20)
    wanted = one_at_a_time(model, given, 20, ends)
    assert len({len(reply) for reply in wanted}) > 2, "replies of several lengths, so that rows come and go"
    assert replies(model, given, 20, ends, rows=4) == wanted


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_model_takes_its_cache_by_the_name_of_its_library(name, llama, monkeypatch):
    installed = libraries.cache_argument()

    class OtherVersion(type(llama)):
        def forward(self, *arguments, logits_to_keep=0, position_ids=None, **inputs):
            assert {"cache", "past_key_values"} & set(inputs) == {name}
            inputs[installed] = inputs.pop(name)
            return super().forward(*arguments, logits_to_keep=logits_to_keep, position_ids=position_ids, **inputs)

    other, given = copy.copy(llama), prompts(6)
    wanted = one_at_a_time(llama, given, 10, {END})
    other.__class__ = OtherVersion
    monkeypatch.setattr(libraries, "cache_argument", lambda: name)
    assert has_attention(other)
    assert replies(other, given, 10, {END}, rows=3) == wanted


@pytest.mark.parametrize(
    ("family", "found"), [("llama", True), ("gemma3", True), ("lfm2", True), ("gptj", True), ("mamba", False)]
)
def test_attention_is_found_by_what_a_model_keeps(family, found, tiny_model):
    assert has_attention(load(tiny_model(family))) == found


def test_models_with_a_cache_of_their_own_have_no_attention_that_we_can_use():
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32}
    minimax = MiniMaxConfig(num_hidden_layers=1, num_local_experts=2, num_key_value_heads=2, head_dim=8, **sizes)
    xlstm = xLSTMConfig(vocab_size=64, hidden_size=32, embedding_dim=32, num_heads=4, num_hidden_layers=1)
    for config in (minimax, xlstm):
        assert not has_attention(AutoModelForCausalLM.from_config(config).eval())


@pytest.fixture(scope="module")
def twenty(llama):
    """Twenty prompts, the end tokens of their replies, and these."""
    given = prompts(20, seed=1)
    ends = several_ends(llama, given, 90)
    return given, ends, one_at_a_time(llama, given, 90, ends)


@both
@pytest.mark.parametrize(("rows", "cells"), [(1, 10_000), (3, 10_000), (8, 150), (16, 1), (64, 32_768)])
def test_no_number_of_rows_changes_a_reply(llama, twenty, kind, rows, cells):
    given, ends, wanted = twenty
    found = together(llama, given, 90, ends, kind=kind, rows=rows, cells=cells)
    assert [one.tokens for one in found] == wanted
    assert [one.end in ends for one in found] == [len(reply) < 90 for reply in wanted]
    assert all(one.seconds > 0 for one in found)


def test_a_row_that_ended_is_no_longer_paid_for(llama, monkeypatch):
    given = [[5 + number] * 20 for number in range(8)]
    batch = ContinuousBatch(llama, {END}, PAD, rows=8)
    for number, prompt in enumerate(given):
        batch.add(Request(prompt, 40 if number == 7 else 4))
    shapes = shapes_read(llama, monkeypatch)
    decode(batch, [])
    rows = [shape[0] for shape in shapes]
    assert rows[:4] == [8, 8, 8, 8]
    assert set(rows[4:]) == {1}


@both
def test_after_out_of_memory_no_reply_is_written_twice_and_batches_stay_small(llama, kind, monkeypatch):
    given, restart = prompts(8, seed=6), Request.restart
    ends = several_ends(llama, given, 40)
    wanted = one_at_a_time(llama, given, 40, ends)
    rows, failures, restarted = [], [], []

    def small(passed):
        rows.append(passed["input_ids"].shape[0])
        mask = passed.get("attention_mask")
        # Keys and values fill the memory in the middle of the replies.
        if mask is not None and mask.numel() > 200:
            failures.append(mask.numel())
            raise torch.OutOfMemoryError("too much")

    on_forward(llama, monkeypatch, small)
    monkeypatch.setattr(Request, "restart", lambda self: restarted.append(self.done) or restart(self))
    batch = kind(llama, ends, PAD, rows=8)
    requests = [Request(list(prompt), 40) for prompt in given]
    decode(batch, requests)
    assert [one.tokens for one in requests] == wanted
    assert failures
    # `generate` can't continue in the middle of a reply.
    assert not (restarted if kind is ContinuousBatch else any(restarted))
    rows.clear()
    decode(batch, [Request([5, 6, 7], 4) for _ in range(8)])
    assert max(rows) == batch.rows < 8


def test_a_sample_that_ran_out_of_memory_is_drawn_again_from_its_start(llama, monkeypatch):
    given = prompts(4, seed=6)

    def drawn():
        requests = [Request(list(prompt), 20, draw=Draw(1.0, seed=number)) for number, prompt in enumerate(given)]
        decode(ContinuousBatch(llama, {END}, PAD, rows=4), requests)
        return [one.tokens for one in requests]

    wanted = drawn()

    def small(passed):
        if passed["attention_mask"].numel() > 120:
            raise torch.OutOfMemoryError("too much")

    on_forward(llama, monkeypatch, small)
    assert drawn() == wanted


@both
def test_no_token_is_chosen_by_logits_that_are_not_finite(llama, kind):
    broken = copy.deepcopy(llama)
    broken.lm_head.weight.data.fill_(3e38)  # finite, and their sums are not
    with pytest.raises(SetupError, match="logits are not finite"):
        replies(broken, prompts(2, seed=7), 4, {END}, kind=kind)


@both
def test_a_stopping_criterion_ends_a_reply(llama, kind):
    given = prompts(6, seed=7)
    wanted = one_at_a_time(llama, given, 12, {END})
    found = replies(llama, given, 12, {END}, kind=kind, rows=4, criterion=lambda request: len(request.tokens) == 5)
    assert found == [reply[:5] for reply in wanted]


def test_what_can_not_work_is_refused(llama, tiny_model):
    sliding = load(tiny_model("gemma3"))
    assert can_batch_continuously(llama)
    assert not can_batch_continuously(sliding)
    windows = GPTNeoConfig(hidden_size=8, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]])
    assert not can_batch_continuously(GPTNeoForCausalLM(windows))


def test_several_prefixes_are_read_once_each(llama, monkeypatch):
    one, other = [5, 6, 7, 8, 9, 10, 11, 12], [20, 21, 22, 23, 24]
    given = [*prompts(3, seed=7, shared=one), *prompts(3, seed=8, shared=other), *prompts(2, seed=9)]
    shared = [len(one)] * 3 + [len(other)] * 3 + [0] * 2
    wanted = one_at_a_time(llama, given, 12, {END})
    shapes = shapes_read(llama, monkeypatch)
    batch = ContinuousBatch(llama, {END}, PAD, rows=8)
    for turn in range(2):
        requests = [Request(list(prompt), 12, size) for prompt, size in zip(given, shared)]
        shapes.clear()
        decode(batch, requests)
        assert [request.tokens for request in requests] == wanted
        prefixes = [(1, len(one)), (1, len(other))]
        assert [shape in shapes for shape in prefixes] == [turn == 0] * 2
        rest = [len(prompt) - size for prompt, size in zip(given, shared)]
        assert max(width for _, width in shapes) == max(rest)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_a_prompt_that_goes_on_from_an_earlier_round_is_read_on_from_there(tiny_model, family, monkeypatch):
    model = load(tiny_model(family))
    read = shapes_read(model, monkeypatch)
    given, found = prompts(8, seed=11, shared=[5, 6, 7] * 10), [[40, 41, 42], [43], [44] * 9]
    batch = ContinuousBatch(model, {END}, PAD, rows=4)
    for turn, limit in zip(range(4), (6, 9, 1, 6)):
        read.clear()
        requests = [Request(list(prompt), limit, grows=True) for prompt in given]
        decode(batch, requests)
        # Then what was found, and the last token of the reply where it stopped at its limit.
        unread = max(map(len, given)) if turn == 0 else len(found[turn - 1]) + 1
        assert max(width for _, width in read) <= unread
        assert [request.tokens for request in requests] == one_at_a_time(model, given, limit, {END})
        given = [request.sequence + found[turn % 3] for request in requests]
        assert len(batch._kept) == len(given)


def test_a_prompt_that_is_nothing_but_its_prefix_is_read_as_a_whole(llama):
    prompt = [5, 6, 7, 8]
    assert replies(llama, [prompt], 6, {END}, prefix=len(prompt)) == one_at_a_time(llama, [prompt], 6, {END})


# `generate`.

LENGTHS = [[5, 6], [7] * 30, [8, 9, 10], [11] * 28, [12], [13] * 9]


def test_beams_do_not_depend_on_the_batch(llama):
    beams = replies(llama, LENGTHS, 12, {END}, kind=GenerateBatch, rows=4, beams=3)
    assert beams == replies(llama, LENGTHS, 12, {END}, kind=GenerateBatch, rows=1, beams=3)
    assert beams != one_at_a_time(llama, LENGTHS, 12, {END})


def test_the_models_own_settings_stay_its_own(llama, monkeypatch):
    own = GenerationConfig(repetition_penalty=5.0, do_sample=True, temperature=3.0)
    wanted = one_at_a_time(llama, LENGTHS, 12, {END})
    monkeypatch.setattr(llama, "generation_config", own)
    assert replies(llama, LENGTHS, 12, {END}, kind=GenerateBatch) == wanted
    assert llama.generation_config is own


@both
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_scores_of_a_reply_are_those_of_the_whole_sequence(llama, kind, temperature):
    batch = kind(llama, {END}, PAD, rows=3)
    requests = []
    for number, prompt in enumerate(prompts(6, seed=3)):
        draw = Draw(temperature, seed=number) if temperature else None
        requests.append(Request(prompt, 9, draw=draw, scored=number != 5))
    decode(batch, requests)
    for request in requests[:5]:
        logits = llama(torch.tensor([request.sequence])).logits[0, len(request.prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)
        chosen = logprobs[range(len(request.tokens)), request.tokens]
        best, second = logprobs.topk(2).values.T
        scores = request.completion("").scores
        assert scores.logprob == pytest.approx(chosen.mean().item(), abs=1e-4)
        assert scores.margin == pytest.approx((best - second).mean().item(), abs=1e-4)
        assert len(request.logprobs) == len(request.tokens), "the end of sequence has no score"
    assert requests[5].completion("").scores is None
    assert requests[0].restart().completion("").scores is None
