"""Replies of the Graph-LLM; what its decoding service does with many calls is in `llm/backends/test_hf.py`."""

import asyncio
from dataclasses import replace

import pytest
import torch

from tests.cli import sql
from tests.fakes import on_forward, shapes_read
from tripletune.core.calls import SAMPLE_SEED, Sampling
from tripletune.llm.graph_generator import LocalGenerator, load_generator
from tripletune.models.graph_llm import GraphLLM, add_adapter, is_graph_llm_folder


@pytest.fixture
def generator(make_graph_llm, embeddings):
    model, processor = make_graph_llm(graph_dropout=0.5)
    return LocalGenerator(model, processor, batch_size=3, embeddings=embeddings)


class Near(tuple):
    """Scores that equal others within 0.001. (Rounded ones would differ where two lie on both sides of a half.)"""

    __hash__ = None

    def __eq__(self, other):
        return list(self) == pytest.approx(list(other), abs=1e-3)


def essence(completion):
    """Everything but the time, where it came from, and the last digits of its scores."""
    return replace(completion, seconds=0.0, cached=False, scores=completion.scores and Near(completion.scores))


def test_many_at_once_are_as_one_by_one(generator, records):
    inputs = [record.input for record in records]
    together = generator.generate_many(inputs, 8)
    alone = [generator.generate_many([sample], 8)[0] for sample in inputs]
    assert [essence(reply) for reply in together] == [essence(reply) for reply in alone]
    assert len({reply.text for reply in together}) > 4
    assert [reply.prompt_tokens for reply in together] == [
        len(generator.processor.encode_input(sample).input_ids) for sample in inputs
    ]


def test_replies_are_those_of_generate(generator, records, monkeypatch):
    inputs = [record.input for record in records]
    found = generator.generate_many(inputs, 8)
    monkeypatch.setattr("tripletune.models.local.continuous_batch.can_batch_continuously", lambda model: False)
    assert [essence(reply) for reply in generator.generate_many(inputs, 8)] == [essence(reply) for reply in found]


def test_limits_and_evidence_are_not_mixed_up(generator, records):
    sample = records[1].input

    async def calls():
        return await asyncio.gather(
            generator.generate(sample, 2),
            generator.generate(sample, 5),
            generator.generate(sample, 5, "text"),
        )

    replies = asyncio.run(calls())
    expected = [(2, None), (5, None), (5, "text")]
    for reply, (limit, evidence) in zip(replies, expected):
        assert essence(reply) == essence(generator.generate_many([sample], limit, evidence)[0])
        assert reply.completion_tokens <= limit
    assert replies[2].prompt_tokens != replies[1].prompt_tokens


@pytest.mark.parametrize(("order", "share"), [("instruction_first", 1.0), ("history_first", 0.9), ("interleaved", 0.6)])
def test_rounds_of_a_question_are_read_on_from_each_other(
    order, share, make_graph_llm, embeddings, records, monkeypatch
):
    model, processor = make_graph_llm(processor_settings={"prompt_order": order})
    generator = LocalGenerator(model, processor, embeddings=embeddings)
    asked = [records[0], records[6], records[9]]
    others = (records[1].steps[1], records[7].steps[0])
    rounds = [[replace(one.input, steps=one.steps + others[:number]) for one in asked] for number in range(3)]
    rounds += [[replace(one, task="answering") for one in rounds[-1]]]
    # The same text with another graph is not gone on from.
    rounds += [[replace(one, graph_of=others) for one in rounds[-1]]]
    expected = [generator.generate_many(inputs, 6) for inputs in rounds]
    shapes = shapes_read(model, monkeypatch)

    async def loop():
        return [await asyncio.gather(*(generator.generate(one, 6) for one in inputs)) for inputs in rounds]

    for found, wanted in zip(asyncio.run(loop()), expected):
        assert [essence(reply) for reply in found] == [essence(reply) for reply in wanted]
    prompts = sum(reply.prompt_tokens for replies in expected for reply in replies)
    written = sum(reply.completion_tokens for replies in expected for reply in replies)
    assert sum(rows * width for rows, width in shapes) - written < share * prompts or share == 1.0


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_and_the_mode_is_restored(make_graph_llm, embeddings, records, training):
    base, processor = make_graph_llm(graph_dropout=0.9)
    model = add_adapter(base, dropout=0.9)
    generator = LocalGenerator(model, processor, embeddings=embeddings)
    expected = [essence(reply) for reply in generator.generate_many([record.input for record in records], 6)]
    model.train(training)
    replies = generator.generate_many([record.input for record in records], 6)
    assert [essence(reply) for reply in replies] == expected
    assert model.training is training
    assert base.graph_encoder.training is training


def test_truncation_is_reported(make_graph_llm, embeddings, records):
    length = len(make_graph_llm()[1].encode_input(records[1].input).input_ids)
    model, processor = make_graph_llm(processor_settings={"max_input_tokens": length - 1})
    reply = LocalGenerator(model, processor, embeddings=embeddings).generate_many([records[1].input], 2)[0]
    assert reply.truncated_triples == 1
    assert reply.prompt_tokens < length


def test_loading_a_plain_model(tiny_llama, records):
    assert not is_graph_llm_folder(tiny_llama)
    generator = load_generator(tiny_llama, batch_size=2)
    assert len(generator.generate_many([record.input for record in records[:3]], 3)) == 3
    assert generator.generate_many([], 3) == []


