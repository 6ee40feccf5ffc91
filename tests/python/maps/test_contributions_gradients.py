"""Gradients of the contribution operators: the definition's, and where precision is strained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ikattn
from agreement import assert_close, assert_identical, error
from contribution_samples import BLOCK, PADDED, Sample, differentiable, maps_of, named, replaced


@pytest.mark.parametrize(
    "sample",
    [
        Sample("block", B=2, H=3, G=3, L=2, S=4, d_v=2, D=5, diagonal=1, padding=True),
        Sample("grouped", B=1, H=4, G=2, L=3, S=3, d_v=2, D=4, centered=(False, True)),
    ],
    ids=lambda sample: sample.name,
)
def test_gradcheck_and_gradgradcheck(sample: Sample) -> None:
    arguments = sample.arguments()
    tensors = differentiable(arguments)

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        maps = maps_of(replaced(arguments, dict(zip(tensors, leaves, strict=True))))
        return tuple(named(maps).values())

    leaves = tuple(tensor.requires_grad_() for tensor in tensors.values())
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves, atol=1e-4)


def gradients_of_norms(function: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns gradients of a random sum of the norms of ``function`` in its three arguments."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    norms = function(*leaves)
    generator = torch.Generator().manual_seed(5)
    incoming = torch.randn(norms.shape, generator=generator, dtype=torch.float64)
    return torch.autograd.grad(norms, leaves, incoming.to(norms.dtype))


def composed(weights: Tensor, value: Tensor, projection: Tensor) -> Tensor:
    """N summed, in the type of its arguments."""
    vectors = torch.einsum("bhsv,dhv->bhsd", value, projection.unflatten(1, (value.shape[1], -1)))
    return torch.einsum("bhts,bhsd->btsd", weights, vectors).norm(dim=-1)


def summed(weights: Tensor, value: Tensor, projection: Tensor) -> Tensor:
    return ikattn.contributions(weights, value, projection, maps=["summed"]).summed


@pytest.mark.parametrize("cancellation", [1.0, 1e-2, 1e-4])
def test_gradients_where_heads_cancel_err_as_the_composition_does(cancellation: float) -> None:
    """In float32, at most 5 times as far from the truth; of the weights much less."""
    torch.manual_seed(1)
    H, S, d_v, D = 12, 40, 8, 96
    weights = torch.rand(1, H // 2, S, S).softmax(-1).repeat_interleave(2, 1)
    value = torch.randn(1, H // 2, S, d_v).repeat_interleave(2, 1)
    projection = torch.randn(D, H // 2, 1, d_v) * torch.tensor([1.0, -1.0])[:, None]
    projection = (projection.flatten(1) + cancellation * torch.randn(D, H * d_v)) / 10
    call = weights, value, projection
    truth = gradients_of_norms(composed, *(x.double() for x in call))
    reference = gradients_of_norms(composed, *call)
    for got, of_composition, expected in zip(
        gradients_of_norms(summed, *call), reference, truth, strict=True
    ):
        assert error(got, expected) <= 5 * error(of_composition, expected)
    assert_close(gradients_of_norms(summed, *call)[0], truth[0], 2e-7)


@pytest.mark.parametrize(("heads", "size"), [(16, 3), (12, 8), (5, 4)])
@pytest.mark.parametrize("rest", [0.0, 1e-5, 1e-2])
def test_gradients_of_more_heads_than_dimensions_have_all_digits(heads, size, rest):
    """Weights for which the heads' vectors vanish but for a rest, which the composition loses."""
    torch.manual_seed(heads)
    value, projection = torch.randn(1, heads, 30, 2), torch.randn(size, heads * 2)
    vectors = torch.einsum(
        "bhsv,dhv->bshd", value.double(), projection.double().unflatten(1, (heads, -1))
    )
    basis = torch.linalg.qr(vectors).Q  # [B, S, H, D]
    weights = torch.randn(1, 30, heads, 30, dtype=torch.float64)  # [B, S, H, L]
    weights -= (1 - rest) * (basis @ (basis.mT @ weights))
    call = weights.permute(0, 2, 3, 1).float(), value, projection
    truth = gradients_of_norms(summed, *(x.double() for x in call))
    for got, right in zip(gradients_of_norms(summed, *call), truth, strict=True):
        assert_close(got, right, 2e-7)


