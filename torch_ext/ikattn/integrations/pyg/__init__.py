"""PyTorch Geometric: its attention layers with a choice of kernel."""

from ikattn._optional import optional

optional("torch_geometric", "ikattn.integrations.pyg", "torch_geometric")

from ikattn.integrations.pyg.layers import (  # noqa: E402
    ImplicitKernelGATConv,
    ImplicitKernelGATv2Conv,
)
from ikattn.integrations.pyg.transformer_conv import ImplicitKernelTransformerConv  # noqa: E402

__all__ = ["ImplicitKernelGATConv", "ImplicitKernelGATv2Conv", "ImplicitKernelTransformerConv"]
