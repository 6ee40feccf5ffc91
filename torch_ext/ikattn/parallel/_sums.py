"""Attention over ranks in linear time: ranks exchange moments, of one size for any number of keys.

Not causal, moments of all keys are one sum over ranks. Causal, chunks are cut into pieces. The
queries of a piece see its own keys by pairs, and those of all pieces before it by moments: of the
rank's own pieces, and of the chunks before, which are passed on from chunk to chunk: an exclusive
scan. Sizes as in ``ikattn.ops``, L and S those of one rank; K heads of the moments, F = 2 M
features, E entries of the moments, P pieces of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ikattn.ops.attention import spectral_features
from ikattn.ops.magnitude import log_magnitude
from ikattn.ops.moments import attention_from_moments, key_moments, merge_moments
from ikattn.parallel._ring import Call, Merged

__all__ = ["sums_attention"]


class _State(NamedTuple):
    """Moments of keys, or gradients of such, with what they are relative to.

    Attributes:
        moments: [B, K, E, d_v + 1]; of several pieces, [B, P, K, E, d_v + 1].
        reference: float64 [B, K] or [B, P, K]: they are to be multiplied with its exponential; -inf
            where there is no key.
    """

    moments: Tensor
    reference: Tensor

    def empty(self) -> _State:
        """The state of no key, of the same sizes."""
        return _State(torch.zeros_like(self.moments), torch.full_like(self.reference, -torch.inf))

    def piece(self, number: int) -> _State:
        """One of several."""
        return _State(self.moments[:, number], self.reference[:, number])

    def of(self, pieces: slice) -> _State:
        """Some of several."""
        return _State(self.moments[:, pieces], self.reference[:, pieces])

    def total(self) -> _State:
        """What several add up to."""
        largest = self.reference.amax(1)
        factor = (self.reference - largest.unsqueeze(1)).exp().nan_to_num(0.0)
        sums = torch.einsum("bpk...,bpk->bk...", self.moments, factor.to(self.moments.dtype))
        return _State(sums, largest)

    def scaled(self, log_factor: Tensor) -> Tensor:
        """The moments times exp(log_factor), of the reference's shape; zero for no number."""
        factor = log_factor.exp().nan_to_num(0.0, 0.0).to(self.moments.dtype)
        return self.moments * factor[..., None, None]


def sums_attention(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    w1: Tensor,
    w2: Tensor | None,
    key_bias: Tensor | None,
) -> Tensor:
    """The same as ``ring_attention``, in linear time; without dropout."""
    H, G = query.size(1), key.size(1)
    bias_heads = 1 if key_bias is None else key_bias.size(1)
    K = H if max(w1.size(-3), bias_heads) > G else G
    phi_q, phi_k = _features(query, w1, w2), _features(_repeated(key, K, 1), w1, w2)
    options = call.options
    wide = torch.promote_types(key.dtype, torch.float32)
    logits = log_magnitude(key.to(wide), options["p"], options["magnitude_scale"]).double()
    logits = _repeated(logits, K, 1)
    if key_bias is not None:
        logits = logits + _repeated(key_bias, K if bias_heads > 1 else 1, 1)
    apply: Any = _Causal.apply if call.is_causal else _Whole.apply
    arguments = [phi_q, phi_k, logits]
    tokens: list[Tensor | None] = [query, key, value, w1, w2, key_bias]
    given = [*tokens, *arguments] if call.is_causal else [*arguments, value]
    output: Tensor = apply(call, *given)
    return output.to(query.dtype)


