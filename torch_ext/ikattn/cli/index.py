"""The page of all lines: what it shows of each, which its entry in lines.jsonl keeps."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from ikattn._precision import widened
from ikattn._whole_files import whole_file
from ikattn.cli.job import drawable_maps
from ikattn.maps.contribution_maps import SUMMED_MAPS, Contributions
from ikattn.maps.page.template import template
from ikattn.maps.recording import Recording
from ikattn.maps.summary import row_shares

_CELLS = 16  # rows and columns of a small map


def overview(recording: Recording, maps: Sequence[str]) -> dict[str, Any]:
    """Returns the overview of a line, by its recording, in a few hundred bytes for the index.

    The map is the first of these names that was recorded. Its entropy is that of rows in bits, the
    mean over rows, heads and layers. The thumbnail is the mean over heads and layers of its rows'
    shares, ``[L, S]`` averaged down to at most 16 x 16: L, S and a byte for each cell. The mixing
    ratio is that of the last map that has one. None stands for what was not recorded or is not
    finite.
    """
    layers = recording.batches[0]
    name = next((x for x in drawable_maps(maps) if any(_has(y, x) for y in layers.values())), None)
    entropy, thumbnail = (None, None) if name is None else _of_map(recording, name)
    known = [maps.mixing_ratio for maps in layers.values()]
    last = next((x for x in SUMMED_MAPS[::-1] if any(x in own for own in known)), None)
    ratios = [own[last].double().cpu().flatten() for own in known if last in own]
    return {
        "map": name,
        "entropy": entropy,
        "mixing_ratio": _finite(float(torch.cat(ratios).mean())) if ratios else None,
        "thumbnail": thumbnail,
    }


def _has(maps: Contributions, name: str) -> bool:
    return getattr(maps, name) is not None


def _of_map(recording: Recording, name: str) -> tuple[float | None, str | None]:
    """Entropy and small map of the layers of the same kind and side as the first that has it."""
    batch = recording.batches[0]
    having = [recording.layers[layer] for layer, maps in batch.items() if _has(maps, name)]
    places = [(layer.kind, layer.side) for layer in having]
    alike = [layer for layer, place in zip(having, places, strict=True) if place == places[0]]
    entropy, mean = 0.0, torch.zeros(())
    for layer in alike:  # one at a time: every share of a long line takes memory
        values = getattr(batch[layer.name], name)[0]
        values = widened(values if values.dim() == 3 else values[None]).abs()
        shares = row_shares(values)  # [H or 1, L, S]
        bits = torch.special.entr(shares).sum(-1) / math.log(2)
        entropy += float(bits.sum() / (shares.sum(-1) != 0).sum()) / len(alike)
        mean = mean + shares.mean(0).cpu() / len(alike)
    return _finite(entropy), _thumbnail(mean)


def _thumbnail(x: Tensor) -> str | None:
    """``[L, S]`` as the square roots of its cells over the largest: small ones are to be seen."""
    cells = adaptive_avg_pool2d(x[None], (min(x.shape[0], _CELLS), min(x.shape[1], _CELLS)))[0]
    if not (cells >= 0).all() or not cells.isfinite().all() or not cells.any():
        return None
    codes = (255 * (cells / cells.max()).sqrt()).round().to(torch.uint8)
    L, S = codes.shape
    return f"{L} {S} {base64.b64encode(bytes(codes.flatten().tolist())).decode()}"


def _finite(x: float) -> float | None:
    """With six digits; JSON has no other numbers than finite ones."""
    return float(f"{x:.6g}") if math.isfinite(x) else None


def write_index(path: Path, model: str, ledger: Path) -> None:
    """Writes the page of all lines, in the order of the text, with links to the lines' own pages.

    Entries go from lines.jsonl to the page one by one; in memory are the places of the lines.
    """
    places, offset = {}, 0
    with ledger.open("rb") as lines:
        for written in lines:
            places[json.loads(written)["line"]] = offset
            offset += len(written)
    title = f"Attention maps of {'/'.join(Path(model).parts[-2:])}"
    before, after = template(
        "maps/page/index.html",
        title,
        styles=("maps/page/base.css", "maps/page/index.css"),
        scripts=("maps/page/base.js", "maps/page/index.js"),
    )
    with whole_file(path) as file, ledger.open("rb") as lines:
        file.write(before)
        for number in sorted(places):
            lines.seek(places[number])
            file.write(_item(json.loads(lines.readline())).encode())
        file.write(after)


def _item(entry: dict[str, Any]) -> str:
    """A line of the list; numbers that are not finite are left open."""
    view, count = entry["overview"], len(entry["tokens"])
    drawing = f' data-map="{view["map"]} {view["thumbnail"]}"' if view["thumbnail"] else ""
    text = html.escape(entry["text"].strip()) or "<i>empty</i>"
    page = next((name for name in entry["files"] if name.endswith(".html")), None)
    shown = f'<a href="{page}" dir="auto">{text}</a>' if page else f'<span dir="auto">{text}</span>'
    if entry["target"]:
        shown += f'<span class="target" dir="auto">{html.escape(entry["target"].strip())}</span>'
    numbers = (
        (count, f"{count} token{'' if count == 1 else 's'}"),
        (view["mixing_ratio"], f"mixing {100 * (view['mixing_ratio'] or 0):.0f} %"),
        (view["entropy"], f"{view['entropy'] or 0:.2f} bits"),
    )
    data = "".join(
        "<data></data>" if value is None else f'<data value="{value}">{words}</data>'
        for value, words in numbers
    )
    return (
        f'<li value="{entry["line"]}"{drawing}><div class="text">{shown}</div>'
        f'<div class="numbers">{data}</div></li>\n'
    )
