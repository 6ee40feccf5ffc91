"""experiments/regression.py, run as its readers run it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from experiment_programs import load, ran, refusal, rows_of

regression = load("regression")


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A folder of data as regression.py wants it."""
    table = np.random.RandomState(0).uniform(-1, 1, (40, 3))
    for name, data_set in regression.DATA_SETS.items():
        for file in data_set.files:
            path = tmp_path / "tables" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            columns = table[:, :2] if name in ("airline", "co2") else 5 + 3 * table
            np.savetxt(path, columns, delimiter=",")
    return tmp_path / "tables"


@pytest.mark.full
def test_regression_runs_every_attention_and_order(tmp_path: Path, tables: Path) -> None:
    options = ["--data", tables, "--datasets", "airline", "housing", "--epochs", 2]
    options += ["--repeats", 1, "--p", 1.5, "none", "learned", "--csv", "a.csv", "--plot", "a.png"]
    told = ran("regression", *options, cwd=tmp_path)
    runs = rows_of(tmp_path / "a.csv")
    assert len(runs) == 2 * (1 + 4 * 3)
    assert all(0 < float(run["best_rmse"]) <= float(run["last_rmse"]) for run in runs)
    assert "selected on the test set" in told


def test_regression_names_the_file_that_is_missing_and_its_origin(tmp_path: Path) -> None:
    told = refusal("regression", "--data", "nowhere", cwd=tmp_path)
    assert f"{Path('nowhere/airline_passengers/train.csv')} is missing" in told
    assert "part of github.com/MushroomHunting" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--p", "0.5"], "at least 1, 'none' or 'learned', got '0.5'"),
        (["--seed", "-1"], "--seed must be from 0 to 2^32 - 1, got -1"),
        (["--csv", "no/a.csv"], "there is no directory no"),
        (["--csv", "."], ". is a directory"),
        pytest.param(
            ["--csv", "/proc/a.csv"],
            "cannot write /proc/a.csv",
            marks=pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="there is no /proc"),
        ),
        (["--plot", "a.txt"], "--plot must end in one of"),
        (["--cost", "--plot", "a.png"], "--cost has no plot"),
    ],
)
def test_regression_rejects_options_before_it_computes(options, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["regression.py", "--data", ".", *options])
    with pytest.raises(SystemExit):
        regression.parse_options()
    assert message in capsys.readouterr().err


def test_a_run_that_has_ended_is_kept_when_the_next_is_interrupted(
    tables, tmp_path, monkeypatch, capsys
):
    ended: list[int] = []

    def train_epoch(*_: object) -> None:
        ended.append(len(ended))
        if len(ended) > 5:
            raise KeyboardInterrupt

    monkeypatch.setattr("regression_protocol.train_epoch", train_epoch)
    options = ["--data", tables, "--datasets", "airline", "--attention", "softmax"]
    options += ["--epochs", 2, "--csv", tmp_path / "a.csv"]
    monkeypatch.setattr(sys, "argv", ["regression.py", *map(str, options)])
    with pytest.raises(SystemExit) as stopped:
        regression.run_program(regression.main)
    assert stopped.value.code == 130
    assert "interrupted; runs that had ended are in --csv" in capsys.readouterr().err
    assert [row["repeat"] for row in rows_of(tmp_path / "a.csv")] == ["0", "1"]


def test_a_run_that_diverges_leaves_the_others(tables, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("regression_protocol.LEARNING_RATE", 1e30)
    options = ["--data", tables, "--datasets", "airline", "--attention", "direct", "softmax"]
    options += ["--repeats", 2, "--epochs", 9, "--csv", tmp_path / "a.csv"]
    options += ["--plot", tmp_path / "a.png"]
    monkeypatch.setattr(sys, "argv", ["regression.py", *map(str, options)])
    with pytest.raises(SystemExit, match=r"regression\.py: 4 runs diverged"):
        regression.main()
    assert "left out: airline, direct, p = 2, repeat 2: " in capsys.readouterr().out
    assert list(tmp_path.glob("a.*")) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no numbers"),
        ("1,2\n3,1e300\n", "row 2: expected finite numbers of float32"),
        ("1,2\n", "expected at least 10 rows in all, got 2"),
    ],
)
def test_a_table_of_too_little_or_too_much_is_named(tables, text, message):
    for file in regression.DATA_SETS["airline"].files:
        (tables / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        regression.load(tables, "airline")


def test_a_table_of_what_is_no_number_is_named(tables: Path) -> None:
    path = tables / "airline_passengers/train.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], "0.5,nan", *lines[2:]]))
    with pytest.raises(ValueError, match=r"train\.csv, row 3: expected finite numbers"):
        regression.load(tables, "airline")
    (tables / "housing/data.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(ValueError, match=r"data\.csv\.gz: "):
        regression.load(tables, "housing")


def test_tables_are_scaled(tables: Path) -> None:
    x, y = regression.load(tables, "housing")
    assert x.shape == (40, 2)
    for column in (*x.T, *y.T):
        assert column.min() == -1
        assert column.max() == 1


def test_concrete_is_inputs_and_a_value_in_two_files(tables: Path) -> None:
    table = np.random.RandomState(1).uniform(0, 500, (30, 9))  # 8 inputs and the strength
    np.savetxt(tables / "concrete" / "train.csv", table[:20], delimiter=",")
    np.savetxt(tables / "concrete" / "test.csv", table[20:], delimiter=",")
    x, y = regression.load(tables, "concrete")
    low, high = table.min(0), table.max(0)
    expected = 2 * (table - low) / (high - low) - 1
    np.testing.assert_allclose(x, expected[:, :8], atol=1e-5)
    np.testing.assert_allclose(y, expected[:, 8:], atol=1e-5)
    np.savetxt(tables / "concrete" / "test.csv", table[20:, :5], delimiter=",")
    with pytest.raises(ValueError, match=r"concrete.test\.csv must have 9 columns"):
        regression.load(tables, "concrete")


def test_regression_tests_on_a_tenth_that_differs_between_repeats() -> None:
    splits = regression.draw_splits(144, seed=1000)
    (train, test), (_, other) = next(splits), next(splits)
    assert (len(train), len(test)) == (129, 15)
    assert torch.equal(torch.cat([train, test]).sort().values, torch.arange(144))
    assert not torch.equal(test, other)


@pytest.mark.parametrize("p", ["2", "3", "none"])
def test_the_eager_formulation_is_the_same_attention(p: str) -> None:
    torch.manual_seed(0)
    eager = regression.Regressor(1, regression.Setting("co2", "eager", p))
    fused = regression.Regressor(1, regression.Setting("co2", "direct", p))
    fused.load_state_dict(eager.state_dict())
    x = torch.linspace(-1, 1, 50).unsqueeze(-1)
    torch.testing.assert_close(eager(x), fused(x), rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_cost_is_measured_in_processes_of_their_own(tmp_path: Path, tables: Path) -> None:
    options = ["--data", tables, "--datasets", "parkinsons", "--cost", "--csv", "a.csv"]
    rows = ran("regression", *options, cwd=tmp_path).splitlines()[1:]
    assert [row.split()[1].rstrip(",") for row in rows] == ["direct", "mikan", "eager"]
    assert all(row.endswith("MiB") for row in rows), rows
    costs = rows_of(tmp_path / "a.csv")
    assert [cost["attention"] for cost in costs] == ["direct", "mikan", "eager"]
    assert all(float(cost["seconds_per_epoch"]) > 0 for cost in costs)
