"""Scores of image models as grids of patches, and over the picture."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import ikattn
from ikattn.explain import patch_maps, plot_patches


def config_of(**given: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"image_size": 8, "patch_size": 2} | given)


@pytest.mark.parametrize(
    ("given", "specials"),
    [
        ({}, 1),  # ViT
        ({}, 0),  # SigLIP
        ({"num_register_tokens": 3}, 4),
        ({"model_type": "deit"}, 2),
        ({"image_size": [8, 8], "patch_size": (2, 2)}, 1),
    ],
)
def test_patches_follow_the_special_tokens(given: dict[str, Any], specials: int) -> None:
    scores = torch.arange(2.0 * (16 + specials)).reshape(2, -1)
    expected = scores[:, specials:].reshape(2, 4, 4)
    assert torch.equal(patch_maps(scores, config_of(**given)), expected)
    both = SimpleNamespace(config=SimpleNamespace(vision_config=config_of(**given)))
    assert torch.equal(patch_maps(scores[0], both), expected[0])
    assert torch.equal(patch_maps(scores, grid=(4, 4), specials=specials), expected)


def test_a_grid_of_another_size_stands_for_the_input() -> None:
    scores = torch.arange(7).bfloat16()
    assert patch_maps(scores, config_of(), grid=(2, 3)).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert patch_maps(scores[1:], config_of(), grid=(3, 2)).tolist() == [[1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize(
    ("S", "options", "message"),
    [
        (18, {"model": config_of()}, r"16 or 17 tokens, 4 x 4 patches and 0 or 1 .* got 18"),
        (17, {"model": config_of(num_register_tokens=4)}, r"20 or 21 tokens, .* 4 or 5 special"),
        (17, {"model": config_of(), "grid": (2, 3)}, r"must have 6 or 7 tokens"),
        (17, {"grid": (4, 4), "specials": 2}, r"must have 18 tokens, .* and 2 special"),
        (15, {"grid": (4, 4), "specials": -1}, r"specials 0 or more, got .* -1"),
        (1, {"grid": (0, 4)}, r"grid positive"),
        (17, {}, r"grid must be \(h, w\) where model has no image_size"),
        (17, {"model": config_of(patch_size=None)}, r"grid must be \(h, w\)"),
    ],
)
def test_what_does_not_fit_is_refused(S: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        patch_maps(torch.zeros(S), **options)


IMAGE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE |= {"image_size": 16, "patch_size": 4}


@pytest.mark.parametrize(
    ("family", "registers", "specials"),
    [("ViT", 0, 1), ("CLIP", 0, 1), ("Siglip", 0, 0), ("Dinov2WithRegisters", 3, 4)],
)
def test_the_grid_of_a_model_names_the_patch_that_changed(family, registers, specials):
    transformers = pytest.importorskip("transformers", reason="pip install 'ikattn[analyze]'")
    torch.manual_seed(0)
    own = IMAGE | ({"num_register_tokens": registers} if registers else {"intermediate_size": 32})
    given = {"vision_config": own} if family in ("CLIP", "Siglip") else own
    config = getattr(transformers, f"{family}Config")(**given)
    model = getattr(transformers, f"{family}ForImageClassification")(config).eval()
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16)}

    found = ikattn.attribute(model, inputs)
    grid = patch_maps(found.scores, model)
    assert grid.shape == (2, 4, 4)
    whole = grid.sum((1, 2)) + found.scores[:, :specials].sum(-1) + found.bias
    torch.testing.assert_close(whole, found.value, rtol=1e-4, atol=1e-5)

    with ikattn.record(model, maps=("value_norms",)) as recording:
        model(**inputs)
    before = patch_maps(recording[recording.names[0]].value_norms, model)  # [B, H, h, w]
    changed = inputs["pixel_values"].clone()
    changed[:, :, 4:8, 8:12] += 1  # row 1, column 2 of the patches
    with ikattn.record(model, maps=("value_norms",)) as recording:
        model(pixel_values=changed)
    after = patch_maps(recording[recording.names[0]].value_norms, model)
    differs = (after - before).abs().amax((0, 1)) > 1e-5
    assert differs.nonzero().tolist() == [[1, 2]]


# --- The picture


def pixels(path: Path) -> Tensor:
    image = pytest.importorskip("matplotlib.image", reason="pip install 'ikattn[viz]'")
    return torch.tensor(image.imread(path)[..., :3].copy())


def coloured(drawn: Tensor) -> tuple[Tensor, Tensor]:
    """Where the second panel is orange and where it is blue."""
    left, right = round(drawn.size(1) * 3.44 / 7.62), round(drawn.size(1) * 6.64 / 7.62)  # inches
    panel = drawn[:, left:right]
    warmth = panel[..., 0] - panel[..., 2]
    return warmth > 0.4, warmth < -0.4


def test_the_map_lies_where_its_patches_are(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'ikattn[viz]'")
    patches = torch.zeros(2, 4)
    patches[0, 0], patches[1, 3] = 2.0, -2.0
    picture = torch.full((3, 20, 40), 0.5)
    plot_patches(patches, picture, tmp_path / "patches.png", smooth=False, title="$a_b$ <é>")
    drawn = pixels(tmp_path / "patches.png")
    orange, blue = coloured(drawn)
    height, width = orange.shape
    for colour, at in ((orange, (0.8 / 2.12, 1 / 8)), (blue, (1.6 / 2.12, 7 / 8))):
        assert float(colour.double().mean()) == pytest.approx(1.6 / 2.12 / 8, abs=0.01)
        where = colour.nonzero().double().mean(0) / torch.tensor([height, width])
        torch.testing.assert_close(where, torch.tensor(at).double(), rtol=0, atol=0.01)
    plot_patches(patches.relu(), picture, tmp_path / "patches.png", smooth=True)
    assert not coloured(pixels(tmp_path / "patches.png"))[1].any()


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_pictures_of_any_kind_in_any_format(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'ikattn[viz]'")
    numpy, image = pytest.importorskip("numpy"), pytest.importorskip("PIL.Image")
    array = numpy.arange(96, dtype=numpy.uint8).reshape(4, 8, 3)
    tensor = torch.from_numpy(array).movedim(-1, 0)
    pictures = [array, array[:, ::-1] / 255, tensor, tensor.half() / 255, image.fromarray(array)]
    for picture in [*pictures, image.fromarray(array).convert("L")]:
        path = tmp_path / f"patches{suffix}"
        plot_patches(torch.randn(2, 4, requires_grad=True), picture, path, dpi=50)
        assert path.stat().st_size > 1000
        path.unlink()


@pytest.mark.parametrize(
    ("patches", "picture", "name", "message"),
    [
        (torch.zeros(2, 2), torch.zeros(3, 4, 4), "a.jpg", r"must end in .png, .svg, .pdf"),
        (torch.zeros(1, 2, 2), torch.zeros(3, 4, 4), "a.png", r"\[h, w\] .* got \[1, 2, 2\]"),
        (torch.tensor([[torch.nan]]), torch.zeros(3, 4, 4), "a.png", r"finite numbers"),
        (torch.zeros(0, 2), torch.zeros(3, 4, 4), "a.png", r"got \[0, 2\]"),
        (
            torch.zeros(2, 2),
            torch.zeros(4, 4, 3),
            "a.png",
            r"\[3, H, W\], got torch.float32 \[4, 4, 3\]",
        ),
        (torch.zeros(2, 2), torch.ones(3, 4, 4) > 0, "a.png", r"got torch.bool \[3, 4, 4\]"),
        (torch.zeros(2, 2), torch.randn(3, 9, 9), "a.png", r"before it is normalised"),
        (torch.zeros(2, 2), torch.zeros(3, 0, 4), "a.png", r"got \[0, 4, 3\]"),
        (torch.zeros(2, 2), None, "a.png", r"must be a PIL image, .* got NoneType"),
        (torch.zeros(2, 2), "cat.png", "a.png", r"must be a PIL image, .* got str"),
    ],
)
def test_pictures_that_do_not_fit_are_refused(tmp_path, patches, picture, name, message):
    pytest.importorskip("matplotlib", reason="pip install 'ikattn[viz]'")
    with pytest.raises(ValueError, match=message):
        plot_patches(patches, picture, tmp_path / name)
    assert not list(tmp_path.iterdir())
