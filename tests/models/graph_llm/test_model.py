"""The Graph-LLM against plain computation of the same thing, for every family the tests know."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from tripletune.models.attention import lies_end_to_end, set_attention
from tripletune.models.graph_llm import add_adapter
from tripletune.models.graph_llm.model import GraphLLM

FAMILIES = ("llama", "smollm2", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "granite", "cohere")
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": 2, "pad_token_id": 3}


def trained(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def replies(model, batch, tokens, **options):
    """New tokens of each row, up to and with the end of sequence."""
    output = model.generate(**batch, max_new_tokens=tokens, **{**GREEDY, **options})
    rows = output[:, batch["input_ids"].shape[1] :].tolist()
    return [row[: row.index(2) + 1] if 2 in row else row for row in rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_label_only_logits_give_the_full_loss(family, make_graph_llm, make_batch, records):
    model, processor = make_graph_llm(family)
    batch = make_batch(processor, records[:5])
    short = model(**batch)
    full = model(**batch, full_logits=True)
    targets = batch["labels"][:, 1:]
    by_hand = nn.functional.cross_entropy(
        full.logits[:, :-1].flatten(0, 1).float(), targets.flatten(), ignore_index=-100
    )
    assert short.loss.item() == pytest.approx(by_hand.item(), abs=1e-5)
    assert full.loss.item() == pytest.approx(by_hand.item(), abs=1e-5)
    assert short.logits.shape[0] == int((targets != -100).sum())
    assert torch.allclose(short.logits, full.logits[:, :-1][targets != -100], atol=1e-4)
    # Of a family with a scale of its own they are computed everywhere; see `models.losses.scales_logits_alike`.
    model.labels_only = False
    found = model(**batch)
    assert found.loss.item() == full.loss.item()
    assert torch.equal(found.logits, full.logits[:, :-1][targets != -100])


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("gemma2", "gemma3")])
def test_rows_end_to_end_give_the_loss_and_gradients_of_padded_rows(family, make_graph_llm, make_batch, records):
    base, processor = make_graph_llm(family)
    set_attention(base.language_model, "blocks")
    assert lies_end_to_end(base.language_model, 64)
    model = add_adapter(base, targets=("q_proj", "v_proj"), dropout=0.0)
    batch = make_batch(processor, records[:5])
    del batch["attention_mask"]
    lengths = []
    base.language_model.get_decoder().register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs["inputs_embeds"].shape[:2]), with_kwargs=True
    )
    found = []
    for base.end_to_end in (False, True):
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        found.append({"loss": loss.detach(), **trained(model)})
    assert len(found[0]) > 10
    padded, end_to_end = lengths
    assert padded[0] == 5
    assert end_to_end[0] == 1
    assert end_to_end[1] < padded.numel()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, atol=1e-5, rtol=1e-4)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    assert loss == 0
    assert all((weight.grad == 0).all() for weight in model.parameters() if weight.requires_grad)


@pytest.mark.parametrize(
    ("family", "attention", "longest", "apart"),
    [
        ("llama", "blocks", 64, True),
        ("llama", "sdpa", 8, False),
        ("gemma3", "blocks", 8, True),  # its window is 8
        ("gemma3", "blocks", 9, False),
        ("lfm2", "blocks", 8, False),
    ],
)
def test_models_that_do_not_keep_rows_apart_are_found(family, attention, longest, apart, make_graph_llm):
    model = make_graph_llm(family)[0].language_model.train()
    set_attention(model, attention)
    assert lies_end_to_end(model, longest) == apart
    assert model.training


def test_a_base_model_without_attention_is_refused(make_graph_llm):
    with pytest.raises(ValueError, match="MambaForCausalLM has no attention layer"):
        make_graph_llm("mamba")


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_language_model_gets_the_cache_by_its_own_name(name, make_graph_llm, monkeypatch):
    """The name depends on the version of transformers, and an export runs in any version."""
    model, _ = make_graph_llm()
    given, before = {}, object()
    monkeypatch.setattr(model.language_model, "forward", lambda **inputs: given.update(inputs) or "output")
    assert model(input_ids=torch.tensor([[5, 6]]), **{name: before}) == "output"
    assert {key: given[key] for key in ("cache", "past_key_values") if key in given} == {name: before}


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt2", "gptj"])
def test_padding_on_the_right_needs_no_mask(family, make_graph_llm, make_batch, records):
    model, processor = make_graph_llm(family)
    batch = make_batch(processor, records[:5])
    with_mask = model(**batch)
    del batch["attention_mask"]
    assert torch.allclose(model(**batch).logits, with_mask.logits, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma3", "gptj"])
def test_the_future_is_not_seen(family, make_graph_llm, make_batch, records):
    model, processor = make_graph_llm(family)
    batch = make_batch(processor, records[:1])
    del batch["labels"]
    before = model(**batch).logits
    batch["input_ids"][0, -1] = 5
    after = model(**batch).logits
    assert torch.allclose(before[:, :-1], after[:, :-1], atol=1e-5)
    assert not torch.allclose(before[:, -1], after[:, -1], atol=1e-3)


@pytest.mark.parametrize("family", [*FAMILIES, "gpt2"])
def test_generation_with_and_without_cache_and_by_hand(family, make_graph_llm, make_batch, records):
    model, processor = make_graph_llm(family)
    batch = make_batch(processor, [records[1], records[3], records[7]], labels=False, side="left")
    cached = replies(model, batch, 10)
    assert replies(model, batch, 10, use_cache=False) == cached
    # Else this would hold for a model that reads nothing.
    assert family != "llama" or len({tuple(row) for row in cached}) == 3
    for number, record in enumerate([records[1], records[3], records[7]]):
        one = make_batch(processor, [record], labels=False)
        by_hand: list[int] = []
        while len(by_hand) < 10 and 2 not in by_hand:
            ids = torch.cat([one["input_ids"], torch.tensor([by_hand], dtype=torch.long)], 1)
            by_hand.append(int(model(input_ids=ids, graphs=one["graphs"]).logits[0, -1].argmax()))
        assert cached[number] == by_hand
        assert replies(model, one, 10) == [by_hand]


def test_beams_search_with_the_graph_of_their_own_row(make_graph_llm, make_batch, records):
    model, processor = make_graph_llm()
    rows = [records[1], records[3], records[7]]
    batch = make_batch(processor, rows, labels=False, side="left")
    together = replies(model, batch, 6, num_beams=3)
    alone = [replies(model, make_batch(processor, [row], labels=False), 6, num_beams=3)[0] for row in rows]
    assert together == alone
    sampled = model.generate(
        **batch, max_new_tokens=4, do_sample=True, num_return_sequences=2, eos_token_id=2, pad_token_id=3
    )
    assert sampled.shape[0] == 6


def test_the_graph_changes_its_own_row_alone(make_graph_llm, make_batch, records):
    model, processor = make_graph_llm()
    batch = make_batch(processor, records[:3])
    del batch["labels"]
    graphs = batch.pop("graphs")
    tokens = model.projector(model.graph_encoder(graphs))
    before = model(**batch, graph_embeds=tokens).logits
    assert torch.allclose(before, model(**batch, graphs=graphs).logits, atol=1e-5)
    tokens = tokens.clone()
    tokens[1] += 1.0
    change = (model(**batch, graph_embeds=tokens).logits - before).abs().amax((1, 2))
    assert change[1] > 1e-3
    assert change[[0, 2]].max() == 0
    # Nothing before the placeholder can know of it.
    place = int((batch["input_ids"][1] == processor.graph_token_id).nonzero())
    after = model(**batch, graph_embeds=tokens).logits
    assert torch.equal(after[1, :place], before[1, :place])
    with pytest.raises(ValueError, match="2 graphs were passed for 3 graph placeholders"):
        model(**batch, graph_embeds=tokens[:2])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_normalised_graph_token_holds_what_differs(family, make_graph_llm, make_batch, records, tmp_path):
    paper, _ = make_graph_llm(family)
    model, processor = make_graph_llm(family, graph_token="normalised")
    first = [record for record in records if record.id.endswith("p0")]
    empty = dataclasses.replace(first[0], steps=())
    graphs = make_batch(processor, [*first, empty])["graphs"]
    tokens, theirs = (one.projector(one.graph_encoder(graphs)) for one in (model, paper))
    vocabulary = torch.arange(model.get_input_embeddings().weight.shape[0])
    norm = model.get_input_embeddings()(vocabulary).norm(dim=-1).mean().item()
    assert tokens[:-1].norm(dim=-1).tolist() == pytest.approx([norm] * len(first), rel=0.02)
    assert not tokens[-1].any()

    def likeness(found):
        return nn.functional.cosine_similarity(found[:1], found[1:-1]).mean().item()

    assert likeness(tokens) < likeness(theirs)
    model.save_pretrained(tmp_path)
    again = GraphLLM.from_pretrained(tmp_path)
    assert torch.allclose(again.projector(again.graph_encoder(graphs)), tokens, atol=1e-6)


def test_a_model_without_graph(make_graph_llm, make_batch, records, tiny_llama):
    from transformers import AutoModelForCausalLM

    model, processor = make_graph_llm(use_graph=False)
    assert not hasattr(model, "graph_encoder")
    assert processor.graph_token_id is None
    batch = make_batch(processor, records[:3])
    assert "graphs" not in batch
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    expected = base(input_ids=batch["input_ids"], labels=batch["labels"]).loss
    assert model(**batch).loss.item() == pytest.approx(expected.item(), abs=1e-5)
    del batch["labels"]
    assert replies(model, batch, 3)


def test_label_weights_multiply_the_losses_of_single_tokens(make_graph_llm):
    model, _ = make_graph_llm(use_graph=False)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    labels = torch.tensor([[-100, -100, -100, 8, 9, 10]])

    def loss(weights, **options):
        given = None if weights is None else torch.tensor([weights])
        return float(model(input_ids=ids, labels=labels, label_weights=given, **options).loss)

    one = [loss([0, 0, 0, *(1.0 if n == place else 0.0 for n in range(3))]) for place in range(3)]
    assert sum(one) / 3 == pytest.approx(loss(None), rel=1e-5)
    expected = (4 * one[0] + one[1] + one[2]) / 6
    assert loss([9, 9, 9, 4, 1, 1]) == pytest.approx(expected, rel=1e-5)
    assert loss([9, 9, 9, 4, 1, 1], num_items_in_batch=6) == pytest.approx(expected, rel=1e-5)
    assert loss([9, 9, 9, 4, 1, 1], num_items_in_batch=6, full_logits=True) == pytest.approx(expected, rel=1e-5)
