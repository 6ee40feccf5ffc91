"""experiments/nodes.py, run as its readers run it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from experiment_programs import load, ran, refusal, rows_of

pytest.importorskip("torch_geometric")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small graph of two classes, whose words tell them."""
    random = np.random.RandomState(0)
    y = np.arange(60) % 2
    x = (random.rand(60, 10) < 0.2 + 0.5 * (np.arange(10) % 2 == y[:, None])).astype(np.float32)
    edges = random.randint(60, size=(2, 400))
    edges = edges[:, y[edges[0]] == y[edges[1]]]
    rows, columns = x.nonzero()
    path = tmp_path / "graphs"
    path.mkdir()
    np.savez(
        path / "small.npz",
        num_features=10,
        x_indptr=np.concatenate([[0], np.bincount(rows, minlength=60).cumsum()]),
        x_indices=columns,
        x_data=x[rows, columns],
        y=y,
        edge_index=edges,
        train_idx=np.arange(20),
        val_idx=np.arange(20, 40),
        test_idx=np.arange(40, 60),
    )
    return path


@pytest.mark.full
def test_every_attention_and_order_runs(tmp_path: Path, folder: Path) -> None:
    options = ["--data", folder, "--name", "small", "--seeds", 1, "--epochs", 40]
    options += ["--p", 1.5, "none", "learned", "--csv", "a.csv", "--plot", "a.png"]
    ran("nodes", *options, cwd=tmp_path)
    runs = rows_of(tmp_path / "a.csv")
    assert len(runs) == 3 + 4 * 3
    assert np.mean([float(row["accuracy"]) for row in runs]) > 75


def test_a_model_learns_and_the_best_epoch_is_kept(folder: Path) -> None:
    nodes = load("nodes")
    graph = nodes.load(folder, "small")
    assert graph.x.layout == torch.sparse_csr
    sums = graph.x.to_dense().sum(-1)
    assert torch.allclose(sums[sums > 0], torch.ones(1))
    options = type("Options", (), {"epochs": 120, "frequencies": 8})
    found = nodes.fit(graph, "small", "direct", "2", 0, options)
    assert found.accuracy >= 90
    assert found.validation_accuracy >= 90
    assert found.epochs <= 120


def test_what_is_missing_is_named(tmp_path: Path, folder: Path) -> None:
    told = refusal("nodes", "--data", folder, cwd=tmp_path)
    assert "holds neither cora.npz nor ind.cora.x" in told
    np.savez(folder / "cora.npz", y=np.zeros(3))
    told = refusal("nodes", "--data", folder, cwd=tmp_path)
    assert "cora.npz lacks edge_index, num_features" in told
