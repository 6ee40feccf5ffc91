r"""Sums over keys that all queries can read: attention in linear time, in two steps.

The weight of key j for query i is ``(s_ij^2 + eps) exp(logit_j)``, and ``s_ij^2`` a sum over
products of two features. So its numerator and denominator are linear in moments of the keys, which
have one size for any number of keys, and those of two sets of keys add.

Sizes as in ``ikattn.ops``: B batch, H query heads, K heads of the moments, G those of values, L
queries, S keys, d_v size of a value; F = 2 M features make E = F (F + 1) / 2 + 1 entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ikattn.ops.exporting import operator


def key_moments(key_features: Tensor, logits: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    r"""Moments of keys: all that attention without a mask of pairs needs to know of them.

    .. math::
        m_e = \sum_j \psi_e(\phi_j) \exp(\mathrm{logit}_j - \mathrm{reference}) [v_j, 1], \qquad
        \psi_{rF + b}(\phi) = \phi_b \phi_{(b + r) \bmod F}

    Shifts r go from 0 to M, the last one with b < M only; then comes the entry of 1, which eps
    counts.

    Args:
        key_features: ``[B, K, S, F]`` of :func:`spectral_features`, F = 2 M, any strides.
        logits: ``[B, K, S]``: magnitude of a key and its bias; -inf hides the key, whatever it
            holds. Float64 keeps the digits of large ones.
        value: ``[B, G, S, d_v]``, G a divisor of K. Sums are made in float32, for float64 features
            in float64, whatever the types are.

    Returns:
        moments ``[B, K, E, d_v + 1]`` in float32, for float64 features in float64, and reference
        ``[B, K]`` in float64, the largest finite logit, -inf where there is none. The reference
        counts as a constant, which cancels in every attention: gradients reach the three arguments
        through the moments.

    Raises:
        RuntimeError, TypeError: An argument has a wrong shape, dtype or device.

    Source: K. Song et al., "Implicit Kernel Attention", AAAI 2021 (arXiv 2006.06147); its
    kernel squared is a polynomial in the features.

    Example:
        >>> import torch, ikattn
        >>> q, k, v = (torch.randn(2, 4, n, 16) for n in (3, 90, 90))
        >>> w1, w2 = (0.1 * torch.randn(4, 16, 8) for _ in range(2))
        >>> phi_q, phi_k = (ikattn.ops.spectral_features(x, w1, w2) for x in (q, k))
        >>> logits = k.double().square().sum(-1) / (2 * 16**0.5)
        >>> moments, reference = ikattn.ops.key_moments(phi_k, logits, v)
        >>> output, _ = ikattn.ops.attention_from_moments(phi_q, moments, reference)
        >>> torch.allclose(output, ikattn.implicit_kernel_attention(q, k, v, w1, w2), atol=1e-4)
        True
    """
    return operator("key_moments")(key_features, logits, value)  # type: ignore[no-any-return]


def no_moments(features: Tensor, d_v: int) -> tuple[Tensor, Tensor]:
    """Returns moments and reference of no key, for features [B, K, S, F]."""
    batch, heads, _, size = features.shape
    moments = features.new_zeros((batch, heads, size * (size + 1) // 2 + 1, d_v + 1))
    return moments, moments.new_full((batch, heads), -torch.inf, dtype=torch.float64)


def attention_from_moments(
    query_features: Tensor, moments: Tensor, reference: Tensor, *, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    r"""Attends from queries to the keys that moments are of.

    A sum over entries keeps what :math:`|\phi_i|^2 \sum_j |\phi_j|^2` leaves of the last bits. A
    query whose scores are all near zero errs by up to some 6e-8 / eps of its output in float32;
    :func:`ikattn.implicit_kernel_attention`, which has the keys, computes such a query by pairs.

    Args:
        query_features: ``[B, H, L, F]`` of :func:`ikattn.ops.spectral_features`, any floating type.
        moments: ``[B, K, E, d_v + 1]`` of :func:`key_moments`, K a divisor of H; float64 for
            float64 features, otherwise float32.
        reference: ``[B, K]``, float64, with the moments.
        eps: Added to the squared similarity; positive.

    Returns:
        output ``[B, H, L, d_v]`` in the type of query_features, zero where there is no key, and
        log_normalizer ``[B, H, L]`` in float64: log Z as of
        :func:`ikattn.implicit_kernel_attention`, -inf where there is no key. It has no gradient.

    Raises:
        RuntimeError, TypeError, ValueError: An argument has a wrong shape, dtype, device or value.

    Source: as of :func:`key_moments`, which has an example.

    Example:
        >>> import torch, ikattn
        >>> phi, logits, v = torch.randn(1, 2, 5, 8), torch.zeros(1, 2, 5), torch.randn(1, 2, 5, 3)
        >>> output, log_z = ikattn.ops.attention_from_moments(
        ...     phi, *ikattn.ops.key_moments(phi, logits, v)
        ... )
        >>> output.shape, log_z.shape
        (torch.Size([1, 2, 5, 3]), torch.Size([1, 2, 5]))
    """
    return operator("attention_from_moments")(  # type: ignore[no-any-return]
        query_features, moments, reference, eps
    )


def causal_attention_from_moments(
    query_features: Tensor,
    key_features: Tensor,
    logits: Tensor,
    value: Tensor,
    moments: Tensor,
    reference: Tensor,
    *,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Attends causally from tokens after the keys that moments are of, in linear time.

    A query sees all those keys, and the tokens up to its own. The moments of all keys come back, so
    that a sequence may be computed part by part, each going on where the one before ended. Tokens
    near a query are taken by pairs, those before them by moments.

    Args:
        query_features: ``[B, H, L, F]`` of :func:`ikattn.ops.spectral_features`, any floating type.
        key_features: ``[B, K, L, F]``, K a divisor of H, in the type of query_features.
        logits: ``[B, K, L]``, as of :func:`key_moments`; -inf hides a key.
        value: ``[B, G, L, d_v]``, G a divisor of K.
        moments: ``[B, K, E, d_v + 1]`` of the keys before; zeros where there is none. Float64 for
            float64 features, otherwise float32.
        reference: ``[B, K]``, float64, with the moments; -inf where there is no key.
        eps: Added to the squared similarity; positive.

    Returns:
        output ``[B, H, L, d_v]`` in the type of query_features, zero where a query sees no key;
        log_normalizer ``[B, H, L]`` in float64, without a gradient; and moments and reference of
        all keys, of the shapes of those given. Gradients reach the first five arguments, through
        output and moments.

    Raises:
        RuntimeError, TypeError, ValueError: An argument has a wrong shape, dtype, device or value.

    Source: as of :func:`key_moments`.

    Example:
        >>> import torch, ikattn
        >>> phi, logits, v = torch.randn(1, 2, 9, 8), torch.zeros(1, 2, 9), torch.randn(1, 2, 9, 3)
        >>> nothing = torch.zeros(1, 2, 37, 4), torch.full((1, 2), -torch.inf).double()
        >>> attend = ikattn.ops.causal_attention_from_moments
        >>> whole, _, *_ = attend(phi, phi, logits, v, *nothing)
        >>> parts, state = [], nothing
        >>> for part in (slice(0, 4), slice(4, 9)):
        ...     tokens = (x[:, :, part] for x in (phi, phi, logits, v))
        ...     output, _, *state = attend(*tokens, *state)
        ...     parts.append(output)
        >>> torch.allclose(torch.cat(parts, 2), whole, atol=1e-5)
        True
    """
    return operator("causal_attention_from_moments")(  # type: ignore[no-any-return]
        query_features, key_features, logits, value, moments, reference, eps
    )


