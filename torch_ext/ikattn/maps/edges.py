"""Contributions along the edges of a graph: what attention moves, per edge.

Symbols: E edges, H heads, N nodes, D size of a transformed vector.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ikattn._optional import optional
from ikattn._whole_files import whole_file
from ikattn.maps.pictures import INK, QUIET, matplotlib, picture_format

_EDGES_AT_ONCE = 1 << 16
_LINE = "#c2712f"


class EdgeContributions(NamedTuple):
    """Norms of what edges carry.

    Attributes:
        per_head: ``[E, H]``, ``|alpha_e,h f_h(x_j)|``.
        summed: ``[E]``, the norm over all heads together.
    """

    per_head: Tensor
    summed: Tensor


def edge_contributions(
    weights: Tensor, vectors: Tensor, source: Tensor, *, concat: bool = False
) -> EdgeContributions:
    r"""Norms of the weighted, transformed vectors that edges carry.

    .. math::
        \|\alpha_{e,h} f_h(x_j)\| \quad\text{and}\quad
        \Big\|\sum_h \alpha_{e,h} f_h(x_j)\Big\|, \qquad e: j \to i

    The sum over heads is formed from ``[N, H, H]`` products of the vectors of a node; nothing of
    size ``[E, H, D]`` is made.

    Args:
        weights: Attention weights, ``[E, H]``, floating point.
        vectors: f_h(x_j), ``[N, H, D]``: values after the map that follows them, such as
            ``lin(x)`` of a GATConv.
        source: int64 or int32 ``[E]``, the node that each edge comes from.
        concat: Heads go to places of their own in the output, as with GATConv's ``concat``; their
            vectors do not add up then, and ``summed`` is the norm of them side by side.

    Returns:
        ``per_head`` ``[E, H]`` and ``summed`` ``[E]``, in the dtype of weights. Differentiable.

    Raises:
        ValueError, TypeError, IndexError: An argument has a wrong shape or dtype, or source is out
            of range.

    Source: G. Kobayashi, T. Kuribayashi, S. Yokoi, K. Inui, "Attention is Not Only a Weight", EMNLP
    2020, equation 3, for the edges of a graph.

    Example:
        >>> import torch, ikattn
        >>> weights, vectors = torch.rand(5, 2), torch.randn(3, 2, 8)
        >>> maps = ikattn.maps.edge_contributions(weights, vectors, torch.tensor([0, 1, 2, 0, 1]))
        >>> maps.per_head.shape, maps.summed.shape
        (torch.Size([5, 2]), torch.Size([5]))
    """
    name = "edge_contributions"
    if weights.dim() != 2 or vectors.dim() != 3 or weights.shape[1] != vectors.shape[1]:
        raise ValueError(
            f"{name}: weights must have shape [E, H] and vectors [N, H, D], got "
            f"{list(weights.shape)} and {list(vectors.shape)}"
        )
    if not weights.is_floating_point() or not vectors.is_floating_point():
        raise TypeError(
            f"{name}: weights and vectors must be floating point, got {weights.dtype} and "
            f"{vectors.dtype}"
        )
    if source.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: source must be int64 or int32, got {source.dtype}")
    if source.shape != weights.shape[:1]:
        raise ValueError(
            f"{name}: source must have shape [E] = {list(weights.shape[:1])}, got "
            f"{list(source.shape)}"
        )
    source = source.long()
    if source.device.type == "cpu":
        outside = source[(source < 0) | (source >= len(vectors))]
        if outside.numel():
            raise IndexError(
                f"{name}: source must be in [0, {len(vectors)}), got {int(outside[0])}"
            )
    wide = vectors.double()  # heads may cancel
    moved = weights.double().abs() * torch.linalg.vector_norm(wide, dim=-1)[source]
    per_head = moved.to(weights.dtype)
    if concat:
        summed = torch.linalg.vector_norm(moved, dim=-1)
        return EdgeContributions(per_head, summed.to(weights.dtype))
    products = wide @ wide.transpose(1, 2)  # [N, H, H]
    squares = [
        torch.einsum("eh,ehg,eg->e", part, products[of], part)
        for part, of in zip(
            weights.double().split(_EDGES_AT_ONCE), source.split(_EDGES_AT_ONCE), strict=True
        )
    ]
    square = torch.cat(squares)
    positive = ~(square <= 0)  # a root has no derivative at 0; NaN stays
    root = torch.where(positive, square, 1.0).sqrt()
    return EdgeContributions(per_head, torch.where(positive, root, 0.0).to(weights.dtype))


@dataclass
class EdgeMaps:
    """The maps of one layer of attention over a graph.

    Attributes:
        source, target: int64 ``[E]``, the ends of each edge, in the layer's order; self loops that
            the layer added are among them.
        num_targets: How many nodes got an output.
        weights: ``[E, H]``, as they were applied: in training after dropout.
        per_head: ``[E, H]``, the norm of what each head moved.
        summed: ``[E]``, the norm of what all heads moved together.
    """

    source: Tensor
    target: Tensor
    num_targets: int
    weights: Tensor
    per_head: Tensor
    summed: Tensor

    def into(self, node: int) -> list[tuple[int, float]]:
        """The sources of a node and their contributions, ``summed``, the largest first.

        Raises:
            IndexError: There is no such node.
        """
        if not 0 <= node < self.num_targets:
            raise IndexError(f"into: node must be in [0, {self.num_targets}), got {node}")
        edges = (self.target == node).nonzero().flatten()
        order = edges[self.summed[edges].argsort(descending=True, stable=True)]
        return list(zip(self.source[order].tolist(), self.summed[order].tolist(), strict=True))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one line, row or edge for each edge; the file appears whole or not at all.

        Args:
            path: Ends in .csv, .npz (needs NumPy) or .graphml (needs networkx).

        Raises:
            ValueError: Another ending.
            OSError: The path cannot be written, or the disk is full.
        """
        file = io.BytesIO()
        match Path(path).suffix.lower():
            case ".csv":
                text = io.StringIO()
                heads = range(self.weights.shape[1])
                names = [f"{name}_{h}" for name in ("weight", "per_head") for h in heads]
                names = ["source", "target", *names, "summed"]
                writer = csv.DictWriter(text, names, lineterminator="\n")
                writer.writeheader()
                writer.writerows(self._rows())
                file.write(text.getvalue().encode())
            case ".npz":
                numpy, arrays = optional("numpy", "an .npz file", "numpy"), {}
                for field in fields(self):
                    x = torch.as_tensor(getattr(self, field.name)).detach().cpu()
                    arrays[field.name] = (x.float() if x.is_floating_point() else x).numpy()
                numpy.savez(file, **arrays)
            case ".graphml":
                networkx = optional("networkx", "a .graphml file", "networkx")
                graph = networkx.MultiDiGraph()
                for row in self._rows():
                    graph.add_edge(row.pop("source"), row.pop("target"), **row)
                networkx.write_graphml(graph, file)
            case _:
                raise ValueError(f"save: path must end in .csv, .npz or .graphml, got {path}")
        with whole_file(path) as whole:
            whole.write(file.getvalue())

    def explanation(
        self, edge_index: Tensor, *, flow: str = "source_to_target", **given: Any
    ) -> Any:
        """PyG's Explanation with ``summed`` as the mask of the given edges.

        Args:
            edge_index: ``[2, E']``, as the model was called with. An edge that the layer does not
                have gets 0.
            flow: That of the layer: whether sources come first in edge_index, or targets.
            **given: Further attributes, for example ``x``.

        Returns:
            A ``torch_geometric.explain.Explanation``.

        Raises:
            ValueError: No such flow.
        """
        explain = optional("torch_geometric.explain", "an Explanation", "torch_geometric")
        if flow not in ("source_to_target", "target_to_source"):
            raise ValueError(
                f"explanation: flow must be 'source_to_target' or 'target_to_source', got {flow!r}"
            )
        edge_index = edge_index.to(self.source.device)
        of, to = edge_index.long() if flow == "source_to_target" else edge_index.long().flip(0)
        ends = (edge_index, self.source, self.target)
        nodes = max(int(x.max()) if x.numel() else 0 for x in ends)
        own = _numbered(self.source.long() * (nodes + 1) + self.target)
        asked = _numbered(of * (nodes + 1) + to)
        places = {edge: place for place, edge in enumerate(own)}
        found = [places.get(edge, -1) for edge in asked]
        index = torch.tensor(found, dtype=torch.int64, device=self.source.device)
        padded = torch.cat([self.summed.detach(), self.summed.new_zeros(1)])
        return explain.Explanation(edge_index=edge_index, edge_mask=padded[index], **given)

    def plot(
        self,
        path: str | os.PathLike[str],
        node: int,
        *,
        labels: Sequence[str] | Mapping[int, str] | None = None,
        largest: int = 24,
        dpi: int = 160,
    ) -> None:
        """Draws a node and the nodes that it attends to; the width of a line is its contribution.

        Args:
            path: Ends in .png, .svg or .pdf.
            node: The target.
            labels: Names of nodes; None: their numbers.
            largest: At most so many edges are drawn, those of the largest contributions; the
                heading says how many there are.
            dpi: Pixels per inch of a .png.

        Raises:
            ModuleNotFoundError: matplotlib is missing.
            IndexError: There is no such node.
            ValueError: Another ending.
            OSError: The path cannot be written, or the disk is full.
        """
        kind = picture_format("plot", path)
        edges = self.into(node)
        figure = _star(node, edges[:largest], len(edges), labels)
        with whole_file(path) as file:
            figure.savefig(file, format=kind, dpi=dpi)

    def _rows(self) -> Iterator[dict[str, Any]]:
        ends = zip(self.source.tolist(), self.target.tolist(), strict=True)
        numbers = (self.weights.tolist(), self.per_head.tolist(), self.summed.tolist())
        for (j, i), weights, per_head, summed in zip(ends, *numbers, strict=True):
            row = {"source": j, "target": i}
            row |= {f"weight_{h}": x for h, x in enumerate(weights)}
            row |= {f"per_head_{h}": x for h, x in enumerate(per_head)}
            yield row | {"summed": summed}


