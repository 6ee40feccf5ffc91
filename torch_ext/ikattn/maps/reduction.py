"""Reductions of maps whose rows are too many to hold: sums, the diagonal, the largest sources.

Symbols: B batch, H heads, L queries, S keys; R rows of a block. A map of queries and keys is
``[B, L, S]``, or ``[B, H, L, S]`` where each head has its own; ``..`` stands for B, or B and H. Its
rows come in blocks, ``[.., R, S]``, the first ones first, so that ``[L, S]`` never exists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad


def own_tokens(padding: Tensor | None, size: int) -> list[Sequence[int]]:
    """The places of the tokens of each sequence; once, of all, where there is no padding."""
    if padding is None or not bool(padding.any()):
        return [range(size)]
    return [(~hidden).nonzero()[:, 0].tolist() for hidden in padding.cpu()]


class TopSources(NamedTuple):
    """The keys that each query draws most from.

    Attributes:
        values: ``[.., L, k]``, the largest first.
        sources: int64, likewise: their keys; -1 where a row has no more entries but 0. They mean
            nothing where values are NaN.
    """

    values: Tensor
    sources: Tensor


Reduced: TypeAlias = Tensor | TopSources


class PairMap(NamedTuple):
    """A map, as a reduction is told of it before its rows come.

    Attributes:
        layer: The name of its layer.
        name: Of the map, for example "summed".
        shape: ``(.., L, S)``, where L counts the rows that will come.
        diagonal: The token of query i is that of key i + diagonal; None in cross-attention.
    """

    layer: str
    name: str
    shape: tuple[int, ...]
    diagonal: int | None


class Reducing(Protocol):
    """One map while its rows come."""

    def add(self, rows: Tensor, queries: range) -> None:
        """Takes rows ``[.., R, S]``, those of these R queries, padding counted."""

    def finish(self) -> Reduced:
        """Returns the result, when all rows have come."""


@runtime_checkable
class Reduction(Protocol):
    """A reduction of each map of queries and keys, for ``ikattn.record(reduce=...)``.

    A reduction of your own is an object with :meth:`begin`. Several threads may call it. Where
    padding sets the rows of ``queries=`` at other places in each sequence, each is reduced alone,
    as a batch of one, and what they return is joined along its first axis.
    """

    def begin(self, about: PairMap) -> Reducing:
        """Called for each map, before its rows come.

        Raises:
            ValueError: The reduction is not defined for it.
        """


@dataclass(frozen=True)
class ColumnSums:
    """The sums of columns, ``[.., S]``: what each token gives away, to all queries together."""

    def begin(self, about: PairMap) -> Reducing:
        return _Sums()


class _Sums:
    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def add(self, rows: Tensor, queries: range) -> None:
        sums = rows.sum(-2)
        self._sums = sums if self._sums is None else self._sums + sums

    def finish(self) -> Tensor:
        assert self._sums is not None
        return self._sums


@dataclass(frozen=True)
class Diagonal:
    """The part that each token takes from itself, ``[.., L]``; 0 where a query has no own key.

    Raises:
        ValueError: From ``begin``, of cross-attention: its queries are not among its keys.
    """

    def begin(self, about: PairMap) -> Reducing:
        if about.diagonal is None:
            raise ValueError(
                f"record: reduce='diagonal' is not defined for {about.layer}, which is "
                "cross-attention: its queries are not among its keys; leave it out by layers="
            )
        diagonal = about.diagonal

        def own(rows: Tensor, queries: range) -> Tensor:
            found = rows.diagonal(queries.start + diagonal, -2, -1)
            return pad(found, (0, rows.size(-2) - found.size(-1)))

        return _ByRows(own, -1)


@dataclass(frozen=True)
class TopK:
    """The k largest magnitudes of each row, as :class:`TopSources` ``[.., L, min(k, S)]``.

    Args:
        k: How many, at least 1.

    Raises:
        ValueError: k is no whole number from 1 on.

    Example:
        >>> import torch, ikattn
        >>> from ikattn.maps import TopK
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2).eval()
        >>> with torch.no_grad(), ikattn.record(model, reduce=TopK(3)) as recording:
        ...     output = model(torch.randn(2, 7, 16))
        >>> recording["layers.0.self_attn"].reduced["summed"].sources.shape
        torch.Size([2, 7, 3])
    """

    k: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or isinstance(self.k, bool) or self.k < 1:
            raise ValueError(f"TopK: k must be a whole number from 1 on, got {self.k!r}")

    def begin(self, about: PairMap) -> Reducing:
        k = min(self.k, about.shape[-1])

        def largest(rows: Tensor, queries: range) -> TopSources:
            sources = rows.abs().topk(k, -1).indices  # a delta rule's weights have signs
            values = rows.gather(-1, sources)
            return TopSources(values, sources.masked_fill(values == 0, -1))

        return _ByRows(largest, -2)


@dataclass(frozen=True, eq=False)
class Groups:
    """The sums of each row over groups of keys, ``[.., L, n]``: what a query takes from each.

    Args:
        groups: Slices or lists of keys, by their names or in order; groups may share keys, and
            slices end with the keys as in Python. In a recording they count the keys of each
            sequence without padding, from its first, or from its last where they are negative. Or
            an int64 tensor ``[S]`` or ``[B, S]``, which group each key is in, padding counted, from
            0 on; less than 0: none.

    Raises:
        TypeError: groups is none of these.
        ValueError: There is no group. From ``begin``: a key that a layer, or one of its sequences,
            does not have, or a tensor of another shape.

    Example:
        >>> import torch, ikattn
        >>> from ikattn.maps import Groups
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2).eval()
        >>> parts = Groups({"system": slice(0, 2), "image": slice(2, 6), "text": slice(6, None)})
        >>> with torch.no_grad(), ikattn.record(model, reduce=parts) as recording:
        ...     output = model(torch.randn(2, 7, 16))
        >>> recording["layers.0.self_attn"].reduced["summed"].shape
        torch.Size([2, 7, 3])
    """

    groups: Mapping[str, slice | Sequence[int]] | Sequence[slice | Sequence[int]] | Tensor

    def __post_init__(self) -> None:
        groups = self.groups
        if isinstance(groups, Tensor):
            is_number = groups.dtype == torch.int64 and groups.dim() in (1, 2)
            if not is_number or not groups.numel() or int(groups.max()) < 0:
                raise ValueError(
                    "Groups: a tensor of groups must be int64 [S] or [B, S] and name at least one, "
                    f"got {groups.dtype} {list(groups.shape)}"
                )
            return
        if isinstance(groups, (str, bytes)) or not isinstance(groups, (Mapping, Sequence)):
            raise TypeError(
                "Groups: groups must be slices or lists of keys, by name or in order, or an int64 "
                f"tensor, got {type(groups).__name__}"
            )
        if not groups:
            raise ValueError("Groups: groups must hold at least one group, got none")
        for each in self._listed():
            is_list = isinstance(each, Sequence) and all(type(key) is int for key in each)
            if not is_list and not isinstance(each, slice):
                raise TypeError(f"Groups: a group must be a slice or a list of keys, got {each!r}")

    @property
    def names(self) -> list[str]:
        """The names of the groups, in order; their numbers where they have none."""
        if isinstance(self.groups, Mapping):
            return list(self.groups)
        if isinstance(self.groups, Tensor):
            return [str(number) for number in range(int(self.groups.max()) + 1)]
        return [str(number) for number in range(len(self.groups))]

    def begin(self, about: PairMap, key_padding: Tensor | None = None) -> Reducing:
        # [n, 1 or B, 1.., S]: whether a key is in a group
        is_in = self._members(about, key_padding)
        middle = (1,) * (len(about.shape) - 2)
        is_in = is_in.view(*is_in.shape[:-1], *middle, is_in.size(-1))

        def sums(rows: Tensor, queries: range) -> Tensor:
            each = (rows.masked_fill(~member, 0).sum(-1) for member in is_in.to(rows.device))
            return torch.stack(list(each), -1)

        return _ByRows(sums, -2)

    def _listed(self) -> list[slice | Sequence[int]]:
        groups = self.groups
        assert not isinstance(groups, Tensor)
        return list(groups.values() if isinstance(groups, Mapping) else groups)

    def _members(self, about: PairMap, key_padding: Tensor | None) -> Tensor:
        """``[n, 1 or B, S]``."""
        B, S = about.shape[0], about.shape[-1]
        where = f"{about.layer} with maps of {list(about.shape)}"
        if isinstance(self.groups, Tensor):
            groups = self.groups if self.groups.dim() == 2 else self.groups[None]
            if groups.size(1) != S or groups.size(0) not in (1, B):
                raise ValueError(
                    f"Groups: the tensor of groups must be [{S}] or [{B}, {S}], one number for "
                    f"each key of {where}, got {list(self.groups.shape)}"
                )
            numbers = torch.arange(int(groups.max()) + 1, device=groups.device)
            return numbers[:, None, None] == groups
        sequences = own_tokens(key_padding, S)
        members = torch.zeros(len(self.groups), len(sequences), S, dtype=torch.bool)
        for member, keys in zip(members, self._listed(), strict=True):
            for b, own in enumerate(sequences):
                n = len(own)
                chosen = range(*keys.indices(n)) if isinstance(keys, slice) else keys
                if any(not -n <= key < n for key in chosen):
                    of = "" if n == S else f"sequence {b}, which has {n} keys without padding, of "
                    raise ValueError(
                        f"Groups: keys must be in [{-n}, {n}) for {of}{where}, got {keys!r}"
                    )
                member[b, [own[key] for key in chosen]] = True
        return members


class _ByRows:
    """A function of rows, whose results stand one after the other along an axis."""

    def __init__(self, of_rows: Callable[[Tensor, range], Reduced], axis: int) -> None:
        self._of_rows, self._axis = of_rows, axis
        self._found: list[Reduced] = []

    def add(self, rows: Tensor, queries: range) -> None:
        self._found.append(self._of_rows(rows, queries))

    def finish(self) -> Reduced:
        tensors = [x for x in self._found if isinstance(x, Tensor)]
        if tensors:
            return torch.cat(tensors, self._axis)
        return TopSources(*(torch.cat(x, self._axis) for x in zip(*self._found, strict=True)))


@dataclass(frozen=True)
class FunctionOfRows:
    """A plain function of rows and the number of their first query."""

    function: Callable[[Tensor, int], Tensor]

    def begin(self, about: PairMap) -> Reducing:
        axis = len(about.shape) - 2

        def of_rows(rows: Tensor, queries: range) -> Tensor:
            found = self.function(rows, queries.start)
            if not isinstance(found, Tensor):
                raise TypeError(
                    f"record: reduce must return a tensor, got {type(found).__name__}, for "
                    f"{about.name!r} of {about.layer}"
                )
            if found.shape[: axis + 1] != rows.shape[: axis + 1]:
                raise ValueError(
                    f"record: reduce must return [{', '.join(map(str, rows.shape[:-1]))}, ..], a "
                    f"result for each row of {about.name!r} of {about.layer}, got "
                    f"{list(found.shape)}; what adds rows up is an object with begin, as "
                    "ikattn.maps.Reduction has it"
                )
            return found

        return _ByRows(of_rows, axis)


_NAMED: dict[str, Reduction] = {"columns": ColumnSums(), "diagonal": Diagonal(), "top_k": TopK()}


def reduction_of(given: str | Reduction | Callable[[Tensor, int], Tensor]) -> Reduction:
    """The reduction that ``record(reduce=given)`` means."""
    names = ", ".join(map(repr, _NAMED))
    if isinstance(given, str):
        if given not in _NAMED:
            raise ValueError(f"record: reduce must be one of {names}, or an object, got {given!r}")
        return _NAMED[given]
    if isinstance(given, Reduction) and not isinstance(given, type):
        return given
    if callable(given) and not isinstance(given, type):
        return FunctionOfRows(given)
    raise TypeError(
        f"record: reduce must be one of {names}, a reduction such as TopK(8), or a function of "
        f"rows and the number of the first, got {given!r}"
    )
