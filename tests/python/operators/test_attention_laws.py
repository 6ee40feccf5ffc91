"""Laws that hold whatever the numbers are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import ikattn
from agreement import assert_close
from devices import on_test_device
from samples import BY_NAME, SAMPLES, TINY, Sample, of_weights

attention = on_test_device(ikattn.implicit_kernel_attention)


TOLERANCE = 1e-13


def test_enable_gqa_changes_nothing_where_heads_are_equal() -> None:
    arguments = Sample("equal heads", B=3, H=4, L=67, S=130, key_bias="BHS").arguments()
    assert torch.equal(attention(**arguments), attention(**(arguments | {"enable_gqa": True})))


def test_weights_of_the_product_of_similarity_and_magnitude() -> None:
    sample = Sample("product", L=67, S=65, d=13, p=1.8)
    arguments = sample.arguments()
    for p in (None, 1.0, 1.8, 2.0, 3.0):
        for w2 in (arguments["w2"], None):
            frequencies = {"w1": arguments["w1"], "w2": w2}
            similarity, magnitude = ikattn.ops.similarity_and_magnitude(
                arguments["query"], arguments["key"], kernel="implicit", p=p, **frequencies
            )
            weights = similarity * magnitude.unsqueeze(-2)
            expected = ikattn.implicit_kernel_weights(
                **(of_weights(arguments) | frequencies | {"p": p})
            )
            assert_close(weights / weights.sum(-1, keepdim=True), expected, TOLERANCE)


@pytest.mark.parametrize("kernel", ["dot", "rbf"])
def test_p_2_makes_softmax_attention_of_rbf_similarity_and_magnitude(kernel: str) -> None:
    arguments = Sample("dot", L=67, S=65, d=13, d_v=65).arguments()
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    similarity, magnitude = ikattn.ops.similarity_and_magnitude(query, key, kernel=kernel)
    weights = similarity * magnitude.unsqueeze(-2)
    expected = scaled_dot_product_attention(query, key, value)
    assert_close(weights / weights.sum(-1, keepdim=True) @ value, expected, TOLERANCE)


@pytest.mark.parametrize("p", [1.0, 1.8, 3.0])
def test_rbf_with_another_p_is_softmax_attention_with_the_norms_exchanged(p: float) -> None:
    """exp(-|q - k|_2^2 / c) exp(|k|_p^2 / c), where c = 2 sqrt(d), is exp((2 q.k + gap) / c) but
    for a factor of the row, with gap = |k|_p^2 - |k|_2^2."""
    arguments = Sample("rbf", L=67, S=65, d=16, d_v=65).arguments()
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    similarity, magnitude = ikattn.ops.similarity_and_magnitude(query, key, kernel="rbf", p=p)
    weights = similarity * magnitude.unsqueeze(-2)
    squares = [key.abs().pow(order).sum(-1).pow(2 / order) for order in (p, 2.0)]
    gap = ((squares[0] - squares[1]) / 8).unsqueeze(-2)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=gap.expand(-1, -1, 67, -1))
    assert_close(weights / weights.sum(-1, keepdim=True) @ value, expected, TOLERANCE)


def test_magnitude_is_of_the_norm_of_the_key_which_dot_ignores() -> None:
    key = torch.tensor([[[[3.0, -4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]]]).double()
    for p, norm in ((1.0, 7.0), (2.0, 5.0), (3.0, 91 ** (1 / 3))):
        _, magnitude = ikattn.ops.similarity_and_magnitude(key, key, kernel="rbf", p=p)
        expected = torch.tensor([[[math.exp(norm**2 / 4), 1.0]]], dtype=torch.float64)
        assert_close(magnitude, expected, 1e-13)
    _, none = ikattn.ops.similarity_and_magnitude(key, key, kernel="rbf", p=None)
    assert torch.equal(none, torch.ones_like(none))
    of_dot = (ikattn.ops.similarity_and_magnitude(key, key, p=p) for p in (2.0, 3.0))
    assert all(map(torch.equal, *of_dot))


def test_samples_have_distinct_names() -> None:
    assert len(BY_NAME) == len(SAMPLES) + len(TINY)


@pytest.mark.parametrize("p", [1.5, 20.0, 200.0, 1000.0])
def test_large_orders_stay_in_range_in_every_composition(p: float) -> None:
    torch.manual_seed(0)
    q, k, v = (2 * torch.randn(1, 2, 9, 8) for _ in range(3))
    w1, w2 = (0.3 * torch.randn(2, 8, 5) for _ in range(2))

    def attend(key: Tensor) -> Tensor:
        return ikattn.implicit_kernel_attention(q, key, v, w1, w2, p=p)

    expected = attend(k)
    assert expected.isfinite().all()
    output, tangent = torch.func.jvp(attend, (k,), (torch.ones_like(k),))
    torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4)
    assert tangent.isfinite().all()
    leaf = k.clone().requires_grad_()
    composed = torch.autograd.grad(attend(leaf).sum(), leaf, create_graph=True)[0]
    fused = torch.autograd.grad(attend(leaf).sum(), leaf)[0]
    torch.testing.assert_close(composed.detach(), fused, rtol=1e-2, atol=1e-3)
    features = ikattn.KeyFeatures(w1, w2, p=p)
    features.append(k)
    torch.testing.assert_close(features.attend(q, v), expected, rtol=1e-3, atol=1e-4)
