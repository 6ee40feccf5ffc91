"""From maps of single layers to what an output token draws from the input.

Symbols: B batch, L queries, S keys (L = S in self-attention), N layers; A_l is the map of layer l,
``[L, S]``, row i saying what token i takes from each token.
Sources: S. Abnar, W. Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020, for rollout;
A. Modarressi, M. Fayyaz, Y. Yaghoobzadeh, M. T. Pilehvar, "GlobEnc", NAACL 2022, for rollout of
norms.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ikattn._memory import memory_for
from ikattn.maps.layers import Batch, RecordedMaps, check_whole
from ikattn.maps.summary import (
    Maps,
    check_padding,
    full_precision,
    layer_contributions,
    layer_maps,
    row_shares,
)
from ikattn.nn.selection import describe_unseen

__all__ = [
    "RankedToken",
    "Residual",
    "padding_of",
    "rank_tokens",
    "rollout",
    "steps_of",
    "token_importance",
    "token_index",
]

Residual: TypeAlias = float | str | Sequence[Tensor] | Tensor | None
"""How a residual connection enters maps that do not hold it. See :func:`rollout`."""

WITH_NORM_WARNING = (
    'rollout of "with_norm" (N_ResLN) misleads: it ends between the two normalisations of the '
    "block, and scales that the second one takes back grow from layer to layer. Take "
    '"encoder" (N_Enc), or "with_residual" where a block has no second normalisation.'
)


def rollout(
    maps: Maps,
    normalize: bool = True,
    *,
    map: str = "encoder",
    layers: Iterable[str] | None = None,
    residual: Residual = None,
    padding: Tensor | None = None,
    all_layers: bool = False,
) -> Tensor:
    """The product of the layers' maps: what each output token draws from each input token.

    R_1 = A_1, R_l = A_l R_(l-1). A row of R_l says where token i, after layer l, comes from, if
    what a token takes from another is passed on in proportion.

    Which map to take: ``"encoder"`` (N_Enc), which holds the whole block but its feed-forward
    part's nonlinearity; of pre-norm blocks ``"with_residual"``, whose vectors the next block adds
    to, where ``"encoder"`` ends at the norm before the feed-forward part. **Not**
    ``"with_norm"`` (N_ResLN) alone, which gives a ``UserWarning`` (with Python's default filter
    once per line that calls): the first LayerNorm of a trained BERT enlarges a few outlier
    dimensions that the second one shrinks again. A map that ends between them is dominated by those
    dimensions, in every layer, and rollout multiplies the error. ``"weights"``, ``"per_head"`` and
    ``"summed"`` hold no residual connection: give ``residual``.

    Args:
        maps: A Recording of one forward call, one of its batches, or a sequence of ``[B, L, L]``
            (or ``[B, H, L, L]``, averaged over heads), first layer first, or a tensor with layers
            as its first axis.
        normalize: Divide every row of every map by its sum before it enters the product, so that
            the rows of R add up to 1. False: the raw product, as GlobEnc's code has it, whose scale
            grows or shrinks with depth.
        map: The map to take from a recording.
        layers: Names of the layers to take from a recording, by default those of self-attention (of
            a Batch: all). Needed where an encoder and a decoder were recorded.
        residual: None: maps hold the residual connection already. A number r in [0, 1]: every A_l
            becomes (1 - r) A_l + r I after normalisation; 0.5 is Abnar and Zuidema's, GlobEnc's
            W-FixedRes and N-FixedRes. Tensors ``[B, L]``, one per layer (or ``[N, B, L]``), of
            mixing ratios: the off-diagonal entries of row i are scaled to add up to ratio_i and the
            diagonal becomes 1 - ratio_i, GlobEnc's W-Res. A name: the recorded mixing ratio of that
            map, for example "encoder".
        padding: bool ``[B, L]``, True = padding; by default what the recording knows. Its rows and
            columns are 0, with a residual too.
        all_layers: Return every R_l, not the last alone.

    Returns:
        ``[B, L, L]``, or ``[N, B, L, L]`` with all_layers. A row without any entry (padding, or a
        query that sees nothing) stays 0 when it is normalised; so do the off-diagonal entries of
        the only token of a sequence under mixing ratios. float32 for half-precision maps.

    Raises:
        ValueError: Maps are not square or differ in shape, a map was not recorded, residual or
            padding does not fit.
        KeyError: A layer that is not there.
        LookupError: The recording has no or several batches.

    Example:
        >>> import torch, ikattn
        >>> from ikattn.maps.through_layers import rollout
        >>> weights = [torch.rand(1, 4, 4).softmax(-1) for _ in range(3)]
        >>> flow = rollout(weights, residual=0.5)
        >>> torch.allclose(flow.sum(-1), torch.ones(1, 4))
        True
    """
    steps = steps_of(maps, normalize, map, layers, residual, padding, "rollout")
    with memory_for("rollout", "the products of maps, [B, L, L]"):
        products = [steps[0]]
        for step in steps[1:]:
            products.append(step @ products[-1])
        return torch.stack(products) if all_layers else products[-1]


def token_importance(
    maps: Maps,
    position: int | slice | Tensor,
    *,
    layer: int | str | None = None,
    map: str = "encoder",
    normalize: bool = True,
    layers: Iterable[str] | None = None,
    residual: Residual = None,
    query_padding: Tensor | None = None,
    key_padding: Tensor | None = None,
    without_self: bool = False,
) -> Tensor:
    """How much a chosen output token draws from each input token.

    Its row of the rollout (without computing the others), or of a single layer's map.

    Args:
        maps: As for :func:`rollout`.
        position: Which output token, counted without padding, as in ``Batch.tokens``; -1 is the
            last. An int64 tensor ``[B]``: one for each sequence. A slice: a span, of which the
            mean is taken.
        layer: None: through all layers. A layer's name, or its number among the layers, 0 the
            first: through this one alone; L and S may differ then.
        map, normalize, layers, residual: As for :func:`rollout`; residual tensors with a layer: of
            that layer alone.
        query_padding: bool ``[B, L]``; by default what the recording knows.
        key_padding: bool ``[B, S]``; for rollout, where both are the same tokens, one of them is
            enough.
        without_self: Leave out what the token, or the span, draws from itself, which is mostly the
            largest part where maps hold the residual.

    Returns:
        ``[B, S]``, 0 at padding; with normalize it adds up to 1.

    Raises:
        ValueError: As :func:`rollout`; or position is outside a sequence.
        KeyError, LookupError: As :func:`rollout`.
        IndexError: No layer has this number.

    Example:
        >>> import torch, ikattn
        >>> from ikattn.maps.through_layers import rollout, token_importance
        >>> weights = [torch.rand(2, 4, 4).softmax(-1) for _ in range(3)]
        >>> importance = token_importance(weights, -1, residual=0.5)
        >>> torch.allclose(importance, rollout(weights, residual=0.5)[:, -1])
        True
    """
    caller = "token_importance"
    layers = None if layers is None else list(layers)
    if layer is None:
        padding = key_padding if query_padding is None else query_padding
        steps = steps_of(maps, normalize, map, layers, residual, padding, caller)
        of_queries = padding_of(maps, layers, padding, caller)
    else:
        step, of_queries = _single_step(
            maps, layer, normalize, map, layers, residual, query_padding, key_padding
        )
        steps = [step]
    B, L, S = steps[-1].shape
    device = steps[-1].device
    if isinstance(position, slice):
        share = _share_of_span(position, of_queries, B, L, device).to(steps[-1].dtype)
        row = share.unsqueeze(1) @ steps[-1]  # [B, 1, S]
    else:
        index = token_index(position, of_queries, B, L, device)
        share = torch.arange(L, device=index.device) == index.unsqueeze(-1)
        row = steps[-1][torch.arange(B, device=index.device), index].unsqueeze(1)
    for step in reversed(steps[:-1]):
        row = row @ step
    row = row.squeeze(1)
    if not without_self:
        return row
    if L != S:
        raise ValueError(
            f"{caller}: without_self must be False where queries are not the keys, got a map of "
            f"shape {[B, L, S]}"
        )
    others = row.masked_fill(share != 0, 0)
    return row_shares(others) if normalize else others


class RankedToken(NamedTuple):
    """A token and how much it matters."""

    token: str
    importance: float
    position: int
    """Among the tokens of its sequence, padding not counted."""


def rank_tokens(
    importance: Tensor,
    tokens: Sequence[Sequence[str]],
    *,
    padding: Tensor | None = None,
    top: int | None = None,
) -> list[list[RankedToken]]:
    """Tokens with their importance, the most important first, of equal ones the earlier.

    Args:
        importance: ``[B, S]``, from :func:`token_importance`.
        tokens: Of each sequence, without padding, as ``Batch.tokens``.
        padding: bool ``[B, S]``. None: nothing is padded.
        top: How many of each sequence, by default all.

    Returns:
        A list for each sequence.

    Raises:
        ValueError: The number of sequences, or of tokens in one, is not that of importance.

    Example:
        >>> import torch
        >>> from ikattn.maps.through_layers import rank_tokens
        >>> ranking = rank_tokens(torch.tensor([[0.1, 0.75, 0.15]]), [["the", "cat", "sat"]])
        >>> [ranked.token for ranked in ranking[0]]
        ['cat', 'sat', 'the']
    """
    if importance.dim() != 2 or importance.shape[0] != len(tokens):
        raise ValueError(
            f"rank_tokens: importance must have shape [B, S] with B = {len(tokens)}, the number of "
            f"token lists, got {list(importance.shape)}"
        )
    if padding is None:
        padding = torch.zeros_like(importance, dtype=torch.bool)
    check_padding(padding, "padding", importance.shape, "rank_tokens")
    ranked = []
    for b, (values, hidden, words) in enumerate(zip(importance, padding, tokens, strict=True)):
        values = values[~hidden]
        if len(values) != len(words):
            raise ValueError(
                f"rank_tokens: tokens[{b}] must hold the {len(values)} tokens of its sequence that "
                f"are not padding, got {len(words)}"
            )
        order = values.argsort(descending=True, stable=True)[:top]
        ranked.append([RankedToken(words[i], float(values[i]), i) for i in order.tolist()])
    return ranked


def steps_of(
    maps: Maps,
    normalize: bool,
    map: str,
    layers: Iterable[str] | None,
    residual: Residual,
    padding: Tensor | None,
    caller: str,
) -> list[Tensor]:
    """The factors of the product, first layer first: [B, L, L] each."""
    layers = None if layers is None else list(layers)
    _warn_of_with_norm(maps, map)
    _check_rows(maps, layers, caller)
    padding = padding_of(maps, layers, padding, caller)
    B, L, S = layer_maps(maps, map=map, layers=layers, caller=caller)[0].shape
    if L != S:
        is_recorded = isinstance(maps, (RecordedMaps, Batch))
        raise ValueError(
            f"{caller}: maps must be square, of self-attention over whole sequences, got "
            f"{[B, L, S]}"
            + (
                ": keys from a cache or a prefix, and those of cross-attention, are no queries of "
                "the same call; choose with layers=, or take recording.joined()"
                if is_recorded
                else ""
            )
        )
    found = layer_maps(
        maps, map=map, layers=layers, query_padding=padding, key_padding=padding, caller=caller
    )
    ratios = _mixing_ratios(maps, layers, residual, len(found), (B, L), caller)
    return [
        _with_residual(row_shares(x) if normalize else x, ratio, padding)
        for x, ratio in zip(found, ratios, strict=True)
    ]


def _single_step(
    maps: Maps,
    layer: int | str,
    normalize: bool,
    map: str,
    layers: Iterable[str] | None,
    residual: Residual,
    query_padding: Tensor | None,
    key_padding: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """One layer's map, [B, L, S], as rollout would take it, and the padding of its queries."""
    caller = "token_importance"
    one: Maps
    if isinstance(maps, (RecordedMaps, Batch)):
        if isinstance(layer, int):
            names = list(layer_contributions(maps, layers, caller))
            layer = names[_checked_number(layer, len(names))]
        one, layers = maps, [layer]
        _check_rows(maps, layers, caller)
        if query_padding is None:
            query_padding = layer_contributions(maps, layers, caller)[layer].query_padding
    else:
        if isinstance(layer, str):
            raise ValueError(
                f"{caller}: layer must be a number where maps are tensors, got {layer!r}"
            )
        one = [maps[_checked_number(layer, len(maps))]]
    (found,) = layer_maps(
        one,
        map=map,
        layers=layers,
        query_padding=query_padding,
        key_padding=key_padding,
        caller=caller,
    )
    B, L, S = found.shape
    if residual is not None and L != S:
        raise ValueError(
            f"{caller}: residual must be None where queries and keys differ, got {residual} for a "
            f"map of shape {[B, L, S]}"
        )
    (ratio,) = _mixing_ratios(one, layers, residual, 1, (B, L), caller)
    step = row_shares(found) if normalize else found
    return _with_residual(step, ratio, query_padding), query_padding


