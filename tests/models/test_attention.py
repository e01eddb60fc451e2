"""Attention in blocks of queries gives what torch's kernel gives."""

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tripletune.models import attention
from tripletune.models.attention import block_attention, set_attention


class Layer(nn.Module):
    is_causal = True
    num_key_value_groups = 3


@pytest.mark.parametrize("length", [1, 3, 8, 21])
@pytest.mark.parametrize("kind", ["none", "boolean", "added"])
def test_outputs_and_gradients_are_those_of_torch(length, kind, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(attention, "_QUERIES_PER_BLOCK", 5)
    inputs = [torch.randn(2, heads, length, 8, requires_grad=True) for heads in (6, 2, 2)]
    mask = torch.ones(2, 1, length, length, dtype=torch.bool).tril()
    mask[1, :, 2:, 0] = False
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    given = {"none": None, "boolean": mask, "added": added}[kind]
    found = []
    for attend in (sdpa_attention_forward, block_attention):
        output = attend(Layer(), *inputs, given, scaling=0.3)[0]
        found.append((output, *torch.autograd.grad((output * output.detach().cos()).sum(), inputs)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_rows_end_to_end_do_not_see_each_other(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(attention, "_QUERIES_PER_BLOCK", 3)
    lengths = (7, 0, 1, 10)
    mask = torch.arange(10) < torch.tensor(lengths)[:, None]
    inputs = [torch.randn(1, heads, 18, 8, requires_grad=True) for heads in (6, 2, 2)]
    parts = zip(*(one.split(lengths, 2) for one in inputs), strict=True)
    apart = [sdpa_attention_forward(Layer(), *part, None)[0] for part in parts if part[0].shape[2]]
    found = []
    for output in (torch.cat(apart, 1), block_attention(Layer(), *inputs, mask[None, None])[0]):
        found.append((output, *torch.autograd.grad((output * output.detach().cos()).sum(), inputs)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_autocast_computes_in_its_type():
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, 8, 8, requires_grad=True) for heads in (6, 2, 2)]
    with torch.autocast("cpu", torch.bfloat16):
        found = block_attention(Layer(), *inputs, None)[0]
    assert found.dtype is torch.bfloat16
    found.float().sum().backward()
    torch.testing.assert_close(found.float(), sdpa_attention_forward(Layer(), *inputs, None)[0], atol=3e-2, rtol=3e-2)


def test_what_is_not_plain_self_attention_goes_to_torch(make_graph_llm, monkeypatch):
    query, key = torch.randn(1, 6, 1, 8), torch.randn(1, 2, 5, 8)
    expected = sdpa_attention_forward(Layer(), query, key, key, None)[0]
    assert block_attention(Layer(), query, key, key, None)[0].equal(expected)
    model = make_graph_llm("llama")[0].language_model
    monkeypatch.setattr(type(model), "_supports_attention_backend", False)
    with pytest.raises(ValueError, match="brings its own attention; set model"):
        set_attention(model, "blocks")
