"""In which order tokens are around an ``nn.MultiheadAttention``, told by all of their rows.

It makes ``[B, L, D]``, ``[L, B, D]`` or ``[L, D]``, and the layer around it may turn or reshape
that. Neither the first and last row nor, with as many items as tokens, the sizes tell them apart.

Sizes: B batch, L queries, D model size; P, Q of an output, [B, L] or [L, B]; N = P Q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ikattn._precision import widened
from ikattn.maps.contribution_maps import NormStats
from ikattn.recorder.sums.finding import are_alike
from ikattn.recorder.sums.tensors import Seen, same_numbers, see

_SINGLE = torch.finfo(torch.float32).eps
MOST_OTHERS = 8  # outputs of modules that are kept to be compared in every row


class Added(NamedTuple):
    """Operation of a block on an attention's output before the residual sum.

    Attributes:
        scale: What it is multiplied with, a number or ``[D]``; None: nothing.
        is_rough: Whether the scale is as accurate as the sum it was found by.
        kept: What dropout has multiplied numbers with that it kept; None: nothing was dropped.
        norm: What it goes through, and how that acted on ``[P, Q, D]``; None: nothing.
    """

    scale: float | Tensor | None = None
    is_rough: bool = False
    kept: float | None = None
    norm: tuple[nn.Module, NormStats] | None = None

    @property
    def is_plain(self) -> bool:
        return self.scale is None and self.kept is None and self.norm is None


@dataclass(eq=False)
class TokenOrder:
    """The order of tokens in a sum with the output of ``nn.MultiheadAttention``.

    Attributes:
        output: What the module has made.
        batch_first: Whether its first axis is that of items.
        inputs: Query, key and value.
        norms: What has run before it, with what it was called with.
        others: What other modules have made since.
        shape: Of the sum; None: it is not proven yet.
        is_turned: Whether the sum's rows are those of the output with P and Q exchanged.
        is_normed: Whether the module was given what a norm has made of the residual.
        first_half: What the norm after it has made, in the order of the sum.
        sums: Of the output's rows, where it counts no versions.
    """

    output: Seen
    batch_first: bool
    inputs: list[Seen]
    norms: list[tuple[nn.Module, Seen]]
    others: list[Tensor] = field(default_factory=list)
    shape: torch.Size | None = None
    is_turned: bool = False
    is_normed: bool = False
    first_half: Tensor | None = None
    sums: Tensor | None = None

    @staticmethod
    def of(
        output: Tensor,
        batch_first: bool,
        inputs: Sequence[Tensor],
        norms: Sequence[tuple[nn.Module, Seen]],
    ) -> TokenOrder:
        """That of an output that has just been made, of inputs that are not empty."""
        sums = output.detach().sum(-1) if output.is_inference() else None
        seen = [see(x) for x in inputs]
        return TokenOrder(see(output), batch_first, seen, list(norms), sums=sums)

    @property
    def three_axes(self) -> Tensor:
        """The output, ``[P, Q, D]``."""
        return self._on_three_axes(self.output.tensor)

    def _on_three_axes(self, x: Tensor) -> Tensor:
        return x if x.dim() == 3 else x.unsqueeze(0 if self.batch_first else 1)

    @property
    def read(self) -> list[Tensor]:
        """Inputs that have the queries' sizes and are as they were, ``[B, L, D]`` each."""
        there = (self._on_three_axes(seen.tensor) for seen in self.inputs if seen.is_as_it_was)
        return [self.items_first(x) for x in there if x.shape == self.three_axes.shape]

    @property
    def is_as_it_was(self) -> bool:
        """Whether nothing has been written into the output since."""
        if self.sums is None:
            return self.output.is_as_it_was
        return same_numbers(self.output.tensor.sum(-1), self.sums)

    def items_first(self, x: Tensor) -> Tensor:
        """``[P, Q, ..]`` as ``[B, L, ..]``."""
        return x if self.batch_first else x.transpose(0, 1)

    def as_batch(self, x: Tensor) -> Tensor:
        """A tensor in the order of the sum, or a residual that it was added to, ``[B, L, D]``."""
        assert self.shape is not None
        P, Q, D = self.three_axes.shape
        if x.numel() != P * Q * D:
            x = x.expand(self.shape)
        x = x.reshape(Q, P, D).transpose(0, 1) if self.is_turned else x.reshape(P, Q, D)
        return self.items_first(x)

    def note(self, out: Tensor) -> None:
        is_one = _is_plain(out) and out.device == self.output.tensor.device
        if is_one and len(self.others) < MOST_OTHERS:
            self.others.append(out)

    @torch.no_grad()
    def why_no_sum(self, x: Tensor, residual: Tensor, added: Added, *, has_other: bool) -> str:
        """Why ``x`` is not the residual plus what was made of the output, in every row.

        "" where it is, with one of the others if ``has_other``; its order is then known.
        """
        y = self.output.tensor
        for each in (x, residual, y):
            if not _is_plain(each):
                return f"its sum is of a {type(each).__name__}, whose rows are not compared"
        if not self.is_as_it_was:
            return "its output was written into before it was added to the residual"
        if residual.numel() != x.numel():
            try:
                residual = residual.expand(x.shape)
            except RuntimeError:
                return "its residual has other sizes than the sum"
        D = y.size(-1)
        if isinstance(added.scale, Tensor) and are_alike(_rows(y, D), y.dtype):
            return "its rows are too much alike to tell what they were multiplied with"
        total, before = _rows(x, D), _rows(residual, D)
        made = _made(widened(self.three_axes.detach()), added)
        sums = _Sums(total - before, total.abs() + before.abs(), x.dtype, y.dtype, added)
        others = [_rows(other, D) for other in self.others] if has_other else [None]
        fitting = {
            is_turned
            for is_turned in (False, True)
            if any(sums.are_of(_turned(made, is_turned), other) for other in others)
        }
        if not fitting:
            return "its output and its residual, or any multiple, do not add up in every row"
        order = _order(made, x, fitting)
        if order is None:
            return "neither numbers nor sizes tell items from tokens"
        self.shape, self.is_turned = x.shape, order
        return ""

    def before(self, x: Tensor, added: Added, *, is_turned: bool) -> Tensor:
        """Returns ``x`` before the output was added to it, if rows are in that order."""
        made = _made(widened(self.three_axes), added)
        return x - _turned(made, is_turned).reshape(x.shape)

    @torch.no_grad()
    def second_half(self, x: Tensor, out: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns input and output of a second norm, in the order of the sum.

        None where the first is not what the norm before made plus the output of a module, in every
        row.
        """
        first, D = self.first_half, x.size(-1)
        if first is None or not (_is_plain(x) and _is_plain(out) and out.shape == x.shape):
            return None
        if (x.numel(), D, x.device) != (first.numel(), first.size(-1), first.device):
            return None
        assert self.shape is not None
        P, Q, _ = self.three_axes.shape
        P, Q = (Q, P) if self.is_turned else (P, Q)
        before = widened(first.detach()).reshape(P, Q, D)
        total = _rows(x, D)
        others = [_rows(other, D) for other in self.others]
        fitting = set()
        for is_turned in (False, True):
            own = _turned(before, is_turned)
            sums = _Sums(total - own, total.abs() + own.abs(), x.dtype, x.dtype, Added())
            if any(sums.are_of(other, None) for other in others):
                fitting.add(is_turned)
        order = _order(before, x, fitting)
        if order is None:
            return None
        if not order:
            return x, out
        given, made = (each.reshape(Q, P, D).transpose(0, 1) for each in (x, out))
        return given, made


class _Sums(NamedTuple):
    """Sums ``[N, D]`` less their residuals, to be told apart from others.

    Attributes:
        rest, size: The sums less the residuals, and numbers in whose rounding that was formed.
        dtype, dtype_of_output: In which the sums were formed, and what was added.
        added: What was made of the output.
    """

    rest: Tensor
    size: Tensor
    dtype: torch.dtype
    dtype_of_output: torch.dtype
    added: Added

    def are_of(self, made: Tensor, other: Tensor | None) -> bool:
        """Whether they are ``made`` ``[N, D]`` and one more; those of NaN are compared with none.

        Dropout has left 0 of some numbers.
        """
        rest, size, added = self.rest, self.size, self.added
        if other is not None:
            rest, size = rest - other, size + other.abs()
        eps, own = torch.finfo(self.dtype).eps, torch.finfo(self.dtype_of_output).eps
        allowed = eps * (size + made.abs())
        if not added.is_plain:  # rounded to its type, and made of sums in float32 at least
            of_row = 1e-5 if added.norm is not None else 16 * min(own, _SINGLE)
            allowed = allowed + 4 * own * made.abs() + of_row * made.abs().amax(-1, keepdim=True)
        if added.is_rough:
            allowed = allowed + 16 * eps * size.nan_to_num(0.0).amax()
        is_off = (rest - made).abs() > allowed
        if added.kept is not None:
            is_off &= rest.abs() > eps * size
        return not bool(is_off.any())


def _is_plain(x: Tensor) -> bool:
    is_known = type(x) in (Tensor, nn.Parameter)
    return is_known and x.layout == torch.strided and not x.is_nested


def _rows(x: Tensor, D: int) -> Tensor:
    return widened(x.detach()).reshape(-1, D)


def _turned(x: Tensor, is_turned: bool) -> Tensor:
    """Rows ``[N, D]`` of ``[P, Q, D]``, or of the same with P and Q exchanged."""
    return (x.transpose(0, 1) if is_turned else x).reshape(-1, x.size(-1))


def _order(made: Tensor, x: Tensor, fitting: set[bool]) -> bool | None:
    """Whether ``x`` has P and Q exchanged, of orders that fit; None: it is not known."""
    P, Q, _ = made.shape
    if len(fitting) == 1 or 1 in (P, Q):
        return min(fitting) if fitting else None
    if not fitting or P == Q or x.dim() != 3 or x.shape[:2] not in ((P, Q), (Q, P)):
        return None
    return x.size(0) == Q


def _made(y: Tensor, added: Added) -> Tensor:
    """Applies a block's operation to an output ``[P, Q, D]``."""
    if added.norm is not None:
        return normed(y, *added.norm)
    if added.scale is not None:
        return y * added.scale
    return y if added.kept is None else y * added.kept


def normed(x: Tensor, norm: nn.Module, stats: NormStats) -> Tensor:
    """Applies a norm to ``[.., D]`` as ``stats`` have it."""
    x = x - x.mean(-1, keepdim=True) if stats.centered else x
    x = x * stats.weight.detach() / stats.scale.detach().unsqueeze(-1)
    bias = getattr(norm, "bias", None)
    return x + widened(bias.detach()) if isinstance(bias, Tensor) else x
