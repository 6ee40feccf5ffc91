"""Maps that would not fit into memory are refused before they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ikattn import _memory
from ikattn.recorder import record
from ikattn.recorder.runs import making
from recorded_models import encoder

pytestmark = pytest.mark.usefixtures("float64_by_default")

MAP = 2 * 8 * 8 * 8  # bytes of a map of two sequences of eight tokens in float64


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many bytes are free."""
    return lambda count: monkeypatch.setattr(_memory, "free_memory", lambda device: count)


def run(maps: Any = "summed", **options: Any) -> int:
    model = encoder()
    with torch.no_grad(), record(model, maps, **options) as recording:
        model(torch.randn(2, 8, 16))
    return len(recording.batches)


def test_sizes_and_ways_out_are_told_before_any_map_is_made(
    free: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(2 * MAP - 1)
    monkeypatch.setattr(making, "make_maps", lambda *_: pytest.fail("a map was made"))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run()
    words = str(caught.value)
    assert words.startswith("record: no memory for the maps summed of 2 layers, from layers.0.self")
    assert "2 x 8 x 8 pairs of 4 heads take 2.05 KB, and 2.05 KB of cpu are free" in words
    for way in ("reduce=", "layers=", "queries=", "on_layer=", "LayerWriter"):
        assert way in words


def test_each_way_out_takes_less(free: Any) -> None:
    free(2 * MAP - 1)
    for options in (
        {"reduce": "columns"},
        {"layers": "layers.1.*"},
        {"queries": slice(0, 7)},
        {"on_layer": lambda *_: None},
    ):
        run(**options)
    free(2 * MAP)
    assert run() == 1
    with pytest.raises(torch.OutOfMemoryError, match="summed, with_residual of 2 layers"):
        run(("summed", "with_residual"))
    with pytest.raises(torch.OutOfMemoryError, match="weights of 2 layers"):
        run("weights")  # of four heads


def test_maps_without_pairs_and_unknown_memory_are_never_refused(free: Any) -> None:
    free(0)
    assert run(("value_norms", "mixing_ratio")) == 1
    free(None)
    assert run("all") == 1


def test_part_of_a_model_is_asked_for_its_own_layers(free: Any) -> None:
    free(MAP)
    model = encoder()
    with torch.no_grad(), record(model) as recording:
        model.layers[1](torch.randn(2, 8, 16))
    assert len(recording.batches) == 1


def test_free_memory_is_that_of_the_system_and_of_its_group(tmp_path: Path) -> None:
    free = _memory.free_memory(torch.device("cpu"))
    assert free is None or 0 <= free < 1 << 60
    assert _memory.free_memory(torch.device("meta")) is None
    for name, text in (
        ("memory.max", "1000\n"),
        ("memory.current", "900\n"),
        ("memory.stat", "anon 500\ninactive_file 100\nactive_file 150\nslab_reclaimable 50\n"),
    ):
        assert _memory._left_in_group(tmp_path) is None
        (tmp_path / name).write_text(text)
    assert _memory._left_in_group(tmp_path) == 400
    (tmp_path / "memory.max").write_text("max\n")
    assert _memory._left_in_group(tmp_path) is None
