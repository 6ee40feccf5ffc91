"""Calls of ``nn.MultiheadAttention``, stock or ours.

Sizes: N batch, L queries, S keys, E model size, H heads, d = E / H head size.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.activation import MultiheadAttention as StockMultiheadAttention

from ikattn._precision import widened
from ikattn.nn._fused_layer import has_values
from ikattn.nn._nested import beyond_ends
from ikattn.nn.functional import ExtraKeys, with_extra_keys
from ikattn.nn.masks import Masks, as_bias, as_visible, hidden
from ikattn.nn.projection import InProjection, project
from ikattn.nn.softmax import rbf_key_bias, select_away
from ikattn.ops.forgetting import options_of_weights
from ikattn.recorder.calls.attention_call import AttentionCall
from ikattn.recorder.calls.hooks import has_others_hooks
from ikattn.recorder.calls.modes import as_the_model_runs, model_has_autocast, model_has_gradients
from ikattn.recorder.calls.projection import Projection, describe, is_plain
from ikattn.recorder.sums.tensors import same_numbers

_signature = inspect.signature(StockMultiheadAttention.forward)
_layer_signature = inspect.signature(nn.TransformerEncoderLayer.forward)


def torch_call(
    module: StockMultiheadAttention,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kind: str | None,
    frequencies: tuple[Tensor, Tensor | None] | None,
    padded_length: int | None,
) -> AttentionCall:
    """Returns the inputs of attention in a call that has just been made.

    ``kind`` None: self if query and key are the same tensor. ``frequencies`` are those that the
    call used, for the implicit kernel; nested inputs are padded to ``padded_length``, None: the
    longest.
    """
    given = _signature.bind(module, *args, **kwargs).arguments
    query, key, value = inputs_of(module, args, kwargs)
    if kind is None:
        is_known = query is key or query.is_nested or key.is_nested or query.numel() == 0
        is_self = query is key if is_known else same_numbers(query, key)
        kind = "self" if is_self else "cross"
    masks = Masks(given.get("key_padding_mask"), given.get("attn_mask"))
    if query.is_nested:
        query, key, value, masks = _padded(query, key, value, padded_length)
    if query.dim() == 2:
        axis = 0 if module.batch_first else 1
        query, key, value = (x.unsqueeze(axis) for x in (query, key, value))
        if masks.padding is not None:
            masks = masks._replace(padding=masks.padding.unsqueeze(0))

    with as_the_model_runs(gradients=torch.is_grad_enabled()):
        heads = project(InProjection.of(module), query, key, value, module.batch_first)
    q, k, v = (widened(x) for x in heads)
    masks = masks.four_axes(q, k)
    extra = ExtraKeys(module.bias_k, module.bias_v, module.add_zero_attn)
    k, v, masks = with_extra_keys(k, v, masks, extra)
    k, v = select_away(k, v, masks.padding)
    call = AttentionCall(
        query=q,
        key=k,
        value=v,
        kind="self" if kind == "self" else "cross",
        kernel=getattr(module, "kernel", "dot"),
        p=getattr(module, "p", 2.0),
        frequencies=None if frequencies is None else _widened_pair(*frequencies),
        attn_mask=None if masks.attention is None else as_visible(masks.attention),
        key_bias=_key_bias(module, k, masks.padding),
        softmax_heads=getattr(module, "softmax_heads", None),
    )
    gates = getattr(module, "forget", None)
    if gates is not None and call.kernel == "implicit":
        log_decay = gates(v, None if masks.padding is None else hidden(masks.padding))
        masked = {"is_causal": True, "attn_mask": call.attn_mask}
        call.attn_mask = options_of_weights(q, k, widened(log_decay), masked)["attn_mask"]
    if masks.padding is not None:
        call.key_padding = hidden(masks.padding).clone()  # the mask is the caller's
        if kind == "self":
            call.query_padding = call.key_padding[:, : q.size(2)]
    return call


def inputs_of(
    module: StockMultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    given = _signature.bind(module, *args, **kwargs).arguments
    return given["query"], given["key"], given["value"]


def out_projection_of(module: StockMultiheadAttention, layer: str) -> Projection:
    """Returns the out-projection, whose parameters ``nn.MultiheadAttention`` uses uncalled.

    Raises:
        TypeError: Their tensors are no plain ones.
    """
    out_proj = module.out_proj
    weight, bias = out_proj.weight, out_proj.bias
    for name, x, axes in (("weight", weight, 2), ("bias", bias, 1)):
        if x is not None and not (is_plain(x) and x.dim() == axes):
            where = "offloaded (a meta tensor)" if x.is_meta else f"a {type(x).__name__}, {x.dtype}"
            raise TypeError(
                f"record: out_proj.{name} of {layer} must be a plain floating-point tensor [E, E] "
                f"or [E], got {where}, of a {describe(out_proj)}. layers=... leaves the layer out"
            )
    return Projection(weight, bias)


def _widened_pair(w1: Tensor, w2: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return widened(w1), None if w2 is None else widened(w2)


def fused_layer_differs(
    layer: nn.TransformerEncoderLayer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether torch's fused kernel of a stock layer, which a recording replaces, computes another.

    It takes every number of a floating-point mask but 0 for -inf.
    """
    given = _layer_signature.bind(layer, *args, **kwargs).arguments
    named = (given.get(name) for name in ("src_mask", "src_key_padding_mask"))
    masks = [mask for mask in named if mask is not None and mask.is_floating_point()]
    if not masks:
        return False
    attention, src = layer.self_attn, given["src"]
    parameters = [*attention.parameters(), *layer.parameters(), src]
    is_fused = (
        torch.backends.mha.get_fastpath_enabled()
        and type(layer).forward is nn.TransformerEncoderLayer.forward
        and not layer.training
        and src.dim() == 3
        and not src.is_nested
        and attention.batch_first
        and attention.in_proj_bias is not None
        and attention._qkv_same_embed_dim
        and attention.num_heads % 2 == 0
        and bool(layer.activation_relu_or_gelu)
        and layer.norm1.eps == layer.norm2.eps
        and not model_has_autocast()
        and not (model_has_gradients() and any(x.requires_grad for x in parameters))
        and not any(map(has_others_hooks, layer.modules()))
    )
    return is_fused and any(map(has_values, masks))


