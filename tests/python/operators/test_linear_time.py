"""Attention in linear time: as accurate, and taken where it is faster."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ikattn
from agreement import (
    assert_call_accurate,
    assert_gradients_accurate,
    assert_identical,
    assert_output_accurate,
    direction,
    gradients,
    in_float64,
)
from programs import run_checked
from samples import DTYPES, Arguments, Sample, converted, name_of
from tiers import each, each_call

SUPPORT = Path(__file__).parents[1] / "support"
attention = ikattn.implicit_kernel_attention
reference = ikattn.reference.implicit_kernel_attention

# Long enough for their features (csrc/attention/calls/linear_time.h), forward and backward.
LONG = Sample("no whole vectors", B=1, L=601, S=599, M=9, d=13, d_v=11)
# Lengths of some chunks of 128 tokens.
MANY_HEADS = Sample("many heads, causal", B=3, H=8, L=400, S=400, M=4, is_causal=True)
CAUSAL = (
    MANY_HEADS,
    replace(LONG, name="no whole vectors, causal", L=961, S=959, is_causal=True),
    Sample("wide values, causal", B=1, H=1, L=500, S=500, M=5, d_v=130, is_causal=True),
    Sample("padded, causal", H=3, L=500, S=500, M=4, mask="B11S", is_causal=True),
)


def is_far(sample: Sample) -> Tensor:
    """Tells the queries that ``spread`` puts far from all keys."""
    return torch.arange(sample.L).remainder(3).eq(0)


def spread(sample: Sample, dtype: torch.dtype, distance: float) -> Arguments:
    """Some of the queries far from all keys, where scores are small against features."""
    arguments = sample.arguments(torch.float64)
    far = is_far(sample).unsqueeze(-1)
    query, key = 0.2 * arguments["query"], 0.2 * arguments["key"] - distance
    arguments["query"] = torch.where(far, query + distance, query - distance)
    arguments["key"] = key
    arguments["w1"], arguments["w2"] = 0.3 * arguments["w1"], 0.3 * arguments["w2"]
    return {name: x.to(dtype) if isinstance(x, Tensor) else x for name, x in arguments.items()}


@each(
    ("distance",),
    [(distance,) for distance in (1.0, 3.0, 4.0, 6.0)],
    {"dtype": [torch.float64, torch.float32]},
)
def test_queries_far_from_all_keys_keep_their_digits(distance: float, dtype: torch.dtype) -> None:
    sample = Sample("far", B=1, H=1, L=1300, S=1300, M=16, d=16, d_v=16)
    arguments = spread(sample, dtype, distance)
    assert_output_accurate(
        attention(**arguments), reference(**arguments), in_float64(reference, arguments)
    )
    assert_call_accurate(attention, reference, arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=name_of)
@pytest.mark.parametrize("distance", [2.0, 5.0])
def test_late_queries_far_from_all_keys_keep_their_digits(distance, dtype):
    """The first rows of a causal call, of few keys, err most, whoever computes them."""
    sample = Sample("far", B=1, H=1, L=1500, S=1500, M=16, d=16, d_v=16, is_causal=True)
    arguments = spread(sample, dtype, distance)
    rows = torch.arange(1500)
    rows = rows[is_far(sample) & (rows >= 1000)]
    output = attention(**arguments)
    assert_output_accurate(
        output[:, :, rows],
        reference(**arguments)[:, :, rows],
        in_float64(reference, arguments)[:, :, rows],
    )
    incoming = torch.zeros_like(output)
    incoming[:, :, rows] = direction(output)[:, :, rows]
    found, single = (gradients(f, arguments, None, incoming) for f in (attention, reference))
    exact = gradients(reference, converted(arguments, torch.float64), None, incoming.double())
    assert_gradients_accurate(found, single, exact, dict.fromkeys(found, 0.0), dtype)


@pytest.mark.parametrize("sample", [LONG, CAUSAL[1]], ids=name_of)
def test_values_far_from_zero_leave_gradients_their_digits(sample: Sample) -> None:
    arguments = sample.arguments(torch.float32)
    arguments["value"] += 100
    assert_call_accurate(attention, reference, arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=name_of)
def test_what_comes_later_does_not_count(dtype: torch.dtype) -> None:
    """Neither later tokens nor how large they are: an output keeps its digits beside them."""
    arguments = MANY_HEADS.arguments(dtype)
    expected = in_float64(reference, arguments)[:, :, :300]
    single = reference(**arguments)[:, :, :300]
    for name, factor in (("value", 1e4), ("key", 3.0), ("query", 2.0)):
        arguments[name][:, :, 300:] *= factor
        arguments[name][:, :, 300:] += 1
    assert_output_accurate(attention(**arguments)[:, :, :300], single, expected)


@pytest.mark.parametrize("case", ["large and hardly seen", "after padding"])
def test_first_values_unlike_the_others_leave_later_keys_their_digits(case: str) -> None:
    sample = Sample("first values", B=1, H=1, L=900, S=900, M=4, key_bias="1S", is_causal=True)
    arguments = sample.arguments(torch.float32)
    if case == "after padding":
        arguments["key_bias"][:, :127] = -torch.inf
        arguments["value"][:, :, 127] *= 300
    else:
        arguments["key_bias"][:, :128] = -10
        arguments["value"][:, :, :128] += 1000
    exact, single, found = (
        {name: x[:, :, 256:] for name, x in gradients(f, a, ["query", "key", "value"]).items()}
        for f, a in (
            (reference, converted(arguments, torch.float64)),
            (reference, arguments),
            (attention, arguments),
        )
    )
    assert_gradients_accurate(found, single, exact, dict.fromkeys(found, 0.0), torch.float32)


@each(
    ("visible",),
    [(visible,) for visible in ((0, 500), (100, 600), (128, 600), (200, 600))],
    {"dtype": DTYPES},
)
def test_keys_hidden_before_and_after_do_not_count(visible, dtype):
    """Left padding as decoders have it: the first chunk may hold no visible key at all."""
    sample = Sample("padded", L=600, S=600, M=4, key_bias="B1S", is_causal=True)
    arguments = sample.arguments(dtype)
    begin, end = visible
    arguments["key_bias"][0, :, :begin] = arguments["key_bias"][0, :, end:] = -torch.inf
    assert_output_accurate(
        attention(**arguments), reference(**arguments), in_float64(reference, arguments)
    )
    assert_call_accurate(attention, reference, arguments)
    expected = [attention(**arguments), *gradients(attention, arguments).values()]
    for name, number in (("key", torch.nan), ("value", torch.inf)):
        arguments[name][0, :, :begin] = arguments[name][0, :, end:] = number
    found = [attention(**arguments), *gradients(attention, arguments).values()]
    assert_identical(found, expected)
    assert (found[0][0, :, :begin] == 0).all()


@pytest.mark.usefixtures("threads")
@each_call(CAUSAL)
def test_every_number_of_threads_gives_the_same_bits(sample: Sample) -> None:
    arguments, found = sample.arguments(torch.float32), []
    for number in (1, 2, 7):
        torch.set_num_threads(number)
        found.append([attention(**arguments), *gradients(attention, arguments).values()])
    for other in found[1:]:
        assert_identical(other, found[0])


PROGRAM = """
import sys, torch, ikattn
from agreement import gradients
from samples import Sample
length, is_causal = int(sys.argv[1]), sys.argv[2] == "True"
sample = Sample("long or short", L=length, S=length, is_causal=is_causal)
attention, call = ikattn.implicit_kernel_attention, sample.arguments(torch.float32)
torch.save([attention(**call), *gradients(attention, call).values()], sys.argv[3])
"""


def results(setting: str, length: int, is_causal: bool, folder: Path) -> list[Tensor]:
    file = folder / f"{setting}-{length}.pt"
    environment = {"IKATTN_LINEAR_TIME": setting, "PYTHONPATH": str(SUPPORT)}
    run_checked(sys.executable, "-c", PROGRAM, length, is_causal, file, cwd=folder, **environment)
    return torch.load(file)


@pytest.mark.parametrize(
    ("is_causal", "short", "long"),
    [(False, 40, 700), pytest.param(True, 200, 900, marks=pytest.mark.full)],
    ids=["", "causal"],
)
def test_long_calls_go_without_pairs_unless_they_are_told_not_to(is_causal, short, long, tmp_path):
    found = {
        (setting, length): results(setting, length, is_causal, tmp_path)
        for setting in ("", "never", "always")
        for length in (short, long)
    }
    assert_identical(found["", short], found["never", short])
    assert_identical(found["", long], found["always", long])
    for length, other in ((short, "always"), (long, "")):
        for one, another in zip(found[other, length], found["never", length], strict=True):
            assert not torch.equal(one, another)  # or it was not another way
            torch.testing.assert_close(one, another, rtol=1e-4, atol=1e-5)


def test_info_tells_the_setting(tmp_path: Path) -> None:
    program = "import torch, ikattn; print(ikattn.info())"
    output = run_checked(sys.executable, "-c", program, cwd=tmp_path, IKATTN_LINEAR_TIME="never")
    assert "linear time      never" in output
