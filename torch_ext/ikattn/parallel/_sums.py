"""Attention over ranks in linear time: ranks exchange moments, of one size for any number of keys.

Not causal, moments of all keys are one sum over ranks. Causal, moments of all keys before a chunk
are passed on from chunk to chunk, some heads after the others: an exclusive scan. Sizes as in
``ikattn.ops``, L and S those of one rank; K heads of the moments, F = 2 M features, E entries.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ikattn.ops.forgetting import features_of
from ikattn.ops.magnitude import log_magnitude
from ikattn.ops.moments import (
    attention_from_moments,
    causal_attention_from_moments,
    key_moments,
    merge_moments,
)
from ikattn.parallel._ranks import Exchange
from ikattn.parallel._ring import Call


def _scaled(moments: Tensor, log_factor: Tensor) -> Tensor:
    """Scales moments [B, K, E, d_v + 1] by exp(log_factor), [B, K]; zero for no number."""
    factor = log_factor.exp().nan_to_num(0.0, 0.0).to(moments.dtype)
    return moments * factor[..., None, None]


def sums_attention(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    w1: Tensor,
    w2: Tensor | None,
    key_bias: Tensor | None,
) -> Tensor:
    """Computes what ``Ring`` does, in linear time; without dropout."""
    H, G = query.size(1), key.size(1)
    bias_heads = 1 if key_bias is None else key_bias.size(1)
    K = H if max(w1.size(-3), bias_heads) > G else G
    wide = torch.promote_types(key.dtype, torch.float32)
    phi_q, phi_k = (features_of(x.to(wide), w1, w2) for x in (query, _repeated(key, K, 1)))
    options = call.options
    logits = log_magnitude(key.to(wide), options["p"], options["magnitude_scale"]).double()
    logits = _repeated(logits, K, 1)
    if key_bias is not None:
        logits = logits + _repeated(key_bias, K if bias_heads > 1 else 1, 1)
    apply: Any = _Causal.apply if call.is_causal else _Whole.apply
    output: Tensor = apply(call, phi_q, phi_k, logits, value)
    return output.to(query.dtype)


def _repeated(x: Tensor, heads: int, axis: int) -> Tensor:
    """Repeats each head on an axis as often as ``heads`` wants."""
    own = x.size(axis)
    return x if own == heads else x.repeat_interleave(heads // own, axis)


class _Whole(torch.autograd.Function):
    """Every query sees the sum of all ranks' moments where nothing is causal."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, phi_q: Tensor, phi_k: Tensor, logits: Tensor, value: Tensor
    ) -> Tensor:
        moments, own = key_moments(phi_k, logits, value)
        reference = call.ranks.reduced(own, dist.ReduceOp.MAX)
        total = call.ranks.reduced(_scaled(moments, own - reference), dist.ReduceOp.SUM)
        output, log_normalizer = attention_from_moments(
            phi_q, total, reference, eps=call.options["eps"]
        )
        ctx.call = call
        ctx.save_for_backward(
            phi_q, phi_k, logits, value, total, reference, own, output, log_normalizer
        )
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        phi_q, phi_k, logits, value, total, reference, own, output, log_normalizer = (
            ctx.saved_tensors
        )
        operators, eps = torch.ops.ikattn, ctx.call.options["eps"]
        of_queries, of_total = operators.attention_from_moments_backward(
            grad_output, phi_q, total, reference, output, log_normalizer, eps, [True, True]
        )
        of_total = ctx.call.ranks.reduced(of_total, dist.ReduceOp.SUM)
        of_moments = _scaled(of_total, own - reference)
        of_keys = operators.key_moments_backward(
            of_moments, phi_k, logits, value, own, [True, True, True]
        )
        return (None, of_queries, *of_keys)


class _Heads(NamedTuple):
    """Heads that are computed together: those of some values, and what belongs to them."""

    queries: slice
    moments: slice
    values: slice


