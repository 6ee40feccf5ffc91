"""From the module's inputs to heads and back, with nn.MultiheadAttention's checks and messages.

Sizes: N batch, L queries, S keys, E model size, H heads, d = E / H head size.
"""

from __future__ import annotations

from torch import Tensor

# Private, but what upstream's own forward is made of: equal numbers, errors in the same words.
from torch.nn.functional import (  # type: ignore[attr-defined]
    _in_projection,
    _in_projection_packed,
    _mha_shape_check,
)
from torch.nn.modules.activation import MultiheadAttention as StockMultiheadAttention

__all__ = ["check_axes", "merge_heads", "project"]

check_axes = _mha_shape_check


def project(
    module: StockMultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Checks the sizes of batched inputs and applies the in-projection.

    Args:
        module: Whose weights to use, as they are now.
        query: [N, L, E] if ``module.batch_first``, else [L, N, E].
        key: [N, S, kdim] or [S, N, kdim].
        value: [N, S, vdim] or [S, N, vdim].

    Returns:
        Queries [N, H, L, d], keys and values [N, H, S, d].

    Raises:
        AssertionError: Sizes do not fit the module or each other.
        RuntimeError: query and key differ in batch size.
    """
    _check_sizes(module, query, key, value)
    if module._qkv_same_embed_dim:
        projected = _in_projection_packed(
            query, key, value, module.in_proj_weight, module.in_proj_bias
        )
    else:
        bias = module.in_proj_bias
        projected = _in_projection(
            query,
            key,
            value,
            module.q_proj_weight,
            module.k_proj_weight,
            module.v_proj_weight,
            *((None, None, None) if bias is None else bias.chunk(3)),
        )
    q, k, v = (_split_heads(x, module.num_heads, module.batch_first) for x in projected)
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
    module: StockMultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> None:
    if query.size(-1) != module.embed_dim:
        raise AssertionError(
            f"was expecting embedding dimension of {module.embed_dim}, but got {query.size(-1)}"
        )
    if module.batch_first:  # upstream's messages give sizes in sequence-first order
        key, value = key.transpose(0, 1), value.transpose(0, 1)
    if module._qkv_same_embed_dim:
        if key.shape != value.shape:
            raise AssertionError(f"key shape {key.shape} does not match value shape {value.shape}")
    elif key.shape[:2] != value.shape[:2]:
        raise AssertionError(
            f"key's sequence and batch dims {key.shape[:2]} do not match value's {value.shape[:2]}"
        )
