"""The attention function "ikattn_implicit" that transformers calls.

Sizes: B batch, H query heads, G key/value heads, L queries, S keys, d head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ikattn.integrations.transformers._cache import feature_layer_of, state_layer_of
from ikattn.integrations.transformers._packed import Sequences, given_sequences, sequences_in
from ikattn.integrations.transformers._padding import (
    one_row_for_all,
    padding_of_causal,
    shown_keys,
)
from ikattn.integrations.transformers._switches import watch_configs
from ikattn.integrations.transformers.interface import (
    Given,
    import_transformers,
    is_causal,
    mask_of,
    register_attention,
)
from ikattn.integrations.transformers.kernels import IMPLICIT, SAVED, kernel_of
from ikattn.integrations.transformers.parallel import check_heads, register_style
from ikattn.nn.masks import Masks, padded
from ikattn.nn.over_ranks import attention_function, dropout_seed_for, is_over_ranks
from ikattn.nn.softmax import refuse_context_parallel, softmax_attention
from ikattn.nn.softmax_heads import Split, by_heads
from ikattn.ops.attention import implicit_kernel_weights
from ikattn.ops.packed import implicit_kernel_attention_varlen
from ikattn.spectral import Mikan

_FEW_QUERIES = 8  # that take features from a cache


def register_implicit() -> None:
    """Registers "ikattn_implicit" with transformers, also by its name in saved configs."""
    masks = import_transformers().AttentionMaskInterface
    for name in (IMPLICIT, SAVED):
        register_attention(name, _implicit_attention, masks_of="sdpa")
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

    Args:
        module: The attention module, with its kernel.
        query: [B, H, L, d].
        key, value: [B, G, S, d] and [B, G, S, d_v].
        attention_mask: Broadcastable to [B, H, L, S]; bool, True = may attend, or floating point.
        dropout: Probability on the weights; 0 outside training.
        scaling: Of query . key; see ``ikattn.convert``.
        options: position_bias, added to the logits; is_causal; output_attentions.

    Returns:
        The output [B, L, H, d_v], and the weights [B, H, L, S] with output_attentions, else None.
    """
    _refuse(module, options)
    if not torch.compiler.is_compiling():
        refuse_context_parallel(IMPLICIT)
    if is_over_ranks():
        _refuse_over_ranks(module, query, key, options)
    kernel = kernel_of(module)
    check_heads(module, kernel, query, key)
    query = scaled_query(query, scaling)
    layer = None if torch.compiler.is_compiling() else state_layer_of(key)
    if layer is not None:
        tokens = (query, key, value)
        decoded = _from_state(module, kernel, layer, tokens, attention_mask, options)
        return decoded.transpose(1, 2).contiguous(), None
    given = Given(query, key, value, attention_mask, IMPLICIT, options)
    visibility = _visibility(module, kernel, given)
    if is_over_ranks():
        passed = options.get("is_causal")  # one token a rank is causal, too
        causal = bool(getattr(module, "is_causal", True) if passed is None else passed)
        visibility = _padding_over_ranks(module, key, visibility.get("attn_mask"), causal)
    split = _split_of(kernel)
    if split is not None:
        _refuse_softmax_heads(module, kernel, options)
    packed = None if split is not None else _sequences(module, query, key, visibility, options)
    if packed is not None and isinstance(getattr(kernel, "spectral", None), Mikan):
        raise NotImplementedError(
            f'{IMPLICIT}: spectral="mikan" averages over whole rows, where {type(module).__name__} '
            'got several sequences in one; use spectral="ikan", or rows of one sequence'
        )
    w1, w2 = kernel(query, key, _padding(kernel, key, visibility))
    if split is not None:
        wants_weights = bool(options.get("output_attentions"))
        mixed, weights = _hybrid_attention(
            split, (query, key, value), (w1, w2), kernel.p, visibility, dropout, wants_weights
        )
        return mixed.transpose(1, 2).contiguous(), weights
    share = getattr(kernel, "head_share", None)
    arguments: dict[str, Any] = {
        "p": kernel.p,
        **visibility,
        "dropout_p": dropout,
        # one seed for both calls: the weights returned are the weights used
        "dropout_seed": dropout_seed_for(dropout, query.device, share),
        "enable_gqa": key.size(1) != query.size(1),
    }
    if packed is not None:
        return _packed_attention(packed, query, key, value, w1, w2, kernel.p, dropout), None
    output = _from_kept_features(kernel, query, key, value, w1, w2, arguments, options)
    if output is None:
        output = attention_function()(query, key, value, w1, w2, **arguments)
    output = output.transpose(1, 2).contiguous()
    if not options.get("output_attentions"):
        return output, None
    return output, implicit_kernel_weights(query, key, w1, w2, **arguments)


