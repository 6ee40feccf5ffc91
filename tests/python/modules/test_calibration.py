"""ikattn.calibrate: implicit kernels fitted to softmax attention."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ikattn

E, H, L = 16, 4, 6


@pytest.fixture
def encoder() -> nn.TransformerEncoder:
    """Two layers whose attention is far from uniform."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    for part in model.layers:
        with torch.no_grad():
            part.self_attn.in_proj_weight.mul_(2.0)
    return model


def data(count: int = 20) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(count, L, E)


def weights_of(module: nn.MultiheadAttention, x: Tensor, **masks: Tensor) -> Tensor:
    with torch.no_grad():
        return module(x, x, x, average_attn_weights=False, **masks)[1]


def relative_errors(found: Tensor, expected: Tensor) -> Tensor:
    """Returns the error of each head, [H], of weights [N, H, L, S]."""
    return ((found - expected).square().sum((0, 2, 3)) / expected.square().sum((0, 2, 3))).sqrt()


def test_weights_come_nearer_to_those_of_softmax_on_data_not_fitted_to(encoder):
    stock = copy.deepcopy(encoder.layers[0].self_attn)
    model = ikattn.convert(encoder, num_frequencies=32, seed=0)
    drawn = copy.deepcopy(model.layers[0].self_attn)
    x = data()
    report = ikattn.calibrate(model, [x[:10], x[10:]], steps=100)
    assert [calibrated.names for calibrated in report] == [
        ["layers.0.self_attn"],
        ["layers.1.self_attn"],
    ]
    # the report's errors are those of one sequence in five
    held_out = torch.cat([x[2:10:5], x[12::5]])
    expected = weights_of(stock, held_out)
    before, after = (
        relative_errors(weights_of(module, held_out), expected)
        for module in (drawn, model.layers[0].self_attn)
    )
    torch.testing.assert_close(report[0].before, before, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(report[0].after, after, rtol=1e-4, atol=1e-5)
    assert (after < before).all()
    assert after.mean() < 0.7 * before.mean()
    assert str(report[0]).startswith("layers.0.self_attn: error of the weights 0.")


@pytest.mark.parametrize("spectral", ["direct", "ikan"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_models_of_16_bits_are_calibrated_in_float32(encoder, dtype, spectral):
    model = ikattn.convert(encoder, spectral=spectral, num_frequencies=32, seed=0).to(dtype)
    for report in ikattn.calibrate(model, [data().to(dtype)], steps=50):
        assert report.after.mean() < 0.9 * report.before.mean()
    assert {x.dtype for x in model.state_dict().values() if x.is_floating_point()} == {dtype}
    assert model(data().to(dtype)).isfinite().all()


def test_a_fit_that_fails_leaves_the_frequencies(encoder, monkeypatch):
    model = ikattn.convert(encoder, num_frequencies=32, seed=0).half()
    before = copy.deepcopy(model.state_dict())
    steps = iter(range(3))

    def failing(*_: object, **__: object) -> None:
        if next(steps) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch.optim.lr_scheduler.CosineAnnealingLR, "step", failing)
    with pytest.raises((KeyboardInterrupt, StopIteration)):
        ikattn.calibrate(model, [data().half()], steps=50)
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]), name


def test_only_frequencies_change(encoder: nn.TransformerEncoder) -> None:
    model = ikattn.convert(encoder, num_frequencies=8, seed=0).train()
    model.layers[1].eval()
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    ikattn.calibrate(model, [data()], steps=np.int64(3), select="layers.0.*")
    changed = {n for n, w in model.state_dict().items() if not torch.equal(w, before[n])}
    assert changed == {f"layers.0.self_attn.spectral.{w}" for w in ("w1", "w2")}
    assert [module.training for module in model.modules()] == modes
    assert {module.kernel for module in model.modules() if hasattr(module, "kernel")} == {
        "implicit"
    }
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_stay_as_they_were(encoder: nn.TransformerEncoder) -> None:
    model = ikattn.convert(encoder, num_frequencies=8, seed=0, p="learned")
    model(data()).square().sum().backward()
    before = {name: w.grad for name, w in model.named_parameters()}
    kept = {name: grad.clone() for name, grad in before.items()}
    ikattn.calibrate(model, [data()], steps=3)
    for name, w in model.named_parameters():
        assert w.grad is before[name]
        assert torch.equal(w.grad, kept[name])


