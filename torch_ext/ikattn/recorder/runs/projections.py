"""Out-projections as linear maps: learnt once for a recording, and held to what modules compute."""

from __future__ import annotations

import inspect

from torch import Tensor, nn

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
from ikattn.recorder.runs.sketches import Sketches
from ikattn.recorder.sums.distances import Distance, tolerance_of
from ikattn.recorder.sums.tensors import rows_of, takes_waiting


class Projections:
    """Knows the linear maps of out-projections while a recording goes on."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.forget()

    def forget(self) -> None:
        """Lets go of all that has been learnt."""
        self._known: dict[nn.Module, Projection] = {}
        self._sketches = Sketches()
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
            if self._sketches.agrees(module, projection, *rows, tolerance):
                return None
        return run.projected(projection, x, y, self._options.checks_all)


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
