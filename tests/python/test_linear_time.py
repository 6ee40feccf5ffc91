"""Attention without pairs: as accurate, and taken where it is faster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ikattn
from agreement import (
    assert_call_accurate,
    assert_identical,
    assert_output_accurate,
    gradients,
    in_float64,
)
from processors import INSTRUCTION_SETS, processor_flags
from programs import run_checked
from samples import DTYPES, Arguments, Sample, name_of

HERE = Path(__file__).parent
attention = ikattn.implicit_kernel_attention
reference = ikattn.reference.implicit_kernel_attention

# Long enough for their features (csrc/attention/linear_time.h), forward and backward.
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
    Sample("grouped heads, own frequencies", H=4, G=2, L=300, S=500, frequencies="BH"),
    Sample("columns", L=500, S=500, layout="columns"),
)


def spread(sample: Sample, dtype: torch.dtype, distance: float) -> Arguments:
    """Some of the queries far from all keys, where scores are small against features."""
    arguments = sample.arguments(torch.float64)
    far = torch.arange(sample.L).remainder(3).eq(0).unsqueeze(-1)
    query, key = 0.2 * arguments["query"], 0.2 * arguments["key"] - distance
    arguments["query"] = torch.where(far, query + distance, query - distance)
    arguments["key"] = key
    arguments["w1"], arguments["w2"] = 0.3 * arguments["w1"], 0.3 * arguments["w2"]
    return {name: x.to(dtype) if isinstance(x, Tensor) else x for name, x in arguments.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("sample", LONG, ids=name_of)
def test_long_calls_are_as_accurate_as_the_reference(sample: Sample, dtype: torch.dtype) -> None:
    arguments = sample.arguments(dtype)
    assert_output_accurate(
        attention(**arguments), reference(**arguments), in_float64(reference, arguments)
    )
    assert_call_accurate(attention, reference, arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=name_of)
@pytest.mark.parametrize("distance", [1.0, 3.0, 4.0, 6.0])
def test_queries_far_from_all_keys_keep_their_digits(distance: float, dtype: torch.dtype) -> None:
    sample = Sample("far", B=1, H=1, L=1300, S=1300, M=16, d=16, d_v=16)
    arguments = spread(sample, dtype, distance)
    assert_output_accurate(
        attention(**arguments), reference(**arguments), in_float64(reference, arguments)
    )
    assert_call_accurate(attention, reference, arguments)


def test_values_far_from_zero_leave_gradients_their_digits() -> None:
    arguments = LONG[2].arguments(torch.float32)
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


# --- The setting ----------------------------------------------------------------------------------


PROGRAM = """
import sys, torch, ikattn
from agreement import gradients
from samples import Sample
call = Sample("long or short", L=int(sys.argv[1]), S=int(sys.argv[1])).arguments(torch.float32)
attention = ikattn.implicit_kernel_attention
torch.save([attention(**call), *gradients(attention, call).values()], sys.argv[2])
"""


def results(setting: str, length: int, folder: Path) -> list[Tensor]:
    file = folder / f"{setting}-{length}.pt"
    environment = {"IKATTN_LINEAR_TIME": setting, "PYTHONPATH": str(HERE)}
    run_checked(sys.executable, "-c", PROGRAM, length, file, cwd=folder, **environment)
    return torch.load(file)


def test_long_calls_go_without_pairs_unless_they_are_told_not_to(tmp_path: Path) -> None:
    found = {
        (setting, length): results(setting, length, tmp_path)
        for setting in ("", "never", "always")
        for length in (40, 700)
    }
    assert_identical(found["", 40], found["never", 40])
    assert_identical(found["", 700], found["always", 700])
    for length, other in ((40, "always"), (700, "")):
        for one, another in zip(found[other, length], found["never", length], strict=True):
            assert not torch.equal(one, another)  # or it was not another way
            torch.testing.assert_close(one, another, rtol=1e-4, atol=1e-5)


def test_other_settings_are_refused(tmp_path: Path) -> None:
    environment = os.environ | {"IKATTN_LINEAR_TIME": "sometimes"}
    run = subprocess.run(
        [sys.executable, "-c", "import torch, ikattn; print(ikattn.info())"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert "must be auto, never or always, got sometimes" in run.stderr


def test_info_tells_the_setting(tmp_path: Path) -> None:
    program = "import torch, ikattn; print(ikattn.info())"
    output = run_checked(sys.executable, "-c", program, cwd=tmp_path, IKATTN_LINEAR_TIME="never")
    assert "linear time      never" in output


@pytest.mark.parametrize("capability", INSTRUCTION_SETS)
def test_every_call_that_can_go_without_pairs_is_right(capability: str, tmp_path: Path) -> None:
    if missing := set(INSTRUCTION_SETS[capability][1]) - processor_flags():
        pytest.skip(f"the processor lacks {', '.join(sorted(missing))}")
    environment = {n: x for n, x in os.environ.items() if not n.startswith("PYTEST_")}
    environment |= {"ATEN_CPU_CAPABILITY": capability, "IKATTN_LINEAR_TIME": "always"}
    files = [str(HERE / f"test_attention_{part}.py") for part in ("values", "gradients", "nan")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        capture_output=True,
        text=True,
        env=environment | {"OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-8000:]
    assert " passed" in run.stdout
    assert "failed" not in run.stdout
