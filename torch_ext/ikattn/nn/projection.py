"""Projections to heads and back, with nn.MultiheadAttention's checks and messages.

Sizes: N batch, L queries, S keys, E model size, H heads, d = E / H head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from torch import Tensor

# Private, but what upstream's own forward is made of: equal numbers, errors in the same words.
from torch.nn.functional import (  # type: ignore[attr-defined]
    _in_projection,
    _in_projection_packed,
    _mha_shape_check,
    linear,
)
from torch.nn.modules.activation import MultiheadAttention as StockMultiheadAttention

check_axes = _mha_shape_check

# Batched query, key, value and batch_first -> queries [N, H, L, d], keys and values [N, H, S, d]
Projection: TypeAlias = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]


class InProjection(NamedTuple):
    """The weights of an in-projection: packed, or one for each of query, key and value."""

    embed_dim: int
    num_heads: int
    weight: Tensor | None  # [3 E, E]
    weights: tuple[Tensor | None, Tensor | None, Tensor | None] | None  # [E, E], [E, kdim], ...
    bias: Tensor | None  # [3 E]
    is_part: bool = False  # weights, biases and num_heads are those of some of the heads alone

    @classmethod
    def of(cls, module: StockMultiheadAttention) -> InProjection:
        """Returns the weights of a module, as they are now."""
        E, H, bias = module.embed_dim, module.num_heads, module.in_proj_bias
        if module._qkv_same_embed_dim:
            return cls(E, H, module.in_proj_weight, None, bias)
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        return cls(E, H, None, weights, bias)


def project(
    source: InProjection, query: Tensor, key: Tensor, value: Tensor, batch_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Checks the sizes of batched inputs and applies the in-projection.

    Query is [N, L, E] if ``batch_first``, else [L, N, E], key [N, S, kdim] and value [N, S, vdim]
    likewise. Queries are [N, H, L, d], keys and values [N, H, S, d].
    """
    _check_sizes(source, query, key, value, batch_first)
    bias, first = source.bias, source.weight if source.weights is None else source.weights[0]
    if bias is not None and first is not None and first.is_floating_point():
        bias = bias.to(first.dtype)  # upstream takes one of another type in some layouts
    if source.weights is None:
        if source.weight is None:
            raise AssertionError("use_separate_proj_weight is False but in_proj_weight is None")
        projected = _in_projection_packed(query, key, value, source.weight, bias)
    else:
        for name, weight in zip("qkv", source.weights, strict=True):
            if weight is None:
                raise AssertionError(
                    f"use_separate_proj_weight is True but {name}_proj_weight is None"
                )
        biases = (None, None, None) if bias is None else bias.chunk(3)
        if source.is_part:  # upstream's function refuses it: its weights are not square
            inputs = zip((query, key, value), source.weights, biases, strict=True)
            projected = [
                linear(x, weight, offset) for x, weight, offset in inputs if weight is not None
            ]
        else:
            projected = _in_projection(query, key, value, *source.weights, *biases)
    q, k, v = (_split_heads(x, source.num_heads, batch_first) for x in projected)
    if k.size(0) != q.size(0):
        raise RuntimeError(
            f"shape '[{k.size(2)}, {q.size(0) * q.size(1)}, {q.size(3)}]' "
            f"is invalid for input of size {k.numel()}"
        )
    return q, k, v


def merge_heads(x: Tensor, batch_first: bool) -> Tensor:
    """Turns [N, H, L, d] into [N, L, E] if batch_first, else into [L, N, E]."""
    return x.permute(0, 2, 1, 3).flatten(2) if batch_first else x.permute(2, 0, 1, 3).flatten(2)


def _split_heads(x: Tensor, num_heads: int, batch_first: bool) -> Tensor:
    heads = x.view(x.size(0), x.size(1), num_heads, x.size(2) // num_heads)
    return heads.permute(0, 2, 1, 3) if batch_first else heads.permute(1, 2, 0, 3)


def _check_sizes(
    source: InProjection, query: Tensor, key: Tensor, value: Tensor, batch_first: bool
) -> None:
    size = query.size(-1)
    if size != source.embed_dim:
        raise AssertionError(
            f"was expecting embedding dimension of {source.embed_dim}, but got {size}"
        )
    if size % source.num_heads != 0:
        raise AssertionError(f"embed_dim {size} not divisible by num_heads {source.num_heads}")
    if batch_first:  # upstream's messages give sizes in sequence-first order
        key, value = key.transpose(0, 1), value.transpose(0, 1)
    if source.weights is None:
        if key.shape != value.shape:
            raise AssertionError(f"key shape {key.shape} does not match value shape {value.shape}")
    elif key.shape[:2] != value.shape[:2]:
        raise AssertionError(
            f"key's sequence and batch dims {key.shape[:2]} do not match value's {value.shape[:2]}"
        )
