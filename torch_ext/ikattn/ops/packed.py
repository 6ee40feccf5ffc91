"""Attention within each of many sequences that lie one after the other, without padding.

Symbols as in ``ikattn.ops.attention``, and N sequences, T_q queries and T_k keys of all of them
together.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ikattn.ops.dropout import draw_dropout_seed
from ikattn.ops.jagged import have_same_lengths, nested_like, tokens_of
from ikattn.ops.options import AttentionOptions, changed


def implicit_kernel_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    causal: bool = False,
    *,
    p: float | None = 2.0,
    key_bias: Tensor | None = None,
    eps: float = 1e-5,
    magnitude_scale: float | None = None,
    dropout_seed: Tensor | None = None,
) -> Tensor:
    """Computes attention of packed sequences, with FlashAttention's argument names.

    Sequences of equal lengths that follow each other are computed together, as a batch, and views
    of the packed tensors; on a GPU so are sequences of similar lengths, padded. Nothing is computed
    between sequences. Every sequence is taken in quadratic or in linear time, as it would be alone.

    Args:
        q: ``[T_q, H, d]``; float64, float32, bfloat16 or float16, any strides.
        k: ``[T_k, G, d]``, G a divisor of H.
        v: ``[T_k, G, d_v]``.
        w1: Frequencies ``[H, d, M]`` or ``[G, d, M]``, optionally with a leading axis of N, in
            cycles per unit of q; in the dtype of q or float32.
        w2: The second frequencies, shaped as w1. None: the stationary kernel, w2 = w1.
        cu_seqlens_q: int32 or int64 ``[N + 1]``, ascending from 0 to T_q: sequence n has the
            queries ``cu_seqlens_q[n]`` up to ``cu_seqlens_q[n + 1] - 1``. On the CPU or on the
            device of q; on a GPU the host waits for the numbers, so that there they are better on
            the CPU.
        cu_seqlens_k: The same of the keys. Sequences may be empty.
        max_seqlen_q, max_seqlen_k: The longest lengths; a longer sequence is an error. They change
            nothing else.
        causal: The last query of a sequence sees all its keys, the one before it all but the last:
            aligned at the bottom right, as in FlashAttention. Sequences of several queries and
            another number of keys take quadratic time, and a mask of a byte a pair.
        dropout_p, p, eps, magnitude_scale: As in :func:`ikattn.implicit_kernel_attention`.
        key_bias: Added to the logit of a key in every row; broadcastable to ``[H, T_k]`` or
            ``[G, T_k]``. ``-inf`` hides a key.
        dropout_seed: int64 ``[2]`` on the device of q. The mask is that of the padded call, with
            sequence n as batch item n. None: drawn from torch's default generator.

    Returns:
        ``[T_q, H, d_v]`` in the dtype of q. A row that sees no key is zero. Differentiable in q, k,
        v, w1, w2 and key_bias, twice too.

    Raises:
        RuntimeError, TypeError, ValueError: An argument has a wrong shape, dtype or value.

    Source: K. Song et al., "Implicit Kernel Attention", AAAI 2021 (arXiv 2006.06147).

    Example:
        >>> import torch, ikattn
        >>> q, k, v = (torch.randn(12, 4, 16) for _ in range(3))  # sequences of 5 and 7 tokens
        >>> w1, w2 = (0.1 * torch.randn(4, 16, 32) for _ in range(2))
        >>> begins = torch.tensor([0, 5, 12])
        >>> y = ikattn.implicit_kernel_attention_varlen(q, k, v, w1, w2, begins, begins)
        >>> first = [x[:5].transpose(0, 1).unsqueeze(0) for x in (q, k, v)]  # [1, H, 5, d]
        >>> alone = ikattn.implicit_kernel_attention(*first, w1, w2)
        >>> torch.allclose(y[:5], alone[0].transpose(0, 1), atol=1e-6)
        True
    """
    if dropout_p > 0 and dropout_seed is None:
        dropout_seed = draw_dropout_seed(q.device)
    output, _ = torch.ops.ikattn.implicit_kernel_attention_varlen(
        q,
        k,
        v,
        w1,
        w2,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        p=p,
        key_bias=key_bias,
        dropout_p=dropout_p,
        is_causal=causal,
        enable_gqa=True,
        eps=eps,
        magnitude_scale=magnitude_scale,
        dropout_seed=dropout_seed,
    )
    return output  # type: ignore[no-any-return]


def attend_jagged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    w1: Tensor,
    w2: Tensor | None,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Computes attention of nested tensors ``[B, H, j, d]`` of the jagged layout."""
    named = changed("implicit_kernel_attention", options, query)
    is_causal = named.pop("is_causal", False)
    packed: dict[str, tuple[Tensor, Tensor]] = {}
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not x.is_nested or x.layout != torch.jagged:
            came = f"{x.layout}" if x.is_nested else "a tensor that is not nested"
            raise TypeError(
                f"implicit_kernel_attention: with nested tensors {name} must be nested, too, of "
                f"layout torch.jagged, got {came}"
            )
        if x.dim() != 4 or not isinstance(x.size(1), int):
            raise ValueError(
                f"implicit_kernel_attention: nested {name} must have shape [B, H, j, d], tokens on "
                f"axis 2, got {tuple(x.shape)}"
            )
        packed[name] = tokens_of(x.transpose(1, 2))
    for name in ("key_bias", "attn_mask"):
        if name in named:
            raise ValueError(
                f"implicit_kernel_attention: nested tensors take no {name}, got "
                f"{list(named[name].shape)}; implicit_kernel_attention_varlen takes a key_bias"
            )
    if not named.pop("enable_gqa", False) and query.size(1) != key.size(1):
        raise ValueError(
            f"implicit_kernel_attention: key must have the heads of query, {query.size(1)} "
            f"(enable_gqa=True allows fewer), got {key.size(1)}"
        )
    (q, of_queries), (k, of_keys), (v, of_values) = packed.values()
    if not have_same_lengths(of_values, of_keys):
        raise ValueError("implicit_kernel_attention: key and value must have the same lengths")
    if is_causal and not have_same_lengths(of_keys, of_queries):
        raise ValueError(
            "implicit_kernel_attention: with is_causal, nested queries and keys must have the same "
            "lengths; implicit_kernel_attention_varlen has another alignment for others"
        )
    output = implicit_kernel_attention_varlen(
        q, k, v, w1, w2, of_queries, of_keys, causal=is_causal, **named
    )
    return nested_like(query.transpose(1, 2), output).transpose(1, 2)
