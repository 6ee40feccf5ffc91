"""Dropout of the weights: which are dropped, how the rest is scaled, and what repeats."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import ikattn
from agreement import assert_close, assert_identical, direction, error, gradients
from ikattn.ops import draw_dropout_seed, dropout_keep_mask
from samples import Arguments, Sample, of_weights

attention = ikattn.implicit_kernel_attention
weights = ikattn.implicit_kernel_weights

SHAPE = Sample("dropped", B=2, H=3, L=70, S=131)


def philox4x32_7(counter: np.ndarray, seed: int) -> np.ndarray:
    """Philox4x32 with seven rounds (Salmon et al., SC 2011) of counters [4, n]."""
    c0, c1, c2, c3 = counter.astype(np.uint64)
    key0, key1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    low = np.uint64(0xFFFFFFFF)
    for _ in range(7):
        product0, product1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            product1 >> np.uint64(32) ^ c1 ^ np.uint64(key0),
            product1 & low,
            product0 >> np.uint64(32) ^ c3 ^ np.uint64(key1),
            product0 & low,
        )
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFFFFFF, (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3])


def documented_keep_mask(seed: Tensor, shape: tuple[int, ...], dropout_p: float) -> Tensor:
    """The mapping in numpy, weight by weight.

    Rows and columns of an aligned 16 x 16 block fall into groups {2a, 2a+1, 2a+8, 2a+9}; the call
    with counter (i // 16 * 4 + a, j // 16 * 4 + b, b * H + h, offset) gives the bytes of the 4 x 4
    group (a, b), byte 4 * row + column. Dropped where the byte is below round(256 p).
    """
    batch, heads, length, keys = shape
    first, offset = (number & 0xFFFFFFFFFFFFFFFF for number in seed.tolist())

    def group_and_member(index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        place = index % 16
        return index // 16 * 4 + place % 8 // 2, place % 2 + 2 * (place // 8)

    head, i, j = np.meshgrid(
        np.arange(batch * heads), np.arange(length), np.arange(keys), indexing="ij"
    )
    (row_group, row), (column_group, column) = group_and_member(i), group_and_member(j)
    counter = np.stack([row_group, column_group, head, np.full_like(head, offset & 0xFFFFFFFF)])
    words = philox4x32_7(counter.reshape(4, -1), first)
    byte_index = (4 * row + column).ravel()
    word = words[byte_index // 4, np.arange(byte_index.size)]
    byte = word >> (8 * (byte_index % 4)).astype(np.uint64) & np.uint64(255)
    threshold = min(math.floor(256 * dropout_p + 0.5), 255)
    return torch.from_numpy(byte >= threshold).view(shape)


def test_philox_gives_the_known_answers_of_its_authors() -> None:
    """Random123's kat_vectors, philox4x32 with 7 rounds: all bits 0, all bits 1."""
    answers = [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    of_ones = [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]
    for bit, words in ((0, answers), (1, of_ones)):
        counter = np.full((4, 1), bit * 0xFFFFFFFF, dtype=np.uint64)
        assert philox4x32_7(counter, bit * 0xFFFFFFFFFFFFFFFF).ravel().tolist() == words


@pytest.mark.parametrize("dropout_p", [0.001, 0.002, 0.1, 0.25, 0.5, 0.9, 0.999])
@pytest.mark.parametrize(
    ("seed", "offset"), [(0, 0), (1, 2), (2**62 + 12345, 2**61 + 6789), (-1, -1), (2**32, 2**32)]
)
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 1), (2, 3, 16, 16), (1, 2, 37, 65), (3, 1, 70, 15), (0, 2, 3, 4), (2, 2, 3, 0)],
)
def test_mask_is_the_documented_function_of_seed_and_position(shape, seed, offset, dropout_p):
    numbers = torch.tensor([seed, offset])
    expected = documented_keep_mask(numbers, shape, dropout_p)
    assert torch.equal(dropout_keep_mask(numbers, shape, dropout_p), expected)


