"""How much one output token draws from each input token, and the tokens ranked by it.

Symbols: B batch, L queries, S keys; a row of a map says what token i takes from each token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ikattn.maps.layers import Batch, RecordedMaps
from ikattn.maps.summary import Maps, check_padding, layer_maps, row_shares
from ikattn.maps.through_layers import Residual, Steps


def token_importance(
    maps: Maps,
    position: int | slice | Tensor,
    *,
    layer: int | str | None = None,
    map: str = "encoder",
    normalize: bool = True,
    layers: Iterable[str] | None = None,
    residual: Residual = None,
    query_padding: Tensor | None = None,
    key_padding: Tensor | None = None,
    without_self: bool = False,
) -> Tensor:
    """How much a chosen output token draws from each input token.

    Its row of the rollout (without computing the others), or of a single layer's map.

    Args:
        maps: As for :func:`rollout`.
        position: Which output token, counted without padding, as in ``Batch.tokens``; -1 is the
            last. An int64 tensor ``[B]``: one for each sequence. A slice: a span, of which the
            mean is taken.
        layer: None: through all layers. A layer's name, or its number among the layers, 0 the
            first: through this one alone; L and S may differ then.
        map, normalize, layers, residual: As for :func:`rollout`; residual tensors with a layer: of
            that layer alone.
        query_padding: bool ``[B, L]``; by default what the recording knows.
        key_padding: bool ``[B, S]``; for rollout, where both are the same tokens, one of them is
            enough.
        without_self: Leave out what the token, or the span, draws from itself.

    Returns:
        ``[B, S]``, 0 at padding; with normalize it adds up to 1.

    Raises:
        ValueError: As :func:`rollout`; or position is outside a sequence.
        KeyError, LookupError: As :func:`rollout`.
        IndexError: No layer has this number.

    Example:
        >>> import torch, ikattn
        >>> from ikattn.maps import rollout, token_importance
        >>> weights = [torch.rand(2, 4, 4).softmax(-1) for _ in range(3)]
        >>> importance = token_importance(weights, -1, residual=0.5)
        >>> torch.allclose(importance, rollout(weights, residual=0.5)[:, -1])
        True
    """
    caller = "token_importance"
    chosen = Steps(maps, normalize, map, layers, residual, caller)
    if layer is None:
        padding = key_padding if query_padding is None else query_padding
        steps, of_queries = chosen.factors(padding), chosen.padding(padding)
    else:
        step, of_queries = _single_step(chosen, layer, query_padding, key_padding)
        steps = [step]
    B, L, S = steps[-1].shape
    device = steps[-1].device
    if isinstance(position, slice):
        share = steps[-1].new_zeros(B, L)
        for own, places in zip(share, _places(position, of_queries, B, L, device), strict=True):
            own[places] = 1 / len(places)
        row = share.unsqueeze(1) @ steps[-1]  # [B, 1, S]
    else:
        index = token_index(position, of_queries, B, L, device)
        share = torch.arange(L, device=index.device) == index.unsqueeze(-1)
        row = steps[-1][torch.arange(B, device=index.device), index].unsqueeze(1)
    for step in reversed(steps[:-1]):
        row = row @ step
    row = row.squeeze(1)
    if not without_self:
        return row
    if L != S:
        raise ValueError(
            f"{caller}: without_self must be False where queries are not the keys, got a map of "
            f"shape {[B, L, S]}"
        )
    others = row.masked_fill(share != 0, 0)
    return row_shares(others) if normalize else others


class RankedToken(NamedTuple):
    """A token and how much it matters."""

    token: str
    importance: float
    position: int
    """Among the tokens of its sequence, padding not counted."""


def rank_tokens(
    importance: Tensor,
    tokens: Sequence[Sequence[str]],
    *,
    padding: Tensor | None = None,
    top: int | None = None,
) -> list[list[RankedToken]]:
    """Tokens with their importance, the most important first, of equal ones the earlier.

    Args:
        importance: ``[B, S]``, from :func:`token_importance`.
        tokens: Of each sequence, without padding, as ``Batch.tokens``.
        padding: bool ``[B, S]``. None: nothing is padded.
        top: How many of each sequence, by default all.

    Returns:
        A list for each sequence.

    Raises:
        ValueError: The number of sequences, or of tokens in one, is not that of importance.

    Example:
        >>> import torch
        >>> from ikattn.maps.importance import rank_tokens
        >>> ranking = rank_tokens(torch.tensor([[0.1, 0.75, 0.15]]), [["the", "cat", "sat"]])
        >>> [ranked.token for ranked in ranking[0]]
        ['cat', 'sat', 'the']
    """
    if importance.dim() != 2 or importance.shape[0] != len(tokens):
        raise ValueError(
            f"rank_tokens: importance must have shape [B, S] with B = {len(tokens)}, the number of "
            f"token lists, got {list(importance.shape)}"
        )
    if padding is None:
        padding = torch.zeros_like(importance, dtype=torch.bool)
    check_padding(padding, "padding", importance.shape, "rank_tokens")
    ranked = []
    for b, (values, hidden, words) in enumerate(zip(importance, padding, tokens, strict=True)):
        values = values[~hidden]
        if len(values) != len(words):
            raise ValueError(
                f"rank_tokens: tokens[{b}] must hold the {len(values)} tokens of its sequence that "
                f"are not padding, got {len(words)}"
            )
        order = values.argsort(descending=True, stable=True)[:top]
        ranked.append([RankedToken(words[i], float(values[i]), i) for i in order.tolist()])
    return ranked


def _single_step(
    chosen: Steps, layer: int | str, query_padding: Tensor | None, key_padding: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """One layer's map, [B, L, S], as rollout would take it, and the padding of its queries."""
    maps, caller = chosen.maps, chosen.caller
    if isinstance(maps, (RecordedMaps, Batch)):
        if isinstance(layer, int):
            names = list(chosen.recorded())
            layer = names[_checked_number(layer, len(names))]
        one = replace(chosen, layers=[layer])
        one.check_rows()
        if query_padding is None:
            query_padding = one.recorded()[layer].query_padding
    elif isinstance(layer, str):
        raise ValueError(f"{caller}: layer must be a number where maps are tensors, got {layer!r}")
    else:
        one = replace(chosen, maps=[maps[_checked_number(layer, len(maps))]])
    paddings = {"query_padding": query_padding, "key_padding": key_padding}
    found = layer_maps(one.maps, map=one.map, layers=one.layers, caller=caller, **paddings)
    B, L, S = found[0].shape
    if one.residual is not None and L != S:
        raise ValueError(
            f"{caller}: residual must be None where queries and keys differ, got {one.residual} "
            f"for a map of shape {[B, L, S]}"
        )
    (step,) = one.with_residuals(found, query_padding)
    return step, query_padding


