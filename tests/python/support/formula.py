"""The definition of implicit-kernel attention, pair by pair and without features.

    weight_ij = (s_ij^2 + eps) exp(g_j + key_bias_j + mask_ij) / Z_i
    s_ij = mean over m and over a, b in {1, 2} of cos 2 pi (q_i . w_a,m - k_j . w_b,m)
    g_j  = magnitude_scale |k_j|_p^2

A row that sees no key is zero. Slow, and written independently of the package's own reference.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import ikattn


def of_query_heads(x: Tensor, axis: int, heads: int) -> Tensor:
    """Query head h reads group h * G // H."""
    groups = x.shape[axis]
    return x.index_select(axis, torch.arange(heads) * groups // heads)


def covariance(query: Tensor, key: Tensor, w1: Tensor, w2: Tensor | None) -> Tensor:
    """s, [B, H, L, S]; all with H heads."""
    frequencies = (w1, w1 if w2 is None else w2)
    total = torch.zeros(())
    for of_query in frequencies:
        for of_key in frequencies:
            turns = (query @ of_query).unsqueeze(-2) - (key @ of_key).unsqueeze(-3)
            total = total + torch.cos(2 * math.pi * turns).mean(-1)
    return total / 4


def covariance_stored_in(
    dtype: torch.dtype, query: Tensor, key: Tensor, w1: Tensor, w2: Tensor | None
) -> Tensor:
    """Computes features in that type, and rounds to it; angles need more digits than it has."""
    phi_q, phi_k = (ikattn.reference.spectral_features(x, w1, w2).to(dtype) for x in (query, key))
    return (phi_q @ phi_k.mT / (4 * w1.shape[-1])).to(query)


def unnormalised(
    query: Tensor,
    key: Tensor,
    w1: Tensor,
    w2: Tensor | None = None,
    *,
    stored_in: torch.dtype | None = None,
    p: float | None = 2.0,
    key_bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    eps: float = 1e-5,
    magnitude_scale: float | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """(s^2 + eps) exp(... - shift_i) [B, H, L, S], 0 where hidden, and the shifts [B, H, L, 1]."""
    heads, length, d = query.shape[1:]
    key = of_query_heads(key, 1, heads)
    w1 = of_query_heads(w1, -3, heads)
    w2 = None if w2 is None else of_query_heads(w2, -3, heads)
    if stored_in is None:
        s = covariance(query, key, w1, w2)
    else:
        s = covariance_stored_in(stored_in, query, key, w1, w2)

    exponent = torch.zeros_like(s)
    visible = torch.ones(s.shape, dtype=torch.bool)
    if p is not None:
        scale = 1 / (2 * math.sqrt(d)) if magnitude_scale is None else magnitude_scale
        exponent = exponent + scale * torch.linalg.vector_norm(key, p, -1).square().unsqueeze(-2)
    if key_bias is not None:
        bias = key_bias.reshape((1,) * (3 - key_bias.dim()) + key_bias.shape)
        exponent = exponent + of_query_heads(bias, 1, heads).unsqueeze(-2)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible = visible & attn_mask
    elif attn_mask is not None:
        exponent = exponent + attn_mask
    if is_causal:
        visible = visible & torch.ones(length, key.shape[2]).tril().bool()
    exponent = exponent.masked_fill(~visible, -math.inf)
    shift = torch.zeros(exponent.shape[:-1]).unsqueeze(-1)
    if key.shape[2] > 0:
        lowest = torch.finfo(exponent.dtype).min
        shift = exponent.detach().amax(-1, keepdim=True).clamp_min(lowest)
    return (s.square() + eps) * torch.exp(exponent - shift), shift


def weights(hold_normalizer: bool = False, **arguments: Any) -> Tensor:
    """The weights [B, H, L, S], after dropout. hold_normalizer: Z_i has no gradient."""
    w, _ = unnormalised(**arguments)
    z = w.sum(-1, keepdim=True)
    z = z.detach() if hold_normalizer else z
    w = w / z.masked_fill(z == 0, 1)
    if arguments.get("dropout_p", 0.0) == 0:
        return w
    keep = ikattn.ops.dropout_keep_mask(arguments["dropout_seed"], w.shape, arguments["dropout_p"])
    kept_fraction = 1 - min(math.floor(256 * arguments["dropout_p"] + 0.5), 255) / 256
    return w * keep / kept_fraction


def attention(value: Tensor, hold_normalizer: bool = False, **arguments: Any) -> Tensor:
    """The output [B, H, L, d_v]."""
    w = weights(hold_normalizer, **arguments)
    return w @ of_query_heads(value, 1, arguments["query"].shape[1])


def attention_in_its_type(value: Tensor, **arguments: Any) -> Tensor:
    """The output as torch's operators would compute it in half precision, with their errors.

    Features, scores, weights and output are stored in the type of the query, as scores, weights and
    output of eager softmax attention are; ``ikattn.reference`` computes in float32 whatever the
    type of its inputs. Between them all is float32, as it is within torch.softmax.
    """
    dtype = arguments["query"].dtype
    wide = {
        name: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in arguments.items()
    }
    w = weights(stored_in=dtype, **wide).to(dtype)
    return w @ of_query_heads(value, 1, w.shape[1])


def log_normalizer(**arguments: Any) -> Tensor:
    """log Z_i, [B, H, L]."""
    arguments.pop("value", None)
    w, shift = unnormalised(**arguments)
    return (w.sum(-1, keepdim=True).log() + shift).squeeze(-1)
