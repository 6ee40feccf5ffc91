"""The parts of the attention of transformers' models.

They are known by the names of their classes: transformers itself need not be there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import nn

from ikattn.recorder.plan.parts import AttentionParts, Side


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
}


def transformers_attention(
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
