"""Masks that are the same for every query: a bias of the keys, whatever their form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ikattn
from agreement import (
    assert_close,
    assert_identical,
    gradients,
    in_float64,
)
from devices import on_test_device
from samples import Arguments, Sample, name_of

attention = on_test_device(ikattn.implicit_kernel_attention)
weights = on_test_device(ikattn.implicit_kernel_weights)
reference = ikattn.reference.implicit_kernel_attention

SIZES: dict[str, Any] = {"B": 2, "H": 4, "L": 70, "S": 150, "d": 16, "d_v": 10, "M": 9}
GROUPED: dict[str, Any] = SIZES | {"G": 2, "frequencies": "G"}
# Every form, alone and beside a bias of the keys.
FORMS = (
    Sample("keys alone", **SIZES, mask="S"),
    Sample("padding", **SIZES, mask="B11S", key_bias="BHS"),
    Sample("padding of a causal call", **SIZES, mask="B11S", is_causal=True),
    Sample("float padding", **SIZES, mask="B11S", mask_kind="float with -inf"),
    Sample("float padding, causal", **SIZES, mask="11S", mask_kind="float", is_causal=True),
    Sample("by head", **SIZES, mask="BH1S", mask_kind="float", key_bias="S"),
    Sample("by head of groups", **GROUPED, mask="1H1S", mask_kind="float", key_bias="BGS"),
    Sample("few queries of groups", **(GROUPED | {"L": 1}), mask="BH1S", key_bias="BGS"),
    Sample("groups alike", **GROUPED, mask="B11S", mask_kind="float", key_bias="BHS"),
    Sample("one number", **GROUPED, mask="BH11", mask_kind="float"),
    Sample("repeated by strides", **SIZES, mask="B1LS", layout="expanded tokens", key_bias="S"),
    Sample("heads repeated by strides", **GROUPED, mask="BH1S", layout="expanded heads"),
    Sample(
        "repeated heads, a bias", **GROUPED, mask="BH1S", layout="expanded heads", key_bias="BGS"
    ),
    Sample("dropped", **SIZES, mask="B11S", dropout_p=0.3),
    Sample("one query", **(SIZES | {"L": 1}), mask="BHLS", mask_kind="float", key_bias="BHS"),
    Sample("wide bias", **SIZES, mask="B11S", mask_kind="float", key_bias="S", float32_sides=True),
)


def by_pair(arguments: Arguments) -> Arguments:
    """Returns the call with a mask that holds every pair."""
    (B, H, L), S = arguments["query"].shape[:3], arguments["key"].shape[2]
    return arguments | {"attn_mask": arguments["attn_mask"].expand(B, H, L, S).contiguous()}


@pytest.mark.parametrize("sample", FORMS, ids=name_of)
def test_weights_are_those_of_a_mask_of_pairs(sample: Sample) -> None:
    call = {name: x for name, x in sample.arguments().items() if name != "value"}
    assert_close(weights(**call), weights(**by_pair(call)), 1e-13)
    names = [name for name in ("query", "key", "w1", "key_bias") if call[name] is not None]
    if call["attn_mask"].is_floating_point():
        assert gradients(weights, call, ["attn_mask"])["attn_mask"].shape == call["attn_mask"].shape
    found = gradients(weights, call, names)
    for name, expected in gradients(weights, by_pair(call), names).items():
        assert_close(found[name], expected, 1e-12, name, scale=1e-3)


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


def test_hidden_keys_may_hold_anything_and_a_row_may_see_none() -> None:
    call = Sample("anything", **SIZES, mask="B11S").arguments()
    call["attn_mask"][1] = False
    clean = attention(**call)
    hidden = ~call["attn_mask"].mT
    for name in ("key", "value"):
        call[name] = call[name].masked_fill(hidden, torch.nan)
    assert_identical([attention(**call)], [clean])
    assert not clean[1].any()
    found = gradients(attention, call)
    assert all(x.isfinite().all() for x in found.values())
    assert not found["query"][1].any()


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
