"""A projection's outputs are told by a few sums of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ikattn.recorder.calls.projection import plain_projection
from ikattn.recorder.runs.sketches import Sketches


def agrees(sketches: Sketches, module: nn.Linear, x: Tensor, y: Tensor) -> bool:
    projection = plain_projection(module)
    assert projection is not None
    return sketches.agrees(module, projection, x, y, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_sums_tell_one_output_that_differs(dtype: torch.dtype, bias: bool) -> None:
    module, sketches = nn.Linear(48, 80, bias=bias, dtype=dtype), Sketches()
    x = torch.randn(2, 48)
    weight, own = module.weight.detach().float(), module.bias
    y = x @ weight.mT + (0 if own is None else own.detach().float())
    assert not agrees(sketches, module, x, y)  # the first time nothing is known
    assert agrees(sketches, module, x, y)
    assert agrees(sketches, module, x, y * (1 + 1e-6))
    for output in (0, 41, 79):
        wrong = y.clone()
        wrong[1, output] += 2e-4 * y.abs().max()
        assert not agrees(sketches, module, x, wrong)
    assert not agrees(sketches, module, x, y.roll(1, -1))
    assert not agrees(sketches, module, x, torch.full_like(y, torch.nan))
    assert not agrees(sketches, module, x, torch.full_like(y, torch.inf))


def test_sums_follow_a_weight_that_is_written_into() -> None:
    module, sketches = nn.Linear(16, 16), Sketches()
    x = torch.randn(2, 16)
    for _ in range(2):
        with torch.no_grad():
            module.weight.mul_(2.0)
        y = module(x).detach()
        assert not agrees(sketches, module, x, y)  # seen for the first time
        assert agrees(sketches, module, x, y)
    module.weight.data.mul_(2.0)  # which no version tells: the whole product has to decide
    assert not agrees(sketches, module, x, module(x).detach())
    with torch.inference_mode():
        inference = nn.Linear(16, 16)
        assert not any(agrees(sketches, inference, x, inference(x)) for _ in range(3))