def _features(x: Tensor, w1: Tensor, w2: Tensor | None) -> Tensor:
    """phi(x) in float32 or float64, of heads that frequencies are repeated for."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    frequencies = [None if w is None else _repeated(w.to(wide), x.size(1), -3) for w in (w1, w2)]
    assert frequencies[0] is not None
    return spectral_features(x.to(wide), frequencies[0], frequencies[1])


def _repeated(x: Tensor, heads: int, axis: int) -> Tensor:
    """Each head on an axis as often as ``heads`` wants."""
    own = x.size(axis)
    return x if own == heads else x.repeat_interleave(heads // own, axis)


class _Whole(torch.autograd.Function):
    """Not causal: every query sees the sum of all ranks' moments."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, phi_q: Tensor, phi_k: Tensor, logits: Tensor, value: Tensor
    ) -> Tensor:
        own = _State(*key_moments(phi_k, logits, value))
        reference = call.ranks.largest(own.reference)
        total = call.ranks.sum(own.scaled(own.reference - reference))
        output, log_normalizer = attention_from_moments(
            phi_q, total, reference, eps=call.options["eps"]
        )
        ctx.call = call
        ctx.save_for_backward(
            phi_q, phi_k, logits, value, total, reference, own.reference, output, log_normalizer
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
        of_moments = _State(ctx.call.ranks.sum(of_total), reference).scaled(own - reference)
        of_keys = operators.key_moments_backward(
            of_moments, phi_k, logits, value, own, [True, True, True]
        )
        return (None, of_queries, *of_keys)


class _Inputs(NamedTuple):
    """The tensors of a causal call on one rank, cut into pieces, or gradients of these.

    Attributes:
        query, key, value: [B P, heads, piece, size].
        w1, w2: Frequencies, whole.
        key_bias: [B P, heads, piece], or None.
        phi_q, phi_k: [B P, H or K, piece, F].
        logits: [B P, K, piece].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    w1: Tensor
    w2: Tensor | None
    key_bias: Tensor | None
    phi_q: Tensor
    phi_k: Tensor
    logits: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> _Inputs:
        """All of them but the frequencies changed."""
        return _Inputs(
            *(
                x if x is None or name in ("w1", "w2") else change(x)
                for name, x in self._asdict().items()
            )
        )


class _Pieces:
    """How a rank's tokens are cut: all pieces of one length, each within a chunk.

    Args:
        call: Who takes part.
        inputs: Of the rank's tokens, whole.
    """

    def __init__(self, call: Call, inputs: _Inputs) -> None:
        self.batch, length = inputs.query.size(0), inputs.query.size(2)
        self.chunks = len(call.layout.chunks(call.ranks.number))
        chunk, features = length // self.chunks, inputs.phi_q.size(3)
        # A piece's pairs then take a part of what moments take.
        wanted = max(64, features * (features + 1) // 2)
        count = max(1, -(-chunk // wanted))
        count = next((n for n in range(count, 4 * count + 1) if chunk % n == 0), 1)
        self.per_chunk, self.count = count, count * self.chunks
        self.length = chunk // count

    def cut(self, x: Tensor) -> Tensor:
        """[B P, heads, piece, ...] of [B, heads, L, ...]."""
        by_piece: Tensor = x.unflatten(2, (self.count, self.length))
        return by_piece.transpose(1, 2).flatten(0, 1)

    def join(self, x: Tensor) -> Tensor:
        """[B, heads, L, ...] of [B P, heads, piece, ...]."""
        by_piece: Tensor = x.unflatten(0, (self.batch, self.count))
        return by_piece.transpose(1, 2).flatten(2, 3)

    def states(self, moments: Tensor, reference: Tensor) -> _State:
        """States by piece, of those with the pieces in the batch."""
        by_piece = (self.batch, self.count)
        return _State(moments.unflatten(0, by_piece), reference.unflatten(0, by_piece))


class _Causal(torch.autograd.Function):
    """Causal: queries see their own piece by the operator, pieces before it by moments."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> Tensor:
        whole = _Inputs(*tensors)
        pieces = _Pieces(call, whole)
        cut = whole.map(pieces.cut)
        own = pieces.states(*key_moments(cut.phi_k, cut.logits, cut.value))
        before = _others(call, pieces, own)
        own_output, log_normalizer = torch.ops.ikattn.implicit_kernel_attention(
            *cut[:5], key_bias=cut.key_bias, **_options(call)
        )
        merged = Merged(own_output.to(cut.phi_q.dtype), log_normalizer)
        state = (x.flatten(0, 1) for x in before)
        merged.add(slice(None), *attention_from_moments(cut.phi_q, *state, eps=call.options["eps"]))
        ctx.call, ctx.pieces, ctx.own_reference = call, pieces, own.reference
        ctx.save_for_backward(*whole, *before, merged.output, merged.log_normalizer)
        output: Tensor = pieces.join(merged.output).to(whole.query.dtype)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, moments, reference, output, log_normalizer = ctx.saved_tensors
        whole, call, pieces = _Inputs(*tensors), ctx.call, ctx.pieces
        cut, before = whole.map(pieces.cut), _State(moments, reference)
        results = (pieces.cut(grad_output), output, log_normalizer)
        gradients = _gradients_of_pieces(call, cut, results, ctx.needs_input_grad[1:7])
        of_queries, of_before = torch.ops.ikattn.attention_from_moments_backward(
            results[0].to(cut.phi_q.dtype),
            cut.phi_q,
            *(x.flatten(0, 1) for x in before),
            output,
            log_normalizer,
            call.options["eps"],
            [True, True],
        )
        # relative to moments, gradients have the inverse factor; without a key there is none
        inverse = torch.where(reference == -torch.inf, -torch.inf, -reference)
        after = _others(call, pieces, _State(of_before.view(moments.shape), inverse), reverse=True)
        of_moments = after.scaled(ctx.own_reference + after.reference).flatten(0, 1)
        of_keys, of_logits, of_values = torch.ops.ikattn.key_moments_backward(
            of_moments,
            cut.phi_k,
            cut.logits,
            cut.value,
            ctx.own_reference.flatten(0, 1),
            [True, True, True],
        )
        value = gradients.value + of_values if ctx.needs_input_grad[3] else of_values
        found = gradients._replace(
            value=value, phi_q=of_queries, phi_k=of_keys, logits=of_logits
        ).map(pieces.join)
        wanted = ctx.needs_input_grad[1:]
        return (
            None,
            *(
                x.to(like.dtype) if want and x is not None and like is not None else None
                for x, like, want in zip(found, whole, wanted, strict=True)
            ),
        )


def _options(call: Call) -> dict[str, Any]:
    """The operator's, of a piece."""
    return {**call.options, "is_causal": True}


def _gradients_of_pieces(
    call: Call,
    cut: _Inputs,
    results: tuple[Tensor, Tensor, Tensor],
    wanted: tuple[bool, ...],
) -> _Inputs:
    """What the queries and keys of each piece give among themselves; results are of all keys."""
    grad_output, output, log_normalizer = results
    wide = cut.phi_q.dtype
    gradients: list[Any] = torch.ops.ikattn.implicit_kernel_attention_backward(
        grad_output,
        *cut[:3],
        cut.w1.to(wide),
        None if cut.w2 is None else cut.w2.to(wide),
        output.to(cut.query.dtype),
        log_normalizer,
        key_bias=cut.key_bias,
        **_options(call),
        wanted=[*wanted, False],
    )
    found: list[Any] = [x if want else None for x, want in zip(gradients, wanted, strict=False)]
    others: list[Any] = [None] * 3  # phi_q, phi_k and logits are not among the operator's inputs
    return _Inputs(*found, *others)


def _others(call: Call, pieces: _Pieces, own: _State, *, reverse: bool = False) -> _State:
    """For each piece of this rank what the pieces before it, on all ranks, add up to.

    Args:
        call: Who takes part.
        pieces: How the rank's tokens are cut.
        own: The states of the rank's pieces.
        reverse: What the pieces after it add up to, instead.
    """
    result = _State(torch.empty_like(own.moments), torch.empty_like(own.reference))
    chunks = [slice(n, n + pieces.per_chunk) for n in range(0, pieces.count, pieces.per_chunk)]
    totals = [own.of(chunk).total() for chunk in chunks]
    for chunk, first in zip(chunks, _scan(call, totals, reverse=reverse), strict=True):
        numbers = range(chunk.start, chunk.stop)
        running = totals[0].empty() if first is None else first
        for number in reversed(numbers) if reverse else numbers:
            for into, x in zip(result, running, strict=True):
                into[:, number] = x
            running = _State(*merge_moments(*running, *own.piece(number)))
    return result


def _scan(call: Call, own: list[_State], *, reverse: bool) -> list[_State | None]:
    """For each chunk of this rank what the chunks before it add up to; None before the first.

    Args:
        call: Who takes part.
        own: The states of this rank's chunks.
        reverse: What the chunks after it add up to, instead.
    """
    ranks, layout = call.ranks, call.layout
    chunks, step = layout.chunks(ranks.number), -1 if reverse else 1
    result: list[_State | None] = [None] * len(chunks)
    carried: _State | None = None
    sent = []
    for place in range(len(chunks))[::step]:
        before, after = chunks[place] - step, chunks[place] + step
        if not 0 <= before < layout.count:
            carried = None
        elif layout.owner(before) != ranks.number:
            carried = _State(*ranks.receive(own[place], layout.owner(before)))
        result[place] = carried
        carried = own[place] if carried is None else _State(*merge_moments(*carried, *own[place]))
        if 0 <= after < layout.count and layout.owner(after) != ranks.number:
            sent.append(ranks.send(carried, layout.owner(after)))
    for exchange in sent:
        exchange.wait()
    return result
