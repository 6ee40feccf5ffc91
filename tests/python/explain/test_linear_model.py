"""The linear model's replacements of torch functions: torch's values, as linear functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ikattn.explain.attribution._linear import LinearModel

W, B = torch.linspace(-1, 1, 36).view(6, 6), torch.linspace(-0.5, 1, 6)
ONE = torch.ones(())

ANY: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu in place": lambda x: F.relu(x.clone(), inplace=True),
    "elu": F.elu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "square": lambda x: x**2,
    "ones": lambda x: x**0,
    "clamp": lambda x: torch.clamp(input=x, min=0.2, max=0.5),
    "hardtanh": lambda x: F.hardtanh(x, 0.1, 0.5),
    "sigmoid": torch.sigmoid,
    "product": lambda x: torch.mul(input=x, other=x),
    "quotient": lambda x: torch.div(x, x * x + 1, rounding_mode=None),
    "sum": lambda x: torch.add(input=x, other=ONE, alpha=2),
    "difference": lambda x: torch.sub(ONE, x, alpha=3),
    "turned difference": lambda x: torch.rsub(x, ONE, alpha=2),
    "sum in place": lambda x: x.clone().add_(2, alpha=3),
    "softmax": lambda x: torch.softmax(input=x, dim=-1, dtype=torch.float64),
    "cat": lambda x: torch.cat(tensors=[torch.ones_like(x), x], dim=0),
    "stack": lambda x: torch.stack([x, torch.ones_like(x)]),
    "dropout": lambda x: F.dropout(input=x, p=0.5, training=False),
    "glu": lambda x: F.glu(input=x),
    "float_power": lambda x: torch.float_power(x, 2),
    "difference from a number": lambda x: x * (1 - x),
    "sum and product in place": lambda x: x.clone().add_(2).mul_(x),
    "gate": lambda x: x * torch.sigmoid(1.7 * x),
    "gelu as a formula": lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x**3))),
}
SIX: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, (6,), B, B),
    "layer_norm by name": lambda x: F.layer_norm(input=x, normalized_shape=[6], eps=1e-3),
    "rms_norm": lambda x: F.rms_norm(input=x, normalized_shape=(6,), weight=B),
    "normalize": lambda x: F.normalize(input=x, p=1.0, dim=0),
    "linear": lambda x: F.linear(input=x, weight=W, bias=B),
    "matmul": lambda x: torch.matmul(input=x, other=W),
    "scores": lambda x: x @ x.mT,
    "view of a norm": lambda x: F.layer_norm(x, (6,)).view(-1),
    "einsum": lambda x: torch.einsum("...ij,...kj->...ik", x, x),
}
MATRIX: dict[str, Callable[[Tensor], Tensor]] = {
    "addmm": lambda x: torch.addmm(input=B, mat1=x, mat2=W, beta=0.5, alpha=2),
    "group_norm": lambda x: F.group_norm(input=x, num_groups=2, weight=B),
    "batch_norm": lambda x: F.batch_norm(input=x, running_mean=B, running_var=B * B + 1, bias=B),
    "torch.batch_norm": lambda x: torch.batch_norm(x, B, B, B, B * B + 1, False, 0.1, 0.1, False),
}
BATCH: dict[str, Callable[[Tensor], Tensor]] = {
    "conv1d": lambda x: F.conv1d(input=x, weight=torch.ones(2, x.size(1), 2), bias=torch.ones(2)),
    "baddbmm": lambda x: torch.baddbmm(ONE, x, x.mT, beta=0.5, alpha=0.3),
}
INPUTS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.randn(4, 6),
    "transposed": lambda: torch.randn(6, 4).t(),
    "of a batch, transposed": lambda: torch.randn(3, 6, 4).transpose(1, 2),
    "permuted": lambda: torch.randn(2, 6, 3, 4).permute(0, 3, 2, 1),
    "expanded": lambda: torch.randn(4, 1, 6).expand(4, 3, 6),
    "sliced": lambda: torch.randn(4, 6, 12)[:, ::2, 1::2],
    "empty": lambda: torch.randn(0, 6),
    "a number": lambda: torch.randn(()),
    "half": lambda: torch.randn(3, 6, 4).half().transpose(1, 2),
    "bfloat16": lambda: torch.randn(4, 6).bfloat16(),
    "zeros": lambda: torch.zeros(4, 6),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", INPUTS)
def test_replacements_return_what_torch_returns(kind: str) -> None:
    torch.manual_seed(0)
    x = INPUTS[kind]()
    functions = dict(ANY)
    functions |= SIX if x.shape[-1:] == (6,) else {}
    functions |= MATRIX if x.dim() == 2 else {}
    functions |= BATCH if x.dim() == 3 else {}
    tolerance = 1e-4 if x.dtype == torch.float32 else 3e-2
    compared = 0
    for name, function in functions.items():
        try:
            expected = function(x)
        except (RuntimeError, IndexError):  # torch has it not for this input
            continue
        for activation in ("slope", "tangent"):
            own, linear = x.detach().requires_grad_(), LinearModel(activation)  # type: ignore[arg-type]
            with linear:
                found = function(own)
            assert found.dtype == expected.dtype, name
            assert found.stride() == expected.stride() or not found.numel(), name
            assert (found.data_ptr() == own.data_ptr()) == (expected.data_ptr() == x.data_ptr())
            torch.testing.assert_close(found.detach(), expected, rtol=tolerance, atol=tolerance)
            compared += 1
            if found.requires_grad and x.dtype == torch.float32:
                value = found.sum()
                (gradient,) = torch.autograd.grad(value, own)
                total = float((gradient * own).sum()) + linear.constants
                assert total == pytest.approx(float(value), rel=1e-3, abs=1e-3), name
                assert linear.lost == 0
    assert compared > 30


def test_constants_beside_vectors_are_biases() -> None:
    x, linear = torch.randn(2, 3, requires_grad=True), LinearModel()
    with linear:
        value = torch.cat([torch.ones(2, 3), x], 1).sum()
    (gradient,) = torch.autograd.grad(value, x)
    assert linear.constants == 6
    torch.testing.assert_close((gradient * x).sum() + 6, value)