@pytest.mark.parametrize("factor", [1e30, 1e-30])
def test_gradients_are_right_where_squares_leave_the_range_of_float32(factor: float) -> None:
    torch.manual_seed(2)
    call = torch.rand(1, 12, 5, 70), factor * torch.randn(1, 12, 70, 3), torch.randn(8, 36)
    expected = gradients_of_norms(summed, *(x.double() for x in call))
    for got, right in zip(gradients_of_norms(summed, *call), expected, strict=True):
        assert_close(got, right, 2e-6)

    def value_norms(weights: Tensor, value: Tensor, projection: Tensor) -> Tensor:
        found = ikattn.contributions(weights, value, projection, maps=["value_norms"]).value_norms
        return found + 0 * weights.sum()

    expected = gradients_of_norms(value_norms, *(x.double() for x in call))
    for got, right in zip(gradients_of_norms(value_norms, *call), expected, strict=True):
        assert_close(got, right, 2e-6)


@pytest.mark.parametrize("masked", ["query_padding", "both paddings"])
def test_what_padded_rows_hold_never_shows_in_gradients(masked: str) -> None:
    """The residual has none either: NaN would come through the norm's derivative."""
    arguments = PADDED.arguments()
    if masked == "query_padding":
        del arguments["key_padding"]
    spoiled = dict(arguments)
    spoiled["residual"] = arguments["residual"].clone()
    spoiled["residual"][arguments["query_padding"]] = torch.nan

    def gradients(call: dict[str, Any]) -> tuple[Tensor, ...]:
        leaves = {name: x.detach().requires_grad_() for name, x in differentiable(call).items()}
        maps = named(maps_of(replaced(call, leaves)))
        return torch.autograd.grad(sum(map_.sum() for map_ in maps.values()), leaves.values())  # type: ignore[arg-type]

    for got, expected in zip(gradients(spoiled), gradients(arguments), strict=True):
        assert torch.equal(got, expected)


def test_what_comes_in_at_pairs_without_norm_does_not_matter() -> None:
    arguments = Sample("causal", causal=True, L=5, S=5, steps=2).arguments()
    scale = arguments["norm"].scale.requires_grad_()
    map_ = ikattn.contributions(**arguments, maps=["with_norm"]).with_norm
    incoming = torch.ones_like(map_).masked_fill(map_ == 0, torch.inf)
    (got,) = torch.autograd.grad(map_, scale, incoming, retain_graph=True)
    (expected,) = torch.autograd.grad(map_.sum(), scale)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("create_graph", [False, True])
def test_maps_that_depend_on_nothing_wanted_have_no_gradient(create_graph: bool) -> None:
    arguments = BLOCK.arguments()
    weights = arguments["attn_weights"].requires_grad_()
    maps = ikattn.contributions(**arguments)
    (got,) = torch.autograd.grad(maps.value_norms.sum(), weights, create_graph=create_graph)
    assert not got.any()


def test_empty_batches_have_gradients() -> None:
    arguments = Sample("no batch", B=0).arguments()
    leaves = {name: x.requires_grad_() for name, x in differentiable(arguments).items()}
    maps = named(maps_of(replaced(arguments, leaves)))
    sum(map_.sum() for map_ in maps.values()).backward()  # type: ignore[union-attr]
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves.values())


def test_backward_in_inference_mode() -> None:
    """The graph is made outside, which torch's own operations allow."""
    arguments = BLOCK.arguments()
    weights = arguments["attn_weights"].requires_grad_()
    loss = sum(map_.sum() for map_ in named(maps_of(arguments)).values())
    assert isinstance(loss, Tensor)
    (expected,) = torch.autograd.grad(loss, weights, retain_graph=True)
    with torch.inference_mode():
        (got,) = torch.autograd.grad(loss, weights)
    assert torch.equal(got, expected)