def _numbered(keys: Tensor) -> list[tuple[int, int]]:
    """Each key, and how often it has been before."""
    before: defaultdict[int, Iterator[int]] = defaultdict(count)
    return [(key, next(before[key])) for key in keys.tolist()]


def _star(
    node: int,
    edges: Sequence[tuple[int, float]],
    total: int,
    labels: Sequence[str] | Mapping[int, str] | None,
) -> Any:
    """A node in the middle, its sources around it, the largest on top and on clockwise."""
    figure = matplotlib("figure").Figure(figsize=(6, 6))
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.9))
    axes.set_aspect("equal")
    axes.set(xlim=(-1.45, 1.45), ylim=(-1.3, 1.3))
    axes.axis("off")

    def name(number: int) -> str:
        if isinstance(labels, Mapping):
            return labels.get(number, str(number))
        return str(number) if labels is None else labels[number]

    top = max((value for _, value in edges), default=0.0) or 1.0
    others = [(j, value) for j, value in edges if j != node]
    for k, (j, value) in enumerate(others):
        angle = 2 * math.pi * k / len(others)
        x, y = math.sin(angle), math.cos(angle)
        axes.plot([x, 0], [y, 0], color=_LINE, lw=0.4 + 7 * value / top, alpha=0.85, zorder=1)
        axes.plot([x], [y], "o", color="white", mec=QUIET, ms=9, zorder=2)
        side = "left" if x > 0.15 else "right" if x < -0.15 else "center"
        place = (1.1 * x, 1.1 * y + (0.03 if side == "center" and y > 0 else 0))
        text = f"{name(j)}\n{value:.3g}"
        axes.text(*place, text, ha=side, va="center", fontsize=8, color=INK)
    own = sum(value for j, value in edges if j == node)
    axes.plot([0], [0], "o", color=_LINE if own else "white", mec=INK, ms=13, zorder=3)
    axes.text(0, -0.13, f"{name(node)}" + (f"\nitself {own:.3g}" if own else ""), ha="center",
              va="top", fontsize=9, color=INK, zorder=4,
              bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1})  # fmt: skip
    shown = "" if len(edges) == total else f", the largest {len(edges)} of {total} edges"
    figure.text(0.03, 0.955, f"What node {name(node)} draws from{shown}", fontsize=11, color=INK)
    return figure
