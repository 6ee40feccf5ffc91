"""The kernels for AMX on processors without it: its instructions trap and are imitated.

A processor that has AMX runs all of this in test_sixteen_bits.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from processors import AVX512, processor_flags

HERE = Path(__file__).parent
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def imitation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that imitates AMX, compiled."""
    flags = processor_flags()
    if "amx_tile" in flags:
        pytest.skip("this processor has AMX: test_sixteen_bits.py runs it")
    missing = {*AVX512, "avx512_vnni", "avx512_bf16"} - flags
    if missing:
        pytest.skip(f"what is beside AMX is missing: {sorted(missing)}")
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler (c++) to build the imitation of AMX with")
    library = tmp_path_factory.mktemp("amx") / "libimitated_amx.so"
    source = HERE.parent / "cpp/amx/imitated_amx.cpp"
    options = ["-std=c++20", "-O3", "-mavx2", "-mfma", "-fPIC", "-shared"]
    subprocess.run([compiler, *options, "-o", library, source], check=True)
    return library


@pytest.fixture
def run(imitation: Path, tmp_path: Path) -> Run:
    """Python in a process that takes itself to have AMX: it uses it and gives back its tiles."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        count = tmp_path / "products"
        environment = os.environ | {
            "LD_PRELOAD": str(imitation),
            "IKATTN_IMITATED_AMX": str(count),
            "IKATTN_SIXTEEN_BITS": "amx",
        }
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
        products, palette = map(int, count.read_text().split())
        assert products > 0
        assert palette == 0
        return done

    return run


def test_large_calls_are_as_accurate_as_in_other_instructions(run: Run) -> None:
    # faulthandler would take the trap for itself.
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    done = run("-m", "pytest", *options, str(HERE / "test_sixteen_bits.py"))
    assert "passed" in done.stdout


def test_a_call_on_one_thread(run: Run) -> None:
    program = """
import torch, ikattn
torch.set_num_threads(1)
print(torch.ops.ikattn.sixteen_bit_instructions())
query, key, value = (torch.randn(1, 2, 64, 16, dtype=torch.bfloat16) for _ in range(3))
query.requires_grad_()
ikattn.implicit_kernel_attention(query, key, value, *torch.randn(2, 2, 16, 16)).sum().backward()
"""
    assert run("-c", program).stdout.strip() == "amx"
