"""The Python examples, run as their readers run them."""

from __future__ import annotations

import csv
import re
import subprocess
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import ikattn
from programs import import_program, run_python

pytest.importorskip("tqdm", reason="the examples need it: pip install 'ikattn[demo]'")


def run_example(
    source_tree: Path, name: str, *arguments: object, cwd: Path
) -> subprocess.CompletedProcess[str]:
    return run_python(source_tree / "examples" / name, *arguments, cwd=cwd)


@pytest.fixture
def digits(source_tree: Path) -> ModuleType:
    pytest.importorskip("matplotlib", reason="digits.py needs it: pip install 'ikattn[demo]'")
    pytest.importorskip("sklearn", reason="digits.py needs it: pip install 'ikattn[demo]'")
    return import_program(source_tree / "examples/digits.py")


@pytest.fixture
def regression(source_tree: Path) -> ModuleType:
    return import_program(source_tree / "examples/regression.py")


@pytest.fixture
def sines(tmp_path: Path) -> Path:
    """A folder of data as regression.py wants it, of sines."""
    x = np.linspace(-1, 1, 40)
    table = np.stack([x, np.sin(9 * x)], axis=1)
    for name in ("airline_passengers", "co2"):
        folder = tmp_path / "sines" / name
        folder.mkdir(parents=True)
        np.savetxt(folder / "train.csv", table[:30], delimiter=",")
        np.savetxt(folder / "test.csv", table[30:], delimiter=",")
    return tmp_path / "sines"


def rows_of(output: str, *names: str) -> list[str]:
    """Returns the line of the table that starts with each name, and fails where there is none."""
    lines = output.splitlines()
    return [next(line for line in lines if line.startswith(name)) for name in names]


@pytest.mark.full
def test_digits_prints_both_accuracies_and_draws(source_tree, tmp_path, digits):
    from matplotlib.image import imread

    result = run_example(source_tree, "digits.py", "--quick", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for row in rows_of(result.stdout, "softmax", "implicit kernel"):
        assert re.search(r"\d\d\.\d% +\d\d\.\d% +\d\d,\d{3} +\d+\.\d s$", row), row
    assert "build/digits_attention.png" in result.stdout
    picture = imread(tmp_path / "build" / "digits_attention.png")
    assert min(picture.shape[:2]) > 800
    assert picture[..., :3].std() > 0.05  # something is drawn
    assert "epoch" not in result.stderr  # no progress bar in a file


def test_digits_are_split_without_overlap(digits: ModuleType) -> None:
    splits = digits.load_splits()
    assert [len(split.labels) for split in splits] == [1257, 180, 360]
    for split in splits:
        assert split.labels.bincount().float().std() < 0.02 * len(split.labels)  # stratified
    assert all(
        torch.equal(a.images, b.images) for a, b in zip(splits, digits.load_splits(), strict=True)
    )


@pytest.mark.parametrize("kernel", ["stock", "dot", "implicit"])
def test_received_attention_is_a_share_of_what_is_given(digits: ModuleType, kernel: str) -> None:
    torch.manual_seed(0)
    model = digits.VisionTransformer()
    if kernel != "stock":
        ikattn.convert(model, kernel)
    images = torch.randn(3, 1, 8, 8)
    received = digits.received_attention(model, images)
    assert received.shape == (2, 3, 6, 6)
    torch.testing.assert_close(received.mean(dim=(2, 3)), torch.ones(2, 3))
    torch.testing.assert_close(received, digits.received_attention(model, images))


@pytest.mark.full
def test_regression_reports_every_setting_and_writes_every_run(source_tree, tmp_path, sines):
    options = ["--data", sines, "--repeats", 2, "--epochs", 3, "--p", 1.5, 2, "--csv", "runs.csv"]
    result = run_example(source_tree, "regression.py", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    settings = ("dot", "implicit, p = 1.5", "implicit, p = 2")
    for row in rows_of(
        result.stdout,
        *(f"{name:<10}{setting}" for name in ("airline", "co2") for setting in settings),
    ):
        assert len(re.findall(r"\d\.\d{4} ± \d\.\d{4}", row)) == 2, row
    assert "selected on the test set" in result.stdout
    assert [path.name for path in tmp_path.glob("runs.csv*")] == ["runs.csv"]
    with (tmp_path / "runs.csv").open(newline="") as file:
        runs = list(csv.DictReader(file))
    assert len(runs) == 2 * 3 * 2
    assert all(0 < float(run["best_rmse"]) <= float(run["last_rmse"]) for run in runs)


def test_regression_rejects_files_of_unlike_columns(regression: ModuleType, sines: Path) -> None:
    path = sines / "co2" / "test.csv"
    path.write_text("1,2,3\n")
    with pytest.raises(ValueError, match=r"co2.test\.csv must have 2 columns"):
        regression.load(sines, "co2")
