"""The largest flow from an output token back to each input token, through the layers' maps.

Symbols: B batch, L tokens, N layers; A_l is the map of layer l, ``[L, L]``.
Source: S. Abnar, W. Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ikattn._optional import optional
from ikattn.maps.importance import token_index
from ikattn.maps.summary import Maps
from ikattn.maps.through_layers import Residual, padding_of, steps_of


def attention_flow(
    maps: Maps,
    position: int | Tensor,
    *,
    map: str = "encoder",
    normalize: bool = True,
    layers: Iterable[str] | None = None,
    residual: Residual = None,
    padding: Tensor | None = None,
) -> Tensor:
    """Measures how much can flow from an output token to each input token, maps being capacities.

    An edge from token i after layer l to token j before it carries at most ``A_l[i, j]``. Rollout
    adds the products along all paths; the largest flow takes no more through a token than its edges
    carry. Needs networkx. Time O(L) maximum flows a sequence, each through N L^2 edges: for
    sentences, not for documents.

    Args:
        maps, map, normalize, layers, residual, padding: Arguments of :func:`ikattn.rollout`;
            attention flow as published is ``map="weights", residual=0.5``.
        position: A token's place, as for :func:`token_importance`, or one for each sequence.

    Returns:
        ``[B, L]``, 0 at padding; not normalised: each is at most the sum of a row.

    Raises:
        ModuleNotFoundError: networkx is missing.
        ValueError, KeyError, LookupError: Errors of :func:`token_importance`.

    Example:
        >>> import pytest, torch
        >>> networkx = pytest.importorskip("networkx")
        >>> from ikattn.explain import attention_flow
        >>> weights = [torch.full((1, 2, 2), 0.5) for _ in range(3)]
        >>> attention_flow(weights, 0)
        tensor([[1., 1.]])
    """
    networkx = optional("networkx", "attention_flow", "networkx")
    if isinstance(position, slice):
        raise TypeError(
            f"attention_flow: position must be an int or an int64 tensor [B], got {position}"
        )
    layers = None if layers is None else list(layers)
    steps = steps_of(maps, normalize, map, layers, residual, padding, "attention_flow")
    hidden = padding_of(maps, layers, padding, "attention_flow")
    B, L = steps[-1].shape[:2]
    index = token_index(position, hidden, B, L, steps[-1].device)
    found = steps[-1].new_zeros(B, L)
    for b, i in enumerate(index.tolist()):
        graph = _graph(networkx, [step[b] for step in steps])
        for j in range(L):
            if graph.has_node((0, j)) and graph.has_node((len(steps), i)):
                found[b, j] = networkx.maximum_flow_value(graph, (len(steps), i), (0, j))
    return found


def _graph(networkx: Any, steps: list[Tensor]) -> Any:
    """Nodes (l, i), token i after layer l, and edges to the tokens before it."""
    graph = networkx.DiGraph()
    for layer, step in enumerate(steps, start=1):
        pairs = step.detach().double().cpu()
        for i, j in (pairs > 0).nonzero().tolist():
            graph.add_edge((layer, i), (layer - 1, j), capacity=float(pairs[i, j]))
    return graph
