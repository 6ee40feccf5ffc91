"""Attention of the chosen kernel, on heads: softmax, the implicit kernel, or some heads with each.

Sizes: N batch, H heads, L queries, S keys, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ikattn._heads import HeadShare
from ikattn.nn.masks import Masks, as_bias, as_visible, hidden, padded
from ikattn.nn.over_ranks import attention_function, dropout_seed_for, is_over_ranks
from ikattn.nn.softmax import rbf_key_bias, select_away, softmax_attention
from ikattn.nn.softmax_heads import Split, by_heads
from ikattn.ops.attention import implicit_kernel_weights
from ikattn.ops.magnitude import LearnedOrder

Kernel = Literal["dot", "rbf", "implicit"]

# Projected queries [N, H, L, d], keys [N, H, S, d], bool padding of the keys [N, S] and of the
# queries [N, L], each or None -> w1, w2
Frequencies: TypeAlias = Callable[
    [Tensor, Tensor, "Tensor | None", "Tensor | None"], "tuple[Tensor, Tensor | None]"
]


class KernelOptions(NamedTuple):
    """The name of a kernel, and its parameters."""

    name: Kernel
    p: float | None
    frequencies: Frequencies | None  # None but for "implicit"
    magnitude: LearnedOrder | None = None  # in place of p
    pools: bool = False  # whether frequencies depend on averages over queries
    query_padding: Tensor | None = None  # bool [N, L], for these averages
    head_share: HeadShare | None = None  # whose heads these are, where ranks share them out
    split: Split | None = None  # the heads, where some compute softmax in spite of the name


class Wanted(NamedTuple):
    """How to return weights, if at all."""

    weights: bool
    average: bool


def attend_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: KernelOptions,
    masks: Masks,
    wanted: Wanted,
    dropout_p: float,
    mask_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Attends by the kernel that was chosen.

    Args:
        query: [N, H, L, d].
        key, value: [N, H, S, d].
        kernel: Which, and what it needs.
        masks: With four axes.
        wanted: Whether weights are returned, and how.
        dropout_p: Probability on the normalised weights.
        mask_dtype: The type in which bool masks are added to the logits.

    Returns:
        Output [N, H, L, d], and weights [N, H, L, S], [N, L, S], or None.
    """
    compute = _implicit if kernel.name == "implicit" else _softmax
    if kernel.split is not None:
        compute = _hybrid
    return compute(query, key, value, kernel, masks, wanted, dropout_p, mask_dtype)


def _softmax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: KernelOptions,
    masks: Masks,
    wanted: Wanted,
    dropout_p: float,
    mask_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    key, value = select_away(key, value, masks.padding)
    share = kernel.head_share if dropout_p > 0.0 else None
    with nullcontext() if share is None else share.own_numbers(query.device):
        return softmax_attention(
            query,
            key,
            value,
            masks,
            key_bias=(
                rbf_key_bias(key, kernel.magnitude or kernel.p) if kernel.name == "rbf" else None
            ),
            dropout_p=dropout_p,
            need_weights=wanted.weights,
            average=wanted.average,
            mask_dtype=mask_dtype,
        )


def _of_tokens(
    query: Tensor, key: Tensor, kernel: KernelOptions, padding: Tensor | None
) -> tuple[tuple[Tensor, Tensor | None], Tensor | None]:
    """Returns an implicit kernel's frequencies, and its keys' magnitudes where it makes them."""
    assert kernel.frequencies is not None
    of_keys = None if padding is None else padded(padding)
    frequencies = kernel.frequencies(query, key, of_keys, kernel.query_padding)
    if kernel.magnitude is None:
        return frequencies, None
    return frequencies, kernel.magnitude(key, None if padding is None else hidden(padding))


def _implicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: KernelOptions,
    masks: Masks,
    wanted: Wanted,
    dropout_p: float,
    mask_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    padding, attention = masks.padding, masks.attention
    (w1, w2), magnitude = _of_tokens(query, key, kernel, padding)
    key_bias = None if padding is None else as_bias(padding, mask_dtype)[:, None]
    if magnitude is not None:
        key_bias = magnitude if key_bias is None else magnitude + key_bias
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {dropout_p}")
    drops_all = dropout_p == 1.0
    if drops_all:
        dropout_p = 0.0  # the operator divides by the share that is kept
    options: dict[str, Any] = {
        "p": kernel.p,
        "key_bias": key_bias,
        "attn_mask": None if attention is None else as_visible(attention),
        "is_causal": masks.is_causal,
        "dropout_p": dropout_p,
        # one seed for both calls: the weights returned are the weights used
        "dropout_seed": dropout_seed_for(dropout_p, query.device, kernel.head_share),
    }
    if wanted.weights and is_over_ranks():
        raise RuntimeError(
            "MultiheadAttention: need_weights must be False under context_parallel, where no rank "
            "has all weights of a query"
        )
    output = attention_function()(query, key, value, w1, w2, **options)
    weights = None
    if wanted.weights:
        weights = implicit_kernel_weights(
            query, key, w1, w2, **options, average_heads=wanted.average
        )
    if drops_all:
        return 0.0 * output, None if weights is None else 0.0 * weights
    return output, weights


def _hybrid(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: KernelOptions,
    masks: Masks,
    wanted: Wanted,
    dropout_p: float,
    mask_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Attends with softmax in some heads, and with the implicit kernel in the others."""
    assert kernel.split is not None
    if is_over_ranks() or kernel.head_share is not None:
        raise NotImplementedError(
            "MultiheadAttention: heads that compute softmax are not supported where ranks share "
            "tokens or heads; keep_softmax(None) takes them back"
        )
    frequencies, magnitude = _of_tokens(query, key, kernel, masks.padding)
    by_head = Wanted(wanted.weights, average=False)

    def part(compute: Any) -> Callable[[Tensor], tuple[Tensor, Tensor | None]]:
        def compute_heads(heads: Tensor) -> tuple[Tensor, Tensor | None]:
            own: Any = [None if w is None else w.index_select(-3, heads) for w in frequencies]
            options = kernel._replace(frequencies=lambda *_: tuple(own))
            if magnitude is not None:
                of_heads = magnitude.index_select(1, heads)
                options = options._replace(magnitude=lambda *_: of_heads)  # type: ignore[arg-type]
            mask = masks.attention
            if mask is not None and mask.size(1) > 1:
                mask = mask.index_select(1, heads)
            q, k, v = (x.index_select(1, heads) for x in (query, key, value))
            own_masks = masks._replace(attention=mask)
            return compute(q, k, v, options, own_masks, by_head, dropout_p, mask_dtype)  # type: ignore[no-any-return]

        return compute_heads

    output, weights = by_heads(kernel.split, part(_softmax), part(_implicit), query.device)
    if weights is not None and wanted.average:
        weights = weights.mean(1)
    return output, weights
