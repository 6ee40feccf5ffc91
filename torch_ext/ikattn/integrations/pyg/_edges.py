"""The edges of a call in every form in which PyG has them, sorted by target and kept."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import (
    add_self_loops,
    is_torch_sparse_tensor,
    remove_self_loops,
    to_edge_index,
)
from torch_geometric.utils.sparse import set_sparse_value

from ikattn.ops.edges import Edges


class Graph(NamedTuple):
    """The edges of a call, as they were given and sorted by target."""

    source: Tensor  # [E]
    target: Tensor  # [E]
    edges: Edges


# Of an edge_index: what it was when it was sorted, and its sorted edges by what was asked for. A
# model's layers share them, and so do its epochs.
_sorted_edges: WeakIdKeyDictionary = WeakIdKeyDictionary()


def ends_of(edge_index: Any, flow: str) -> tuple[Tensor, Tensor, bool]:
    """The source and the target of each edge, [E], and whether targets are known to ascend."""
    is_sorted = False
    if isinstance(edge_index, SparseTensor):
        target, source, _ = edge_index.coo()
        return source, target, True
    if is_torch_sparse_tensor(edge_index):
        (target, source), _ = to_edge_index(edge_index)
        return source, target, False
    by_source = flow == "source_to_target"
    if hasattr(edge_index, "as_tensor"):  # EdgeIndex
        is_sorted = edge_index.is_sorted_by_col if by_source else edge_index.is_sorted_by_row
        edge_index = edge_index.as_tensor()
    source, target = (edge_index[0], edge_index[1])[:: 1 if by_source else -1]
    return source, target, is_sorted


def graph_of(edge_index: Any, flow: str, num_targets: int) -> Graph:
    """The edges, sorted; those of a plain tensor are kept as long as it is."""
    source, target, is_sorted = ends_of(edge_index, flow)
    may_be_kept = (
        type(edge_index) is Tensor
        and not is_sorted
        and not torch.compiler.is_compiling()
        and edge_index.layout == torch.strided
        and not edge_index.is_inference()
        and not torch._C._functorch.is_functorch_wrapped_tensor(edge_index)
    )
    if not may_be_kept:
        edges = Edges.from_coo(source, target, num_targets, is_sorted=is_sorted)
        return Graph(source, target, edges)
    key = (flow, num_targets)
    version, kept = _sorted_edges.get(edge_index, (None, {}))
    if version != edge_index._version:
        kept = {}
        _sorted_edges[edge_index] = (edge_index._version, kept)
    if key not in kept:
        kept[key] = Edges.from_coo(source, target, num_targets)
    return Graph(source, target, kept[key])


# With self loops: of an edge_index and a number of nodes, the edge_index that has them.
_with_loops: WeakIdKeyDictionary = WeakIdKeyDictionary()


def with_self_loops(
    edge_index: Tensor, edge_attr: Tensor | None, fill_value: Any, num_nodes: int
) -> tuple[Tensor, Tensor | None]:
    may_be_kept = (
        edge_attr is None
        and type(edge_index) is Tensor
        and not torch.compiler.is_compiling()
        and edge_index.layout == torch.strided
        and not edge_index.is_inference()
    )
    if may_be_kept:
        version, nodes, looped = _with_loops.get(edge_index, (None, None, None))
        if version == edge_index._version and nodes == num_nodes:
            return looped, None
    looped, attributes = remove_self_loops(edge_index, edge_attr)
    looped, attributes = add_self_loops(
        looped, attributes, fill_value=fill_value, num_nodes=num_nodes
    )
    if may_be_kept:
        _with_loops[edge_index] = (edge_index._version, num_nodes, looped)
    return looped, attributes


def num_targets_of(
    flow: str,
    edge_index: Any,
    target: Tensor | None,
    source: Tensor,
    size: tuple[int, int] | None,
) -> int:
    """How many nodes get an output, as PyG's propagate finds it."""
    if isinstance(edge_index, SparseTensor) or is_torch_sparse_tensor(edge_index):
        return int(edge_index.size(0))
    if size is not None:
        given = size[1] if flow == "source_to_target" else size[0]
        if given is not None:
            return int(given)
    return (source if target is None else target).size(0)


def with_weights(output: Tensor, edge_index: Any, weights: Tensor) -> Any:
    if isinstance(edge_index, SparseTensor):
        return output, edge_index.set_value(weights, layout="coo")
    if is_torch_sparse_tensor(edge_index):
        return output, (set_sparse_value(edge_index, weights), weights)
    return output, (edge_index, weights)
