"""benchmarks/gpu.py without a GPU: that it runs, and that FlexAttention computes the same."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import ikattn
from agreement import assert_close
from programs import run_checked


@pytest.mark.parametrize(
    ("choice", "comparisons"),
    [
        ([], 12),  # causal or not, two masks, two of few queries: forward and backward
        (["--lengths", "16", "64"], 8),
        (["--contributions"], 1),
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
def test_flex_attention_computes_the_same(
    source_tree: Path, monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    monkeypatch.syspath_prepend(source_tree / "benchmarks")
    rivals = import_module("gpu_rivals")
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 40, 16).unbind()
    tensors = [query, key, value, *torch.randn(2, 4, 16, 16) * 0.2]
    found = rivals.flex(tensors, causal, compiled=False)()
    assert_close(found, ikattn.implicit_kernel_attention(*tensors, is_causal=causal), 1e-5)
