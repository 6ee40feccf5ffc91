"""Maps made for some queries at a time: of chosen queries, and reduced as they are made.

Sizes: B batch, H query heads, L queries, S keys, R rows that are made.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from ikattn.maps.contribution_maps import Contributions
from ikattn.maps.reduction import (
    ColumnSums,
    Diagonal,
    FunctionOfRows,
    Groups,
    PairMap,
    Reduced,
    Reducing,
    Reduction,
    TopSources,
    own_tokens,
    reduction_of,
)
from ikattn.maps.sequences import AXES
from ikattn.recorder.calls.attention_call import AttentionCall
from ikattn.recorder.plan.plan import Plan
from ikattn.recorder.plan.run_maps import Surroundings, make_maps, stacked

# Maps that need more than the norms of sums of a token's vectors.
_OF_THE_BLOCK = {"with_residual", "with_norm", "encoder", "alti", "mixing_ratio"}

Queries: TypeAlias = slice | Sequence[int]

# Numbers of a map that are held while it is reduced: 64 MiB in float32.
MOST_HELD = 1 << 24
# Below this many a map is made at once; above it in four blocks at least.
FEW = 1 << 20
# Numbers of [B, keys, H, D] that are held while coordinates are made.
MOST_NUMBERS = 1 << 22


def rows_asked(reduce: Any, queries: Queries | None) -> RowsAsked | None:
    """Returns the rows that reduce and queries of ``record`` ask for; None: all.

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
    return [name for name in names if "L" in AXES.get(name, "")]


class Chosen(NamedTuple):
    """The queries of a call whose rows are made.

    Attributes:
        numbers: What ``Contributions.rows`` says of them.
        places: Where they are among the L of the call, for each sequence, or once where all have
            them there; None where a sequence has no such query.
    """

    numbers: Sequence[int]
    places: Sequence[Sequence[int | None]]

    def are_all(self, L: int) -> bool:
        """Whether the rows are those of L queries, in order."""
        if len(self.numbers) != L or self.places[0] == range(L):
            return len(self.numbers) == L
        return all(place in (None, i) for each in self.places for i, place in enumerate(each))


