"""The calls that make one sequence, as one: the steps of ``generate`` and their prompt."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ikattn.maps.beams import rows_of_call
from ikattn.maps.contribution_maps import Contributions
from ikattn.maps.layers import Batch, Layer, RecordedMaps
from ikattn.maps.sequences import keys_before, room_of, sequence_count, size_of, tensors_of


def groups_of_calls(recording: RecordedMaps) -> list[list[Batch]]:
    """Calls that go on from each other, in order."""
    groups: list[list[Batch]] = []
    for batch in recording.batches:
        before = groups[-1][-1] if groups else None
        if before is not None and _goes_on(recording.layers, before, batch):
            groups[-1].append(batch)
        else:
            groups.append([batch])
    return groups


def _goes_on(layers: Mapping[str, Layer], before: Batch, batch: Batch) -> bool:
    """Whether a call has the keys of the one before it, and then its own."""
    own = [name for name in batch if layers[name].kind == "self"]
    if not own or list(batch) != list(before):
        return False
    if sequence_count(batch.values()) != sequence_count(before.values()):
        return False
    first, since = (_begins(layers, call) for call in (before, batch))
    if first is None or since is None:
        return False
    L = size_of(before[own[0]], "L") or 0
    return first < since <= first + L


def _begins(layers: Mapping[str, Layer], batch: Batch) -> int | None:
    """How many tokens a call goes on from, by its cache or by the sizes of its maps.

    None where layers differ, or no map tells.
    """
    if batch.begins is not None:
        return batch.begins
    told = {keys_before(maps) for name, maps in batch.items() if layers[name].kind == "self"}
    return told.pop() if len(told) == 1 else None


def _check_places(layers: Mapping[str, Layer], calls: Sequence[Batch]) -> None:
    """Raises ValueError where the keys of a call are not those of the call before, and its own."""
    rows = sequence_count(calls[0].values())
    if rows > 1 and all(maps.value_norms is None for maps in calls[0].values()):
        warnings.warn(
            f"joined: {rows} sequences without the map 'value_norms': whether they changed their "
            "places between calls, as in a beam search, cannot be seen",
            stacklevel=4,
        )
    for before, call in pairwise(calls):
        kept = _begins(layers, call) or 0
        for name in call:
            norms = [each[name].value_norms for each in (before, call)]
            if layers[name].kind != "self" or any(each is None for each in norms):
                continue
            spans = [_columns(layers, each, name) for each in (before, call)]
            start, end = max(span.start for span in spans), min(spans[0].stop, kept)
            if start >= end:
                continue
            earlier, now = (
                each[..., start - span.start : end - span.start]
                for each, span in zip(norms, spans, strict=True)
                if each is not None
            )
            size = earlier.nan_to_num().abs().max().clamp_min(1e-30)
            off = (now - earlier).nan_to_num().abs()
            padding = before[name].key_padding
            if padding is not None:
                own = padding[:, start - spans[0].start : end - spans[0].start]
                off = off.masked_fill(own.to(off.device).unsqueeze(1), 0)
            if float(off.max()) > 1e-2 * float(size):
                raise ValueError(
                    "joined: sequences changed their places between calls, as those of a beam "
                    "search do: give beam_indices, or generate with num_beams=1"
                )


def _columns(layers: Mapping[str, Layer], call: Batch, name: str) -> range:
    """The places in the sequence of the keys of a layer of self-attention.

    Keys of a layer with a short cache are the last ones. Those before the first token of a call
    without a cache, such as virtual ones, count from 0.
    """
    maps = call[name]
    L, S = size_of(maps, "L") or 0, size_of(maps, "S")
    if S is None:
        return range(0)
    end = max((_begins(layers, call) or 0) + L, S - room_of(maps) if call.begins is None else 0)
    return range(max(0, end - (S - room_of(maps))), end)


def joined_calls(layers: Mapping[str, Layer], calls: Sequence[Batch]) -> Batch:
    """One call of several that go on from each other, whose sequences must keep their places."""
    if len(calls) == 1:
        return calls[0]
    _check_places(layers, calls)
    begins = [_begins(layers, call) or 0 for call in calls]
    kept = [next_ - own for own, next_ in pairwise(begins)]  # rows; later ones were taken back
    maps = {name: _joined(layers, calls, name, kept) for name in calls[-1]}

    has_targets = calls[0].target_ids is not None

    def along(name: str) -> Tensor | None:
        parts = [getattr(call, name) for call in calls]
        if any(part is None for part in parts):
            return None
        ids = [getattr(call, name.replace("mask", "ids")) for call in calls]
        sizes = [0 if each is None else each.size(1) for each in ids]
        is_own = sizes[0] > 0 and not (name.startswith("input") and has_targets)
        cut = kept if is_own else sizes[:-1]
        count = sum(map(min, sizes, [*cut, sizes[-1]]))
        last: Tensor = parts[-1]
        if name.endswith("mask") and last.size(1) == count:
            return last  # that of all tokens so far
        own = [part[:, :rows] for part, rows in zip(parts, [*cut, last.size(1)], strict=True)]
        joined_parts: Tensor = torch.cat(own, 1)
        return joined_parts if joined_parts.size(1) == count else None

    target_mask = along("target_mask")
    if target_mask is None:  # transformers gives none; sequences that have ended are padding
        decoder = [n for n in maps if (layers[n].side, layers[n].kind) == ("decoder", "self")]
        padding = maps[decoder[0]].query_padding if decoder else None
        target_mask = None if padding is None else (~padding).long()
    ids: dict[str, Any] = {x: along(x) for x in ("input_ids", "input_mask", "target_ids")}
    ids |= {"target_mask": target_mask, "begins": calls[0].begins}
    return replace(calls[-1], layers=maps, **ids)


def with_encoders(layers: Mapping[str, Layer], calls: Sequence[Batch]) -> list[Batch]:
    """Calls of which those of an encoder, and of the decoder that reads it, are one.

    ``generate`` runs the encoder of each text once, and the decoder for several sequences of it.
    """
    found: list[Batch] = []
    for call in calls:
        before = found[-1] if found else None
        if before is not None and _reads(layers, before, call):
            count = sequence_count(before.values())
            each = sequence_count(call.values()) // count
            source = rows_of_call(before, torch.arange(count).repeat_interleave(each))
            ids: dict[str, Any] = {"input_ids": source.input_ids, "input_mask": source.input_mask}
            maps = {**source.layers, **call.layers}
            found[-1] = replace(call, layers=maps, tokens=source.tokens, begins=None, **ids)
        else:
            found.append(call)
    return found


def _reads(layers: Mapping[str, Layer], encoder: Batch, decoder: Batch) -> bool:
    """Whether the one call is an encoder's alone, and the other of a decoder with its keys."""
    crossing = [maps for name, maps in decoder.items() if layers[name].kind == "cross"]
    if not crossing or any(layers[name].kind == "cross" for name in encoder):
        return False
    if set(encoder) & set(decoder):
        return False
    counts = [sequence_count(call.values()) for call in (encoder, decoder)]
    keys = size_of(crossing[0], "S")
    fits = all(size_of(maps, "L") == keys for maps in encoder.values())
    return fits and counts[0] > 0 and counts[1] % counts[0] == 0


