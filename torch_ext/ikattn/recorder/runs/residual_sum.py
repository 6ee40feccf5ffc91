"""The sum of a residual and an attention's output: which of a block's tensors it is."""

from __future__ import annotations

import weakref
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ikattn.recorder.runs.call import Call
from ikattn.recorder.runs.run import Run
from ikattn.recorder.runs.torch_blocks import why_no_sum
from ikattn.recorder.sums.claims import Claim, Distance, rows_apart, sum_of_rows, sum_tolerance
from ikattn.recorder.sums.finding import Sum, find_sum, multiplier_of, order_of_rows
from ikattn.recorder.sums.tensors import may_be_sum, rows_of, takes_waiting


class _KnownSum(NamedTuple):
    """Where the sum of a layer was found in a call before, and of what.

    Finding it takes time, and on a GPU the host must wait. What is known is used where the same
    modules run, and held to the numbers when the call has ended.

    Attributes:
        module: Whose input it was, or whose output.
        place: Whether it was the input, and how many residuals and variants there were.
        candidate, variant: Those that it was of.
        is_as_it_was: Whether nothing had been written into the residual.
    """

    module: weakref.ref[nn.Module]
    place: tuple[bool, int, int]
    candidate: int
    variant: int
    is_as_it_was: bool


_known_sums: weakref.WeakKeyDictionary[nn.Module, _KnownSum] = weakref.WeakKeyDictionary()


def is_sum(run: Run, x: Tensor, module: nn.Module, call: Call, *, is_input: bool) -> bool:
    """Tells whether a tensor is the sum of residual and output; keeps what it is a sum of.

    ``module`` was called with it, or has made it: then other branches may be in the sum. Two rows
    tell; around torch's attention, whose tokens may stand in another order, all rows do.
    """
    if run.order is None:
        return _is_sum(run, x, module, call, is_input=is_input)
    before, run.why_no_block, run.output_norm = run.why_no_block, "", None
    if not _is_sum(run, x, module, call, is_input=is_input):
        run.why_no_block = before
        return False
    if run.why_no_block:
        return True
    why = why_no_sum(run, x)
    run.why_no_block = why and (before or why)  # the first is that of the likeliest sum
    return not why


def _is_sum(run: Run, x: Tensor, module: nn.Module, call: Call, *, is_input: bool) -> bool:
    """Tells whether two rows of a tensor are those of the sum."""
    y = run.variants[0]
    if not may_be_sum(x, y.tensor):
        return False
    if not x.numel():  # every tensor adds up that is none of the summands
        summands = [seen.tensor for seen in run.residuals]
        summands += [variant.tensor for variant in run.variants]
        if any(x is summand for summand in summands):
            return False
    known = _known(run, x, module, call, is_input)
    if known is not None:
        found, is_as_it_was = known
    else:
        rows = [variant.rows for variant in run.variants]
        others = () if is_input else run.others
        is_unknown = run.plan.parts.block == "found" and run.order is None
        sum_ = find_sum(x, y.tensor, rows, run.residuals, others)
        if sum_ is None or (is_unknown and not sum_.is_alone):
            return False  # not alone: the first and last token are too small to tell
        if not x.numel():
            sum_ = sum_._replace(has_other=bool(others))
        found, is_as_it_was = sum_, sum_.residual.is_as_it_was
        added = run.variants[found.variant].tensor
        is_written_into = added.data_ptr() == x.data_ptr()
        in_every_row = is_as_it_was and not (found.has_other or is_written_into)
        if run.order is None:  # else its rows are compared when all of the sum is known
            order = order_of_rows(x, added, found, in_every_row=in_every_row)
            if order is None:
                return False
            B, _, L, _ = run.attention.sizes  # where these do not tell, the output is [B, L, D]
            projects_turned = added.dim() == 3 and added.shape[:2] == (L, B) != (B, L)
            run.is_turned = (order == "turned") != projects_turned
        _remember(run, module, found, is_as_it_was, is_input)
    variant, scale = run.variants[found.variant], found.scale
    run.variant, run.is_alone = found.variant, found.is_alone
    if found.variant:
        chain = [each.by for each in run.variants[1 : found.variant + 1]]
        between = [by for by in chain if by is not None and not isinstance(by, nn.Dropout)]
        if between:
            scale = multiplier_of(run.variants[: found.variant + 1])
            if scale is not None and not _adds_up_written_into(run, x, found, scale):
                scale = None
        if len(between) == 1 and scale is None and "Norm" in type(between[0]).__name__:
            before = run.variants[chain.index(between[0])]
            run.output_norm = between[0], before.tensor, variant.tensor
        elif between and scale is None:
            named = ", ".join(type(by).__name__ for by in between)
            run.why_no_block = (
                f"{named} stands between its out-projection and the residual sum, and is no "
                "multiplication"
            )
    run.around.scale = scale
    run.has_other = found.has_other
    run.residual = found.residual
    residual = found.residual.tensor
    if not is_as_it_was and run.order is None:  # somebody has written into it since
        added = variant.tensor if found.variant else y.tensor
        residual = x - (added if found.variant or scale is None else added * scale)
    run.around.residual = residual
    return True


