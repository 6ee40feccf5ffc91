"""Pictures of maps with matplotlib: one layer large, or all layers in a grid."""

from __future__ import annotations

import math
import os
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import Tensor

from ikattn._optional import optional
from ikattn._whole_files import whole_file
from ikattn.maps.layers import Layer, RecordedMaps, name_of_layer
from ikattn.maps.sequences import AXES, SequenceMaps, sequences, tensors_of
from ikattn.maps.tokens import Tokens

# Scales of the page, too. Lightness falls all the way, so they read without colours.
_WEIGHT_COLOURS = ("#f4f3ef", "#d3e1ea", "#a5c6dd", "#6fa5cb", "#3f80b2", "#1f5a90", "#0d3563")
_NORM_COLOURS = ("#f4f3ef", "#f3dfc4", "#ecc08b", "#de9a55", "#c2712f", "#934c1c", "#58290d")
_SIGNED_COLOURS = ("#58290d", "#c2712f", "#ecc08b", "#f4f3ef", "#a5c6dd", "#3f80b2", "#0d3563")
INK, QUIET = "#1d2126", "#656c75"
_TITLES = {
    "weights": "attention weight",
    "per_head": "N of each head",
    "summed": "N, heads summed",
    "with_residual": "N with residual",
    "with_norm": "N with residual and norm",
    "encoder": "N through the whole block",
    "alti": "ALTI",
    "projection": "part in the output",
    "similarity": "similarity",
}
_LABELLED = 72  # with more tokens, labels would overlap: every second or third is named


def draw(
    recording: RecordedMaps,
    path: str | os.PathLike[str],
    layer: str | int | None = None,
    map: str | None = None,
    batch: int = 0,
    sequence: int = 0,
    tokens: Tokens | None = None,
    target_tokens: Sequence[Sequence[str]] | Sequence[str] | None = None,
    *,
    dpi: int = 160,
) -> None:
    """Draws what :meth:`Recording.plot` describes."""
    kind = picture_format("plot", path)
    if map is not None and map not in _TITLES:
        raise ValueError(f"plot: map must be one of {', '.join(_TITLES)}, got {map!r}")
    recording.check_recorded()
    if not 0 <= batch < len(recording.batches):
        raise ValueError(f"plot: batch must be below {len(recording.batches)}, got {batch}")
    is_tokenizer = hasattr(tokens, "convert_ids_to_tokens")  # it may need the calls before
    place, of = batch, recording
    if not is_tokenizer:
        calls = [recording.batches[batch]]
        place, of = 0, RecordedMaps(recording.model, recording.maps, recording.layers, calls)
    named = sequences(of, tokens if is_tokenizer else None)
    shown = next((x for x in named if (x.batch, x.index) == (place, sequence)), None)
    if shown is None:
        raise ValueError(f"plot: sequence must be one of batch {batch}, got {sequence}")
    own = shown.tokens if tokens is None or is_tokenizer else _of_one(tokens)
    targets = shown.target_tokens if target_tokens is None else _of_one(target_tokens)
    shown = replace(shown, batch=batch, tokens=own, target_tokens=targets)
    layers = [one for one in _chosen_layers(recording, layer) if one.name in shown.layers]
    there = {
        one.name: [x for x, axes, _ in tensors_of(shown.layers[one.name]) if axes.endswith("LS")]
        for one in layers
    }
    chosen = _chosen_map(map, {name for names in there.values() for name in names})
    drawn = [one for one in layers if chosen in there[one.name]]
    figure = _figure(shown, drawn, chosen, is_single=layer is not None)
    with whole_file(path) as file:
        figure.savefig(file, format=kind, dpi=dpi)


def picture_format(function: str, path: str | os.PathLike[str]) -> str:
    """Returns the format that a picture's file must have by its ending."""
    kind = Path(path).suffix.lower().removeprefix(".")
    if kind not in ("png", "svg", "pdf"):
        raise ValueError(f"{function}: path must end in .png, .svg, .pdf, got {Path(path).name!r}")
    return kind


def _of_one(tokens: Any) -> Sequence[str]:
    """The tokens of a sequence, given by themselves or in a list of one."""
    is_listed = len(tokens) == 1 and not isinstance(tokens[0], str)
    return cast(Sequence[str], tokens[0] if is_listed else tokens)


def _chosen_layers(recording: RecordedMaps, layer: str | int | None) -> list[Layer]:
    if layer is None:
        return list(recording.layers.values())
    try:
        return [recording.layers[name_of_layer(recording.layers, layer)]]
    except KeyError:
        raise ValueError(
            f"plot: layer must be a number below {len(recording.layers)} or one of "
            f"{', '.join(recording.layers)}, got {layer!r}"
        ) from None


def _chosen_map(map: str | None, there: Collection[str]) -> str:
    """The map asked for; else "summed", or the only one there is but for the weights beside it."""
    known = ", ".join(sorted(there)) or "none"
    if map is not None:
        if map not in there:
            raise ValueError(f"plot: the map {map!r} was not recorded; there are {known}")
        return map
    for names in ({"summed"} & set(there), set(there) - {"weights"}, set(there)):
        if len(names) == 1:
            return names.pop()
    raise ValueError(f"plot: map must say which map to draw; there are {known}")


def matplotlib(module: str) -> Any:
    return optional(f"matplotlib.{module}", "a picture", "'ikattn[viz]'")


class _Panel(NamedTuple):
    """A map in the picture; lengths are in inches."""

    layer: Layer
    name: str
    values: Tensor  # [L, S]
    queries: list[str]
    keys: list[str]

    def height(self, width: float) -> float:
        return width * max(self.values.shape[0], 1) / max(self.values.shape[1], 1)


