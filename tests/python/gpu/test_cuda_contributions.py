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


@pytest.mark.parametrize("way", ["dot", "dot, masked", "implicit, causal", "implicit, masked"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=name_of)
def test_gradients_of_streamed_maps_are_those_of_the_cpu(way: str, dtype: torch.dtype) -> None:
    """Of all maps of a block, under padding."""
    torch.manual_seed(0)
    shapes = {"query": (2, 4, 37, 6), "key": (2, 2, 37, 6), "value": (2, 2, 37, 6)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors |= {"out_proj_weight": torch.randn(24, 24) / 5, "residual": torch.randn(2, 37, 24)}
    if way.startswith("implicit"):
        tensors |= dict(zip(("w1", "w2"), torch.randn(2, 4, 6, 9) / 5, strict=True))
    if way.endswith("masked"):
        tensors |= {"attn_mask": torch.randn(4, 37, 37), "key_bias": torch.randn(2, 2, 37)}
    padding = torch.arange(37).expand(2, 37) >= torch.tensor([[37], [30]])
    layer_norm = torch.nn.LayerNorm(24).to(dtype)
    options: dict[str, Any] = {
        "is_causal": way.endswith("causal"),
        "enable_gqa": True,
        "query_padding": padding,
        "key_padding": padding,
        "norm": ikattn.analysis.NormStats.of(layer_norm, torch.randn(2, 37, 24, dtype=dtype)),
    }

    def results(on_device: bool) -> list[Tensor]:
        place = on_gpu if on_device else dict
        leaves = {
            name: x.requires_grad_()
            for name, x in place({n: x.to(dtype) for n, x in tensors.items()}).items()
        }
        maps = list(named(ikattn.streamed_contributions(**leaves, **place(options))).values())
        incoming = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) for x in maps]
        found = torch.autograd.grad(
            maps, list(leaves.values()), [x.to(maps[0].device) for x in incoming]
        )
        return [x.detach().cpu() for x in (*maps, *found)]

    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    for got, expected in zip(results(True), results(False), strict=True):
        assert_close(got, expected, tolerance)


@pytest.mark.parametrize("factor", [1e35, 1e30, 1e19, 1e-30])
@pytest.mark.parametrize("heads", [2, 12, 17, 70])
def test_norms_whose_squares_leave_the_range_of_float32(heads: int, factor: float) -> None:
    torch.manual_seed(0)
    weights, value = torch.rand(1, heads, 21, 70), factor * torch.randn(1, heads, 70, 3)
    value[..., 3, :] /= factor  # one key of ordinary size among them
    tensors = weights, value, torch.randn(8, 3 * heads), factor * torch.randn(1, 21, 8)
    *call, residual = (x.to(DEVICE) for x in tensors)
    maps = ["value_norms"] if factor < 1 else None  # below, squares of sums vanish
    found = ikattn.contributions(*call, residual=residual, maps=maps)
    *wide, wide_residual = (x.double() for x in tensors)
    expected = named(ikattn.contributions(*wide, residual=wide_residual))
    for name, map_ in named(found).items():
        assert_close(map_.cpu(), expected[name], 1e-5, name)


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
