"""The operators as differentiable compositions of torch's own functions: plain, and O(L S).

``ikattn/ops/naive.py`` is the formula in 25 lines. The compositions here take every option; they
are the oracle of the tests and what double backward and torch.func use. They also offer the
published variant for comparison: ``magnitude_scale = 1 / (2 * d**0.25)`` and dropout on the norm
matrix are what the authors' code computes where the paper says ``1 / (2 * sqrt(d))`` and nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ikattn.ops.options import AttentionOptions, changed


def implicit_kernel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    w1: Tensor,
    w2: Tensor | None = None,
    *,
    norm_dropout_p: float = 0.0,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Computes :func:`ikattn.implicit_kernel_attention` in torch's own functions.

    Args:
        query, key, value, w1, w2, options: As there.
        norm_dropout_p: Dropout on the matrix ``magnitude_scale (|q_i|_p^2 + |k_j|_p^2)`` before the
            softmax, as the authors' code does in training (there 0.1). The query's norm, which
            cancels otherwise, no longer does.

    Returns:
        ``[B, H, L, d_v]``.

    Example:
        >>> import torch, ikattn
        >>> q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
        >>> w1, w2 = (0.1 * torch.randn(2, 8, 16) for _ in range(2))
        >>> slow = ikattn.reference.implicit_kernel_attention(q, k, v, w1, w2)
        >>> torch.allclose(slow, ikattn.implicit_kernel_attention(q, k, v, w1, w2), atol=1e-5)
        True
    """
    named = changed("implicit_kernel_attention", options, query)
    output, _ = torch.ops.ikattn.implicit_kernel_attention_reference(
        query, key, value, w1, w2, norm_dropout_p=norm_dropout_p, **named
    )
    return output  # type: ignore[no-any-return]


def implicit_kernel_weights(
    query: Tensor,
    key: Tensor,
    w1: Tensor,
    w2: Tensor | None = None,
    *,
    average_heads: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Computes :func:`ikattn.implicit_kernel_weights` in torch's own functions."""
    named = changed("implicit_kernel_weights", options, query)
    return torch.ops.ikattn.implicit_kernel_weights_reference(  # type: ignore[no-any-return]
        query, key, w1, w2, average_heads=average_heads, **named
    )


def spectral_features(x: Tensor, w1: Tensor, w2: Tensor | None = None) -> Tensor:
    """Computes :func:`ikattn.ops.spectral_features` in torch's own functions."""
    return torch.ops.ikattn.spectral_features_reference(x, w1, w2)  # type: ignore[no-any-return]