def test_inference_mode_changes_nothing(encoder: nn.TransformerEncoder) -> None:
    twin = copy.deepcopy(encoder)
    x, padding = data(10), torch.arange(L) >= torch.full((10, 1), L - 2)
    batch = {"src": x, "src_key_padding_mask": padding, "mask": torch.zeros(L, L) > 0}
    for model in (encoder, twin):
        ikattn.convert(model, num_frequencies=8, seed=0)
    ikattn.calibrate(encoder, [batch])
    with torch.inference_mode():
        inference = {name: x.clone() for name, x in batch.items()}
        ikattn.calibrate(twin, [inference])
    for found, expected in zip(twin.parameters(), encoder.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def test_padding_has_no_part_in_the_fit(encoder: nn.TransformerEncoder) -> None:
    module = ikattn.convert(encoder.layers[0].self_attn.double(), num_frequencies=8, seed=0)
    twin = copy.deepcopy(module)
    x, padding = data(10).double(), torch.zeros(10, L, dtype=torch.bool)
    ikattn.calibrate(module, [{"query": x, "key": x, "value": x}], steps=5, output_steps=2)
    longer = torch.cat([x, torch.full((10, 2, E), 9.0).double()], dim=1)
    padding = torch.cat([padding, torch.ones(10, 2, dtype=torch.bool)], dim=1)
    batch = {"query": longer, "key": longer, "value": longer, "key_padding_mask": padding}
    ikattn.calibrate(twin, [batch], steps=5, output_steps=2)
    for found, expected in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("options", [{"p": "learned"}, {"spectral": "mikan"}], ids=str)
def test_generators_and_learned_orders_are_calibrated_too(encoder, options):
    model = ikattn.convert(encoder, num_frequencies=8, seed=0, **options)
    orders = [module.magnitude and module.magnitude.p for module in attention_modules(model)]
    report = ikattn.calibrate(model, [data()], steps=20)
    assert all((calibrated.after.mean() < calibrated.before.mean()) for calibrated in report)
    for module, order in zip(attention_modules(model), orders, strict=True):
        assert order is None or torch.equal(module.magnitude.p, order)
    ikattn.revert(model)


def attention_modules(model: nn.Module) -> list[ikattn.MultiheadAttention]:
    return [part for part in model.modules() if isinstance(part, ikattn.MultiheadAttention)]


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = ikattn.MultiheadAttention(E, H)

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_errors_say_what_was_expected_and_got(encoder: nn.TransformerEncoder) -> None:
    with pytest.raises(ValueError, match="expected a model with implicit kernels"):
        ikattn.calibrate(encoder, [data()])
    model = ikattn.convert(encoder, num_frequencies=4)
    with pytest.raises(ValueError, match="at least one batch"):
        ikattn.calibrate(model, [])
    for one in (data(), {"src": data()}):
        with pytest.raises(TypeError, match=rf"got one {type(one).__name__}: \[batch\] is one"):
            ikattn.calibrate(model, one)
    with pytest.raises(TypeError, match=r"steps must be a whole number, got 2\.5"):
        ikattn.calibrate(model, [data()], steps=2.5)
    with pytest.raises(ValueError, match="steps must not be negative, got -1"):
        ikattn.calibrate(model, [data()], steps=-1)
    with pytest.raises(ValueError, match="attention was not called in 1 batches"):
        ikattn.calibrate(Unused(), [data()])
    with pytest.raises(ValueError, match=r"finite attention weights, got NaN in layers\.0\."):
        ikattn.calibrate(model, [data() * math.nan])
    model.layers[1].self_attn.spectral.requires_grad_(False)
    with pytest.raises(ValueError, match=r"got frozen ones in layers\.1\.self_attn"):
        ikattn.calibrate(model, [data()])
    module = ikattn.MultiheadAttention(E, H, batch_first=True)
    drawn, x = copy.deepcopy(module.state_dict()), data()[:2, :5]
    with pytest.raises(ValueError, match="several tokens, got one key in every call of the model"):
        ikattn.calibrate(module, [(x[:1, :1],) * 3], steps=2)
    with pytest.raises(ValueError, match="nothing but padding in the model itself"):
        ikattn.calibrate(module, [(x, x, x, torch.ones(2, 5) > 0)], steps=2)
    torch.testing.assert_close(module.state_dict(), drawn, rtol=0, atol=0)


def test_a_model_that_fails_is_left_as_it_was(encoder: nn.TransformerEncoder) -> None:
    model = ikattn.convert(encoder, num_frequencies=4).train()
    with pytest.raises(Exception, match=r"size|dimension|shape"):
        ikattn.calibrate(model, [torch.randn(2, 3, E + 1)])
    assert model.layers[0].self_attn.kernel == "implicit"
    assert model.layers[0].self_attn.training
    assert len(model.layers[0].self_attn._forward_pre_hooks) == 1


class Sometimes(nn.Module):
    """A model whose second attention is for long sequences alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = ikattn.MultiheadAttention(E, H, batch_first=True, num_frequencies=8, seed=0)
        self.second = copy.deepcopy(self.first)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x, x, x, need_weights=False)[0]
        return x if x.size(1) < L else x + self.second(x, x, x, need_weights=False)[0]


def test_layers_that_some_batches_do_not_call() -> None:
    torch.manual_seed(0)
    model, x = Sometimes(), data(10)
    report = ikattn.calibrate(model, [x[:, :3], x, x[:, :4]], steps=5, output_steps=5)
    assert [layer.names for layer in report] == [["first"], ["second"]]
    with pytest.raises(ValueError, match="second was not called in 1 batches"):
        ikattn.calibrate(model, [x[:, :3]], steps=5)


def test_interrupted_training_leaves_a_layer_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Sometimes()
    before = copy.deepcopy(model.state_dict())
    calls = iter(range(12))

    def step(self: torch.optim.Adam) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(1.0)
        if next(calls) == 11:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    with pytest.raises(KeyboardInterrupt):
        ikattn.calibrate(model, [data(10)], steps=5, output_steps=5, train="attention")
    # the eleventh step is the second of those on the first layer's output
    for name, value in model.state_dict().items():
        if ".spectral." not in name:
            torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert model.training
    assert model.first.kernel == model.second.kernel == "implicit"
