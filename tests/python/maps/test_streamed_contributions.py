"""Contribution maps from query and key equal those of the weights, in no more memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ikattn
from agreement import assert_close, assert_identical
from contribution_samples import BLOCK, named, operator_call
from programs import megabytes_grown


def softmax_weights(query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
    """The weights under a mask that is added, or where none is given under causality."""
    logits = query @ key.mT / math.sqrt(query.shape[-1])
    if mask is None:
        mask = torch.full(logits.shape[-2:], -torch.inf, dtype=logits.dtype).triu(1)
    return (logits + mask).softmax(-1)


@pytest.mark.parametrize("kernel", ["dot", "implicit"])
def test_streamed_maps_are_differentiable(kernel: str) -> None:
    torch.manual_seed(4)
    double = {"dtype": torch.float64, "requires_grad": True}
    query, key = torch.randn(1, 4, 3, 4, **double), torch.randn(1, 2, 5, 4, **double)
    value, projection = torch.randn(1, 2, 5, 3, **double), torch.randn(6, 12, **double)
    mask, residual = torch.randn(3, 5, **double), torch.randn(1, 3, 6, **double)
    leaves = [query, key, value, projection, mask, residual]
    if kernel == "implicit":
        leaves += [torch.randn(4, 4, 3, **double), torch.randn(4, 4, 3, **double)]

    def function(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        projection: Tensor,
        mask: Tensor,
        residual: Tensor,
        w1: Tensor | None = None,
        w2: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        maps = ikattn.streamed_contributions(
            query, key, value, projection, w1=w1, w2=w2, attn_mask=mask, residual=residual,
            enable_gqa=True, diagonal=1,
        )  # fmt: skip
        return tuple(named(maps).values())

    assert torch.autograd.gradcheck(function, tuple(leaves))


@pytest.mark.parametrize("hide", ["key_bias", "attn_mask", "float attn_mask"])
@pytest.mark.parametrize("kernel", ["dot", "implicit"])
def test_what_hidden_keys_hold_never_shows(kernel: str, hide: str) -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind()
    projection, w = torch.randn(32, 32), 0.1 * torch.randn(2, 4, 8, 5)
    visible = torch.tensor([True, True, False, True, False, True])
    bias = torch.zeros(6).masked_fill(~visible, -torch.inf)
    mask = visible if hide == "attn_mask" else bias
    options = {"key_bias" if hide == "key_bias" else "attn_mask": mask}
    options |= {"w1": w[0], "w2": w[1]} if kernel == "implicit" else {}
    residual = torch.randn(2, 6, 32)
    maps = ["summed", "with_residual", "mixing_ratio"]
    results = []
    for rubbish in (0.0, torch.nan):
        call = [x.clone() for x in (q, k, v, projection)]
        for x in call[1:3]:
            x[:, :, ~visible] = rubbish
        call = [x.requires_grad_() for x in call]
        found = named(ikattn.streamed_contributions(*call, residual=residual, maps=maps, **options))
        total = sum(map_.sum() for map_ in found.values())
        results.append([*found.values(), *torch.autograd.grad(total, call)])
    assert all(x.isfinite().all() for x in results[0])
    assert_identical(*results)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("kernel", ["dot", "implicit"])
def test_what_padded_queries_hold_never_shows(kernel: str, create_graph: bool) -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind()
    options: dict[str, Any] = {"w1": 0.1 * torch.randn(4, 8, 5)} if kernel == "implicit" else {}
    padding = torch.tensor([[False, False, True, False, True, False]]).expand(2, 6)
    results = []
    for rubbish in (0.0, torch.nan):
        q[:, :, padding[0]] = rubbish
        call = [x.clone().requires_grad_() for x in (q, k, v, torch.ones(32, 32))]
        found = ikattn.streamed_contributions(*call, query_padding=padding, **options).summed
        gradients = torch.autograd.grad(found.sum(), call, create_graph=create_graph)
        results.append([found, *gradients])
    assert all(x.isfinite().all() for x in results[0])
    assert_identical(*results)


def test_value_norms_alone_make_no_weights() -> None:
    """Weights would take 100 MiB at a time here, 0.3 * 10^12 numbers in all."""
    before = """
        query = torch.randn(1, 8, 200_000, 4)
        value, projection = torch.randn(1, 8, 200_000, 2), torch.randn(4, 16)
    """
    call = "ikattn.streamed_contributions(query, query, value, projection, maps=['value_norms'])"
    assert megabytes_grown(before, call) < 60


def test_streaming_many_rounds_gives_what_one_gives() -> None:
    """Enough pairs for several rounds of queries, in the backward too."""
    torch.manual_seed(5)
    H, L, d = 16, 640, 8
    query, key, value = torch.randn(3, 1, H, L, d).unbind()
    projection = torch.randn(32, H * d) / 8
    residual = torch.randn(1, L, 32)
    leaf = value.clone().requires_grad_()
    streamed = ikattn.streamed_contributions(
        query, key, leaf, projection, residual=residual, is_causal=True
    )
    weights = softmax_weights(query.double(), key.double())
    wide = value.double().requires_grad_()
    given = ikattn.contributions(weights, wide, projection.double(), residual=residual.double())
    for name, map_ in named(streamed).items():
        assert_close(map_, named(given)[name], 1e-5, name)
    streamed.summed.sum().backward()
    given.summed.sum().backward()
    assert_close(leaf.grad, wide.grad, 1e-5)


@pytest.mark.parametrize("shape", [(300, 300), (64, 300, 300), (300,), (64, 1, 300)], ids=str)
def test_a_mask_has_its_gradient_over_many_rounds(shape: tuple[int, ...]) -> None:
    """A round has some 200 queries, which a mask may or may not tell apart."""
    torch.manual_seed(6)
    query, key, value = torch.randn(3, 1, 64, 300, 4, dtype=torch.float64).unbind()
    projection = torch.randn(5, 64 * 4, dtype=torch.float64)
    mask = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    incoming = torch.randn(1, 300, 300, dtype=torch.float64)
    streamed = ikattn.streamed_contributions(
        query, key, value, projection, attn_mask=mask, maps=["summed"]
    ).summed
    weights = softmax_weights(query, key, mask)
    given = ikattn.contributions(weights, value, projection, maps=["summed"]).summed
    (got,) = torch.autograd.grad(streamed, mask, incoming)
    (expected,) = torch.autograd.grad(given, mask, incoming)
    assert_close(got, expected, 1e-11)


@pytest.mark.parametrize("kernel", ["dot", "implicit"])
@pytest.mark.parametrize("way", ["backward", "create_graph", "grad", "vmap", "vmap of grad", "jvp"])
def test_autocast_changes_nothing_in_transformations(way: str, kernel: str) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 3, 1, 4, 9, 5).unbind()
    projection = torch.randn(6, 20)
    options: dict[str, Any] = {"w1": torch.randn(4, 5, 3) / 5} if kernel == "implicit" else {}

    def summed(k: Tensor) -> Tensor:
        q, v = query[0], value[0]
        return ikattn.streamed_contributions(q, k, v, projection, **options).summed

    ways: dict[str, Callable[[], Any]] = {
        "backward": lambda: torch.autograd.grad(
            summed(leaf := key[0].clone().requires_grad_()).sum(), leaf
        )[0],
        "create_graph": lambda: torch.autograd.grad(
            summed(leaf := key[0].clone().requires_grad_()).sum(), leaf, create_graph=True
        )[0],
        "grad": lambda: torch.func.grad(lambda k: summed(k).sum())(key[0]),
        "vmap": lambda: torch.func.vmap(summed)(key),
        "vmap of grad": lambda: torch.func.vmap(torch.func.grad(lambda k: summed(k).sum()))(key),
        "jvp": lambda: torch.func.jvp(summed, (key[0],), (key[1],))[1],
    }
    expected = ways[way]()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ways[way](), expected)


def test_opcheck_of_streamed_weights() -> None:
    (_, value, projection), named_ = operator_call(BLOCK)
    query, key = torch.randn(2, 2, 4, 7, 5, dtype=torch.float64).unbind()
    for tensor in (query, key, value, projection):
        tensor.requires_grad_()
    torch.library.opcheck(
        torch.ops.ikattn.streamed_contribution_maps, (query, key, value, projection), named_
    )


def test_no_tensor_has_both_pairs_and_dimensions() -> None:
    """L = S = 1024, D = 768: the 5-D tensor would take 38 GiB, the 4-D one 3 GiB."""
    before = """
        H, L, D = 12, 1024, 768
        value, residual = torch.randn(1, H, L, 64), torch.randn(1, L, D)
        query, key = torch.randn(2, 1, H, L, 64).unbind()
        projection = torch.randn(D, D)
        norm = ikattn.maps.NormStats(torch.ones(D), torch.ones(1, L))
        ikattn.streamed_contributions(query[:, :, :9], key[:, :, :9], value[:, :, :9], projection)
    """
    call = """
        maps = ikattn.streamed_contributions(
            query, key, value, projection, residual=residual, norm=norm, second_norm=norm
        )
    """
    # Four maps of 4 MiB, some rounds of 16 MiB of weights; the weights of all rows are 48 MiB.
    assert megabytes_grown(before, call) < 100


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"maps": ["per_head"]}, ValueError, r"maps must not hold 'per_head'"),
        ({"scale": math.inf}, ValueError, r"scale must be finite, got inf"),
        ({"key": torch.rand(2, 4, 7, 4)}, RuntimeError, r"key must have the head size of .*, got"),
        ({"key": torch.rand(2, 4, 6, 5)}, RuntimeError, r"value must have .* = \[2, 4, 6, d_v\]"),
        ({"w2": torch.rand(4, 5, 3)}, RuntimeError, r"w1 must be given with w2"),
        ({"p": 0.5}, ValueError, r"p must be a finite number >= 1 or None, got 0.5"),
        ({"attn_mask": torch.ones(7, 6).bool()}, RuntimeError, r"attn_mask must broadcast"),
    ],
)
def test_errors_of_the_streamed_maps_name_the_argument(changes, kind, message):
    call = {name: torch.rand(2, 4, 7, 5) for name in ("query", "key", "value")}
    call["out_proj_weight"] = torch.rand(20, 20)
    with pytest.raises(kind, match=f"streamed_contributions: .*?({message})"):
        ikattn.streamed_contributions(**(call | changes))


def test_a_bias_may_be_one_number() -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 4).unbind()
    projection = torch.randn(8, 8)
    for options in ({}, {"w1": 0.1 * torch.randn(2, 4, 3)}):
        found = [
            ikattn.streamed_contributions(query, key, value, projection, **options, key_bias=bias)
            for bias in (torch.tensor(0.5), torch.full((5,), 0.5))
        ]
        for name, map_ in named(found[0]).items():
            assert_identical([map_], [named(found[1])[name]])
