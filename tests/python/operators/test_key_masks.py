"""Masks that are the same for every query: a bias of the keys, whatever their form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ikattn
from agreement import assert_close, assert_identical, gradients, in_float64
from devices import on_test_device
from samples import Arguments, Sample

attention = on_test_device(ikattn.implicit_kernel_attention)
reference = ikattn.reference.implicit_kernel_attention

SIZES: dict[str, Any] = {"B": 2, "H": 4, "L": 70, "S": 150, "d": 16, "d_v": 10, "M": 9}


def by_pair(arguments: Arguments) -> Arguments:
    """Returns the call with a mask that holds every pair."""
    (B, H, L), S = arguments["query"].shape[:3], arguments["key"].shape[2]
    return arguments | {"attn_mask": arguments["attn_mask"].expand(B, H, L, S).contiguous()}


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_mask_of_keys_is_a_bias_of_keys_bit_by_bit(is_causal: bool) -> None:
    call = Sample("bits", **SIZES, mask="B11S", is_causal=is_causal).arguments(torch.float32)
    shown = call["attn_mask"]
    bias = torch.zeros(shown.shape).masked_fill(~shown, -torch.inf)
    as_bias = call | {"attn_mask": None, "key_bias": bias[:, :, 0]}
    names = ["query", "key", "value", "w1", "w2"]
    for mask in (shown, bias, shown.expand(-1, -1, SIZES["L"], -1)):
        own = call | {"attn_mask": mask}
        assert_identical([attention(**own)], [attention(**as_bias)])
        assert_identical(
            gradients(attention, own, names).values(), gradients(attention, as_bias, names).values()
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_lowest_numbers_hide_beside_a_large_bias(dtype: torch.dtype) -> None:
    sample = Sample("lowest", **SIZES, mask="B11S", mask_kind="float", key_bias="BHS")
    call = sample.arguments(dtype)
    hide = torch.arange(SIZES["S"]) % 3 == 0
    call["attn_mask"] = call["attn_mask"].masked_fill(hide, torch.finfo(dtype).min)
    gone = call | {"attn_mask": call["attn_mask"].masked_fill(hide, -torch.inf)}
    # Large parts that cancel: one sum of float32 would lose the small ones.
    far = call | {"attn_mask": call["attn_mask"] - 2.0**20, "key_bias": call["key_bias"] + 2.0**20}
    tolerance = 2 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else 1e-6
    assert_close(attention(**call), attention(**gone), tolerance)
    assert_close(attention(**far), in_float64(reference, far), tolerance)


def test_batch_invariant_calls_know_no_masks_of_keys() -> None:
    call = Sample("invariant", **SIZES, mask="B11S", mask_kind="float").arguments(torch.float32)
    last = call | {"query": call["query"][:, :, -1:]}
    with ikattn.deterministic("batch"):
        assert_identical([attention(**last)], [attention(**by_pair(call))[:, :, -1:]])
