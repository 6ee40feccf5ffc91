"""The parts of the attention of transformers' models.

They are known by the names of their classes: transformers itself need not be there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

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
    is_cross: bool = False


# Asks the attention module and the modules around it, innermost first.
_Asked: TypeAlias = Callable[[Any, Sequence[Any]], _Anatomy]


def _decoder(family: str, out_proj: str, pre_norm: str = ".input_layernorm") -> _Anatomy:
    return _Anatomy(family, out_proj, "decoder", pre_norm)


def _side(module: nn.Module) -> Side:
    return "decoder" if getattr(module, "is_decoder", False) else "encoder"


def _is(module: nn.Module, around: Sequence[nn.Module], name: str) -> bool:
    """Whether a module goes by a name in the one around it."""
    return bool(around) and module is getattr(around[0], name, None)


def _bert(family: str, is_cross: bool, module: nn.Module, around: Sequence[nn.Module]) -> _Anatomy:
    is_last = is_cross or not hasattr(around[1] if len(around) > 1 else None, "crossattention")
    return _Anatomy(
        family,
        ".output.dense",
        "decoder" if is_cross else _side(module),
        norm=".output.LayerNorm",
        second_norm="..output.LayerNorm" if is_last else "",
        is_cross=is_cross,
    )


def _bart(
    family: str, block: Literal["pre", "post"], module: nn.Module, around: Sequence[nn.Module]
) -> _Anatomy:
    is_cross = _is(module, around, "encoder_attn")
    norm = ".encoder_attn_layer_norm" if is_cross else ".self_attn_layer_norm"
    anatomy = _Anatomy(family, "out_proj", _side(module), is_cross=is_cross)
    if block == "pre":
        return anatomy._replace(pre_norm=norm)
    is_last = is_cross or not hasattr(around[0] if around else None, "encoder_attn")
    return anatomy._replace(norm=norm, second_norm=".final_layer_norm" if is_last else "")


def _gpt2(module: nn.Module, around: Sequence[nn.Module]) -> _Anatomy:
    if getattr(module, "reorder_and_upcast_attn", False):
        raise NotImplementedError(
            "GPT-2 with reorder_and_upcast_attn has attention code of its own: load the model "
            "without that option"
        )
    is_cross = bool(getattr(module, "is_cross_attention", False))
    norm = ".ln_cross_attn" if is_cross else ".ln_1"
    return _decoder("gpt2", "c_proj", norm)._replace(is_cross=is_cross)


def _opt(module: nn.Module, around: Sequence[nn.Module]) -> _Anatomy:
    norm = ".self_attn_layer_norm"
    if around and not getattr(around[0], "do_layer_norm_before", True):
        second = ".final_layer_norm"
        return _Anatomy("opt", "out_proj", "decoder", norm=norm, second_norm=second)
    return _decoder("opt", "out_proj", norm)


def _t5(module: nn.Module, around: Sequence[nn.Module]) -> _Anatomy:
    is_cross = _is(module, around, "EncDecAttention")
    return _Anatomy("t5", "o", _side(module), ".layer_norm", is_cross=is_cross)


_ANATOMIES: dict[str, _Anatomy | _Asked] = {
    "AlbertAttention": _Anatomy(
        "albert", "dense", norm="LayerNorm", second_norm=".full_layer_layer_norm"
    ),
    "CLIPAttention": _Anatomy("clip", "out_proj", pre_norm=".layer_norm1"),
    "DistilBertSelfAttention": _Anatomy(
        "distilbert", "out_lin", norm=".sa_layer_norm", second_norm=".output_layer_norm"
    ),
    "GPT2Attention": _gpt2,
    "GPTNeoXAttention": _decoder("gpt_neox", "dense"),
    "GemmaAttention": _decoder("gemma", "o_proj"),
    "LlamaAttention": _decoder("llama", "o_proj"),
    "MistralAttention": _decoder("mistral", "o_proj"),
    "MixtralAttention": _decoder("mixtral", "o_proj"),
    "ModernBertAttention": _Anatomy("modernbert", "Wo", pre_norm=".attn_norm"),
    "OPTAttention": _opt,
    "Qwen2Attention": _decoder("qwen2", "o_proj"),
    "Qwen3Attention": _decoder("qwen3", "o_proj"),
    "SiglipAttention": _Anatomy("siglip", "out_proj", pre_norm=".layer_norm1"),
    "T5Attention": _t5,
    "ViTAttention": _Anatomy("vit", "o_proj", pre_norm=".layernorm_before"),
    # Encoder, decoder and cross-attention of one class, "self_attn" or "encoder_attn" of its layer.
    "BartAttention": partial(_bart, "bart", "post"),
    "MBartAttention": partial(_bart, "mbart", "pre"),
    "MarianAttention": partial(_bart, "marian", "post"),
    "PegasusAttention": partial(_bart, "pegasus", "pre"),
    "WhisperAttention": partial(_bart, "whisper", "pre"),
    # The out-projection is in a sibling.
    **{
        f"{family}{name}Attention": partial(_bert, family.lower(), name == "Cross")
        for family in ("Bert", "Camembert", "Electra", "Roberta", "XLMRoberta")
        for name in ("Self", "Cross")
    },
}


def transformers_attention(
    module: nn.Module, ancestors: Sequence[nn.Module]
) -> AttentionParts | None:
    """Follows the paths of a module's anatomy.

    An attention module without its block, which is what recording a part of a model may meet, has
    no norms; without its out-projection it cannot be recorded.
    """
    names = [kind.__name__ for kind in type(module).__mro__]
    name = next((name for name in names if name in _ANATOMIES), None)
    if name is None:
        return None
    found = _ANATOMIES[name]
    anatomy = found(module, ancestors) if callable(found) else found

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
        "cross" if anatomy.is_cross else "self",
        anatomy.side,
        pre_norm=pre_norm,
        norm=norm,
        second_norm=None if norm is None else follow(anatomy.second_norm),
    )
