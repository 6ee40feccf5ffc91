"""Padding of a run, and the key that is a query's own.

Sizes: B batch, L queries, S keys.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ikattn.nn import masks
from ikattn.recorder.calls.attention_call import AttentionCall
from ikattn.recorder.runs.call import Entered
from ikattn.recorder.sums.tensors import same_numbers

_NAME = "attention_mask"
_decoder_signature = inspect.signature(nn.TransformerDecoderLayer.forward)


def fill_padding(call: AttentionCall, given: Tensor | None, of_tokens: Tensor | None) -> None:
    """Finds padded keys and, in self-attention, the place and the padding of the queries.

    A token that is hidden from all queries is padding where the model's own mask ``of_tokens [B,
    S]``, 0 = padding, says so. Without such a mask it is padding if that of the attention,
    ``given``, is the same for all queries, or if its own row is hidden, too: a token that others do
    not see may still see them.
    """
    B, _, L, S = call.sizes
    hidden = call.hidden() if given is not None or call.attn_mask is not None else None
    seen = None if hidden is None else ~hidden.all(1).all(1).expand(B, S)
    seen_until = S if call.causal is None else min(S, L + call.causal)
    if seen is not None and L != S and bool(seen.any()):
        seen_until = int(seen.any(0).nonzero().max()) + 1
    if call.kind == "self":
        # a cache holds earlier tokens, and a static one room for later ones
        call.diagonal = max(seen_until - L, 0)
    if of_tokens is not None:
        call.key_padding = of_tokens.to(call.key.device) == 0
    elif given is not None and seen is not None:
        call.key_padding = ~seen
        if call.kind == "self" and given.dim() == 4 and given.size(-2) > 1:
            assert hidden is not None
            blind = hidden.all(1).all(-1).expand(B, L)
            own = call.key_padding[:, call.diagonal : call.diagonal + L]
            own &= blind[:, : own.size(1)]
    if call.kind == "self" and seen_until < S:  # room for later tokens
        room = torch.arange(S, device=call.key.device).expand(B, S) >= seen_until
        call.key_padding = room if call.key_padding is None else call.key_padding | room
    if call.kind == "self" and call.key_padding is not None:
        call.query_padding = call.key_padding[:, call.diagonal : call.diagonal + L]


def padding_of_decoder(running: Iterable[Entered], B: int, L: int) -> Tensor | None:
    """The padding ``[B, L]`` of a decoder's own tokens, as it was told of it; None: of none.

    ``running`` are the modules around its cross-attention, outermost first.
    """
    for entered in running:
        if isinstance(entered.module, nn.TransformerDecoderLayer):
            given = _decoder_signature.bind(entered.module, *entered.args, **entered.kwargs)
            mask = given.arguments.get("tgt_key_padding_mask")
            padding = (
                None if mask is None else masks.hidden(mask if mask.dim() == 2 else mask[None])
            )
        elif entered.kwargs.get("encoder_hidden_states") is not None:
            mask = entered.mask if isinstance(entered.mask, Tensor) else None
            padding = None if mask is None or mask.dim() != 2 else mask == 0
        else:
            continue
        if padding is None or padding.size(0) != B or padding.size(1) < L:
            return None
        return padding[:, padding.size(1) - L :]  # earlier tokens are in a cache
    return None


def has_other_keys(
    entered: Entered, sizes: tuple[int, int, int, int], looks_at_inputs: bool
) -> bool:
    """Whether a query's own token is not among the keys, or not where it is looked for.

    A call of fewer queries than keys goes on from a cache, and its queries are the last tokens.
    That is not so where the module was called with the tokens of all keys, and asks for some, nor
    where it was called with two sequences. The second is not the keys' where it ends with the
    first, nor where no linear module takes it, and more than queries are made of the first.

    ``entered`` is the attention, or the module around it that was called with tokens, ``sizes`` are
    B, H d, L and S. With ``looks_at_inputs`` any other tensor of tokens that the module can project
    is taken for the keys'; names tell in models of transformers.
    """
    B, width, L, S = sizes
    if L > S:
        return True
    if entered.given is None or not entered.was_called_with_tokens:
        return False
    x = entered.given.tensor
    if L < S and x.shape[:2] == (B, S):
        return True
    if not looks_at_inputs:
        return False
    parts = entered.module.modules()
    widths = {part.in_features for part in parts if isinstance(part, nn.Linear)}
    inputs = [y for y in (*entered.args, *entered.kwargs.values()) if isinstance(y, Tensor)]
    if sum(same_numbers(y, x) for y in inputs) > 1:
        return False  # queries and keys are of one sequence
    others = [
        y
        for y in inputs
        if y.is_floating_point()
        and y.dim() == 3
        and (y.size(0), y.size(1)) == (x.size(0), S)
        and y.size(2) in widths
        and (y.data_ptr() != x.data_ptr() or y.shape != x.shape)
    ]
    are_projected = any(y.data_ptr() in entered.projected for y in others)
    # The first that is projected is what queries are made of.
    _, made = next(iter(entered.projected.values()), (None, 0))
    if made > width and not are_projected:
        return False
    alike = [y for y in others if (y.size(2), y.dtype, y.device) == (x.size(2), x.dtype, x.device)]
    return len(alike) < len(others) or not all(torch.equal(y[:, -1], x[:, -1]) for y in alike)


def mask_argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns a module's argument attention_mask; ``...`` where it has none."""
    if _NAME in kwargs:
        return kwargs[_NAME]
    kind: Any = type(module)
    place = _place_of_mask(kind)
    return args[place] if place is not None and place < len(args) else ...


@functools.cache
def _place_of_mask(kind: Any) -> int | None:
    try:
        names = list(inspect.signature(kind.forward).parameters)[1:]
    except (TypeError, ValueError):
        return None
    return names.index(_NAME) if _NAME in names else None
