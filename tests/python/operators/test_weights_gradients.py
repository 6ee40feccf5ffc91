"""Incoming gradients of weights that are no numbers reach what sees them, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ikattn
from samples import DTYPES, Arguments, name_of

weights = ikattn.implicit_kernel_weights
RUBBISH = [float("nan"), float("inf")]


def call(
    L: int = 40, S: int = 70, dtype: torch.dtype = torch.float32, **options: object
) -> Arguments:
    torch.manual_seed(0)
    tokens = {"query": torch.randn(1, 2, L, 16), "key": torch.randn(1, 2, S, 16)}
    frequencies = {name: 0.1 * torch.randn(2, 16, 12) for name in ("w1", "w2")}
    return {name: x.to(dtype) for name, x in (tokens | frequencies).items()} | options


def gradients(arguments: Arguments, incoming: Tensor) -> dict[str, Tensor]:
    names = ("query", "key", "w1", "w2")
    leaves = {name: arguments[name].detach().requires_grad_() for name in names}
    result = weights(**arguments | leaves)
    found = torch.autograd.grad(result, list(leaves.values()), incoming.to(result))
    return dict(zip(names, found, strict=True))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name
        assert gradient.isfinite().all(), name


@pytest.mark.parametrize("rubbish", RUBBISH, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_what_comes_in_for_a_dropped_weight_counts_for_nothing(dtype, rubbish):
    arguments = call(dtype=dtype, dropout_p=0.5, dropout_seed=torch.tensor([7, 0]))
    dropped = weights(**arguments) == 0
    incoming = torch.randn(dropped.shape).masked_fill(dropped, 3.0)
    expected = gradients(arguments, incoming)
    assert_same(gradients(arguments, incoming.masked_fill(dropped, rubbish)), expected)


@pytest.mark.parametrize("rubbish", RUBBISH, ids=str)
@pytest.mark.parametrize("hidden_by", ["mask", "float mask", "causal", "key_bias"])
def test_what_comes_in_for_a_hidden_weight_counts_for_nothing(hidden_by, rubbish):
    L, S = 70, 140
    visible = torch.rand(L, S) > 0.3
    options = {
        "mask": {"attn_mask": visible},
        "float mask": {"attn_mask": torch.randn(L, S).masked_fill(~visible, -torch.inf)},
        "causal": {"is_causal": True},
        "key_bias": {"key_bias": torch.randn(S).masked_fill(~visible[0], -torch.inf)},
    }[hidden_by]
    arguments = call(L, S, **options)
    hidden = weights(**arguments) == 0
    assert hidden.any()
    incoming = torch.randn(hidden.shape).masked_fill(hidden, 3.0)
    expected = gradients(arguments, incoming)
    assert_same(gradients(arguments, incoming.masked_fill(hidden, rubbish)), expected)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("bias", [-80.0, -150.0, -300.0])
def test_what_comes_in_for_a_weight_that_underflows_spoils_what_the_row_sees(bias, is_causal):
    key_bias = torch.zeros(8)
    key_bias[3] = bias
    arguments = call(8, 8, key_bias=key_bias, is_causal=is_causal)
    incoming = torch.randn(1, 2, 8, 8)
    incoming[0, 0, 5, 3] = torch.nan
    found = gradients(arguments, incoming)
    seen = 6 if is_causal else 8
    assert found["query"][0, 0, 5].isnan().all()
    assert found["query"].isnan().any(-1).sum() == 1
    assert found["key"][0, 0, :seen].isnan().all()
    assert not found["key"][0, 0, seen:].isnan().any()
    assert not found["key"][0, 1].isnan().any()


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_any_layout_of_what_comes_in(dtype: torch.dtype, average: bool) -> None:
    arguments = call(33, 75, dtype, average_heads=average)
    shape = (1, 33, 75) if average else (1, 2, 33, 75)
    incoming = torch.randn(shape).to(dtype)
    expected = gradients(arguments, incoming)
    strided = torch.stack([incoming, incoming], dim=-1)[..., 1]
    turned = incoming.mT.contiguous().mT
    for given in (strided, turned):
        assert_same(gradients(arguments, given), expected)
    ones = gradients(arguments, torch.ones(shape))
    assert_same(gradients(arguments, torch.ones(()).expand(shape)), ones)
