"""One page of HTML to look at a recording: the maps inside it, nothing outside it.

page/ holds its parts: page.html, page.css, page.js and flow.js, and base.css and base.js, which it
shares with the index of many lines. A number travels as two bytes, the rounded logarithm, between
the smallest and the largest of its array: the relative error is the same for small and large
numbers, and the page says how large it is.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ikattn._library import version
from ikattn._whole_files import whole_file
from ikattn.analysis._sequences import AXES, SequenceMaps, sequences
from ikattn.analysis.contributions import Contributions
from ikattn.analysis.files._common import raw_bytes
from ikattn.analysis.maps import Layer, RecordedMaps
from ikattn.analysis.page.template import template
from ikattn.analysis.tokens import Tokens

__all__ = ["describe", "page_bytes", "write_page", "write_page_to"]

_LAST_CODE = 65534  # 0 is zero, 65535 no finite number
_NOT_FINITE = 65535


def write_page(
    recording: RecordedMaps,
    path: str | os.PathLike[str],
    tokens: Tokens | None = None,
    target_tokens: Sequence[Sequence[str]] | Sequence[str] | None = None,
    *,
    title: str | None = None,
) -> int:
    """Writes the page of :meth:`Recording.to_html` and returns its size in bytes.

    Raises:
        ValueError: Tokens that do not match the maps, or nothing was recorded.
        OSError: The path cannot be written, or the disk is full.

    Example:
        >>> import tempfile, torch, ikattn
        >>> from ikattn.analysis import Batch, Layer, Recording
        >>> layer = Layer("layer.0", "self", "encoder", 4, "post", "bert")
        >>> maps = ikattn.Contributions(summed=torch.rand(1, 3, 3))
        >>> batch = Batch({"layer.0": maps})
        >>> recording = Recording("Model", ("summed",), {"layer.0": layer}, [batch])
        >>> path = tempfile.mkdtemp() + "/maps.html"
        >>> recording.to_html(path, tokens=["a", "b", "c"]) == len(open(path, "rb").read())
        True
    """
    with whole_file(path) as file:
        write_page_to(file, recording, tokens, target_tokens, title=title)
        return file.tell()


def write_page_to(
    file: BinaryIO,
    recording: RecordedMaps,
    tokens: Tokens | None = None,
    target_tokens: Sequence[Sequence[str]] | Sequence[str] | None = None,
    *,
    title: str | None = None,
) -> None:
    """Writes the page to an open file.

    Raises:
        ValueError: As :func:`write_page`; the file then holds a part of a page.
    """
    title = title or _short(recording.model) or "Attention maps"
    before, between, after = template("page", title, ("flow",))
    file.write(before)
    arrays = _Arrays(file)
    layers = list(recording.layers.values())
    shown = [
        _sequence_contents(layers, sequence, arrays)
        for sequence in sequences(recording, tokens, target_tokens)
    ]
    if not any(layer for sequence in shown for layer in sequence["layers"]):
        raise ValueError("to_html: the recording holds no map of any sequence to show")
    contents = {
        "about": describe(recording),
        "precision": arrays.precision(),
        "layers": [
            {
                "name": layer.name,
                "label": label,
                "kind": layer.kind,
                "side": layer.side,
                "heads": layer.heads,
            }
            for layer, label in zip(layers, _layer_labels(layers), strict=True)
        ],
        "sequences": shown,
    }
    file.write(between + _script_text(json.dumps(contents)).encode() + after)


def page_bytes(recording: RecordedMaps) -> int:
    """What the numbers of a recording take in its page, from shapes and padding alone."""
    numbers = 0
    for batch in recording.batches:
        for maps in batch.values():
            kept = {"T": maps.query_padding, "S": maps.key_padding}
            lengths = {axis: (~x).sum(1) for axis, x in kept.items() if x is not None}
            for name, tensor in _shown_maps(maps).items():
                size = torch.ones(tensor.shape[0], dtype=torch.int64, device=tensor.device)
                for axis, length in zip(AXES.get(name, "T"), tensor.shape[1:], strict=True):
                    size *= lengths[axis].to(size.device) if axis in lengths else length
                numbers += int(size.sum())
    return numbers * 8 // 3  # two bytes each, as base64


def _script_text(text: str) -> str:
    """JSON that cannot end the script element it stands in."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def describe(recording: RecordedMaps) -> str:
    """One line about a recording: the model, its layers and heads, and who wrote the page."""
    heads = sorted({layer.heads for layer in recording.layers.values()})
    counts = (
        "-".join(str(count) for count in dict.fromkeys((heads[0], heads[-1]))) if heads else "0"
    )
    return " · ".join(
        (
            _short(recording.model) or "unknown model",
            f"{len(recording.layers)} layers of attention, {counts} heads",
            f"ikattn {version()}",
        )
    )


