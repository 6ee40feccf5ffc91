"""torch's own modules with biases and gammas that are not trivial, for the tests of recording."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import ikattn
from ikattn.maps import Recording
from ikattn.recorder import record

TOLERANCE = 1e-12  # all of it in float64
SUMMED = ("summed", "with_residual", "with_norm", "encoder")


def attention(kernel: str = "stock", **options: Any) -> nn.MultiheadAttention:
    """An attention module of 16 features and 4 heads whose biases are not zero."""
    if kernel == "stock":
        module: Any = nn.MultiheadAttention(16, 4, **options)
    else:
        p = 3.0 if kernel == "rbf" else 2.0
        module = ikattn.MultiheadAttention(16, 4, kernel=kernel, p=p, **options)
    return randomize(module).eval()


def randomize(module: Any) -> Any:
    """Biases and gammas are trivial after construction; here they are not."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1 and "spectral" not in name:
                parameter.add_(0.5 * torch.randn_like(parameter))
    return module


def encoder(norm_first: bool = False, batch_first: bool = True, **options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        16, 4, 32, batch_first=batch_first, norm_first=norm_first, activation="gelu"
    )
    if norm_first:
        options["enable_nested_tensor"] = False  # of which torch would warn that it cannot be
    return randomize(nn.TransformerEncoder(layer, 2, **options)).eval()


def recorded(model: Any, inputs: Any, maps: Any = "all", **options: Any) -> Recording:
    """A call of a model, with named inputs or one, that is recorded."""
    with torch.no_grad(), record(model, maps, **options) as recording:
        model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return recording
