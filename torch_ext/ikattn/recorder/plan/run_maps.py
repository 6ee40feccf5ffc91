"""Maps of one run of attention: which a layer has, and how they are made.

Sizes: B batch, H query heads, G key/value heads, L queries, S keys, d head size of query and key,
d_v head size of value, D model size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ikattn.maps.contribution_maps import MAPS, Contributions, NormStats
from ikattn.maps.mixing import alti
from ikattn.maps.mixing import projection as parts_of_output
from ikattn.maps.sequences import AXES
from ikattn.maps.summary import without_padding
from ikattn.ops.attention import similarity_and_magnitude
from ikattn.recorder.calls.attention_call import MOST_WEIGHTS, AttentionCall
from ikattn.recorder.plan.parts import AttentionParts

LEDGER = ("weights", "similarity", "magnitude")
ALL_MAPS = (*LEDGER, *MAPS, "alti", "projection")
# Maps of maps=None: none for every head, and none of the ledger.
USUAL_MAPS = tuple(name for name in MAPS if name != "per_head")
_THROUGH_NORMS = ("with_norm", "encoder")
_AFTER_RESIDUAL = ("with_residual", *_THROUGH_NORMS)
_OF_THE_BLOCK = (*_AFTER_RESIDUAL, "alti")
_MOST_GATED = 1 << 22  # numbers of gated values that are held at a time


@dataclass
class Surroundings:
    """The block around the attention in one run: residual, scale and norms.

    Attributes:
        residual: ``[B, L, D]``, or None.
        norm, second_norm: How the norms after it acted, or None; ``second_norm`` alone where the
            block normalises before its parts.
        scale: What the attention's output was multiplied with before it was added to the residual:
            a number, ``[D]``, or None for 1.
        output_norm: How a norm between out-projection and sum acted, or None.
        output: ``[B, L, D]``, the sum of residual and attention, through ``norm`` where there is
            one; None where no map needs it.
    """

    residual: Tensor | None = None
    norm: NormStats | None = None
    second_norm: NormStats | None = None
    scale: float | Tensor | None = None
    output_norm: NormStats | None = None
    output: Tensor | None = None

    def narrow(self, start: int, end: int) -> Surroundings:
        """Returns the block for queries from ``start`` to before ``end``."""
        return self.changed(lambda x: x[:, start:end])

    def item(self, b: int) -> Surroundings:
        return self.changed(lambda x: x[b : b + 1])

    def changed(self, change: Callable[[Tensor], Tensor]) -> Surroundings:
        """Returns the block with other queries, as ``change`` makes them of ``[B, L, ..]``."""

        def of(x: Any) -> Any:
            if isinstance(x, NormStats):
                return dataclasses.replace(x, scale=change(x.scale))
            return None if x is None else change(x)

        names = ("residual", "norm", "second_norm", "output_norm", "output")
        return dataclasses.replace(self, **{name: of(getattr(self, name)) for name in names})


def why_undefined(
    name: str, parts: AttentionParts, kind: str | None, *, has_run: bool = False
) -> str | None:
    """Why a layer has no map of this name; None where it has one.

    ``kind`` None: a call will tell. ``has_run``: a run has told all that runs tell.
    """
    if kind == "cross" and name in ("with_residual", "mixing_ratio"):
        return (
            "its queries are not among its keys, so the residual, or a token's own part, has no "
            "column in the map"
        )
    if parts.block == "found":
        return None  # a run will tell
    if name in _OF_THE_BLOCK and parts.block == "none":
        return "the block around it is not known, so neither are its residual and norms"
    if name == "with_norm" and parts.norm is None:
        return (
            "its block normalises before the attention, not after the sum of residual and "
            "attention; 'encoder' is through the norm that reads that sum, where one does"
        )
    if name == "encoder" and parts.block == "pre":
        if parts.second_norm is not None or not has_run:
            return None
        return "no norm was seen to read the sum of residual and attention"
    if name == "encoder" and parts.second_norm is None:
        return (
            "no norm is known at the end of its block with the feed-forward part alone, and not "
            "another attention, in between"
        )
    return None


def defined_maps(
    names: Iterable[str], parts: AttentionParts, kind: str | None, *, has_run: bool = False
) -> list[str]:
    return [name for name in names if why_undefined(name, parts, kind, has_run=has_run) is None]


def awaited_norms(parts: AttentionParts, wanted: Collection[str]) -> tuple[str, ...]:
    """The norms after it, fields of AttentionParts, that maps of these names need."""
    if parts.block == "pre":
        return ("second_norm",) if {"mixing_ratio", "encoder"} & set(wanted) else ()
    if parts.block != "post" or not {"mixing_ratio", "alti", *_THROUGH_NORMS} & set(wanted):
        return ()
    if parts.second_norm is None or not {"mixing_ratio", "encoder"} & set(wanted):
        return ("norm",)
    return ("norm", "second_norm")


def make_maps(
    call: AttentionCall, projection: Tensor, around: Surroundings, wanted: Collection[str]
) -> Contributions:
    """The maps of one run of attention that are wanted, all of them defined for the layer.

    ``projection`` is the weight of its out-projection, ``[D, H d_v]``; ``around`` has the residual
    and what ``awaited_norms`` names.
    """
    projection = projection.to(call.value.dtype)
    is_gated = call.gate is not None and call.gate.size(-1) > 1
    parts = None
    if "projection" in wanted:  # first: other maps are then made of the same weights
        parts = parts_of_output(
            call.weights, call.value, projection, gate=call.gate, **call.paddings
        )
    maps = (_of_gated_heads if is_gated else _of_heads)(call, projection, around, wanted)
    return dataclasses.replace(maps, projection=parts)


def _of_heads(
    call: AttentionCall, projection: Tensor, around: Surroundings, wanted: Collection[str]
) -> Contributions:
    """Makes the maps of heads that have one gate each or none, but for "projection"."""
    norm, second_norm = _in_type_of(around.norm), _in_type_of(around.second_norm)
    names = set(wanted) & set(MAPS)
    ledger = _ledger(call, wanted)  # first: weights that are held spare making them again
    mixing = None
    if "alti" in wanted and around.residual is not None and around.output is not None:
        mixing = alti(
            call.applied_weights,
            call.value,
            projection if around.scale is None else _scaled(projection, around.scale),
            around.output,
            residual=around.residual,
            norm=norm,
            output_norm=_in_type_of(around.output_norm),
            **call.paddings,
            diagonal=None if call.kind == "cross" else call.diagonal,
        )
    is_read = around.norm is None and around.second_norm is not None
    if is_read:  # what follows knows one norm after the sum, whatever reads it
        names = {"with_norm" if name == "encoder" else name for name in names}
        norm, second_norm = second_norm, None
    if call.kind == "cross":
        maps = call.maps(projection, names - set(_THROUGH_NORMS))
        # The residual belongs to no key and touches none of the pairs, so each norm is but a linear
        # map on the out-projection [D, H d_v] and a divisor of the rows, [B, L].
        projection, divisor = _between(projection, around)
        for name, stats in zip(_THROUGH_NORMS, (norm, second_norm), strict=True):
            if stats is None:
                break
            projection, divisor = _through(stats, projection, divisor)
            if name in names:
                summed = call.maps(projection, ("summed",)).summed
                assert summed is not None
                setattr(maps, name, summed / divisor.unsqueeze(-1))
    elif names & {"mixing_ratio", *_AFTER_RESIDUAL} and around.residual is not None:
        residual = around.residual.to(projection.dtype)
        block = {"residual": residual, "norm": norm, "second_norm": second_norm}
        if around.scale is None and around.output_norm is None:
            maps = call.maps(projection, names, **block)
        else:
            maps = _through_what_is_between(call, projection, around, names, block)
    else:
        maps = call.maps(projection, names)
    if is_read:
        maps.encoder, maps.with_norm = maps.with_norm, None
        ratios = maps.mixing_ratio
        maps.mixing_ratio = {"encoder" if n == "with_norm" else n: x for n, x in ratios.items()}
    return dataclasses.replace(maps, **ledger, alti=mixing)


def _of_gated_heads(
    call: AttentionCall, projection: Tensor, around: Surroundings, wanted: Collection[str]
) -> Contributions:
    """Makes the maps of heads that are multiplied number by number, but for "projection"."""
    of_heads = {"value_norms", *LEDGER}
    of_rows = [name for name in wanted if name not in of_heads | {"projection"}]
    B, H, L, S = call.sizes
    if of_rows and (call.has_weights or math.prod(call.sizes) <= MOST_WEIGHTS):
        call = dataclasses.replace(call, given_weights=call.weights)  # made at once
    plain = dataclasses.replace(call, gate=None)
    found = _of_heads(plain, projection, Surroundings(), [n for n in wanted if n in of_heads])
    if not of_rows or L == 0:
        return found
    each = max(1, _MOST_GATED // max(1, B * H * S * call.value.size(-1)))
    blocks = [(i, min(i + each, L)) for i in range(0, L, each)]
    parts = [
        _of_gated_rows(call.narrow(*block), projection, around.narrow(*block), of_rows)
        for block in blocks
    ]
    return stacked(found, parts)


def _of_gated_rows(
    call: AttentionCall, projection: Tensor, around: Surroundings, wanted: Collection[str]
) -> Contributions:
    """Makes the maps of some queries, each with its gate in values of its own.

    The queries are items of a batch. Their keys are turned, so that each has its own token first.
    """
    S = call.sizes[3]
    if call.causal is not None:  # nobody sees the keys after these
        call = call.part(S=slice(call.sizes[2] + max(call.causal, call.diagonal)))
    B, H, rows, keys = call.sizes
    places = torch.arange(keys, device=call.value.device)
    own = torch.arange(rows, device=places.device) + call.diagonal
    own = own.unsqueeze(1) if call.kind == "self" else own.new_zeros(rows, 1)
    order, back = (places + own) % max(1, keys), (places - own) % max(1, keys)

    def turned(x: Tensor, order: Tensor) -> Tensor:
        return x.gather(-1, order.expand(*x.shape[:-1], keys))

    assert call.gate is not None
    value = call.value.repeat_interleave(H // call.value.size(1), 1)[:, :, order]
    value = value * call.gate.to(value).unsqueeze(3)  # [B, H, rows, keys, d_v]
    weights = turned(call.weights, order).transpose(1, 2).flatten(0, 1).unsqueeze(2)
    hidden, padding = call.key_padding, call.query_padding
    items = AttentionCall(
        query=weights.transpose(2, 3)[..., :1, :0],
        key=weights.transpose(2, 3)[..., :0],
        value=value.transpose(1, 2).flatten(0, 1),
        kind=call.kind,
        given_weights=weights,
        query_padding=None if padding is None else padding.reshape(-1, 1),
        key_padding=None if hidden is None else hidden[:, order].flatten(0, 1),
    )
    around = around.changed(lambda x: x.flatten(0, 1).unsqueeze(1))
    found = _of_heads(items, projection, around, wanted)
    changes: dict[str, Any] = {"query_padding": padding, "key_padding": call.key_padding}
    for name, axes in AXES.items():
        x = getattr(found, name)
        if x is not None and "L" in axes:
            x = x.unflatten(0, (B, rows)).squeeze(-2)  # [B, rows, keys] or [B, rows, H, keys]
            x = turned(x.transpose(1, 2) if "H" in axes else x, back)
            changes[name] = pad(x, (0, S - keys))
    if found.per_head is not None:
        changes["per_head"] = changes["per_head"].abs()
    changes["mixing_ratio"] = {name: x.view(B, rows) for name, x in found.mixing_ratio.items()}
    return dataclasses.replace(found, **changes)


def stacked(found: Contributions, parts: Sequence[Contributions]) -> Contributions:
    """``found`` with the maps of rows that ``parts`` have, below each other."""

    def below(tensors: Sequence[Tensor | None], axis: int) -> Tensor | None:
        there = [x for x in tensors if x is not None]
        if len(there) < len(tensors):
            return None
        return torch.cat(there, axis) if len(there) > 1 else there[0]

    changes: dict[str, Any] = {}
    for name, axes in AXES.items():
        rows = below([getattr(part, name) for part in parts], -2) if "L" in axes else None
        changes[name] = getattr(found, name) if rows is None else rows
    changes["query_padding"] = below([part.query_padding for part in parts], 1)
    changes["mixing_ratio"] = {
        name: torch.cat([part.mixing_ratio[name] for part in parts], 1)
        for name in parts[0].mixing_ratio
    }
    return dataclasses.replace(found, **changes)


def _scaled(projection: Tensor, scale: float | Tensor) -> Tensor:
    """An out-projection whose output is multiplied with a number, or [D]."""
    if isinstance(scale, Tensor):
        return projection * scale.to(projection.dtype).unsqueeze(-1)
    return projection * scale


def _through(
    stats: NormStats, projection: Tensor, divisor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A norm after an out-projection [D, H d_v]: a linear map, and a divisor of rows [B, L]."""
    centered = projection - projection.mean(0) if stats.centered else projection
    scale = stats.scale.to(projection.dtype)
    made = centered * stats.weight.to(projection.dtype)[:, None]
    return made, scale if divisor is None else divisor * scale