def test_a_256th_is_kept_at_least_and_dropped_at_least() -> None:
    for dropout_p in (0.0, 0.001):
        none = {"dropout_p": dropout_p, "dropout_seed": torch.tensor([3, 4])}
        assert torch.equal(attention(**SHAPE.arguments() | none), attention(**SHAPE.arguments()))
    arguments = SHAPE.arguments() | {"dropout_p": 0.999, "dropout_seed": torch.tensor([1, 1])}
    found = weights(**of_weights(arguments))
    plain = weights(**of_weights(arguments | {"dropout_p": 0.0}))
    kept = found != 0
    assert 0 < kept.sum() < 0.01 * kept.numel()
    assert_close(found[kept], 256 * plain[kept], 1e-14)
    assert attention(**arguments).isfinite().all()


def test_torchs_seed_makes_calls_repeat_and_without_one_they_differ() -> None:
    call: Arguments = SHAPE.arguments() | {"dropout_p": 0.5}
    for operator in (attention, lambda value, **rest: weights(**rest)):
        torch.manual_seed(0)
        first, second = operator(**call), operator(**call)
        torch.manual_seed(0)
        assert_identical([operator(**call), operator(**call)], [first, second])
        assert (first != second).any()


def test_drawn_seeds_are_int64_pairs_that_follow_torchs_generator() -> None:
    torch.manual_seed(3)
    attention(**SHAPE.arguments())  # which draws nothing
    weights(**of_weights(SHAPE.arguments()))
    first, second = draw_dropout_seed(), draw_dropout_seed()
    torch.manual_seed(3)
    assert torch.equal(draw_dropout_seed(), first)
    assert not torch.equal(first, second)
    assert (first.dtype, first.shape) == (torch.int64, (2,))


def test_backward_uses_the_mask_of_its_forward() -> None:
    """Other masks may be drawn in between."""
    call = SHAPE.arguments() | {"dropout_p": 0.5}
    call["value"].requires_grad_()
    torch.manual_seed(1)
    seed = draw_dropout_seed()
    torch.manual_seed(1)
    output = attention(**call)
    attention(**(SHAPE.arguments() | {"dropout_p": 0.5}))
    (found,) = torch.autograd.grad(output, call["value"], direction(output))
    expected = gradients(attention, SHAPE.arguments() | {"dropout_p": 0.5, "dropout_seed": seed})
    assert_identical([found], [expected["value"]])


def test_a_seed_may_be_a_strided_view() -> None:
    numbers = torch.tensor([1, -7, 2, -7])
    dense, strided = torch.tensor([1, 2]), numbers[::2]
    call = SHAPE.arguments() | {"dropout_p": 0.5}
    first, second = (attention(**(call | {"dropout_seed": seed})) for seed in (dense, strided))
    assert_identical([first], [second])
    assert torch.equal(
        dropout_keep_mask(strided, (1, 1, 9, 9), 0.5), dropout_keep_mask(dense, (1, 1, 9, 9), 0.5)
    )


def test_the_authors_dropout_of_norms_happens_only_where_asked() -> None:
    arguments = SHAPE.arguments()
    reference = ikattn.reference.implicit_kernel_attention
    assert_close(reference(**arguments, norm_dropout_p=0.0), attention(**arguments), 1e-13)
    torch.manual_seed(0)
    dropped = reference(**arguments, norm_dropout_p=0.1)
    assert error(dropped, attention(**arguments)) > 1e-4
    torch.manual_seed(0)
    assert torch.equal(reference(**arguments, norm_dropout_p=0.1), dropped)


def test_a_mask_without_numbers_takes_no_time_whatever_its_sizes_are() -> None:
    made = torch.ops.ikattn.dropout_keep_mask(torch.tensor([1, 2]), 1, 1, 2**62, 0, 0.5)
    assert made.shape == (1, 1, 2**62, 0)
