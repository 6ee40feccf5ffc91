"""One run of attention, and the maps that can be made of it.

Sizes: B batch, H query heads, G key/value heads, T queries, S keys, d head size of query and key,
d_v head size of value, D model size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from ikattn.analysis._alti import alti
from ikattn.analysis._recorder.parts import AttentionParts
from ikattn.analysis.contributions import (
    MAPS,
    Contributions,
    NormStats,
    contributions,
    streamed_contributions,
)
from ikattn.ops.attention import implicit_kernel_weights, similarity_and_magnitude

LEDGER = ("weights", "similarity", "magnitude")
ALL_MAPS = (*LEDGER, *MAPS, "alti")
# What maps=None takes: no map for every head, and none of the ledger.
USUAL_MAPS = tuple(name for name in MAPS if name != "per_head")
_THROUGH_NORMS = ("with_norm", "encoder")
# Up to 256 MiB in float32, weights are held, which takes less time than making them bit by bit.
MOST_WEIGHTS = 1 << 26
_AFTER_RESIDUAL = ("with_residual", *_THROUGH_NORMS)
_OF_THE_BLOCK = (*_AFTER_RESIDUAL, "alti")


@dataclass
class AttentionCall:
    """What a layer of attention was given in one run, in float32 at least.

    Attributes:
        query: ``[B, H, T, d]``.
        key: ``[B, G, S, d]``.
        value: ``[B, G, S, d_v]``.
        kind: Whether queries and keys are the same tokens.
        kernel: As for ``ikattn.similarity_and_magnitude``, and so is p.
        frequencies: w1 and w2 of the implicit kernel, else None.
        scaling: Of query . key in the logits; None: 1 / sqrt(d).
        attn_mask: Broadcastable to ``[B, H, T, S]``. Bool: True = may attend; floating point: added
            to the logits, -inf where a pair is hidden.
        causal: Query i sees keys up to i + causal, besides the mask; None: all.
        key_bias: ``[B, H or 1, S]``, added to the logits, -inf where a key is hidden.
        query_padding: bool ``[B, T]``, True = padding, or None.
        key_padding: bool ``[B, S]``, likewise.
        diagonal: The token of query i is that of key i + diagonal.
        softcap: Logits are softcap tanh(logits / softcap) before masks.
        softmax_heads: Bool ``[H]``, heads that compute softmax whatever the kernel; None: none.
        sinks: ``[H]``, a logit more in each row's sum, of no key.
        streams: Whether weights are never held where no map needs them, however few they are.
        given_dtype: The type that query and key were given in, where they are still the same
            numbers. Weights that are never held are made of them in it: kernels for 16 bits err as
            such a model does, and take less time.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    kind: Literal["self", "cross"]
    kernel: str = "dot"
    p: float | None = 2.0
    frequencies: tuple[Tensor, Tensor | None] | None = None
    scaling: float | None = None
    attn_mask: Tensor | None = None
    causal: int | None = None
    key_bias: Tensor | None = None
    query_padding: Tensor | None = None
    key_padding: Tensor | None = None
    diagonal: int = 0
    softcap: float | None = None
    sinks: Tensor | None = None
    softmax_heads: Tensor | None = None
    streams: bool = False
    given_dtype: torch.dtype | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, H, T and S."""
        B, H, T, _ = self.query.shape
        return B, H, T, self.key.size(2)

    @property
    def has_own_softmax(self) -> bool:
        """Whether its weights are no plain softmax or kernel, which ``streamed_contributions`` has.

        Maps are then made of weights that are held.
        """
        changes = (self.softcap, self.sinks, self.softmax_heads)
        return any(change is not None for change in changes)

    @cached_property
    def weights(self) -> Tensor:
        """The normalised weights, before dropout, ``[B, H, T, S]``; 0 for who sees no key."""
        if self.frequencies is None:
            return self._softmax_weights()
        weights = implicit_kernel_weights(
            self.query,
            self.key,
            *self.frequencies,
            p=self.p,
            enable_gqa=self.key.size(1) != self.query.size(1),
            **self._masks(),
        )
        if self.softmax_heads is None:
            return weights
        return torch.where(self.softmax_heads[:, None, None], self._softmax_weights(), weights)

    def _softmax_weights(self) -> Tensor:
        G = self.key.size(1)
        if self.query.size(1) == G:
            logits: Tensor = self.query @ self.key.mT
        else:
            grouped: Tensor = self.query.unflatten(1, (G, -1))
            logits = (grouped @ self.key.unsqueeze(2).mT).flatten(1, 2)
        logits = logits * (self.query.size(-1) ** -0.5 if self.scaling is None else self.scaling)
        if self.softcap is not None:
            logits = self.softcap * (logits / self.softcap).tanh()
        if self.key_bias is not None:
            logits = logits + self.key_bias.unsqueeze(-2)
        mask = self._mask()
        if mask is None and self.key_bias is None and self.sinks is None and logits.size(-1) > 0:
            return logits.softmax(-1)  # every query sees a key
        if mask is not None:
            is_bool = mask.dtype == torch.bool
            logits = logits.masked_fill(~mask, -math.inf) if is_bool else logits + mask
        blind = (logits.detach() == -math.inf).all(-1, keepdim=True)  # true without keys
        logits = logits.masked_fill(blind, 0.0)
        if self.sinks is not None:
            sinks = self.sinks.view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
            return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1].masked_fill(blind, 0.0)
        return logits.softmax(-1).masked_fill(blind, 0.0)

    def context(self) -> Tensor:
        """The weighted values with their heads merged, ``[B, T, H d_v]``."""
        B, H, T, S = self.sizes
        rows = max(1, MOST_WEIGHTS // max(1, B * H * S))
        if rows < T and "weights" not in vars(self):
            blocks = [self.narrow(i, min(i + rows, T)) for i in range(0, T, rows)]
            return torch.cat([block.context() for block in blocks], 1)
        groups = self.query.size(1) // self.value.size(1)
        if groups == 1:
            merged: Tensor = self.weights @ self.value
        else:
            weights = self.weights.unflatten(1, (-1, groups))  # [B, G, H / G, T, S]
            merged = (weights @ self.value.unsqueeze(2)).flatten(1, 2)
        return merged.transpose(1, 2).flatten(2)

    def row(self, b: int, place: slice | Tensor) -> AttentionCall:
        """The run of one query of item b alone: a slice of one, or its number, [1]."""

        def of_item(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[b : b + 1] if x.size(0) > 1 else x

        mask = self.attn_mask
        if mask is not None:
            mask = of_item(mask.view(*(1,) * (4 - mask.dim()), *mask.shape))
        frequencies = self.frequencies
        if frequencies is not None and frequencies[0].dim() == 4:
            w1, w2 = (of_item(w) for w in frequencies)
            assert w1 is not None
            frequencies = w1, w2
        item = dataclasses.replace(
            self,
            query=self.query[b : b + 1],
            key=self.key[b : b + 1],
            value=self.value[b : b + 1],
            frequencies=frequencies,
            attn_mask=mask,
            key_bias=of_item(self.key_bias),
            query_padding=None,
            key_padding=None,
        )
        if not isinstance(place, Tensor):
            return item.narrow(place.start, place.stop)
        if self.causal is not None:  # what it sees depends on its number
            return item.narrow(int(place), int(place) + 1)
        if mask is not None and mask.size(2) > 1:
            mask = mask.index_select(2, place)
        return dataclasses.replace(item, query=item.query.index_select(2, place), attn_mask=mask)

    def narrow(self, start: int, end: int) -> AttentionCall:
        """The run of queries from ``start`` to before ``end``."""
        mask = self.attn_mask
        if mask is not None and mask.size(-2) > 1:
            mask = mask[..., start:end, :]
        padding = self.query_padding
        return dataclasses.replace(
            self,
            query=self.query[:, :, start:end],
            attn_mask=mask,
            causal=None if self.causal is None else self.causal + start,
            query_padding=None if padding is None else padding[:, start:end],
            diagonal=self.diagonal + start,
        )

    def without_later_keys(self) -> AttentionCall:
        """The run without the keys that causality hides from all of its queries."""
        T, S = self.sizes[2:]
        end = S if self.causal is None else min(S, T + self.causal)
        if end == S:
            return self

        def cut(x: Tensor | None, axis: int) -> Tensor | None:
            return None if x is None else x.narrow(axis, 0, end) if x.size(axis) == S else x

        return dataclasses.replace(
            self,
            key=self.key[:, :, :end],
            value=self.value[:, :, :end],
            attn_mask=cut(self.attn_mask, -1),
            key_bias=cut(self.key_bias, -1),
            key_padding=cut(self.key_padding, 1),
        )

    def maps(self, out_proj_weight: Tensor, names: Collection[str], **block: Any) -> Contributions:
        """``ikattn.contributions`` of this run.

        Where the weights would be large they are never held, unless a map for every head needs
        them.
        """
        if not names:
            return Contributions(query_padding=self.query_padding, key_padding=self.key_padding)
        block |= {
            "maps": names,
            "query_padding": self.query_padding,
            "key_padding": self.key_padding,
            "diagonal": self.diagonal,
        }
        holds_weights = "per_head" in names or "weights" in vars(self) or self.has_own_softmax
        are_few = math.prod(self.sizes) <= MOST_WEIGHTS and not self.streams
        if holds_weights or are_few:
            return contributions(self.weights, self.value, out_proj_weight, **block)
        w1, w2 = self.frequencies or (None, None)
        dtype = self.given_dtype or self.query.dtype
        return streamed_contributions(
            self.query.to(dtype),
            self.key.to(dtype),
            self.value,
            out_proj_weight,
            w1=w1,
            w2=w2,
            p=self.p,
            scale=self.scaling,
            enable_gqa=self.key.size(1) != self.query.size(1),
            **self._masks(),
            **block,
        )

    def hidden(self) -> Tensor | None:
        """The pairs that a mask hides, bool, broadcastable to ``[B, H, T, S]``; None: none."""
        hidden, mask = None, self._mask()
        if mask is not None:
            hidden = ~mask if mask.dtype == torch.bool else mask == -math.inf
        if self.key_bias is None:
            return hidden
        keys = (self.key_bias == -math.inf).unsqueeze(-2)
        return keys if hidden is None else hidden | keys

    def _mask(self) -> Tensor | None:
        """``attn_mask`` and ``causal`` as one mask."""
        if self.causal is None:
            return self.attn_mask
        sizes = self.sizes[2:]
        seen = torch.ones(sizes, dtype=torch.bool, device=self.query.device).tril(self.causal)
        if self.attn_mask is None:
            return seen[None, None]
        if self.attn_mask.dtype == torch.bool:
            return self.attn_mask & seen
        return self.attn_mask.masked_fill(~seen, -math.inf)

    def _masks(self) -> dict[str, Any]:
        is_causal = self.causal == 0  # as the operators have it: the first query sees one key
        mask = self.attn_mask if is_causal else self._mask()
        return {"attn_mask": mask, "is_causal": is_causal, "key_bias": self.key_bias}


@dataclass
class Surroundings:
    """What the block around the attention did in one run.

    Attributes:
        residual: ``[B, T, D]``, or None.
        norm, second_norm: How the norms after it acted, or None; ``second_norm`` alone where the
            block normalises before its parts.
        scale: What the attention's output was multiplied with before it was added to the residual:
            a number, ``[D]``, or None for 1.
        output_norm: How a norm between out-projection and sum acted, or None.
        output: ``[B, T, D]``, the sum of residual and attention, through ``norm`` where there is
            one; None where no map needs it.
    """

    residual: Tensor | None = None
    norm: NormStats | None = None
    second_norm: NormStats | None = None
    scale: float | Tensor | None = None
    output_norm: NormStats | None = None
    output: Tensor | None = None

    def narrow(self, start: int, end: int) -> Surroundings:
        """What it did to queries from ``start`` to before ``end``."""

        def of_rows(x: Any) -> Any:
            if isinstance(x, NormStats):
                return dataclasses.replace(x, scale=x.scale[:, start:end])
            return None if x is None else x[:, start:end]

        names = ("residual", "norm", "second_norm", "output_norm", "output")
        return dataclasses.replace(self, **{name: of_rows(getattr(self, name)) for name in names})


def why_undefined(
    name: str, parts: AttentionParts, kind: str | None, *, has_run: bool = False
) -> str | None:
    """Why a layer has no map of this name; None where it has one.

    Args:
        name: One of ALL_MAPS.
        parts: The layer.
        kind: "self", "cross", or None where a call will tell.
        has_run: Whether a run has told all that runs tell.
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
            "attention; 'encoder' is through the norm that reads that sum"
        )
    if name == "encoder" and parts.block == "pre":
        if parts.second_norm is not None or not has_run:
            return None
        return (
            "no norm that could be followed reads the sum of residual and attention; in training "
            "dropout may hide that sum"
        )
    if name == "encoder" and parts.second_norm is None:
        return "another attention stands between it and the norm at the end of its block"
    return None


