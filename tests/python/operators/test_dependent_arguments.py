"""Arguments that are made of one another, or are one tensor: gradients with and without a graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ikattn


def dependent(name: str, x: Tensor, w: Tensor) -> Tensor:
    """A function of x whose operator has arguments that are made of one another."""
    operators = torch.ops.ikattn
    if name == "attention":
        return ikattn.implicit_kernel_attention(x, x.sin(), x, w, w)
    if name == "weights":
        return ikattn.implicit_kernel_weights(x, x.sin(), w)
    if name == "features":
        return ikattn.ops.spectral_features(x, w * x.mean(), w * x.mean())
    if name == "packed":
        tokens, ends = x[0].transpose(0, 1), torch.tensor([0, x.size(2)])
        return ikattn.implicit_kernel_attention_varlen(tokens, tokens, tokens, w, w, ends, ends)
    if name == "moments":
        features = ikattn.ops.spectral_features(x, w)
        moments, reference = operators.key_moments(features, x.sum(-1), features[..., :3])
        return operators.attention_from_moments(features, moments, reference)[0]
    if name == "contributions":
        weights = ikattn.implicit_kernel_weights(x, x, w)
        maps = ikattn.contributions(weights, x, x.flatten()[:24].view(3, 8))
        return maps.summed
    nodes = x[0].transpose(0, 1)
    rows = torch.arange(nodes.size(0) + 1)
    edges = ikattn.ops.Edges(rows, torch.arange(nodes.size(0)).flip(0))
    return ikattn.implicit_kernel_edge_attention(nodes, nodes.cos(), nodes, edges, w)


@pytest.mark.parametrize(
    "name", ["attention", "weights", "features", "packed", "moments", "contributions", "edges"]
)
def test_create_graph_changes_no_gradient_where_arguments_depend_on_each_other(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 2, 5, 4, generator=generator, dtype=torch.float64).requires_grad_()
    w = (0.2 * torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)).requires_grad_()
    direction = torch.linspace(-1, 1, dependent(name, x, w).numel(), dtype=torch.float64)

    def gradients(create_graph: bool) -> tuple[Tensor, ...]:
        scalar = dependent(name, x, w).flatten() @ direction
        return torch.autograd.grad(scalar, (x, w), create_graph=create_graph)

    for one, other in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert torch.autograd.gradgradcheck(lambda x, w: dependent(name, x, w), (x, w), atol=1e-4)
