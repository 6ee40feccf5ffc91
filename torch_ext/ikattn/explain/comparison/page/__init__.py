"""The page of a comparison: model A's map, model B's, and their difference.

page.html, page.css and page.js are its parts, after those of a recording's page for colours and
controls. Both models' rows stand in one array, so that what is the same in
both is the same in the page.
"""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

import torch

from ikattn._library import version
from ikattn._whole_files import whole_file
from ikattn.explain.comparison._distances import ROW_MAPS, shares
from ikattn.maps.layers import Layer
from ikattn.maps.page.arrays import Arrays
from ikattn.maps.page.labels import layer_labels, text_of
from ikattn.maps.page.template import json_in_script, template
from ikattn.maps.sequences import SequenceMaps, sequences
from ikattn.maps.tokens import Tokens

if TYPE_CHECKING:
    from ikattn.explain.comparison.comparison import Comparison

__all__ = ["write_page"]


def write_page(
    comparison: Comparison,
    path: str | os.PathLike[str],
    tokens: Tokens | None = None,
    *,
    title: str | None = None,
) -> int:
    """Writes the page of :meth:`Comparison.to_html` and returns its size in bytes."""
    a, b = comparison.recording_a, comparison.recording_b
    if not a.batches:
        raise ValueError("to_html: no text was kept to show: compare with keep=1 or more")
    layers = [a.layers[name] for name in comparison.pairs]
    file = io.BytesIO()
    arrays = Arrays(file)
    shown = [
        _sequence_contents(comparison.pairs, layers, one, other, arrays)
        for one, other in zip(sequences(a, tokens), sequences(b), strict=True)
    ]
    outputs = comparison.output_distance
    contents = {
        "about": f"{comparison.sequences} sequences"
        + ("" if outputs is None else f" · distance of outputs {outputs:.3g}")
        + f" · ikattn {version()}",
        "precision": arrays.precision(),
        "models": comparison.names,
        "layers": [
            {"name": layer.name, "label": label, "kind": layer.kind}
            for layer, label in zip(layers, layer_labels(layers), strict=True)
        ],
        "table": [
            {name: None if x != x else x for name, x in row.items()}
            for row in comparison.table(heads=True) + comparison.table()
        ],
        "sequences": shown,
    }
    before, between, after = template(
        "explain/comparison/page/page.html",
        title or " beside ".join(comparison.names),
        styles=("maps/page/base.css", "maps/page/page.css", "explain/comparison/page/page.css"),
        scripts=("maps/page/base.js", "maps/page/maps.js", "explain/comparison/page/page.js"),
    )
    with whole_file(path) as written:
        written.write(before + file.getvalue() + between + json_in_script(contents) + after)
        return written.tell()


def _sequence_contents(
    pairs: dict[str, str],
    layers: list[Layer],
    a: SequenceMaps,
    b: SequenceMaps,
    arrays: Arrays,
) -> dict[str, Any]:
    """What the page knows of one sequence: its tokens once, its arrays by their names."""
    labels: list[list[str]] = []

    def place_of(tokens: list[str]) -> int:
        if tokens not in labels:
            labels.append(tokens)
        return labels.index(tokens)

    entries: list[dict[str, Any] | None] = []
    for layer in layers:
        if layer.name not in a.layers:
            entries.append(None)
            continue
        maps_a, maps_b = a.layers[layer.name], b.layers[pairs[layer.name]]
        maps = {}
        for name in ROW_MAPS:
            one, other = getattr(maps_a, name), getattr(maps_b, name)
            if one is not None and other is not None and one.numel():
                both = torch.stack((shares(one), shares(other)))
                heads = one.shape[0] if one.dim() == 3 else 0
                maps[name] = {**arrays.add(both), "heads": heads}
        queries, keys = a.labels(layer)
        sizes = {"L": len(queries), "S": len(keys)}
        places = {"queries": place_of(queries), "keys": place_of(keys)}
        entries.append({**sizes, **places, "maps": maps} if maps else None)
    text = text_of(a.tokens or ()) or f"sequence {a.index}, batch {a.batch}"
    return {"title": text[:120], "labels": labels, "layers": entries}
