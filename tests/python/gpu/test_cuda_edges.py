"""Attention over edges on a GPU, against the CPU: the same definition, tested there in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ikattn
from gpu import on_gpu

N_Q, N_K, H, SIZE, M = 20, 15, 2, 8, 5


def graph(edges: int, into_one: int = 0) -> ikattn.ops.Edges:
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(N_K, (edges,), generator=generator)
    target = torch.randint(N_Q - 2, (edges,), generator=generator)
    target[:into_one], source[edges - into_one :] = 3, 2
    return ikattn.ops.Edges.from_coo(source, target, N_Q)


def arguments(form: str, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    nodes = [normal(N_Q, H, SIZE), normal(N_K, H, SIZE), normal(N_K, H, 4)]
    if form == "gat":
        names = ("target", "source", "value", "vector", "w1", "w2")
        frequencies = [0.2 * normal(H, 2 * SIZE, M) for _ in range(2)]
        return dict(zip(names, [*nodes, normal(H, 2 * SIZE), *frequencies], strict=True))
    result = dict(zip(("query", "key", "value"), nodes, strict=True))
    if form == "implicit":
        result |= {"w1": 0.2 * normal(H, SIZE, M), "w2": 0.2 * normal(H, SIZE, M)}
    return result


FORMS = {
    "implicit": ikattn.implicit_kernel_edge_attention,
    "softmax": ikattn.ops.softmax_edge_attention,
    "gat": ikattn.ops.gat_edge_attention,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", ["plain", "bias, dropout"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("edges", [(60, 0), (2600, 1500)], ids=["short rows", "long rows"])
def test_edge_attention_is_that_of_the_cpu(form, options, dtype, edges) -> None:
    given = arguments(form, dtype)
    if options != "plain":
        bias = torch.randn(edges[0], H, generator=torch.Generator().manual_seed(3)).to(dtype)
        bias[::7] = -torch.inf
        given |= {"edge_bias": bias, "dropout_p": 0.25, "dropout_seed": torch.tensor([5, 7])}

    def results(given: dict[str, Any], on: ikattn.ops.Edges) -> list[Tensor]:
        leaves = {
            name: x.detach().requires_grad_()
            for name, x in given.items()
            if isinstance(x, Tensor) and x.is_floating_point()
        }
        output, weights = FORMS[form](edges=on, return_weights=True, **(given | leaves))
        incoming = (output.detach().cos(), weights.detach().sin())
        grads = torch.autograd.grad((output, weights), list(leaves.values()), incoming)
        return [x.detach().cpu().double() for x in (output, weights, *grads)]

    order = graph(*edges)
    there = ikattn.ops.Edges(*(on_gpu({"x": x})["x"] for x in order))
    wanted = results(given, order)
    found = results(on_gpu(given), there)
    tolerance = {torch.float64: 1e-10, torch.float32: 3e-4, torch.bfloat16: 4e-2}[dtype]
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= tolerance * max(other.abs().max(), 1e-3)
    assert torch.equal(results(on_gpu(given), there)[0], found[0])
