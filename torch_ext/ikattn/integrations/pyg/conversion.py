"""How the attention layers of PyG become those of this package, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch_geometric.nn import GATConv, GATv2Conv, MessagePassing, TransformerConv

from ikattn.integrations.pyg.layers import (
    GraphAttention,
    ImplicitKernelGATConv,
    ImplicitKernelGATv2Conv,
)
from ikattn.integrations.pyg.transformer_conv import ImplicitKernelTransformerConv
from ikattn.nn.kinds import KernelSettings, Kind

_CONVERTED: Mapping[type[nn.Module], type[GraphAttention]] = {
    GATConv: ImplicitKernelGATConv,
    GATv2Conv: ImplicitKernelGATv2Conv,
    TransformerConv: ImplicitKernelTransformerConv,
}
_STOCK: Mapping[type[nn.Module], type[MessagePassing]] = {
    ours: stock for stock, ours in _CONVERTED.items()
}


class EdgeAttention(Kind):
    """GATConv, GATv2Conv and TransformerConv."""

    title = "layers of PyG"

    def holds(self, module: nn.Module) -> bool:
        return isinstance(module, tuple(_CONVERTED))

    def is_ours(self, module: nn.Module) -> bool:
        return type(module) in _STOCK

    def is_plain(self, module: nn.Module) -> bool:
        return type(module) in _CONVERTED or type(module) in _STOCK

    def change(self, model: nn.Module, module: Any, settings: KernelSettings) -> None:
        if type(module) in _CONVERTED:
            _become(module, _CONVERTED[type(module)])
        module.set_kernel(**self.options_of(settings))

    def undo(self, module: Any) -> None:
        module._drop_kernel()
        _become(module, _STOCK[type(module)])


PYG = EdgeAttention()


def _become(module: Any, kind: type[nn.Module]) -> None:
    """Changes the class, and what PyG has looked up of it; all that the module holds stays."""
    if kind is ImplicitKernelTransformerConv or kind is TransformerConv:
        like: Any = kind(1, 1)
        for name in ("inspector", "_user_args", "_fused_user_args", "_edge_user_args", "fuse"):
            setattr(module, name, getattr(like, name))
    module.__class__ = kind
    module._set_jittable_templates()
