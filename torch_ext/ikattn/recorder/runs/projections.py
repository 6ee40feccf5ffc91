"""Out-projections as linear maps: learnt once for a recording, and held to what modules compute.

Sizes: H heads, d_v head size of value, D model size.
"""

from __future__ import annotations

import inspect
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ikattn._precision import widened
from ikattn.recorder.calls.modes import as_the_model_runs
from ikattn.recorder.calls.projection import (
    Projection,
    describe,
    effective_projection,
    plain_projection,
)
from ikattn.recorder.runs.call import Call
from ikattn.recorder.runs.making import Options
from ikattn.recorder.runs.run import Run
from ikattn.recorder.sums.claims import Distance, tolerance_of
from ikattn.recorder.sums.tensors import rows_of, takes_waiting

_SUMS = 8


class _Sketch(NamedTuple):
    """Sums of a linear map's outputs, which tell whether it has made of rows what it should.

    A row's whole product reads all of the weight, which costs more than anything else that a
    recording compares. Sums s_k = sum_i e_ki y_i of its outputs, with random signs e, need the sums
    of the weight's rows alone, which are made once. Where they are not what they should be the
    whole product decides.
    """

    signs: Tensor  # [D, 8]
    weight: Tensor  # [H d_v, 8]
    bias: Tensor  # [8]


class Projections:
    """Knows the linear maps of out-projections while a recording goes on."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._known: dict[nn.Module, Projection] = {}
        # Each sketch stands with the state of its module's weight.
        self._sketches: dict[nn.Module, tuple[object, _Sketch | None]] = {}
        self._scaling: dict[nn.Module, bool] = {}  # modules that mix no numbers of their input

    def of(self, call: Call, run: Run, module: nn.Module, x: Tensor, y: Tensor) -> Projection:
        """Returns an out-projection's map, cached for the recording unless it has a gradient."""
        plain = plain_projection(module)
        run.is_probed = plain is None
        known = plain or self._known.get(module)
        apart = None if known is None else self._apart(call, run, module, known, x, y)
        has_changed = run.is_probed and apart is not None and apart.is_too_far
        if known is None or has_changed:
            with as_the_model_runs(gradients=not self._options.detach):
                known = effective_projection(module, x.size(-1), x, run.plan.title)
            if self._options.detach:
                self._known[module] = known
            apart = self._apart(call, run, module, known, x, y)
        if apart is not None:
            step = (
                f"its out-projection, a {describe(module)}, makes something else of its heads than "
                "the linear map that it is taken for"
            )
            call.claim(run.claim(step, apart))
        return known

    def scales(self, module: nn.Module, projection: Projection) -> bool:
        """Whether a module multiplies each number of the heads, and mixes none."""
        known = self._scaling.get(module)
        if known is None:
            weight = projection.weight.detach()
            own = weight.diagonal()
            is_square = weight.size(0) == weight.size(1)  # all zeros are no scale
            known = is_square and bool((weight == own.diag()).all() and (own != 0).all())
            self._scaling[module] = known
        return known

    def _apart(
        self, call: Call, run: Run, module: nn.Module, projection: Projection, x: Tensor, y: Tensor
    ) -> Distance | None:
        """How far a projection of heads ``x`` is from ``y``; None where nothing is left to see."""
        if not x.numel():
            return None
        if not (self._options.checks_all or takes_waiting(x)):
            tolerance = tolerance_of(run.type_of_projection(x, y))
            rows = rows_of(x), call.see(y).rows
            if self._agrees(module, projection, *rows, tolerance):
                return None
        return run.projected(projection, x, y, self._options.checks_all)

    @torch.no_grad()
    def _agrees(
        self, module: nn.Module, projection: Projection, x: Tensor, y: Tensor, tolerance: float
    ) -> bool:
        """Whether sums of rows ``y [rows, D]`` are those that the projection of rows ``x`` has.

        They may be off by a ``tolerance`` of the largest number of y. A difference of one output
        counts in full, and others do not add up to nothing in all sums. False where numbers are not
        finite, and where the sums are not known yet: they are made when ``module``, which has the
        weight, is seen for the second time with it.
        """
        tensors = [x for x in projection if x is not None]
        state = None  # else what changes when one of them is written into
        if not any(x.is_inference() for x in tensors):
            state = [(x.data_ptr(), x.shape, x.stride(), x.dtype, x._version) for x in tensors]
        known, sketch = self._sketches.get(module, (None, None))
        if state is None or known != state:
            self._sketches[module] = state, None
            return False
        if sketch is None:
            sketch = _sketch_of(projection)
            self._sketches[module] = state, sketch
        off = torch.addmm(sketch.bias, x.to(sketch.bias.dtype), sketch.weight)
        off = off.addmm(y.to(off.dtype), sketch.signs, beta=-1)
        largest, size = (float(torch.linalg.vector_norm(rows, torch.inf)) for rows in (off, y))
        return largest <= tolerance * size  # not so where one is NaN


def _sketch_of(projection: Projection) -> _Sketch:
    weight = widened(projection.weight.detach())
    generator = torch.Generator().manual_seed(0)
    coins = torch.randint(2, (weight.size(0), _SUMS), generator=generator, device="cpu")
    signs = coins.to(weight).mul_(2).sub_(1)
    bias = weight.new_zeros(_SUMS)
    if projection.bias is not None:
        bias = widened(projection.bias.detach()).to(weight.dtype) @ signs
    return _Sketch(signs, weight.mT @ signs, bias)


def is_handed_on(x: Tensor, out: Tensor) -> bool:
    """Whether a module has returned the numbers that it was given, where they were."""
    if x.is_nested or not x.numel() or x.shape != out.shape:
        return False
    return x.data_ptr() == out.data_ptr() and x.stride() == out.stride()


def is_unary(module: nn.Module) -> bool:
    """Whether a module can be called with one tensor: not, for example, with a residual beside."""
    parameters = inspect.signature(module.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(x.default is x.empty for x in parameters if x.kind in kinds) <= 1


def check_is_alone(run: Run, module: nn.Module, x: Tensor) -> None:
    """Raises RuntimeError where a second module is called with heads that are projected."""
    following = run.following
    if following is None or run.plan.parts.out_proj is not None or not following.is_of_heads(x):
        return
    raise RuntimeError(
        f"record: {run.plan.name} cannot be recorded: its heads go into a "
        f"{describe(run.out_proj or run.plan.module)} and into a {describe(module)}, and it "
        "has no one out-projection. layers=... leaves it out"
    )