class _Sharing:
    """How a causal call of one rank is cut, and in which order its parts are computed.

    A part is a chunk of tokens and a group of heads. What a part makes of the moments before it is
    what the same heads of the next chunk begin with, mostly on another rank. So a rank would wait
    for the first group of the rank before, which waits itself. The ``first`` groups are summed
    before anything else is computed, once more than the rest, and passed on: as many as there are
    ranks to wait for. A rank computes as many of them as there are chunks before its own; then the
    groups that come from rank to rank; then what is left of the first ones. Tensors are this
    rank's: phi_q [B, H, L, F], logits [B, K, L] and value [B, G, L, d_v].
    """

    def __init__(self, call: Call, phi_q: Tensor, logits: Tensor, value: Tensor) -> None:
        self.call = call
        self.chunks = call.layout.chunks(call.ranks.number)
        K, L = logits.shape[1:]
        G = value.size(1)
        # a group has a head for each thread; without kernels of the CPU one call takes them all
        count = K // call.threads if phi_q.device.type == "cpu" else 1
        count = max(1, min(G, count))
        bounds = [G * n // count for n in range(count + 1)]
        H = phi_q.size(1)
        self.groups = [
            _Heads(slice(a * H // G, b * H // G), slice(a * K // G, b * K // G), slice(a, b))
            for a, b in pairwise(bounds)
        ]
        self.first = min(len(self.groups), call.ranks.size - 1)
        length = L // len(self.chunks)
        self.tokens = [slice(n * length, (n + 1) * length) for n in range(len(self.chunks))]

    def order(self, chunk: int, *, reverse: bool) -> list[int]:
        """Orders the numbers of the groups of a chunk as they are computed."""
        before = self.call.layout.count - 1 - chunk if reverse else chunk
        early, groups = min(before, self.first), range(len(self.groups))
        return [*groups[:early], *groups[self.first :], *groups[early : self.first]]

    def after(self, chunk: int, *, reverse: bool) -> int | None:
        """Returns the chunk after one in the order of a scan; None at its end."""
        number = chunk - 1 if reverse else chunk + 1
        return number if 0 <= number < self.call.layout.count else None


_Sums: TypeAlias = "list[Tensor]"  # moments and reference, or the gradient of moments


def _scan(
    sharing: _Sharing,
    nothing: Callable[[int], _Sums],
    total: Callable[[int, int, _Sums], _Sums],
    compute: Callable[[int, int, _Sums], _Sums],
    *,
    reverse: bool = False,
) -> None:
    """Computes all parts of this rank, each from the sums that the part before it gave.

    ``nothing`` gives the sums of a group of heads before the first part; ``total``, of a chunk, the
    number of a group and the sums before, those after; ``compute`` does so, and computes the part.
    In reverse it goes from the last chunk to the first.
    """
    ranks, owner = sharing.call.ranks, sharing.call.layout.owner
    places = range(len(sharing.chunks))[:: -1 if reverse else 1]
    held: dict[tuple[int, int], _Sums] = {}  # sums before a chunk, by chunk and group
    sent: list[Exchange] = []

    def sums_before(chunk: int, group: int) -> _Sums:
        before = sharing.after(chunk, reverse=not reverse)
        if before is None:
            return nothing(group)
        if (chunk, group) not in held:
            likes = nothing(group)
            held[chunk, group] = ranks.receive(likes, owner(before), group * len(likes))
        return held[chunk, group]

    def pass_on(chunk: int, group: int, sums: _Sums) -> None:
        after = sharing.after(chunk, reverse=reverse)
        assert after is not None
        if owner(after) == ranks.number:
            held[after, group] = sums
        else:
            sent.append(ranks.send(sums, owner(after), group * len(sums)))

    for place in places:
        chunk = sharing.chunks[place]
        has_next = sharing.after(chunk, reverse=reverse) is not None
        for group in range(sharing.first if has_next else 0):
            pass_on(chunk, group, total(place, group, sums_before(chunk, group)))
    for place in places:
        chunk = sharing.chunks[place]
        has_next = sharing.after(chunk, reverse=reverse) is not None
        for group in sharing.order(chunk, reverse=reverse):
            after = compute(place, group, sums_before(chunk, group))
            held.pop((chunk, group), None)
            if has_next and group >= sharing.first:
                pass_on(chunk, group, after)
    for exchange in sent:
        exchange.wait()


class _Causal(torch.autograd.Function):
    """Causal: moments go from part to part, and each part is one call of the operator."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, phi_q: Tensor, phi_k: Tensor, logits: Tensor, value: Tensor
    ) -> Tensor:
        sharing = _Sharing(call, phi_q, logits, value)
        B, H, L, F = phi_q.shape
        shape = (F * (F + 1) // 2 + 1, value.size(3) + 1)
        output = phi_q.new_empty((B, L, H, value.size(3))).transpose(1, 2)
        log_normalizer = logits.new_empty((B, H, L))
        states: dict[tuple[int, int], list[Tensor]] = {}

        def nothing(group: int) -> _Sums:
            heads = sharing.groups[group].moments
            shape_of_heads = (B, heads.stop - heads.start)
            return [
                phi_q.new_zeros((*shape_of_heads, *shape)),
                logits.new_full(shape_of_heads, -torch.inf),
            ]

        def keys(place: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
            heads, tokens = sharing.groups[group], sharing.tokens[place]
            k, own = (x[:, heads.moments, tokens] for x in (phi_k, logits))
            return k, own, value[:, heads.values, tokens]

        def total(place: int, group: int, before: _Sums) -> _Sums:
            moments, reference = before
            own = key_moments(*keys(place, group))
            return list(merge_moments(moments, reference, *own))

        def compute(place: int, group: int, before: _Sums) -> _Sums:
            at = slice(None), sharing.groups[group].queries, sharing.tokens[place]
            output[at], log_normalizer[at], *after = causal_attention_from_moments(
                phi_q[at], *keys(place, group), *before, eps=call.options["eps"]
            )
            states[place, group] = [*before, after[1]]
            return after

        _scan(sharing, nothing, total, compute)
        ctx.sharing, ctx.places = sharing, list(states)
        kept = [x for state in states.values() for x in state]
        ctx.save_for_backward(phi_q, phi_k, logits, value, output, log_normalizer, *kept)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        phi_q, phi_k, logits, value, output, log_normalizer, *kept = ctx.saved_tensors
        sharing, eps = ctx.sharing, ctx.sharing.call.options["eps"]
        states = dict(zip(ctx.places, zip(*[iter(kept)] * 3, strict=True), strict=True))
        gradients = [torch.empty_like(x) for x in (phi_q, phi_k, logits, value)]
        operators = torch.ops.ikattn

        def nothing(group: int) -> _Sums:
            return [torch.zeros_like(states[0, group][0])]

        def of_queries(place: int, group: int) -> tuple[tuple[Any, ...], list[Tensor]]:
            at = slice(None), sharing.groups[group].queries, sharing.tokens[place]
            return at, [x[at] for x in (grad_output, phi_q, output, log_normalizer)]

        def total(place: int, group: int, after: _Sums) -> _Sums:
            moments, reference, reference_after = states[place, group]
            _, (grad, x, own, log_z) = of_queries(place, group)
            _, of_own = operators.attention_from_moments_backward(
                grad, x, moments, reference, own, log_z, eps, [False, True]
            )
            # relative to moments, gradients have the inverse factor
            return [of_own + _scaled(after[0], reference - reference_after)]

        def compute(place: int, group: int, after: _Sums) -> _Sums:
            heads, tokens = sharing.groups[group], sharing.tokens[place]
            at, (grad, x, own, log_z) = of_queries(place, group)
            at_keys = slice(None), heads.moments, tokens
            at_values = slice(None), heads.values, tokens
            moments, reference, _ = states[place, group]
            *found, of_moments = operators.causal_attention_from_moments_backward(
                *(grad, after[0], x, phi_k[at_keys], logits[at_keys], value[at_values]),
                *(moments, reference, own, log_z, eps, [True] * 5),
            )
            places = (at, at_keys, at_keys, at_values)
            for into, place_of, part in zip(gradients, places, found, strict=True):
                into[place_of] = part
            return [of_moments]

        _scan(sharing, nothing, total, compute, reverse=True)
        return (None, *gradients)