@pytest.mark.parametrize(
    ("use_graph", "options"),
    [(True, {}), (True, {"tune": "graph_token"}), (True, {"tune": "all"}), (True, {"targets": ("all-linear",)}),
     (False, {}), (False, {"tune": "all"})],
)  # fmt: skip
def test_a_trained_model_replies_as_it_did_in_training(
    make_graph_llm, embeddings, records, tmp_path, use_graph, options
):
    base, processor = make_graph_llm(use_graph=use_graph)
    model = add_adapter(base, **options)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    inputs = [record.input for record in records[:6]]
    expected = LocalGenerator(model, processor, embeddings=embeddings).generate_many(inputs, 8)
    model.save_pretrained(tmp_path)
    base.config.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    found = load_generator(tmp_path).generate_many(inputs, 8)
    assert [essence(reply) for reply in found] == [essence(reply) for reply in expected]


def test_an_adapter_is_left_beside_16_bit_weights(make_graph_llm, embeddings, records, tmp_path):
    base, processor = make_graph_llm(dtype=torch.bfloat16)
    model = add_adapter(base)
    model.save_pretrained(tmp_path)
    base.config.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    for dtype, merged in (("bfloat16", False), ("float32", True)):
        found = load_generator(tmp_path, dtype=dtype)
        assert type(found.graph_llm) is GraphLLM
        assert merged == (not any("lora_" in name for name, _ in found.graph_llm.named_modules()))
        assert all(reply.text for reply in found.generate_many([record.input for record in records[:4]], 6))


def test_a_batch_that_did_not_fit_stays_smaller(generator, records, monkeypatch):
    inputs = [record.input for record in records]
    expected = generator.generate_many(inputs, 4)
    failures = []

    def small(passed):
        if len(passed["input_ids"]) > 1:
            failures.append(len(passed["input_ids"]))
            raise torch.OutOfMemoryError("full")

    on_forward(generator.graph_llm, monkeypatch, small)
    for times in (1, 1):
        assert [essence(reply) for reply in generator.generate_many(inputs, 4)] == [essence(one) for one in expected]
        assert (generator.batch_size, len(failures)) == (1, times)


def test_calls_are_kept_in_a_ledger(tiny_llama, records, tmp_path, monkeypatch):
    inputs = [record.input for record in records[:5]]
    # The same text with another graph is another call.
    inputs += [replace(one, graph_of=graph) for one in inputs[-1:] for graph in ((), records[0].steps, one.steps)]

    def replies(seed=None):
        generator = load_generator(tiny_llama, ledger=tmp_path / "ledger.sqlite")
        if seed is not None:
            generator.sampling = Sampling(1.0, seed=seed)

        async def calls():
            found = await asyncio.gather(*(generator.generate(sample, 5) for sample in inputs))
            await generator.close()
            return found

        return asyncio.run(calls())

    first = replies()
    assert not any(reply.cached for reply in first)
    assert len({reply.key for reply in first}) == len(inputs)
    # With seed 1, torch 2.6 draws an empty reply, which a ledger does not keep.
    drawn = replies(3)
    # A sample with another number is another call.
    assert len({tuple(reply.text for reply in found) for found in (first, drawn, replies(2))}) == 3
    # A second run needs no model.
    monkeypatch.setattr(LocalGenerator, "decode", None)
    second = replies()
    assert all(reply.cached for reply in second)
    assert [essence(reply) for reply in second] == [essence(reply) for reply in first]
    assert [essence(reply) for reply in replies(3)] == [essence(reply) for reply in drawn]
    roles = sql(tmp_path / "ledger.sqlite", "SELECT DISTINCT role FROM uses")
    assert {role for (role,) in roles} == {f"ras.{sample.task}" for sample in inputs}


@pytest.mark.parametrize("order", ["instruction_first", "interleaved"])
def test_a_reply_that_was_begun_is_continued(make_graph_llm, embeddings, records, tmp_path, order):
    model, processor = make_graph_llm(processor_settings={"prompt_order": order})
    plan = next(record for record in records if record.task == "planning" and record.steps)
    begun = replace(plan.input, begun="[SUBQ]")
    replies = []
    for ledger in (None, tmp_path / "ledger.sqlite"):
        generator = LocalGenerator(model, processor, embeddings=embeddings, ledger=ledger)

        async def reply(generator=generator):
            free = await generator.generate(plan.input, 6)
            forced = await generator.generate(begun, 6)
            again = await generator.generate(begun, 6)
            await generator.close()
            return free, forced, again

        free, forced, again = asyncio.run(reply())
        assert forced.text.startswith("[SUBQ]")
        assert forced.text == again.text
        assert forced.prompt_tokens == free.prompt_tokens + len(processor.encode_text("[SUBQ]"))
        replies.append(forced.text)
    assert replies[0] == replies[1]


def test_only_answers_are_scored_and_samples_are_drawn(generator, records):
    plan = next(record.input for record in records if record.task == "planning")
    answer = next(record.input for record in records if record.task == "answering")

    async def reply(sample, seed=None):
        token = SAMPLE_SEED.set(seed)
        try:
            return await generator.generate(sample, 8)
        finally:
            SAMPLE_SEED.reset(token)

    assert asyncio.run(reply(plan)).scores is None
    assert asyncio.run(reply(answer)).scores.logprob < 0
    texts = {asyncio.run(reply(answer, seed)).text for seed in range(4)}
    assert len(texts) > 1
    assert asyncio.run(reply(answer, 2)).text == asyncio.run(reply(answer, 2)).text
