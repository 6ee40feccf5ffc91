"""A small graph that tests of attention over edges share, and nodes for it."""

from __future__ import annotations

from typing import Any

import torch

import ikattn
from drawing import normals

N_Q, N_K, H, SIZE, VALUE_SIZE, M = 7, 9, 2, 4, 3, 5
# Source and target: unsorted, twice the same edge, a self loop, targets 2 and 6 without any.
EDGE_INDEX = torch.tensor([[3, 0, 8, 3, 1, 4, 2, 5, 0, 0], [1, 0, 5, 1, 4, 4, 3, 3, 5, 0]])
E = EDGE_INDEX.shape[1]
EDGES = ikattn.ops.Edges.from_coo(*EDGE_INDEX, num_targets=N_Q)


def nodes(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    normal = normals(seed, dtype)
    return {
        "query": normal(N_Q, H, SIZE),
        "key": normal(N_K, H, SIZE),
        "value": normal(N_K, H, VALUE_SIZE),
        "w1": 0.2 * normal(H, SIZE, M),
        "w2": 0.2 * normal(H, SIZE, M),
    }
