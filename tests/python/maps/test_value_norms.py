"""Norms of transformed vectors, which in float32 the CPU makes of many tokens without these."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ikattn
from agreement import assert_identical

# B, H, G, S, d_v, D; all but the last two with more tokens than that takes
SHAPES = [
    (1, 12, 12, 200, 64, 768),
    (3, 4, 2, 130, 64, 300),
    (2, 6, 1, 257, 33, 200),
    (2, 1, 1, 500, 130, 900),
    (130, 2, 2, 3, 1, 5),
    (1, 3, 3, 64, 7, 16),
    (1, 12, 12, 20, 64, 768),
    (1, 2, 2, 300, 64, 100),
]


def inputs(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """In bfloat16's numbers, so that every type holds the same."""
    B, H, G, S, d_v, D = shape
    torch.manual_seed(0)
    value, projection = torch.randn(B, G, S, d_v), torch.randn(D, H * d_v)
    return value.bfloat16().float(), projection.bfloat16().float()


def found(value: Tensor, projection: Tensor, H: int, **options: Tensor) -> Tensor:
    weights = torch.rand(value.shape[0], H, 2, value.shape[2], dtype=value.dtype)
    norms = ikattn.contributions(weights, value, projection, maps=["value_norms"], **options)
    return norms.value_norms


def definition(value: Tensor, projection: Tensor, H: int) -> Tensor:
    of_heads = projection.double().unflatten(1, (H, -1))
    value = value.double().repeat_interleave(H // value.shape[1], 1)
    return torch.einsum("bhsv,dhv->bhsd", value, of_heads).norm(dim=-1)


def largest_error(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> float:
    """Returns the largest error of any norm, relative to itself."""
    worst = 0.0
    for shape in shapes:
        value, projection = inputs(shape)
        got = found(value.to(dtype), projection.to(dtype), shape[1])
        expected = definition(value, projection, shape[1])
        worst = max(worst, ((got - expected) / expected).abs().max().item())
    return worst


@pytest.mark.operators
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_are_those_of_the_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert largest_error([shape], dtype) < 5e-7


def test_float64_keeps_its_accuracy() -> None:
    assert largest_error(SHAPES, torch.float64) < 1e-14


def test_are_as_accurate_as_float32_where_the_projection_cancels() -> None:
    """Values near its null space: the square has lost half of float64's digits, not more."""
    value, projection = inputs((1, 2, 2, 200, 32, 256))
    left, _, right = torch.linalg.svd(projection[:, :32].double(), full_matrices=False)
    sizes = torch.logspace(0, -9, 32, dtype=torch.float64)
    projection[:, :32] = (left * sizes) @ right
    value[0, 0] = value[0, 0].double() @ (right.mT * sizes.flip(0)) @ right
    vectors = value[0, 0] @ projection[:, :32].mT  # in float32
    expected = definition(value, projection, 2)[0, 0]
    error = (found(value, projection, 2)[0, 0] - expected).abs().max()
    size = (value[0, 0].norm(dim=-1) * torch.linalg.matrix_norm(projection[:, :32], 2)).max()
    assert error < 3e-8 * size
    assert error < 2 * (vectors.norm(dim=-1) - expected).abs().max()


def test_layouts_and_padding() -> None:
    value, projection = inputs((2, 4, 4, 150, 24, 120))
    expected = definition(value, projection, 4)
    strided = torch.empty(150, 4, 24, 4).permute(3, 1, 0, 2)[::2].copy_(value)
    by_columns = projection.mT.contiguous().mT
    torch.testing.assert_close(found(strided, by_columns, 4), expected.float(), rtol=5e-7, atol=0.0)
    padding = torch.zeros(2, 150, dtype=torch.bool)
    padding[1, 100:] = True
    hidden = value.masked_fill(padding[:, None, :, None], torch.nan)
    got = found(hidden, projection, 4, key_padding=padding)
    torch.testing.assert_close(
        got, expected.masked_fill(padding[:, None], 0).float(), rtol=5e-7, atol=0.0
    )


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_one_bad_number_shows_where_it_is(bad: float) -> None:
    value, projection = inputs((1, 3, 3, 200, 16, 100))
    clean = found(value, projection, 3)
    value[0, 1, 70, 3] = bad
    got = found(value, projection, 3)
    torch.testing.assert_close(got[0, 1, 70], torch.tensor(abs(bad)), equal_nan=True)
    got[0, 1, 70] = clean[0, 1, 70]
    assert_identical([got], [clean])

    value, projection = inputs((1, 3, 3, 200, 16, 100))
    projection[5, 20] = bad  # of head 1
    got, expected = found(value, projection, 3), definition(value, projection, 3)
    torch.testing.assert_close(got, expected.float(), rtol=5e-7, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("factor", [1e36, 1e20, 1e-20, 1e-36])
def test_have_the_whole_range_of_float32(factor: float) -> None:
    value, projection = inputs((1, 3, 3, 200, 16, 100))
    got = found(factor * value, projection, 3)
    expected = factor * definition(value, projection, 3)
    torch.testing.assert_close(got.double(), expected, rtol=5e-7, atol=0.0)


def test_no_heads_no_tokens_no_size() -> None:
    assert found(torch.empty(1, 2, 0, 8), torch.randn(50, 16), 2).shape == (1, 2, 0)
    norms = found(torch.empty(1, 2, 300, 0), torch.empty(50, 0), 2)
    assert_identical([norms], [torch.zeros(1, 2, 300)])


@pytest.mark.usefixtures("threads")
def test_have_the_same_bits_for_every_number_of_threads() -> None:
    for shape in SHAPES:
        value, projection = inputs(shape)
        torch.set_num_threads(1)
        expected = found(value, projection, shape[1])
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            assert_identical([found(value, projection, shape[1])], [expected])


def test_gradients_are_those_of_the_definition() -> None:
    value, projection = (x.requires_grad_() for x in inputs((2, 4, 2, 130, 24, 120)))
    got = torch.autograd.grad(found(value, projection, 4).sum(), (value, projection))
    expected = torch.autograd.grad(definition(value, projection, 4).sum(), (value, projection))
    for gradient, right in zip(got, expected, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-5, atol=1e-5)