def _checked_number(layer: int, N: int) -> int:
    if not -N <= layer < N:
        raise IndexError(f"token_importance: layer must be in [{-N}, {N}), got {layer}")
    return layer


def _warn_of_with_norm(maps: Maps, map: str) -> None:
    if map == "with_norm" and isinstance(maps, (RecordedMaps, Batch)):
        warnings.warn(WITH_NORM_WARNING, UserWarning, stacklevel=4)
    if isinstance(maps, RecordedMaps) and maps.left_out:
        warnings.warn(
            f"attention that was not recorded moves tokens, too: {describe_unseen(maps.left_out)}",
            UserWarning,
            stacklevel=4,
        )


def _check_rows(maps: Maps, layers: Iterable[str] | None, caller: str) -> None:
    """Raises ValueError where a layer's maps are of some queries alone."""
    if isinstance(maps, (RecordedMaps, Batch)):
        for name, own in layer_contributions(maps, layers, caller).items():
            check_whole(own, name, caller)


def padding_of(
    maps: Maps, layers: Iterable[str] | None, padding: Tensor | None, caller: str
) -> Tensor | None:
    """The padding of the tokens that go through the layers: the given, or the recorded one."""
    if padding is not None or not isinstance(maps, (RecordedMaps, Batch)):
        return padding
    first = next(iter(layer_contributions(maps, layers, caller).values()))
    return first.key_padding if first.query_padding is None else first.query_padding