def _figure(shown: SequenceMaps, layers: list[Layer], map: str, *, is_single: bool) -> Any:
    """The map of each layer, beside its weights, in as many columns as there is room for."""
    panels: list[_Panel] = []
    for layer in layers:
        queries, keys = ([_plain(token) for token in tokens] for tokens in shown.labels(layer))
        maps = shown.layers[layer.name]
        for name in dict.fromkeys(("weights", map)):
            if getattr(maps, name) is not None:
                values = getattr(maps, name).double()
                if values.dim() == 3:
                    values = values.sum(0) if name == "projection" else values.mean(0)  # parts add
                panels.append(_Panel(layer, name, values, queries, keys))
    pairs = sum(panel.layer is layers[0] for panel in panels)
    columns = pairs if is_single else pairs * min(4 // pairs, len(layers))
    longest = max(max(panel.values.shape) for panel in panels)
    least, slope, most, margin = (3.2, 0.2, 9.0, 0.6) if is_single else (2.2, 0.08, 4.0, 1.0)
    return _drawn(panels, max(least, min(most, slope * longest + margin)), columns)


def _drawn(panels: list[_Panel], side: float, columns: int) -> Any:
    """All panels in one pair of axes, measured in inches: axes of their own take most of the time.

    Tokens are written once for panels that stand beside, or above, each other with the same.
    """
    at = {divmod(place, columns): panel for place, panel in enumerate(panels)}
    size = {}  # in points: rows as high as the type, where they can be
    for place, panel in at.items():
        stride = math.ceil(max(panel.values.shape) / _LABELLED)
        size[place] = max(3.5, min(8.5, 60 * side * stride / max(panel.values.shape[1], 1)))

    def starts_row(row: int, column: int) -> bool:
        before = at.get((row, column - 1))
        return before is None or before.queries != at[row, column].queries

    def ends_column(row: int, column: int) -> bool:
        below = at.get((row + 1, column))
        return below is None or below.keys != at[row, column].keys

    gap, heading = 0.16, 0.42
    lefts, x = [], 0.0
    for column in range(columns):
        labelled = [p for p in at if p[1] == column and starts_row(*p)]
        x += gap + max((_longest(at[p].queries, size[p]) for p in labelled), default=0.0)
        lefts.append(x)
        x += side
    tops, y = [], 0.0
    for row in range(1 + max(at)[0]):
        y += heading
        tops.append(y)
        own = [p for p in at if p[0] == row]
        below = [_longest(at[p].keys, size[p]) for p in own if ends_column(*p)]
        y += max(at[p].height(side) for p in own) + max(below, default=0.0) + gap
    width, height = x + 0.2, y + gap
    figure = matplotlib("figure").Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    for (row, column), panel in at.items():
        place = row, column
        corner = lefts[column], tops[row]
        _heat_map(axes, panel, corner, side, size[place], starts_row(*place), ends_column(*place))
    return figure


def _longest(tokens: Sequence[str], size: float) -> float:
    """The room that tokens take, in inches."""
    return 0.08 + 0.0085 * size * max((text_width(token) for token in tokens), default=0)


def text_width(token: str) -> int:
    """The columns that a token takes in type of one width."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in token)


def _heat_map(
    axes: Any,
    panel: _Panel,
    place: tuple[float, float],
    side: float,
    size: float,
    names_queries: bool,
    names_keys: bool,
) -> None:
    name, values = panel.name, panel.values
    is_signed = bool((values < 0).any())  # projections, and weights of a delta rule
    colours = _WEIGHT_COLOURS if name in ("weights", "similarity") else _NORM_COLOURS
    colours = _SIGNED_COLOURS if is_signed else colours
    # NaN must not look like a small number.
    scale = matplotlib("colors").LinearSegmentedColormap.from_list(name, colours)
    scale = scale.with_extremes(bad="#be2878")
    finite = values[values.isfinite()]
    top = (float(finite.abs().max()) if finite.numel() else 0.0) or 1.0
    lowest = -top if is_signed else 0.0
    (left, above), (L, S) = place, values.shape
    height = panel.height(side)
    axes.imshow(
        values.tolist(),
        cmap=scale,
        vmin=lowest,
        vmax=top,
        extent=(left, left + side, above + height, above),
        interpolation="nearest",
        aspect="auto",
    )
    text = {"color": INK, "parse_math": False}
    axes.text(left, above - 0.2, panel.layer.name, fontsize=7.5, va="bottom", **text)
    heads = ", all heads" if name == "projection" else ", mean over heads"
    heads = heads if AXES[name].startswith("H") else ""
    title = f"{_TITLES[name]}{heads}, {lowest:.3g} to {top:.3g}"
    axes.text(left, above - 0.05, title, fontsize=7.5, va="bottom", **text | {"color": QUIET})
    if names_queries:
        for t in range(0, L, math.ceil(L / _LABELLED)):
            y = above + height * (t + 0.5) / L
            axes.text(
                left - 0.05, y, panel.queries[t], fontsize=size, ha="right", va="center", **text
            )
    if names_keys:
        for s in range(0, S, math.ceil(S / _LABELLED)):
            x = left + side * (s + 0.5) / S
            axes.text(
                x, above + height + 0.05, panel.keys[s], fontsize=size, rotation=90, ha="center",
                va="top", **text,
            )  # fmt: skip


def _plain(token: str) -> str:
    """A token as text: no formula, no control characters, and short."""
    text = token.replace("\u0120", "").replace("\u2581", "").replace("\u010a", "\u21b5")
    text = "".join(character if character.isprintable() else "\ufffd" for character in text)
    text = text if len(text) <= 16 else text[:15] + "\u2026"
    return text or "\u2423"
