"""Long sequences: digits that long sums must not lose, and keys that cost nothing."""

from __future__ import annotations

import pytest
import torch

import ikattn
from agreement import assert_call_accurate, assert_output_accurate, gradients, in_float64
from samples import Arguments, Sample, name_of

attention = ikattn.implicit_kernel_attention
reference = ikattn.reference.implicit_kernel_attention

# Dropout of next to nothing keeps them with the pairs.
LONG = (
    Sample("many keys", B=1, H=1, L=16, S=12000, d=16, d_v=20, M=24, dropout_p=1e-9),
    Sample("many queries", B=1, H=1, L=12000, S=16, d=16, d_v=20, M=24, dropout_p=1e-9),
    Sample("many causal keys", B=1, H=1, L=1100, S=1100, d=8, d_v=4, M=20, is_causal=True),
    Sample("many keys, float mask", B=1, H=1, L=9, S=5000, mask="LS", mask_kind="float"),
    Sample("many keys, few frequencies", B=1, H=1, L=40, S=12000, d_v=20),
)


@pytest.mark.parametrize("sample", LONG, ids=name_of)
def test_long_sums_are_as_accurate_as_the_references(sample: Sample) -> None:
    arguments = sample.arguments(torch.float32)
    arguments["value"] += 1  # which do not cancel: every rounding of a sum counts
    output, truth = attention(**arguments), in_float64(reference, arguments)
    assert_output_accurate(output, reference(**arguments), truth)
    assert_call_accurate(attention, reference, arguments)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [1, 2])
def test_a_few_heavy_keys_do_not_cost_the_others_digits(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(1, 4, 900, size, generator=generator) for _ in range(2))
    value = torch.randn(1, 4, 900, 16, generator=generator)
    w1, w2 = (0.06 * torch.randn(4, size, 16, generator=generator) for _ in range(2))
    call = {"query": query, "key": 2 * key, "value": value, "w1": w1, "w2": w2}
    assert_output_accurate(attention(**call), reference(**call), in_float64(reference, call))


def hide(arguments: Arguments, begin: int, end: int) -> Arguments:
    """Keys [begin, end) hidden, and NaN."""
    bias = torch.zeros(arguments["key"].shape[2], dtype=torch.float32)
    bias[begin:end] = -torch.inf
    hidden = {name: arguments[name].clone() for name in ("key", "value")}
    for x in hidden.values():
        x[:, :, begin:end] = torch.nan
    return arguments | hidden | {"key_bias": bias}


def without(arguments: Arguments, begin: int, end: int) -> Arguments:
    kept = [*range(begin), *range(end, arguments["key"].shape[2])]
    return arguments | {name: arguments[name][:, :, kept] for name in ("key", "value")}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("frequencies", [2, 40], ids="M={}".format)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize(
    ("begin", "end"), [(100, 700), (64, 256), (0, 512), (0, 700), (600, 700), (65, 127)]
)
def test_hidden_keys_are_as_if_they_were_not_there(begin, end, dtype, frequencies, is_causal):
    sample = Sample("hidden", B=1, L=700, S=700, M=frequencies, d_v=6, is_causal=is_causal)
    whole = hide(sample.arguments(dtype), begin, end)
    found = gradients(attention, whole, ["query", "key", "value", "w1", "w2"])
    for name in ("key", "value"):
        assert not found[name][:, :, begin:end].any(), name
    assert all(x.isfinite().all() for x in found.values())
    if end - begin == 700:
        assert not attention(**whole).any()
    elif is_causal:
        assert_output_accurate(attention(**whole), reference(**whole), in_float64(reference, whole))
    else:
        left = without(whole, begin, end) | {"key_bias": None}
        output, truth = attention(**whole), in_float64(reference, left)
        assert_output_accurate(output, reference(**left), truth)
