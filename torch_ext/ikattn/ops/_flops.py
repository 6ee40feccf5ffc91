"""How many flops the operators take, for ``torch.utils.flop_counter.FlopCounterMode``.

Multiply-adds of products count as two, as torch counts them; sines, exponentials and sums do not.
Symbols as in ``ikattn.ops``; F = 2 M features, E = F (F / 2 + 1) products of two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ikattn.ops.kernels import Kernels, which_kernels
from ikattn.ops.options import AttentionOptions

_OPTIONS = AttentionOptions.__annotations__


def _features(x: Tensor, w1: Tensor, w2: Tensor | None) -> int:
    """Of the angles of tokens ``[.., d]``."""
    return 2 * x.numel() * w1.size(-1) * (1 if w2 is None else 2)


def _is_linear(tensors: tuple[Tensor | None, ...], options: dict[str, Any], backward: bool) -> bool:
    """Whether a pass of the call takes linear time."""
    try:
        told: Kernels = which_kernels(*tensors, **options)  # type: ignore[arg-type]
    except (RuntimeError, TypeError, ValueError):
        return False
    return (told.backward if backward else told.forward).algorithm == "linear"


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    w1: Tensor,
    w2: Tensor | None = None,
    *args: Any,
    out_val: Any = None,
    **options: Any,
) -> int:
    """The forward of attention."""
    F, d_v = 2 * w1.size(-1), value.size(-1)
    around = _features(query, w1, w2) + _features(key, w1, w2)
    options = {name: options[name] for name in _OPTIONS if name in options}
    heads = query.size(0) * query.size(1)
    L, S = query.size(2), key.size(2)
    if _is_linear((query, key, value, w1, w2), options, backward=False):
        entries = F * (F // 2 + 1)
        keys = key.size(0) * key.size(1) * S
        return around + 2 * (heads * L + keys) * entries * (d_v + 1)
    return around + 2 * _pairs(L, S, heads, options) * (F + d_v)


def _attention_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    w1: Tensor,
    w2: Tensor | None,
    *args: Any,
    out_val: Any = None,
    **options: Any,
) -> int:
    """The backward of attention: five products a pair, and three of the features."""
    F, d_v = 2 * w1.size(-1), value.size(-1)
    around = 3 * (_features(query, w1, w2) + _features(key, w1, w2))
    options = {name: options[name] for name in _OPTIONS if name in options}
    heads = query.size(0) * query.size(1)
    L, S = query.size(2), key.size(2)
    if _is_linear((query, key, value, w1, w2), options, backward=True):
        entries = F * (F // 2 + 1)
        keys = key.size(0) * key.size(1) * S
        return around + 5 * (heads * L + keys) * entries * (d_v + 1)
    return around + 2 * _pairs(L, S, heads, options) * (3 * F + 2 * d_v)


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    w1: Tensor,
    w2: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    out_val: Any = None,
    **options: Any,
) -> int:
    """The sum over the sequences of a pack, each taken as it would be alone."""
    return sum(
        _attention(*tensors, w1, w2, **options)
        for tensors in _sequences((query, key, value), cu_seqlens_q, cu_seqlens_k)
    )


def _packed_backward(
    grad_output: Tensor,
    output: Tensor,
    log_normalizer: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    w1: Tensor,
    w2: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *args: Any,
    out_val: Any = None,
    **options: Any,
) -> int:
    return sum(
        _attention_backward(grad_output, *tensors, w1, w2, **options)
        for tensors in _sequences((query, key, value), cu_seqlens_q, cu_seqlens_k)
    )


def _sequences(
    tensors: tuple[Tensor, Tensor, Tensor], cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Query, key and value of each sequence, as a batch of one."""
    of_queries, of_keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in tensors)
    for n in range(len(of_queries) - 1):
        rows, columns = slice(*of_queries[n : n + 2]), slice(*of_keys[n : n + 2])
        yield query[:, :, rows], key[:, :, columns], value[:, :, columns]


