"""Nested tensors, which nn.TransformerEncoder makes of padded input in eval mode without grad."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def attend_padded(
    attend: Attend, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Pads nested inputs, attends, and nests the output again.

    Args:
        attend: Called with padded query, key, value, and what is padding, True = is: of keys
            [N, S], and of queries [N, L].
        query: Nested [N, *, E], of the strided layout, as the others.
        key: Nested [N, *, kdim].
        value: Nested [N, *, vdim].

    Returns:
        The output, nested like query, and what else ``attend`` returned, padded.

    Raises:
        AssertionError: Not all three are nested tensors of the strided layout.
    """
    inputs = (query, key, value)
    if not all(x.is_nested and x.layout == torch.strided for x in inputs):
        raise AssertionError(
            "with NestedTensor input, query, key and value must all be nested, of layout "
            "torch.strided"
        )
    # by identity: self-attention stays one tensor, which is projected at once
    padded = {id(x): torch.nested.to_padded_tensor(x, 0.0) for x in inputs}
    q, k, v = (padded[id(x)] for x in inputs)
    of_keys, of_queries = _beyond_ends(key, k.size(1)), _beyond_ends(query, q.size(1))
    output, weights = attend(q, k, v, of_keys, of_queries)
    rows = [row[: x.size(0)] for row, x in zip(output, query.unbind(), strict=True)]
    return torch.nested.as_nested_tensor(rows), weights


def _beyond_ends(nested: Tensor, length: int) -> Tensor:
    """Returns a mask [N, length], True beyond the end of each sequence."""
    ends = torch.tensor([x.size(0) for x in nested.unbind()], device=nested.device)
    return torch.arange(length, device=nested.device) >= ends[:, None]
