"""Maps made for some queries at a time: of chosen queries, and reduced as they are made.

Sizes: B batch, H query heads, L queries, S keys, R rows that are made.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from ikattn.analysis._recorder.attention_call import AttentionCall
from ikattn.analysis._recorder.coordinates import in_own_coordinates, pays
from ikattn.analysis._recorder.plan import Plan
from ikattn.analysis._recorder.run_maps import Surroundings, make_maps, stacked
from ikattn.analysis._sequences import AXES
from ikattn.analysis.contributions import Contributions
from ikattn.analysis.reduction import (
    Diagonal,
    FunctionOfRows,
    PairMap,
    Reduced,
    Reducing,
    Reduction,
    TopSources,
    reduction_of,
)

__all__ = ["Queries", "RowsAsked", "check_kinds", "pair_maps", "rows_asked"]

# Maps that need more than the norms of sums of a token's vectors.
_OF_THE_BLOCK = {"with_residual", "with_norm", "encoder", "alti", "mixing_ratio"}

Queries: TypeAlias = slice | Sequence[int]

# Of a map, the numbers that are held while it is reduced: 64 MiB in float32.
MOST_HELD = 1 << 24
# Below this many a map is made at once; above it in four blocks at least.
FEW = 1 << 20


def rows_asked(reduce: Any, queries: Queries | None) -> RowsAsked | None:
    """What ``record`` was given as reduce and queries; None: nothing.

    Raises:
        TypeError: Neither a slice of whole numbers nor a list of them, or no reduction.
        ValueError: The list is empty, or a name of no reduction.
    """
    if reduce is None and queries is None:
        return None
    return RowsAsked(_checked(queries), None if reduce is None else reduction_of(reduce))


def _checked(queries: Queries | None) -> slice | tuple[int, ...] | None:
    if queries is None:
        return None
    try:
        if isinstance(queries, slice):
            queries.indices(0)
            return queries
        if isinstance(queries, str) or any(isinstance(query, bool) for query in queries):
            raise TypeError
        listed = tuple(operator.index(query) for query in queries)
    except (TypeError, ValueError):
        raise TypeError(
            f"record: queries must be a slice or a list of whole numbers, got {queries!r}"
        ) from None
    if not listed:
        raise ValueError("record: queries must name at least one query, got none")
    return listed


def check_kinds(plans: Iterable[Plan], rows: RowsAsked) -> None:
    """Raises ValueError where a layer is known to have no diagonal, and that is what is asked for.

    Other layers of cross-attention are found when they run.
    """
    if isinstance(rows.reduction, Diagonal):
        for plan in plans:
            if plan.parts.kind == "cross":
                rows.reduction.begin(PairMap(plan.name, "", (), None))


def pair_maps(names: Iterable[str]) -> list[str]:
    """Those of the names that are maps of queries and keys."""
    return [name for name in names if "L" in AXES.get(name, "")]


@dataclass(frozen=True)
class RowsAsked:
    """Which rows of maps to make, and what to keep of them.

    Attributes:
        queries: Their numbers in each call; less than 0: from the end. None: all.
        reduction: What to keep of maps of queries and keys. None: their rows.
    """

    queries: slice | tuple[int, ...] | None = None
    reduction: Reduction | None = None

    def of_call(self, L: int, layer: str) -> list[range]:
        """The queries of a call of L, as runs of consecutive ones.

        Raises:
            ValueError: A query that the call does not have, or one that is named twice.
        """
        if self.queries is None:
            return [range(L)]
        if isinstance(self.queries, slice):
            numbers: Sequence[int] = range(*self.queries.indices(L))
        else:
            if any(not -L <= query < L for query in self.queries):
                raise ValueError(
                    f"record: queries must be in [{-L}, {L}), the queries of {layer} in this "
                    f"call, got {list(self.queries)}"
                )
            numbers = [query % L for query in self.queries]
            if len(set(numbers)) < len(numbers):
                raise ValueError(
                    f"record: queries must name each query once, got {list(self.queries)} for the "
                    f"{L} of {layer}"
                )
        runs: list[range] = []
        for number in numbers:
            if runs and runs[-1].stop == number:
                runs[-1] = range(runs[-1].start, number + 1)
            else:
                runs.append(range(number, number + 1))
        return runs or [range(0)]

    def make(
        self,
        call: AttentionCall,
        projection: Tensor,
        around: Surroundings,
        wanted: Collection[str],
        layer: str,
    ) -> Contributions:
        """``make_maps`` of these rows, reduced; ``[L, S]`` does not exist where it is reduced."""
        B, H, L, S = call.sizes
        runs = self.of_call(L, layer)
        count = sum(map(len, runs))
        states: dict[str, Reducing] = {}
        if self.reduction is not None:
            diagonal = None if call.kind == "cross" else call.diagonal
            for name in pair_maps(wanted):
                shape = (B, H, count, S) if "H" in AXES[name] else (B, count, S)
                states[name] = self.reduction.begin(PairMap(layer, name, shape, diagonal))
            call = dataclasses.replace(call, streams=True)
            rows = _rows_at_once(call, wanted)
            if rows >= S and isinstance(self.reduction, FunctionOfRows):
                rows = max(1, S // 2)  # no square: a sum along the wrong axis has another shape
            runs = _blocks(runs, rows)
            if not _OF_THE_BLOCK & set(wanted) and pays(call, projection, len(runs)):
                call, projection = in_own_coordinates(call, projection)
        of_keys = [name for name in wanted if name in ("value_norms", "magnitude")]
        found = make_maps(call.narrow(0, 0), projection, around.narrow(0, 0), of_keys)
        of_rows = [name for name in wanted if name not in of_keys]
        parts, came = [], set[str]()
        for run in runs:
            ends = run.start, run.stop
            block = call.narrow(*ends).without_later_keys()
            part = _widened(make_maps(block, projection, around.narrow(*ends), of_rows), S)
            came.update(name for name in states if getattr(part, name) is not None)
            parts.append(_without_rows(part, states, run))
        found = stacked(found, parts)
        # a map that a run turned out not to have has no rows
        found.reduced = {name: _kept(states[name], name, layer) for name in states if name in came}
        if runs[0].start != 0 or len(runs) > 1 or count != L:
            made = torch.tensor([query for run in runs for query in run], dtype=torch.int64)
            found.rows = None if torch.equal(made, torch.arange(L)) else made
        return found


def _kept(state: Reducing, name: str, layer: str) -> Reduced:
    kept = state.finish()
    if not isinstance(kept, (Tensor, TopSources)):
        raise TypeError(
            f"record: finish of a reduction must return a tensor or TopSources, got "
            f"{type(kept).__name__}, for {name!r} of {layer}"
        )
    return kept


def _rows_at_once(call: AttentionCall, wanted: Collection[str]) -> int:
    """How many rows of its maps are held at a time."""
    B, H, L, S = call.sizes
    holds_weights = call.has_own_softmax or "alti" in wanted
    is_by_head = any("H" in AXES[name] for name in pair_maps(wanted))
    row = max(1, B * S * (H if holds_weights or is_by_head else 1))
    if row * L <= FEW:
        return max(1, L)
    return max(1, min(MOST_HELD // row, -(-L // 4)))


def _blocks(runs: Iterable[range], rows: int) -> list[range]:
    return [run[first : first + rows] for run in runs for first in range(0, max(1, len(run)), rows)]


def _widened(maps: Contributions, S: int) -> Contributions:
    """``maps`` with the columns of keys that were left out, which nobody sees: 0."""
    for name in pair_maps(AXES):
        rows = getattr(maps, name)
        if rows is not None and rows.size(-1) < S:
            setattr(maps, name, pad(rows, (0, S - rows.size(-1))))
    return maps


def _without_rows(
    maps: Contributions, states: dict[str, Reducing], queries: range
) -> Contributions:
    """``maps`` without those of queries and keys, which their reductions have taken."""
    for name, state in states.items():
        rows = getattr(maps, name)
        if rows is not None:
            state.add(rows, queries)
            setattr(maps, name, None)
    return maps
