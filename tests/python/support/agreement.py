"""How results are compared, in one place.

The kernels may err at most twice as much as the differentiable reference at the same precision
(gradients: five times); both are measured against the reference in float64 on the same numbers, and
relative to the largest element. On top come a few units in the last place, so that a reference
which happens to be exact does not set the bound.

A gradient is the difference of two terms, d/dx with the normaliser Z held and what Z adds, and may
vanish where they do not: its errors are relative to the larger of the first term and itself (of a
broadcast mask or bias: to the sum of what is added up). In bfloat16 and float16 the second term is
formed from the rounded output, which adds a unit in the last place of that type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

import formula
from samples import Arguments, converted, differentiable, with_gradients

OUTPUT_FACTOR = 2.0
GRADIENT_FACTOR = 5.0
OUTPUT_ULPS = 6.0
GRADIENT_ULPS = 10.0
# In float64 the reference is the truth: what is allowed is rounding.
FLOAT64_OUTPUT = 3e-14
FLOAT64_GRADIENT = 2e-13

Function = Callable[..., Tensor]
Tensors = dict[str, Tensor]


def arithmetic_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def error(got: Tensor, truth: Tensor, scale: float = 0.0) -> float:
    """The largest error relative to the largest element (or to scale, where that is larger).

    Infinite where one of them is NaN or infinite and the other not the same.
    """
    assert got.shape == truth.shape, f"shape {tuple(got.shape)} is not {tuple(truth.shape)}"
    got, truth = got.detach().double(), truth.detach().double()
    finite = truth.isfinite()
    if not torch.equal(got[~finite].nan_to_num(0.5), truth[~finite].nan_to_num(0.5)):
        return math.inf
    got, truth = got[finite], truth[finite]
    if torch.equal(got, truth):
        return 0.0
    found = (got - truth).abs().max().item() / max(truth.abs().max().item(), scale, 1e-300)
    return math.inf if math.isnan(found) else found


def assert_close(
    got: Tensor, truth: Tensor, tolerance: float, what: str = "result", scale: float = 0.0
) -> None:
    found = error(got, truth, scale)
    assert found <= tolerance, f"{what}: error {found:.2e}, allowed {tolerance:.2e}"


def assert_all_close(found: Tensors, expected: Tensors, tolerance: float = 1e-12) -> None:
    """Holds named results to others, small ones relative to a thousandth of the largest."""
    assert found.keys() == expected.keys()
    scale = 1e-3 * max(x.abs().max().item() for x in expected.values())
    for name in expected:
        assert_close(found[name], expected[name], tolerance, name, scale)


def assert_output_accurate(got: Tensor, reference: Tensor, truth: Tensor) -> None:
    """The rule above, for what is not a gradient."""
    assert got.dtype == reference.dtype
    if got.dtype == torch.float64:
        return assert_close(got, truth, FLOAT64_OUTPUT)
    ulp = torch.finfo(arithmetic_type(got.dtype)).eps
    return assert_close(got, truth, OUTPUT_FACTOR * error(reference, truth) + OUTPUT_ULPS * ulp)


def assert_gradients_accurate(
    got: dict[str, Tensor],
    reference: dict[str, Tensor],
    truth: dict[str, Tensor],
    scales: dict[str, float],
    computed_in: torch.dtype,
) -> None:
    """The rule above, for the gradients of a call whose query has dtype computed_in."""
    for name, gradient in got.items():
        assert gradient.dtype == reference[name].dtype, name
        if computed_in == torch.float64:
            assert_close(gradient, truth[name], FLOAT64_GRADIENT, name, scales[name])
            continue
        allowed = GRADIENT_FACTOR * error(reference[name], truth[name], scales[name])
        allowed += GRADIENT_ULPS * torch.finfo(arithmetic_type(computed_in)).eps
        if computed_in.itemsize < 4:
            allowed += torch.finfo(computed_in).eps
        assert_close(gradient, truth[name], allowed, name, scales[name])


def in_float64(function: Function, arguments: Arguments) -> Tensor:
    """A function of the same numbers in float64."""
    return function(**converted(arguments, torch.float64))


def direction(like: Tensor) -> Tensor:
    """The gradient that comes in: random, of the output's kind, the same at every call."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)


def gradients(
    function: Function,
    arguments: Arguments,
    names: list[str] | None = None,
    grad_output: Tensor | None = None,
) -> dict[str, Tensor]:
    """The gradient of a call in each of its arguments (all that have one, or those named)."""
    wanted = differentiable(arguments) if names is None else names
    call = with_gradients(arguments, wanted)
    output = function(**call)
    incoming = direction(output) if grad_output is None else grad_output
    found = torch.autograd.grad(output, [call[name] for name in wanted], incoming)
    return dict(zip(wanted, found, strict=True))


def expanded_sides(arguments: Arguments) -> Arguments:
    """A float mask and a key bias in float64, no longer broadcast."""
    (batch, heads, length), keys = arguments["query"].shape[:3], arguments["key"].shape[2]
    mask, bias = arguments["attn_mask"], arguments["key_bias"]
    sides = {}
    if mask is not None and mask.is_floating_point():
        sides["attn_mask"] = mask.double().expand(batch, heads, length, keys)
    if bias is not None:
        of_heads = bias.shape[-2] if bias.dim() > 1 and bias.shape[-2] > 1 else heads
        sides["key_bias"] = bias.double().expand(batch, of_heads, keys)
    return sides


def gradient_scales(
    arguments: Arguments, grad_output: Tensor, function: Function = formula.attention
) -> dict[str, float]:
    """The size of each gradient's first term: that with the normaliser held."""

    def held(**call: Tensor) -> Tensor:
        return function(hold_normalizer=True, **call)

    call = converted(arguments, torch.float64) | expanded_sides(arguments)
    found = gradients(held, call, grad_output=grad_output.double())
    return {
        name: x.abs().sum_to_size(arguments[name].shape).max().item() if x.numel() else 0.0
        for name, x in found.items()
    }


def assert_call_accurate(
    function: Function,
    reference: Function,
    arguments: Arguments,
    by_formula: Function = formula.attention,
) -> None:
    """The rule for the gradients of one call of an operator and its reference."""
    with torch.no_grad():
        incoming = direction(function(**arguments))
    truth = gradients(reference, converted(arguments, torch.float64), grad_output=incoming.double())
    assert_gradients_accurate(
        gradients(function, arguments, grad_output=incoming),
        gradients(reference, arguments, grad_output=incoming),
        truth,
        gradient_scales(arguments, incoming, by_formula),
        arguments["query"].dtype,
    )


def _bits(tensor: Tensor) -> bytes:
    dense = tensor.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_identical(first: Iterable[Tensor], second: Iterable[Tensor]) -> None:
    """Bitwise the same numbers, NaNs included, in the same shapes and types."""
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        different = 0 if _bits(one) == _bits(other) else int((one != other).sum())
        assert _bits(one) == _bits(other), (
            f"tensor {index}: {different} of {one.numel()} elements differ"
        )
