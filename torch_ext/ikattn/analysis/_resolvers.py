"""Where the parts of a layer of attention are: its out-projection, its residual and its norms.

A resolver knows one family of models. It is asked about every module of a model and answers with
the module's ``AttentionParts``, with None where the module is not its business, or by raising
NotImplementedError with the reason why such a module cannot be recorded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.nn.modules.activation import MultiheadAttention as StockMultiheadAttention

from ikattn.multihead_attention import MultiheadAttention

__all__ = [
    "AttentionParts",
    "Resolver",
    "Site",
    "calls_interface",
    "find_attention",
    "out_proj_weight",
    "register_resolver",
    "resolve",
]

Side: TypeAlias = Literal["encoder", "decoder"]

_stock_forward = StockMultiheadAttention.forward


@dataclass(frozen=True)
class AttentionParts:
    """The modules that a layer of attention and the block around it consist of.

    Attributes:
        family: A name for the kind of model, for example "bert".
        out_proj: The projection after the heads are merged: an ``nn.Linear`` or a ``Conv1D`` of
            transformers.
        block: "post": a norm follows the sum of residual and attention; "pre": the attention reads
            normed input, and its output is added to what was there before; "none": nothing of the
            kind is known.
        kind: "self" or "cross"; None: each call tells (self if query and key are one tensor).
        side: The part of the model it belongs to.
        pre_norm: In a "pre" block, the module whose first input is the residual: the norm before
            the attention. A "post" block's residual is the first input of the attention itself.
        norm: In a "post" block, the norm whose input is the sum.
        second_norm: In a "post" block, the norm at the block's end, if nothing but the feed-forward
            part stands between it and ``norm``.
    """

    family: str
    out_proj: nn.Module
    block: Literal["post", "pre", "none"] = "none"
    kind: Literal["self", "cross"] | None = None
    side: Side = "encoder"
    pre_norm: nn.Module | None = None
    norm: nn.Module | None = None
    second_norm: nn.Module | None = None


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
        >>> import ikattn.analysis
        >>> from ikattn.analysis import AttentionParts
        >>> def resolve(module, ancestors):
        ...     if type(module).__name__ != "MyAttention":
        ...         return None
        ...     norm = ancestors[0].norm1
        ...     return AttentionParts("mine", module.out, block="pre", kind="self", pre_norm=norm)
        >>> ikattn.analysis.register_resolver("mine", resolve)
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
    for name, module, ancestors in _walk(model, "", (), set()):
        try:
            parts: AttentionParts | str | None = resolve(module, ancestors)
        except NotImplementedError as reason:
            parts = str(reason)
        if parts is not None:
            plain = name.replace("_orig_mod.", "")  # what torch.compile puts in between
            sites.append(Site(plain or type(module).__name__, module, ancestors, parts))
    return sites


def out_proj_weight(module: nn.Module) -> Tensor:
    """The weight of an out-projection, ``[D, H d_v]``.

    Raises:
        TypeError: The module is no linear map with a floating-point weight.
    """
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point():
        if isinstance(module, nn.Linear):
            return weight
        if type(module).__name__ == "Conv1D":  # of transformers: its weight is [in, out]
            return weight.mT
    raise TypeError(
        "record: an out-projection must be an nn.Linear or a transformers Conv1D with a "
        f"floating-point weight, got {type(module).__name__}; merge adapters into the model and "
        "load it without quantisation"
    )


def _walk(
    module: nn.Module, name: str, ancestors: tuple[nn.Module, ...], seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """Every module once, with its name and the modules around it, innermost first."""
    if module in seen:
        return
    seen.add(module)
    yield name, module, ancestors
    for child_name, child in module.named_children():
        full_name = f"{name}.{child_name}" if name else child_name
        yield from _walk(child, full_name, (module, *ancestors), seen)


def resolve(module: nn.Module, ancestors: Sequence[nn.Module]) -> AttentionParts | None:
    """The parts of an attention module among ``ancestors``, innermost first; None: it is none.

    Raises:
        NotImplementedError: It is attention that cannot be recorded, or that no resolver knows.
    """
    resolvers = [*reversed(_registered.values()), _torch_attention, _transformers_attention]
    for resolver in resolvers:
        parts = resolver(module, ancestors)
        if parts is not None:
            return parts
    if isinstance(module, StockMultiheadAttention):
        raise NotImplementedError(
            f"{type(module).__name__} is an nn.MultiheadAttention with a forward of its own"
        )
    if calls_interface(module):
        raise NotImplementedError(
            f"no resolver knows {type(module).__name__}: write one and pass it to "
            "ikattn.analysis.register_resolver"
        )
    return None


def calls_interface(module: nn.Module) -> bool:
    """Whether the module's forward calls transformers' AttentionInterface."""
    if not type(module).__module__.startswith("transformers") and not hasattr(module, "config"):
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


# --- torch


def _torch_attention(module: nn.Module, ancestors: Sequence[nn.Module]) -> AttentionParts | None:
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
    return AttentionParts("torch", module.out_proj)


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


# --- transformers, known by the names of their classes: the package need not be there


class _Anatomy(NamedTuple):
    """Where the parts are, as paths from the attention module.

    As in a relative import, each leading dot climbs one module: "o_proj" is the module's own,
    ".norm" its parent's, "..output.norm" its grandparent's.
    """

    family: str
    out_proj: str
    side: Side = "encoder"
    pre_norm: str = ""
    norm: str = ""
    second_norm: str = ""


def _pre_norm_decoder(family: str, out_proj: str, pre_norm: str = ".input_layernorm") -> _Anatomy:
    return _Anatomy(family, out_proj, "decoder", pre_norm=pre_norm)


_ANATOMIES = {
    "AlbertAttention": _Anatomy(
        "albert", "dense", norm="LayerNorm", second_norm=".full_layer_layer_norm"
    ),
    "CLIPAttention": _Anatomy("clip", "out_proj", pre_norm=".layer_norm1"),
    "DistilBertSelfAttention": _Anatomy(
        "distilbert", "out_lin", norm=".sa_layer_norm", second_norm=".output_layer_norm"
    ),
    "GPTNeoXAttention": _pre_norm_decoder("gpt_neox", "dense"),
    "GemmaAttention": _pre_norm_decoder("gemma", "o_proj"),
    "LlamaAttention": _pre_norm_decoder("llama", "o_proj"),
    "MistralAttention": _pre_norm_decoder("mistral", "o_proj"),
    "MixtralAttention": _pre_norm_decoder("mixtral", "o_proj"),
    "ModernBertAttention": _Anatomy("modernbert", "Wo", pre_norm=".attn_norm"),
    "Qwen2Attention": _pre_norm_decoder("qwen2", "o_proj"),
    "Qwen3Attention": _pre_norm_decoder("qwen3", "o_proj"),
    "SiglipAttention": _Anatomy("siglip", "out_proj", pre_norm=".layer_norm1"),
    "ViTAttention": _Anatomy("vit", "o_proj", pre_norm=".layernorm_before"),
}

# Encoder, decoder and cross-attention of one class, "self_attn" or "encoder_attn" of its layer.
_BART_LIKE: dict[str, tuple[str, Literal["post", "pre"]]] = {
    "BartAttention": ("bart", "post"),
    "MBartAttention": ("mbart", "pre"),
    "MarianAttention": ("marian", "post"),
    "PegasusAttention": ("pegasus", "pre"),
    "WhisperAttention": ("whisper", "pre"),
}

# X of XSelfAttention and XCrossAttention, with the out-projection in a sibling.
_BERT_LIKE = ("Bert", "Camembert", "Electra", "Roberta", "XLMRoberta")

_REFUSED = {
    "DisentangledSelfAttention": "DeBERTa's attention never calls transformers' AttentionInterface "
    "and adds position terms of its own",
    "Gemma2Attention": "Gemma 2 caps its logits (softcap) and normalises the attention's output "
    "before the residual sum",
}


def _transformers_attention(
    module: nn.Module, ancestors: Sequence[nn.Module]
) -> AttentionParts | None:
    for kind in type(module).__mro__:
        name = kind.__name__
        if name in _REFUSED:
            raise NotImplementedError(_REFUSED[name])
        for resolver in (_bert_like, _bart_like, _gpt2, _opt, _t5):
            parts = resolver(name, module, ancestors)
            if parts is not None:
                return parts
        if name in _ANATOMIES:
            return _dissect(_ANATOMIES[name], "self", module, ancestors)
    return None


def _dissect(
    anatomy: _Anatomy,
    kind: Literal["self", "cross"],
    module: nn.Module,
    ancestors: Sequence[nn.Module],
) -> AttentionParts:
    """Follows the paths of an anatomy.

    An attention module without its block, which is what recording a part of a model may meet, has
    no norms; without its out-projection it cannot be recorded.
    """

    def follow(path: str) -> nn.Module | None:
        climbed = len(path) - len(path.lstrip("."))
        if not path or climbed > len(ancestors):
            return None
        start = module if climbed == 0 else ancestors[climbed - 1]
        return start.get_submodule(path[climbed:])

    out_proj, pre_norm, norm = map(follow, (anatomy.out_proj, anatomy.pre_norm, anatomy.norm))
    if out_proj is None:
        raise NotImplementedError(
            f"the out-projection of {type(module).__name__} is in its parent: record a larger part "
            "of the model"
        )
    return AttentionParts(
        anatomy.family,
        out_proj,
        "post" if norm is not None else "none" if pre_norm is None else "pre",
        kind,
        anatomy.side,
        pre_norm=pre_norm,
        norm=norm,
        second_norm=None if norm is None else follow(anatomy.second_norm),
    )


def _bert_like(
    name: str, module: nn.Module, ancestors: Sequence[nn.Module]
) -> AttentionParts | None:
    for family in _BERT_LIKE:
        if name not in (f"{family}SelfAttention", f"{family}CrossAttention"):
            continue
        is_cross = name.endswith("CrossAttention")
        layer = ancestors[1] if len(ancestors) > 1 else None
        is_last = is_cross or not hasattr(layer, "crossattention")
        anatomy = _Anatomy(
            family.lower(),
            ".output.dense",
            "decoder" if is_cross or getattr(module, "is_decoder", False) else "encoder",
            norm=".output.LayerNorm",
            second_norm="..output.LayerNorm" if is_last else "",
        )
        return _dissect(anatomy, "cross" if is_cross else "self", module, ancestors)
    return None


def _bart_like(
    name: str, module: nn.Module, ancestors: Sequence[nn.Module]
) -> AttentionParts | None:
    if name not in _BART_LIKE:
        return None
    family, block = _BART_LIKE[name]
    layer = ancestors[0] if ancestors else None
    is_cross = module is getattr(layer, "encoder_attn", None)
    is_last = is_cross or not hasattr(layer, "encoder_attn")
    norm = ".encoder_attn_layer_norm" if is_cross else ".self_attn_layer_norm"
    side: Side = "decoder" if getattr(module, "is_decoder", False) else "encoder"
    if block == "pre":
        anatomy = _Anatomy(family, "out_proj", side, pre_norm=norm)
    else:
        second = ".final_layer_norm" if is_last else ""
        anatomy = _Anatomy(family, "out_proj", side, norm=norm, second_norm=second)
    return _dissect(anatomy, "cross" if is_cross else "self", module, ancestors)


def _gpt2(name: str, module: nn.Module, ancestors: Sequence[nn.Module]) -> AttentionParts | None:
    if name != "GPT2Attention":
        return None
    if getattr(module, "reorder_and_upcast_attn", False):
        raise NotImplementedError(
            "GPT-2 with reorder_and_upcast_attn has attention code of its own: load the model "
            "without that option"
        )
    is_cross = getattr(module, "is_cross_attention", False)
    norm = ".ln_cross_attn" if is_cross else ".ln_1"
    anatomy = _pre_norm_decoder("gpt2", "c_proj", norm)
    return _dissect(anatomy, "cross" if is_cross else "self", module, ancestors)


def _opt(name: str, module: nn.Module, ancestors: Sequence[nn.Module]) -> AttentionParts | None:
    if name != "OPTAttention":
        return None
    norm = ".self_attn_layer_norm"
    if ancestors and not getattr(ancestors[0], "do_layer_norm_before", True):
        anatomy = _Anatomy("opt", "out_proj", "decoder", norm=norm, second_norm=".final_layer_norm")
    else:
        anatomy = _pre_norm_decoder("opt", "out_proj", norm)
    return _dissect(anatomy, "self", module, ancestors)


def _t5(name: str, module: nn.Module, ancestors: Sequence[nn.Module]) -> AttentionParts | None:
    if name != "T5Attention":
        return None
    is_cross = bool(ancestors) and module is getattr(ancestors[0], "EncDecAttention", None)
    side: Side = "decoder" if getattr(module, "is_decoder", False) else "encoder"
    anatomy = _Anatomy("t5", "o", side, pre_norm=".layer_norm")
    return _dissect(anatomy, "cross" if is_cross else "self", module, ancestors)
