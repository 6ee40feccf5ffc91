"""Whether a linear map has made of rows what it should, told by a few sums of its outputs.

A row's whole product reads all of the weight, which costs more than anything else that a recording
compares. Sums s_k = sum_i e_ki y_i of its outputs, with random signs e, need the sums of the
weight's rows alone, [8, H d_v], which are made once. Where they are not what they should be the
whole product decides.

Sizes: H heads, d_v head size of value, D model size.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ikattn._precision import widened
from ikattn.recorder.calls.projection import Projection

SUMS = 8


class _Sketch(NamedTuple):
    """Sums of a linear map's outputs."""

    signs: Tensor  # [D, 8]
    weight: Tensor  # [H d_v, 8]
    bias: Tensor  # [8]


class Sketches:
    """Sums of linear maps, of each module as long as nothing is written into its weight."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[nn.Module, tuple[object, _Sketch | None]] = (
            WeakKeyDictionary()
        )

    @torch.no_grad()
    def agrees(
        self, module: nn.Module, projection: Projection, x: Tensor, y: Tensor, tolerance: float
    ) -> bool:
        """Whether sums of rows ``y [rows, D]`` are those that the projection of rows ``x`` has.

        They may be off by a ``tolerance`` of the largest number of y. A difference of one output
        counts in full, and others do not add up to nothing in all sums. False where numbers are not
        finite, and where the sums are not known yet: they are made when ``module``, which has the
        weight, is seen for the second time with it.
        """
        state = _state_of(projection)
        known, sketch = self._known.get(module, (None, None))
        if state is None or known != state:
            self._known[module] = state, None
            return False
        if sketch is None:
            sketch = _sketch_of(projection)
            self._known[module] = state, sketch
        off = torch.addmm(sketch.bias, x.to(sketch.bias.dtype), sketch.weight)
        off = off.addmm(y.to(off.dtype), sketch.signs, beta=-1)
        return _largest(off) <= tolerance * _largest(y)


def _largest(x: Tensor) -> float:
    """The largest number, as a float; NaN where one is NaN."""
    return float(torch.linalg.vector_norm(x, torch.inf))


def _state_of(projection: Projection) -> object:
    """Returns a value that changes when a projection is written into; None: nothing tells."""
    tensors = [x for x in projection if x is not None]
    if any(x.is_inference() for x in tensors):
        return None
    return tuple((x.data_ptr(), x.shape, x.stride(), x.dtype, x._version) for x in tensors)


def _sketch_of(projection: Projection) -> _Sketch:
    weight = widened(projection.weight.detach())
    generator = torch.Generator().manual_seed(0)
    coins = torch.randint(2, (weight.size(0), SUMS), generator=generator, device="cpu")
    signs = coins.to(weight).mul_(2).sub_(1)
    bias = weight.new_zeros(SUMS)
    if projection.bias is not None:
        bias = widened(projection.bias.detach()).to(weight.dtype) @ signs
    return _Sketch(signs, weight.mT @ signs, bias)
