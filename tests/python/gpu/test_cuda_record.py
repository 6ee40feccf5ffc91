"""Recordings of models on a GPU: maps come to the CPU while the model goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikattn
from gpu import IN_THE_INTERPRETER
from ikattn.recorder.runs import transfers

if IN_THE_INTERPRETER:
    pytest.skip("the interpreter is no GPU", allow_module_level=True)

MAPS = ("summed", "with_norm")


def model_and_input() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).cuda().eval()
    return model, torch.randn(4, 50, 32, device="cuda")


def recorded(**options: Any) -> ikattn.Recording:
    model, x = model_and_input()
    with torch.no_grad(), ikattn.record(model, maps=MAPS, **options) as recording:
        model(x)
    return recording


def test_maps_are_page_locked_and_there_when_they_are_read() -> None:
    there, here = recorded(to_cpu=False), recorded()
    for name in there.names:
        for of_map in MAPS:
            moved, kept = (getattr(each[name], of_map) for each in (here, there))
            assert moved.is_pinned()
            assert kept.is_cuda
            assert torch.equal(moved, kept.cpu())


def test_beyond_what_may_be_page_locked_maps_are_copied_as_they_come(monkeypatch):
    monkeypatch.setattr(transfers, "MOST_PAGE_LOCKED", 4 * 50 * 50 * 4)
    recording = recorded()
    pinned = [getattr(recording[name], m).is_pinned() for name in recording.names for m in MAPS]
    assert sum(pinned) == 1
    expected = recorded(to_cpu=False)
    for name in recording.names:
        assert torch.equal(recording[name].summed, expected[name].summed.cpu())


def test_on_layer_gets_maps_that_are_there_in_turn() -> None:
    expected = recorded(to_cpu=False)
    found: list[tuple[str, Tensor]] = []
    recorded(on_layer=lambda index, layer, maps: found.append((layer.name, maps.summed.clone())))
    assert [name for name, _ in found] == expected.names
    for name, summed in found:
        assert torch.equal(summed, expected[name].summed.cpu())


def test_maps_of_a_graph_of_autograd() -> None:
    model, x = model_and_input()
    with ikattn.record(model, maps=("summed",), detach=False) as recording:
        model(x)
    summed = recording[recording.names[0]].summed
    summed.sum().backward()
    assert summed.requires_grad
    assert next(iter(model.parameters())).grad.isfinite().all()


def test_a_call_that_a_graph_captures_is_refused() -> None:
    model, x = model_and_input()
    with torch.no_grad(), ikattn.record(model, maps=MAPS) as recording:
        model(x)
        captures = torch.cuda.graph(torch.cuda.CUDAGraph())
        with pytest.raises(RuntimeError, match="while a CUDA graph captures it"), captures:
            model(x)
    assert len(recording.batches) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_after_the_first_call_the_host_waits_for_nothing(mode: Any) -> None:
    model, x = model_and_input()
    with mode(), ikattn.record(model, maps=MAPS) as recording:
        model(x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for name in recording.names:
        first, second = (batch[name].summed for batch in recording.batches)
        assert torch.equal(first, second)
