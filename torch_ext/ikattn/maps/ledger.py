"""The ledger of a layer: which factor of a contribution makes it large, and how much of it.

Symbols: B batch, H heads, L queries, S keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ikattn._memory import takes_memory_for
from ikattn.maps.contribution_maps import Contributions
from ikattn.maps.layers import RecordedMaps, check_whole, name_of_layer
from ikattn.maps.summary import without_padding

LEDGER = ("weights", "similarity", "magnitude", "value_norms")  # maps that hold the factors
FACTORS = ("similarity", "magnitude", "value_norm", "bias")
# Logarithms whose root mean square is below this many units in the last place of the ledger's dtype
# are rounding, not variation. A weight carries the rounding of a softmax, a few tens of units.
ROUNDING_ULPS = 64
_PAIRS_AT_ONCE = 1 << 18  # of which each takes some 200 bytes


@dataclass(frozen=True)
class Split:
    """The variance of log contribution within rows, split into its factors; float64, on the CPU.

    ``..`` stands for H, of the heads of a layer, or for nothing. The four factors are those of
    ``FACTORS``, in that order.

    Attributes:
        sums: ``[.., 4, 4]``, the covariances of the factors in a row, added up over rows.
        rows: int64 ``[..]``, how many rows there were, each with at least two keys that count.
        left_out: int64 ``[..]``, how many pairs have a weight, but a factor that is 0, subnormal,
            infinite or NaN, mostly because similarity or magnitude left the range of their dtype.
    """

    sums: Tensor
    rows: Tensor
    left_out: Tensor

    @property
    def covariance(self) -> Tensor:
        """``[.., 4, 4]``, the mean over rows; NaN where there are none."""
        return self.sums / self.rows[..., None, None]

    @property
    def variance(self) -> Tensor:
        """``[..]``, of log contribution: the sum of all 16 covariances."""
        return self.covariance.sum((-1, -2))

    @property
    def shares(self) -> Tensor:
        """``[.., 4]``, of each factor in the variance; NaN where nothing varies."""
        return self.covariance.sum(-1) / self.variance[..., None]

    @property
    def correlation(self) -> Tensor:
        """``[.., 4, 4]``, within rows; NaN where one of the two does not vary."""
        deviation = self.sums.diagonal(dim1=-2, dim2=-1).sqrt()
        return self.sums / (deviation[..., None] * deviation[..., None, :])

    def over_heads(self) -> Split:
        """Returns the split of a whole layer, of the rows of all its heads."""
        return Split(self.sums.sum(0), self.rows.sum(0), self.left_out.sum(0))

    def __add__(self, other: Split) -> Split:
        """The split of the rows of both."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Split(*(one + another for one, another in pairs))


@dataclass(frozen=True)
class Shares:
    """Who makes contributions large, by layer and head. See :func:`shares`.

    ``shares[layer]``, a name or a number, is the :class:`Split` of each head, ``[H]``. Results of
    parts of a corpus add, in any order: ``one + other``, or ``sum(parts, Shares())``.

    Attributes:
        layers: The splits by layer.
    """

    layers: dict[str, Split] = field(default_factory=dict)

    def __getitem__(self, layer: str | int) -> Split:
        """The split of a layer's heads; KeyError names the layers that there are."""
        return self.layers[name_of_layer(self.layers, layer)]

    @property
    def model(self) -> Split:
        """Returns the split of the whole model, of the rows of all heads of all layers."""
        zero = torch.zeros((), dtype=torch.int64)
        none = Split(torch.zeros(4, 4, dtype=torch.float64), zero, zero)
        return sum((split.over_heads() for split in self.layers.values()), none)

    def __add__(self, other: Shares) -> Shares:
        """The shares of both parts of a corpus; a layer that one of them lacks is the other's.

        ValueError tells of a layer with another number of heads.
        """
        found = dict(self.layers)
        for name, split in other.layers.items():
            own = found.get(name)
            if own is not None and own.rows.shape != split.rows.shape:
                raise ValueError(
                    f"shares: layer {name!r} must have {len(own.rows)} heads in both, got "
                    f"{len(split.rows)}"
                )
            found[name] = split if own is None else own + split
        return Shares(found)

    def table(self) -> list[dict[str, Any]]:
        """Returns plain rows: the model, each layer, and each of its heads.

        Returns:
            Dictionaries of "layer" (None: the model), "head" (None: all), "rows", "variance", the
            share of each factor by its name, "magnitude and norm", the correlation of the two
            logarithms, and "left_out".
        """
        rows: list[tuple[str | None, int | None, Split]] = [(None, None, self.model)]
        for name, split in self.layers.items():
            rows.append((name, None, split.over_heads()))
            rows += [
                (name, h, Split(*(x[h] for x in vars(split).values())))
                for h in range(len(split.rows))
            ]
        return [
            {"layer": name, "head": head, "rows": int(one.rows), "variance": float(one.variance)}
            | dict(zip(FACTORS, one.shares.tolist(), strict=True))
            | {"magnitude and norm": float(one.correlation[1, 2]), "left_out": int(one.left_out)}
            for name, head, one in rows
        ]


