"""The page of a corpus: where its layers look, what they move, and what makes it large."""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from ikattn._whole_files import whole_file
from ikattn.explain.corpora import CorpusSums
from ikattn.explain.sinks import LARGEST_PART, LEAST_WEIGHT
from ikattn.maps.contribution_maps import SUMMED_MAPS
from ikattn.maps.ledger import FACTORS
from ikattn.maps.page.template import template

# Shares of the types of tokens, of each head or of all of them, by layer and map.
_Shares: TypeAlias = "defaultdict[tuple[str, str], list[list[float]]]"
_PARTS = ("summed", "per_head", "with_residual", "with_norm", "encoder", "alti")


def write_summary(path: Path, sums: CorpusSums) -> None:
    """Writes the page; a section whose maps were not recorded is left out."""
    before, after = template(
        "maps/page/summary.html",
        f"{sums.model or 'A model'}: {sums.sequences} lines",
        styles=("maps/page/base.css", "maps/page/summary.css"),
        scripts=(),
    )
    shares: _Shares = defaultdict(list)
    for row in sums.table():
        shares[row["layer"], row["map"]].append([row[kind] for kind in sums.types])
    with whole_file(path) as file:
        file.write(before)
        for section in (_looks_and_moves, _factors, _mixing_ratios, _sinks):
            file.write("".join(section(sums, shares)).encode())
        file.write(after)


def _table(title: str, about: str, columns: Sequence[str], rows: list[list[str]]) -> Iterator[str]:
    if not rows:
        return
    yield f'<section><h2>{title}</h2>\n<p class="quiet">{about}</p>\n<table>\n'
    for cell, cells in (("th", columns), *(("td", row) for row in rows)):
        yield "<tr>" + "".join(f"<{cell}>{html.escape(x)}</{cell}>" for x in cells) + "</tr>\n"
    yield "</table></section>\n"


def _percent(x: float) -> str:
    return "" if math.isnan(x) else f"{100 * x:.1f} %"


def _looks_and_moves(sums: CorpusSums, shares: _Shares) -> Iterator[str]:
    rows = []
    for layer, maps in sums.sums.items():
        part = next((name for name in _PARTS if name in maps), None)
        looked, moved = (shares[layer, name or ""] for name in ("weights", part))
        means = [[sum(x) / len(x) for x in zip(*found, strict=True)] for found in (looked, moved)]
        if looked:
            pairs = zip(means[0], means[1] or [math.nan] * len(sums.types), strict=True)
            rows.append([layer, *(f"{_percent(a)} / {_percent(b)}".rstrip(" /") for a, b in pairs)])
    about = "The share of the weight, and of the contributions, that each kind of token has."
    yield from _table("Where attention looks / what it moves", about, ["", *sums.types], rows)


def _factors(sums: CorpusSums, shares: _Shares) -> Iterator[str]:
    rows, found = [], sums.shares
    for layer, split in [*found.layers.items(), ("the model", found.model)]:
        whole = split.over_heads() if split.rows.dim() else split
        against = int((split.shares[..., 1] < 0).sum()) if split.rows.dim() else None
        numbers = [*whole.shares.tolist(), float(whole.correlation[1, 2])]
        of_heads = "" if against is None else f"{against} of {len(split.rows)}"
        rows.append(
            [layer, *("" if math.isnan(x) else f"{round(x, 2) + 0:.2f}" for x in numbers), of_heads]
        )
    about = (
        "The variance of log contribution within rows, split. A negative share works against the "
        "others. The correlation is that of magnitude and norm; the last column counts heads whose "
        "magnitude works against the contribution."
    )
    columns = ["", *(name.replace("_", " ") for name in FACTORS), "correlation", "heads against"]
    yield from _table(
        "What makes contributions large", about, columns, rows if found.layers else []
    )


def _mixing_ratios(sums: CorpusSums, shares: _Shares) -> Iterator[str]:
    names, rows = [f"mixing_ratio.{name}" for name in SUMMED_MAPS], []
    for layer, maps in sums.sums.items():
        there = [maps.get(name, {}) for name in names]
        ratios = [
            x["sum_of_values"].sum() / x["count"].sum() if "sum_of_values" in x else math.nan
            for x in there
        ]
        if any("sum_of_values" in x for x in there):
            rows.append([layer, *(_percent(float(ratio)) for ratio in ratios)])
    about = "How much comes from other tokens, through more and more of the block."
    yield from _table("Mixing ratios", about, ["", *SUMMED_MAPS], rows)


def _sinks(sums: CorpusSums, shares: _Shares) -> Iterator[str]:
    rows = []
    for layer in sums.sums:
        looked, moved = (shares[layer, name] for name in ("weights", "per_head"))
        for head, (weights, parts) in enumerate(zip(looked, moved, strict=False)):
            for kind, weight, part in zip(sums.types, weights, parts, strict=True):
                if weight >= LEAST_WEIGHT and part <= LARGEST_PART * weight:
                    rows.append([layer, str(head), kind, _percent(weight), _percent(part)])
    about = (
        f"Heads that give a kind of token at least {LEAST_WEIGHT:.0%} of their weight, of which at "
        f"most {LARGEST_PART:.0%} arrives in what they move."
    )
    columns = ["", "head", "token", "weight", "part"]
    yield from _table("Sinks", about, columns, rows)
