import pytest
import torch
from transformers import AutoModelForCausalLM

from tripletune.models.losses import learn_labels_only


@pytest.mark.parametrize("family", ["llama", "smollm2", "qwen3", "gemma2", "gemma3", "granite", "gpt2", "cohere"])
def test_logits_at_labels_give_the_loss_and_gradients_of_all_logits(tiny_model, family):
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


def test_a_family_with_a_scale_of_its_own_keeps_its_own_loss(tiny_llama):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    inner = model.forward

    def scaled(*args, **kwargs):
        output = inner(*args, **kwargs)
        output.logits = output.logits * 3
        return output

    model.forward = scaled
    assert not learn_labels_only(model)
    assert model.forward is scaled


def test_a_batch_without_labels_learns_nothing(tiny_llama):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    learn_labels_only(model)
    ids = torch.full((1, 6), 5)
    loss = model(input_ids=ids, labels=torch.full((1, 6), -100)).loss
    loss.backward()
    assert loss.item() == 0