def _known(
    run: Run, x: Tensor, module: nn.Module, call: Call, is_input: bool
) -> tuple[Sum, bool] | None:
    """The sum as it was found in a call before, and whether its residual is as it was.

    That it adds up this time, too, becomes a claim where the host would wait to see it.
    """
    layer = run.plan.module
    known = _known_sums.get(layer) if _may_be_known(run) else None
    place = is_input, len(run.residuals), len(run.variants)
    if known is None or known.module() is not module or known.place != place:
        return None
    residual, y = run.residuals[known.candidate], run.variants[0].tensor
    if residual.rows.size(-1) != y.size(-1):
        return None
    added = run.variants[known.variant].rows
    seen = call.see(x)
    if not takes_waiting(x):
        total = (residual.rows.to(added.dtype) + added).to(y.dtype)
        is_same = torch.equal(total, seen.rows.to(y.dtype))
        return (Sum(residual, known.variant), residual.is_as_it_was) if is_same else None
    fault = partial(_forget, weakref.ref(layer))
    step = "its output and its residual, as they were found in a call before, are not their sum"
    rows = (seen.rows, *(x.to(seen.rows.dtype) for x in (residual.rows, added)))
    apart = Distance(sum_tolerance(y.dtype), sum_of_rows, rows)
    call.claim(Claim(run.plan.name, step, apart, run.plan.class_hint, fault))
    is_as_it_was = known.is_as_it_was
    if residual.version >= 0:
        is_as_it_was = residual.is_as_it_was
    elif is_as_it_was:  # an inference tensor, of which nothing but its numbers can tell
        step = "its residual, which did not change in a call before, has changed"
        apart = Distance(0.0, rows_apart, (rows_of(residual.tensor), residual.rows))
        call.claim(Claim(run.plan.name, step, apart, run.plan.class_hint, fault))
    return Sum(residual, known.variant), is_as_it_was


def _adds_up_written_into(run: Run, x: Tensor, found: Sum, scale: float | Tensor) -> bool:
    """Tells whether a sum that was written into its summand holds in every row."""
    if run.variants[found.variant].seen.is_as_it_was:
        return True
    whole = Sum(found.residual, 0, scale)
    y, is_there = run.variants[0].tensor, found.residual.is_as_it_was
    return is_there and order_of_rows(x, y, whole, in_every_row=True) is not None


def _may_be_known(run: Run) -> bool:
    """Whether a sum is looked for where it was; in training dropout may hide it."""
    is_named = run.plan.parts.block != "found"
    is_empty = not run.variants[0].tensor.numel()
    return is_named and not run.plan.module.training and not is_empty


def _remember(run: Run, module: nn.Module, found: Sum, is_as_it_was: bool, is_input: bool) -> None:
    """Keeps how a plain sum was found that can be no other."""
    is_plain = found.scale is None and not found.has_other and found.is_alone
    if is_plain and not run.is_turned and _may_be_known(run):
        candidate = next(n for n, seen in enumerate(run.residuals) if seen is found.residual)
        place = is_input, len(run.residuals), len(run.variants)
        known = _KnownSum(weakref.ref(module), place, candidate, found.variant, is_as_it_was)
        _known_sums[run.plan.module] = known


def _forget(layer: weakref.ref[nn.Module]) -> None:
    module = layer()
    if module is not None:
        _known_sums.pop(module, None)
