"""The attention function "ikattn_implicit" that transformers calls.

Sizes: B batch, H query heads, G key/value heads, L queries, S keys, d head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ikattn.integrations.transformers._cache import LAYERS, layer_of
from ikattn.integrations.transformers._gates import gated, log_decay_of
from ikattn.integrations.transformers._masks import (
    Sequences,
    given_sequences,
    one_row_for_all,
    padding_of_causal,
    sequences_in,
    shown_keys,
)
from ikattn.integrations.transformers.interface import (
    Given,
    causal_mask,
    import_transformers,
    is_causal,
    mask_of,
    says_causal,
    watch_configs,
)
from ikattn.integrations.transformers.kernels import IMPLICIT, SAVED, kernel_of
from ikattn.integrations.transformers.parallel import check_heads, register_style
from ikattn.nn.kernels import HeadCall, KernelOptions, Wanted, attend_heads
from ikattn.nn.masks import Masks, padded
from ikattn.nn.over_ranks import attention_function, dropout_seed_for, is_over_ranks
from ikattn.nn.softmax import refuse_context_parallel
from ikattn.nn.softmax_heads import Split
from ikattn.ops.attention import implicit_kernel_weights
from ikattn.ops.packed import implicit_kernel_attention_varlen
from ikattn.spectral import Mikan

_FEW_QUERIES = 8  # that take features from a cache
# Options of a call that change attention and have no meaning here.
_REFUSED = {
    "softcap": "caps logits, which the implicit kernel does not have",
    "s_aux": "adds attention sinks to the logits, which the implicit kernel does not have",
    "cache": "is a paged cache, which is not supported",
}


def register_implicit() -> None:
    """Registers "ikattn_implicit" with transformers, also by its name in saved configs."""
    transformers = import_transformers()
    masks = transformers.AttentionMaskInterface
    for name in (IMPLICIT, SAVED):
        transformers.AttentionInterface.register(name, _implicit_attention)
        # without it transformers would hand over no masks at all
        masks.register(name, one_row_for_all(masks()["sdpa"]))
    watch_configs(IMPLICIT)
    register_style()


def scaled_query(query: Tensor, scaling: float | None) -> Tensor:
    """Returns the query [B, H, L, d] whose dot product with a key is to be divided by sqrt(d)."""
    factor = 1.0 if scaling is None else scaling * math.sqrt(query.size(-1))
    return query if abs(factor - 1.0) < 1e-6 else query * factor


def _implicit_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes implicit-kernel attention as transformers calls its attention functions.

    Tensors are as ``Given`` has them. ``scaling`` is that of query . key, see ``ikattn.convert``;
    among the options are position_bias, added to the logits, is_causal and output_attentions.
    Returns the output [B, L, H, d_v], and the weights [B, H, L, S] with output_attentions, else
    None.
    """
    reasons = {
        f"{name}, which {why}": options.get(name) is not None for name, why in _REFUSED.items()
    }
    _refuse(module, reasons, 'passes {}; use model.set_attn_implementation("eager")')
    if not torch.compiler.is_compiling():
        refuse_context_parallel(IMPLICIT)
    kernel = kernel_of(module)
    given = Given(scaled_query(query, scaling), key, value, attention_mask, IMPLICIT, options)
    if is_over_ranks():
        _refuse_over_ranks(module, given)
    check_heads(module, kernel, query, key)
    layer = None if torch.compiler.is_compiling() else layer_of(key, "state")
    if layer is not None:
        decoded = _from_state(module, kernel, layer, given)
        return decoded.transpose(1, 2).contiguous(), None
    visibility = _visibility(module, kernel, given)
    if is_over_ranks():
        causal = says_causal(module, options)  # one token a rank is causal, too
        visibility = _padding_over_ranks(module, key, visibility.get("attn_mask"), causal)
    split = _split_of(kernel)
    share = getattr(kernel, "head_share", None)
    gates = getattr(kernel, "forget", None)
    wrong = {
        "context_parallel": is_over_ranks(),
        "tensor parallelism": share is not None,
        "cu_seq_lens_q": options.get("cu_seq_lens_q") is not None,
    }
    if split is not None:
        _refuse(
            module,
            wrong,
            "has heads that compute softmax, which {} does not support; calibrate without keep, or "
            "call keep_softmax(None) of its kernel",
        )
    if gates is not None:
        wrong["heads that compute softmax"] = split is not None
        _refuse(module, wrong, "has gates (forget=True), which {} does not support")
        visibility = gated(gates, given, visibility)
    unpacked = split is not None or gates is not None
    packed = None if unpacked else _sequences(module, given, visibility)
    if packed is not None and _averages(kernel):
        raise NotImplementedError(
            f'{IMPLICIT}: spectral="mikan" averages over whole rows, where {type(module).__name__} '
            'got several sequences in one; use spectral="ikan", or rows of one sequence'
        )
    w1, w2 = kernel(given.query, key, _padding(kernel, key, visibility))
    if split is not None:
        mixed, weights = _hybrid_attention(split, given, (w1, w2), kernel.p, visibility, dropout)
        return mixed.transpose(1, 2).contiguous(), weights
    if packed is not None:
        return _packed_attention(packed, given, w1, w2, kernel.p, dropout), None
    arguments: dict[str, Any] = {
        "p": kernel.p,
        **visibility,
        "dropout_p": dropout,
        # one seed for both calls: the weights returned are the weights used
        "dropout_seed": dropout_seed_for(dropout, query.device, share),
        "enable_gqa": key.size(1) != query.size(1),
    }
    output = _from_kept_features(kernel, given, w1, w2, arguments)
    if output is None:
        output = attention_function()(*given[:3], w1, w2, **arguments)
    output = output.transpose(1, 2).contiguous()
    if not options.get("output_attentions"):
        return output, None
    return output, implicit_kernel_weights(*given[:2], w1, w2, **arguments)