def defined_maps(
    names: Iterable[str], parts: AttentionParts, kind: str | None, *, has_run: bool = False
) -> list[str]:
    """Those of the names that a layer has a map of."""
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
    """The maps of one run of attention.

    Args:
        call: The run.
        projection: The weight of its out-projection, ``[D, H d_v]``.
        around: As far as ``awaited_norms`` and the residual are concerned.
        wanted: Names of maps, all defined for the layer.
    """
    projection = projection.to(call.value.dtype)
    norm, second_norm = _in_type_of(around.norm), _in_type_of(around.second_norm)
    names = set(wanted) & set(MAPS)
    ledger = _ledger(call, wanted)  # first: weights that are held spare making them again
    is_read = around.norm is None and around.second_norm is not None
    if is_read:  # what follows knows one norm after the sum, whatever reads it
        names = {"with_norm" if name == "encoder" else name for name in names}
        norm, second_norm = second_norm, None
    if call.kind == "cross":
        maps = call.maps(projection, names - set(_THROUGH_NORMS))
        _fill_cross_maps(maps, call, *_between(projection, around), norm, second_norm, names)
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
        norm = None
    if "alti" in wanted and around.residual is not None and around.output is not None:
        maps.alti = alti(
            call.weights,
            call.value,
            projection if around.scale is None else _scaled(projection, around.scale),
            around.output,
            residual=around.residual,
            norm=norm,
            output_norm=_in_type_of(around.output_norm),
            query_padding=call.query_padding,
            key_padding=call.key_padding,
            diagonal=None if call.kind == "cross" else call.diagonal,
        )
    return dataclasses.replace(maps, **ledger)


