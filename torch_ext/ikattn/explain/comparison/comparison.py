"""How far apart two models' maps are, in numbers, as a table and as a page.

Sizes: H heads.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ikattn._library import version
from ikattn._whole_files import whole_file
from ikattn.explain.comparison._distances import ROW_MAPS, Sums, shares
from ikattn.maps.page import sequence_contents
from ikattn.maps.page.arrays import Arrays
from ikattn.maps.page.labels import layer_labels
from ikattn.maps.page.template import write_mode
from ikattn.maps.recording import Recording
from ikattn.maps.sequences import SequenceMaps, sequences
from ikattn.maps.tokens import Tokens


@dataclass(frozen=True)
class MapDistance:
    """How far apart a layer's map is in two models, averaged over rows.

    A row is what one token takes from each other one, divided by its sum. Padding, and rows with
    nothing in them, are no part of the averages; NaN: there was nothing to average.
    Numbers are float64, ``[H]`` of maps that every head has and scalars of others.

    Attributes:
        total_variation: Half of the sum of absolute differences, 0 to 1: how much of a row would
            have to move.
        jensen_shannon: The Jensen-Shannon divergence in bits, 0 to 1.
        rank_correlation: Spearman's, -1 to 1, over the keys from which either model takes
            something. Rows whose ranks are all the same have none.
        entropy_a, entropy_b: Entropies in bits; two to their power is how many tokens a row spreads
            over.
        mixing_ratio_a, mixing_ratio_b: Scalars; NaN where the map has none, or it was not recorded.
        rows: How many rows the averages are over, but that of rank_correlation.
    """

    total_variation: Tensor
    jensen_shannon: Tensor
    rank_correlation: Tensor
    entropy_a: Tensor
    entropy_b: Tensor
    mixing_ratio_a: Tensor
    mixing_ratio_b: Tensor
    rows: Tensor

    @staticmethod
    def of(sums: Sums) -> MapDistance:
        """Divides what was added up."""

        def mean(name: str) -> Tensor:
            if name not in sums:
                return torch.tensor(torch.nan, dtype=torch.float64)
            return sums[name].cpu() / sums[_OVER.get(name, "rows")].cpu()

        rows = sums.get("rows", torch.zeros(())).cpu().long()
        means = {name: mean(name) for name in (*_MEASURES, *_RATIOS)}
        return MapDistance(**means, rows=rows)


_MEASURES = ("total_variation", "jensen_shannon", "rank_correlation", "entropy_a", "entropy_b")
_RATIOS = ("mixing_ratio_a", "mixing_ratio_b")
_OVER = {"rank_correlation": "ranked", **dict.fromkeys(_RATIOS, "tokens")}
_HEADINGS = ("TV", "JSD", "rank", "entropy A", "B", "mixing A", "B")


@dataclass(frozen=True)
class Comparison:
    """Two models' maps of the same inputs. See :func:`compare`.

    Attributes:
        names: Names of model_a and model_b.
        recording_a, recording_b: The maps of the first texts, on the CPU.
        pairs: Layers of model_b by the layers of model_a.
        distances: Distances by layer of model_a and map.
        output_distance: The root of the squared differences between the models' outputs over that
            of the squares of model_a's, over all tokens but padding; None where their shapes differ
            or there is no output of floating point.
        sequences: How many were compared.
        left_out: Layers and maps that one model alone has.
    """

    names: tuple[str, str]
    recording_a: Recording
    recording_b: Recording
    pairs: dict[str, str]
    distances: dict[str, dict[str, MapDistance]]
    output_distance: float | None
    sequences: int
    left_out: tuple[str, ...] = ()

    def __getitem__(self, layer: str) -> dict[str, MapDistance]:
        """Returns the distances of a layer's maps; KeyError names the layers that there are."""
        if layer not in self.distances:
            raise KeyError(f"no layer {layer!r} was compared; there are {', '.join(self.pairs)}")
        return self.distances[layer]

    def table(self, *, heads: bool = False) -> list[dict[str, Any]]:
        """Returns plain rows, one for each layer and map.

        Args:
            heads: Whether there is one row for each head, of maps that have heads, in place of the
                heads' mean.

        Returns:
            Dictionaries of "layer", "map", "head" (None: all of them), the measures of
            :class:`MapDistance` as floats, and "rows".
        """
        return [
            {"layer": layer, "map": name, **row}
            for layer, maps in self.distances.items()
            for name, distance in maps.items()
            for row in _rows_of(distance, heads)
        ]

    def __str__(self) -> str:
        apart = self.output_distance
        outputs = "" if apart is None else f", distance of outputs {apart:.3g}"
        title = f"A: {self.names[0]}\nB: {self.names[1]}\n{self.sequences} sequences{outputs}"
        lines = [("layer", "map", *_HEADINGS)]
        for row in self.table():
            numbers = (row[name] for name in (*_MEASURES, *_RATIOS))
            shown = ("" if x != x else f"{x:.3f}" for x in numbers)
            lines.append((row["layer"], row["map"], *shown))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = (
            "  ".join([*map(str.ljust, line[:2], widths), *map(str.rjust, line[2:], widths[2:])])
            for line in lines
        )
        without = [f"only one model has {name}" for name in self.left_out]
        return "\n".join((title, *(line.rstrip() for line in table), *without))

    def to_html(
        self,
        path: str | os.PathLike[str],
        tokens: Tokens | None = None,
        *,
        title: str | None = None,
    ) -> int:
        """Writes a page with both models' maps and their difference: one file, nothing else.

        It shows the texts that were kept. Rows are divided by their sums, as for the distances.

        Args:
            path: The page's file.
            tokens: Names, as for :meth:`Recording.to_html`. None: as compared, or numbers.
            title: The page's title. None: the models' names.

        Returns:
            The size of the page in bytes: 5.4 for each number of a map. Where texts are long,
            compare with a smaller ``keep``, or with maps that are not of every head.

        Raises:
            ValueError: Tokens that do not match the maps, or no text was kept.
            OSError: The path cannot be written, or the disk is full.
        """
        if not self.recording_a.batches:
            raise ValueError("to_html: no text was kept to show: compare with keep=1 or more")
        with whole_file(path) as file:
            title = title or " beside ".join(self.names)
            write_mode(file, "comparison", title, partial(_page_contents, self, tokens))
            return file.tell()


