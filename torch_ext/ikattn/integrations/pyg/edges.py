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


class _Kept(NamedTuple):
    """The sorted edges of an edge_index, and how that was then."""

    was: Any
    key: Any
    made: Any


# Sorted edges of a plain edge_index, without and with self loops, for the last number of nodes.
# A model's layers share them, and so do its epochs.
_sorted_edges: WeakIdKeyDictionary = WeakIdKeyDictionary()
_with_loops: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _may_be_kept(edge_index: Any) -> bool:
    return (
        type(edge_index) is Tensor
        and edge_index.layout == torch.strided
        and not torch.compiler.is_compiling()
        and not edge_index.is_inference()
        and not torch._C._functorch.is_functorch_wrapped_tensor(edge_index)
    )


def _as_it_is(edge_index: Tensor) -> Any:
    """Returns a copy on the CPU, elsewhere a number without waiting, to find changes by."""
    if edge_index.device.type == "cpu":
        return edge_index.detach().clone()
    return (edge_index._version, edge_index.data_ptr(), edge_index.shape, edge_index.stride())


def _get(kept: WeakIdKeyDictionary, edge_index: Tensor, key: Any) -> Any:
    found = kept.get(edge_index)
    if found is None or found.key != key:
        return None
    now: Any = edge_index if edge_index.device.type == "cpu" else _as_it_is(edge_index)
    same = torch.equal(now, found.was) if isinstance(now, Tensor) else now == found.was
    return found.made if same else None


def ends_of(edge_index: Any, flow: str) -> tuple[Tensor, Tensor, bool]:
    """Returns source and target of each edge, [E], and whether targets are known to ascend."""
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


def attributes_of(edge_index: Any, edge_attr: Tensor | None) -> Tensor | None:
    """Returns features of edges, or the values of a sparse tensor, as PyG takes them."""
    value = edge_attr
    if value is None and isinstance(edge_index, SparseTensor):
        value = edge_index.coo()[2]
    elif value is None and is_torch_sparse_tensor(edge_index):
        value = to_edge_index(edge_index)[1]
    return value.view(-1, 1) if value is not None and value.dim() == 1 else value


def graph_of(edge_index: Any, flow: str, num_targets: int) -> Graph:
    """Returns the edges, sorted; those of a plain tensor are kept as long as it is."""
    source, target, is_sorted = ends_of(edge_index, flow)
    if is_sorted or not _may_be_kept(edge_index):
        edges = Edges.from_coo(source, target, num_targets, is_sorted=is_sorted)
        return Graph(source, target, edges)
    key = (flow, num_targets)
    edges = _get(_sorted_edges, edge_index, key)
    if edges is None:
        with torch.inference_mode(False):  # or no later call could train with them
            edges = Edges.from_coo(source, target, num_targets)
            _sorted_edges[edge_index] = _Kept(_as_it_is(edge_index), key, edges)
    return Graph(source, target, edges)


def with_self_loops(
    edge_index: Tensor, edge_attr: Tensor | None, fill_value: Any, num_nodes: int
) -> tuple[Tensor, Tensor | None]:
    """Adds self loops, as PyG adds them."""
    may_be_kept = edge_attr is None and _may_be_kept(edge_index)
    if may_be_kept:
        looped = _get(_with_loops, edge_index, num_nodes)
        if looped is not None:
            return looped, None
    with torch.inference_mode(torch.is_inference_mode_enabled() and not may_be_kept):
        looped, attributes = remove_self_loops(edge_index, edge_attr)
        looped, attributes = add_self_loops(
            looped, attributes, fill_value=fill_value, num_nodes=num_nodes
        )
        if may_be_kept:
            _with_loops[edge_index] = _Kept(_as_it_is(edge_index), num_nodes, looped)
    return looped, attributes


def num_targets_of(
    flow: str,
    edge_index: Any,
    target: Tensor | None,
    source: Tensor,
    size: tuple[int, int] | None,
) -> int:
    """Returns how many nodes get an output, as PyG's propagate finds it."""
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
