"""The attention modules of a model, and what of each can be changed."""

from __future__ import annotations

import sys
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from ikattn.conversion._torch import TorchAttention
from ikattn.nn.kinds import Kind
from ikattn.nn.selection import Selection, is_selected, path_to

_TORCH = TorchAttention()


def kinds() -> list[Kind]:
    """Returns the kinds of attention that a model of this process may hold."""
    found: list[Kind] = [_TORCH]
    if "transformers.modeling_utils" in sys.modules:
        from ikattn.integrations.transformers.conversion import TRANSFORMERS

        found.append(TRANSFORMERS)
    if "torch_geometric.nn" in sys.modules:
        from ikattn.integrations.pyg.conversion import PYG

        found.append(PYG)
    return found


class AttentionModule(NamedTuple):
    """An attention module of a model, and every name it goes by there."""

    module: nn.Module
    names: list[str]
    kind: Kind

    @property
    def is_ours(self) -> bool:
        """Whether it has a kernel of this package, and nobody has changed it."""
        return self.kind.is_ours(self.module)

    @property
    def is_plain(self) -> bool:
        """Whether nobody else has changed what it computes."""
        return self.kind.is_plain(self.module)

    @property
    def kernel(self) -> str | None:
        """The kernel of one of ours, None of another."""
        return self.kind.kernel_of(self.module)

    def describe(self) -> str:
        """Describes the module, for a table."""
        if hasattr(self.module, "_hf_hook") and not self.is_plain:
            return "offloaded by accelerate: convert the model before that"
        if not self.is_plain:
            kind = type(self.module)
            own_forward = " with a forward of its own" if "forward" in vars(self.module) else ""
            return f"a {kind.__module__}.{kind.__qualname__}{own_forward}"
        if not self.is_ours:
            return self.kind.describe(self.module)
        described, module = f"kernel={self.kernel!r}", self.module
        source: Any = getattr(module, "spectral", None)
        if self.kernel != "dot":
            described += f", p={getattr(module, 'p', getattr(source, 'p', None))}"
        return described if source is None else f"{described}, {type(source).__name__}"

    def __str__(self) -> str:
        return " = ".join(name or "the model itself" for name in self.names)


class ConversionReport(tuple[AttentionModule, ...]):
    """The attention modules of a model, each once, and what each is now; prints as a table."""

    __slots__ = ()

    @property
    def converted(self) -> tuple[AttentionModule, ...]:
        """The modules that have a kernel of this package."""
        return tuple(found for found in self if found.is_ours)

    @property
    def stock(self) -> tuple[AttentionModule, ...]:
        """The modules that ``convert`` could change."""
        return tuple(found for found in self if found.is_plain and not found.is_ours)

    @property
    def left(self) -> tuple[AttentionModule, ...]:
        """The modules that ``convert`` leaves alone, because somebody else has changed them."""
        return tuple(found for found in self if not found.is_plain)

    def __str__(self) -> str:
        width = max((len(str(found)) for found in self), default=0)
        lines = [
            f"{found!s:{width}}  {'left alone: ' * (not found.is_plain)}{found.describe()}"
            for found in self
        ]
        return "\n".join(lines)


def conversion_report(model: nn.Module) -> ConversionReport:
    """Tells of every attention module in a model whether it is converted, could be, or not.

    Args:
        model: Any module.

    Returns:
        A tuple, in the order of the modules' first names, that prints as a table.

    Example:
        >>> import torch, ikattn
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4), 2)
        >>> _ = ikattn.convert(model, select="layers.0.*")
        >>> print(ikattn.conversion_report(model))
        layers.0.self_attn  kernel='implicit', p=2.0, Direct
        layers.1.self_attn  nn.MultiheadAttention
    """
    known = kinds()
    by_module: dict[nn.Module, AttentionModule] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if module in by_module:
            by_module[module].names.append(name)
            continue
        kind = next((kind for kind in known if kind.holds(module)), None)
        if kind is not None:
            by_module[module] = AttentionModule(module, [name], kind)
    return ConversionReport(by_module.values())


def select_modules(model: nn.Module, select: Selection | None) -> list[AttentionModule]:
    """Returns the selected attention modules, each once, in the order of their first names."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    report = conversion_report(model)
    if not report:
        types = sorted({type(module).__name__ for module in model.modules()})
        alike = [name for name in types if "Attention" in name or "Attn" in name]
        is_timm = any(type(module).__module__.startswith("timm.") for module in model.modules())
        raise ValueError(
            f"no attention that can be changed in this model of {', '.join(alike or types)}: "
            "expected nn.MultiheadAttention, modules of transformers that call its "
            "AttentionInterface, or GATConv, GATv2Conv and TransformerConv of PyG"
            + "; models of timm take ikattn.integrations.timm.ImplicitAttention"
            * is_timm
        )
    selected = []
    for found in report:
        path = chain.from_iterable(path_to(model, name) for name in found.names)
        if is_selected(found.names, found.module, path, select):
            selected.append(found)
    if not selected:
        names = ", ".join(map(str, report))
        raise ValueError(f"select={select!r} matches none of the attention modules: {names}")
    return selected
