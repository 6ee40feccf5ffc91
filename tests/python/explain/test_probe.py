"""A probe's numbers are right, and it leaves no trace in the model or in random numbers."""

from __future__ import annotations

import random
from math import log2
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ikattn
from ikattn.explain import MapProbe
from recorded_models import Looks, encoder
from tiny_transformers import build_tiny, tiny_inputs

TOKENS = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)


def test_numbers_are_those_computed_by_hand() -> None:
    model, probe = Looks(1), MapProbe(TOKENS)
    rows = {"entropy": 1.0, "drift": 0.0}
    expected = {f"ikattn/layer.0/weights/{name}": value for name, value in rows.items()}
    expected |= {f"ikattn/layer.0/summed/{name}": value for name, value in rows.items()}
    expected["ikattn/layer.0/summed/mixing_ratio"] = 0.5
    assert probe(model) == pytest.approx(expected)
    with torch.no_grad():  # a token of the same kind gets three times the weight
        model.attention.in_proj_weight[:2] = torch.eye(2) * 2**0.5 * torch.tensor(3.0).log()
    found = probe(model)
    assert found["ikattn/layer.0/summed/drift"] == pytest.approx(1 / 4)
    entropy = -(0.25 * log2(0.25) + 0.75 * log2(0.75))
    assert found["ikattn/layer.0/weights/entropy"] == pytest.approx(entropy)
    assert found["ikattn/layer.0/summed/mixing_ratio"] == pytest.approx(1 / 4)


def test_each_layer_gives_the_maps_that_it_has() -> None:
    model = build_tiny("t5")
    probe = MapProbe(tiny_inputs(model), maps=("summed", "alti"))
    found = probe(model)
    kinds = {"enc", "dec", "cross"}
    assert {name.split("/")[1] for name in found} == {
        f"{kind}.{i}" for kind in kinds for i in (0, 1)
    }
    assert "ikattn/enc.1/alti/entropy" in found
    assert "ikattn/cross.1/summed/entropy" in found
    assert "ikattn/cross.1/alti/entropy" in found
    assert not any("cross" in name and "mixing" in name for name in found)


class Noisy(nn.Module):
    """Changes all that a call can change."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = ikattn.convert(encoder(enable_nested_tensor=False), spectral="mikan")
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, x: Tensor) -> Tensor:
        assert not self.training
        self.calls += 1
        self.seen = self.last = x
        random.random(), np.random.rand(), torch.rand(1)
        return self.encoder(x)


def test_everything_is_put_back() -> None:
    model = Noisy().train()
    model.encoder.layers[1].eval()  # frozen by its owner
    x = torch.randn(2, 5, 16)
    model.encoder(x)
    regularisers = [layer.self_attn.regularization for layer in model.encoder.layers]
    modes = [module.training for module in model.modules()]
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    expected = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    MapProbe(x)(model)
    assert (torch.rand(1), random.random(), np.random.rand()) == expected
    assert [module.training for module in model.modules()] == modes
    assert model.calls == 0
    assert model.last is None
    assert not hasattr(model, "seen")
    after = [layer.self_attn.regularization for layer in model.encoder.layers]
    assert all(a is b for a, b in zip(after, regularisers, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_everything_is_put_back_after_an_error() -> None:
    model = Looks(1).train()
    with pytest.raises(AssertionError, match="embedding dimension of 2, but got 3"):
        MapProbe(torch.randn(1, 2, 3))(model)
    assert model.training


def test_another_method_makes_the_maps() -> None:
    model = Looks(1)
    model.forward = None  # type: ignore[assignment]
    probe = MapProbe(TOKENS, forward=lambda model, x: model.attention(x, x, x))
    assert probe(model)["ikattn/layer.0/weights/entropy"] == pytest.approx(1)


def test_inputs_follow_the_dtype_of_the_model() -> None:
    model = encoder(enable_nested_tensor=False).bfloat16()
    assert MapProbe(torch.randn(2, 5, 16))(model)["ikattn/layer.1/summed/drift"] == 0


def test_a_model_of_which_a_process_has_a_share_is_refused() -> None:
    model = Looks(1)
    model.attention.in_proj_weight.ds_id = 3  # as DeepSpeed marks them
    with pytest.raises(NotImplementedError, match="sharded over processes"):
        MapProbe(TOKENS)(model)


@pytest.mark.parametrize("maps", ["value_norms", ["weights", "mixing_ratio"]])
def test_a_map_without_rows_is_refused(maps: Any) -> None:
    with pytest.raises(ValueError, match="maps must be names out of weights, "):
        MapProbe(TOKENS, maps=maps)
