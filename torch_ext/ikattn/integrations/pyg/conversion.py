"""Swaps the attention layers of a model of PyG for those of this package, and back."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch_geometric.nn import GATConv, GATv2Conv, MessagePassing, TransformerConv

from ikattn.integrations.pyg.layers import (
    GraphAttention,
    ImplicitKernelGATConv,
    ImplicitKernelGATv2Conv,
)
from ikattn.integrations.pyg.transformer_conv import ImplicitKernelTransformerConv
from ikattn.nn._kernels import Kernel
from ikattn.nn.selection import Selection, is_selected, path_to
from ikattn.spectral import Spectral

Model = TypeVar("Model", bound=nn.Module)

_logger = logging.getLogger("ikattn")

_CONVERTED: Mapping[type[MessagePassing], type[GraphAttention]] = {
    GATConv: ImplicitKernelGATConv,
    GATv2Conv: ImplicitKernelGATv2Conv,
    TransformerConv: ImplicitKernelTransformerConv,
}
_STOCK: Mapping[type[nn.Module], type[MessagePassing]] = {
    ours: stock for stock, ours in _CONVERTED.items()
}


@torch.inference_mode(False)  # frequencies are there to be trained
def convert(
    model: Model,
    kernel: Kernel = "implicit",
    *,
    select: Selection | None = None,
    p: float | Literal["learned"] | None = 2.0,
    num_frequencies: int = 16,
    spectral: Spectral = "direct",
    stationary: bool = False,
    seed: int | None = None,
) -> Model:
    """Makes every GATConv, GATv2Conv and TransformerConv of a model one of this module, in place.

    As ``ikattn.convert`` for nn.MultiheadAttention: the modules stay the same objects and keep
    weights, device, dtype, flags and hooks. Frequencies are new parameters, of which an optimiser
    that was made before must be told. A layer that has the kernel already is left alone, and so
    are subclasses that somebody else made, with a warning. Call it before torch.compile.

    Args:
        model: Any module; it may be a layer itself.
        kernel: "implicit", "rbf" or "dot".
        select: Which ones; as for ``ikattn.convert``. None: all.
        p, num_frequencies, spectral, stationary: As for ``ImplicitKernelGATConv``. Of a module
            given as spectral, each layer gets a copy.
        seed: If given, the i-th layer to be converted is seeded with ``seed + i``.

    Returns:
        ``model``.

    Raises:
        ValueError: There is nothing to convert, or an option is wrong; nothing has changed then.

    Example:
        >>> import torch
        >>> from torch_geometric.nn import GAT
        >>> from ikattn.integrations import pyg
        >>> model = pyg.convert(GAT(16, 8, num_layers=2, heads=2))
        >>> type(model.convs[0]).__name__
        'ImplicitKernelGATConv'
    """
    found = _selected(model, select, (*_CONVERTED, *_STOCK))
    plain = [(name, x) for name, x in found if type(x) in _CONVERTED or type(x) in _STOCK]
    others = [name for name, x in found if type(x) not in _CONVERTED and type(x) not in _STOCK]
    if not plain:
        derived = f" with {', '.join(others)}" if others else ""
        raise ValueError(
            "nothing to convert: expected a GATConv, GATv2Conv or TransformerConv that select "
            f"names, got a {type(model).__name__}{derived}"
        )
    changed: list[tuple[nn.Module, type[nn.Module], list[dict[str, Any]]]] = []
    names: list[str] = []
    try:
        for name, module in plain:
            if getattr(module, "kernel", None) == kernel:
                continue
            held = [dict(vars(module)), dict(module._modules)]
            changed.append((module, type(module), held))
            if type(module) in _CONVERTED:
                _become(module, _CONVERTED[type(module)])
            module.set_kernel(  # type: ignore[operator]
                kernel,
                p=p,
                num_frequencies=num_frequencies,
                spectral=_copied(spectral),
                stationary=stationary,
                seed=None if seed is None else seed + len(names),
            )
            names.append(name)
    except BaseException:
        for module, kind, (attributes, children) in changed:
            module.__class__ = kind
            modules = module._modules
            vars(module).clear()
            vars(module).update(attributes)
            modules.clear()
            modules.update(children)
        raise
    if names:
        _logger.info("kernel=%r now: %s", kernel, ", ".join(name or "the model" for name in names))
    if others:
        _logger.warning("not converted, as somebody else derived them: %s", ", ".join(others))
    return model


def revert(model: Model, *, select: Selection | None = None) -> Model:
    """Makes every layer of this module one of PyG's again, in place; frequencies are dropped.

    Args:
        model: Any module.
        select: As for ``convert``.

    Returns:
        ``model``.

    Raises:
        ValueError: There is nothing to revert.

    Example:
        >>> from torch_geometric.nn import GAT
        >>> from ikattn.integrations import pyg
        >>> model = pyg.convert(GAT(16, 8, num_layers=2, heads=2))
        >>> type(pyg.revert(model).convs[0]).__name__
        'GATConv'
    """
    found = [x for _, x in _selected(model, select, tuple(_STOCK)) if type(x) in _STOCK]
    if not found:
        raise ValueError(f"nothing to revert: expected layers of ikattn in {type(model).__name__}")
    for module in found:
        assert isinstance(module, GraphAttention)
        module._drop_kernel()
        _become(module, _STOCK[type(module)])
    return model


def _selected(
    model: nn.Module, select: Selection | None, kinds: tuple[type[nn.Module], ...]
) -> list[tuple[str, nn.Module]]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    by_module: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, kinds):
            by_module.setdefault(module, []).append(name)
    selected = []
    for module, names in by_module.items():
        if is_selected(names, module, path_to(model, names[0]), select):
            selected.append((names[0], module))
    return selected


def _copied(spectral: Spectral) -> Spectral:
    if isinstance(spectral, nn.Module):
        return copy.deepcopy(spectral)
    return spectral


def _become(module: Any, kind: type[nn.Module]) -> None:
    """Changes the class, and what PyG has looked up of it; all that the module holds stays."""
    if kind is ImplicitKernelTransformerConv or kind is TransformerConv:
        like: Any = kind(1, 1)
        for name in ("inspector", "_user_args", "_fused_user_args", "_edge_user_args", "fuse"):
            setattr(module, name, getattr(like, name))
    module.__class__ = kind
    module._set_jittable_templates()
