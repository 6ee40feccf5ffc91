"""The operators: typed functions over ``torch.ops.ikattn``.

Symbols, in every docstring: B batch, H query heads, G key/value heads (G divides H), L queries, S
keys, d head size of query and key, d_v head size of value, M frequencies.
Source: K. Song et al., "Implicit Kernel Attention", AAAI 2021 (arXiv 2006.06147).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ikattn._memory import takes_memory_for
from ikattn.ops import fakes  # noqa: F401  (shapes for torch.compile and torch.export)
from ikattn.ops.exporting import operator
from ikattn.ops.magnitude import check_order, log_magnitude
from ikattn.ops.options import AttentionOptions, changed
from ikattn.ops.packed import attend_jagged


def implicit_kernel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    w1: Tensor,
    w2: Tensor | None = None,
    *,
    log_decay: Tensor | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    r"""Computes attention by an implicit spectral kernel times the magnitude of the key.

    .. math::
        o_i = \sum_j \frac{(s_{ij}^2 + \epsilon)\,
              \exp(g_j + \mathrm{key\_bias}_j + \mathrm{mask}_{ij})}{Z_i} v_j, \qquad
        s_{ij} = \frac{\phi(q_i) \cdot \phi(k_j)}{4 M}, \qquad
        g_j = \mathrm{magnitude\_scale}\, |k_j|_p^2

    with :func:`spectral_features` phi. Time O(B H L S (M + d_v)), memory
    O(B H (L + S)(M + d_v)): the weights are never held. Long calls without mask and dropout take
    time O(B H (L + S) M^2 d_v) where that is less, to the same precision and in the same memory;
    :func:`which_kernels` tells of a call. Angles, logits and sums are formed in float32 (float64
    for float64 inputs).

    Args:
        query: ``[B, H, L, d]``; float64, float32, bfloat16 or float16, any strides. Or nested, of
            layout torch.jagged, ``[B, H, j, d]``; then key and value are nested, too, without
            masks and biases, and so is the output.
        key: ``[B, G, S, d]``.
        value: ``[B, G, S, d_v]``.
        w1: Frequencies ``[H, d, M]`` or ``[G, d, M]``, optionally with a leading batch axis, in
            cycles per unit of query; in the dtype of query or float32.
        w2: The second frequencies, shaped as w1. None: the stationary kernel, w2 = w1.
        log_decay: Logarithms of forget gates, broadcastable to ``[B, H, S]`` or ``[B, G, S]``: the
            weight of key j for query i is multiplied by the gates of the tokens j + 1 to i. Wants
            is_causal and L = S; -inf forgets all that was before. Time is linear at any length but
            with a mask or dropout, which take the memory of ``[B, H, L, S]``.
        p: Order of the norm in a key's magnitude, any real >= 1. None: no magnitude. 2 by default.
        key_bias: Added to the logit of a key in every row; broadcastable to ``[B, H, S]`` or
            ``[B, G, S]``. ``-inf`` hides a key.
        attn_mask: Broadcastable to ``[B, H, L, S]``. Bool: True = may attend. Floating point: added
            to the logit.
        dropout_p: Probability in [0, 1) with which a normalised weight is dropped, realised in
            steps of 1/256; what is kept is divided by the exact kept fraction. Applies whenever it
            is > 0, as in ``F.scaled_dot_product_attention``.
        is_causal: Query i sees keys 0..i (aligned at the top left). Combines with attn_mask.
        enable_gqa: Allows key and value to have fewer heads than query.
        eps: Added to the squared covariance; positive.
        magnitude_scale: Factor of ``|k|_p^2``. None: ``1 / (2 sqrt(d))``, the paper's. The authors'
            code computes ``1 / (2 d ** 0.25)``.
        dropout_seed: int64 ``[2]`` on query's device, seed and offset (modulo 2^32) of the dropout
            mask: the same mask on every device. None: drawn from torch's default generator. Of a
            part of a larger call: ``[7]``, of :func:`ikattn.ops.place_dropout_seed`.

    Returns:
        ``[B, H, L, d_v]`` in the dtype of query. A row that sees no key is zero. Differentiable in
        query, key, value, w1, w2, key_bias and a floating-point attn_mask, twice too.

    Raises:
        RuntimeError, TypeError, ValueError: An argument has a wrong shape, dtype or value.

    Example:
        >>> import torch, ikattn
        >>> q, k, v = (torch.randn(2, 4, 10, 16) for _ in range(3))
        >>> w1, w2 = (0.1 * torch.randn(4, 16, 32) for _ in range(2))
        >>> ikattn.implicit_kernel_attention(q, k, v, w1, w2, is_causal=True).shape
        torch.Size([2, 4, 10, 16])
    """
    if log_decay is not None:
        from ikattn.ops import forgetting  # which imports this module

        return forgetting.attend(query, key, value, w1, w2, log_decay, options)
    if query.is_nested or key.is_nested or value.is_nested:
        return attend_jagged(query, key, value, w1, w2, **options)
    named = changed("implicit_kernel_attention", options, query)
    output, _ = operator("implicit_kernel_attention")(query, key, value, w1, w2, **named)
    return output  # type: ignore[no-any-return]


def implicit_kernel_weights(
    query: Tensor,
    key: Tensor,
    w1: Tensor,
    w2: Tensor | None = None,
    *,
    average_heads: bool = False,
    log_decay: Tensor | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Computes the weights that :func:`implicit_kernel_attention` uses, after dropout.

    Args:
        query, key, w1, w2, log_decay, options: As in :func:`implicit_kernel_attention`; the same
            dropout_seed gives the same dropped weights.
        average_heads: Return the mean over heads, without ever holding ``[B, H, L, S]``.

    Returns:
        ``[B, H, L, S]``, or ``[B, L, S]`` with average_heads. Rows sum to 1 (before dropout), or to
        0 where no key is visible.
        Differentiable. Under ``create_graph=True`` and ``torch.func`` the reference computes: it
        holds ``[B, H, L, S]``, and a NaN that some rows see reaches the gradients of others.

    Raises:
        RuntimeError, TypeError, ValueError: As in :func:`implicit_kernel_attention`.

    Example:
        >>> import torch, ikattn
        >>> q, k = torch.randn(2, 4, 10, 16), torch.randn(2, 4, 7, 16)
        >>> w1 = 0.1 * torch.randn(4, 16, 32)
        >>> weights = ikattn.implicit_kernel_weights(q, k, w1, average_heads=True)
        >>> torch.allclose(weights.sum(-1), torch.ones(2, 10))
        True
    """
    if log_decay is not None:
        from ikattn.ops import forgetting  # which imports this module

        given: Any = changed("implicit_kernel_weights", options, query)  # with a seed of dropout
        if not forgetting.is_traced(query):
            torch.ops.ikattn.check_implicit_kernel_weights(query, key, w1, w2, **given)
        options = forgetting.options_of_weights(query, key, log_decay, given)
    named = changed("implicit_kernel_weights", options, query)
    return operator("implicit_kernel_weights")(  # type: ignore[no-any-return]
        query, key, w1, w2, average_heads=average_heads, **named
    )