def _between(projection: Tensor, around: Surroundings) -> tuple[Tensor, Tensor | None]:
    """The out-projection with what stands between it and the sum, and a divisor of rows, [B, L]."""
    if around.scale is not None:
        projection = _scaled(projection, around.scale)
    return (projection, None) if (own := around.output_norm) is None else _through(own, projection)


def _through_what_is_between(
    call: AttentionCall,
    projection: Tensor,
    around: Surroundings,
    names: Collection[str],
    block: dict[str, Any],
) -> Contributions:
    """Maps of a layer whose output is multiplied, or normalised, before it is added.

    Maps without the residual are of what the out-projection makes. A norm in between is a linear
    map and a divisor of the rows, with which the residual is multiplied before.
    """
    after = set(names) & {"mixing_ratio", *_AFTER_RESIDUAL}
    maps = call.maps(projection, (set(names) - after) | (after & {"mixing_ratio"}))
    projection, divisor = _between(projection, around)
    if divisor is not None:
        divisor = divisor.unsqueeze(-1)
        block |= {"residual": block["residual"] * divisor}
    found = call.maps(projection, after | {"with_residual"}, **block)
    for name in after & set(_AFTER_RESIDUAL):
        map_ = getattr(found, name)
        # norms of the sum take the divisor out again: they were told of the sum itself
        setattr(maps, name, map_ if divisor is None else map_ / divisor)
    ratios = {name: x for name, x in found.mixing_ratio.items() if name in _AFTER_RESIDUAL}
    maps.mixing_ratio.update({name: x for name, x in ratios.items() if name in names})
    return maps


