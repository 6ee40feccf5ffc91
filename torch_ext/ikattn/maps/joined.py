"""The calls that make one sequence, as one: the steps of ``generate`` and their prompt."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from ikattn.maps.beams import rows_of_call
from ikattn.maps.contribution_maps import Contributions
from ikattn.maps.layers import Batch, Layer, RecordedMaps
from ikattn.maps.sequences import AXES, keys_before, room_of, sequence_count, size_of


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
    if sequence_count(list(batch.values())) != sequence_count(list(before.values())):
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
    rows = sequence_count(list(calls[0].values()))
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
    """One call of several that go on from each other.

    Raises:
        ValueError: Sequences changed their places in between.
    """
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
        target_mask = _mask_of_decoder(layers, maps)
    return Batch(
        maps,
        calls[-1].tokens,
        calls[-1].target_tokens,
        along("input_ids"),
        along("input_mask"),
        along("target_ids"),
        target_mask,
        calls[0].begins,
    )


def _mask_of_decoder(
    layers: Mapping[str, Layer], maps: Mapping[str, Contributions]
) -> Tensor | None:
    for name, own in maps.items():
        if layers[name].side == "decoder" and layers[name].kind == "self":
            return None if own.query_padding is None else (~own.query_padding).long()
    return None


def with_encoders(layers: Mapping[str, Layer], calls: Sequence[Batch]) -> list[Batch]:
    """Calls of which those of an encoder, and of the decoder that reads it, are one.

    ``generate`` runs the encoder of each text once, and the decoder for several sequences of it.
    """
    found: list[Batch] = []
    for call in calls:
        before = found[-1] if found else None
        if before is not None and _reads(layers, before, call):
            found[-1] = _as_one(before, call)
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
    counts = [sequence_count(list(call.values())) for call in (encoder, decoder)]
    keys = size_of(crossing[0], "S")
    fits = all(size_of(maps, "L") == keys for maps in encoder.values())
    return fits and counts[0] > 0 and counts[1] % counts[0] == 0


def _as_one(encoder: Batch, decoder: Batch) -> Batch:
    each = sequence_count(list(decoder.values())) // sequence_count(list(encoder.values()))
    rows = torch.arange(sequence_count(list(encoder.values()))).repeat_interleave(each)
    source = rows_of_call(encoder, rows)
    return Batch(
        {**source.layers, **decoder.layers},
        source.tokens,
        decoder.target_tokens,
        source.input_ids,
        source.input_mask,
        decoder.target_ids,
        decoder.target_mask,
    )


def _joined(
    layers: Mapping[str, Layer], calls: Sequence[Batch], name: str, kept: Sequence[int]
) -> Contributions:
    """Rows below each other, over the columns of all calls.

    Args:
        layers: Of the recording.
        calls: The calls.
        name: The layer.
        kept: The rows of each call but the last that later calls go on from.
    """
    parts = [call[name] for call in calls]
    last = parts[-1]
    S = size_of(last, "S") or 0
    spans = [range(S)] * len(parts)
    if layers[name].kind == "self":
        spans = [_columns(layers, call, name) for call in calls]
    width = max(span.stop for span in spans)
    rows = [*kept, size_of(last, "L") or 0]

    def over_all(tensor: Tensor, span: range) -> Tensor:
        own = tensor[..., : len(span)]
        return F.pad(own, (span.start, width - span.stop))

    found = Contributions()
    for map_, axes in AXES.items():
        tensors = [getattr(part, map_) for part in parts]
        if any(tensor is None for tensor in tensors):
            continue
        wide = [over_all(tensor, span) for tensor, span in zip(tensors, spans, strict=True)]
        if "L" in axes:
            own_rows = [each[..., :count, :] for each, count in zip(wide, rows, strict=True)]
            setattr(found, map_, torch.cat(own_rows, -2))
            continue
        for span, each in zip(spans[1:], wide[1:], strict=True):  # later calls know better
            wide[0][..., span.start : span.stop] = each[..., span.start : span.stop]
        setattr(found, map_, wide[0])
    for map_ in last.mixing_ratio:
        ratios = [part.mixing_ratio.get(map_) for part in parts]
        there = [ratio[:, :n] for ratio, n in zip(ratios, rows, strict=True) if ratio is not None]
        if len(there) == len(parts):
            found.mixing_ratio[map_] = torch.cat(there, 1)
    if any(part.query_padding is not None for part in parts):
        paddings = []
        for part, count in zip(parts, rows, strict=True):
            none = torch.zeros(_batch_of(part), count, dtype=torch.bool)
            own = part.query_padding
            paddings.append(none if own is None else own[:, :count].to(none.device))
        found.query_padding = torch.cat(paddings, 1)
    if any(part.key_padding is not None for part in parts):
        padding = torch.zeros(_batch_of(last), width, dtype=torch.bool)
        for part, span in zip(parts, spans, strict=True):
            if part.key_padding is not None:
                padding[:, span.start : span.stop] = part.key_padding[:, : len(span)].cpu()
        found.key_padding = padding if bool(padding.any()) else None
    return found


def _batch_of(maps: Contributions) -> int:
    return sequence_count([maps])
