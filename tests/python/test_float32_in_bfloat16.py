"""float32 inputs where torch may round the operands of products to bfloat16 ("medium")."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import ikattn
from agreement import (
    assert_close,
    assert_identical,
    converted,
    direction,
    gradient_scales,
    gradients,
    in_float64,
)
from samples import BY_NAME, SAMPLES, Sample, name_of

attention = ikattn.implicit_kernel_attention
reference = ikattn.reference.implicit_kernel_attention
# Both operands of a product are off by 2^-9 at most, weights and gradients by their scores' too.
ROUNDINGS = 4 * 2**-9


@pytest.fixture
def medium() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("sample", SAMPLES, ids=name_of)
def test_values_and_gradients_err_by_roundings_to_bfloat16(sample: Sample) -> None:
    arguments = sample.arguments(torch.float32)
    output = attention(**arguments)
    assert output.dtype == torch.float32
    assert_close(output, in_float64(reference, arguments), ROUNDINGS, "output")
    incoming = direction(output)
    truth = gradients(reference, converted(arguments, torch.float64), grad_output=incoming.double())
    scales = gradient_scales(arguments, incoming)
    for name, got in gradients(attention, arguments, grad_output=incoming).items():
        assert_close(got, truth[name], ROUNDINGS, name, scales[name])


@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
def test_the_setting_is_honoured_where_it_helps(dtype: torch.dtype) -> None:
    arguments = BY_NAME["one head, long"].arguments(dtype)
    rounded = [attention(**arguments), *gradients(attention, arguments).values()]
    torch.set_float32_matmul_precision("highest")
    exact = [attention(**arguments), *gradients(attention, arguments).values()]
    if dtype == torch.float64 or torch.ops.ikattn.sixteen_bit_instructions() == "none":
        assert_identical(rounded, exact)
    else:
        assert not any(torch.equal(a, b) for a, b in zip(rounded, exact, strict=True))


@pytest.mark.usefixtures("medium")
def test_one_visible_key_gives_its_value() -> None:
    """To the bits of bfloat16: the weights sum up to what they were rounded to."""
    query, key, value = (torch.randn(1, 2, n, 8) for n in (3, 1, 1))
    output = attention(query, key, value, *(torch.randn(2, 8, 4) for _ in range(2)))
    rounded = torch.ops.ikattn.sixteen_bit_instructions() == "avx512_bf16"
    expected = value.bfloat16().float() if rounded else value
    assert_close(output, expected.expand_as(output), 1e-6)
