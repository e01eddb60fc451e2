import pytest
import torch
from torch import nn

from tripletune.models.graph_llm.loading import add_adapter
from tripletune.train.compiled import as_written, compile_layers


def test_layers_of_the_language_model_alone_are_compiled(make_graph_llm):
    base, _ = make_graph_llm()
    model = add_adapter(base, rank=2, alpha=4, dropout=0.0, targets=("q_proj",))
    names = list(model.state_dict())
    layers = base.get_decoder().layers
    assert compile_layers(base.language_model, "eager") == len(layers)
    assert all(layer._compiled_call_impl is not None for layer in layers)
    assert all(module._compiled_call_impl is None for module in base.graph_encoder.modules())
    assert list(model.state_dict()) == names


def test_a_model_without_layers_is_refused():
    with pytest.raises(ValueError, match="Linear has no stack of equal layers"):
        compile_layers(nn.Linear(2, 2))


def test_without_a_compiler_the_message_says_so(monkeypatch):
    monkeypatch.setattr("tripletune.train.compiled.shutil.which", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="no C\\+\\+ compiler"):
        compile_layers(nn.Sequential(nn.ModuleList([nn.Linear(2, 2)])))


def test_losses_and_gradients_are_those_of_the_model_as_written(make_graph_llm):
    base, _ = make_graph_llm()
    model = add_adapter(base, rank=2, alpha=4, dropout=0.0, targets=("q_proj", "down_proj"))
    model.train()
    base.graph_encoder.eval()

    def step(length):
        generator = torch.Generator().manual_seed(length)
        embeds = torch.randn(2, length, base.config.text_config.hidden_size, generator=generator)
        labels = torch.randint(5, 50, (2, length), generator=generator)
        model.zero_grad()
        loss = model(inputs_embeds=embeds, labels=labels).loss
        loss.backward()
        grads = [p.grad.clone() for n, p in model.named_parameters() if "lora_B" in n]
        return loss.item(), grads

    expected = [step(length) for length in (8, 16)]
    # What inductor makes of the same graphs is measured by benchmarks/training_step.py --compile.
    compile_layers(base.language_model, "aot_eager")
    with as_written():
        before = step(8)
    torch._dynamo.utils.counters.clear()
    found = [step(length) for length in (8, 16, 24)]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "something was compiled"
    assert before[0] == expected[0][0]
    for (loss, grads), (true_loss, true_grads) in zip(found, expected):
        assert loss == pytest.approx(true_loss, rel=1e-4)
        for one, other in zip(grads, true_grads):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
