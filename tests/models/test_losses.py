from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tripletune.models.losses import PADDING, check_shared_prefixes, learn_labels_only, prefix_mask


@pytest.mark.parametrize("family", ["llama", "smollm2", "qwen3", "gemma2", "gemma3", "granite", "gpt2", "cohere"])
def test_logits_at_labels_give_the_loss_and_gradients_of_all_logits(
    tiny_model: Callable[[str], Path], family: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family), dtype=torch.float32).eval()
    ids = torch.randint(4, 300, (3, 17), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :9], labels[1, 12:] = -100, -100
    whole = model(input_ids=ids, labels=labels)
    whole.loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    assert learn_labels_only(model)
    found = model(input_ids=ids, labels=labels)
    assert found.logits.shape == (int((labels[:, 1:] != -100).sum()), whole.logits.shape[-1])
    assert found.loss.item() == pytest.approx(whole.loss.item(), rel=1e-5)
    found.loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], atol=1e-4, rtol=1e-3), name
    # Without labels, and where all logits are asked for, nothing has changed.
    assert torch.equal(model(input_ids=ids).logits, whole.logits)
    assert model(input_ids=ids, labels=labels, full_logits=True).logits.shape == whole.logits.shape


def test_a_family_with_a_scale_of_its_own_keeps_its_own_loss(tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    inner = model.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = inner(*args, **kwargs)
        output.logits = output.logits * 3
        return output

    model.forward = scaled
    assert not learn_labels_only(model)
    assert model.forward is scaled


def test_a_batch_without_labels_learns_nothing(tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    learn_labels_only(model)
    ids = torch.full((1, 6), 5)
    loss = model(input_ids=ids, labels=torch.full((1, 6), -100)).loss
    loss.backward()
    assert loss.item() == 0


@settings(deadline=None)
@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=4), st.integers(0, 3))
def test_a_token_sees_its_own_record_alone(first: int, others: list[tuple[int, int]], padding: int) -> None:
    records = [list(range(first))]
    record_of, shared = [0] * first, [0] * first
    for number, (begin, length) in enumerate(others, 1):
        begin = min(begin, first)
        records.append([*range(begin), *range(len(record_of), len(record_of) + length)])
        record_of += [number] * length
        shared += [begin] * length
    record_of += [PADDING] * padding
    shared += [0] * padding
    mask = prefix_mask(torch.tensor([record_of]), torch.tensor([shared]), torch.float32)
    assert mask.shape == (1, 1, len(record_of), len(record_of))
    for query, number in enumerate(record_of[: len(record_of) - padding]):
        seen = (mask[0, 0, query] == 0).nonzero().flatten().tolist()
        record = records[number]
        assert seen == record[: record.index(query) + 1]
    for query in range(len(record_of) - padding, len(record_of)):
        # At least itself, so that no row of scores is empty.
        assert mask[0, 0, query, query] == 0
    assert set(mask.unique().tolist()) <= {0.0, torch.finfo(torch.float32).min}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "gemma2", "gpt2", "gptj", "cohere", "granite"])
def test_families_whose_layers_heed_the_mask_pass(
    family: str, dtype: torch.dtype, tiny_model: Callable[[str], Path]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family), dtype=dtype).train()
    # The window of the tiny gemma2 is 8.
    check_shared_prefixes(model, 8)
    assert model.training


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("gemma2", r"layers that see 8 tokens \(sliding_window\), samples have up to 9"),
        ("gemma3", r"layers that see 8 tokens"),
        ("lfm2", "does not compute the same for a sample that shares its beginning"),
        ("bloom", "does not compute the same"),
    ],
)
def test_other_families_are_refused(family: str, message: str, tiny_model: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family))
    with pytest.raises(ValueError, match=message):
        check_shared_prefixes(model, 9)
