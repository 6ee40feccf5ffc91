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
LONG = (
    Sample("one frequency", B=1, L=130, S=130, M=1, d=1, d_v=1),
    Sample("few tokens, many heads", B=3, H=8, L=200, S=200, M=4),
    Sample("no whole vectors", B=1, L=601, S=599, M=9, d=13, d_v=11),
    Sample("wide values", B=1, H=1, L=700, S=700, M=10, d=24, d_v=130),
    Sample("more features than values", B=1, H=1, L=950, S=950, M=20, d=24, d_v=16),
    Sample("more queries", B=1, L=1500, S=300, M=7, d=32, d_v=20),
    Sample("more keys", B=1, L=300, S=1500, M=7, d=32, d_v=20),
    Sample("stationary", B=1, L=500, S=500, stationary=True),
    Sample("no magnitude, hardly any eps", B=1, L=500, S=500, p=None, eps=1e-12),
    Sample("large magnitude", B=1, L=500, S=500, magnitude_scale=2.0),
    Sample("biased keys", H=3, L=400, S=400, key_bias="BHS"),
    Sample("grouped heads", B=1, H=4, G=2, L=300, S=500, frequencies="G", key_bias="BGS"),
    Sample("padded", H=3, L=400, S=400, mask="B11S"),
    Sample(
        "a float mask of the keys",
        B=1,
        H=4,
        G=2,
        L=300,
        S=500,
        frequencies="G",
        mask="BH1S",
        mask_kind="float with -inf",
        key_bias="BGS",
    ),
    Sample("grouped heads, own frequencies", H=4, G=2, L=300, S=500, frequencies="BH"),
    Sample("columns", L=500, S=500, layout="columns"),
)