def spectral_features(x: Tensor, w1: Tensor, w2: Tensor | None = None) -> Tensor:
    r"""Computes the features whose inner products are the implicit kernel.

    .. math:: \phi(x) = [\cos 2\pi x w_1 + \cos 2\pi x w_2,\; \sin 2\pi x w_1 + \sin 2\pi x w_2]

    With w2 absent, ``2 [cos 2 pi x w1, sin 2 pi x w1]``: the spectral form of a stationary kernel
    (Bochner); with w2, Yaglom's of a non-stationary one.

    Args:
        x: Tokens ``[B, H, L, d]``.
        w1: Frequencies ``[H, d, M]`` or ``[B, H, d, M]``, in the dtype of x or float32.
        w2: As w1, or None.

    Returns:
        ``[B, H, L, 2 M]`` in the dtype of x, cosines first. Differentiable in x, w1 and w2.

    Raises:
        RuntimeError, TypeError: An argument has a wrong shape or dtype.

    Example:
        >>> import torch, ikattn
        >>> x, w1 = torch.randn(2, 4, 10, 16), torch.randn(4, 16, 32)
        >>> phi = ikattn.ops.spectral_features(x, w1)
        >>> (phi * phi).sum(-1).allclose(torch.tensor(4.0 * 32))  # s(x, x) = 1
        True
    """
    return operator("spectral_features")(x, w1, w2)  # type: ignore[no-any-return]


def attention_from_features(
    query_features: Tensor,
    key_features: Tensor,
    logits: Tensor,
    value: Tensor,
    *,
    eps: float = 1e-5,
) -> Tensor:
    r"""Computes implicit-kernel attention of features that were made before.

    .. math::
        o_i \propto \sum_j (s_{ij}^2 + \epsilon) \exp(\mathrm{logits}_{ij}) v_j, \qquad
        s_{ij} = \frac{\phi(q_i) \cdot \phi(k_j)}{2 F}

    For few queries and many keys, as in decoding: on the CPU features and values are read once, as
    they lie. :class:`ikattn.KeyFeatures` keeps the arguments for it. Elsewhere, and where a
    gradient is wanted, it is a composition of torch's functions that holds ``[B, H, L, S]``; there
    NaN in a value that some row sees reaches every row of its head.

    Args:
        query_features: ``[B, H, L, F]`` of :func:`spectral_features`, F = 2 M; float32 or float64.
        key_features: ``[B, K, S, F]``, K a divisor of H, of the same type; any strides.
        logits: Broadcastable to ``[B, H, L, S]``, of the same type: magnitudes of keys and masks
            together; -inf hides a key.
        value: ``[B, G, S, d_v]``, G a divisor of H, in any floating type, any strides.
        eps: Added to s^2; positive.

    Returns:
        ``[B, H, L, d_v]`` in the type of value. A row that sees no key is zero.

    Raises:
        RuntimeError, TypeError, ValueError: An argument has a wrong shape, dtype or value.

    Source: K. Song et al., "Implicit Kernel Attention", AAAI 2021 (arXiv 2006.06147).

    Example:
        >>> import torch, ikattn
        >>> q, k, v = (torch.randn(2, 4, n, 16) for n in (1, 9, 9))
        >>> w1, w2 = (0.1 * torch.randn(4, 16, 32) for _ in range(2))
        >>> phi_q, phi_k = (ikattn.ops.spectral_features(x, w1, w2) for x in (q, k))
        >>> magnitudes = k.square().sum(-1).unsqueeze(-2) / (2 * 16**0.5)
        >>> output = ikattn.ops.attention_from_features(phi_q, phi_k, magnitudes, v)
        >>> whole = ikattn.implicit_kernel_attention(q, k, v, w1, w2)
        >>> torch.allclose(output, whole, atol=1e-5)
        True
    """
    return operator("attention_from_features")(  # type: ignore[no-any-return]
        query_features, key_features, logits, value, eps
    )


