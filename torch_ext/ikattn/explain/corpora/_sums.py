"""One sequence's part of the sums of a corpus.

Sizes: H heads (or none), L queries, S keys, A types of tokens; padding is cut off already.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ikattn.explain.comparison._distances import Sums, entropy, shares
from ikattn.maps.contribution_maps import Contributions
from ikattn.maps.ledger import LEDGER
from ikattn.maps.ledger import shares as shares_of_factors
from ikattn.maps.sequences import AXES, batch_of_one

CELLS = 16  # rows and columns of a mean map
_PAIRS_AT_ONCE = 1 << 22  # heads are gone through in pieces of 32 MiB


def sums_of_layer(maps: Contributions, queries: Tensor, keys: Tensor) -> Iterator[tuple[str, Sums]]:
    """Adds up each map of one sequence, and of the ledger the covariances of its factors.

    Args:
        maps: Without the batch axis and padding.
        queries, keys: ``[L, A]`` and ``[S, A]``, one where a token is of a type.
    """
    found = {name: getattr(maps, name) for name in AXES}
    found |= {f"mixing_ratio.{name}": ratio for name, ratio in maps.mixing_ratio.items()}
    for name, x in found.items():
        if x is None:
            continue
        if not x.isfinite().all():
            yield name, {"left_out": torch.ones((), dtype=torch.float64, device="cpu")}
            continue
        axes = AXES.get(name, "L")
        one = torch.ones((), dtype=torch.float64, device="cpu")
        if axes.endswith("LS"):
            sums = _sums_of_pairs(x, queries.to(x.device), keys.to(x.device))
            sums |= {"count": queries.sum(0)[:, None] * keys.sum(0)}
        else:
            types = keys if axes.endswith("S") else queries
            sums = {"values": x.double() @ types.to(x.device), "count": types.sum(0)}
        yield name, {key: value.cpu() for key, value in sums.items()} | {"sequences": one}
    if all(found[name] is not None for name in LEDGER):
        split = shares_of_factors({"": batch_of_one(maps)})[""]
        counts = {"split_rows": split.rows.double(), "split_left_out": split.left_out.double()}
        yield "ledger", {"covariance": split.sums, **counts}


def _sums_of_pairs(x: Tensor, queries: Tensor, keys: Tensor) -> Sums:
    """Adds up one map ``[L, S]`` or ``[H, L, S]``, a few heads at a time."""
    if x.dim() == 2:
        return _sums_of_heads(x, queries, keys)
    size = max(1, _PAIRS_AT_ONCE // max(1, x[0].numel()))
    pieces = [_sums_of_heads(part, queries, keys) for part in x.split(size)]
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _sums_of_heads(x: Tensor, queries: Tensor, keys: Tensor) -> Sums:
    x = x.double()
    p = shares(x)
    counted = (p != 0).any(-1).double()
    return {
        "values": queries.mT @ x @ keys,
        "shares": queries.mT @ p @ keys,
        "rows": counted @ queries,
        "entropy": entropy(p) @ queries,
        "map": _cells_of_rows(x) @ p @ _cells_of(x.shape[-1], x),
    }


def _cells_of(size: int, like: Tensor) -> Tensor:
    """Returns ``[size, 16]``, how much of each token lies in each of the 16 cells of an axis."""
    edges = torch.arange(CELLS + 1, dtype=torch.float64, device=like.device) * size / CELLS
    token = torch.arange(size, dtype=torch.float64, device=like.device)[:, None]
    upper = torch.minimum(edges[1:], token + 1)
    return (upper - torch.maximum(edges[:-1], token)).clamp_min(0)


def _cells_of_rows(x: Tensor) -> Tensor:
    """Returns ``[16, L]``, which takes the mean over the tokens of a cell."""
    size = x.shape[-2]
    return _cells_of(size, x).mT * (CELLS / max(1, size))
