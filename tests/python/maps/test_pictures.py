"""Pictures: drawn in every format, with the tokens they belong to."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from recordings import encoder_recording, recording_of, translation_recording

matplotlib = pytest.importorskip("matplotlib", reason="pip install 'ikattn[viz]'")


def texts_of(path: Path) -> list[str]:
    """The texts of an SVG, which matplotlib keeps in comments beside their outlines."""
    return re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8"))


def test_every_format_is_drawn(tmp_path: Path) -> None:
    starts = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}
    for suffix, start in starts.items():
        encoder_recording().plot(tmp_path / f"maps{suffix}", dpi=60)
        assert (tmp_path / f"maps{suffix}").read_bytes().startswith(start)


def test_picture_shows_the_values(tmp_path: Path) -> None:
    """Dark where the map is large: the one cell that is not 0 stands where it should."""
    from matplotlib.image import imread

    recording = recording_of(summed=torch.tensor([[[0.0, 0], [1, 0]]]))
    recording.plot(tmp_path / "one.png", layer="layer", tokens=["a", "b"])
    dark = torch.tensor(imread(tmp_path / "one.png")[..., :3].copy()).sum(-1) < 0.7
    left = dark[:, : dark.shape[1] * 3 // 4].nonzero().double()  # without the colour bar
    height, width = dark.shape
    assert left[:, 0].mean() > 0.5 * height
    assert left[:, 1].mean() < 0.5 * width


@pytest.mark.parametrize("layer", [1, -1, "encoder.layer.1.attention.self"])
def test_one_layer_stands_beside_its_weights(tmp_path: Path, layer: str | int) -> None:
    encoder_recording().plot(tmp_path / "one.svg", layer=layer, map="encoder")
    texts = texts_of(tmp_path / "one.svg")
    assert texts.count("encoder.layer.1.attention.self") == 2
    assert "encoder.layer.0.attention.self" not in texts
    assert any(text.startswith("attention weight, mean over heads, 0 to ") for text in texts)
    assert any(text.startswith("N through the whole block, 0 to ") for text in texts)
    assert texts.count("b0t3") == 3  # a row of both, a column of each


def test_all_layers_stand_in_a_grid_without_padding(tmp_path: Path) -> None:
    encoder_recording(layers=3, batches=2).plot(tmp_path / "all.svg", batch=1, sequence=1)
    texts = texts_of(tmp_path / "all.svg")
    assert [f"encoder.layer.{i}.attention.self" in texts for i in range(4)] == [True] * 3 + [False]
    assert texts.count("b1t2") == 2 + 4  # of each row of panels, and of each column
    assert "b1t3" not in texts


def test_map_of_each_head_is_averaged_and_weights_may_stand_alone(tmp_path: Path) -> None:
    encoder_recording().plot(tmp_path / "heads.svg", layer=0, map="per_head")
    assert any(
        "N of each head, mean over heads" in text for text in texts_of(tmp_path / "heads.svg")
    )
    encoder_recording().plot(tmp_path / "weights.svg", layer=0, map="weights")
    texts = texts_of(tmp_path / "weights.svg")
    assert texts.count("encoder.layer.0.attention.self") == 1


@pytest.mark.parametrize(
    ("recorded", "drawn"),
    [
        (("alti",), "ALTI"),
        (("weights",), "attention weight"),
        (("weights", "encoder"), "N through the whole block"),
        (("summed", "encoder"), "N, heads summed"),
    ],
)
def test_the_only_map_there_is_need_not_be_named(tmp_path, recorded, drawn):
    axes = {"weights": (1, 2, 3, 3)}
    maps = {name: torch.rand(axes.get(name, (1, 3, 3))) for name in recorded}
    recording_of(**maps).plot(tmp_path / "one.svg")
    assert any(text.startswith(drawn) for text in texts_of(tmp_path / "one.svg"))


def test_one_of_several_maps_must_be_named(tmp_path: Path) -> None:
    recording = recording_of(encoder=torch.rand(1, 3, 3), alti=torch.rand(1, 3, 3))
    with pytest.raises(ValueError, match=r"which map to draw; there are alti, encoder"):
        recording.plot(tmp_path / "one.svg")
    with pytest.raises(ValueError, match=r"'summed' was not recorded; there are alti, encoder"):
        recording.plot(tmp_path / "one.svg", map="summed")


def test_cross_attention_has_both_texts(tmp_path: Path) -> None:
    translation_recording().plot(tmp_path / "cross.svg", layer="cross")
    texts = texts_of(tmp_path / "cross.svg")
    assert (texts.count("kleines"), texts.count("s4")) == (1, 2)


def test_unusual_tokens_and_values_are_drawn(tmp_path: Path) -> None:
    recording = encoder_recording()
    maps = recording["encoder.layer.0.attention.self"]
    maps.summed[0, 0] = torch.tensor([float("nan"), float("inf"), 0.0, 1e-30, 1e30])
    recording["encoder.layer.1.attention.self"].summed.zero_()
    tokens = ["$x^2$", "\u0120word", "\x07", "\u2581", "a" * 40]
    recording.plot(tmp_path / "odd.svg", tokens=tokens)
    texts = texts_of(tmp_path / "odd.svg")
    assert "word" in texts
    assert "a" * 15 + "\u2026" in texts
    recording.plot(tmp_path / "odd.png", tokens=tokens, dpi=60)


def test_long_sequence_names_every_second_token(tmp_path: Path) -> None:
    recording = recording_of(summed=torch.rand(1, 100, 100))
    recording.plot(tmp_path / "long.svg", layer=0, tokens=[f"t{i}" for i in range(100)])
    texts = texts_of(tmp_path / "long.svg")
    assert "t98" in texts
    assert "t99" not in texts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "maps.gif"}, r"must end in \.png, \.svg, \.pdf, got 'maps\.gif'"),
        ({"map": "sumed"}, r"map must be one of weights, .* got 'sumed'"),
        ({"map": "value_norms"}, r"map must be one of"),
        ({"layer": 2}, r"layer must be a number below 2 or one of encoder.*, got 2"),
        ({"layer": "none"}, r"got 'none'"),
        ({"batch": 1}, r"batch must be below 1, got 1"),
        ({"sequence": 2}, r"sequence must be one of batch 0, got 2"),
        ({"tokens": ["a"] * 4}, r"must be 5, one for each .* got 4"),
    ],
)
def test_what_does_not_fit_is_an_error(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        encoder_recording().plot(**{"path": tmp_path / "maps.png"} | options)
    assert not list(tmp_path.iterdir())


def test_missing_matplotlib_is_named_with_its_command(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs matplotlib: pip install 'ikattn\[viz\]'"):
        encoder_recording().plot(tmp_path / "maps.png")
