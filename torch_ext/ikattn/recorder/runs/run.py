"""One run of one layer's attention, from its call to the norms after it, checked at every step.

What is checked, on two rows of every tensor, or on all:

1. the weights and values we know of make the heads that the model computed;
2. these, through the out-projection we know of, make what the model computed;
3. that, or a multiple, and the residual add up to what the next norm or module was given;
4. the norm, as the linear map we take it for, makes what the model computed.

Sizes: B batch, L queries, S keys, H heads, d_v head size of value, D model size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ikattn._precision import widened
from ikattn.maps.contribution_maps import Contributions, NormStats
from ikattn.recorder.calls.attention_call import AttentionCall, joined, with_values_of
from ikattn.recorder.calls.heads import FollowedHeads, Gate
from ikattn.recorder.calls.projection import Projection, describe
from ikattn.recorder.calls.routed_heads import RoutedHeads
from ikattn.recorder.plan.plan import Plan
from ikattn.recorder.plan.run_maps import Surroundings
from ikattn.recorder.sums.claims import (
    Claim,
    Distance,
    centered_rows,
    distance,
    nearest_rows,
    normed_rows,
    sum_tolerance,
    tolerance_of,
)
from ikattn.recorder.sums.finding import Variant
from ikattn.recorder.sums.tensors import (
    Seen,
    address_of,
    has_rows_like,
    rows_of,
    same_numbers,
    same_rows,
    see,
)
from ikattn.recorder.sums.token_order import TokenOrder

Stage: TypeAlias = Literal[
    "heads", "projection", "sum", "norm", "second norm", "reading norm", "end of block", "done"
]

_HEADS = "weights times values are not the heads it computed"
_HEADS_HINT = (
    ". The attention differs from softmax(query . key) as it was told: something changed logits, "
    "weights or values in between"
)

# Modules one after the other that may stand between an attention's output and the sum.
MOST_VARIANTS = 8


class ARow(NamedTuple):
    """A query of the first item."""

    place: slice | Tensor  # of queries: of one, or its number [1]
    is_missing: Tensor | None  # whether all of them are padding; None: none is

    def of(self, x: Tensor) -> Tensor:
        """That row of ``[1, L, D]``; NaN, which is compared with nothing, where it is missing."""
        if not isinstance(self.place, Tensor):
            return x[:, self.place]
        row = x.index_select(1, self.place)
        return row if self.is_missing is None else row.masked_fill(self.is_missing, torch.nan)


class NotedHeads(NamedTuple):
    """The heads that the model computed, merged, or a row ``[1, 1, H d_v]``, and of which type."""

    row: ARow | None  # None: all of them
    found: Tensor
    dtype: torch.dtype


@dataclass(eq=False)
class Run:
    """A layer's attention that has run, while what comes after it is awaited.

    Attributes:
        plan: Of the layer.
        name: Of the run.
        calls: What the attention was given: more than one where a module computes its tokens in
            parts, such as images.
        contexts: The heads that the model computed of each call, merged, ``[B, L, H d_v]``; none
            where they are not seen.
        residuals: What the output may be added to, the most likely first.
        given: What the attention module was called with.
        drops: Whether weights were dropped, so that heads are not those of the weights.
        stage: What is awaited.
    """

    plan: Plan
    name: str
    calls: list[AttentionCall]
    contexts: list[Tensor]
    residuals: list[Seen]
    given: Seen | None
    drops: bool = False
    stage: Stage = "heads"
    out_proj: nn.Module | None = None
    normed: list[Seen] = field(default_factory=list)  # inputs of norms that its module has called
    heads: Tensor | None = None  # what the out-projection was called with
    following: FollowedHeads | None = None  # of what the model makes of the heads
    routed: RoutedHeads | None = None  # whose projection its module applies itself
    gate: Gate | None = None  # what that was, where it is a multiple of the heads
    why_no_projection: str = ""
    noted_heads: NotedHeads | None = None
    projection: Projection | None = None
    scales: Projection | None = None  # what multiplies each number of the heads before it
    is_probed: bool = False  # the projection was learnt by applying the module
    variants: list[Variant] = field(default_factory=list)
    others: list[Tensor] = field(default_factory=list)  # rows of other modules' outputs
    last_other: Seen | None = None  # the last of these
    residual: Seen | None = None
    norm: nn.Module | None = None
    norm_input: Tensor | None = None
    total: Seen | None = None  # the sum, as it was when it was found
    norm_output: Tensor | None = None  # rows of the first norm's output
    last_norm: tuple[nn.Module, Tensor, Tensor] | None = None  # that ran, its input and output
    around: Surroundings = field(default_factory=Surroundings)
    maps: Contributions | None = None  # made, and to be handed over when all has been checked
    output_norm: tuple[nn.Module, Tensor, Tensor] | None = None  # with its input and output
    why_no_block: str = ""
    is_turned: bool = False  # its sum is [L, B, D]
    is_found: bool = False  # its block was found by what flows
    has_other: bool = False  # its sum has another module's output in it, as in parallel blocks
    variant: int = 0  # which of the variants is in its sum
    is_alone: bool = True  # by two rows no other residual would do
    order: TokenOrder | None = None  # around nn.MultiheadAttention whose block is to be found

    @property
    def attention(self) -> AttentionCall:
        return self.calls[0]

    @property
    def awaited_norm(self) -> nn.Module | None:
        if self.stage == "norm":
            return self.norm
        is_second = self.stage in ("second norm", "reading norm")
        return self.plan.parts.second_norm if is_second else None

    @property
    def awaited(self) -> str:
        """The norm, or the sum, that is awaited, for errors."""
        norm = self.plan.parts.norm if self.stage == "sum" else self.awaited_norm
        if norm is None:
            return "the sum of its residual and its output"
        return f"the norm after it, a {describe(norm)},"

    def claim(self, step: str, distance: Distance, hint: str = "") -> Claim:
        return Claim(self.plan.name, step, distance, hint + self.plan.class_hint)

    # --- 1 and 2

    def join(self) -> None:
        """Makes one call of several, whose tokens do not see those of the others."""
        if len(self.calls) > 1:
            self.calls = [joined(self.plan.title, self.calls)]
            self.contexts = [torch.cat(self.contexts, 1)]

    def is_fed_to(self, x: Tensor) -> bool:
        """Whether a tensor is the heads that the model computed, merged, of all calls in turn."""
        contexts = self.contexts
        if not contexts or x.numel() != sum(context.numel() for context in contexts):
            return False
        if x.size(-1) != contexts[0].size(-1):
            return False
        is_same = len(contexts) == 1 and x.data_ptr() == contexts[0].data_ptr()
        if x.numel() == 0 or (is_same and x.is_contiguous() and contexts[0].is_contiguous()):
            return True
        ends = rows_of(contexts[0])[0], rows_of(contexts[-1])[1]
        return same_rows(x, torch.stack(ends))

    def keep_heads(self) -> None:
        """Copies the heads, before the model writes into them."""
        self.contexts = [x.clone() for x in self.contexts]

    def is_fed_gated(self, x: Tensor, claims: list[Claim]) -> bool:
        """Whether a tensor is a multiple of the heads, number by number; keeps which, or why not.

        ``claims`` take that it is.
        """
        contexts = self.contexts
        if self.following is None or not contexts:
            return False
        width = contexts[0].size(-1)
        rows = contexts[0].numel() // max(1, width)
        gate = self.following.gate(x, (len(contexts), rows, width))
        if gate is None or isinstance(gate, str):
            self.why_no_projection = gate or self.why_no_projection
            return False
        of_calls = torch.cat([context.reshape(rows, width) for context in contexts], -1)
        made = rows_of(of_calls).to(gate.factors.dtype) * gate.factors[[0, -1]]
        expected = made.new_zeros(2, x.size(-1)).index_add_(1, gate.columns, made)
        apart = distance(rows_of(x).to(expected.dtype), expected, x.dtype)
        claims.append(self.claim("its heads times their gate are not what is projected", apart))
        if len(contexts) > 1:
            self.calls = [with_values_of(self.plan.title, self.calls)]
            gate = gate.of_one_call(len(contexts), self.attention.sizes[1])
            parts = [context.unflatten(-1, (self.attention.sizes[1], -1)) for context in contexts]
            self.contexts = [torch.cat(parts, -1).flatten(-2)]
        B, H, L, _ = self.attention.sizes
        factors = gate.factors.view(B, L, H, -1).transpose(1, 2)
        is_by_head = bool((factors == factors[..., :1]).all())
        self.attention.gate = factors[..., :1] if is_by_head else factors
        self.gate = gate
        return True

    def note_heads(self, every_row: bool) -> None:
        """Keeps the heads, or a row, to be compared when maps have been made of their weights."""
        context = self.contexts[0]
        if self.drops or context.numel() == 0:
            return
        row = None if every_row else self.a_row()
        found = context if row is None else row.of(context[:1])
        self.noted_heads = NotedHeads(row, widened(found.clone()), context.dtype)

    def noted_heads_claim(self) -> Claim | None:
        """That weights times values are the heads that were kept; None where there were none."""
        if self.noted_heads is None:
            return None
        (row, found, dtype), self.noted_heads = self.noted_heads, None
        padding = self.attention.query_padding
        if row is not None:
            expected = self.attention.context_of_row(0, row.place)
        else:
            expected = self.attention.context()
            if padding is not None:
                expected = expected.masked_fill(padding.unsqueeze(-1), 0)
        # rows that see no key the model may make anything of
        found, every_row = found.to(expected.dtype), row is None
        apart = distance(found, expected, dtype, zeros_count=False, at_once=every_row)
        return self.claim(_HEADS, apart, _HEADS_HINT)

    def a_row(self) -> ARow:
        """The last query of the first item that is no padding; the host need not know which."""
        L, padding = self.attention.sizes[2], self.attention.query_padding
        if padding is None:
            return ARow(slice(L - 1, L), None)
        there = ~padding[0]
        places = torch.arange(L, device=padding.device)
        return ARow((places * there).argmax().unsqueeze(0), there.any().logical_not())

    def projected(self, projection: Projection, x: Tensor, y: Tensor, every_row: bool) -> Distance:
        """How far an out-projection of heads ``x`` is from ``y``."""
        weight, bias = projection
        weight = widened(weight.detach())
        if every_row:
            rows, found = widened(x.detach()), widened(y.detach())
        else:
            rows, found = rows_of(x), rows_of(y)
        expected = rows.to(weight.dtype) @ weight.mT
        if bias is not None:
            expected = expected + widened(bias.detach())
        dtype = self.type_of_projection(x, y)
        return distance(found.to(expected.dtype), expected, dtype, at_once=every_row)

    def type_of_projection(self, x: Tensor, y: Tensor) -> torch.dtype:
        """The type whose rounding an out-projection ``y`` of heads ``x`` may have."""
        if self.is_probed:  # it may round its inputs to 8 bits, or its weights to fewer
            return torch.float16
        return max(x.dtype, y.dtype, key=tolerance_of)

    # --- 3

    def follow(self, module: nn.Module, x: Tensor, out: Tensor) -> None:
        """Notes what a module made of a tensor: of the output so far, or of something else."""
        last = self.variants[-1].tensor
        if not has_rows_like(out, last):
            return
        here = address_of(x)
        if here == address_of(last) and x.numel() == last.numel():
            if here != address_of(out) and len(self.variants) < MOST_VARIANTS:
                self.variants.append(Variant(see(out), module, x))
        else:
            self._note(out)

    def note_other(self, out: Tensor) -> None:
        """Notes the output of a module that may be the feed-forward part's."""
        if self.variants and has_rows_like(out, self.variants[0].tensor):
            self._note(out)

    def _note(self, out: Tensor) -> None:
        last = self.last_other if self.others else None  # of these, not of a stage before
        if last is not None and last.tensor is out and last.version >= 0 and last.is_as_it_was:
            return  # a module has handed on what another made
        if len(self.others) == 32:
            return
        self.last_other = see(out)
        self.others.append(self.last_other.rows)
        if self.order is not None:
            self.order.note(out)

    def second_half(self, x: Seen) -> Distance | None:
        """How far ``x`` is from the first norm's output plus a module's; None: nothing is known."""
        if self.norm_output is None or not self.variants:
            return None
        tolerance = sum_tolerance(x.tensor.dtype)
        others = torch.stack(self.others) if self.others else x.rows.new_empty(0, *x.rows.shape)
        return Distance(tolerance, nearest_rows, (x.rows, self.norm_output, others))

    def is_post_norm(self) -> bool:
        """Whether the residual is what the attention was called with, and calls no norm with."""
        if self.given is None or self.residual is None:
            return False
        x = self.given.tensor
        if not x.numel():  # a module around it was called with it, and no norm
            is_from_around = sum(seen.tensor is x for seen in self.residuals) > 1
            return is_from_around and not any(seen.tensor is x for seen in self.normed)
        if not bool(self.given.rows.any()):
            return False  # zeros are everybody's
        found = self.residual.rows
        is_normed = any(same_numbers(seen.rows, found) for seen in self.normed)
        return same_numbers(self.given.rows, found) and not is_normed

    # --- 4

    def norm_claim(self, norm: nn.Module, stats: NormStats, x: Seen, out: Seen) -> Claim:
        """That a norm acts as ``stats`` say."""
        bias = getattr(norm, "bias", None)
        parameters = [stats.weight, bias] if isinstance(bias, Tensor) else [stats.weight]
        # copies: sharded or offloaded parameters may be gone when they are looked at
        own = (widened(w.detach().clone()) for w in parameters)
        rows = (x.rows, out.rows, rows_of(stats.scale.unsqueeze(-1)), *own)
        compare = centered_rows if stats.centered else normed_rows
        apart = Distance(tolerance_of(out.tensor.dtype), compare, rows)
        return self.claim(f"the norm, a {describe(norm)}, makes something else", apart)
