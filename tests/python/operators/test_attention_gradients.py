"""The gradients of implicit-kernel attention."""

from __future__ import annotations

import pytest
import torch

import formula
import ikattn
from agreement import (
    assert_call_accurate,
    assert_close,
    assert_gradients_accurate,
    assert_identical,
    direction,
    error,
    gradient_scales,
    gradients,
)
from samples import BY_NAME, DTYPES, SAMPLES, Sample, converted, with_gradients
from tiers import each_call

attention = ikattn.implicit_kernel_attention
reference = ikattn.reference.implicit_kernel_attention

ORDERS = (1.0, 1.5, 1.8, 2.0, 3.0, 7.0)


@pytest.mark.operators
@each_call(SAMPLES, dtype=DTYPES)
def test_gradients_are_as_accurate_as_the_references(sample: Sample, dtype: torch.dtype) -> None:
    assert_call_accurate(attention, reference, sample.arguments(dtype))


@each_call(SAMPLES)
def test_reference_has_the_gradients_of_the_formula(sample: Sample) -> None:
    arguments = sample.arguments()
    by_formula = gradients(formula.attention, arguments)
    incoming = direction(formula.attention(**arguments))
    assert_gradients_accurate(
        gradients(reference, arguments),
        by_formula,
        by_formula,
        gradient_scales(arguments, incoming),
        torch.float64,
    )


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float64, 1e-60), (torch.float64, 1e60), (torch.float32, 1e-15), (torch.float32, 1e15)],
    ids=str,
)
def test_gradient_of_the_magnitude_is_right_where_powers_of_the_key_are_no_numbers(p, dtype, size):
    """With w = 0 all depends on magnitude_scale |k|^2: f(c k, scale / c^2) = f(k, scale)."""
    arguments = Sample(f"sizes for p {p}", S=9, d=5).arguments(dtype) | {"p": p}
    arguments |= {"w1": torch.zeros(2, 5, 3, dtype=dtype), "w2": None, "magnitude_scale": 0.1}
    scaled = {"key": arguments["key"] * size, "magnitude_scale": 0.1 / size**2}
    got = gradients(attention, arguments | scaled, ["key"])["key"].double() * size
    expected = gradients(reference, converted(arguments, torch.float64), ["key"])["key"]
    assert_close(got, expected, 1e-12 if dtype == torch.float64 else 3e-6)


def test_an_output_changed_in_place_is_an_error_in_backward() -> None:
    call = with_gradients(BY_NAME["15 queries, 17 keys"].arguments())
    output = attention(**call)
    output.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_saved_tensors_can_be_moved_away_and_back() -> None:
    arguments = BY_NAME["everything at once"].arguments()
    expected = gradients(attention, arguments)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
        moved = gradients(attention, arguments)
    assert_identical(moved.values(), expected.values())


@pytest.mark.parametrize("shape", [(64,), (4, 1, 64), (2048, 1), (4, 1, 1, 1)], ids=str)
def test_gradients_of_broadcast_masks_are_sums_that_keep_their_digits(shape):
    torch.manual_seed(0)
    call = {"query": torch.randn(4, 4, 2048, 16), "attn_mask": torch.randn(shape)}
    call |= {name: torch.randn(4, 4, 64, 16) for name in ("key", "value")}
    call |= {name: 0.1 * torch.randn(4, 16, 16) for name in ("w1", "w2")}
    incoming = torch.randn(4, 4, 2048, 16)
    wide = gradients(reference, converted(call, torch.float64), ["attn_mask"], incoming.double())[
        "attn_mask"
    ]
    got, other = (
        gradients(function, call, ["attn_mask"], incoming)["attn_mask"]
        for function in (attention, reference)
    )
    # The sum vanishes where every key of a row gets the same.
    scale = 0.0 if shape[-1] == 64 else 1.0
    assert error(got, wide, scale) <= max(2 * error(other, wide, scale), 1e-6)


@pytest.mark.parametrize("per_sample", [False, True])
def test_frequency_gradients_that_do_not_fit_together(per_sample: bool) -> None:
    """Gradients of units are summed in groups of 8 MiB: three here, that part batch items."""
    torch.manual_seed(0)
    sets = (9, 2) if per_sample else (2,)
    call = {name: torch.randn(9, 2, 5, 256) for name in ("key", "value")}
    call |= {"query": torch.randn(9, 4, 5, 256), "enable_gqa": True}
    call |= {"key_bias": torch.randn(9, 4, 5)}  # so that the key side is per head
    call |= {name: 0.1 * torch.randn(*sets, 256, 256) for name in ("w1", "w2")}
    call = converted(call, torch.float64)
    incoming = torch.randn(9, 4, 5, 256, dtype=torch.float64)
    got, expected = (gradients(f, call, ["w1", "w2"], incoming) for f in (attention, reference))
    for name, gradient in got.items():
        assert_close(gradient, expected[name], 1e-12, name)