def _scaled(projection: Tensor, scale: float | Tensor) -> Tensor:
    """An out-projection whose output is multiplied with a number, or [D]."""
    if isinstance(scale, Tensor):
        return projection * scale.to(projection.dtype).unsqueeze(-1)
    return projection * scale


def _between(projection: Tensor, around: Surroundings) -> tuple[Tensor, Tensor | None]:
    """The out-projection with what stands between it and the sum, and a divisor of rows, [B, T]."""
    if around.scale is not None:
        projection = _scaled(projection, around.scale)
    stats = around.output_norm
    if stats is None:
        return projection, None
    centered = projection - projection.mean(0) if stats.centered else projection
    divisor = stats.scale.to(projection.dtype)
    return centered * stats.weight.to(projection.dtype)[:, None], divisor


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


def _fill_cross_maps(
    maps: Contributions,
    call: AttentionCall,
    projection: Tensor,
    scale: Tensor | None,
    norm: NormStats | None,
    second_norm: NormStats | None,
    wanted: Collection[str],
) -> None:
    """Maps of cross-attention through the norms after it.

    The residual belongs to no key and touches none of the pairs, so each norm is but a linear map
    on the out-projection [D, H d_v] and a divisor of the rows, [B, T], like ``scale``.
    """
    for name, stats in (("with_norm", norm), ("encoder", second_norm)):
        if stats is None:
            return
        centered = projection - projection.mean(0) if stats.centered else projection
        projection = centered * stats.weight[:, None]
        scale = stats.scale if scale is None else scale * stats.scale
        if name in wanted:
            summed = call.maps(projection, ("summed",)).summed
            assert summed is not None
            setattr(maps, name, summed / scale.unsqueeze(-1))