def _pairs(L: int, S: int, heads: int, options: dict[str, Any]) -> int:
    """How many pairs of all heads are computed; of causal calls those on and below the diagonal."""
    if not options.get("is_causal"):
        return heads * L * S
    seen = min(L, S)
    return heads * (seen * (seen + 1) // 2 + (L - seen) * S)


def _weights(
    query: Tensor,
    key: Tensor,
    w1: Tensor,
    w2: Tensor | None = None,
    *args: Any,
    out_val: Any = None,
    **options: Any,
) -> int:
    pairs = _pairs(query.size(2), key.size(2), query.size(0) * query.size(1), options)
    return _features(query, w1, w2) + _features(key, w1, w2) + 4 * pairs * w1.size(-1)


def _weights_backward(grad_weights: Tensor, *args: Any, out_val: Any = None, **options: Any) -> int:
    return 3 * _weights(*args[:4], **options)


def _spectral(
    x: Tensor, w1: Tensor, w2: Tensor | None = None, *args: Any, out_val: Any = None, **options: Any
) -> int:
    return _features(x, w1, w2)


def _spectral_backward(
    grad: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor | None,
    *args: Any,
    out_val: Any = None,
    **_: Any,
) -> int:
    return 3 * _features(x, w1, w2)


def _from_features(
    query_features: Tensor,
    key_features: Tensor,
    logits: Tensor,
    value: Tensor,
    *args: Any,
    out_val: Any = None,
    **options: Any,
) -> int:
    B, H, L, F = query_features.shape
    return 2 * B * H * L * key_features.size(2) * (F + value.size(-1))


def _moments(at: int, products: int) -> Callable[..., int]:
    """Of so many products of the entries of tokens, features being argument ``at``, with values.

    ``at`` is 1 in a backward, which begins with a gradient.
    """

    def formula(*tensors: Any, out_val: Any = None, **_: Any) -> int:
        B, H, N, F = tensors[at].shape
        has_keys = tensors[at + 1].dim() == 3  # logits and values, where queries have moments
        columns = int(tensors[at + 2].size(3) + 1 if has_keys else tensors[at + 1].size(3))
        return int(2 * products * B * H * N * (F * (F + 1) // 2 + 1) * columns)

    return formula


def _causal_moments(at: int, of_queries: int, of_keys: int) -> Callable[..., int]:
    """Of so many products of the entries of queries and of keys, as ``_moments``.

    The pairs of neighbouring tokens, which are a small part, are not counted.
    """

    def formula(*tensors: Any, out_val: Any = None, **_: Any) -> int:
        B, H, L, _F = tensors[at].shape
        K, E, columns = tensors[at + 4].shape[1:]
        return int(2 * B * (of_queries * H + of_keys * K) * L * E * columns)

    return formula


def _by_target(products: int) -> Callable[..., int]:
    """Of a pass over the edges by target, with so many products of features ``[N, H, F]``."""

    def formula(
        query_features: Tensor,
        key_features: Tensor,
        value: Tensor,
        *others: Any,  # logits of keys and edges, what is kept, rowptr, col, numbers
        out_val: Any = None,
        **options: Any,
    ) -> int:
        col: Tensor = others[4]
        pairs = col.numel() * query_features.size(1)
        return 2 * pairs * (products * query_features.size(2) + value.size(2))

    return formula


def _by_source(
    of_edges: Tensor,
    query_features: Tensor,
    grad_output: Tensor,
    *others: Any,
    out_val: Any = None,
    **options: Any,
) -> int:
    pairs = of_edges.size(0) * query_features.size(1)
    return 2 * pairs * (query_features.size(2) + grad_output.size(2))


def _maps(
    attn_weights: Tensor,
    value: Tensor,
    projection: Tensor,
    *args: Any,
    out_val: Any = None,
    **_: Any,
) -> int:
    """Factors of the keys, and norms of the pairs: H (H + 1) / 2 multiply-adds each."""
    B, H, L, S = attn_weights.shape
    vectors = 2 * B * S * projection.numel()
    factors = B * S * H * (H + 1) * projection.size(0)
    return vectors + factors + B * L * S * H * (H + 1)


def _streamed_maps(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    w1: Tensor | None = None,
    w2: Tensor | None = None,
    *args: Any,
    out_val: Any = None,
    **options: Any,
) -> int:
    B, H, L, d = query.shape
    S = key.size(2)
    width = d if w1 is None else 2 * w1.size(-1)
    features = 0 if w1 is None else _features(query, w1, w2) + _features(key, w1, w2)
    norms = _maps(torch.empty(B, H, L, S, device="meta"), value, projection)
    return features + 2 * B * H * L * S * width + norms


def _register() -> None:
    operators = torch.ops.ikattn
    formulas: dict[str, Callable[..., int]] = {
        "implicit_kernel_attention": _attention,
        "implicit_kernel_attention_backward": _attention_backward,
        "implicit_kernel_attention_varlen": _packed,
        "implicit_kernel_attention_varlen_backward": _packed_backward,
        "implicit_kernel_weights": _weights,
        "implicit_kernel_weights_backward": _weights_backward,
        "spectral_features": _spectral,
        "spectral_features_backward": _spectral_backward,
        "attention_from_features": _from_features,
        "key_moments": _moments(0, 1),
        "add_key_moments_": _moments(2, 1),
        "key_moments_backward": _moments(1, 2),
        "attention_from_moments": _moments(0, 1),
        "attention_from_moments_backward": _moments(1, 2),
        "causal_attention_from_moments": _causal_moments(0, 1, 1),
        "causal_attention_from_moments_backward": _causal_moments(2, 2, 3),
        "edge_attention_from_features": _by_target(1),
        "edge_query_gradients": _by_target(2),
        "edge_key_gradients": _by_source,
        "contribution_maps": _maps,
        "streamed_contribution_maps": _streamed_maps,
    }
    for name, formula in formulas.items():
        register_flop_formula(getattr(operators, name), get_raw=True)(formula)


_register()
