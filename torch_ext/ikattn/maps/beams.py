"""Sequences of a beam search, followed through the calls in which they changed their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ikattn.maps.contribution_maps import Contributions
from ikattn.maps.layers import Batch, Layer
from ikattn.maps.sequences import AXES, changed, sequence_count, size_of


def followed_beams(
    layers: Mapping[str, Layer], calls: Sequence[Batch], beam_indices: Tensor
) -> list[Batch]:
    """The calls with the rows that became the sequences of a beam search, in their order.

    ``beam_indices`` ``[N, steps]`` is the row in which each step was made; -1 after the end.
    """
    if beam_indices.dim() != 2 or 0 in beam_indices.shape:
        raise ValueError(f"joined: beam_indices must be [N, steps], got {list(beam_indices.shape)}")
    rows = beam_indices.cpu()
    found: list[Batch] = []
    for step, call in enumerate(calls[: rows.size(1)]):  # a search may go on after its best ended
        count = sequence_count(call.values())
        own, ended = rows[:, step].clamp_min(0), rows[:, step] < 0
        if int(own.max()) >= count:
            raise ValueError(
                f"joined: beam_indices must be below {count}, the sequences of call {step}, got "
                f"{int(own.max())}"
            )
        taken = rows_of_call(call, own)
        if found and bool(ended.any()):  # the step is padding where sequences have ended
            for name, maps in taken.items():
                _end(maps, found[-1][name], ended, own_keys=layers[name].kind == "self")
            for name in ("input_mask", "target_mask"):
                now, earlier = getattr(taken, name), getattr(found[-1], name)
                if now is not None and earlier is not None:
                    setattr(taken, name, _left_as_it_was(now, earlier, ended, 0))
        found.append(taken)
    return found


def rows_of_call(call: Batch, rows: Tensor) -> Batch:
    """A call of some of its sequences, ``[N]``, in that order."""

    def taken(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x[rows.to(x.device)]
        return None if x is None else [x[i] for i in rows.tolist()]

    names = ("tokens", "target_tokens", "input_ids", "input_mask", "target_ids", "target_mask")
    layers = {n: changed(maps, lambda x, _: taken(x)) for n, maps in call.items()}
    return replace(call, layers=layers, **{name: taken(getattr(call, name)) for name in names})


def _end(maps: Contributions, before: Contributions, ended: Tensor, *, own_keys: bool) -> None:
    """Makes a step of sequences that have ended padding: its rows, and its own keys."""
    for name, axes in AXES.items():
        x, earlier = getattr(maps, name), getattr(before, name)
        if x is None:
            continue
        if "L" in axes:
            own = ended.to(x.device).view(-1, *(1,) * (x.dim() - 1))
            setattr(maps, name, x.masked_fill(own, 0))
        elif earlier is not None:
            setattr(maps, name, _left_as_it_was(x, earlier, ended, 0))
    rows = ended[:, None].expand(-1, size_of(maps, "L") or 0)
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