def _ledger(call: AttentionCall, wanted: Collection[str]) -> dict[str, Any]:
    """Weights, similarity and magnitude, as far as wanted; hidden and padded pairs are 0.

    What a mask adds to the logits, or a position bias, is a third factor of the weight, which
    neither similarity nor magnitude holds.
    """
    ledger = {}
    if "weights" in wanted:
        ledger["weights"] = _without_padding(call.weights, call)
    if not {"similarity", "magnitude"} & set(wanted):
        return ledger
    query = call.query
    key = call.key.repeat_interleave(query.size(1) // call.key.size(1), 1)
    if call.scaling is not None:
        # ikattn.similarity_and_magnitude divides by sqrt(d): in these units that is the scaling
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
        ledger["similarity"] = _without_padding(similarity, call)
    if "magnitude" in wanted:
        if padding is not None:
            magnitude = magnitude.masked_fill(padding[:, None], 0.0)
        ledger["magnitude"] = magnitude
    return ledger


def _without_padding(pairs: Tensor, call: AttentionCall) -> Tensor:
    """``pairs``, [B, H, T, S], with 0 where query or key is padding."""
    if call.query_padding is not None:
        pairs = pairs.masked_fill(call.query_padding[:, None, :, None], 0.0)
    if call.key_padding is not None:
        pairs = pairs.masked_fill(call.key_padding[:, None, None, :], 0.0)
    return pairs
