"""The edges of a call in every form in which PyG has them, sorted by target and kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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


def _kept(kept: WeakIdKeyDictionary, edge_index: Tensor, key: Any, make: Callable[[], Any]) -> Any:
    """Returns what was made of an edge_index with this key, as long as that is as it was then."""
    was, key_then, made = kept.get(edge_index, (None, None, None))
    if key_then == key:
        now: Any = edge_index if edge_index.device.type == "cpu" else _as_it_is(edge_index)
        if torch.equal(now, was) if isinstance(now, Tensor) else now == was:
            return made
    with torch.inference_mode(False):  # or no later call could train with it
        made = make()
        kept[edge_index] = (_as_it_is(edge_index), key, made)
    return made


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
    make = partial(Edges.from_coo, source, target, num_targets, is_sorted=is_sorted)
    if is_sorted or not _may_be_kept(edge_index):
        return Graph(source, target, make())
    edges = _kept(_sorted_edges, edge_index, (flow, num_targets), make)
    return Graph(source, target, edges)


def with_self_loops(
    edge_index: Tensor, edge_attr: Tensor | None, fill_value: Any, num_nodes: int
) -> tuple[Tensor, Tensor | None]:
    """Adds self loops, as PyG adds them."""

    def make() -> tuple[Tensor, Tensor | None]:
        without = remove_self_loops(edge_index, edge_attr)
        looped: tuple[Tensor, Tensor | None]
        looped = add_self_loops(*without, fill_value=fill_value, num_nodes=num_nodes)
        return looped

    if edge_attr is None and _may_be_kept(edge_index):
        return _kept(_with_loops, edge_index, num_nodes, make)  # type: ignore[no-any-return]
    return make()


def num_targets_of(
    flow: str, edge_index: Any, nodes: int, size: tuple[int | None, int | None] | None
) -> int:
    """Returns how many nodes get an output, as PyG's propagate finds it, if nothing is told."""
    if isinstance(edge_index, SparseTensor) or is_torch_sparse_tensor(edge_index):
        return int(edge_index.size(0))
    given = None if size is None else size[1 if flow == "source_to_target" else 0]
    return nodes if given is None else int(given)


def with_weights(output: Tensor, edge_index: Any, weights: Tensor) -> Any:
    if isinstance(edge_index, SparseTensor):
        return output, edge_index.set_value(weights, layout="coo")
    if is_torch_sparse_tensor(edge_index):
        return output, (set_sparse_value(edge_index, weights), weights)
    return output, (edge_index, weights)