def convert_tensors(
    maps: Contributions, *, detach: bool, move: Callable[[Tensor], Tensor]
) -> Contributions:
    """``maps`` with every tensor detached, if that is asked for, and where ``move`` has it."""

    def convert(x: Tensor) -> Tensor:
        return move(x.detach() if detach else x)

    changes: dict[str, Any] = {
        name: convert(x) for name, x in vars(maps).items() if isinstance(x, Tensor)
    }
    changes["mixing_ratio"] = {name: convert(x) for name, x in maps.mixing_ratio.items()}
    changes["reduced"] = {
        name: convert(x) if isinstance(x, Tensor) else type(x)(*map(convert, x))
        for name, x in maps.reduced.items()
    }
    return dataclasses.replace(maps, **changes)


def _in_type_of(stats: NormStats | None) -> NormStats | None:
    if stats is None:
        return None
    return dataclasses.replace(stats, weight=stats.weight.to(stats.scale.dtype))


def _ledger(call: AttentionCall, wanted: Collection[str]) -> dict[str, Any]:
    """Weights, similarity and magnitude, as far as wanted; hidden and padded pairs are 0.

    What a mask adds to the logits, or a position bias, is a third factor of the weight, which
    neither similarity nor magnitude holds.
    """
    ledger = {}
    if "weights" in wanted:
        ledger["weights"] = without_padding(call.weights, **call.paddings, caller="record")
    if not {"similarity", "magnitude"} & set(wanted):
        return ledger
    query = call.query
    key = call.key.repeat_interleave(query.size(1) // call.key.size(1), 1)
    if call.scaling is not None:
        # ikattn.ops.similarity_and_magnitude divides by sqrt(d): in these units that is the scaling
        unit = math.sqrt(call.scaling * math.sqrt(query.size(-1)))
        query, key = query * unit, key * unit
    w1, w2 = call.frequencies or (None, None)
    similarity, magnitude = similarity_and_magnitude(
        query, key, kernel=call.kernel, p=call.p, w1=w1, w2=w2
    )
    if call.softmax_heads is not None:
        heads = call.softmax_heads[:, None, None]
        of_softmax = similarity_and_magnitude(query, key, kernel="dot")
        similarity = torch.where(heads, of_softmax[0], similarity)
        magnitude = torch.where(heads[..., 0], of_softmax[1], magnitude)
    hidden, padding = call.hidden(), call.key_padding
    if "similarity" in wanted:
        if hidden is not None:
            similarity = similarity.masked_fill(hidden, 0.0)
        ledger["similarity"] = without_padding(similarity, **call.paddings, caller="record")
    if "magnitude" in wanted:
        if padding is not None:
            magnitude = magnitude.masked_fill(padding[:, None], 0.0)
        ledger["magnitude"] = magnitude
    return ledger
