"""Pictures of maps with matplotlib: one layer large, or all layers in a grid."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from ikattn._optional import optional
from ikattn._whole_files import whole_file
from ikattn.analysis._sequences import AXES, SequenceMaps, sequences
from ikattn.analysis.contributions import Contributions
from ikattn.analysis.maps import Layer, RecordedMaps

__all__ = ["draw"]

_FORMATS = {".png": "png", ".svg": "svg", ".pdf": "pdf"}
# The same two scales as on the page: lightness falls all the way, so they read without colours too.
_WEIGHT_COLOURS = ("#f4f3ef", "#d3e1ea", "#a5c6dd", "#6fa5cb", "#3f80b2", "#1f5a90", "#0d3563")
_NORM_COLOURS = ("#f4f3ef", "#f3dfc4", "#ecc08b", "#de9a55", "#c2712f", "#934c1c", "#58290d")
_INK, _QUIET = "#1d2126", "#656c75"
_TITLES = {
    "weights": "attention weight",
    "per_head": "N of each head",
    "summed": "N, heads summed",
    "with_residual": "N with residual",
    "with_norm": "N with residual and norm",
    "encoder": "N through the whole block",
    "similarity": "similarity",
}
_LABELLED = 72  # with more tokens, labels would overlap: every second or third is named


def draw(
    recording: RecordedMaps,
    path: str | os.PathLike[str],
    layer: str | int | None = None,
    map: str = "summed",
    batch: int = 0,
    sequence: int = 0,
    tokens: Sequence[Sequence[str]] | Sequence[str] | None = None,
    target_tokens: Sequence[Sequence[str]] | Sequence[str] | None = None,
    *,
    dpi: int = 160,
) -> None:
    """Draws what :meth:`Recording.plot` describes.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
        ValueError: A map, layer, sequence or number of tokens that does not fit.
        OSError: The path cannot be written, or the disk is full.

    Example:
        >>> import tempfile, torch, ikattn
        >>> from ikattn.analysis import Batch, Layer, Recording
        >>> layer = Layer("layer.0", "self", "encoder", 4, "post", "bert")
        >>> maps = ikattn.Contributions(summed=torch.rand(1, 3, 3))
        >>> batch = Batch({"layer.0": maps})
        >>> recording = Recording("Model", ("summed",), {"layer.0": layer}, [batch])
        >>> recording.plot(tempfile.mkdtemp() + "/layer.png", layer=0, tokens=["a", "b", "c"])
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _FORMATS:
        raise ValueError(f"plot: path must end in {', '.join(_FORMATS)}, got {Path(path).name!r}")
    if map not in _TITLES:
        raise ValueError(f"plot: map must be one of {', '.join(_TITLES)}, got {map!r}")
    shown = _chosen_sequence(recording, batch, sequence, tokens, target_tokens)
    layers = [one for one in _chosen_layers(recording, layer) if one.name in shown.layers]
    panels = [_panels(one, shown.layers[one.name], map) for one in layers]
    if not any(panels):
        there = sorted({name for maps in shown.layers.values() for name in _square_maps(maps)})
        raise ValueError(
            f"plot: the map {map!r} was not recorded; there are {', '.join(there) or 'none'}"
        )
    figure = _figure(shown, layers, panels, single=layer is not None)
    with whole_file(path) as file:
        figure.savefig(file, format=_FORMATS[suffix], dpi=dpi)


def _chosen_sequence(
    recording: RecordedMaps,
    batch: int,
    sequence: int,
    tokens: Sequence[Sequence[str]] | Sequence[str] | None,
    target_tokens: Sequence[Sequence[str]] | Sequence[str] | None,
) -> SequenceMaps:
    recording.check_recorded()
    if not 0 <= batch < len(recording.batches):
        raise ValueError(f"plot: batch must be below {len(recording.batches)}, got {batch}")
    one = RecordedMaps(
        recording.model, recording.maps, recording.layers, [recording.batches[batch]]
    )
    for found in sequences(one):
        if found.index == sequence:
            return SequenceMaps(
                batch,
                sequence,
                found.tokens if tokens is None else _of_one(tokens),
                found.target_tokens if target_tokens is None else _of_one(target_tokens),
                found.layers,
            )
    raise ValueError(f"plot: sequence must be one of batch {batch}, got {sequence}")


def _of_one(tokens: Sequence[Sequence[str]] | Sequence[str]) -> Sequence[str]:
    """The tokens of a sequence, given by themselves or in a list of one."""
    if len(tokens) == 1 and not isinstance(tokens[0], str):
        return tokens[0]
    return cast(Sequence[str], tokens)


