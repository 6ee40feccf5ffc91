"""How far apart two maps of the same tokens are, row by row.

A row is a distribution over keys: what a query takes from each, divided by the row's sum. Weights
of a delta rule have signs, which distributions leave out and ranks do not.
Sizes: H heads (or none), L queries, S keys; padding is cut off already. Logarithms are to base 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ikattn.maps.contribution_maps import Contributions
from ikattn.maps.sequences import AXES
from ikattn.maps.summary import row_shares

_OTHERS = (name for name, axes in AXES.items() if axes.endswith("LS") and name != "weights")
ROW_MAPS = ("weights", *_OTHERS)
Sums = dict[str, Tensor]  # statistics by name, [H] or scalars, float64

_PAIRS_AT_ONCE = 1 << 22  # rows are gone through in pieces of 32 MiB


def shares(x: Tensor) -> Tensor:
    """Divides rows of magnitudes by their sums, in float64; a row of zeros stays one."""
    return row_shares(x.double().abs())


def entropy(p: Tensor) -> Tensor:
    """Returns the entropy of rows in bits, ``[..., L, S]`` to ``[..., L]``."""
    in_nats: Tensor = torch.special.entr(p).sum(-1)
    return in_nats / math.log(2)


def row_sums(a: Tensor, b: Tensor, *, ranks: bool = True) -> Sums:
    """Adds up statistics of every pair of rows of one map of one sequence, of two models.

    A row without anything in it, in either map, is no distribution and is left out. Found are
    ``total_variation``, ``jensen_shannon``, ``entropy_a`` and ``entropy_b`` over ``rows``, and
    ``rank_correlation``, which takes longer than all else, over ``ranked`` rows: those that have
    ranks to compare.
    """
    heads = a.shape[0] if a.dim() == 3 else 1
    size = max(1, _PAIRS_AT_ONCE // max(1, heads * a.shape[-1]))
    found: Sums = {}
    for part_a, part_b in zip(a.split(size, -2), b.split(size, -2), strict=True):
        p, q = shares(part_a), shares(part_b)
        counted = (p != 0).any(-1) & (q != 0).any(-1)
        entropy_a, entropy_b = entropy(p), entropy(q)
        between = entropy((p + q) / 2) - (entropy_a + entropy_b) / 2
        rows = {
            "total_variation": (p - q).abs().sum(-1) / 2,
            "jensen_shannon": between.clamp_min(0),  # below it by rounding
            "entropy_a": entropy_a,
            "entropy_b": entropy_b,
        }
        add_to(found, {name: x.where(counted, 0).sum(-1) for name, x in rows.items()})
        add_to(found, {"rows": counted.double().sum(-1)})
        if ranks:
            correlation, has_ranks = rank_correlation(part_a, part_b)
            of_ranks = {"rank_correlation": correlation, "ranked": has_ranks.double()}
            add_to(found, {name: x.sum(-1) for name, x in of_ranks.items()})
    return found


def rank_correlation(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns Spearman's correlation of pairs of rows, or 0, and where there is one, ``[..., L]``.

    It is over keys that either row takes something from, so that keys hidden from a query, which
    both agree on, do not count. A row whose ranks are all the same has none; that of a row with
    numbers that are not finite is NaN.
    """
    seen = (a != 0) | (b != 0)
    x, y = _centred_ranks(a, seen), _centred_ranks(b, seen)
    norms = x.square().sum(-1) * y.square().sum(-1)
    correlation = (x * y).sum(-1) / norms.masked_fill(norms == 0, 1).sqrt()
    is_finite = (a.isfinite() & b.isfinite()).all(-1)
    return correlation.masked_fill(~is_finite, math.nan), (norms > 0) | ~is_finite


def _centred_ranks(values: Tensor, seen: Tensor) -> Tensor:
    """Returns ranks less their mean, 0 where not seen; ties have the mean of their ranks."""
    values = values.where(seen, math.inf)
    ordered, order = values.sort(-1)
    positions = torch.arange(values.shape[-1], dtype=torch.float64, device=values.device)
    ranks = positions.new_empty(values.shape).scatter_(-1, order, positions.expand_as(values))
    ties = (ordered[..., 1:] == ordered[..., :-1]) & ordered[..., 1:].isfinite()
    tied = ties.any(-1)
    if tied.any():  # few rows, mostly, and the search takes longer than the rest
        below = torch.searchsorted(ordered[tied], values[tied])
        up_to = torch.searchsorted(ordered[tied], values[tied], right=True)
        ranks[tied] = (below + up_to - 1).double() / 2
    middle = (seen.sum(-1, keepdim=True) - 1) / 2
    return (ranks - middle).where(seen, 0)


def mixing_sums(a: Contributions, b: Contributions, name: str) -> Sums:
    """Adds up mixing ratios of a map of one sequence over its tokens."""
    ratio_a, ratio_b = a.mixing_ratio.get(name), b.mixing_ratio.get(name)
    if ratio_a is None or ratio_b is None:
        return {}
    return {
        "mixing_ratio_a": ratio_a.double().sum(),
        "mixing_ratio_b": ratio_b.to(ratio_a.device).double().sum(),
        "tokens": ratio_a.new_tensor(ratio_a.numel(), dtype=torch.float64),
    }


def add_to(total: Sums, more: Sums) -> None:
    for name, x in more.items():
        total[name] = total[name] + x if name in total else x
