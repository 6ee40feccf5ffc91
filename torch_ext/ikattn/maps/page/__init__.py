"""One page of HTML to look at maps: what it shows is inside it, and it loads nothing.

It has three modes: maps of a recording, written here, and attributions and comparisons, whose
contents :mod:`ikattn.explain` gives to ``write_mode`` of ``template``. A number of a map travels as
two bytes, the rounded logarithm between the smallest and the largest of its array: the relative
error is the same for small and large numbers, and the page says how large it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ikattn._library import version
from ikattn.maps.contribution_maps import Contributions
from ikattn.maps.layers import Layer, RecordedMaps
from ikattn.maps.page.arrays import Arrays
from ikattn.maps.page.labels import layer_labels, short_name
from ikattn.maps.page.template import write_mode
from ikattn.maps.sequences import AXES, SequenceMaps, sequences, tensors_of
from ikattn.maps.tokens import Tokens
from ikattn.maps.words import texts_of


def write_page(
    file: BinaryIO,
    recording: RecordedMaps,
    tokens: Tokens | None = None,
    target_tokens: Sequence[Sequence[str]] | Sequence[str] | None = None,
    *,
    title: str | None = None,
) -> None:
    """Writes the page of :meth:`Recording.to_html`, of which an error leaves a part."""
    layers = list(recording.layers.values())

    def contents(arrays: Arrays) -> dict[str, Any]:
        def maps_of(sequence: SequenceMaps, layer: str) -> dict[str, Any]:
            shown = _shown_maps(sequence.layers[layer])
            if not any(AXES.get(name, "")[-2:] == "LS" for name in shown):
                return {}
            return {name: arrays.add(tensor) for name, tensor in shown.items()}

        shown = [
            sequence_contents(layers, sequence, partial(maps_of, sequence))
            for sequence in sequences(recording, tokens, target_tokens)
        ]
        if not any(layer for sequence in shown for layer in sequence["layers"]):
            raise ValueError("to_html: the recording holds no map of any sequence to show")
        return {
            "about": describe(recording),
            "precision": f"{arrays.precision()} recording.save keeps them whole.",
            "layers": [
                {x: getattr(layer, x) for x in ("name", "kind", "side", "heads")} | {"label": label}
                for layer, label in zip(layers, layer_labels(layers), strict=True)
            ],
            "sequences": shown,
        }

    write_mode(file, "maps", title or short_name(recording.model) or "Attention maps", contents)


def page_bytes(recording: RecordedMaps) -> int:
    """Returns the bytes of a recording's numbers in its page, by shapes and padding alone."""
    numbers = 0
    for batch in recording.batches:
        for maps in batch.values():
            kept = {"L": maps.query_padding, "S": maps.key_padding}
            lengths = {axis: (~x).sum(1) for axis, x in kept.items() if x is not None}
            for name, tensor in _shown_maps(maps).items():
                size = torch.ones(tensor.shape[0], dtype=torch.int64, device=tensor.device)
                for axis, length in zip(AXES.get(name, "L"), tensor.shape[1:], strict=True):
                    size *= lengths[axis].to(size.device) if axis in lengths else length
                numbers += int(size.sum())
    return numbers * 8 // 3  # two bytes each, as base64


def describe(recording: RecordedMaps) -> str:
    """Returns a line about a recording: the model, its layers and heads, and who wrote the page."""
    heads = sorted({layer.heads for layer in recording.layers.values()}) or [0]
    counts = "-".join(map(str, dict.fromkeys((heads[0], heads[-1]))))
    model = short_name(recording.model) or "unknown model"
    layers = f"{len(recording.layers)} layers of attention, {counts} heads"
    return f"{model} · {layers} · ikattn {version()}"


def sequence_contents(
    layers: Sequence[Layer], sequence: SequenceMaps, maps_of: Callable[[str], dict[str, Any]]
) -> dict[str, Any]:
    """Returns what the page knows of one sequence: its tokens once, its arrays by their names.

    maps_of: Gives the arrays of a layer by its name; none: the layer is not shown.
    """
    labels: list[list[str]] = []

    def place_of(tokens: list[str]) -> int:
        if tokens not in labels:
            labels.append(tokens)
        return labels.index(tokens)

    entries: list[dict[str, Any] | None] = []
    for layer in layers:
        maps = maps_of(layer.name) if layer.name in sequence.layers else {}
        if not maps:
            entries.append(None)
            continue
        queries, keys = sequence.labels(layer)
        places = {"queries": place_of(queries), "keys": place_of(keys)}
        entries.append({"L": len(queries), "S": len(keys), **places, "maps": maps})
    text = (
        "".join(texts_of(sequence.tokens or ())).strip()
        or f"sequence {sequence.index}, batch {sequence.batch}"
    )
    return {"title": text[:120], "labels": labels, "layers": entries}


def _shown_maps(maps: Contributions) -> dict[str, Tensor]:
    """Returns the arrays the page needs.

    What a head contributes is weights x value norms, which the page makes itself, unless the heads
    had a gate.
    """
    shown = {name: tensor for name, _, tensor in tensors_of(maps) if tensor.numel()}
    if {"weights", "value_norms", "per_head"} <= shown.keys():
        product = shown["weights"].double() * shown["value_norms"].double().unsqueeze(-2)
        if torch.allclose(product, shown["per_head"].double(), rtol=0.01, equal_nan=True):
            del shown["per_head"]
    return shown