def _chosen_layers(recording: RecordedMaps, layer: str | int | None) -> list[Layer]:
    names = recording.names
    if layer is None:
        return list(recording.layers.values())
    if isinstance(layer, int) and -len(names) <= layer < len(names):
        return [recording.layers[names[layer]]]
    if isinstance(layer, str) and layer in recording.layers:
        return [recording.layers[layer]]
    raise ValueError(
        f"plot: layer must be a number below {len(names)} or one of {', '.join(names)}, "
        f"got {layer!r}"
    )


def _square_maps(maps: Contributions) -> list[str]:
    return [name for name, axes in AXES.items() if axes.endswith("TS") and _given(maps, name)]


def _given(maps: Contributions, name: str) -> bool:
    return getattr(maps, name) is not None


def _panels(layer: Layer, maps: Contributions, map: str) -> list[tuple[str, Tensor]]:
    """Names and maps ``[T, S]`` to stand side by side; empty where the map is not there."""
    if not _given(maps, map):
        return []
    names = [map] if map == "weights" or not _given(maps, "weights") else ["weights", map]
    return [(name, _over_heads(getattr(maps, name))) for name in names]


def _over_heads(values: Tensor) -> Tensor:
    return values.double().mean(0) if values.dim() == 3 else values.double()


def _matplotlib(module: str) -> Any:
    return optional(f"matplotlib.{module}", "a picture", "'ikattn[viz]'")


def _figure(
    shown: SequenceMaps,
    layers: list[Layer],
    panels: list[list[tuple[str, Tensor]]],
    *,
    single: bool,
) -> Any:
    drawn = [(one, found) for one, found in zip(layers, panels, strict=True) if found]
    pairs = len(drawn[0][1])
    columns = pairs if single else pairs * min(4 // pairs, len(drawn))
    rows = math.ceil(len(drawn) * pairs / columns)
    longest = max(max(tensor.shape) for _, found in drawn for _, tensor in found)
    side = (
        max(3.2, min(9.0, 0.2 * longest + 1.6)) if single else max(2.6, min(5, 0.1 * longest + 1.6))
    )
    figure = _matplotlib("figure").Figure(
        figsize=(side * columns + 0.4, side * rows + 0.5), layout="constrained"
    )
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_visible(False)
    flat = iter(grid.flat)
    for one, found in drawn:
        labels = shown.labels(one)
        for name, values in found:
            _heat_map(figure, next(flat), one, name, values, labels, side)
    return figure


def _heading(name: str, values: Tensor) -> str:
    per_head = AXES[name].startswith("H")
    return _TITLES[name] + (", mean over heads" if per_head else "")


def _heat_map(
    figure: Any,
    axes: Any,
    layer: Layer,
    name: str,
    values: Tensor,
    labels: tuple[list[str], list[str]],
    side: float,
) -> None:
    colours = _WEIGHT_COLOURS if name in ("weights", "similarity") else _NORM_COLOURS
    # NaN must not look like a small number.
    scale = _matplotlib("colors").LinearSegmentedColormap.from_list(name, colours)
    scale = scale.with_extremes(bad="#be2878")
    axes.set_visible(True)
    finite = values[values.isfinite()]
    top = float(finite.max()) if finite.numel() else 1.0
    image = axes.imshow(values.tolist(), cmap=scale, vmin=0, vmax=top or 1.0, aspect="auto")
    axes.set_title(f"{layer.name}\n{_heading(name, values)}", fontsize=7.5, color=_INK, loc="left")
    axes.set_box_aspect(values.shape[0] / values.shape[1])
    queries, keys = labels
    for axis, tokens in ((axes.yaxis, queries), (axes.xaxis, keys)):
        stride = math.ceil(len(tokens) / _LABELLED)
        size = max(3.5, min(8.5, 52 * side / (len(tokens) / stride + 8)))
        axis.set_ticks(range(0, len(tokens), stride))
        names = [_plain(token) for token in tokens[::stride]]
        axis.set_ticklabels(names, fontsize=size, color=_INK)
    axes.tick_params(length=0, pad=2)
    axes.tick_params(axis="x", rotation=90)
    for spine in axes.spines.values():
        spine.set_visible(False)
    bar = figure.colorbar(image, ax=axes, shrink=0.7, aspect=24, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=6.5, length=2, color=_QUIET, labelcolor=_QUIET)


def _plain(token: str) -> str:
    """A token as text: no formula, no control characters, and short."""
    text = token.replace("\u0120", "").replace("\u2581", "").replace("\u010a", "\u21b5")
    text = "".join(character if character.isprintable() else "\ufffd" for character in text)
    text = text if len(text) <= 16 else text[:15] + "\u2026"
    return text.replace("$", r"\$") or "\u2423"