@dataclass(frozen=True)
class RowsAsked:
    """Rows of maps to make, and the reduction to keep of them.

    Attributes:
        queries: Their numbers among each sequence's own tokens in each call; less than 0: from the
            last. None: all, padding too.
        reduction: What to keep of maps of queries and keys. None: their rows.
    """

    queries: slice | tuple[int, ...] | None = None
    reduction: Reduction | None = None

    def of_call(self, call: AttentionCall, layer: str) -> Chosen:
        """The queries of a call.

        Raises:
            ValueError: A query that a sequence does not have, or one that is named twice.
        """
        L = call.sizes[2]
        if self.queries is None:
            return Chosen(range(L), [range(L)])
        sequences = own_tokens(call.query_padding, L)
        if len(sequences) == 1 and len(sequences[0]) == L:
            chosen = self._of_sequence(L, layer, "")
            return Chosen(chosen, [chosen])
        are_alike = len({len(own) for own in sequences}) == 1
        found: list[dict[int, int]] = []  # the places of each sequence's queries, by number
        for b, own in enumerate(sequences):
            chosen = self._of_sequence(len(own), layer, f"sequence {b} of ")
            numbers = chosen if are_alike else self._as_asked(chosen, len(own))
            found.append({n: own[k] for n, k in zip(numbers, chosen, strict=True)})
        numbers = list(found[0])
        if any(list(each) != numbers for each in found):
            assert isinstance(self.queries, slice)
            is_backward = (self.queries.step or 1) < 0
            numbers = sorted({n for each in found for n in each}, reverse=is_backward)
        places = [[each.get(n) for n in numbers] for each in found]
        return Chosen(numbers, places[:1] if all(each == places[0] for each in places) else places)

    def _of_sequence(self, n: int, layer: str, sequence: str) -> Sequence[int]:
        """The numbers, from 0 on, of the queries of a sequence of n tokens."""
        if isinstance(self.queries, slice):
            return range(*self.queries.indices(n))
        assert self.queries is not None
        which = f"the {n} tokens without padding of {sequence}{layer}"
        which = which if sequence else f"the queries of {layer}"
        if any(not -n <= query < n for query in self.queries):
            raise ValueError(
                f"record: queries must be in [{-n}, {n}), {which} in this call, got "
                f"{list(self.queries)}"
            )
        numbers = [query % n for query in self.queries]
        if len(set(numbers)) < len(numbers):
            which = which if sequence else f"the {n} of {layer}"
            raise ValueError(
                f"record: queries must name each query once, got {list(self.queries)} for {which}"
            )
        return numbers

    def _as_asked(self, numbers: Sequence[int], n: int) -> Sequence[int]:
        """Returns the numbers of queries among n tokens, negative ones counted from the end."""
        if not isinstance(self.queries, slice):
            assert self.queries is not None
            return self.queries
        start, step = self.queries.start, self.queries.step or 1
        is_from_last = step < 0 if start is None else start < 0
        return [number - n for number in numbers] if is_from_last else numbers

    def make(
        self,
        call: AttentionCall,
        projection: Tensor,
        around: Surroundings,
        wanted: Collection[str],
        layer: str,
    ) -> Contributions:
        """``make_maps`` of these rows, reduced; ``[L, S]`` does not exist where it is reduced."""
        chosen = self.of_call(call, layer)
        if len(chosen.places) == 1:
            own = [place for place in chosen.places[0] if place is not None]
            runs = _runs(chosen.places[0] if isinstance(chosen.places[0], range) else own)
            found = self._make(call, projection, around, wanted, layer, runs)
        else:
            for name in pair_maps(wanted):  # names the sequence that lacks a key
                self._begin(call, layer, name, len(chosen.numbers))
            items = []
            for b, places in enumerate(chosen.places):
                runs = _runs([place for place in places if place is not None])
                of_item = call.item(b), projection, around.item(b)
                items.append(self._make(*of_item, wanted, layer, runs))
            found = _one_batch(items, chosen, layer, has_rows=self.reduction != ColumnSums())
        if not chosen.are_all(call.sizes[2]):
            found.rows = torch.tensor(list(chosen.numbers), dtype=torch.int64)
        return found

    def _begin(self, call: AttentionCall, layer: str, name: str, count: int) -> Reducing | None:
        if self.reduction is None:
            return None
        B, H, _, S = call.sizes
        shape = (B, H, count, S) if "H" in AXES[name] else (B, count, S)
        about = PairMap(layer, name, shape, None if call.kind == "cross" else call.diagonal)
        if isinstance(self.reduction, Groups):
            return self.reduction.begin(about, call.key_padding)
        return self.reduction.begin(about)

    def _make(
        self,
        call: AttentionCall,
        projection: Tensor,
        around: Surroundings,
        wanted: Collection[str],
        layer: str,
        runs: list[range],
    ) -> Contributions:
        S, count = call.sizes[3], sum(map(len, runs))
        begun = {name: self._begin(call, layer, name, count) for name in pair_maps(wanted)}
        states = {name: state for name, state in begun.items() if state is not None}
        if self.reduction is not None:
            call = dataclasses.replace(call, streams=True)
            rows = _rows_at_once(call, wanted)
            if rows >= S and isinstance(self.reduction, FunctionOfRows):
                rows = max(1, S // 2)  # no square: a sum along the wrong axis has another shape
            runs = [run[i : i + rows] for run in runs for i in range(0, max(1, len(run)), rows)]
            # blocks pay for all D dimensions; on a GPU torch factors one token after the other
            is_plain = call.value.device.type == "cpu" and call.gate is None
            pays = len(runs) > 2 and projection.size(0) > 2 * call.sizes[1]
            if is_plain and pays and not (torch.is_grad_enabled() or _OF_THE_BLOCK & set(wanted)):
                call, projection = in_own_coordinates(call, projection)
        of_keys = [name for name in wanted if name in ("value_norms", "magnitude")]
        found = make_maps(call.narrow(0, 0), projection, around.narrow(0, 0), of_keys)
        of_rows = [name for name in wanted if name not in of_keys]
        parts, came = [], set[str]()
        for run in runs:
            ends = run.start, run.stop
            block = call.narrow(*ends).without_later_keys()
            part = _widened(make_maps(block, projection, around.narrow(*ends), of_rows), S)
            for name, state in states.items():
                rows_of_run = getattr(part, name)
                if rows_of_run is not None:  # which the reduction takes
                    state.add(rows_of_run, run)
                    setattr(part, name, None)
                    came.add(name)
            parts.append(part)
        found = stacked(found, parts)
        # a map that a run turned out not to have has no rows
        found.reduced = {name: _kept(states[name], name, layer) for name in states if name in came}
        return found


def _runs(places: Sequence[int]) -> list[range]:
    """Places as runs of consecutive ones; one empty run where there is none."""
    if isinstance(places, range) and places.step == 1 and places:
        return [places]
    runs: list[range] = []
    for place in places:
        if runs and runs[-1].stop == place:
            runs[-1] = range(runs[-1].start, place + 1)
        else:
            runs.append(range(place, place + 1))
    return runs or [range(0)]


def _one_batch(
    items: Sequence[Contributions], chosen: Chosen, layer: str, *, has_rows: bool
) -> Contributions:
    """The maps of each sequence as those of a batch; the rows that one lacks are 0, and padding.

    ``has_rows``: whether what was reduced may have an axis of rows.
    """
    R = len(chosen.numbers)
    rows = [[i for i, place in enumerate(each) if place is not None] for each in chosen.places]

    def placed(parts: Sequence[Tensor], axis: int, fill: int = 0) -> Tensor:
        found = []
        for x, own in zip(parts, rows, strict=True):
            sizes = [*x.shape[:axis], R, *x.shape[axis:][1:]]
            index = torch.tensor(own, dtype=torch.int64, device=x.device)
            found.append(x.new_full(sizes, fill).index_copy(axis, index, x))
        return torch.cat(found)

    def reduced(name: str) -> Reduced:
        axis = 2 if "H" in AXES[name] else 1
        kept = [item.reduced[name] for item in items]
        largest = [each for each in kept if isinstance(each, TopSources)]
        if largest:
            values, sources = zip(*largest, strict=True)
            return TopSources(placed(values, axis), placed(sources, axis, -1))
        tensors = [each for each in kept if isinstance(each, Tensor)]
        pairs = list(zip(tensors, rows, strict=True))
        if has_rows and all(x.dim() > axis and x.size(axis) == len(own) for x, own in pairs):
            return placed(tensors, axis)
        if len({x.shape for x in tensors}) > 1 or any(x.shape[:1] != (1,) for x in tensors):
            raise ValueError(
                f"record: padding makes the rows of each sequence a map of its own, [1, .., R, S], "
                f"of which a reduction must return [1, ..], with R rows or of one size, for "
                f"{name!r} of {layer}; got {[list(x.shape) for x in tensors]}"
            )
        return torch.cat(tensors)

    changes: dict[str, Any] = {}
    for name, axes in AXES.items():
        found = [x for item in items if (x := getattr(item, name)) is not None]
        if found:
            changes[name] = placed(found, 1 + axes.index("L")) if "L" in axes else torch.cat(found)
    hidden = [item.key_padding for item in items if item.key_padding is not None]
    first = items[0]
    padding = torch.tensor([[place is None for place in each] for each in chosen.places])
    assert first.query_padding is not None
    return dataclasses.replace(
        first,
        **changes,
        mixing_ratio={
            name: placed([item.mixing_ratio[name] for item in items], 1)
            for name in first.mixing_ratio
        },
        query_padding=padding.to(first.query_padding.device),
        key_padding=torch.cat(hidden) if hidden else None,
        reduced={name: reduced(name) for name in first.reduced},
    )


def _kept(state: Reducing, name: str, layer: str) -> Reduced:
    kept = state.finish()
    if not isinstance(kept, (Tensor, TopSources)):
        raise TypeError(
            f"record: finish of a reduction must return a tensor or TopSources, got "
            f"{type(kept).__name__}, for {name!r} of {layer}"
        )
    return kept


def _rows_at_once(call: AttentionCall, wanted: Collection[str]) -> int:
    B, H, L, S = call.sizes
    holds_weights = call.has_own_softmax or {"alti", "projection"} & set(wanted)
    is_by_head = any("H" in AXES[name] for name in pair_maps(wanted))
    row = max(1, B * S * (H if holds_weights or is_by_head else 1))
    if row * L <= FEW:
        return max(1, L)
    return max(1, min(MOST_HELD // row, -(-L // 4)))


def _widened(maps: Contributions, S: int) -> Contributions:
    """``maps`` with the columns of keys that were left out, which nobody sees: 0."""
    for name in pair_maps(AXES):
        rows = getattr(maps, name)
        if rows is not None and rows.size(-1) < S:
            setattr(maps, name, pad(rows, (0, S - rows.size(-1))))
    return maps


def in_own_coordinates(call: AttentionCall, projection: Tensor) -> tuple[AttentionCall, Tensor]:
    """Returns a run with values ``[B, H, S, H]``, and the out-projection ``[H, H H]`` for it.

    Norms of sums of a token's vectors f_h(x_j) = W_O^h v_j^h, ``[H, D]``, depend on nothing but the
    triangular factor of these, ``[H, H]``, which ``streamed_contributions`` makes once for every
    call. Blocks that are given its columns as values do not pay for D again: of a block of 256
    queries of 32 heads in 4096 dimensions that is nine tenths.

    ``projection [D, H d_v]`` has a D of at least H. Maps without a residual, norms and mixing
    ratios are those of ``call``.
    """
    B, H, _, S = call.sizes
    D, groups = projection.size(0), H // call.key.size(1)
    by_head = projection.to(call.value.dtype).unflatten(1, (H, -1)).permute(1, 2, 0)  # [H, d_v, D]
    value = call.value.repeat_interleave(H // call.value.size(1), 1)
    factors = value.new_empty(B, H, S, H)
    keys = max(1, MOST_NUMBERS // max(1, B * H * D))
    for first in range(0, S, keys):
        part = slice(first, first + keys)
        vectors = (value[:, :, part] @ by_head).transpose(1, 2).contiguous()  # [B, keys, H, D]
        columns = torch.linalg.qr(vectors.mT, mode="r").R  # [B, keys, H, H]
        factors[:, :, part] = columns.permute(0, 3, 1, 2)
    own = torch.eye(H).to(factors).repeat(1, H)
    key = call.key.repeat_interleave(groups, 1)
    return dataclasses.replace(call, key=key, value=factors), own
