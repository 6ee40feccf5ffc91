"""Contribution maps on a GPU, against their definition and the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ikattn
from agreement import assert_close
from contribution_samples import SAMPLES, Sample, definition, differentiable, named, replaced
from gpu import DEVICE, on_gpu
from samples import name_of

every_sample = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)


@every_sample
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=name_of)
def test_maps_are_those_of_the_definition(sample: Sample, dtype: torch.dtype) -> None:
    arguments: dict[str, Any] = sample.arguments(dtype)
    got = named(ikattn.contributions(**on_gpu(arguments), per_head=True))
    expected = named(definition(arguments))
    assert got.keys() == expected.keys()
    for name, map_ in got.items():
        assert_close(map_.cpu(), expected[name], 1e-13 if dtype == torch.float64 else 2e-6, name)


@every_sample
def test_gradients_are_those_of_the_cpu(sample: Sample) -> None:
    def gradients(arguments: dict[str, Any]) -> list[Tensor]:
        leaves = {
            name: x.detach().requires_grad_() for name, x in differentiable(arguments).items()
        }
        maps = named(ikattn.contributions(**replaced(arguments, leaves), per_head=True))
        incoming = [
            torch.linspace(-1, 1, x.numel(), dtype=x.dtype, device=x.device).view_as(x)
            for x in maps.values()
        ]
        found = torch.autograd.grad(list(maps.values()), list(leaves.values()), incoming)
        return [x.cpu() for x in found]

    arguments = sample.arguments()
    for got, expected in zip(gradients(on_gpu(arguments)), gradients(arguments), strict=True):
        assert_close(got, expected, 1e-11)


@pytest.mark.parametrize("kernel", ["dot", "implicit"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_streamed_maps_are_those_of_the_cpu(kernel: str, is_causal: bool) -> None:
    torch.manual_seed(0)
    shapes = {"query": (2, 4, 70, 16), "key": (2, 2, 70, 16), "value": (2, 2, 70, 16)}
    call: dict[str, Any] = {
        name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()
    }
    call |= {"out_proj_weight": torch.randn(40, 64).double(), "enable_gqa": True}
    if kernel == "implicit":
        call["w1"], call["w2"] = torch.randn(2, 4, 16, 9, dtype=torch.float64) / 5
    call["is_causal"] = is_causal
    got = named(ikattn.streamed_contributions(**on_gpu(call)))
    for name, map_ in named(ikattn.streamed_contributions(**call)).items():
        assert_close(got[name].cpu(), map_, 1e-12, name)


@pytest.mark.parametrize("heads", [64, 192])
def test_many_heads(heads: int) -> None:
    torch.manual_seed(0)
    weights = torch.rand(1, heads, 6, 40, dtype=torch.float64)
    value, projection = torch.randn(1, heads, 40, 2).double(), torch.randn(30, 2 * heads).double()

    def results(device: str) -> list[Tensor]:
        leaves = [x.to(device).requires_grad_() for x in (weights, value, projection)]
        norms = ikattn.contributions(*leaves, maps=["summed"]).summed
        assert norms is not None
        return [x.cpu() for x in (norms, *torch.autograd.grad(norms.sum(), leaves))]

    for got, expected in zip(results(DEVICE), results("cpu"), strict=True):
        assert_close(got, expected, 1e-11)
