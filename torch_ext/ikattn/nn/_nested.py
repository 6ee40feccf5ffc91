"""Nested tensors: those nn.TransformerEncoder makes of padded input, and those of layout jagged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ikattn.ops.jagged import have_same_lengths, nested_like, tokens_of
from ikattn.ops.packed import implicit_kernel_attention_varlen

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def are_jagged(*inputs: Tensor) -> bool:
    return all(x.is_nested and x.layout == torch.jagged for x in inputs)


def attend_packed(
    module: Any, query: Tensor, key: Tensor, value: Tensor, dropout_p: float
) -> Tensor:
    """Attends with a module's implicit kernel within each sequence, without padding.

    Query, key and value are nested, [N, *, .] of the jagged layout, and so is the output. Key and
    value must have the same lengths.
    """
    # self-attention stays one tensor, which is projected at once
    packed = {id(x): tokens_of(x) for x in (query, key, value)}
    (_, of_queries), (_, of_keys), (_, of_values) = (packed[id(x)] for x in (query, key, value))
    if not have_same_lengths(of_values, of_keys):
        raise AssertionError("with NestedTensor input, key and value must have the same lengths")
    rows = {number: tokens.unsqueeze(0) for number, (tokens, _) in packed.items()}
    q, k, v = module._projection()(rows[id(query)], rows[id(key)], rows[id(value)], True)
    w1, w2 = module._frequencies(q, k, None, None)
    magnitude = None if module.magnitude is None else module.magnitude(k).squeeze(0)
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
    output = implicit_kernel_attention_varlen(
        q, k, v, w1, w2, of_queries, of_keys, p=module.p, key_bias=magnitude, dropout_p=dropout_p
    )
    return nested_like(query, module.out_proj(output.flatten(1)))


def attend_padded(
    attend: Attend, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Pads nested inputs [N, *, .] of one layout, attends, and nests the output again.

    ``attend`` is called with padded query, key, value, and what is padding, True = is: of keys [N,
    S], and of queries [N, L]. What else it returns stays padded.
    """
    inputs = (query, key, value)
    jagged = are_jagged(*inputs)
    if not jagged and not all(x.is_nested and x.layout == torch.strided for x in inputs):
        raise AssertionError(
            "with NestedTensor input, query, key and value must all be nested, of one layout; got "
            + ", ".join(str(x.layout) if x.is_nested else "one that is not nested" for x in inputs)
        )
    # self-attention stays one tensor, which is projected at once
    padded = {id(x): torch.nested.to_padded_tensor(x, 0.0) for x in inputs}
    q, k, v = (padded[id(x)] for x in inputs)
    of_keys, of_queries = beyond_ends(key, k.size(1)), beyond_ends(query, q.size(1))
    output, weights = attend(q, k, v, of_keys, of_queries)
    rows = [row[: x.size(0)] for row, x in zip(output, query.unbind(), strict=True)]
    if jagged:
        return nested_like(query, torch.cat(rows)), weights
    return torch.nested.as_nested_tensor(rows), weights


def beyond_ends(nested: Tensor, length: int) -> Tensor:
    """Returns a mask [N, length], True beyond the end of each sequence."""
    ends = torch.tensor([x.size(0) for x in nested.unbind()], device=nested.device)
    return torch.arange(length, device=nested.device) >= ends[:, None]