def _refuse(module: nn.Module, reasons: dict[str, bool], sentence: str) -> None:
    """Raises NotImplementedError for the first reason that holds, with it in a sentence."""
    for reason, holds in reasons.items():
        if holds:
            said = f"{type(module).__name__} {sentence.format(reason)}"
            raise NotImplementedError(f"{IMPLICIT}: {said}")


def _averages(kernel: Any) -> bool:
    """Whether frequencies depend on whole sequences, also where PEFT has wrapped the kernel."""
    return isinstance(getattr(kernel, "spectral", None), Mikan)


def _from_state(module: nn.Module, kernel: Any, layer: Any, given: Given) -> Tensor:
    """Returns the output [B, H, L, d_v] of the tokens that a layer with a state handed on."""
    w1, w2 = kernel(given.query, given.key, None)
    options = given.options
    reasons = {
        "output_attentions": options.get("output_attentions"),
        "cu_seq_lens_q": options.get("cu_seq_lens_q") is not None,
        "position_bias": options.get("position_bias") is not None,
        "training mode": module.training,
        "gradients": torch.is_grad_enabled(),
        "frequencies of each batch item": w1.dim() != 3,
        "softmax heads": _split_of(kernel) is not None,
        "is_causal=False": given.query.size(2) > 1 and not is_causal(module, given),
    }
    wrong = [name for name, holds in reasons.items() if holds]
    if wrong:
        raise NotImplementedError(
            f"{IMPLICIT}: a cache of states decodes causally, in eval mode, under torch.no_grad(), "
            f"and makes no weights; {type(module).__name__} has {', '.join(wrong)}"
        )
    gates = getattr(kernel, "forget", None)
    found: Tensor = layer.attend(
        module,
        (kernel.p, w1, w2),
        given[:3],
        given.attention_mask,
        None if gates is None else log_decay_of(gates, given, given.attention_mask),
    )
    return found


def _from_kept_features(
    kernel: Any, given: Given, w1: Tensor, w2: Tensor | None, arguments: dict[str, Any]
) -> Tensor | None:
    """Returns the output [B, H, L, d_v] where a cache has the features of keys, else None.

    Kept features are those of frequencies that stay as they are, the same for the batch. Many
    queries, as those of a prompt, are worth making them in the operator, which keeps no weights.
    """
    queries, keys = given.query.size(2), given.key.size(2)
    if torch.compiler.is_compiling() or queries > _FEW_QUERIES or torch.is_grad_enabled():
        return None
    layer = layer_of(given.key, "features")
    is_top_left = arguments.get("is_causal", False) and queries != keys
    if layer is None or w1.dim() != 3 or is_top_left or "log_decay" in arguments:
        return None
    if arguments["dropout_p"] > 0.0 or given.options.get("output_attentions"):
        return None
    features = layer.features_of(kernel, w1, w2)
    return features.attend(  # type: ignore[no-any-return]
        given.query,
        given.value,
        key_bias=arguments.get("key_bias"),
        attn_mask=arguments.get("attn_mask"),
        # with as many keys as queries, the only case left, the operator's is_causal is the same
        causal_lower_right=arguments.get("is_causal", False),
    )


def _sequences(module: nn.Module, given: Given, visibility: dict[str, Any]) -> Sequences | None:
    """Returns the sequences of a packed batch; None: it is none, or the mask serves better."""
    mask, options = visibility.get("attn_mask"), given.options
    seen = None if visibility.get("is_causal") else sequences_in(mask, given.query, given.key)
    begins = given_sequences(module, given.query, options)
    wants_weights = bool(options.get("output_attentions"))
    if begins is not None:
        instead = "pass position_ids that restart in its place"
        wrong = {
            "beside a mask that hides more than other sequences; expected one of the two": (
                mask is not None and seen is None
            ),
            f"with a sliding window; {instead}": options.get("sliding_window") is not None,
            f"with output_attentions; {instead}": mask is None and wants_weights,
        }
        _refuse(module, wrong, "got cu_seq_lens_q {}")
        if seen is not None and not all(
            torch.equal(seen.queries, x.to(seen.queries)) for x in begins
        ):
            raise ValueError(
                f"{IMPLICIT}: {type(module).__name__} got cu_seq_lens_q and cu_seq_lens_k "
                f"{[x.tolist() for x in begins]} beside positions that restart at "
                f"{seen.queries.tolist()}; expected the same sequences"
            )
        causal = bool(visibility["is_causal"]) if seen is None else seen.is_causal
        seen = Sequences(*begins, causal)
    return None if wants_weights else seen


