"""``python -m ikattn analyze`` with its default maps, on tiny models of every family."""

from __future__ import annotations

import pytest
import torch

from families import ALONE, POST, PRE
from ikattn import cli
from ikattn.maps import load_maps
from recorded_models import recorded
from tiers import share
from tiny_texts import save_tiny
from tiny_transformers import build_tiny

transformers = pytest.importorskip("transformers", reason="pip install 'ikattn[analyze]'")
pytestmark = pytest.mark.filterwarnings("ignore:record. .* look like attention")
TEXT, TARGET = torch.arange(5, 11)[None], torch.arange(7, 10)[None]  # w1 to w6, and w3 to w5


@pytest.mark.parametrize("kind", share([*PRE, *POST, *ALONE], 0))
def test_each_layer_gives_the_maps_that_record_finds(kind, tmp_path, capsys):
    model = build_tiny(kind)
    save_tiny(tmp_path / "model", model)
    options = ["--text", "w1 w2 w3 w4 w5 w6", "--format", "npz", "--out", str(tmp_path / "out")]
    inputs = {"input_ids": TEXT}
    if model.config.is_encoder_decoder:
        options += ["--target-text", "w3 w4 w5"]
        first = getattr(model.config, "decoder_start_token_id", model.config.pad_token_id)
        start = torch.tensor([[first]])
        inputs["decoder_input_ids"] = torch.cat([start, TARGET[:, :-1]], 1)
    capsys.readouterr()
    status = cli.main(["analyze", "--model", str(tmp_path / "model"), *options])
    if model.main_input_name != "input_ids":
        said = capsys.readouterr().err
        assert (status, len(said.splitlines())) == (1, 1)
        assert f"reads {model.main_input_name}, and this command gives it text" in said
        return
    assert status == 0
    found = load_maps(tmp_path / "out" / "line-000001.npz")
    with torch.no_grad():
        model(**inputs)  # the first call of BigBird's kin puts other modules in place
    expected = recorded(model, inputs, None)
    assert found.names == expected.names
    for name in found:
        mine, theirs = found[name], expected[name]
        for each in ("value_norms", "summed", "with_residual", "with_norm", "encoder"):
            assert (getattr(mine, each) is None) == (getattr(theirs, each) is None)
        torch.testing.assert_close(mine.summed, theirs.summed)
        assert mine.mixing_ratio.keys() == theirs.mixing_ratio.keys()
        assert mine.weights is not None
