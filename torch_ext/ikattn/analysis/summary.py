"""Summaries of maps: over heads, layers and tokens, and which factor makes a token influential.

Symbols: B batch, H heads, L queries, S keys, N layers. Padding is bool, True = padding, ``[B, L]``
for queries and ``[B, S]`` for keys. What is padding is 0 in every map and left out of averages.
Half-precision input is taken, and returned, as float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ikattn._memory import takes_memory_for
from ikattn.analysis.contributions import Contributions
from ikattn.analysis.maps import Batch, RecordedMaps, check_whole

__all__ = [
    "Factors",
    "LedgerShares",
    "Maps",
    "head_mean",
    "layer_maps",
    "layer_mean",
    "ledger_shares",
    "token_mean",
]

Maps: TypeAlias = RecordedMaps | Batch | Sequence[Tensor] | Tensor
"""A recording of one forward call, one of its batches, or one map per layer, first layer first."""

# The fields of Contributions that hold a number for every pair of query and key.
HEAD_MAPS = ("weights", "per_head", "similarity")
TOKEN_MAPS = ("summed", "with_residual", "with_norm", "encoder", "alti")

# Logarithms whose root mean square is below this many units in the last place of the ledger's dtype
# are rounding, not variation. A weight carries the rounding of a softmax, a few tens of units.
ROUNDING_ULPS = 64


def full_precision(x: Tensor) -> Tensor:
    """A map in the type that is calculated with: float32 for half precision."""
    return x if x.dtype == torch.float64 else x.float()


def row_shares(x: Tensor) -> Tensor:
    """Every row over its sum; rows of zeros stay."""
    total = x.sum(-1, keepdim=True)
    return x / torch.where(total == 0, 1, total)


def check_padding(padding: Tensor, name: str, shape: Sequence[int], caller: str) -> None:
    """Raises unless padding is bool and has this shape."""
    if padding.dtype != torch.bool or list(padding.shape) != list(shape):
        raise ValueError(
            f"{caller}: {name} must be bool with shape {list(shape)}, True = padding, "
            f"got {padding.dtype} {list(padding.shape)}"
        )


def without_padding(
    x: Tensor, query_padding: Tensor | None, key_padding: Tensor | None, caller: str
) -> Tensor:
    """``[B, L, S]`` or ``[B, H, L, S]`` with 0 wherever the query or the key is padding."""
    middle = (1,) * (x.dim() - 3)
    B, L, S = x.shape[0], x.shape[-2], x.shape[-1]
    if query_padding is not None:
        check_padding(query_padding, "query_padding", (B, L), caller)
        x = x.masked_fill(query_padding.view(B, *middle, L, 1), 0)
    if key_padding is not None:
        check_padding(key_padding, "key_padding", (B, S), caller)
        x = x.masked_fill(key_padding.view(B, *middle, 1, S), 0)
    return x


def pair_map(contributions: Contributions, map: str, caller: str, layer: str = "") -> Tensor:
    """The map of this name, ``[B, L, S]`` or ``[B, H, L, S]``."""
    of_layer = f" of layer {layer!r}" if layer else ""
    names = (*HEAD_MAPS, *TOKEN_MAPS)
    found: Tensor | None = getattr(contributions, map, None) if map in names else None
    if found is None:
        there = [name for name in names if getattr(contributions, name) is not None]
        raise ValueError(
            f"{caller}: map must be one of those recorded{of_layer}, "
            f"{', '.join(there) or 'of which there are none'}, got {map!r}"
        )
    return full_precision(found)


def head_mean(
    x: Tensor, *, query_padding: Tensor | None = None, key_padding: Tensor | None = None
) -> Tensor:
    """The mean over heads.

    Every head counts the same, also one that sees nothing of a pair.

    Args:
        x: ``[B, H, L, S]``, for example the ``weights`` or ``per_head`` of a Contributions.
        query_padding: bool ``[B, L]``.
        key_padding: bool ``[B, S]``.

    Returns:
        ``[B, L, S]``, 0 where the query or the key is padding.

    Raises:
        ValueError: x or a padding has another shape, or a padding is not bool.

    Example:
        >>> import torch
        >>> from ikattn.analysis.summary import head_mean
        >>> weights = torch.rand(2, 4, 5, 7).softmax(-1)
        >>> head_mean(weights).shape
        torch.Size([2, 5, 7])
    """
    if x.dim() != 4 or x.shape[1] == 0:
        raise ValueError(
            f"head_mean: x must have shape [B, H, L, S] with a head at least, got {list(x.shape)}"
        )
    mean = full_precision(x).mean(1)
    return without_padding(mean, query_padding, key_padding, "head_mean")


def single_batch(recording: RecordedMaps, caller: str) -> Batch:
    """The batch of a recording of one forward call."""
    recording.check_recorded()
    if len(recording.batches) != 1:
        raise LookupError(
            f"{caller}: maps must be a recording of one forward call, got one of "
            f"{len(recording.batches)}: give recording.batches[i], or loop over them"
        )
    return recording.batches[0]


def _self_attention_layers(recording: RecordedMaps, caller: str) -> list[str]:
    """The names to take where nobody chose."""
    layers = [layer for layer in recording.layers.values() if layer.kind == "self"]
    if len({layer.side for layer in layers}) > 1:
        raise ValueError(
            f"{caller}: layers must be given, since this model has self-attention in an encoder "
            f"and in a decoder: {', '.join(layer.name for layer in layers)}"
        )
    return [layer.name for layer in layers]


def layer_contributions(
    maps: RecordedMaps | Batch, layers: Iterable[str] | None, caller: str
) -> dict[str, Contributions]:
    """The chosen layers, in the given order, or those of self-attention in the order they ran."""
    if isinstance(maps, RecordedMaps):
        batch = single_batch(maps, caller)
        chosen = list(layers) if layers is not None else _self_attention_layers(maps, caller)
    else:
        batch = maps
        chosen = list(layers) if layers is not None else list(batch)
    if not chosen:
        raise ValueError(f"{caller}: maps must hold at least one layer, got none")
    for name in chosen:
        if name not in batch:
            raise KeyError(f"{caller}: no layer {name!r}; there are {', '.join(batch)}")
        check_whole(batch[name], name, caller, rows_too=False)
    return {name: batch[name] for name in chosen}


def layer_maps(
    maps: Maps,
    *,
    map: str = "encoder",
    layers: Iterable[str] | None = None,
    query_padding: Tensor | None = None,
    key_padding: Tensor | None = None,
    caller: str = "layer_maps",
) -> list[Tensor]:
    """One map per layer, first layer first, heads averaged, padding 0.

    Args:
        maps: A Recording of one forward call, a Batch, or ``[B, L, S]`` or ``[B, H, L, S]`` tensors
            (or one tensor with layers as its first axis). Where layers do not have the same L and
            S, ``layers`` must choose.
        map: Which one, of a recording: "weights", "per_head", "summed", "with_residual",
            "with_norm" or "encoder".
        layers: Names of layers of a recording. By default those of self-attention; of a Batch,
            which does not know them from others, all.
        query_padding: bool ``[B, L]``, for tensors; a recording knows its own.
        key_padding: bool ``[B, S]``, likewise.
        caller: Whose name error messages carry.

    Returns:
        N tensors ``[B, L, S]``.

    Raises:
        ValueError: No layer, a map that was not recorded, shapes that differ or do not fit.
        KeyError: A layer that is not there.
        LookupError: A recording of no or several forward calls.
    """
    recorded: list[tuple[str, Tensor, Tensor | None, Tensor | None]]
    if isinstance(maps, (RecordedMaps, Batch)):
        recorded = [
            (f"map {map!r} of layer {name!r}", pair_map(c, map, caller, name), q, k)
            for name, c in layer_contributions(maps, layers, caller).items()
            for q, k in [
                (
                    c.query_padding if query_padding is None else query_padding,
                    c.key_padding if key_padding is None else key_padding,
                )
            ]
        ]
    else:
        if layers is not None:
            raise ValueError(f"{caller}: layers must be None where maps are tensors, got {layers}")
        recorded = [
            (f"maps[{index}]", full_precision(x), query_padding, key_padding)
            for index, x in enumerate(maps)
        ]
    if not recorded:
        raise ValueError(f"{caller}: maps must hold at least one layer, got none")
    found: list[Tensor] = []
    for name, x, of_queries, of_keys in recorded:
        if x.dim() not in (3, 4):
            raise ValueError(
                f"{caller}: {name} must have shape [B, L, S] or [B, H, L, S], got {list(x.shape)}"
            )
        mean = head_mean(x) if x.dim() == 4 else x
        if found and mean.shape != found[0].shape:
            raise ValueError(
                f"{caller}: {name} must have shape {list(found[0].shape)} as the first layer's, "
                f"got {list(mean.shape)}"
            )
        found.append(without_padding(mean, of_queries, of_keys, caller))
    return found


def layer_mean(
    maps: Maps,
    *,
    map: str = "encoder",
    layers: Iterable[str] | None = None,
    query_padding: Tensor | None = None,
    key_padding: Tensor | None = None,
) -> Tensor:
    """The mean over layers (and over heads, of a map that has them), pair by pair.

    Args:
        maps: As in :func:`layer_maps`, the other arguments likewise.

    Returns:
        ``[B, L, S]``, 0 where the query or the key is padding.

    Raises:
        ValueError, KeyError, LookupError: As :func:`layer_maps`.

    Example:
        >>> import torch
        >>> from ikattn.analysis.summary import layer_mean
        >>> layer_mean([torch.zeros(1, 2, 2), torch.ones(1, 2, 2)])
        tensor([[[0.5000, 0.5000],
                 [0.5000, 0.5000]]])
    """
    found = layer_maps(
        maps,
        map=map,
        layers=layers,
        query_padding=query_padding,
        key_padding=key_padding,
        caller="layer_mean",
    )
    return torch.stack(found).mean(0)


def token_mean(values: Tensor, padding: Tensor | None = None) -> Tensor:
    """The mean over the last axis, tokens, without those that are padding.

    Args:
        values: ``[B, ..., S]``: mixing ratios ``[B, L]``, value norms ``[B, H, S]``, a map. NaN in
            padding does no harm.
        padding: bool ``[B, S]``.

    Returns:
        ``[B, ...]``; NaN for a sequence of padding only, of which there is no mean.

    Raises:
        ValueError: values has fewer than two axes, or padding does not fit.

    Example:
        >>> import torch
        >>> from ikattn.analysis.summary import token_mean
        >>> ratio = torch.tensor([[0.2, 0.4], [0.6, 0.0]])
        >>> token_mean(ratio, torch.tensor([[False, False], [False, True]]))
        tensor([0.3000, 0.6000])
    """
    if values.dim() < 2:
        raise ValueError(f"token_mean: values must be [B, ..., S], got {list(values.shape)}")
    values = full_precision(values)
    B, S = values.shape[0], values.shape[-1]
    if padding is None:
        return values.mean(-1)
    check_padding(padding, "padding", (B, S), "token_mean")
    padding = padding.view(B, *(1,) * (values.dim() - 2), S)
    return values.masked_fill(padding, 0).sum(-1) / (~padding).sum(-1)


@dataclass(frozen=True)
class Factors:
    """One number, or tensor of them, for each factor of a contribution.

    Attributes:
        similarity: Of query and key.
        magnitude: Of the key.
        value_norm: ``|f_h(x_j)|``.
        bias: What else is in the weight and not the same for the whole row: a float mask, a key
            bias, a position bias. 0 where there is none.
    """

    similarity: Tensor
    magnitude: Tensor
    value_norm: Tensor
    bias: Tensor

    def total(self) -> Tensor:
        """The sum of the four."""
        return self.similarity + self.magnitude + self.value_norm + self.bias


@dataclass(frozen=True)
class LedgerShares:
    """Which factor makes some tokens contribute more than others. See :func:`ledger_shares`.

    Attributes:
        per_head: Shares ``[B, H]`` of all that varies in a head.
        per_token: Shares ``[B, S]`` of what a key's contributions deviate, all heads together.
        per_head_and_token: Shares ``[B, H, S]`` of what they deviate in a head.
        deviation: ``[B, H, S]``, the mean logarithm of how much larger each factor of a key is than
            the geometric mean of its row; the four add up to ``influence``.
        influence: ``[B, H, S]``, the same of the contribution: ``exp`` of it is how many times the
            geometric mean of its row a key contributes.
        variance: ``[B, H]``, the variance of the logarithm of the contribution within rows.
        pairs: int64 ``[B, H]``, how many pairs were counted.
        left_out: int64 ``[B, H]``, how many more have a weight, but a factor that is 0, subnormal,
            infinite or NaN, mostly because similarity or magnitude left the range of their dtype.
    """

    per_head: Factors
    per_token: Factors
    per_head_and_token: Factors
    deviation: Factors
    influence: Tensor
    variance: Tensor
    pairs: Tensor
    left_out: Tensor


@takes_memory_for("the factors of every pair and head")
def ledger_shares(contributions: Contributions) -> LedgerShares:
    r"""Shares of similarity, key magnitude and value norm in what tokens contribute.

    A contribution is a product, so its logarithm is a sum:

    .. math::
        \log c_{ij} = \log s_{ij} + \log m_j + \log n_j + b_{ij} - \log Z_i

    with similarity s, magnitude m, value norm n, bias b and row sum Z. Let :math:`\delta` be the
    deviation of a logarithm from its mean over the keys that query i sees: Z, the same for the
    whole row, is gone, and :math:`\delta c = \delta s + \delta m + \delta n + \delta b`, exactly.

    **Shares** split the variance of :math:`\log c` within rows. That of factor x, over a set of
    pairs (those of a head, of a key, of a key in a head), is

    .. math::
        \text{share}_x = \sum_{ij} \delta x_{ij}\, \delta c_{ij} \Big/ \sum_{ij} \delta c_{ij}^2 .

    The four add up to 1. Over a head this is covariance over variance, the Shapley value of each
    factor in the variance of their sum: no order of taking factors out is preferred. A share is
    negative where a factor works against the others, and then another one exceeds 1. A head's share
    is the mean of its tokens', weighted by how much they deviate. No factor's unit matters: shares
    stay the same if all magnitudes, or all value norms, or a query's similarities, are scaled.

    **Deviations** are signed: the mean of :math:`\delta x_{ij}` over the queries that see key j.
    The four add up to that of c, the key's influence.

    Pairs that are masked, padded or have weight 0 do not count. Where nothing varies (one visible
    key per row, or deviations within the rounding of the arrays) there is nothing to share: shares
    are 0. A key that no query sees has shares, deviations and influence 0. Computed in float64,
    without gradient.

    Args:
        contributions: With weights and similarity ``[B, H, L, S]``, magnitude and value_norms
            ``[B, H, S]``: one layer of a recording that keeps the ledger.

    Returns:
        A :class:`LedgerShares`, float64.

    Raises:
        ValueError: One of the four is missing, or their shapes do not fit together.

    Source: the product is that of K. Song et al., "Implicit Kernel Attention", AAAI 2021, and
    G. Kobayashi et al., "Attention is Not Only a Weight", EMNLP 2020; the split of its logarithm
    was derived for this project.

    Example:
        >>> import torch, ikattn
        >>> from ikattn.analysis.summary import ledger_shares
        >>> from ikattn.analysis.contributions import Contributions
        >>> q, k = torch.randn(2, 1, 2, 6, 8, dtype=torch.float64)
        >>> similarity, magnitude = ikattn.ops.similarity_and_magnitude(q, k)
        >>> weights = (q @ k.mT / 8**0.5).softmax(-1)
        >>> ledger = Contributions(
        ...     weights=weights, similarity=similarity, magnitude=magnitude,
        ...     value_norms=torch.rand(1, 2, 6) + 0.1,
        ... )
        >>> shares = ledger_shares(ledger)
        >>> bool((shares.per_head.total() - 1).abs().max() < 1e-12)
        True
    """
    logs, visible, left_out, eps = _log_ledger(contributions)
    count = visible.sum(-1, keepdim=True).clamp_min(1)

    def deviations(x: Tensor) -> Tensor:
        """From the mean of the row over visible keys; 0 elsewhere. [B, H, L, S]."""
        x = x.masked_fill(~visible, 0)
        return (x - x.sum(-1, keepdim=True) / count).masked_fill(~visible, 0)

    of_factors = {name: deviations(x) for name, x in logs.items()}
    total = sum(of_factors.values(), torch.zeros_like(of_factors["bias"]))
    # Sums over queries, [B, H, S]; over all else they are sums of these.
    seen_by = visible.sum(-2)
    energy = total.square().sum(-2)
    covariance = {name: (x * total).sum(-2) for name, x in of_factors.items()}
    rounding = (ROUNDING_ULPS * eps) ** 2

    def shares(over: int | None) -> Factors:
        pairs, below = seen_by, energy
        if over is not None:
            pairs, below = pairs.sum(over), below.sum(over)
        varies = below > rounding * pairs
        divisor = torch.where(varies, below, 1)

        def share(x: Tensor) -> Tensor:
            above = x if over is None else x.sum(over)
            return torch.where(varies, above / divisor, 0)

        return Factors(**{name: share(x) for name, x in covariance.items()})

    deviation = {name: x.sum(-2) / seen_by.clamp_min(1) for name, x in of_factors.items()}
    pairs = seen_by.sum(-1)
    return LedgerShares(
        per_head=shares(-1),
        per_token=shares(1),
        per_head_and_token=shares(None),
        deviation=Factors(**deviation),
        influence=total.sum(-2) / seen_by.clamp_min(1),
        variance=energy.sum(-1) / pairs.clamp_min(1),
        pairs=pairs,
        left_out=left_out,
    )


def _log_ledger(
    contributions: Contributions,
) -> tuple[dict[str, Tensor], Tensor, Tensor, float]:
    """The logarithms of the factors, float64, the bias with -log Z_i in it; which pairs count.

    Returns logs [B, H, L, S] (anything where not visible), visible [B, H, L, S], the number of
    pairs left out [B, H], and eps of the coarsest dtype.
    """
    weights, similarity, magnitude, value_norms = _checked_ledger(contributions)
    eps = max(torch.finfo(x.dtype).eps for x in (weights, similarity, magnitude, value_norms))
    weights = without_padding(
        weights, contributions.query_padding, contributions.key_padding, "ledger_shares"
    )
    of_keys = _in_range(magnitude) & _in_range(value_norms)
    has_weight = weights != 0
    visible = _in_range(weights) & _in_range(similarity) & of_keys.unsqueeze(-2)
    weights, similarity, magnitude, value_norms = (
        x.detach().double() for x in (weights, similarity, magnitude, value_norms)
    )
    logs = {
        "similarity": similarity.log(),
        "magnitude": magnitude.log().unsqueeze(-2).expand_as(weights),
        "value_norm": value_norms.log().unsqueeze(-2).expand_as(weights),
    }
    logs["bias"] = weights.log() - logs["similarity"] - logs["magnitude"]
    return logs, visible, (has_weight & ~visible).sum((-1, -2)), eps


def _in_range(factor: Tensor) -> Tensor:
    """Which entries have an exact logarithm: subnormal numbers have lost their digits."""
    return (factor >= torch.finfo(factor.dtype).tiny) & factor.isfinite()


def _checked_ledger(contributions: Contributions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """weights, similarity, magnitude and value norms, if they are there and fit."""
    weights = contributions.weights
    if weights is None or weights.dim() != 4:
        raise ValueError(
            "ledger_shares: contributions.weights must have shape [B, H, L, S], "
            f"got {None if weights is None else list(weights.shape)}"
        )
    B, H, L, S = weights.shape
    found = [weights]
    for name, shape in (
        ("similarity", [B, H, L, S]),
        ("magnitude", [B, H, S]),
        ("value_norms", [B, H, S]),
    ):
        factor: Tensor | None = getattr(contributions, name)
        if factor is None or list(factor.shape) != shape:
            raise ValueError(
                f"ledger_shares: contributions.{name} must have shape {shape} as its weights do, "
                f"got {None if factor is None else list(factor.shape)}"
                + (": record with the ledger" if factor is None else "")
            )
        found.append(factor)
    return found[0], found[1], found[2], found[3]