def _from_state(
    module: nn.Module,
    kernel: Any,
    layer: Any,
    tokens: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Returns the output [B, H, L, d_v] of the tokens that a layer with a state handed on."""
    w1, w2 = kernel(*tokens[:2], None)
    reasons = {
        "output_attentions": options.get("output_attentions"),
        "cu_seq_lens_q": options.get("cu_seq_lens_q") is not None,
        "position_bias": options.get("position_bias") is not None,
        "training mode": module.training,
        "gradients": torch.is_grad_enabled(),
        "frequencies of each batch item": w1.dim() != 3,
        "softmax heads": _split_of(kernel) is not None,
        "is_causal=False": not is_causal(module, Given(*tokens, mask, IMPLICIT, options))
        and tokens[0].size(2) > 1,
    }
    wrong = [name for name, holds in reasons.items() if holds]
    if wrong:
        raise NotImplementedError(
            f"{IMPLICIT}: a cache of states decodes causally, in eval mode, under torch.no_grad(), "
            f"and makes no weights; {type(module).__name__} has {', '.join(wrong)}"
        )
    return layer.attend(module, (kernel.p, w1, w2), tokens, mask)  # type: ignore[no-any-return]


def _from_kept_features(
    kernel: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    w1: Tensor,
    w2: Tensor | None,
    arguments: dict[str, Any],
    options: dict[str, Any],
) -> Tensor | None:
    """Returns the output [B, H, L, d_v] where a cache has the features of keys, else None.

    Kept features are those of frequencies that stay as they are, the same for the batch. Many
    queries, as those of a prompt, are worth making them in the operator, which keeps no weights.
    """
    if torch.compiler.is_compiling() or query.size(2) > _FEW_QUERIES or torch.is_grad_enabled():
        return None
    layer = feature_layer_of(key)
    is_top_left = arguments.get("is_causal", False) and query.size(2) != key.size(2)
    if layer is None or w1.dim() != 3 or is_top_left:
        return None
    if arguments["dropout_p"] > 0.0 or options.get("output_attentions"):
        return None
    features = layer.features_of(kernel, w1, w2)
    return features.attend(  # type: ignore[no-any-return]
        query,
        value,
        attn_mask=arguments.get("attn_mask"),
        # with as many keys as queries, the only case left, the operator's is_causal is the same
        causal_lower_right=arguments.get("is_causal", False),
    )


def _sequences(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    visibility: dict[str, Any],
    options: dict[str, Any],
) -> Sequences | None:
    """Returns the sequences of a packed batch; None: it is none, or the mask serves better.

    Raises:
        ValueError, NotImplementedError: The call's options say of sequences what cannot be done.
    """
    mask = visibility.get("attn_mask")
    seen = None if visibility.get("is_causal") else sequences_in(mask, query, key)
    begins = given_sequences(module, query, options)
    if begins is not None:
        if mask is not None and seen is None:
            raise NotImplementedError(
                f"{IMPLICIT}: {type(module).__name__} got cu_seq_lens_q beside a mask that hides "
                "more than other sequences; expected one of the two"
            )
        if options.get("sliding_window") is not None:
            raise NotImplementedError(
                f"{IMPLICIT}: {type(module).__name__} got cu_seq_lens_q with a sliding window; "
                "pass position_ids that restart in its place"
            )
        if seen is not None and not _begin_alike(seen, begins):
            raise ValueError(
                f"{IMPLICIT}: {type(module).__name__} got cu_seq_lens_q and cu_seq_lens_k "
                f"{[x.tolist() for x in begins]} beside positions that restart at "
                f"{seen.queries.tolist()}; expected the same sequences"
            )
        causal = bool(visibility["is_causal"]) if seen is None else seen.is_causal
        seen = Sequences(*begins, causal)
    if seen is not None and options.get("output_attentions"):
        if mask is None:
            raise NotImplementedError(
                f"{IMPLICIT}: {type(module).__name__} got cu_seq_lens_q with output_attentions; "
                "pass position_ids that restart in its place"
            )
        return None
    return seen


def _begin_alike(seen: Sequences, begins: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(seen.queries, x.to(seen.queries)) for x in begins)


def _padding_over_ranks(
    module: nn.Module, key: Tensor, mask: Tensor | None, causal: bool
) -> dict[str, Any]:
    """Returns a rank's mask as a bias of its keys, which every rank has, with or without padding.

    Raises:
        NotImplementedError: The mask says more than padding, and causality.
    """
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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    w1: Tensor,
    w2: Tensor | None,
    p: float | None,
    dropout: float,
) -> Tensor:
    """Computes the output [B, L, H, d_v] of sequences that are packed in rows."""
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    output = implicit_kernel_attention_varlen(
        q,
        k,
        v,
        w1,
        w2,
        sequences.queries,
        sequences.keys,
        dropout_p=dropout,
        causal=sequences.is_causal,
        p=p,
    )
    return output.view(query.size(0), query.size(2), *output.shape[1:])


def _split_of(kernel: Any) -> Split | None:
    """Splits heads by what they compute, also where a wrapper is in the place of the kernel."""
    split_heads = getattr(kernel, "split_heads", None)  # PEFT's wrapper hands it on
    return None if split_heads is None else split_heads()


def _refuse_softmax_heads(module: nn.Module, kernel: Any, options: dict[str, Any]) -> None:
    """Raises NotImplementedError for what heads with softmax cannot take part in."""
    wrong = {
        "context_parallel": is_over_ranks(),
        "tensor parallelism": getattr(kernel, "head_share", None) is not None,
        "cu_seq_lens_q": options.get("cu_seq_lens_q") is not None,
    }
    for what, is_there in wrong.items():
        if is_there:
            raise NotImplementedError(
                f"{IMPLICIT}: {type(module).__name__} has heads that compute softmax, which "
                f"{what} does not support; calibrate without keep, or call keep_softmax(None) of "
                "its kernel"
            )


def _hybrid_attention(
    split: Split,
    tokens: tuple[Tensor, Tensor, Tensor],
    frequencies: tuple[Tensor, Tensor | None],
    p: float | None,
    visibility: dict[str, Any],
    dropout: float,
    wants_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Computes the output [B, H, L, d_v], and weights, where some heads compute softmax."""
    query, key, value = tokens
    groups = query.size(1) // key.size(1)
    mask, causal = visibility.get("attn_mask"), visibility.get("is_causal", False)
    if mask is None and causal and wants_weights:
        shape = (query.size(2), key.size(2))
        mask = torch.ones(1, 1, *shape, dtype=torch.bool, device=query.device).tril()
        causal = False

    def own(heads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        of_keys = heads // groups
        own_mask = mask if mask is None or mask.size(1) == 1 else mask.index_select(1, heads)
        return (
            query.index_select(1, heads),
            key.index_select(1, of_keys),
            value.index_select(1, of_keys),
            own_mask,
        )

    def softmax(heads: Tensor) -> tuple[Tensor, Tensor | None]:
        q, k, v, own_mask = own(heads)
        if own_mask is not None and own_mask.dtype == torch.bool:
            own_mask = ~own_mask  # here True hides
        masks = Masks(None, own_mask, causal)
        return softmax_attention(
            q, k, v, masks, dropout_p=dropout, need_weights=wants_weights, mask_dtype=q.dtype
        )

    def implicit(heads: Tensor) -> tuple[Tensor, Tensor | None]:
        q, k, v, own_mask = own(heads)
        w1, w2 = (None if w is None else w.index_select(-3, heads) for w in frequencies)
        assert w1 is not None
        arguments: dict[str, Any] = {
            "p": p,
            "attn_mask": own_mask,
            "is_causal": causal,
            "dropout_p": dropout,
            "dropout_seed": dropout_seed_for(dropout, query.device, None),
        }
        output = attention_function()(q, k, v, w1, w2, **arguments)
        weights = implicit_kernel_weights(q, k, w1, w2, **arguments) if wants_weights else None
        return output, weights

    return by_heads(split, softmax, implicit, query.device)


def _visibility(module: nn.Module, kernel: Any, given: Given) -> dict[str, Any]:
    """Returns which key a query sees, as arguments of the operators."""
    mask, has_bias = given.attention_mask, given.options.get("position_bias") is not None
    if mask is None and not has_bias:
        return {"is_causal": is_causal(module, given)}
    # where causality is not asked for by itself
    is_plain = not has_bias and not is_over_ranks() and _split_of(kernel) is None
    if mask is not None and is_plain and not isinstance(getattr(kernel, "spectral", None), Mikan):
        padding = padding_of_causal(mask, given.key.size(2))
        if padding is not None:
            return {"attn_mask": padding, "is_causal": True}
    return {"attn_mask": mask_of(module, given)}


def _padding(kernel: nn.Module, key: Tensor, visibility: dict[str, Any]) -> Tensor | None:
    """Returns which keys no query sees, bool [B, S], for kernels that depend on their input."""
    if not isinstance(getattr(kernel, "spectral", None), Mikan):  # PEFT may have wrapped the kernel
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


def _refuse(module: nn.Module, options: dict[str, Any]) -> None:
    """Raises NotImplementedError for what changes attention and has no meaning here."""
    reasons = {
        "softcap": "caps logits, which the implicit kernel does not have",
        "s_aux": "adds attention sinks to the logits, which the implicit kernel does not have",
        "cache": "is a paged cache, which is not supported",
    }
    for option, reason in reasons.items():
        if options.get(option) is not None:
            raise NotImplementedError(
                f"{IMPLICIT}: {type(module).__name__} passes {option}, which {reason}; use "
                'model.set_attn_implementation("eager")'
            )


def _refuse_over_ranks(
    module: nn.Module, query: Tensor, key: Tensor, options: dict[str, Any]
) -> None:
    """Raises NotImplementedError for what needs the tokens that other ranks have."""
    wrong = {
        "output_attentions": bool(options.get("output_attentions")),
        "cu_seq_lens_q": options.get("cu_seq_lens_q") is not None,
        "position_bias": options.get("position_bias") is not None,
        "sliding_window": options.get("sliding_window") is not None,
        "a cache": feature_layer_of(key) is not None
        or state_layer_of(key) is not None
        or (getattr(module, "is_causal", False) and query.size(2) != key.size(2)),
    }
    for what, is_there in wrong.items():
        if is_there:
            raise NotImplementedError(
                f"{IMPLICIT}: {type(module).__name__} got {what}, which context_parallel does not "
                "support"
            )