@takes_memory_for("similarity and magnitude")
def similarity_and_magnitude(
    query: Tensor,
    key: Tensor,
    *,
    kernel: str = "dot",
    p: float | None = 2.0,
    w1: Tensor | None = None,
    w2: Tensor | None = None,
    eps: float = 1e-5,
    magnitude_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes both factors of a coefficient: weight_ij = similarity_ij magnitude_j / Z_i.

    Args:
        query: ``[B, H, L, d]``.
        key: ``[B, H, S, d]``.
        kernel: "dot" (p = 2; ordinary softmax attention) or "rbf" (any p): similarity is
            ``exp(-|q - k|^2 / (2 sqrt d))``. "implicit": ``s^2 + eps``.
        p: Order of the norm in the magnitude, or None for magnitude 1. Ignored for "dot", which is
            p = 2.
        w1, w2: Frequencies, for "implicit" only, as in :func:`implicit_kernel_attention`.
        eps: For "implicit".
        magnitude_scale: Factor of ``|k|_p^2``, by default ``1 / (2 sqrt d)``. Not for "dot".

    Returns:
        similarity ``[B, H, L, S]`` and magnitude ``exp(magnitude_scale |k_j|_p^2)``, ``[B, H, S]``.

    Raises:
        ValueError: The kernel is unknown, frequencies are missing or given where none belong, or p,
            magnitude_scale or a shape does not fit.

    Example:
        >>> import torch, ikattn
        >>> q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
        >>> similarity, magnitude = ikattn.ops.similarity_and_magnitude(q, k)
        >>> weights = similarity * magnitude.unsqueeze(-2)
        >>> softmax = (q @ k.mT / 8**0.5).softmax(-1)
        >>> torch.allclose(weights / weights.sum(-1, True), softmax, atol=1e-6)
        True
    """
    if kernel not in ("dot", "rbf", "implicit"):
        raise ValueError(
            f'similarity_and_magnitude: kernel must be "dot", "rbf" or "implicit", got {kernel!r}'
        )
    for name, w in (("w1", w1), ("w2", w2)):
        if (w is not None and kernel != "implicit") or (w1 is None and kernel == "implicit"):
            raise ValueError(
                f'similarity_and_magnitude: {name} must be given for kernel="implicit" and only '
                f"there, got {kernel!r} with w1 {'missing' if w1 is None else 'given'}"
            )
    if magnitude_scale is not None and kernel == "dot":
        raise ValueError(
            'similarity_and_magnitude: magnitude_scale must be None for kernel="dot", '
            f"whose magnitude is fixed, got {magnitude_scale}"
        )
    if kernel != "dot":
        check_order("similarity_and_magnitude", p)
    fits = query.dim() == key.dim() == 4 and query.shape[:2] == key.shape[:2]
    if not fits or query.shape[3] != key.shape[3]:
        raise ValueError(
            "similarity_and_magnitude: key must have shape [B, H, S, d] with B, H and d of query, "
            f"{list(query.shape)}, got {list(key.shape)}"
        )
    default_scale = 1 / (2 * math.sqrt(query.shape[-1]))
    if kernel == "dot":
        p, magnitude_scale = 2.0, None
    magnitude = log_magnitude(key, p, magnitude_scale).exp()
    if w1 is not None:
        phi_q, phi_k = (spectral_features(x, w1, w2) for x in (query, key))
        similarity = (phi_q @ phi_k.mT / (4 * w1.shape[-1])).square() + eps
    else:
        squares = (query * query).sum(-1).unsqueeze(-1) + (key * key).sum(-1).unsqueeze(-2)
        distance = (squares - 2 * query @ key.mT).clamp_min(0)
        similarity = torch.exp(-default_scale * distance)
    return similarity, magnitude
