"""PyTorch Geometric's modules that hold nn.MultiheadAttention, converted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikattn
from agreement import assert_close
from attention_cases import explicit
from drawing import moved

torch_geometric = pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
from torch_geometric.nn import GCNConv, GPSConv, aggr  # noqa: E402

C, H, M = 12, 2, 5
SIZES = (4, 1, 7)  # nodes of each graph
TOLERANCE = 1e-11  # all of it in float64


class Convolution(nn.Module):
    """GPSConv with the arguments of an aggregation."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.conv = GPSConv(C, GCNConv(C, C), heads=H, norm="layer_norm", **options)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        nodes = torch.arange(len(index))
        same = index[:-1] == index[1:]  # a path through each graph
        edges = torch.stack([nodes[:-1][same], nodes[1:][same]])
        return self.conv(x, edges, index)


MODULES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "GPSConv": (lambda: Convolution(attn_type="multihead"), 1),
    "GPSConv with bias_k": (lambda: Convolution(attn_kwargs={"add_bias_kv": True}), 1),
    "SetTransformerAggregation": (
        lambda: aggr.SetTransformerAggregation(C, num_seed_points=2, heads=H, layer_norm=True),
        3,
    ),
    "GraphMultisetTransformer": (lambda: aggr.GraphMultisetTransformer(C, k=3, heads=H), 3),
    "MultiAggregation": (
        lambda: aggr.MultiAggregation(
            ["mean", "max", "std"],
            mode="attn",
            mode_kwargs={"in_channels": C, "out_channels": C, "num_heads": H},
        ),
        1,
    ),
}
each_module = pytest.mark.parametrize("name", MODULES)

pytestmark = pytest.mark.usefixtures("float64_by_default")


def converted(name: str) -> nn.Module:
    model = moved(ikattn.convert(MODULES[name][0](), num_frequencies=M, p=3.0), 0.2)
    modules = attention_of(model)
    assert len(modules) == MODULES[name][1]
    assert all(type(module) is ikattn.MultiheadAttention for module in modules)
    return model


class Explicit(ikattn.MultiheadAttention):
    """Computes the attention by torch's own functions, with all weights in memory."""

    def forward(self, *tokens: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        return explicit(self, *tokens, **options)


def attention_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]


def graphs() -> tuple[Tensor, Tensor]:
    """Nodes of all graphs, and the number of each node's graph."""
    index = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
    return torch.randn(len(index), C, requires_grad=True), index


@each_module
def test_outputs_and_gradients_are_those_of_an_explicit_composition(name: str) -> None:
    model = converted(name)
    explicit = copy.deepcopy(model)
    for module in attention_of(explicit):
        module.__class__ = Explicit
    x, index = graphs()

    def trained(model: nn.Module) -> list[Tensor]:
        output = model(x, index)
        return [output, *torch.autograd.grad(output.sin().sum(), [x, *model.parameters()])]

    for found, expected in zip(trained(model), trained(explicit), strict=True):
        assert_close(found, expected, TOLERANCE, scale=1e-3)
    assert all(module.spectral.w1.requires_grad for module in attention_of(model))


@each_module
def test_resetting_parameters_draws_frequencies_anew(name: str) -> None:
    model = converted(name)
    owner = model.conv if isinstance(model, Convolution) else model
    before = [module.spectral.w1.detach().clone() for module in attention_of(model)]
    owner.reset_parameters()
    bound = (H * M) ** -0.5
    for module, old in zip(attention_of(model), before, strict=True):
        assert (module.spectral.w1 != old).all()
        assert module.spectral.w1.abs().max() < bound
