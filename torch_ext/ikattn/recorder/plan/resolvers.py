"""Where the parts of a layer of attention are: its out-projection, its residual and its norms.

A resolver knows one family of models. It is asked about every module of a model and answers with
the module's ``AttentionParts``, with None where the module is not its business, or by raising
NotImplementedError with the reason why such a module cannot be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from torch import nn
from torch.nn.modules.activation import MultiheadAttention as StockMultiheadAttention

from ikattn.integrations.transformers.interface import calls_interface
from ikattn.nn.multihead_attention import MultiheadAttention
from ikattn.nn.selection import path_to
from ikattn.recorder.calls.delta_rules import calls_delta_rule
from ikattn.recorder.calls.products import writes_out_attention
from ikattn.recorder.calls.sdpa import calls_sdpa
from ikattn.recorder.plan.parts import AttentionParts
from ikattn.recorder.plan.transformers_parts import transformers_attention

_stock_forward = StockMultiheadAttention.forward

Resolver: TypeAlias = Callable[[nn.Module, Sequence[nn.Module]], AttentionParts | None]


class Site(NamedTuple):
    """A layer of attention in a model: ``parts``, or the reason why it cannot be recorded."""

    name: str
    module: nn.Module
    ancestors: tuple[nn.Module, ...]  # innermost first
    parts: AttentionParts | str


_registered: dict[str, Resolver] = {}


def register_resolver(family: str, resolver: Resolver) -> None:
    """Tells ``ikattn.record`` where the parts of a family's attention are.

    What can be recorded is ``nn.MultiheadAttention`` and any module that calls its attention
    function through transformers' ``AttentionInterface``. Registered resolvers are asked before
    those of this package, the latest first; registering a family again replaces it.

    Args:
        family: A name for it.
        resolver: Called with a module and the modules around it, innermost first. Returns the
            module's parts; None for a module it does not know. NotImplementedError, raised with a
            reason, means that the module is attention that cannot be recorded.

    Raises:
        TypeError: resolver is not callable.

    Example:
        >>> import ikattn
        >>> from ikattn.recorder import AttentionParts
        >>> def resolve(module, ancestors):
        ...     if type(module).__name__ != "MyAttention":
        ...         return None
        ...     norm = ancestors[0].norm1
        ...     return AttentionParts("mine", module.out, block="pre", kind="self", pre_norm=norm)
        >>> ikattn.recorder.register_resolver("mine", resolve)
    """
    if not callable(resolver):
        raise TypeError(f"register_resolver: resolver must be callable, got {resolver!r}")
    _registered.pop(family, None)
    _registered[family] = resolver


def find_attention(model: nn.Module) -> list[Site]:
    """Every layer of attention in ``model``, also those that cannot be recorded, in module order.

    A model that is itself attention goes by the name of its class.
    """
    sites = []
    for name, module in model.named_modules():
        ancestors = tuple(path_to(model, name)[-2::-1])
        try:
            parts: AttentionParts | str | None = resolve(module, ancestors)
        except NotImplementedError as reason:
            parts = str(reason)
        if parts is not None:
            plain = name.replace("_orig_mod.", "")  # what torch.compile puts in between
            sites.append(Site(plain or type(module).__name__, module, ancestors, parts))
    return sites


def resolve(module: nn.Module, ancestors: Sequence[nn.Module]) -> AttentionParts | None:
    """The parts of an attention module among ``ancestors``, innermost first; None: it is none.

    Raises:
        NotImplementedError: It is attention that cannot be recorded, or that no resolver knows.
    """
    resolvers = [*reversed(_registered.values()), _torch_attention, transformers_attention]
    for resolver in resolvers:
        parts = resolver(module, ancestors)
        if parts is not None:
            return parts
    if isinstance(module, StockMultiheadAttention):
        raise NotImplementedError(
            f"{type(module).__name__} is an nn.MultiheadAttention with a forward of its own"
        )
    if calls_interface(module) or calls_sdpa(module) or writes_out_attention(module):
        return found_by_running(module, ancestors)
    if calls_delta_rule(module):  # each token sees those before it
        return replace(found_by_running(module, ancestors), kind="self", side="decoder")
    return None


def described_by(module: nn.Module, ancestors: Sequence[nn.Module]) -> str:
    """Who says what the parts of a module are, as errors name it."""
    for family, resolver in reversed(_registered.items()):
        if resolver(module, ancestors) is not None:
            return f"the resolver that was registered for {family!r}"
    return f"ikattn's own list of parts of {type(module).__name__}"


def found_by_running(module: nn.Module, ancestors: Sequence[nn.Module]) -> AttentionParts:
    """The parts of attention that no resolver knows: its runs will tell."""
    kinds = (getattr(getattr(x, "config", None), "model_type", None) for x in (module, *ancestors))
    family = next(filter(None, kinds), type(module).__module__.split(".")[0])
    is_decoder = bool(getattr(module, "is_decoder", getattr(module, "is_causal", False)))
    return AttentionParts(family, None, "found", side="decoder" if is_decoder else "encoder")


def _torch_attention(module: nn.Module, ancestors: Sequence[nn.Module]) -> AttentionParts | None:
    if not isinstance(module, StockMultiheadAttention):
        return None
    if type(module).forward not in (_stock_forward, MultiheadAttention.forward):
        return None
    layer: Any = ancestors[0] if ancestors else None
    post = partial(AttentionParts, "torch", module.out_proj, "post")
    if _is_stock(layer, nn.TransformerEncoderLayer):
        parts = post("self", norm=layer.norm1, second_norm=layer.norm2)
    elif not _is_stock(layer, nn.TransformerDecoderLayer):
        # one that is all of a model has no block
        return AttentionParts("torch", module.out_proj, "found" if ancestors else "none")
    elif module is layer.self_attn:  # the cross-attention stands before the next norm
        parts = post("self", "decoder", norm=layer.norm1)
    else:
        parts = post("cross", "decoder", norm=layer.norm2, second_norm=layer.norm3)
    if not layer.norm_first:
        return parts
    return replace(parts, block="pre", pre_norm=parts.norm, norm=None, second_norm=None)


def _is_stock(layer: object, kind: type[nn.Module]) -> bool:
    """Whether ``layer`` is of a kind of torch's and its forward still is torch's."""
    return isinstance(layer, kind) and type(layer).forward is kind.forward