def _checked_number(layer: int, N: int) -> int:
    if not -N <= layer < N:
        raise IndexError(f"token_importance: layer must be in [{-N}, {N}), got {layer}")
    return layer


def token_index(
    position: int | Tensor, padding: Tensor | None, B: int, L: int, device: torch.device
) -> Tensor:
    """Where in the padded rows the tokens stand that are counted without padding: int64 [B]."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return torch.cat([none, *_places(position, padding, B, L, device)])


def _places(
    position: int | slice | Tensor, padding: Tensor | None, B: int, L: int, device: torch.device
) -> list[Tensor]:
    """Where in the padded rows of each sequence its tokens stand: one, or those of a span."""
    if not isinstance(position, (int, slice, Tensor)):
        raise TypeError(
            "token_importance: position must be an int, a slice or an int64 tensor [B], got "
            f"{position!r}"
        )
    if isinstance(position, Tensor) and (position.dtype != torch.int64 or position.shape != (B,)):
        raise ValueError(
            f"token_importance: position must be an int or an int64 tensor [{B}], "
            f"got {position.dtype} {list(position.shape)}"
        )
    wanted = position.tolist() if isinstance(position, Tensor) else [position] * B
    hidden = torch.zeros(B, L, dtype=torch.bool, device=device) if padding is None else padding
    found = []
    for b, one in enumerate(wanted):
        own = (~hidden[b]).nonzero()[:, 0]
        n = len(own)
        where = f"sequence {b}, which has {n} tokens"
        if isinstance(one, slice):
            chosen = list(range(*one.indices(n)))
            rule = f"a span with a token, got {one} of {where}"
        else:
            chosen = [one] if -n <= one < n else []
            rule = f"in [{-n}, {n}) in {where}, got {one}"
        if not chosen:
            raise ValueError(f"token_importance: position must be {rule}")
        found.append(own[chosen].to(device))
    return found