def _padding_over_ranks(
    module: nn.Module, key: Tensor, mask: Tensor | None, causal: bool
) -> dict[str, Any]:
    """Returns a rank's mask as a bias of its keys, which every rank has, padded or not."""
    shown = torch.ones(key.size(0), key.size(2), dtype=torch.bool, device=key.device)
    if mask is not None:
        found = shown_keys(mask, is_causal=causal) if mask.dtype == torch.bool else None
        if found is None:
            raise NotImplementedError(
                f"{IMPLICIT}: {type(module).__name__} got a mask that says more than padding, as "
                "of packed sequences or positions that jump, which context_parallel does not "
                'support; pass attention_mask, or take layout="contiguous"'
            )
        shown = found.expand(key.size(0), -1)
    bias = torch.zeros(shown.shape, dtype=torch.float32, device=key.device)
    bias = bias.masked_fill(~shown, -math.inf)[:, None]
    return {"is_causal": causal, "key_bias": bias}


def _packed_attention(
    sequences: Sequences,
    given: Given,
    w1: Tensor,
    w2: Tensor | None,
    p: float | None,
    dropout: float,
) -> Tensor:
    """Computes the output [B, L, H, d_v] of sequences that are packed in rows."""
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in given[:3])
    options: Any = {"dropout_p": dropout, "causal": sequences.is_causal, "p": p}
    begins = sequences.queries, sequences.keys
    output = implicit_kernel_attention_varlen(q, k, v, w1, w2, *begins, **options)
    return output.view(given.query.size(0), given.query.size(2), *output.shape[1:])


def _split_of(kernel: Any) -> Split | None:
    """Splits heads by what they compute, also where a wrapper is in the place of the kernel."""
    split_heads = getattr(kernel, "split_heads", None)  # PEFT's wrapper hands it on
    return None if split_heads is None else split_heads()


def _hybrid_attention(
    split: Split,
    given: Given,
    frequencies: tuple[Tensor, Tensor | None],
    p: float | None,
    visibility: dict[str, Any],
    dropout: float,
) -> tuple[Tensor, Tensor | None]:
    """Computes the output [B, H, L, d_v], and weights, where some heads compute softmax."""
    query, key, value = given[:3]
    wants_weights = bool(given.options.get("output_attentions"))
    mask, causal = visibility.get("attn_mask"), visibility.get("is_causal", False)
    if mask is None and causal and wants_weights:
        mask, causal = causal_mask(query, key), False
    if mask is not None and mask.dtype == torch.bool:
        mask = ~mask  # modules of torch hide where it is True
    kernel = KernelOptions("implicit", p, lambda *_: frequencies, split=split)
    masks, wanted = Masks(None, mask, causal), Wanted(wants_weights, average=False)
    return attend_heads(HeadCall(query, key, value, kernel, masks, wanted, dropout, query.dtype))


def _visibility(module: nn.Module, kernel: Any, given: Given) -> dict[str, Any]:
    """Returns which key a query sees, as arguments of the operators."""
    mask, has_bias = given.attention_mask, given.options.get("position_bias") is not None
    if mask is None and not has_bias:
        return {"is_causal": is_causal(module, given)}
    # where causality is not asked for by itself
    is_plain = not has_bias and not is_over_ranks() and _split_of(kernel) is None
    if mask is not None and is_plain and not _averages(kernel):
        padding = padding_of_causal(mask, given.key.size(2))
        if padding is not None:
            return {"attn_mask": padding, "is_causal": True}
    return {"attn_mask": mask_of(module, given)}


def _padding(kernel: nn.Module, key: Tensor, visibility: dict[str, Any]) -> Tensor | None:
    """Returns which keys no query sees, bool [B, S], for kernels that depend on their input."""
    if not _averages(kernel):
        return None
    if visibility.get("is_causal"):
        raise RuntimeError(
            f'{IMPLICIT}: a causal call with spectral="mikan", which averages over whole '
            'sequences and would see the future; use spectral="ikan"'
        )
    mask = visibility.get("attn_mask")
    if mask is None:
        return None
    away = ~mask if mask.dtype == torch.bool else padded(mask)
    return away.all(1).all(1).expand(key.size(0), -1)


def _refuse_over_ranks(module: nn.Module, given: Given) -> None:
    """Raises NotImplementedError for what needs the tokens that other ranks have."""
    query, key, options = given.query, given.key, given.options
    names = ("cu_seq_lens_q", "position_bias", "sliding_window")
    wrong = {"output_attentions": bool(options.get("output_attentions"))}
    wrong |= {name: options.get(name) is not None for name in names}
    is_later = getattr(module, "is_causal", False) and query.size(2) != key.size(2)
    wrong["a cache"] = is_later or any(layer_of(key, kind) is not None for kind in LAYERS)
    _refuse(module, wrong, "got {}, which context_parallel does not support")
