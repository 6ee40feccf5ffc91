"""How much memory the operators take: never the [L, S] matrix. Each measure is a process."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from programs import run_checked

# Peak resident memory above what was resident before the call, less its results, in MB. A small
# call goes first, so that loading libraries and starting threads is not counted.
PROGRAM = """
import re
from pathlib import Path
import torch
import ikattn

torch.manual_seed(0)
torch.set_num_threads({threads})

def inputs(B, H, N, d, M, requires_grad):
    tokens = [torch.randn(B, H, N, d) for _ in range(3)]
    frequencies = [0.1 * torch.randn(H, d, M) for _ in range(2)]
    return [x.requires_grad_(requires_grad) for x in tokens + frequencies]

def forward(tensors):
    return [ikattn.implicit_kernel_attention(*tensors, is_causal={causal})]

def backward(tensors):
    output = ikattn.implicit_kernel_attention(*tensors, is_causal={causal})
    return [output, *torch.autograd.grad(output, tensors, torch.ones_like(output))]

def average_weights(tensors):
    query, key, _, w1, w2 = tensors
    return [ikattn.implicit_kernel_weights(query, key, w1, w2, average_heads=True)]

def step_with_weights(tensors):
    x = tensors[0].transpose(1, 2).flatten(2)[..., :64].repeat(1, 1, 8)
    output, weights = module(x, x, x)
    loss = output.sum() + weights.square().sum()
    return [output, weights, *torch.autograd.grad(loss, list(module.parameters()))]

module = ikattn.MultiheadAttention(512, 8, batch_first=True, p=3.0)

def megabytes(field):
    status = Path("/proc/self/status").read_text()
    return int(re.search(field + r":\\s+(\\d+) kB", status)[1]) / 1024

call, needs_grad = {function}, {function} is backward
call(inputs(1, 2, 300, 64, 64, needs_grad))
tensors = inputs(1, 8, {N}, 64, 64, needs_grad)
before = megabytes("VmRSS")
results = call(tensors)
held = sum(x.numel() * x.element_size() for x in results) / 2**20
print(megabytes("VmHWM") - before - held)
"""

needs_resident_memory = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc/self/status"
)
pytestmark = [pytest.mark.full, needs_resident_memory]


def megabytes_above_results(function: str, N: int, threads: int = 1, causal: bool = False) -> float:
    program = PROGRAM.format(function=function, N=N, threads=threads, causal=causal)
    # Memory freed goes back at once, or what was freed before would hide what is taken now.
    environment = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    return float(run_checked(sys.executable, "-c", program, cwd=Path.cwd(), **environment))


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_forward_over_8192_tokens_takes_60_megabytes(causal: bool, threads: int) -> None:
    assert megabytes_above_results("forward", 8192, threads, causal) < 60


def test_memory_of_the_backward_grows_with_the_length_not_its_square() -> None:
    short, long = (megabytes_above_results("backward", N) for N in (1024, 4096))
    matrix = 8 * 4096**2 * 4 / 2**20  # [H, L, S] in float32
    assert long < 0.4 * matrix
    assert long < 4.5 * short + 10


def test_average_weights_never_hold_those_of_every_head() -> None:
    matrix = 8 * 2048**2 * 4 / 2**20
    assert megabytes_above_results("average_weights", 2048) < 0.4 * matrix


def test_a_training_step_with_weights_never_holds_those_of_every_head() -> None:
    matrix = 8 * 4096**2 * 4 / 2**20
    assert megabytes_above_results("step_with_weights", 4096) < 0.6 * matrix


def test_the_benchmarks_own_measure_of_a_long_forward_is_as_small(source_tree: Path) -> None:
    program = source_tree / "benchmarks" / "attention.py"
    options = ("--memory-of", "ikattn", "--lengths", "8192")
    printed = run_checked(sys.executable, program, *options, cwd=source_tree)
    measured = re.search(r": *([\d.]+) ", printed)
    assert measured is not None, printed
    assert 0 < float(measured[1]) < 60
