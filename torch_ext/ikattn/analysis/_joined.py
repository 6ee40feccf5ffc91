"""The calls that make one sequence, as one: the steps of ``generate`` and their prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ikattn.analysis._sequences import AXES, sequence_count, size_of
from ikattn.analysis.contributions import Contributions
from ikattn.analysis.maps import Batch, Layer, RecordedMaps

__all__ = ["groups_of_calls", "joined_calls"]


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


def joined_calls(layers: Mapping[str, Layer], calls: Sequence[Batch]) -> Batch:
    """One call of several that go on from each other."""
    if len(calls) == 1:
        return calls[0]
    maps = {name: _joined([call[name] for call in calls]) for name in calls[-1]}

    def along(name: str) -> Tensor | None:
        parts = [getattr(call, name) for call in calls]
        if any(part is None for part in parts):
            return None
        if parts[-1].size(1) >= sum(part.size(1) for part in parts[:-1]):
            last: Tensor = parts[-1]  # a mask of all tokens so far
            return last
        joined_parts: Tensor = torch.cat(parts, 1)
        return joined_parts

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
