"""Packed linear layers give what torch's give."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM

from tripletune.models.local import Request, decode
from tripletune.models.local.continuous_batch import ContinuousBatch
from tripletune.models.local.packing import PackedLinear, pack, settle

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not torch.backends.mkldnn.is_available(), reason="on CPUs that oneDNN knows"
)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_are_those_of_torch(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(24, 40, bias, dtype=dtype), nn.Linear(40, 8, bias, dtype=dtype))
    assert type(pack(copy.deepcopy(layers))[0]) is nn.Linear
    packed = pack(copy.deepcopy(layers).requires_grad_(False))
    if dtype is not torch.bfloat16:
        assert isinstance(packed[0], PackedLinear) is (dtype is torch.float32)
    for shape in ((1, 1, 24), (3, 7, 24), (5, 24)):
        given = torch.randn(*shape, dtype=dtype)
        tolerance = 1e-5 if dtype is torch.float32 else 1e-2
        with torch.inference_mode():
            torch.testing.assert_close(packed(given), layers(given), atol=tolerance, rtol=tolerance)
            part = given.transpose(0, -2)
            torch.testing.assert_close(packed(part), layers(part), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_replies_are_those_of_the_model_for_any_number_of_rows(tiny_model, family) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family), dtype=torch.float32).eval()
    given = [[5 + number] * (3 + 4 * (number // 3)) for number in range(6)]

    def replies(rows: int) -> list[list[int]]:
        requests = [Request(prompt, 12) for prompt in given]
        decode(ContinuousBatch(model, {2}, 3, rows), requests)
        return [request.tokens for request in requests]

    wanted, embeddings = replies(1), model.get_input_embeddings()
    assert settle(model) is model
    assert isinstance(model.get_output_embeddings(), PackedLinear)
    assert model.get_input_embeddings() is embeddings
    assert replies(1) == replies(4) == wanted


def test_layers_whose_weights_are_read_without_them_stay() -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    model = MambaForCausalLM(MambaConfig(**sizes)).eval()
    ids = torch.arange(6)[None]
    with torch.inference_mode():
        wanted = model(ids).logits
        assert settle(model)(ids).logits.equal(wanted)
