"""benchmarks/gpu.py without a GPU: that it runs, and that FlexAttention computes the same."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

import ikattn
from agreement import assert_close
from programs import run_checked
from samples import name_of


@pytest.fixture
def rivals(source_tree: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(source_tree / "benchmarks")
    return import_module("gpu_rivals")


@pytest.mark.parametrize(
    ("choice", "comparisons"),
    [
        ([], 16),  # causal or not, three masks, dropout, two of few queries: forward and backward
        (["--lengths", "16", "64"], 8),
        (["--contributions"], 1),
        (["--decoding", "--lengths", "64"], 3),
    ],
)
def test_a_dry_run(source_tree: Path, tmp_path: Path, choice: list[str], comparisons: int) -> None:
    table = tmp_path / "table.md"
    program = source_tree / "benchmarks" / "gpu.py"
    options = ["--device", "cpu", "--tokens", 64, "--heads", 2, "--rounds", 1, "--no-flex"]
    printed = run_checked(
        sys.executable,
        program,
        *options,
        *choice,
        "--commit",
        "abc",
        "--output",
        table,
        cwd=tmp_path,
    )
    assert table.read_text() == printed
    assert "cannot" not in printed
    assert f"ikattn {ikattn.__version__} at abc" in printed.splitlines()[0]
    ours = re.findall(r"^  ikattn .* median +([\d.]+)  x ikattn +1.00$", printed, re.MULTILINE)
    assert len(ours) == comparisons
    assert all(float(time) > 0 for time in ours)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [False, True])
def test_flex_attention_computes_the_same(rivals: ModuleType, causal: bool) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 40, 16).unbind()
    tensors = [query, key, value, *torch.randn(2, 4, 16, 16) * 0.2]
    found = rivals.flex(tensors, causal, compiled=False)()
    assert_close(found, ikattn.implicit_kernel_attention(*tensors, is_causal=causal), 1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=name_of)
def test_the_composition_stores_in_the_type_of_its_inputs(rivals, causal, dtype):
    """stored_in_half rounds nothing in float32, and much in half precision."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 40, 16).to(dtype).unbind()
    tensors = [query, key, value, *torch.randn(2, 4, 16, 16) * 0.05]
    found = rivals.stored_in_half(*tensors, is_causal=causal)
    expected = ikattn.reference.implicit_kernel_attention(*tensors, is_causal=causal)
    assert_close(found, expected, 1e-5 if dtype == torch.float32 else 2**-6)
    assert dtype == torch.float32 or not torch.equal(found, expected)