# Lengths from a few chunks of 128 tokens on.
CAUSAL = tuple(
    replace(sample, is_causal=True)
    for sample in (
        Sample("one frequency, causal", B=1, L=300, S=300, M=1, d=1, d_v=1),
        Sample("many heads, causal", B=3, H=8, L=400, S=400, M=4),
        Sample("no whole vectors, causal", B=1, L=961, S=959, M=9, d=13, d_v=11),
        Sample("wide values, causal", B=1, H=1, L=500, S=500, M=5, d=24, d_v=130),
        Sample("more features than values, causal", B=1, H=1, L=900, S=900, M=10, d=24, d_v=16),
        Sample("more queries, causal", B=1, L=1100, S=513, M=5, d=32, d_v=20),
        Sample("more keys, causal", B=1, L=513, S=1100, M=4, d=32, d_v=20),
        Sample("whole chunks, causal", B=1, L=512, S=512, M=4),
        Sample("stationary, causal", B=1, L=500, S=500, M=4, stationary=True),
        Sample("hardly any eps, causal", B=1, L=500, S=500, M=4, p=None, eps=1e-12),
        Sample("much eps, causal", B=1, L=500, S=500, M=4, eps=1.0),
        Sample("large magnitude, causal", B=1, L=500, S=500, M=4, magnitude_scale=2.0),
        Sample("biased keys, causal", H=3, L=500, S=500, M=4, key_bias="BHS"),
        Sample("padded, causal", H=3, L=500, S=500, M=4, mask="B11S"),
        Sample(
            "grouped, causal", B=1, H=4, G=2, L=600, S=600, M=4, frequencies="G", key_bias="BGS"
        ),
        Sample("columns, causal", L=500, S=500, M=4, layout="columns"),
    )
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


@pytest.mark.operators
@each_call(LONG + CAUSAL, dtype=DTYPES)
def test_long_calls_are_as_accurate_as_the_reference(sample: Sample, dtype: torch.dtype) -> None:
    arguments = sample.arguments(dtype)
    assert_output_accurate(
        attention(**arguments), reference(**arguments), in_float64(reference, arguments)
    )
    assert_call_accurate(attention, reference, arguments)


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


@pytest.mark.parametrize("sample", [LONG[2], CAUSAL[2]], ids=name_of)
def test_values_far_from_zero_leave_gradients_their_digits(sample: Sample) -> None:
    arguments = sample.arguments(torch.float32)
    arguments["value"] += 100
    assert_call_accurate(attention, reference, arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_hidden_keys_do_not_count(dtype: torch.dtype) -> None:
    arguments = Sample("hidden", L=600, S=700, key_bias="B1S").arguments(dtype)
    arguments["key_bias"][0, :, 500:] = -torch.inf
    arguments["key_bias"][1] = -torch.inf  # all of them
    expected = [attention(**arguments), *gradients(attention, arguments).values()]
    arguments["key"][0, :, 500:] = torch.nan
    arguments["value"][0, :, 500:] = torch.inf
    found = [attention(**arguments), *gradients(attention, arguments).values()]
    assert_identical(found, expected)
    assert (found[0][1] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_spoilt_query_spoils_itself_and_the_keys_it_sees(dtype: torch.dtype) -> None:
    arguments = Sample("spoilt query", B=1, H=2, L=600, S=700, key_bias="1S").arguments(dtype)
    arguments["key_bias"][:, 650:] = -torch.inf
    expected = attention(**arguments)
    expected_gradients = gradients(attention, arguments)
    arguments["query"][0, 1, 300, 0] = torch.nan
    others = torch.ones(1, 2, 600, dtype=torch.bool)
    others[0, 1, 300] = False
    output, found = attention(**arguments), gradients(attention, arguments)
    assert_identical([output[others]], [expected[others]])
    assert output[~others].isnan().all()
    assert_identical([found["query"][others]], [expected_gradients["query"][others]])
    assert found["query"][~others].isnan().all()
    for name in ("key", "value"):
        assert found[name][0, 1, :650].isnan().all()
        assert (found[name][0, 1, 650:] == 0).all()
        assert_identical([found[name][0, 0]], [expected_gradients[name][0, 0]])


@pytest.mark.parametrize("number", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("name", ["key", "value"])
def test_a_spoilt_key_spoils_its_head(name: str, number: float) -> None:
    arguments = Sample("spoilt key", B=1, H=2, L=600, S=700).arguments(torch.float32)
    expected = attention(**arguments)
    arguments[name][0, 1, 300, 0] = number
    output = attention(**arguments)
    assert_identical([output[:, 0]], [expected[:, 0]])
    assert output[:, 1].isnan().all()


# --- Causal ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=name_of)
def test_what_comes_later_does_not_count(dtype: torch.dtype) -> None:
    """Neither later tokens nor how large they are: an output keeps its digits beside them."""
    arguments = CAUSAL[1].arguments(dtype)
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


def test_gradients_come_only_from_later_queries() -> None:
    arguments = CAUSAL[1].arguments(torch.float64)
    leaves = {name: arguments[name].requires_grad_() for name in ("key", "value")}
    output = attention(**arguments)
    found = torch.autograd.grad(output[:, :, :300].square().sum(), leaves.values())
    for gradient in found:
        assert gradient[:, :, :300].abs().amin(dim=(0, 1, 3)).gt(0).any()
        assert (gradient[:, :, 300:] == 0).all()


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


@each(("spoilt",), [(spoilt,) for spoilt in (0, 127, 128, 300, 599)], {"dtype": DTYPES})
def test_a_spoilt_query_spoils_the_keys_before_it(spoilt: int, dtype: torch.dtype) -> None:
    sample = Sample("spoilt, causal", B=1, H=2, L=600, S=600, M=4, key_bias="1S", is_causal=True)
    arguments = sample.arguments(dtype)
    arguments["key_bias"][:, 10:60] = -torch.inf
    expected = attention(**arguments)
    expected_gradients = gradients(attention, arguments)
    arguments["query"][0, 1, spoilt, 0] = torch.nan
    others = torch.ones(1, 2, 600, dtype=torch.bool)
    others[0, 1, spoilt] = False
    output, found = attention(**arguments), gradients(attention, arguments)
    assert_identical([output[others]], [expected[others]])
    assert output[~others].isnan().all()
    assert_identical([found["query"][others]], [expected_gradients["query"][others]])
    assert found["query"][~others].isnan().all()
    for name in ("key", "value"):
        gradient = found[name][0, 1]
        assert gradient[: min(10, spoilt + 1)].isnan().all()
        assert (gradient[10:60] == 0).all()
        assert gradient[60 : spoilt + 1].isnan().all()
        assert gradient[spoilt + 1 :].isfinite().all()
        assert_identical([found[name][0, 0]], [expected_gradients[name][0, 0]])


@pytest.mark.parametrize("name", ["key", "value"])
def test_a_spoilt_key_spoils_the_queries_after_it(name: str) -> None:
    arguments = CAUSAL[1].arguments(torch.float32)
    expected = attention(**arguments)
    arguments[name][0, 1, 300, 0] = torch.inf
    output = attention(**arguments)
    assert_identical([output[1:]], [expected[1:]])
    assert output[0, 1, 300:].isnan().all()
    torch.testing.assert_close(output[0, 1, :300], expected[0, 1, :300], rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("threads")
@each_call(CAUSAL)
def test_every_number_of_threads_gives_the_same_bits(sample: Sample) -> None:
    arguments, found = sample.arguments(torch.float32), []
    for number in (1, 2, 7):
        torch.set_num_threads(number)
        found.append([attention(**arguments), *gradients(attention, arguments).values()])
    for other in found[1:]:
        assert_identical(other, found[0])


# --- The setting ----------------------------------------------------------------------------------


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