def _joined(
    layers: Mapping[str, Layer], calls: Sequence[Batch], name: str, kept: Sequence[int]
) -> Contributions:
    """Rows below each other, over the columns of all calls.

    kept: The rows of each call but the last that later calls go on from.
    """
    parts = [call[name] for call in calls]
    last = parts[-1]
    S = size_of(last, "S") or 0
    spans = [range(S)] * len(parts)
    if layers[name].kind == "self":
        spans = [_columns(layers, call, name) for call in calls]
    width = spans[-1].stop  # later columns of the calls before were taken back
    spans = [range(span.start, min(span.stop, width)) for span in spans]
    rows = [*kept, size_of(last, "L") or 0]

    def joined(tensors: Sequence[Tensor], axes: str) -> Tensor:
        if "S" in axes:
            padding = [(span.start, width - span.stop) for span in spans]
            cut = [x[..., : len(span)] for x, span in zip(tensors, spans, strict=True)]
            tensors = [F.pad(x, own) for x, own in zip(cut, padding, strict=True)]
        if "L" in axes:
            dim = axes.index("L") - len(axes)
            parts_ = [x.narrow(dim, 0, count) for x, count in zip(tensors, rows, strict=True)]
            return torch.cat(parts_, dim)
        for span, x in zip(spans[1:], tensors[1:], strict=True):  # later calls know better
            tensors[0][..., span.start : span.stop] = x[..., span.start : span.stop]
        return tensors[0]

    found, B = Contributions(), sequence_count([last])
    named = [{name: x for name, _, x in tensors_of(part)} for part in parts]
    for name_, axes, _ in tensors_of(last):
        if all(name_ in each for each in named):
            of_all = joined([each[name_] for each in named], axes)
            ratio, _, of_map = name_.partition(".")
            if of_map:
                found.mixing_ratio[of_map] = of_all
            else:
                setattr(found, ratio, of_all)
    paddings = [part.query_padding for part in parts]
    if any(x is not None for x in paddings):
        none = [torch.zeros(B, count).bool() for count in rows]
        own = [y if x is None else x.to(y.device) for x, y in zip(paddings, none, strict=True)]
        found.query_padding = joined(own, "L")
    hidden = torch.zeros(B, width).bool()
    for part, span in zip(parts, spans, strict=True):
        if part.key_padding is not None:
            hidden[:, span.start : span.stop] = part.key_padding[:, : len(span)].cpu()
    found.key_padding = hidden if bool(hidden.any()) else None
    return found