def _short(model: str) -> str:
    """The model without the directories above its own: a page travels."""
    kind, _, source = model.partition(" ")
    return f"{kind} {'/'.join(PurePath(source).parts[-2:])}".strip() if source else kind


def _layer_labels(layers: Sequence[Layer]) -> list[str]:
    """Numbers in the order the layers ran, for each kind of layer on its own."""
    kinds = [
        "cross" if layer.kind == "cross" else {"encoder": "enc", "decoder": "dec"}[layer.side]
        for layer in layers
    ]
    if len(set(kinds)) <= 1:
        return [str(number) for number in range(len(layers))]
    return [f"{kind} {kinds[:position].count(kind)}" for position, kind in enumerate(kinds)]


def _sequence_contents(
    layers: Sequence[Layer], sequence: SequenceMaps, arrays: _Arrays
) -> dict[str, Any]:
    """What the page knows of one sequence: its tokens once, its arrays by their names."""
    labels: list[list[str]] = []

    def place_of(tokens: list[str]) -> int:
        if tokens not in labels:
            labels.append(tokens)
        return labels.index(tokens)

    entries: list[dict[str, Any] | None] = []
    for layer in layers:
        maps = sequence.layers.get(layer.name)
        shown = {} if maps is None else _shown_maps(maps)
        if not any(AXES.get(name, "")[-2:] == "TS" for name in shown):
            entries.append(None)
            continue
        queries, keys = sequence.labels(layer)
        entries.append(
            {
                "T": len(queries),
                "S": len(keys),
                "queries": place_of(queries),
                "keys": place_of(keys),
                "maps": {name: arrays.add(tensor) for name, tensor in shown.items()},
            }
        )
    text = _text_of(sequence.tokens or ()) or f"sequence {sequence.index}, batch {sequence.batch}"
    return {"title": text[:120], "labels": labels, "layers": entries}


def _text_of(tokens: Sequence[str]) -> str:
    """The tokens as a text, for a title."""
    if any(token.startswith(("\u0120", "\u2581")) for token in tokens):
        return "".join(tokens).replace("\u0120", " ").replace("\u2581", " ").strip()
    return " ".join(tokens)


def _shown_maps(maps: Contributions) -> dict[str, Tensor]:
    """The arrays the page needs; what every head contributes is weights x value norms."""
    shown = {name: getattr(maps, name) for name in AXES if getattr(maps, name) is not None}
    if "weights" in shown and "value_norms" in shown:
        shown.pop("per_head", None)
    shown |= {f"mixing_ratio.{name}": ratio for name, ratio in maps.mixing_ratio.items()}
    return {name: tensor for name, tensor in shown.items() if tensor.numel()}


class _Arrays:
    """Writes arrays into the page and knows how exact they still are."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._count = 0
        self._coarsest = 0.0

    def add(self, tensor: Tensor) -> dict[str, Any]:
        codes, lowest, step = _log_codes(tensor)
        name = f"array-{self._count}"
        self._count += 1
        self._coarsest = max(self._coarsest, step)
        self._file.write(f'<script type="text/plain" id="{name}">'.encode())
        self._file.write(base64.b64encode(raw_bytes(codes)))
        self._file.write(b"</script>\n")
        return {"id": name, "lo": lowest, "step": step}

    def precision(self) -> str:
        percent = 100 * math.expm1(self._coarsest / 2)
        return (
            f"Numbers in this page are within {max(percent, 0.001):.2g} % of those recorded and "
            "shown with three digits; recording.save keeps them whole."
        )


def _log_codes(tensor: Tensor) -> tuple[Tensor, float, float]:
    """Codes of the logarithms: exp(lowest + step (code - 1)); their bytes are those of uint16."""
    x = tensor.detach().cpu().double()
    finite = x.isfinite()
    positive = finite & (x > 0)
    logs = x.where(positive, x.new_ones(())).log()
    lowest = float(logs[positive].min()) if positive.any() else 0.0
    highest = float(logs[positive].max()) if positive.any() else 0.0
    step = (highest - lowest) / (_LAST_CODE - 1)
    codes = ((logs - lowest) / step if step else torch.zeros_like(logs)).round() + 1
    codes = codes.where(positive, codes.new_zeros(()))
    codes = codes.where(finite, codes.new_full((), _NOT_FINITE))
    return codes.to(torch.int32).to(torch.uint16).contiguous(), lowest, step