def _mixing_ratios(
    maps: Maps,
    layers: Iterable[str] | None,
    residual: Residual,
    N: int,
    shape: tuple[int, int],
    caller: str,
) -> list[float | Tensor | None]:
    """For each layer None, the residual's fixed part, or mixing ratios [B, L]."""
    if residual is None:
        return [None] * N
    if isinstance(residual, (int, float)):
        if not 0 <= residual <= 1:
            raise ValueError(f"{caller}: residual must be in [0, 1], got {residual}")
        return [float(residual)] * N
    if isinstance(residual, str):
        if not isinstance(maps, (RecordedMaps, Batch)):
            raise ValueError(
                f"{caller}: residual must be a number or tensors where maps are tensors, "
                f"got {residual!r}"
            )
        ratios = [
            c.mixing_ratio.get(residual) for c in layer_contributions(maps, layers, caller).values()
        ]
    else:
        ratios = list(residual)
    if len(ratios) != N or any(x is None or tuple(x.shape) != shape for x in ratios):
        got = ["none recorded" if x is None else list(x.shape) for x in ratios]
        raise ValueError(
            f"{caller}: residual must give mixing ratios of shape {list(shape)} for each of {N} "
            f"layers, got {got}"
        )
    return [full_precision(x) for x in ratios if x is not None]


