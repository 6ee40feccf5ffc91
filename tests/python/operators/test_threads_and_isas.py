"""Every number of threads and every run give equal bits; every instruction set is right."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import ikattn
from agreement import assert_identical, gradients
from processors import INSTRUCTION_SETS, SIXTEEN_BITS, processor_flags
from programs import run
from samples import DTYPES, FEW, Sample, of_features, of_weights
from tiers import each_call

THREADS = (2, 3, 7)

# All large enough to be worth a thread; every way to share out the work.
LARGE = (
    Sample("one long head", B=1, H=1, L=1000, S=1000),
    Sample("one long causal head", B=1, H=1, L=1000, S=1000, is_causal=True, M=33),
    Sample("one long masked head", B=1, H=1, L=600, S=900, mask="L1", mask_kind="float"),
    Sample("many short heads", B=8, H=8, L=64, S=64, key_bias="1S"),
    Sample("a few heads", B=1, H=3, L=200, S=333, d=64, d_v=64, M=64),
    Sample("grouped heads", B=1, H=8, G=2, L=300, S=301, frequencies="G", is_causal=True),
    Sample("grouped heads, own w", B=2, H=4, G=2, L=150, S=200, frequencies="BH"),
    Sample("mask shared by all", B=2, H=3, L=200, S=210, mask="LS", mask_kind="float"),
    Sample("mask shared by heads and rows", B=3, H=4, L=150, S=210, mask="B11S", mask_kind="float"),
    Sample("mask shared by columns", B=2, H=3, L=200, S=260, mask="1HL1", mask_kind="float"),
    Sample("mask of one number", B=2, H=3, L=200, S=260, mask="1", mask_kind="float"),
    Sample("large dropout", B=2, H=2, L=200, S=300, dropout_p=0.3),
    # so few queries that threads share their keys
    Sample("few queries", B=1, H=1, L=48, S=3000),
    Sample("few queries, float mask", B=1, H=1, L=60, S=2200, mask="LS", mask_kind="float"),
    Sample("few causal queries, dropout", B=1, H=1, L=90, S=2100, is_causal=True, dropout_p=0.1),
)


def everything(sample: Sample, dtype: torch.dtype) -> list[Tensor]:
    """All results and gradients of all operators on one sample."""
    arguments = sample.arguments(dtype)
    weights, averaged = (
        ikattn.implicit_kernel_weights(**of_weights(arguments), average_heads=average)
        for average in (False, True)
    )
    frequencies = arguments["w1"].repeat_interleave(
        sample.H // arguments["w1"].shape[-3], -3
    )  # spectral_features has no groups
    features = of_features(arguments | {"w1": frequencies, "w2": None})
    return [
        ikattn.implicit_kernel_attention(**arguments),
        *gradients(ikattn.implicit_kernel_attention, arguments).values(),
        weights,
        averaged,
        *gradients(ikattn.implicit_kernel_weights, of_weights(arguments)).values(),
        ikattn.ops.spectral_features(**features),
        *gradients(ikattn.ops.spectral_features, features, ["x", "w1"]).values(),
    ]


@pytest.mark.usefixtures("threads")
@each_call(LARGE, dtype=DTYPES)
def test_results_are_bitwise_the_same_for_every_number_of_threads(sample, dtype):
    torch.set_num_threads(1)
    expected = everything(sample, dtype)
    for number in THREADS:
        torch.set_num_threads(number)
        assert_identical(everything(sample, dtype), expected)


@pytest.mark.usefixtures("threads")
def test_calls_from_several_threads_at_once_do_not_disturb_each_other() -> None:
    torch.set_num_threads(2)
    samples = (*FEW, *LARGE[3:6]) * 3
    expected = {sample.name: everything(sample, torch.float32) for sample in samples}
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda sample: everything(sample, torch.float32), samples)
        for sample, results in zip(samples, found, strict=True):
            assert_identical(results, expected[sample.name])


class Attended(Dataset[Tensor]):
    """Items computed by the operator, forward and backward, in the process that loads them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.cat([x.flatten() for x in everything(LARGE[index], torch.float32)])


@pytest.mark.usefixtures("threads")
def test_a_forked_worker_computes_after_its_parent_did() -> None:
    torch.set_num_threads(2)
    expected = [Attended()[index] for index in range(4)]
    loader = DataLoader(
        Attended(),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="fork",
        timeout=60,  # a worker that hangs is an error, not a wait
    )
    assert_identical(list(loader), expected)


def in_process(variable: str, name: str, *command: str) -> subprocess.CompletedProcess[str]:
    """A command of Python in a process told what instructions to use (skips without them)."""
    wanted = {**{name: flags for name, (_, flags) in INSTRUCTION_SETS.items()}, **SIXTEEN_BITS}
    if missing := set(wanted[name]) - processor_flags():
        pytest.skip(f"the processor lacks {', '.join(sorted(missing))}")
    environment = os.environ | {variable: name, "OMP_NUM_THREADS": "1"}
    environment = {n: x for n, x in environment.items() if not n.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, timeout=300
    )


@pytest.mark.parametrize(
    ("variable", "name", "operator", "answer"),
    [("ATEN_CPU_CAPABILITY", x, "instruction_set", y[0]) for x, y in INSTRUCTION_SETS.items()]
    + [("IKATTN_SIXTEEN_BITS", x, "sixteen_bit_instructions", x) for x in SIXTEEN_BITS],
)
def test_a_process_uses_the_instructions_it_is_told_to(variable, name, operator, answer):
    program = f"import torch, ikattn; print(torch.ops.ikattn.{operator}())"
    assert in_process(variable, name, "-c", program).stdout.strip() == answer


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("IKATTN_SIXTEEN_BITS", "bf16", "must be none, avx512_vnni, avx512_bf16 or amx, got bf16"),
        ("IKATTN_SIXTEEN_BITS", "", None),  # as where it is unset
        ("IKATTN_LINEAR_TIME", "sometimes", "must be auto, never or always, got sometimes"),
        ("IKATTN_DETERMINISTIC", "always", "must be run or batch, got always"),
    ],
)
def test_settings_of_no_such_name_are_refused(variable: str, value: str, message: str | None):
    program = """import torch, ikattn
ikattn.info()
print(torch.ops.ikattn.sixteen_bit_instructions())"""
    told = run(sys.executable, "-c", program, cwd=Path.cwd(), **{variable: value})
    if message is None:
        assert told.stdout.strip() == torch.ops.ikattn.sixteen_bit_instructions()
    else:
        assert f"{variable} {message}" in told.stderr
