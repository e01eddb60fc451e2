import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tripletune.models.local import GenerateBatch, Request


@pytest.fixture
def llama(tiny_llama):
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()


def replies(model, prompts, limit=12, criterion=None, **options):
    batch = GenerateBatch(model, [2], 3, **options)
    requests = [Request(list(prompt), limit, criterion=criterion) for prompt in prompts]
    for request in requests:
        batch.add(request)
    sizes = []
    while done := batch.run():
        sizes.append(len(done))
    assert sum(sizes) == len(requests)
    return [request.tokens for request in requests], sizes


PROMPTS = [[5, 6], [7] * 30, [8, 9, 10], [11] * 28, [12], [13] * 9]


def test_no_batch_changes_a_reply(llama):
    wanted, sizes = replies(llama, PROMPTS, rows=1)
    assert sizes == [1] * 6
    for rows, cells in ((2, 10_000), (6, 10_000), (6, 100)):
        found, sizes = replies(llama, PROMPTS, rows=rows, cells=cells)
        assert found == wanted
        assert max(sizes) <= rows
    beams, _ = replies(llama, PROMPTS, rows=4, beams=3)
    assert beams == replies(llama, PROMPTS, rows=1, beams=3)[0]
    assert beams != wanted


def test_requests_of_similar_length_run_together(llama, monkeypatch):
    seen, generate = [], llama.generate

    def watched(input_ids, **options):
        seen.append(tuple(input_ids.shape))
        return generate(input_ids=input_ids, **options)

    monkeypatch.setattr(llama, "generate", watched)
    replies(llama, PROMPTS, rows=2)
    assert sorted(seen) == [(2, 2), (2, 9), (2, 30)] or sorted(seen) == [(2, 3), (2, 9), (2, 30)]


def test_the_models_own_settings_stay_its_own(llama):
    plain, _ = replies(llama, PROMPTS)
    own = GenerationConfig(repetition_penalty=5.0, do_sample=True, temperature=3.0)
    llama.generation_config = own
    assert replies(llama, PROMPTS)[0] == plain
    assert llama.generation_config is own


def test_all_settings_come_in_one_object(llama, monkeypatch):
    # transformers warns of settings beside it, and will refuse them.
    given, original = [], llama.generate

    def generate(**options):
        given.append(options)
        return original(**options)

    monkeypatch.setattr(llama, "generate", generate)
    batch = GenerateBatch(llama, [2], 3)
    for limit in (4, 7):
        batch.add(Request([5, 6], limit))
    while batch.run():
        pass
    assert [one["generation_config"].max_new_tokens for one in given] == [4, 7]
    tensors = {"input_ids", "attention_mask"}
    assert all(set(one) <= {*tensors, "generation_config", "logits_processor", "stopping_criteria"} for one in given)


def test_out_of_memory_halves_the_batch(llama, monkeypatch):
    wanted, _ = replies(llama, PROMPTS)
    generate = llama.generate

    def small(input_ids, **options):
        if input_ids.shape[0] > 1:
            raise torch.OutOfMemoryError("too much")
        return generate(input_ids=input_ids, **options)

    monkeypatch.setattr(llama, "generate", small)
    found, sizes = replies(llama, PROMPTS, rows=4)
    assert found == wanted
    assert sizes == [1] * 6


def test_a_stopped_decoder_does_nothing(llama):
    stopped = GenerateBatch(llama, [2], 3)
    stopped.add(Request([4], 2))
    stopped.stop()
    assert stopped.run() == []


def test_a_stopping_criterion_ends_a_reply(llama):
    wanted, _ = replies(llama, PROMPTS)
    found, _ = replies(llama, PROMPTS, criterion=lambda request: len(request.tokens) == 5)
    assert found == [reply[:5] for reply in wanted]