def _with_residual(x: Tensor, ratio: float | Tensor | None, padding: Tensor | None) -> Tensor:
    """A map with its residual connection, [B, L, L]."""
    if ratio is None:
        return x
    own = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand_as(x)
    if padding is not None:
        own = own.masked_fill(padding.unsqueeze(-1), 0)
    if isinstance(ratio, float):
        return (1 - ratio) * x + ratio * own
    if padding is not None:
        ratio = ratio.masked_fill(padding, 0)
    ratio = ratio.unsqueeze(-1)
    return ratio * row_shares(x * (1 - own)) + (1 - ratio) * own


def _share_of_span(
    span: slice, padding: Tensor | None, B: int, L: int, device: torch.device
) -> Tensor:
    """1 / n at the n tokens of a span, counted without padding, else 0: [B, L].

    Raises:
        ValueError: A sequence has none of them.
    """
    padding = torch.zeros(B, L, dtype=torch.bool, device=device) if padding is None else padding
    share = torch.zeros(B, L, device=device)
    for b, hidden in enumerate(padding):
        places = (~hidden).nonzero()[:, 0]
        chosen = places[list(range(*span.indices(len(places))))]
        if not len(chosen):
            raise ValueError(
                f"token_importance: position must be a span with a token, got {span} of sequence "
                f"{b}, which has {len(places)} tokens"
            )
        share[b, chosen] = 1 / len(chosen)
    return share


def token_index(
    position: int | Tensor, padding: Tensor | None, B: int, L: int, device: torch.device
) -> Tensor:
    """Where in the padded rows the tokens stand that are counted without padding: int64 [B]."""
    if not isinstance(position, (int, Tensor)):
        raise TypeError(
            "token_importance: position must be an int, a slice or an int64 tensor [B], got "
            f"{position!r}"
        )
    if isinstance(position, Tensor) and (position.dtype != torch.int64 or position.shape != (B,)):
        raise ValueError(
            f"token_importance: position must be an int or an int64 tensor [{B}], "
            f"got {position.dtype} {list(position.shape)}"
        )
    wanted = torch.as_tensor(position, device=device).expand(B)
    if padding is None:
        padding = torch.zeros(B, L, dtype=torch.bool, device=device)
    lengths = (~padding).sum(-1)
    outside = (wanted < -lengths) | (wanted >= lengths)
    if outside.any():
        b = int(outside.int().argmax())
        raise ValueError(
            f"token_importance: position must be in [{-int(lengths[b])}, {int(lengths[b])}) in "
            f"sequence {b}, which has {int(lengths[b])} tokens, got {int(wanted[b])}"
        )
    if B == 0:
        return wanted
    count = torch.where(wanted < 0, wanted + lengths, wanted) + 1
    reached = (~padding).cumsum(-1) >= count.unsqueeze(-1)
    return reached.int().argmax(-1)
