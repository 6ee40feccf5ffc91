"""The calls that make one sequence, as one: the steps of ``generate`` and their prompt."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from ikattn.analysis._sequences import AXES, sequence_count, size_of
from ikattn.analysis.contributions import Contributions
from ikattn.analysis.maps import Batch, Layer, RecordedMaps

__all__ = ["followed_beams", "groups_of_calls", "joined_calls"]


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
        T, S = size_of(batch[name], "T"), size_of(batch[name], "S")
        earlier = size_of(before[name], "S")
        if T is None or S is None or earlier is None or earlier + T != S:
            return False
    return True


def followed_beams(
    layers: Mapping[str, Layer], calls: Sequence[Batch], beam_indices: Tensor
) -> list[Batch]:
    """The calls with the rows that became the sequences of a beam search, in their order.

    Args:
        layers: Of the recording.
        calls: The prompt and its steps.
        beam_indices: ``[N, steps]``, the row in which each step was made; -1 after the end.

    Raises:
        ValueError: There are no steps, or rows beyond the batch.
    """
    if beam_indices.dim() != 2 or 0 in beam_indices.shape:
        raise ValueError(f"joined: beam_indices must be [N, steps], got {list(beam_indices.shape)}")
    rows = beam_indices.cpu()
    found: list[Batch] = []
    for step, call in enumerate(calls[: rows.size(1)]):  # a search may go on after its best ended
        count = sequence_count(list(call.values()))
        own, ended = rows[:, step].clamp_min(0), rows[:, step] < 0
        if int(own.max()) >= count:
            raise ValueError(
                f"joined: beam_indices must name one of {count} rows, got {int(own.max())}"
            )
        before = found[-1] if found else None
        found.append(_rows_of_call(layers, call, own, ended, before))
    return found


def _rows_of_call(
    layers: Mapping[str, Layer], call: Batch, rows: Tensor, ended: Tensor, before: Batch | None
) -> Batch:
    """The rows of a call, of which those that have ended are padding.

    Args:
        layers: Of the recording.
        call: The call.
        rows: ``[N]``, where the sequences are in it.
        ended: bool ``[N]``, those that are over.
        before: The call before with its rows; None for the first.
    """

    def taken(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[rows.to(x.device)]

    def of(name: str, maps: Contributions) -> Contributions:
        found = Contributions(query_padding=taken(maps.query_padding))
        found.key_padding = taken(maps.key_padding)
        for part in AXES:
            setattr(found, part, taken(getattr(maps, part)))
        for part, ratio in maps.mixing_ratio.items():
            found.mixing_ratio[part] = ratio[rows.to(ratio.device)]
        if before is not None and bool(ended.any()):
            _end(found, before[name], ended, own_keys=layers[name].kind == "self")
        return found

    found = Batch({name: of(name, maps) for name, maps in call.items()})
    for name in ("input_ids", "input_mask", "target_ids", "target_mask"):
        now = taken(getattr(call, name))
        earlier = None if before is None else getattr(before, name)
        if name.endswith("mask") and now is not None and earlier is not None:
            now = _left_as_it_was(now, earlier, ended, 0)
        setattr(found, name, now)
    return found


def _end(maps: Contributions, before: Contributions, ended: Tensor, *, own_keys: bool) -> None:
    """Makes a step of sequences that have ended padding: its rows, and its own keys."""
    for name, axes in AXES.items():
        x, earlier = getattr(maps, name), getattr(before, name)
        if x is None:
            continue
        if "T" in axes:
            own = ended.to(x.device).view(-1, *(1,) * (x.dim() - 1))
            setattr(maps, name, x.masked_fill(own, 0))
        elif earlier is not None:
            setattr(maps, name, _left_as_it_was(x, earlier, ended, 0))
    rows = ended[:, None].expand(-1, size_of(maps, "T") or 0)
    for name, ratio in maps.mixing_ratio.items():
        maps.mixing_ratio[name] = ratio.masked_fill(rows.to(ratio.device), 0)
    known = maps.query_padding
    maps.query_padding = rows if known is None else known | rows.to(known.device)
    if own_keys:
        none = [torch.zeros(len(ended), size_of(each, "S") or 0).bool() for each in (maps, before)]
        now, earlier = (
            other if each.key_padding is None else each.key_padding.cpu()
            for each, other in zip((maps, before), none, strict=True)
        )
        maps.key_padding = _left_as_it_was(now, earlier, ended, True)


def _left_as_it_was(now: Tensor, before: Tensor, ended: Tensor, value: float | bool) -> Tensor:
    """``now`` with the rows of ``before`` where sequences have ended, and ``value`` after them."""
    wide = F.pad(before, (0, now.size(-1) - before.size(-1)), value=value)
    own = ended.to(now.device).view(-1, *(1,) * (now.dim() - 1))
    return torch.where(own, wide.to(now), now)


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

    return Batch(
        maps,
        calls[-1].tokens,
        calls[-1].target_tokens,
        along("input_ids"),
        along("input_mask"),
        along("target_ids"),
        along("target_mask"),
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
        if "T" not in axes:
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
            T = size_of(part, "T") or 0
            none = torch.zeros(_batch_of(part), T, dtype=torch.bool)
            rows.append(none if part.query_padding is None else part.query_padding.to(none.device))
        found.query_padding = torch.cat(rows, 1)
    return found


def _batch_of(maps: Contributions) -> int:
    return sequence_count([maps])
