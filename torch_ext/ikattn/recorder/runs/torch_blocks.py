"""Blocks around ``nn.MultiheadAttention`` in hand-written layers, proven in every row.

What is not proven here has no map: the layer then has those of attention alone, and a reason.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from ikattn._precision import widened
from ikattn.maps.contribution_maps import NormStats
from ikattn.recorder.calls.projection import describe
from ikattn.recorder.runs.run import Run
from ikattn.recorder.sums.claims import tolerance_of
from ikattn.recorder.sums.tensors import Seen, same_numbers, see
from ikattn.recorder.sums.token_order import Added, TokenOrder, normed


def why_no_sum(run: Run, x: Tensor) -> str:
    """Why ``x``, a sum by two of its rows, is none in every row; "" where it is.

    Keeps the residual.
    """
    order, found = run.order, run.residual
    assert order is not None
    assert found is not None
    added = _added(run, order)
    if isinstance(added, str):
        return added
    # another may have the same ends, and its tokens in another order
    alike = [seen for seen in run.residuals if same_numbers(seen.rows, found.rows)]
    proven, reasons = None, []
    for seen in alike if run.is_alone and not run.has_other else run.residuals:
        before = seen.tensor
        if not seen.is_as_it_was or (before.size(-1), before.device) != (x.size(-1), x.device):
            continue
        if proven is not None and same_numbers(seen.rows, proven.rows):
            continue
        why = order.why_no_sum(x, before, added, has_other=run.has_other)
        if why:
            reasons.append(why)
        elif proven is not None:
            return "more than one residual adds up with its output"
        else:
            proven = seen
    if proven is not None:
        run.residual, run.around.residual = proven, proven.tensor
        return ""
    if reasons:
        return reasons[0]
    residual = None if run.has_other else _recovered(order, found, x, added)
    if residual is None:
        return "its residual was written into"
    run.residual, run.around.residual = see(residual)._replace(rows=found.rows), residual
    return ""


def _recovered(order: TokenOrder, residual: Seen, x: Tensor, added: Added) -> Tensor | None:
    """The residual that a sum was written into, where a norm has read it before the attention."""
    if not (added.is_plain and order.is_as_it_was and x.shape == residual.tensor.shape):
        return None
    norms = [norm for norm, seen in order.norms if same_numbers(seen.rows, residual.rows)]
    fitting = {}
    for is_turned in (False, True):
        before = order.before(x, added, is_turned=is_turned)
        order.shape, order.is_turned = x.shape, is_turned
        if any(_is_read_through(order, norm, before) for norm in norms):
            fitting[is_turned] = before
    if not fitting or (len(fitting) == 2 and 1 not in order.three_axes.shape[:2]):
        order.shape = None
        return None
    order.is_turned = min(fitting)
    return fitting[order.is_turned]


def _added(run: Run, order: TokenOrder) -> Added | str:
    """Returns the operation on the output before the sum, or why it is not known."""
    chain = [variant.by for variant in run.variants[1 : run.variant + 1]]
    dropping = [by for by in chain if isinstance(by, nn.Dropout) and by.training and by.p > 0]
    if run.output_norm is None:
        kept = 1.0 if dropping else None
        for by in dropping:
            kept = 0.0 if by.p == 1 or kept is None else kept / (1 - by.p)
        return Added(run.around.scale, not chain and run.around.scale is not None, kept)
    norm = run.output_norm[0]
    try:
        return Added(norm=(norm, NormStats.of(norm, order.three_axes)))
    except TypeError as error:
        return f"a norm stands between its out-projection and the sum: {error}"


def block_of(run: Run, norm: nn.Module | None) -> Literal["pre", "post"] | None:
    """Tells a "pre" from a "post" block, where its sum is proven.

    "pre" where the attention read what a norm makes of the residual, "post" where it read the
    residual and the norm reads the sum. Without a norm a sum of what it read is called "pre", too.
    None where that is not seen.
    """
    order, residual = run.order, run.residual
    assert order is not None
    assert residual is not None
    reads = _is_read(order, residual.tensor)
    order.is_normed = any(
        same_numbers(seen.rows, residual.rows) and _is_read_through(order, by, residual.tensor)
        for by, seen in order.norms
    )
    if reads == order.is_normed:
        return None
    return "post" if reads and norm is not None else "pre"


@torch.no_grad()
def _is_read(order: TokenOrder, residual: Tensor) -> bool:
    """Whether the attention was given the residual, in every row."""
    own = order.as_batch(residual).nan_to_num(0.0)
    is_there = bool(own.any())  # zeros are everybody's
    return is_there and any(torch.equal(own.to(x), x.nan_to_num(0.0)) for x in order.read)


@torch.no_grad()
def _is_read_through(order: TokenOrder, norm: nn.Module, residual: Tensor) -> bool:
    """Whether the attention was given what a norm makes of the residual, in every row."""
    own = order.as_batch(residual)
    try:
        stats = NormStats.of(norm, own)
    except TypeError:
        return False
    expected = normed(widened(own), norm, stats)
    is_there = bool(own.nan_to_num(0.0).any())
    return is_there and any(_agree(x, expected, own.dtype) for x in order.read)


@torch.no_grad()
def why_no_norm(order: TokenOrder, norm: nn.Module, x: Tensor, out: Tensor) -> str:
    """Why a norm that was called with the sum is not known by its statistics, in every row."""
    if out.shape != x.shape:
        return f"the norm after it, a {describe(norm)}, makes {list(out.shape)} of {list(x.shape)}"
    given = order.as_batch(x)
    try:
        stats = NormStats.of(norm, given)
    except TypeError as error:
        return str(error)
    if not _agree(order.as_batch(out), normed(widened(given), norm, stats), x.dtype):
        return f"the norm after it, a {describe(norm)}, makes something else of its input"
    return ""


def _agree(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether a norm has made what is expected of numbers of a type; not compared where NaN."""
    tolerance = max(tolerance_of(found.dtype), tolerance_of(dtype))
    off = (widened(found) - expected).abs()
    return not bool((off > tolerance * expected.abs().amax(-1, keepdim=True)).any())


def second_half(
    order: TokenOrder, norm: nn.Module, x: Tensor, out: Tensor
) -> tuple[nn.Module, Tensor, Tensor] | None:
    """The norm that ran last, where it ends the block, with its input and output.

    They are in the order of the sum. None where it was not given what the first norm made plus the
    output of a module.
    """
    halves = order.second_half(x, out)
    if halves is None or why_no_norm(order, norm, *halves):
        return None
    return norm, *halves
