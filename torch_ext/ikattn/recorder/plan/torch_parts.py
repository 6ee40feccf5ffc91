"""The parts of torch's own layers of attention, and of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn
from torch.nn.modules.activation import MultiheadAttention as StockMultiheadAttention

from ikattn.nn.multihead_attention import MultiheadAttention
from ikattn.recorder.plan.parts import AttentionParts, Side

_stock_forward = StockMultiheadAttention.forward


def torch_attention(module: nn.Module, ancestors: Sequence[nn.Module]) -> AttentionParts | None:
    if not isinstance(module, StockMultiheadAttention):
        return None
    if type(module).forward not in (_stock_forward, MultiheadAttention.forward):
        return None
    layer: Any = ancestors[0] if ancestors else None
    if _is_stock(layer, nn.TransformerEncoderLayer):
        return _in_torch_layer(module, layer, "self", "encoder", layer.norm1, layer.norm2)
    if _is_stock(layer, nn.TransformerDecoderLayer):
        if module is layer.self_attn:  # the cross-attention stands before the next norm
            return _in_torch_layer(module, layer, "self", "decoder", layer.norm1, None)
        return _in_torch_layer(module, layer, "cross", "decoder", layer.norm2, layer.norm3)
    # one that is all of a model has no block
    return AttentionParts("torch", module.out_proj, "found" if ancestors else "none")


def _is_stock(layer: object, kind: type[nn.Module]) -> bool:
    """Whether ``layer`` is of a kind of torch's and its forward still is torch's."""
    return isinstance(layer, kind) and type(layer).forward is kind.forward


def _in_torch_layer(
    module: StockMultiheadAttention,
    layer: nn.Module,
    kind: Literal["self", "cross"],
    side: Side,
    norm: nn.Module,
    second_norm: nn.Module | None,
) -> AttentionParts:
    if layer.norm_first:
        return AttentionParts("torch", module.out_proj, "pre", kind, side, pre_norm=norm)
    return AttentionParts(
        "torch", module.out_proj, "post", kind, side, norm=norm, second_norm=second_norm
    )
