"""Softmax weights, and biases of their logits.

Sizes: N batch, H heads, L queries, S keys, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import softmax

from ikattn.nn._masks import hidden


def total(biases: Sequence[Tensor]) -> Tensor | None:
    """Returns the sum of what is added to the logits; None: nothing."""
    return sum(biases[1:], biases[0]) if biases else None


def empty_rows(bias: Tensor) -> Tensor:
    """Returns where a query sees no key, [.., L, 1]."""
    return hidden(bias).all(dim=-1, keepdim=True)


def softmax_weights(query: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
    """Returns softmax(q.k / sqrt(d) + bias), [.., L, S], with zeros for a query that sees no key.

    They are of the type of q.k, whatever that of the bias.

    Args:
        query: [.., L, d].
        key: [.., S, d].
        bias: Broadcastable to [.., L, S].
    """
    logits = (query * math.sqrt(1.0 / query.size(-1))) @ key.transpose(-2, -1)
    if bias is None:
        return softmax(logits, dim=-1)
    empty = empty_rows(bias)
    weights = softmax(logits + bias.masked_fill(empty, 0.0), dim=-1)
    return weights.masked_fill(empty, 0.0).to(logits.dtype)
