"""Contribution maps and their gradients have the same bits for every number of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ikattn
from agreement import assert_identical
from contribution_samples import Sample, differentiable, named, replaced
from samples import name_of

pytestmark = pytest.mark.usefixtures("threads")

# All but the second large enough to be worth a thread, products of matrices with one row of tiles
# and with many. With one thread the first three take 32, 16 and 64 tokens together, with more
# threads fewer.
LARGE = (
    Sample("a block of BERT", B=1, H=12, G=12, L=130, S=130, d_v=64, D=768),
    Sample("few tokens", B=2, H=4, G=4, L=9, S=9, d_v=72, D=96),
    Sample("many tokens", B=2, H=3, G=3, L=700, S=700, d_v=72, D=80),
    Sample("padded groups", B=3, H=6, G=2, L=200, S=200, d_v=24, D=100, padding=True),
    Sample("many short ones", B=50, H=4, G=2, L=20, S=20, d_v=8, D=32, centered=(False, True)),
    Sample("cross attention", B=2, H=4, G=4, L=250, S=330, d_v=16, D=70, steps=0),
    Sample("cached keys", B=1, H=8, G=8, L=70, S=400, d_v=32, D=256, diagonal=330, causal=True),
    Sample("one dimension", B=2, H=1, G=1, L=300, S=300, d_v=1, D=1),
    Sample("fewer dimensions than heads", B=1, H=16, G=16, L=400, S=400, d_v=2, D=3),
)


def maps_and_gradients(
    function: Callable[..., ikattn.Contributions], arguments: dict[str, Any]
) -> list[Tensor]:
    leaves = {name: x.clone().requires_grad_() for name, x in differentiable(arguments).items()}
    maps = list(named(function(**replaced(arguments, leaves))).values())
    incoming = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) for x in maps]
    return [*maps, *torch.autograd.grad(maps, list(leaves.values()), incoming)]


def assert_same_bits(
    function: Callable[..., ikattn.Contributions], arguments: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    expected = maps_and_gradients(function, arguments)
    for number in (2, 3, 7, 16):
        torch.set_num_threads(number)
        assert_identical(maps_and_gradients(function, arguments), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("sample", LARGE, ids=lambda sample: sample.name)
def test_of_weights(sample: Sample, dtype: torch.dtype) -> None:
    assert_same_bits(ikattn.contributions, sample.arguments(dtype))


@pytest.mark.parametrize("mask", [(1, 1), (1, 270), (270, 1), (4, 270, 270), (2, 1, 1, 270)])
@pytest.mark.parametrize("kernel", ["dot", "implicit"])
def test_of_query_and_key(kernel: str, mask: tuple[int, ...]) -> None:
    sample = Sample(kernel, B=2, H=4, G=2, L=270, S=270, d_v=24, D=96, padding=True)
    arguments = sample.arguments(torch.float32)
    del arguments["attn_weights"]
    torch.manual_seed(0)
    arguments |= {
        "query": torch.randn(2, 4, 270, 40),
        "key": torch.randn(2, 2, 270, 40),
        "key_bias": torch.randn(2, 2, 270),
        "attn_mask": torch.randn(mask),
        "enable_gqa": True,
        "is_causal": len(mask) == 3,
    }
    if kernel == "implicit":
        arguments["w1"], arguments["w2"] = 0.1 * torch.randn(2, 4, 40, 16)
    assert_same_bits(ikattn.streamed_contributions, arguments)
