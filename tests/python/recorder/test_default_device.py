"""Under a default device other than the maps': what is made of CPU maps is made on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ikattn
from ikattn.maps import Recording

MAPS = ("summed", "weights", "value_norms", "mixing_ratio", "with_residual")
ACTS: dict[str, Callable[[Recording, Path], object]] = {
    "page": lambda r, folder: r.to_html(folder / "a.html"),
    "picture": lambda r, folder: r.plot(folder / "a.png"),
    "safetensors": lambda r, folder: _loaded(r, folder / "a.safetensors"),
    "npz": lambda r, folder: _loaded(r, folder / "a.npz"),
    "json": lambda r, folder: _loaded(r, folder / "a.json"),
    "rollout": lambda r, folder: ikattn.rollout(r, map="weights", residual=0.5),
    "importance": lambda r, folder: ikattn.maps.token_importance(
        r, slice(1, 3), map="weights", residual=0.5
    ),
    "head mean": lambda r, folder: ikattn.maps.head_mean(r["self_attn"].weights),
    "word alignment": lambda r, folder: ikattn.explain.word_alignment(
        r["self_attn"].summed, [[0, 1, 2, 3, 4]] * 2, [[0, 1, 2, 3, 4]] * 2
    ),
    "joined": lambda r, folder: r.joined(),
}


def _loaded(recording: Recording, path: Path) -> Tensor:
    recording.save(path)
    found = ikattn.load_maps(path)["self_attn"].summed
    assert found is not None
    return found


@pytest.fixture(scope="module")
def recording() -> Recording:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    with torch.no_grad(), ikattn.record(layer, maps=MAPS) as found:
        layer(torch.randn(2, 5, 16))
    return found


@pytest.mark.parametrize("name", ACTS)
def test_maps_stay_on_their_own_device(name: str, recording: Recording, tmp_path: Path) -> None:
    with torch.device("meta"):
        found = ACTS[name](recording, tmp_path)
    if isinstance(found, Tensor):
        assert found.device.type == "cpu"


def test_recording_under_a_default_device() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad(), torch.device("meta"), ikattn.record(layer, maps="all") as recording:
        layer(x)
    assert recording["self_attn"].with_norm is not None
    assert recording["self_attn"].with_norm.device.type == "cpu"


@pytest.mark.parametrize("kernel", ["dot", "rbf", "implicit"])
def test_modules_under_a_default_device(kernel: str) -> None:
    attention = ikattn.MultiheadAttention(16, 4, kernel=kernel, batch_first=True)  # type: ignore[arg-type]
    x, padding = torch.randn(2, 5, 16), torch.zeros(2, 5, dtype=torch.bool)
    with torch.device("meta"):
        output, weights = attention(x, x, x, key_padding_mask=padding)
        output.sum().backward()
    assert weights is not None
    assert (output.device.type, weights.device.type) == ("cpu", "cpu")
