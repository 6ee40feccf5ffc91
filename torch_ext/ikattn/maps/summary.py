"""Summaries of maps: means over heads, layers and tokens.

Symbols: B batch, H heads, L queries, S keys, N layers. Padding is bool, True = padding, ``[B, L]``
for queries and ``[B, S]`` for keys. What is padding is 0 in every map and left out of averages.
Half-precision input is taken, and returned, as float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ikattn._precision import widened
from ikattn.maps.contribution_maps import Contributions
from ikattn.maps.layers import Batch, RecordedMaps, check_whole

Maps: TypeAlias = RecordedMaps | Batch | Sequence[Tensor] | Tensor
"""A recording of one forward call, one of its batches, or one map per layer, first layer first."""

# The fields of Contributions that hold a number for every pair of query and key.
HEAD_MAPS = ("weights", "per_head", "similarity")
TOKEN_MAPS = ("summed", "with_residual", "with_norm", "encoder", "alti")


def row_shares(x: Tensor) -> Tensor:
    """Every row over its sum; rows of zeros stay."""
    total = x.sum(-1, keepdim=True)
    return x / torch.where(total == 0, 1, total)


def check_padding(padding: Tensor, name: str, shape: Sequence[int], caller: str) -> None:
    """Raises unless padding is bool and has this shape."""
    if padding.dtype != torch.bool or list(padding.shape) != list(shape):
        raise ValueError(
            f"{caller}: {name} must be bool with shape {list(shape)}, True = padding, "
            f"got {padding.dtype} {list(padding.shape)}"
        )


def without_padding(
    x: Tensor, query_padding: Tensor | None, key_padding: Tensor | None, caller: str
) -> Tensor:
    """``[B, L, S]`` or ``[B, H, L, S]`` with 0 wherever the query or the key is padding."""
    middle = (1,) * (x.dim() - 3)
    B, L, S = x.shape[0], x.shape[-2], x.shape[-1]
    if query_padding is not None:
        check_padding(query_padding, "query_padding", (B, L), caller)
        x = x.masked_fill(query_padding.view(B, *middle, L, 1), 0)
    if key_padding is not None:
        check_padding(key_padding, "key_padding", (B, S), caller)
        x = x.masked_fill(key_padding.view(B, *middle, 1, S), 0)
    return x


def pair_map(contributions: Contributions, map: str, caller: str, layer: str = "") -> Tensor:
    """The map of this name, ``[B, L, S]`` or ``[B, H, L, S]``."""
    of_layer = f" of layer {layer!r}" if layer else ""
    names = (*HEAD_MAPS, *TOKEN_MAPS)
    found: Tensor | None = getattr(contributions, map, None) if map in names else None
    if found is None:
        there = [name for name in names if getattr(contributions, name) is not None]
        raise ValueError(
            f"{caller}: map must be one of those recorded{of_layer}, "
            f"{', '.join(there) or 'of which there are none'}, got {map!r}"
        )
    return widened(found)


def head_mean(
    x: Tensor, *, query_padding: Tensor | None = None, key_padding: Tensor | None = None
) -> Tensor:
    """The mean over heads.

    Every head counts the same, also one that sees nothing of a pair.

    Args:
        x: ``[B, H, L, S]``, for example the ``weights`` or ``per_head`` of a Contributions.
        query_padding: bool ``[B, L]``.
        key_padding: bool ``[B, S]``.

    Returns:
        ``[B, L, S]``, 0 where the query or the key is padding.

    Raises:
        ValueError: x or a padding has another shape, or a padding is not bool.

    Example:
        >>> import torch
        >>> from ikattn.maps.summary import head_mean
        >>> weights = torch.rand(2, 4, 5, 7).softmax(-1)
        >>> head_mean(weights).shape
        torch.Size([2, 5, 7])
    """
    if x.dim() != 4 or x.shape[1] == 0:
        raise ValueError(
            f"head_mean: x must have shape [B, H, L, S] with a head at least, got {list(x.shape)}"
        )
    mean = widened(x).mean(1)
    return without_padding(mean, query_padding, key_padding, "head_mean")


def layer_contributions(
    maps: RecordedMaps | Batch, layers: Iterable[str] | None, caller: str
) -> dict[str, Contributions]:
    """The chosen layers, in the given order, or those of self-attention in the order they ran."""
    batch: Mapping[str, Contributions]
    if isinstance(maps, Batch):
        batch = maps
    else:
        maps.check_recorded()
        if len(maps.batches) != 1:
            raise LookupError(
                f"{caller}: maps must be a recording of one forward call, got one of "
                f"{len(maps.batches)}: give recording.batches[i], or loop over them"
            )
        (batch,) = maps.batches
        own = [layer for layer in maps.layers.values() if layer.kind == "self"]
        if layers is None and len({layer.side for layer in own}) > 1:
            raise ValueError(
                f"{caller}: layers must be given, since this model has self-attention in an "
                f"encoder and in a decoder: {', '.join(layer.name for layer in own)}"
            )
        layers = [layer.name for layer in own] if layers is None else layers
    chosen = list(batch if layers is None else layers)
    if not chosen:
        raise ValueError(f"{caller}: maps must hold at least one layer, got none")
    for name in chosen:
        if name not in batch:
            raise KeyError(f"{caller}: no layer {name!r}; there are {', '.join(batch)}")
        check_whole(batch[name], name, caller, rows_too=False)
    return {name: batch[name] for name in chosen}


def layer_maps(
    maps: Maps,
    *,
    map: str = "encoder",
    layers: Iterable[str] | None = None,
    query_padding: Tensor | None = None,
    key_padding: Tensor | None = None,
    caller: str = "layer_maps",
) -> list[Tensor]:
    """One map ``[B, L, S]`` per layer, first layer first, heads averaged, padding 0.

    Of a recording by default the layers of self-attention, and the padding that it knows; of a
    Batch, which does not know them from others, all layers. Errors are those of :func:`layer_mean`.
    """
    recorded: list[tuple[str, Tensor, Tensor | None, Tensor | None]]
    if isinstance(maps, (RecordedMaps, Batch)):
        recorded = [
            (
                f"map {map!r} of layer {name!r}",
                pair_map(c, map, caller, name),
                c.query_padding if query_padding is None else query_padding,
                c.key_padding if key_padding is None else key_padding,
            )
            for name, c in layer_contributions(maps, layers, caller).items()
        ]
    elif layers is not None:
        raise ValueError(f"{caller}: layers must be None where maps are tensors, got {layers}")
    else:
        recorded = [
            (f"maps[{index}]", widened(x), query_padding, key_padding)
            for index, x in enumerate(maps)
        ]
    if not recorded:
        raise ValueError(f"{caller}: maps must hold at least one layer, got none")
    found: list[Tensor] = []
    for name, x, of_queries, of_keys in recorded:
        if x.dim() not in (3, 4):
            raise ValueError(
                f"{caller}: {name} must have shape [B, L, S] or [B, H, L, S], got {list(x.shape)}"
            )
        mean = head_mean(x) if x.dim() == 4 else x
        if found and mean.shape != found[0].shape:
            raise ValueError(
                f"{caller}: {name} must have shape {list(found[0].shape)} as the first layer's, "
                f"got {list(mean.shape)}"
            )
        found.append(without_padding(mean, of_queries, of_keys, caller))
    return found


def layer_mean(
    maps: Maps,
    *,
    map: str = "encoder",
    layers: Iterable[str] | None = None,
    query_padding: Tensor | None = None,
    key_padding: Tensor | None = None,
) -> Tensor:
    """The mean over layers (and over heads, of a map that has them), pair by pair.

    Args:
        maps: A Recording of one forward call, a Batch, or ``[B, L, S]`` or ``[B, H, L, S]`` tensors
            (or one tensor with layers as its first axis). Where layers do not have the same L and
            S, ``layers`` must choose.
        map: Which one, of a recording: "weights", "per_head", "summed", "with_residual",
            "with_norm" or "encoder".
        layers: Names of layers of a recording. By default those of self-attention; of a Batch,
            which does not know them from others, all.
        query_padding: bool ``[B, L]``, for tensors; a recording knows its own.
        key_padding: bool ``[B, S]``, likewise.

    Returns:
        ``[B, L, S]``, 0 where the query or the key is padding.

    Raises:
        ValueError: No layer, a map that was not recorded, shapes that differ or do not fit.
        KeyError: A layer that is not there.
        LookupError: A recording of no or several forward calls.

    Example:
        >>> import torch
        >>> from ikattn.maps.summary import layer_mean
        >>> layer_mean([torch.zeros(1, 2, 2), torch.ones(1, 2, 2)])
        tensor([[[0.5000, 0.5000],
                 [0.5000, 0.5000]]])
    """
    found = layer_maps(
        maps,
        map=map,
        layers=layers,
        query_padding=query_padding,
        key_padding=key_padding,
        caller="layer_mean",
    )
    return torch.stack(found).mean(0)


def token_mean(values: Tensor, padding: Tensor | None = None) -> Tensor:
    """The mean over the last axis, tokens, without those that are padding.

    Args:
        values: ``[B, ..., S]``: mixing ratios ``[B, L]``, value norms ``[B, H, S]``, a map. NaN in
            padding does no harm.
        padding: bool ``[B, S]``.

    Returns:
        ``[B, ...]``; NaN for a sequence of padding only, of which there is no mean.

    Raises:
        ValueError: values has fewer than two axes, or padding does not fit.

    Example:
        >>> import torch
        >>> from ikattn.maps.summary import token_mean
        >>> ratio = torch.tensor([[0.2, 0.4], [0.6, 0.0]])
        >>> token_mean(ratio, torch.tensor([[False, False], [False, True]]))
        tensor([0.3000, 0.6000])
    """
    if values.dim() < 2:
        raise ValueError(f"token_mean: values must be [B, ..., S], got {list(values.shape)}")
    values = widened(values)
    B, S = values.shape[0], values.shape[-1]
    if padding is None:
        return values.mean(-1)
    check_padding(padding, "padding", (B, S), "token_mean")
    padding = padding.view(B, *(1,) * (values.dim() - 2), S)
    return values.masked_fill(padding, 0).sum(-1) / (~padding).sum(-1)
