"""One run of one layer's attention, from its call to the norms after it, checked at every step.

What is checked, on two rows of every tensor, or on all:

1. the weights and values we know of make the heads that the model computed;
2. these, through the out-projection we know of, make what the model computed;
3. that, or a multiple, and the residual add up to what the next norm or module was given;
4. the norm, as the linear map we take it for, makes what the model computed.

Sizes: B batch, L queries, S keys, H heads, d_v head size of value, D model size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ikattn._precision import widened
from ikattn.maps.contribution_maps import Contributions, NormStats
from ikattn.recorder.calls.attention_call import AttentionCall, joined, with_values_of
from ikattn.recorder.calls.heads import FollowedHeads, Gate
from ikattn.recorder.calls.projection import Projection, describe
from ikattn.recorder.plan.plan import Plan
from ikattn.recorder.plan.run_maps import Surroundings
from ikattn.recorder.sums.claims import Claim
from ikattn.recorder.sums.distances import (
    TOLERANCES,
    Distance,
    NearestRows,
    NormedRows,
    Numbers,
    distance,
    sum_tolerance,
)
from ikattn.recorder.sums.known_sums import (
    KnownSum,
    forget,
    known_sum,
    remember,
    sum_distance,
    takes_waiting,
)
from ikattn.recorder.sums.multipliers import Variant, multiplier_of
from ikattn.recorder.sums.tensors import (
    Seen,
    Sum,
    address_of,
    find_sum,
    has_rows_like,
    may_be_sum,
    order_of_rows,
    rows_of,
    same_rows,
    see,
)
from ikattn.recorder.sums.token_order import TokenOrder

__all__ = ["Run"]

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
    """A row of the heads that the model computed, merged, ``[1, 1, H d_v]``, and of which type."""

    row: ARow
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
        contexts: The heads that the model computed of each call, merged, ``[B, L, H d_v]``; None
            where they are not seen.
        residuals: What the output may be added to, the most likely first.
        given: What the attention module was called with.
        drops: Whether weights were dropped, so that heads are not those of the weights.
        stage: What is awaited.
    """

    plan: Plan
    name: str
    calls: list[AttentionCall]
    contexts: list[Tensor | None]
    residuals: list[Seen]
    given: Seen | None
    drops: bool = False
    stage: Stage = "heads"
    out_proj: nn.Module | None = None
    normed: list[Seen] = field(default_factory=list)  # inputs of norms that its module has called
    heads: Tensor | None = None  # what the out-projection was called with
    following: FollowedHeads | None = None  # of what the model makes of the heads
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
        """The norm whose run is awaited."""
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
        """That a step comes out."""
        return Claim(self.plan.name, step, distance, hint + self.plan.class_hint)

    # --- 1 and 2

    def join(self) -> None:
        """Makes one call of several, whose tokens do not see those of the others."""
        if len(self.calls) > 1:
            self.calls = [joined(self.plan.title, self.calls)]
            contexts = [context for context in self.contexts if context is not None]
            self.contexts = [torch.cat(contexts, 1)]

    def is_fed_to(self, x: Tensor) -> bool:
        """Whether a tensor is the heads that the model computed, merged, of all calls in turn."""
        contexts = [context for context in self.contexts if context is not None]
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
        self.contexts = [None if x is None else x.clone() for x in self.contexts]

    def is_fed_gated(self, x: Tensor, claims: list[Claim]) -> bool:
        """Whether a tensor is a multiple of the heads, number by number; keeps which, or why not.

        Args:
            x: What a module is called with.
            claims: Take that it is.
        """
        contexts = [context for context in self.contexts if context is not None]
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

    def note_heads(self) -> None:
        """Keeps a row of the heads, to be compared when maps have been made of their weights."""
        context = self.contexts[0]
        if self.drops or context is None or context.numel() == 0:
            return
        row = self.a_row()
        self.noted_heads = NotedHeads(row, widened(row.of(context[:1]).clone()), context.dtype)

    def noted_heads_claim(self) -> Claim | None:
        """That weights times values are the row that was kept; None where there was none."""
        if self.noted_heads is None:
            return None
        row, found, dtype = self.noted_heads
        self.noted_heads = None
        expected = self.attention.context_of_row(0, row.place)
        return self._heads_claim(found, expected, dtype, at_once=False)

    def heads_claim(self) -> Claim | None:
        """That weights times values are all heads; None where there is nothing to compare."""
        context, padding = self.contexts[0], self.attention.query_padding
        if self.drops or context is None or context.numel() == 0:
            return None
        expected = self.attention.context()
        if padding is not None:
            expected = expected.masked_fill(padding.unsqueeze(-1), 0)
        return self._heads_claim(widened(context), expected, context.dtype, at_once=True)

    def _heads_claim(
        self, found: Tensor, expected: Tensor, dtype: torch.dtype, *, at_once: bool
    ) -> Claim:
        # rows that see no key the model may make anything of
        found = found.to(expected.dtype)
        apart = distance(found, expected, dtype, zeros_count=False, at_once=at_once)
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
        return y.dtype if TOLERANCES.get(y.dtype, 1) > TOLERANCES.get(x.dtype, 1) else x.dtype

    # --- 3

    def begin_sum(self, y: Seen) -> None:
        self.variants = [Variant(y)]
        self.stage = "sum"

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
        if not self.variants:
            return
        y = self.variants[0].tensor
        if has_rows_like(out, y):
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
        return NearestRows(tolerance, True, x.rows, self.norm_output, tuple(self.others))

    def is_sum(
        self,
        x: Tensor,
        module: nn.Module,
        look: Callable[[Tensor], Seen],
        claims: list[Claim],
        *,
        is_input: bool,
    ) -> bool:
        """Whether a tensor is the sum of residual and output; keeps what it is a sum of.

        Args:
            x: What a module was called with, or has made.
            module: The module.
            look: Notes a tensor.
            claims: Take what is not looked at yet.
            is_input: Whether ``module`` was called with it; else other branches may be in the sum.
        """
        y = self.variants[0]
        if not may_be_sum(x, y.tensor):
            return False
        if not x.numel():  # every tensor adds up that is none of the summands
            summands = [seen.tensor for seen in self.residuals]
            summands += [variant.tensor for variant in self.variants]
            if any(x is summand for summand in summands):
                return False
        known = self._known(x, module, look, claims, is_input)
        if known is not None:
            found, is_as_it_was = known
        else:
            rows = [variant.rows for variant in self.variants]
            others = () if is_input else self.others
            is_unknown = self.plan.parts.block == "found" and self.order is None
            sum_ = find_sum(x, y.tensor, rows, self.residuals, others)
            if sum_ is None or (is_unknown and not sum_.is_alone):
                return False  # not alone: the first and last token are too small to tell
            if not x.numel():
                sum_ = sum_._replace(has_other=bool(others))
            found, is_as_it_was = sum_, sum_.residual.is_as_it_was
            added = self.variants[found.variant].tensor
            is_written_into = added.data_ptr() == x.data_ptr()
            in_every_row = is_as_it_was and not (found.has_other or is_written_into)
            if self.order is None:  # else its rows are compared when all of the sum is known
                order = order_of_rows(x, added, found, in_every_row=in_every_row)
                if order is None:
                    return False
                self.is_turned = (order == "turned") != self._projects_turned(added)
            self._remember(module, found, is_as_it_was, is_input)
        variant, scale = self.variants[found.variant], found.scale
        self.variant, self.is_alone = found.variant, found.is_alone
        if found.variant:
            chain = [each.by for each in self.variants[1 : found.variant + 1]]
            between = [by for by in chain if by is not None and not isinstance(by, nn.Dropout)]
            if between:
                scale = multiplier_of(self.variants[: found.variant + 1])
                if scale is not None and not self._adds_up_written_into(x, found, scale):
                    scale = None
            if len(between) == 1 and scale is None and "Norm" in type(between[0]).__name__:
                before = self.variants[chain.index(between[0])]
                self.output_norm = between[0], before.tensor, variant.tensor
            elif between and scale is None:
                named = ", ".join(type(by).__name__ for by in between)
                self.why_no_block = (
                    f"{named} stands between its out-projection and the residual sum, and is no "
                    "multiplication"
                )
        self.around.scale = scale
        self.has_other = found.has_other
        self.residual = found.residual
        residual = found.residual.tensor
        if not is_as_it_was and self.order is None:  # somebody has written into it since
            added = variant.tensor if found.variant else y.tensor
            residual = x - (added if found.variant or scale is None else added * scale)
        self.around.residual = residual
        return True

    def _known(
        self,
        x: Tensor,
        module: nn.Module,
        look: Callable[[Tensor], Seen],
        claims: list[Claim],
        is_input: bool,
    ) -> tuple[Sum, bool] | None:
        """The sum as it was found in a call before, and whether its residual is as it was.

        That it adds up this time, too, becomes a claim where the host would wait to see it.
        """
        if not self._may_be_known():
            return None
        layer = self.plan.module
        known = known_sum(layer, module, is_input)
        sizes = (len(self.residuals), len(self.variants))
        if known is None or (known.candidates, known.variants) != sizes:
            return None
        residual, y = self.residuals[known.candidate], self.variants[0].tensor
        if residual.rows.size(-1) != y.size(-1):
            return None
        added = self.variants[known.variant].rows
        seen = look(x)
        if not takes_waiting(x):
            total = (residual.rows.to(added.dtype) + added).to(y.dtype)
            is_same = torch.equal(total, seen.rows.to(y.dtype))
            return (Sum(residual, known.variant), residual.is_as_it_was) if is_same else None
        fault = partial(_forget, weakref.ref(layer))
        step = "its output and its residual, as they were found in a call before, are not their sum"
        apart = sum_distance(seen, y, residual, added)
        claims.append(Claim(self.plan.name, step, apart, self.plan.class_hint, fault))
        is_as_it_was = known.is_as_it_was
        if residual.version >= 0:
            is_as_it_was = residual.is_as_it_was
        elif is_as_it_was:  # an inference tensor, of which nothing but its numbers can tell
            step = "its residual, which did not change in a call before, has changed"
            now = torch.stack([rows_of(residual.tensor), residual.rows])
            apart = Numbers(0.0, True, torch.stack([now[0] - now[1], *now]).abs().amax(-1))
            claims.append(Claim(self.plan.name, step, apart, self.plan.class_hint, fault))
        return Sum(residual, known.variant), is_as_it_was

    def _adds_up_written_into(self, x: Tensor, found: Sum, scale: float | Tensor) -> bool:
        """Of a sum that was written into what is added: whether it is one in every row."""
        if self.variants[found.variant].seen.is_as_it_was:
            return True
        whole = Sum(found.residual, 0, scale)
        y, is_there = self.variants[0].tensor, found.residual.is_as_it_was
        return is_there and order_of_rows(x, y, whole, in_every_row=True) is not None

    def _may_be_known(self) -> bool:
        """Whether a sum is looked for where it was; in training dropout may hide it."""
        is_named = self.plan.parts.block != "found"
        is_empty = not self.variants[0].tensor.numel()
        return is_named and not self.plan.module.training and not is_empty

    def _projects_turned(self, y: Tensor) -> bool:
        """Whether the output is ``[L, B, D]``, as sizes tell; where they do not, it is not."""
        B, _, L, _ = self.attention.sizes
        return y.dim() == 3 and y.shape[:2] == (L, B) != (B, L)

    def _remember(self, module: nn.Module, found: Sum, is_as_it_was: bool, is_input: bool) -> None:
        """Keeps how a plain sum was found that can be no other."""
        is_plain = found.scale is None and not found.has_other and found.is_alone
        is_plain = is_plain and not self.is_turned
        if not is_plain or not self._may_be_known():
            return
        candidate = next(n for n, seen in enumerate(self.residuals) if seen is found.residual)
        remember(
            self.plan.module,
            KnownSum(
                weakref.ref(module),
                is_input,
                len(self.residuals),
                candidate,
                len(self.variants),
                found.variant,
                is_as_it_was,
            ),
        )

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
        found = self.residual.rows.nan_to_num(0.0)

        def is_residual(seen: Seen) -> bool:
            return seen.rows.shape == found.shape and torch.equal(seen.rows.nan_to_num(0.0), found)

        return is_residual(self.given) and not any(map(is_residual, self.normed))

    # --- 4

    def norm_claim(self, norm: nn.Module, stats: NormStats, x: Seen, out: Seen) -> Claim:
        """That a norm acts as ``stats`` say."""
        bias = getattr(norm, "bias", None)
        apart = NormedRows(
            TOLERANCES.get(out.tensor.dtype, 1e-1),
            True,
            given=x.rows,
            made=out.rows,
            scale=rows_of(stats.scale.unsqueeze(-1)),
            # copies: sharded or offloaded parameters may be gone when they are looked at
            weight=widened(stats.weight.detach().clone()),
            bias=widened(bias.detach().clone()) if isinstance(bias, Tensor) else None,
            centered=stats.centered,
        )
        return self.claim(f"the norm, a {describe(norm)}, makes something else", apart)


def _forget(layer: weakref.ref[nn.Module]) -> None:
    module = layer()
    if module is not None:
        forget(module)