def merge_moments(
    moments: Tensor, reference: Tensor, other_moments: Tensor, other_reference: Tensor
) -> tuple[Tensor, Tensor]:
    """Moments of the keys of both, relative to the larger reference.

    Args:
        moments: ``[B, K, E, d_v + 1]`` of :func:`key_moments`.
        reference: ``[B, K]``, with them.
        other_moments: As moments, of other keys.
        other_reference: With these.

    Returns:
        moments and reference of all the keys. Gradients reach both moments.

    Raises:
        RuntimeError, TypeError: Shapes, dtypes or devices differ.

    Example:
        >>> import torch, ikattn
        >>> phi, logits, v = torch.randn(1, 2, 6, 8), torch.zeros(1, 2, 6), torch.randn(1, 2, 6, 3)
        >>> halves = [
        ...     ikattn.ops.key_moments(phi[:, :, part], logits[:, :, part], v[:, :, part])
        ...     for part in (slice(0, 2), slice(2, 6))
        ... ]
        >>> merged, _ = ikattn.ops.merge_moments(*halves[0], *halves[1])
        >>> torch.allclose(merged, ikattn.ops.key_moments(phi, logits, v)[0], atol=1e-5)
        True
    """
    return torch.ops.ikattn.merge_moments(  # type: ignore[no-any-return]
        moments, reference, other_moments, other_reference
    )
