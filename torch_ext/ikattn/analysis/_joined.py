"""The calls that make one sequence, as one: the steps of ``generate`` and their prompt."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from ikattn.analysis._beams import rows_of_call
from ikattn.analysis._sequences import AXES, sequence_count, size_of
from ikattn.analysis.contributions import Contributions
from ikattn.analysis.maps import Batch, Layer, RecordedMaps

__all__ = ["groups_of_calls", "joined_calls", "with_encoders"]


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
    for name in own:
        L, S = size_of(batch[name], "L"), size_of(batch[name], "S")
        earlier = size_of(before[name], "S")
        if L is None or S is None or earlier is None or earlier + L != S:
            return False
    return True


def _check_places(calls: Sequence[Batch]) -> None:
    """Raises ValueError where the keys of a call are not those of the call before, and its own."""
    rows = sequence_count(list(calls[0].values()))
    if rows > 1 and all(maps.value_norms is None for maps in calls[0].values()):
        warnings.warn(
            f"joined: {rows} sequences without the map 'value_norms': whether they changed their "
            "places between calls, as in a beam search, cannot be seen",
            stacklevel=4,
        )
    for before, call in pairwise(calls):
        for name, maps in call.items():
            earlier, now = before[name].value_norms, maps.value_norms
            if earlier is None or now is None:
                continue
            kept = now[..., : earlier.size(-1)]
            size = earlier.nan_to_num().abs().max().clamp_min(1e-30)
            off = (kept - earlier).nan_to_num().abs()
            padding = before[name].key_padding
            if padding is not None:
                off = off.masked_fill(padding.to(off.device).unsqueeze(1), 0)
            if float(off.max()) > 1e-2 * float(size):
                raise ValueError(
                    "joined: sequences changed their places between calls, as those of a beam "
                    "search do: give beam_indices, or generate with num_beams=1"
                )


def joined_calls(layers: Mapping[str, Layer], calls: Sequence[Batch]) -> Batch:
    """One call of several that go on from each other.

    Raises:
        ValueError: Sequences changed their places in between.
    """
    if len(calls) == 1:
        return calls[0]
    _check_places(calls)
    maps = {name: _joined([call[name] for call in calls]) for name in calls[-1]}

    def along(name: str) -> Tensor | None:
        parts = [getattr(call, name) for call in calls]
        if any(part is None for part in parts):
            return None
        ids = [getattr(call, name.replace("mask", "ids")) for call in calls]
        count = sum(each.size(1) for each in ids if each is not None)
        last: Tensor = parts[-1]
        if name.endswith("mask") and last.size(1) == count:
            return last  # that of all tokens so far
        joined_parts: Tensor = torch.cat(parts, 1)
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


def _joined(parts: Sequence[Contributions]) -> Contributions:
    """Rows below each other, over the columns of the last."""
    S = size_of(parts[-1], "S")
    last = parts[-1]
    found = Contributions(key_padding=last.key_padding)
    for name, axes in AXES.items():
        tensors = [getattr(part, name) for part in parts]
        if any(tensor is None for tensor in tensors):
            continue
        if "L" not in axes:
            setattr(found, name, tensors[-1])
            continue
        assert S is not None
        wide = [F.pad(tensor, (0, S - tensor.size(-1))) for tensor in tensors]
        setattr(found, name, torch.cat(wide, -2))
    for name in last.mixing_ratio:
        ratios = [part.mixing_ratio.get(name) for part in parts]
        there = [ratio for ratio in ratios if ratio is not None]
        if len(there) == len(parts):
            found.mixing_ratio[name] = torch.cat(there, 1)
    if any(part.query_padding is not None for part in parts):
        rows = []
        for part in parts:
            L = size_of(part, "L") or 0
            none = torch.zeros(_batch_of(part), L, dtype=torch.bool)
            rows.append(none if part.query_padding is None else part.query_padding.to(none.device))
        found.query_padding = torch.cat(rows, 1)
    return found


def _batch_of(maps: Contributions) -> int:
    return sequence_count([maps])
