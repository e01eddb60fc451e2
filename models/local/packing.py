"""Linear layers of a model on a CPU, with weights in the order in which oneDNN multiplies them.

torch multiplies float32 matrices by MKL, which on two AMD EPYC cores takes twice as long for 8 to 32 rows and 1.4 times
as long for 64 to 256, and brings 16-bit weights into oneDNN's order anew in every call. The kernels are those that
`torch.compile` uses when it freezes a model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tripletune.models.local.continuous_batch import fits


class PackedLinear(nn.Module):
    """A linear layer that can only be applied.

    Args:
        layer: The layer it stands for.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach()), layer.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs (..., out) of inputs (..., in)."""
        return torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, "none", [], "")


def pack(model: Any) -> Any:
    """A module whose linear layers are packed, where this processor can, but those in training; the module, changed."""
    types = [torch.float32] if torch.backends.mkldnn.is_available() else []
    if types and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        types.append(torch.bfloat16)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and layer.weight.dtype in types and not layer.weight.requires_grad:
                setattr(parent, name, PackedLinear(layer))
    return model


def settle(model: Any) -> Any:
    """Where a model that only replies computes fastest: on the GPU, or on the CPU with its linear layers packed.

    What is packed can't be trained or saved. An output layer that shared its weights with the embeddings has its own.
    Models with other layers than attention are left as they are: some read a layer's weights without applying it.
    """
    if torch.cuda.is_available():
        return model.to("cuda")
    return pack(model.requires_grad_(False)) if fits(model) else model