def _padded(
    query: Tensor, key: Tensor, value: Tensor, length: int | None
) -> tuple[Tensor, Tensor, Tensor, Masks]:
    """Nested tensors [N, *, E] as padded ones, with the padding of the keys as a mask."""

    def padded(x: Tensor) -> Tensor:
        sizes = None if length is None else (x.size(0), length, x.size(2))
        rows: Tensor = torch.nested.to_padded_tensor(x, 0.0, sizes)
        return rows

    # by identity: self-attention stays one tensor, which is projected at once
    by_identity = {id(x): padded(x) for x in (query, key, value)}
    q, k, v = (by_identity[id(x)] for x in (query, key, value))
    return q, k, v, Masks(beyond_ends(key, k.size(1)), None)


def _key_bias(module: Any, key: Tensor, padding: Tensor | None) -> Tensor | None:
    """Returns the bias of the logits of keys [N, H, S, d], as [N, H or 1, S]."""
    bias = None if padding is None else as_bias(padding, key.dtype).unsqueeze(1)
    kernel, learned = getattr(module, "kernel", "dot"), getattr(module, "magnitude", None)
    own = None
    if kernel == "rbf":
        own = rbf_key_bias(key, learned or module.p)
        own = None if own is None else own.squeeze(-2)
    elif kernel == "implicit" and learned is not None:
        own = learned(key, None if padding is None else hidden(padding))
        heads = getattr(module, "softmax_heads", None)
        own = own if heads is None else own.masked_fill(heads[:, None], 0.0)
    if own is None:
        return bias
    return own if bias is None else own + bias
