"""Attention over ranks in quadratic time: keys and values go round a ring of all ranks.

Every rank keeps its queries. Outputs of the parts are merged by their normalisers; the backward
pass takes the whole output and normaliser for each part, so that the parts' gradients add up. Sizes
as in ``ikattn.ops``; L queries and S keys are those of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ikattn._precision import widened
from ikattn.ops.dropout import place_dropout_seed
from ikattn.parallel._layout import Block, Layout
from ikattn.parallel._ranks import Exchange, Ranks


@dataclass
class Call:
    """A call of attention over ranks, but for its tensors with gradients."""

    ranks: Ranks  # who share the sequence
    layout: Layout
    is_causal: bool  # a query sees keys up to its own place alone
    options: dict[str, Any]  # of the operator: p, eps, magnitude_scale, enable_gqa, dropout_p
    dropout_seed: Tensor | None = None  # int64 [2], that of the whole call; None without dropout
    threads: int = 1  # of the rank that has most of them

    def blocks(self, source: int, queries: int, keys: int) -> list[Block]:
        """Returns the blocks that this rank computes with the keys of rank ``source``."""
        own, is_causal, apart = self.ranks.number, self.is_causal, self.dropout_seed is not None
        return self.layout.blocks(own, source, queries, keys, is_causal=is_causal, apart=apart)

    def options_of(self, block: Block, heads: int, key_bias: list[Tensor]) -> dict[str, Any]:
        """Returns the operator's options for a block, with the bias of its rank, if any."""
        options = dict(self.options, is_causal=block.is_causal)
        for bias in key_bias:
            options["key_bias"] = bias[:, :, block.keys]
        if self.dropout_seed is not None:
            options["dropout_seed"] = place_dropout_seed(
                self.dropout_seed, heads=heads, query=block.first_query, key=block.first_key
            )
        return options


class Ring(torch.autograd.Function):
    """Computes the output [B, H, L, d_v] of this rank's queries over the keys of all ranks.

    Frequencies [H or G, d, M] are those of all ranks, all else is this rank's. Gradients of
    frequencies are this rank's part: those of all ranks add up, as with every parameter of a model
    that gets a part of the tokens.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        w1: Tensor,
        w2: Tensor | None,
        key_bias: Tensor | None,
    ) -> Tensor:
        B, H, L, _ = query.shape
        dtype = torch.promote_types(query.dtype, torch.float32)
        # over the keys that came so far
        output = query.new_zeros((B, H, L, value.size(3)), dtype=dtype)
        log_normalizer = query.new_full((B, H, L), -torch.inf, dtype=torch.float64)
        for source, (k, v, *bias) in _sources(call.ranks, key, value, key_bias):
            for block in call.blocks(source, L, key.size(2)):
                rows, columns = block.queries, block.keys
                part, of_part = torch.ops.ikattn.implicit_kernel_attention(
                    *(query[:, :, rows], k[:, :, columns], v[:, :, columns], w1, w2),
                    **call.options_of(block, H, bias),
                )
                both = torch.logaddexp(log_normalizer[:, :, rows], of_part)
                share = (of_part - both).exp().nan_to_num(0.0)  # 0 where neither has a key
                output[:, :, rows].lerp_(part.to(dtype), share.unsqueeze(-1).to(dtype))
                log_normalizer[:, :, rows] = both
        output = output.to(query.dtype)
        ctx.call = call
        ctx.save_for_backward(query, key, value, w1, w2, key_bias, output, log_normalizer)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        call, wanted = ctx.call, ctx.needs_input_grad[1:]
        *likes, output, log_normalizer = ctx.saved_tensors
        query, key, value, w1, w2, key_bias = likes
        dtype, (H, L) = torch.promote_types(query.dtype, torch.float32), query.shape[1:3]
        w1, w2 = widened(w1), None if w2 is None else widened(w2)
        # a gradient of one tensor's parts is rounded once
        of_query = torch.zeros_like(query, dtype=dtype)
        of_w1, of_w2 = torch.zeros_like(w1), torch.zeros_like(w1)
        travelling: Exchange | None = None
        of_held: list[Tensor] = []
        for source, held in _sources(call.ranks, key, value, key_bias):
            k, v, *bias = held
            of_held = [
                torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format)
                for x in held
            ]
            for block in call.blocks(source, L, key.size(2)):
                rows, columns = block.queries, block.keys
                found = torch.ops.ikattn.implicit_kernel_attention_backward(
                    *(grad_output[:, :, rows], query[:, :, rows]),
                    *(k[:, :, columns], v[:, :, columns], w1, w2),
                    *(output[:, :, rows], log_normalizer[:, :, rows]),
                    **call.options_of(block, H, bias),
                    wanted=[*wanted, False],
                )
                of_key, of_value, *of_bias = (x[:, :, columns] for x in of_held)
                into = (of_query[:, :, rows], of_key, of_value, of_w1, of_w2, *of_bias)
                for total, part, want in zip(into, found, wanted, strict=False):
                    if want:
                        total += part
            if travelling is not None:  # gradients that the ranks before found for these keys
                for own, other in zip(of_held, travelling.wait(), strict=True):
                    own += other
            travelling = call.ranks.send_on(of_held, 8) if call.ranks.size > 1 else None
        if travelling is not None:
            of_held = travelling.wait()
        results = [of_query, *of_held[:2], of_w1, of_w2, *of_held[2:]]
        results += [of_query] * (len(likes) - len(results))  # for a bias that is not there
        gradients = (
            x.to(like.dtype) if want and like is not None else None
            for x, like, want in zip(results, likes, wanted, strict=True)
        )
        return (None, *gradients)


def _sources(ranks: Ranks, *tensors: Tensor | None) -> Iterator[tuple[int, list[Tensor]]]:
    """Yields, rank after rank, whose tensors are here, and these; the next are on their way."""
    held = [x for x in tensors if x is not None]
    for step in range(ranks.size):
        last = step == ranks.size - 1
        coming: Exchange | None = None if last else ranks.send_on(held)
        yield (ranks.number - step) % ranks.size, held
        if coming is not None:
            held = coming.wait()
