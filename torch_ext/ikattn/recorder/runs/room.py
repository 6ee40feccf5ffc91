"""Whether maps fit into memory, asked before they are made.

Sizes: B batch, H query heads, L queries, S keys.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from ikattn import _memory
from ikattn.maps.sequences import AXES
from ikattn.recorder.calls.attention_call import AttentionCall
from ikattn.recorder.runs.rows import RowsAsked, pair_maps


def check_room(
    call: AttentionCall,
    layer: str,
    wanted: Collection[str],
    rows: RowsAsked | None,
    layers: int,
    to_cpu: bool,
) -> None:
    """Raises torch.OutOfMemoryError where maps of queries and keys need more than is free.

    ``layers`` like this one are kept. Reduced maps are never whole, and fit.
    """
    names = pair_maps(wanted)
    if not names or (rows is not None and rows.reduction is not None):
        return
    B, H, L, S = call.sizes
    if rows is not None:
        L = len(rows.of_call(call, layer).numbers)
    pairs = B * L * S * sum(H if "H" in AXES[name] else 1 for name in names)
    size = pairs * call.value.element_size()
    device = call.query.device
    kept_on = torch.device("cpu") if to_cpu else device
    for place, count in {device: 1, kept_on: layers}.items():
        free = _memory.free_memory(place)
        if free is not None and count * size > free:
            of_layers = "1 layer" if count == 1 else f"{count} layers"
            raise torch.OutOfMemoryError(
                f"record: no memory for the maps {', '.join(names)} of {of_layers}, from {layer} "
                f"on: {B} x {L} x {S} pairs of {H} heads take {_in_words(count * size)}, and "
                f"{_in_words(free)} of {place} are free; ask for reduce= (such as 'columns'), "
                "layers= (fewer at a time) or queries= (some rows), or write them to disk by "
                "on_layer= (ikattn.maps.LayerWriter)"
            )


def _in_words(size: float) -> str:
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"
