"""Softmax attention, for the dot and rbf kernels of ``MultiheadAttention``.

Sizes: N batch, H heads, L queries, S keys, d head size.
"""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ikattn._precision import widened
from ikattn.nn.masks import as_bias, hidden
from ikattn.ops.magnitude import LearnedOrder

if TYPE_CHECKING:
    from ikattn.nn.kernels import HeadCall


def softmax_attention(
    call: HeadCall, key_bias: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Computes softmax(q.k / sqrt(d) + bias) v; a query that sees no key gets zeros.

    Where weights are wanted it forms them, [N, H, L, S], and draws dropout as nn.MultiheadAttention
    does; else it leaves both to F.scaled_dot_product_attention, as that does. ``is_causal`` must be
    False with any other mask, ``key_bias`` or wanted weights. The key bias [N, H, 1, S] is added to
    the logits, and so are bool masks, in ``mask_dtype``.
    """
    query, key, value, _, masks, wanted, dropout_p, mask_dtype = call
    padding = None if masks.padding is None else as_bias(masks.padding, mask_dtype)[:, None, None]
    attention = None if masks.attention is None else as_bias(masks.attention, mask_dtype)
    biases = [part for part in (key_bias, padding, attention) if part is not None]
    bias = sum(biases[1:], biases[0]) if biases else None  # broadcastable to [N, H, L, S]
    if wanted.weights:
        weights = _softmax_weights(query, key, bias)
        if dropout_p > 0.0:
            weights = F.dropout(weights, dropout_p)
        return weights @ value, weights.mean(dim=1) if wanted.average else weights
    empty = None
    if bias is not None:
        empty = _empty_rows(bias)
        bias = bias.masked_fill(empty, 0.0)
    # looked up in its module, where context parallelism replaces it
    output = F.scaled_dot_product_attention(query, key, value, bias, dropout_p, masks.is_causal)
    return output if empty is None else output.masked_fill(empty, 0.0), None


def refuse_context_parallel(kernel: str) -> None:
    """Raises RuntimeError where torch shares sequences out over ranks, for a kernel it cannot.

    ``torch.distributed.tensor.experimental.context_parallel`` replaces
    ``F.scaled_dot_product_attention``; any other kernel would attend to its rank's own tokens.
    """
    attend = inspect.unwrap(F.scaled_dot_product_attention)
    module = getattr(attend, "__globals__", {}).get("__name__", "")
    if str(module).startswith("torch.distributed"):
        raise RuntimeError(
            f"attention with kernel={kernel!r} does not work under torch's context_parallel, which "
            "knows softmax attention alone; ikattn.parallel.context_parallel does the same"
        )


def select_away(key: Tensor, value: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Zeroes padded keys and values [N, H, S, d]: 0 * NaN would reach the output."""
    if padding is None:
        return key, value
    away = hidden(padding)[:, None, :, None]
    return key.masked_fill(away, 0.0), value.masked_fill(away, 0.0)


def rbf_key_bias(key: Tensor, p: float | LearnedOrder | None) -> Tensor | None:
    """Returns g_j - |k_j|_2^2 / (2 sqrt d), by which RBF logits differ from dot-product ones.

    ``p`` is the order of the norm in g_j = |k_j|_p^2 / (2 sqrt d), or what computes g; None: g_j =
    0. [N, H, 1, S] of key's type, computed in float32 at least; None where it is zero, at p = 2.
    """
    if p == 2:
        return None
    wide = widened(key)
    bias: Tensor = -wide.square().sum(dim=-1)
    if isinstance(p, LearnedOrder):
        bias = bias / (2 * math.sqrt(key.size(-1))) + p(wide)
        return bias.to(key.dtype).unsqueeze(-2)
    if p is not None:
        zero = (wide == 0).all(dim=-1)  # whose second derivative by the norm itself would be NaN
        norm = torch.linalg.vector_norm(wide.masked_fill(zero.unsqueeze(-1), 1.0), p, dim=-1)
        bias = bias + norm.square().masked_fill(zero, 0.0)
    return (bias / (2 * math.sqrt(key.size(-1)))).to(key.dtype).unsqueeze(-2)


def _empty_rows(bias: Tensor) -> Tensor:
    """Returns where a query sees no key, [.., L, 1]."""
    return hidden(bias).all(dim=-1, keepdim=True)


def _softmax_weights(query: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
    """Returns softmax(q.k / sqrt(d) + bias), [.., L, S], with zeros for a query that sees no key.

    They are of the type of q.k, whatever that of the bias.
    """
    logits = (query * math.sqrt(1.0 / query.size(-1))) @ key.transpose(-2, -1)
    if bias is None:
        return F.softmax(logits, dim=-1)
    empty = _empty_rows(bias)
    weights = F.softmax(logits + bias.masked_fill(empty, 0.0), dim=-1)
    return weights.masked_fill(empty, 0.0).to(logits.dtype)
