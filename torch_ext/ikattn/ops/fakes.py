"""Shapes, dtypes and strides of the operators' results, for torch.compile and the meta device.

Every fake kernel begins with the checks of the real one, in C++. Of sizes that are symbols those
look at devices and layouts only; what a fake kernel checks beside is for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Fake = TypeVar("Fake", bound=Callable[..., Any])


def _fake(name: str) -> Callable[[Fake], Fake]:
    """Registers the fake kernel of the operator ``name``, which begins with the checks."""
    check = getattr(torch.ops.ikattn, f"check_{name}")

    def register(results: Fake) -> Fake:
        @functools.wraps(results)
        def checked(*arguments: Any, **options: Any) -> Any:
            check(*arguments, **options)
            return results(*arguments, **options)

        torch.library.register_fake(f"ikattn::{name}")(checked)
        return results

    return register


def _check_heads(function: str, query: Tensor, key: Tensor, enable_gqa: bool) -> None:
    torch._check(
        query.dim() == 4 and key.dim() == 4,
        lambda: f"{function}: query and key must have four axes, got {query.dim()} and {key.dim()}",
    )
    torch._check(
        enable_gqa or query.shape[1] == key.shape[1],
        lambda: f"{function}: key must have the heads of query (enable_gqa=True allows fewer)",
    )


@_fake("implicit_kernel_attention")
def _attention(
    query: Tensor, key: Tensor, value: Tensor, *_: Any, enable_gqa: bool = False, **__: Any
) -> tuple[Tensor, Tensor]:
    _check_heads("implicit_kernel_attention", query, key, enable_gqa)
    batch, heads, length, _size = query.shape
    output = query.new_empty((batch, length, heads, value.shape[-1])).transpose(1, 2)
    return output, query.new_empty((batch, heads, length), dtype=torch.float64)


@_fake("implicit_kernel_attention_varlen")
def _packed_attention(
    query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    tokens, heads, _size = query.shape
    return (
        query.new_empty((tokens, heads, value.shape[-1])),
        query.new_empty((heads, tokens), dtype=torch.float64),
    )


@_fake("implicit_kernel_weights")
def _weights(
    query: Tensor,
    key: Tensor,
    *_: Any,
    enable_gqa: bool = False,
    average_heads: bool = False,
    **__: Any,
) -> Tensor:
    _check_heads("implicit_kernel_weights", query, key, enable_gqa)
    batch, heads, length, _size = query.shape
    shape = (batch, length, key.shape[2]) if average_heads else (batch, heads, length, key.shape[2])
    return query.new_empty(shape)


@_fake("spectral_features")
def _features(
    x: Tensor, w1: Tensor, w2: Tensor | None = None, tokens_first: bool = False
) -> Tensor:
    torch._check(x.dim() == 4, lambda: f"spectral_features: x must have four axes, got {x.dim()}")
    batch, heads, tokens, _size = x.shape
    if tokens_first:
        return x.new_empty((batch, tokens, heads, 2 * w1.shape[-1])).transpose(1, 2)
    return x.new_empty((batch, heads, tokens, 2 * w1.shape[-1]))


@_fake("attention_from_features")
def _from_features(
    query_features: Tensor, key_features: Tensor, logits: Tensor, value: Tensor, eps: float = 1e-5
) -> Tensor:
    batch, heads, length, features = query_features.shape
    torch._check(
        key_features.shape[-1] == features and value.shape[0] == batch == key_features.shape[0],
        lambda: (
            "attention_from_features: key_features and value must have the batch size of "
            "query_features, key_features its features"
        ),
    )
    return value.new_empty((batch, length, heads, value.shape[-1])).transpose(1, 2)


@_fake("key_moments")
def _key_moments(key_features: Tensor, logits: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, _keys, features = key_features.shape
    entries = features * (features + 1) // 2 + 1
    dtype = torch.promote_types(key_features.dtype, torch.float32)
    return (
        key_features.new_empty((batch, heads, entries, value.shape[3] + 1), dtype=dtype),
        key_features.new_empty((batch, heads), dtype=torch.float64),
    )


@_fake("add_key_moments_")
def _add_key_moments(*_: Tensor) -> None:
    return None


@_fake("attention_from_moments")
def _from_moments(
    query_features: Tensor, moments: Tensor, reference: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    batch, heads, length, _features = query_features.shape
    output = query_features.new_empty((batch, length, heads, moments.shape[3] - 1)).transpose(1, 2)
    return output, query_features.new_empty((batch, heads, length), dtype=torch.float64)


@_fake("causal_attention_from_moments")
def _causal(
    query_features: Tensor,
    key_features: Tensor,
    logits: Tensor,
    value: Tensor,
    moments: Tensor,
    reference: Tensor,
    eps: float = 1e-5,
) -> tuple[Tensor, ...]:
    found = _from_moments(query_features, moments, reference, eps)
    return *found, moments.new_empty(moments.shape), reference.new_empty(reference.shape)


# Inputs of a backward that have gradients: those whose gradient is laid out as they are, those with
# a contiguous one, and options. An empty tensor stands for a gradient that is not wanted, in the
# type of the first input, or, of moments, of the input itself.
_GRADIENTS = {
    "implicit_kernel_attention": (slice(1, 4), slice(4, 6), ("key_bias", "attn_mask")),
    "implicit_kernel_attention_varlen": (slice(0), slice(3, 8), ("key_bias",)),
    "implicit_kernel_weights": (slice(1, 3), slice(3, 5), ("key_bias", "attn_mask")),
    "spectral_features": (slice(1, 2), slice(2, 4), ()),
    "key_moments": (slice(1, 4), slice(0), ()),
    "attention_from_moments": (slice(1, 2), slice(2, 3), ()),
    "causal_attention_from_moments": (slice(2, 6), slice(6, 7), ()),
}


def _gradients(
    name: str, *given: Any, wanted: Sequence[bool] | None = None, **options: Any
) -> tuple[Tensor, ...]:
    alike, contiguous, named = _GRADIENTS[name]
    wanted = given[-1] if wanted is None else wanted
    given = (*given, None)  # w2 may be left out
    inputs = [*given[alike], *given[contiguous], *(options.get(option) for option in named)]
    of_moments = "moments" in name
    results = []
    for i, (x, want) in enumerate(zip(inputs, wanted, strict=False)):
        if not want or x is None:
            results.append((x if of_moments else inputs[0]).new_empty((0,)))
        elif i < len(given[alike]):
            results.append(torch.empty_like(x))
        else:
            results.append(x.new_empty(x.shape))
    return tuple(results)


for _name in _GRADIENTS:
    _fake(f"{_name}_backward")(functools.partial(_gradients, _name))


@_fake("dropout_keep_mask")
def _dropout_keep_mask(
    dropout_seed: Tensor, B: int, H: int, L: int, S: int, dropout_p: float
) -> Tensor:
    return dropout_seed.new_empty((B, H, L, S), dtype=torch.bool)


@_fake("contribution_maps")
def _contribution_maps(
    of_queries: Tensor,
    value: Tensor,
    out_proj_weight: Tensor,
    *,
    residual: Tensor | None = None,
    maps: Sequence[bool],
    **_: Any,
) -> tuple[Tensor, ...]:
    """Makes the maps of weights ``[B, H, L, S]``, or of queries ``[B, H, L, d]``."""
    given = (of_queries, value, out_proj_weight, residual)
    is_wide = any(x is not None and x.dtype == torch.float64 for x in given)
    dtype = torch.float64 if is_wide else torch.float32
    batch, heads, length, _size = of_queries.shape
    keys = value.shape[2]
    shapes = [(batch, heads, keys), *[(batch, length, keys)] * 4, (4, batch, length)]
    return tuple(
        value.new_empty(shape, dtype=dtype) if want else value.new_empty((0,), dtype=torch.float32)
        for shape, want in zip(shapes, maps, strict=True)
    )


@_fake("streamed_contribution_maps")
def _streamed_contribution_maps(
    query: Tensor, key: Tensor, value: Tensor, out_proj_weight: Tensor, *_: Any, **options: Any
) -> tuple[Tensor, ...]:
    return _contribution_maps(query, value, out_proj_weight, **options)


@_fake("contribution_maps_backward")
def _contribution_maps_backward(
    grad_maps: Sequence[Tensor | None], inputs: Sequence[Tensor | None], *rest: Any
) -> list[Tensor]:
    wanted: Sequence[bool] = rest[-1]
    value = inputs[7]
    assert value is not None
    return [
        tensor.new_empty(tensor.shape) if want and tensor is not None else value.new_empty((0,))
        for tensor, want in zip(inputs, wanted, strict=False)
    ]


def _edges_in(others: Sequence[Any]) -> int:
    """Returns E: logits of keys and edges, what is kept, and rowptr stand before the sources."""
    return others[4].shape[0]  # type: ignore[no-any-return]


@_fake("edge_attention_from_features")
def _edge_attention(
    query_features: Tensor, key_features: Tensor, value: Tensor, *others: Any, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    nodes, heads, _features = query_features.shape
    return (
        query_features.new_empty((nodes, heads, value.shape[2])),
        query_features.new_empty((_edges_in(others), heads)),
        query_features.new_empty((nodes, heads), dtype=torch.float64),
    )


@_fake("edge_query_gradients")
def _edge_query_gradients(
    query_features: Tensor, key_features: Tensor, value: Tensor, *others: Any, **_: Any
) -> tuple[Tensor, Tensor]:
    return (
        query_features.new_empty(query_features.shape),
        query_features.new_empty((_edges_in(others), 3, query_features.shape[1])),
    )


@_fake("edge_key_gradients")
def _edge_key_gradients(
    of_edges: Tensor, query_features: Tensor, grad_output: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    sources, (heads, features) = others[2], query_features.shape[1:]
    return (
        query_features.new_empty((sources, heads, features)),
        query_features.new_empty((sources, heads, grad_output.shape[2])),
        query_features.new_empty((sources, heads)),
    )


@torch.library.register_fake("ikattn::alti_distances")
def _alti_distances(
    weights: Tensor, heads: Tensor, output: Tensor, residual: Tensor, *_: Any
) -> Tensor:
    batch, _heads, queries, keys = weights.shape
    return weights.new_empty((batch, queries, keys))
