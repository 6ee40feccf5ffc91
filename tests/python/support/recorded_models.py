"""Models with biases and gammas that are not trivial, their maps step by step, and threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import ikattn
from ikattn.maps import Recording
from ikattn.maps.contribution_maps import NormStats
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


class Looks(nn.Module):
    """Attention whose values are its input; a token of the same kind gets ``times`` the weight."""

    def __init__(self, times: float, name: str = "attention") -> None:
        super().__init__()
        attention = nn.MultiheadAttention(2, 1, bias=False, batch_first=True)
        query = torch.eye(2) * 2**0.5 * torch.tensor(times).log()
        with torch.no_grad():
            attention.in_proj_weight.copy_(torch.cat([query, torch.eye(2), torch.eye(2)]))
            attention.out_proj.weight.copy_(torch.eye(2))
        self.add_module(name, attention)
        self.double().eval()

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        (attention,) = self.children()
        return attention(x, x, x, key_padding_mask=padding)[0]


def recorded(model: Any, inputs: Any, maps: Any = "all", **options: Any) -> Recording:
    """A call of a model, with named inputs, several or one, that is recorded."""
    with torch.no_grad(), record(model, maps, **options) as recording:
        if isinstance(inputs, dict):
            model(**inputs)
        else:
            model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    return recording


def pair_vectors(weights: Tensor, value: Tensor, projection: Tensor) -> Tensor:
    """Returns what every pair adds to the output, [B, L, S, D]; heads may share their values."""
    heads = weights.size(1)
    value = value.repeat_interleave(heads // value.size(1), 1)
    by_head = projection.unflatten(1, (heads, -1))
    return torch.einsum("bhts,bhsd,ehd->btse", weights, value, by_head)


def through_norm(y: Tensor, norm: nn.Module, given: Tensor) -> Tensor:
    """Takes vectors of pairs through a norm that was ``given`` their sum."""
    stats = NormStats.of(norm, given)
    y = y - y.mean(-1, keepdim=True) if stats.centered else y
    return y * stats.weight / stats.scale[..., None, None]


def run_in_threads(*functions: Callable[[], None]) -> None:
    """Runs functions at the same time, and raises what one of them raised."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