@takes_memory_for("the factors of every pair and head")
def shares(maps: RecordedMaps | Mapping[str, Contributions]) -> Shares:
    r"""Splits the variance of log contribution into similarity, key magnitude and value norm.

    A contribution is a product, so its logarithm is a sum:

    .. math::
        \log c_{ij} = \log s_{ij} + \log m_j + \log n_j + b_{ij} - \log Z_i

    with similarity s, magnitude m, value norm n, bias b (a float mask, a key bias, a position bias)
    and row sum Z, the same for all keys that query i sees. Over these keys

    .. math::
        \operatorname{Var}(\log c) = \sum_{x, y} \operatorname{Cov}(x, y), \qquad
        \text{share}_x = \operatorname{Cov}(x, \log c) / \operatorname{Var}(\log c)

    exactly, with x and y among the four. The covariances are averaged over rows, and shares are of
    the mean. docs/guide/analysis_aggregation.md tells what they mean, and which pairs count. A
    block of rows is computed at a time, in float64 and without gradient.

    Args:
        maps: A recording of any number of calls, made with ``maps=("ledger",)``, or the layers of
            one call. Results of several recordings add.

    Returns:
        The :class:`Shares`: covariances, variances and shares of heads, layers and model.

    Raises:
        ValueError: There is no layer, as in a recording of graphs; or one lacks weights,
            similarity, magnitude or value norms, their shapes do not fit, or they were reduced.
        LookupError: Nothing was recorded.

    Source: the product is that of K. Song et al., "Implicit Kernel Attention", AAAI 2021, and
    G. Kobayashi et al., "Attention is Not Only a Weight", EMNLP 2020; the split of its logarithm
    was derived for this project.

    Example:
        >>> import torch, ikattn
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> with torch.no_grad(), ikattn.record(model, maps=("ledger",)) as recording:
        ...     _ = model(torch.randn(3, 7, 16))
        >>> found = ikattn.maps.shares(recording)
        >>> found["layers.1.self_attn"].shares.shape
        torch.Size([4, 4])
        >>> round(float(found.model.shares.sum()), 9)
        1.0
    """
    batches = maps.batches if isinstance(maps, RecordedMaps) else [maps]
    if isinstance(maps, RecordedMaps):
        maps.check_recorded()
    found = Shares()
    for layers in batches:
        if not layers:
            raise ValueError("shares: maps must hold layers with queries and keys, got none")
        found += Shares({name: _split(layer, name) for name, layer in layers.items()})
    return found


def _split(layer: Contributions, name: str) -> Split:
    """The split of each head, [H], of one layer of one call."""
    check_whole(layer, name, "shares", rows_too=False)
    weights, similarity, magnitude, value_norms = _checked_ledger(layer, name)
    B, H, L, S = weights.shape
    eps = max(torch.finfo(x.dtype).eps for x in (weights, similarity, magnitude, value_norms))
    rounding = (ROUNDING_ULPS * eps) ** 2
    weights = without_padding(weights, layer.query_padding, layer.key_padding, "shares")
    of_keys = (_in_range(magnitude) & _in_range(value_norms)).flatten(0, 1)  # [B H, S]
    m, n = (x.detach().double().log().flatten(0, 1) for x in (magnitude, value_norms))
    sums = torch.zeros(B * H, 4, 4, dtype=torch.float64, device=weights.device)
    rows, left_out = (torch.zeros(B * H, dtype=torch.int64, device=sums.device) for _ in range(2))
    w, s = (x.detach().flatten(0, 2) for x in (weights, similarity))  # [B H L, S]
    step = max(1, _PAIRS_AT_ONCE // max(1, S))
    for first in range(0, len(w), step):
        w_, s_ = w[first : first + step], s[first : first + step]  # [R, S]
        head = torch.arange(first, first + len(w_), device=w.device) // L
        visible = _in_range(w_) & _in_range(s_) & of_keys[head]
        count = visible.sum(-1)
        logs = torch.stack([s_.double().log(), m[head], n[head]], 1)  # [R, 3, S]
        bias = w_.double().log() - logs[:, 0] - logs[:, 1]  # with -log Z, which falls away
        logs = torch.cat([logs, bias[:, None]], 1).masked_fill(~visible[:, None], 0)
        mean = logs.sum(-1, keepdim=True) / count.clamp_min(1)[:, None, None]
        off = (logs - mean).masked_fill(~visible[:, None], 0)
        covariance = off @ off.mT / count.clamp_min(1)[:, None, None]
        variance = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
        covariance = torch.where((variance > rounding)[:, None, None], covariance, 0)
        counted = count > 1
        sums.index_add_(0, head, covariance * counted[:, None, None])
        rows.index_add_(0, head, counted.long())
        left_out.index_add_(0, head, ((w_ != 0) & ~visible).sum(-1))
    return Split(*(x.unflatten(0, (B, H)).sum(0).cpu() for x in (sums, rows, left_out)))


def _in_range(factor: Tensor) -> Tensor:
    """Tells which entries have an exact logarithm: subnormal numbers have lost their digits."""
    return (factor >= torch.finfo(factor.dtype).tiny) & factor.isfinite()


def _checked_ledger(layer: Contributions, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """weights, similarity, magnitude and value norms, if they are there and fit."""
    weights = layer.weights
    if weights is None or weights.dim() != 4:
        raise ValueError(
            f"shares: weights of layer {name!r} must have shape [B, H, L, S], got "
            f"{None if weights is None else list(weights.shape)}"
            + (": record with the ledger" if weights is None else "")
        )
    B, H, L, S = weights.shape
    found = [weights]
    for factor_name in LEDGER[1:]:
        shape = [B, H, L, S] if factor_name == "similarity" else [B, H, S]
        factor: Tensor | None = getattr(layer, factor_name)
        if factor is None or list(factor.shape) != shape:
            raise ValueError(
                f"shares: {factor_name} of layer {name!r} must have shape {shape} as its weights "
                f"do, got {None if factor is None else list(factor.shape)}"
                + (": record with the ledger" if factor is None else "")
            )
        found.append(factor)
    return found[0], found[1], found[2], found[3]