def test_autocast_changes_nothing() -> None:
    """Maps and gradients, also where the backward runs inside: types are those of the arguments."""

    def maps_and_gradients() -> list[Tensor]:
        arguments = BLOCK.arguments(torch.float32)
        leaves = {name: x.requires_grad_() for name, x in differentiable(arguments).items()}
        maps = list(named(maps_of(replaced(arguments, leaves))).values())
        loss = torch.stack([map_.sum() for map_ in maps]).sum()
        return [*maps, *torch.autograd.grad(loss, leaves.values())]

    expected = maps_and_gradients()
    with torch.autocast("cpu", torch.bfloat16):
        got = maps_and_gradients()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "create_graph"),
    [
        ("summed", False),
        ("summed", True),
        ("with_residual", False),
        ("with_residual", True),
        ("per_head", False),  # through value_norms, where a second derivative would meet the NaN
    ],
)
def test_what_a_key_without_weight_holds_never_shows(name: str, create_graph: bool) -> None:
    weights, value = torch.rand(2, 3, 5, 6), torch.randn(2, 3, 6, 4)
    weights[..., 2] = 0
    residual = torch.randn(2, 5, 12)
    results = []
    for rubbish in (1.0, torch.nan):
        value[:, :, 2] = rubbish
        call = [x.clone().requires_grad_() for x in (weights, value, torch.ones(12, 12))]
        found = getattr(ikattn.contributions(*call, residual=residual, maps=[name]), name)
        gradients = torch.autograd.grad(found.sum(), call, create_graph=create_graph)
        results.append([found, *gradients])
    others = [0, 1, 3, 4, 5]
    for result in results:  # what the weight would bring is not there where the key is NaN
        assert all(x.isfinite().all() for x in result)
        result[1] = result[1][..., others]
    assert_identical(*results)


@pytest.mark.parametrize("create_graph", [False, True])
def test_heads_of_no_size_contribute_nothing_and_have_gradients(create_graph: bool) -> None:
    weights = torch.rand(1, 2, 3, 3, requires_grad=True)
    value = torch.rand(1, 2, 3, 0, requires_grad=True)
    maps = ikattn.contributions(weights, value, torch.rand(4, 0), maps=["summed"])
    assert not maps.summed.any()
    found = torch.autograd.grad(maps.summed.sum(), (weights, value), create_graph=create_graph)
    assert_identical(found, [torch.zeros(1, 2, 3, 3), torch.zeros(1, 2, 3, 0)])


def test_negated_views_have_the_gradients_of_their_numbers() -> None:
    weights, value, projection = torch.rand(1, 2, 5, 5), torch.randn(1, 2, 5, 4), torch.randn(8, 8)
    found = []
    ones = torch.ones(1, 5, 5)
    for x, incoming in ((weights, -ones), (torch._neg_view(-weights), torch._neg_view(ones))):
        call = [x.detach().requires_grad_(), value, projection]
        summed = ikattn.contributions(*call, maps=["summed"]).summed
        found.append(torch.autograd.grad(summed, call[0], incoming)[0])
    assert_identical(found[:1], found[1:])


def test_batched_gradients_are_those_one_by_one() -> None:
    arguments = PADDED.arguments()
    leaves = {name: x.requires_grad_() for name, x in differentiable(arguments).items()}
    maps = list(named(maps_of(replaced(arguments, leaves))).values())
    torch.manual_seed(3)
    incoming = [torch.randn(3, *map_.shape, dtype=map_.dtype) for map_ in maps]
    inputs = list(leaves.values())
    batched = torch.autograd.grad(maps, inputs, incoming, is_grads_batched=True, retain_graph=True)
    for index in range(3):
        one = torch.autograd.grad(maps, inputs, [g[index] for g in incoming], retain_graph=True)
        for name, got, expected in zip(leaves, batched, one, strict=True):
            assert_close(got[index], expected, 1e-11, name)
            assert not got.requires_grad
