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
from ikattn.ops.forgetting import ForgetGates
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
    forget: ForgetGates | None = None  # of "implicit" alone


class Wanted(NamedTuple):
    """How to return weights, if at all."""

    weights: bool
    average: bool


class HeadCall(NamedTuple):
    """A call of attention on heads."""

    query: Tensor  # [N, H, L, d]
    key: Tensor  # [N, H, S, d]; of a split kernel, of a divisor of H heads
    value: Tensor  # as key
    kernel: KernelOptions
    masks: Masks  # with four axes
    wanted: Wanted
    dropout_p: float  # probability on the normalised weights
    mask_dtype: torch.dtype  # the type in which bool masks are added to the logits


# Output [N, H, L, d] of a call, and weights [N, H, L, S], [N, L, S], or None
Attended: TypeAlias = "tuple[Tensor, Tensor | None]"


def attend_heads(call: HeadCall) -> Attended:
    if call.kernel.split is not None:
        return _hybrid(call, call.kernel.split)
    return _implicit(call) if call.kernel.name == "implicit" else _softmax(call)


def _softmax(call: HeadCall) -> Attended:
    kernel = call.kernel
    key, value = select_away(call.key, call.value, call.masks.padding)
    bias = rbf_key_bias(key, kernel.magnitude or kernel.p) if kernel.name == "rbf" else None
    share = kernel.head_share if call.dropout_p > 0.0 else None
    with nullcontext() if share is None else share.own_numbers(key.device):
        return softmax_attention(call._replace(key=key, value=value), bias)


def _of_tokens(call: HeadCall) -> tuple[Attended, Tensor | None]:
    """Returns an implicit kernel's frequencies, and its keys' magnitudes where it makes them."""
    query, key, kernel, padding = call.query, call.key, call.kernel, call.masks.padding
    assert kernel.frequencies is not None
    of_keys = None if padding is None else padded(padding)
    frequencies = kernel.frequencies(query, key, of_keys, kernel.query_padding)
    if kernel.magnitude is None:
        return frequencies, None
    return frequencies, kernel.magnitude(key, None if padding is None else hidden(padding))


def _implicit(call: HeadCall) -> Attended:
    query, key, kernel, dropout_p = call.query, call.key, call.kernel, call.dropout_p
    padding, attention = call.masks.padding, call.masks.attention
    (w1, w2), magnitude = _of_tokens(call)
    key_bias = None if padding is None else as_bias(padding, call.mask_dtype)[:, None]
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
        "is_causal": call.masks.is_causal,
        "dropout_p": dropout_p,
        # one seed for both calls: the weights returned are the weights used
        "dropout_seed": dropout_seed_for(dropout_p, query.device, kernel.head_share),
    }
    if kernel.forget is not None:
        _check_forgets(call)
        options["log_decay"] = kernel.forget(
            call.value, None if padding is None else hidden(padding)
        )
    if call.wanted.weights and is_over_ranks():
        raise RuntimeError(
            "MultiheadAttention: need_weights must be False under context_parallel, where no rank "
            "has all weights of a query"
        )
    output = attention_function()(query, key, call.value, w1, w2, **options)
    weights = None
    if call.wanted.weights:
        average = call.wanted.average
        weights = implicit_kernel_weights(query, key, w1, w2, **options, average_heads=average)
    if drops_all:
        return 0.0 * output, None if weights is None else 0.0 * weights
    return output, weights


def _check_forgets(call: HeadCall) -> None:
    """Raises where a call is not one that gates have a meaning for."""
    others = "keep_softmax" * (call.kernel.split is not None)
    others = others or "tensor parallelism" * (call.kernel.head_share is not None)
    others = others or "context_parallel" * is_over_ranks()
    if others:
        raise NotImplementedError(f"MultiheadAttention: forget=True does not work with {others}")
    if not call.masks.is_causal or call.query.size(2) != call.key.size(2):
        raise ValueError(
            "MultiheadAttention: forget=True wants causal self-attention without appended keys: "
            "expected is_causal=True beside the causal attn_mask, got is_causal="
            f"{call.masks.is_causal}, {call.query.size(2)} queries and {call.key.size(2)} keys"
        )


def _hybrid(call: HeadCall, split: Split) -> Attended:
    """Attends with softmax in some heads, and with the implicit kernel in the others."""
    if call.kernel.forget is not None:
        _check_forgets(call)
    if is_over_ranks() or call.kernel.head_share is not None:
        raise NotImplementedError(
            "MultiheadAttention: heads that compute softmax are not supported where ranks share "
            "tokens or heads; keep_softmax(None) takes them back"
        )
    frequencies, magnitude = _of_tokens(call)

    def of(heads: Tensor) -> HeadCall:
        own: Any = [None if w is None else w.index_select(-3, heads) for w in frequencies]
        options = call.kernel._replace(frequencies=lambda *_: tuple(own))
        if magnitude is not None:
            of_heads = magnitude.index_select(1, heads)
            options = options._replace(magnitude=lambda *_: of_heads)  # type: ignore[arg-type]
        mask = call.masks.attention
        if mask is not None and mask.size(1) > 1:
            mask = mask.index_select(1, heads)
        of_keys = heads // (call.query.size(1) // call.key.size(1))
        q = call.query.index_select(1, heads)
        k, v = (x.index_select(1, of_keys) for x in (call.key, call.value))
        wanted = call.wanted._replace(average=False)
        masks = call.masks._replace(attention=mask)
        return HeadCall(q, k, v, options, masks, wanted, call.dropout_p, call.mask_dtype)

    own = (lambda heads: _softmax(of(heads)), lambda heads: _implicit(of(heads)))
    output, weights = by_heads(split, *own, call.query.device)
    if weights is not None and call.wanted.average:
        weights = weights.mean(1)
    return output, weights
