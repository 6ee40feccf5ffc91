"""FlopCounterMode counts the operators."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import ikattn

B, H, L, D, M = 2, 4, 64, 16, 8


def tensors(length: int = L, requires_grad: bool = False) -> tuple[Tensor, ...]:
    q, k, v = (torch.randn(B, H, length, D, requires_grad=requires_grad) for _ in range(3))
    return q, k, v, *(0.1 * torch.randn(H, D, M) for _ in range(2))


def flops(call: object) -> int:
    with FlopCounterMode(display=False) as counter:
        call()  # type: ignore[operator]
    return counter.get_total_flops()


def test_attention_counts_what_it_multiplies() -> None:
    q, k, v, w1, w2 = tensors()
    features = 2 * B * H * L * 2 * D * M * 2
    pairs = 2 * B * H * L * L * (2 * M + D)
    assert flops(lambda: ikattn.implicit_kernel_attention(q, k, v, w1, w2)) == features + pairs
    causal = flops(lambda: ikattn.implicit_kernel_attention(q, k, v, w1, w2, is_causal=True))
    assert causal == features + pairs * (L + 1) // (2 * L)
    weights = flops(lambda: ikattn.implicit_kernel_weights(q, k, w1, w2))
    assert weights == features + 2 * B * H * L * L * 2 * M
    assert flops(lambda: ikattn.spectral_features(q, w1, w2)) == features // 2


def test_the_backward_counts_and_linear_time_is_linear() -> None:
    q, k, v, w1, w2 = tensors(requires_grad=True)
    forward = flops(lambda: ikattn.implicit_kernel_attention(q, k, v, w1, w2))
    both = flops(lambda: ikattn.implicit_kernel_attention(q, k, v, w1, w2).sum().backward())
    assert both > 2 * forward
    once, twice = (tensors(length) for length in (8192, 16384))
    of_once = flops(lambda: ikattn.implicit_kernel_attention(*once))
    of_twice = flops(lambda: ikattn.implicit_kernel_attention(*twice))
    assert ikattn.which_kernels(*once).forward.algorithm == "linear"
    assert of_twice == 2 * of_once


def test_a_backward_in_linear_time_is_linear() -> None:
    def of_backward(length: int) -> int:
        q, k, v = (torch.randn(1, 1, length, D, requires_grad=True) for _ in range(3))
        w1, w2 = (0.1 * torch.randn(1, D, 16) for _ in range(2))
        assert ikattn.which_kernels(q, k, v, w1, w2).backward.algorithm == "linear"
        output = ikattn.implicit_kernel_attention(q, k, v, w1, w2)
        return flops(lambda: output.sum().backward())

    assert of_backward(16384) == 2 * of_backward(8192)


def test_maps_and_kept_features_count() -> None:
    weights, value, projection = (
        torch.rand(B, H, 5, 5),
        torch.randn(B, H, 5, D),
        torch.randn(32, 64),
    )
    assert flops(lambda: ikattn.contributions(weights, value, projection)) > 0
    q, k, _, w1, w2 = tensors()
    assert flops(lambda: ikattn.streamed_contributions(q, k, q, torch.randn(32, H * D))) > 0
    phi = ikattn.spectral_features(k, w1, w2)
    logits = torch.zeros(B, H, 1, L)
    found = flops(lambda: ikattn.attention_from_features(phi[:, :, :1], phi, logits, k))
    assert found == 2 * B * H * L * (2 * M + D)
