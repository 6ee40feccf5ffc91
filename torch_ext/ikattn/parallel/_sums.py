"""Attention over ranks in linear time: ranks exchange moments, of one size for any number of keys.

Not causal, moments of all keys are one sum over ranks. Causal, a chunk's queries see the keys of
their own chunk, by the operator, and those of the chunks before it, by moments that are passed on
from chunk to chunk: an exclusive scan. Sizes as in ``ikattn.ops``, L and S those of one rank; K
heads of the moments, F = 2 M features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ikattn.ops.attention import spectral_features
from ikattn.ops.magnitude import log_magnitude
from ikattn.ops.moments import attention_from_moments, key_moments, merge_moments
from ikattn.parallel._layout import Block
from ikattn.parallel._ring import Call, Merged

__all__ = ["sums_attention"]


class _State(NamedTuple):
    """What is passed on from chunk to chunk.

    Attributes:
        moments: [B, K, E, d_v + 1], or gradients of such.
        reference: float64 [B, K]: they are to be multiplied with its exponential.
    """

    moments: Tensor
    reference: Tensor

    def scaled(self, log_factor: Tensor) -> Tensor:
        """The moments times exp(log_factor), [B, K]; zero where that is no number."""
        factor = log_factor.exp().nan_to_num(0.0, 0.0).to(self.moments.dtype)
        return self.moments * factor[:, :, None, None]


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
    """The tensors of a causal call on one rank, or their gradients."""

    query: Tensor
    key: Tensor
    value: Tensor
    w1: Tensor
    w2: Tensor | None
    key_bias: Tensor | None
    phi_q: Tensor  # [B, H, L, F]
    phi_k: Tensor  # [B, K, S, F]
    logits: Tensor  # [B, K, S]

    def attend(self, call: Call, block: Block) -> tuple[Tensor, Tensor]:
        """The output and normaliser of a chunk's queries over its keys."""
        rows = block.queries
        options = call.options_of(block, self.query.size(1), self.key_bias)
        tokens = (x[:, :, rows] for x in (self.query, self.key, self.value))
        output, log_normalizer = torch.ops.ikattn.implicit_kernel_attention(
            *tokens, self.w1, self.w2, **options
        )
        return output, log_normalizer

    def moments(self, rows: slice) -> _State:
        """Those of a chunk's keys."""
        return _State(*key_moments(*(x[:, :, rows] for x in (self.phi_k, self.logits, self.value))))


