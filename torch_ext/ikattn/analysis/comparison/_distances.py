"""How far apart two maps of the same tokens are, row by row.

A row is a distribution over keys: what a query takes from each, divided by the row's sum.
Sizes: H heads (or none), T queries, S keys; padding is cut off already. Logarithms are to base 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ikattn.analysis._sequences import AXES
from ikattn.analysis.contributions import Contributions

__all__ = ["ROW_MAPS", "Sums", "add_to", "entropy", "mixing_sums", "row_sums", "shares"]

_OTHERS = (name for name, axes in AXES.items() if axes.endswith("TS") and name != "weights")
ROW_MAPS = ("weights", *_OTHERS)
Sums = dict[str, Tensor]  # by the name of a statistic, [H] or a scalar, float64

_PAIRS_AT_ONCE = 1 << 22  # rows are gone through in pieces of 32 MiB


def shares(x: Tensor) -> Tensor:
    """Rows divided by their sums, float64; a row of zeros stays one."""
    x = x.double()
    total = x.sum(-1, keepdim=True)
    return x / total.masked_fill(total == 0, 1)


def entropy(p: Tensor) -> Tensor:
    """Of rows, in bits: ``[..., T, S]`` to ``[..., T]``."""
    in_nats: Tensor = torch.special.entr(p).sum(-1)
    return in_nats / math.log(2)


def row_sums(a: Tensor, b: Tensor) -> Sums:
    """Statistics of every pair of rows, added up over the rows.

    A row without anything in it, in either map, is no distribution and is left out.

    Args:
        a, b: One map of one sequence, of two models: ``[T, S]`` or ``[H, T, S]``.

    Returns:
        ``total_variation``, ``jensen_shannon``, ``entropy_a`` and ``entropy_b`` over ``rows``, and
        ``rank_correlation`` over ``ranked`` rows: those that have ranks to compare.
    """
    heads = a.shape[0] if a.dim() == 3 else 1
    size = max(1, _PAIRS_AT_ONCE // max(1, heads * a.shape[-1]))
    found: Sums = {}
    for part_a, part_b in zip(a.split(size, -2), b.split(size, -2), strict=True):
        add_to(found, _sums_of_piece(part_a, part_b))
    return found


def _sums_of_piece(a: Tensor, b: Tensor) -> Sums:
    p, q = shares(a), shares(b)
    counted = (p != 0).any(-1) & (q != 0).any(-1)
    entropy_a, entropy_b = entropy(p), entropy(q)
    between = entropy((p + q) / 2) - (entropy_a + entropy_b) / 2
    correlation, has_ranks = rank_correlation(p, q)
    rows = {
        "total_variation": (p - q).abs().sum(-1) / 2,
        "jensen_shannon": between.clamp_min(0),  # below it by rounding
        "entropy_a": entropy_a,
        "entropy_b": entropy_b,
    }
    found = {name: x.where(counted, 0).sum(-1) for name, x in rows.items()}
    found["rows"] = counted.double().sum(-1)
    found["rank_correlation"] = correlation.where(has_ranks, 0).sum(-1)
    found["ranked"] = has_ranks.double().sum(-1)
    return found


def rank_correlation(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Spearman's of each pair of rows, and where it exists: both ``[..., T]``.

    It is over keys that either row takes something from, so that keys hidden from a query, which
    both agree on, do not count. A row whose ranks are all the same has none.
    """
    seen = (p > 0) | (q > 0)
    x, y = _centred_ranks(p, seen), _centred_ranks(q, seen)
    norms = x.square().sum(-1) * y.square().sum(-1)
    return (x * y).sum(-1) / norms.where(norms > 0, 1).sqrt(), norms > 0


def _centred_ranks(values: Tensor, seen: Tensor) -> Tensor:
    """Ranks less their mean, 0 where not seen; those that tie have the mean of their ranks."""
    values = values.where(seen, math.inf).contiguous()
    ordered = values.sort(-1).values
    below = torch.searchsorted(ordered, values)
    up_to = torch.searchsorted(ordered, values, right=True)
    middle = seen.sum(-1, keepdim=True) / 2
    return ((below + up_to).double() / 2 - middle).where(seen, 0)


def mixing_sums(a: Contributions, b: Contributions, name: str) -> Sums:
    """Mixing ratios of a map of one sequence, added up over its tokens."""
    ratio_a, ratio_b = a.mixing_ratio.get(name), b.mixing_ratio.get(name)
    if ratio_a is None or ratio_b is None:
        return {}
    return {
        "mixing_ratio_a": ratio_a.double().sum(),
        "mixing_ratio_b": ratio_b.to(ratio_a.device).double().sum(),
        "tokens": ratio_a.new_tensor(ratio_a.numel(), dtype=torch.float64),
    }


def add_to(total: Sums, more: Sums) -> None:
    """Adds sums to those that are there."""
    for name, x in more.items():
        total[name] = total[name] + x if name in total else x
