"""ikattn.parameter_groups: which parameters are a kernel's, and what the others are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ikattn
from ikattn.integrations.timm import ImplicitAttention


def names_of(model: nn.Module, **options: Any) -> dict[str, list[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    groups = ikattn.parameter_groups(model, lr=1.0, **options)
    return {group["name"]: [names[id(p)] for p in group["params"]] for group in groups}


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=4, batch_first=True)
    return ikattn.convert(nn.TransformerEncoder(layer, 2), num_frequencies=4, **options)


class Own(nn.Module):
    """Somebody's source of frequencies, which has weights with two axes."""

    def __init__(self, _: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4, 3))

    def forward(self, *_: Any) -> tuple[torch.Tensor, None]:
        return self.weight, None


@pytest.mark.parametrize("spectral", ["direct", "stationary", "ikan", "mikan", Own])
def test_kernels_are_what_a_conversion_adds(spectral: str | Callable[..., nn.Module]) -> None:
    plain = {name for name, _ in encoder(kernel="dot").named_parameters()}
    model = encoder(spectral=spectral, p="learned")
    found = names_of(model)
    assert set(found["kernels"]) == {name for name, _ in model.named_parameters()} - plain
    assert sum(name.endswith("magnitude.raw") for name in found["kernels"]) == 2
    assert set(found["weights"]) == {name for name in plain if name.endswith("weight")} - {
        name for name in plain if ".norm" in name
    }
    assert set(found["biases and norms"]) == plain - set(found["weights"])


def test_rates_and_decay_are_those_that_were_asked_for() -> None:
    model = encoder()
    options = [{}, {"frequency_lr": 0.5}, {"frequency_lr": 0, "weight_decay": 0.3}]
    found = [ikattn.parameter_groups(model, lr=2.0, **o) for o in options]
    assert [[group["lr"] for group in groups] for groups in found] == [
        [2.0, 2.0, 0.2],
        [2.0, 2.0, 0.5],
        [2.0, 2.0, 0.0],
    ]
    assert [[group["weight_decay"] for group in groups] for groups in found] == [
        [0.01, 0.0, 0.0],
        [0.01, 0.0, 0.0],
        [0.3, 0.0, 0.0],
    ]


def test_an_optimiser_moves_every_parameter_by_its_rate() -> None:
    model = encoder()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(ikattn.parameter_groups(model, lr=1e-3, weight_decay=0.0))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        step = 1e-4 if ".spectral." in name else 1e-3
        torch.testing.assert_close(before[name] - p.detach(), torch.full_like(p, step))


def test_shared_parameters_stand_once_and_frozen_ones_not_at_all() -> None:
    model = encoder()
    model.again = model.layers[0]
    model.tied = nn.Linear(8, 4, bias=False)
    model.tied.weight = model.layers[1].linear1.weight
    model.layers[1].requires_grad_(False)
    listed = [p for group in ikattn.parameter_groups(model, lr=1.0) for p in group["params"]]
    assert {id(p) for p in listed} == {id(p) for p in model.layers[0].parameters()}
    assert len(listed) == len(set(map(id, listed)))


def test_a_model_without_kernels_has_no_group_of_them() -> None:
    assert list(names_of(nn.Linear(2, 2))) == ["weights", "biases and norms"]
    assert list(names_of(nn.LayerNorm(2))) == ["biases and norms"]


@pytest.mark.parametrize("spectral", ["direct", "ikan"])
def test_kernels_of_transformers_models_are_found(spectral: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=2, vocab_size=11)
    model = ikattn.convert(transformers.GPT2LMHeadModel(config), spectral=spectral)
    found = names_of(model)
    assert found["kernels"] == [name for name, _ in model.named_parameters() if "spectral" in name]
    assert found["weights"].count("transformer.wte.weight") == 1  # tied to the head


def test_kernels_of_graph_layers_and_image_models_are_found() -> None:
    found = names_of(ImplicitAttention(8, num_heads=2))
    assert found["kernels"] == ["spectral.w1", "spectral.w2"]
    pytest.importorskip("torch_geometric")
    from ikattn.integrations.pyg import ImplicitKernelGATConv

    found = names_of(ImplicitKernelGATConv(8, 4, heads=2, p="learned"))
    assert set(found["kernels"]) == {"spectral.w1", "spectral.w2", "magnitude.raw"}


@pytest.mark.parametrize("name", ["lr", "frequency_lr", "weight_decay"])
@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), "fast"])
def test_rates_that_are_none_are_named(name: str, wrong: object) -> None:
    options: dict[str, Any] = {"lr": 1.0, name: wrong}
    with pytest.raises(ValueError, match=f"parameter_groups: {name} must be a number >= 0, got"):
        ikattn.parameter_groups(encoder(), **options)


def test_what_cannot_be_trained_is_named() -> None:
    with pytest.raises(ValueError, match=r"expected a model with parameters.*Identity with 0"):
        ikattn.parameter_groups(nn.Identity(), lr=1.0)
    with pytest.raises(ValueError, match=r"Linear with 2, all of them frozen"):
        ikattn.parameter_groups(nn.Linear(1, 1).requires_grad_(False), lr=1.0)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list"):
        ikattn.parameter_groups(list(nn.Linear(1, 1).parameters()), lr=1.0)
    flat = type("FullyShardedDataParallel", (nn.Module,), {"__module__": "torch.distributed"})
    with pytest.raises(ValueError, match="got FullyShardedDataParallel around 0"):
        ikattn.parameter_groups(nn.Sequential(flat()), lr=1.0)