class _Causal(torch.autograd.Function):
    """Causal: queries see their own chunk by the operator, chunks before it by moments."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> Tensor:
        inputs = _Inputs(*tensors)
        blocks = _own_blocks(call, inputs.query)
        chunks, last = call.layout.chunks(call.ranks.number), call.layout.count - 1
        own = [  # nobody asks for the last chunk's
            inputs.moments(slice(0, 0) if chunk == last else block.keys)
            for chunk, block in zip(chunks, blocks, strict=True)
        ]
        shape = (*inputs.query.shape[:3], inputs.value.size(3))
        merged = Merged(inputs.phi_q.new_zeros(shape))
        for block in blocks:  # all ranks at once; the scan goes from one to the next
            merged.add(block.queries, *inputs.attend(call, block))
        before = _scan(call, own)
        for block, state in zip(blocks, before, strict=True):
            if state is not None:
                rows = block.queries
                queries = inputs.phi_q[:, :, rows]
                merged.add(rows, *attention_from_moments(queries, *state, eps=call.options["eps"]))
        ctx.call, ctx.before, ctx.references = call, before, [state.reference for state in own]
        ctx.save_for_backward(*inputs, merged.output, merged.log_normalizer)
        return merged.output.to(inputs.query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, output, log_normalizer = ctx.saved_tensors
        inputs, call = _Inputs(*tensors), ctx.call
        wide = inputs.phi_q.dtype
        # what was made of one tensor's parts is rounded once
        sums = [
            None if x is None else torch.zeros_like(x, dtype=torch.promote_types(x.dtype, wide))
            for x in inputs
        ]
        totals: Any = _Inputs(*sums)  # type: ignore[arg-type]
        of_states = []
        for block, state in zip(_own_blocks(call, inputs.query), ctx.before, strict=True):
            results = (grad_output, output, log_normalizer)
            _add_of_own_chunk(call, block, inputs, results, ctx.needs_input_grad[1:7], totals)
            of_states.append(_add_of_queries(call, block, inputs, state, results, totals))
        after = _scan(call, of_states, reverse=True)
        for block, own, state in zip(
            _own_blocks(call, inputs.query), ctx.references, after, strict=True
        ):
            if state is not None:
                of_moments = state.scaled(own + state.reference)
                _add_of_keys(block.keys, inputs, of_moments, own, totals)
        gradients = [
            None if like is None else x.to(like.dtype)
            for x, like in zip(totals, inputs, strict=True)
        ]
        return (None, *gradients)


def _own_blocks(call: Call, query: Tensor) -> list[Block]:
    """The chunks of this rank, each with its own keys."""
    numbers = call.layout.chunks(call.ranks.number)
    length = query.size(2) // len(numbers)
    places = [slice(n * length, (n + 1) * length) for n in range(len(numbers))]
    return [
        Block(place, place, True, number * length, number * length)
        for place, number in zip(places, numbers, strict=True)
    ]


def _scan(call: Call, own: list[_State], *, reverse: bool = False) -> list[_State | None]:
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


def _add_of_own_chunk(
    call: Call,
    block: Block,
    inputs: _Inputs,
    results: tuple[Tensor, Tensor, Tensor],
    wanted: tuple[bool, ...],
    totals: _Inputs,
) -> None:
    """Adds what a chunk's queries and its own keys give; results are of all keys."""
    rows, wide = block.queries, inputs.phi_q.dtype
    grad_output, output, log_normalizer = (x[:, :, rows] for x in results)
    gradients = torch.ops.ikattn.implicit_kernel_attention_backward(
        grad_output,
        *(x[:, :, rows] for x in (inputs.query, inputs.key, inputs.value)),
        inputs.w1.to(wide),
        None if inputs.w2 is None else inputs.w2.to(wide),
        output.to(inputs.query.dtype),
        log_normalizer,
        **call.options_of(block, inputs.query.size(1), inputs.key_bias),
        wanted=[*wanted, False],
    )
    for name, part, want in zip(_Inputs._fields, gradients, wanted, strict=False):
        total: Tensor = getattr(totals, name)
        if want:
            whole = name in ("w1", "w2")
            (total if whole else total[:, :, rows]).add_(part)


def _add_of_queries(
    call: Call,
    block: Block,
    inputs: _Inputs,
    state: _State | None,
    results: tuple[Tensor, Tensor, Tensor],
    totals: _Inputs,
) -> _State:
    """Adds the gradient of a chunk's queries by moments; returns that of the moments."""
    rows = block.queries
    if state is None:  # the first chunk: of nothing
        like = inputs.moments(slice(0, 0))
        return _State(like.moments, torch.full_like(like.reference, -torch.inf))
    grad_output, output, log_normalizer = (x[:, :, rows] for x in results)
    of_queries, of_moments = torch.ops.ikattn.attention_from_moments_backward(
        grad_output.to(inputs.phi_q.dtype),
        inputs.phi_q[:, :, rows],
        *state,
        output,
        log_normalizer,
        call.options["eps"],
        [True, True],
    )
    totals.phi_q[:, :, rows] += of_queries
    # relative to moments, gradients have the inverse factor; without a key there is none
    reference = torch.where(state.reference == -torch.inf, -torch.inf, -state.reference)
    return _State(of_moments, reference)


def _add_of_keys(
    rows: slice, inputs: _Inputs, of_moments: Tensor, reference: Tensor, totals: _Inputs
) -> None:
    """Adds the gradients of a chunk's keys from that of their moments."""
    keys = (x[:, :, rows] for x in (inputs.phi_k, inputs.logits, inputs.value))
    gradients = torch.ops.ikattn.key_moments_backward(
        of_moments, *keys, reference, [True, True, True]
    )
    for total, part in zip((totals.phi_k, totals.logits, totals.value), gradients, strict=True):
        total[:, :, rows] += part