def _rows_of(distance: MapDistance, heads: bool) -> list[dict[str, Any]]:
    ratios = {name: float(getattr(distance, name)) for name in _RATIOS}
    rows: list[dict[str, Any]] = []
    for head in range(len(distance.rows)) if heads and distance.rows.dim() else [None]:
        measures = {name: getattr(distance, name) for name in _MEASURES}
        found = {n: float(x.nanmean() if head is None else x[head]) for n, x in measures.items()}
        count = distance.rows.max() if head is None else distance.rows[head]
        rows.append({"head": head, **found, **ratios, "rows": int(count)})
    return rows


def _page_contents(found: Comparison, tokens: Tokens | None, arrays: Arrays) -> dict[str, Any]:
    """Writes both models' rows as one array, so that equal numbers are equal in the page."""
    a, b = found.recording_a, found.recording_b
    layers = [a.layers[name] for name in found.pairs]

    def maps_of(one: SequenceMaps, other: SequenceMaps, layer: str) -> dict[str, Any]:
        of_a, of_b = one.layers[layer], other.layers[found.pairs[layer]]
        maps = {}
        for name in ROW_MAPS:
            x, y = getattr(of_a, name), getattr(of_b, name)
            if x is not None and y is not None and x.numel():
                heads = x.shape[0] if x.dim() == 3 else 0
                maps[name] = {**arrays.add(torch.stack((shares(x), shares(y)))), "heads": heads}
        return maps

    apart = found.output_distance
    return {
        "about": f"{found.sequences} sequences"
        + ("" if apart is None else f" · distance of outputs {apart:.3g}")
        + f" · ikattn {version()}",
        "sequences": [
            sequence_contents(layers, one, partial(maps_of, one, other))
            for one, other in zip(sequences(a, tokens), sequences(b), strict=True)
        ],
        "precision": arrays.precision(),
        "models": found.names,
        "layers": [
            {"name": layer.name, "label": label, "kind": layer.kind}
            for layer, label in zip(layers, layer_labels(layers), strict=True)
        ],
        "table": [
            {name: None if x != x else x for name, x in row.items()}
            for row in found.table(heads=True) + found.table()
        ],
    }
