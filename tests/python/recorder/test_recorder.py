"""The recorder: calls and batches, modes, threads, that it leaves no trace, bad input."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikattn
from agreement import assert_close, assert_identical
from ikattn.maps import Layer
from ikattn.maps.contribution_maps import Contributions
from ikattn.recorder import record
from recorded_models import SUMMED, TOLERANCE, attention, encoder

pytestmark = pytest.mark.usefixtures("float64_by_default")


def hooks_of(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


@contextlib.contextmanager
def unfused(model: nn.Module) -> Iterator[None]:
    """Keeps torch from the fused kernel of a whole layer, whose types under autocast are others."""
    handles = [module.register_forward_hook(lambda *_: None) for module in model.modules()]
    yield
    for handle in handles:
        handle.remove()


# --- Calls and batches


def test_each_call_is_a_batch_and_one_that_raises_is_none() -> None:
    model = encoder()
    with torch.no_grad(), record(model) as recording:
        model(torch.randn(1, 3, 16))
        with pytest.raises((RuntimeError, AssertionError)):
            model(torch.randn(1, 3, 15))
        model(torch.randn(2, 4, 16))
    shapes = [batch["layers.1.self_attn"].summed.shape for batch in recording.batches]
    assert shapes == [(1, 3, 3), (2, 4, 4)]
    with pytest.raises(LookupError, match="2 forward calls"):
        recording["layers.0.self_attn"]


def test_call_that_raises_half_way_leaves_the_recorder_usable() -> None:
    model = encoder()
    failing = model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with torch.no_grad(), record(model) as recording:
        with pytest.raises(ZeroDivisionError):
            model(torch.randn(1, 3, 16))
        failing.remove()
        model(torch.randn(1, 4, 16))
    assert [len(batch) for batch in recording.batches] == [2]
    assert recording["layers.0.self_attn"].summed.shape == (1, 4, 4)


def test_part_of_the_model_called_alone_is_a_batch() -> None:
    model = encoder()
    with torch.no_grad(), record(model) as recording:
        model.layers[1](torch.randn(1, 3, 16))
    assert list(recording.batches[0]) == ["layers.1.self_attn"]


def test_module_that_runs_twice_is_numbered() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(x))

    model = Shared().eval()
    x = torch.randn(1, 3, 16)
    with torch.no_grad():
        with record(model, maps=("encoder",)) as recording:
            model(x)
            model(x)
        with record(model.block, maps=("encoder",)) as second:
            model.block(model.block(x))
    assert recording.names == ["block.self_attn", "block.self_attn#2"]
    assert len(recording.batches) == 2
    expected = second.batches[1]["self_attn"].encoder
    assert_close(recording.batches[0]["block.self_attn#2"].encoder, expected, TOLERANCE)


def test_nested_recordings_each_get_every_call() -> None:
    model = encoder()
    with torch.no_grad(), record(model, maps=("summed",)) as outer:
        model(torch.randn(1, 3, 16))
        with record(model, maps=("value_norms",)) as inner:
            model(torch.randn(1, 3, 16))
        model(torch.randn(1, 3, 16))
    assert (len(outer.batches), len(inner.batches)) == (3, 1)
    assert inner["layers.0.self_attn"].summed is None
    assert hooks_of(model) == 0


def test_layers_are_selected_by_name_pattern_or_predicate() -> None:
    model = encoder()
    for layers in ("layers.1.*", ["layers.1.self_attn"], lambda name, module: "1" in name):
        with torch.no_grad(), record(model, layers=layers) as recording:
            model(torch.randn(1, 3, 16))
        assert recording.names == ["layers.1.self_attn"]


def test_maps_stream_to_a_callback_and_are_not_kept() -> None:
    model = encoder()
    seen: list[tuple[int, Layer, Contributions]] = []
    with torch.no_grad(), record(model, on_layer=lambda *args: seen.append(args)) as recording:
        model(torch.randn(1, 3, 16))
        assert len(seen) == 2
        model(torch.randn(2, 4, 16))
    assert [(number, layer.name) for number, layer, _ in seen] == [
        (0, "layers.0.self_attn"),
        (0, "layers.1.self_attn"),
        (1, "layers.0.self_attn"),
        (1, "layers.1.self_attn"),
    ]
    assert seen[2][2].summed.shape == (2, 4, 4)
    assert recording.batches == []
    assert recording.names == ["layers.0.self_attn", "layers.1.self_attn"]
    with pytest.raises(LookupError, match="on_layer"):
        recording["layers.0.self_attn"]


def test_checkpointed_layer_that_runs_again_in_the_backward_is_no_call() -> None:
    from torch.utils.checkpoint import checkpoint

    model = encoder()
    x = torch.randn(1, 3, 16, requires_grad=True)
    with record(model) as recording:
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert len(recording.batches) == 1


# --- Modes


def test_maps_have_a_gradient_on_demand() -> None:
    module = attention(batch_first=True)
    x = torch.randn(1, 4, 16, requires_grad=True)
    with record(module) as detached, record(module, detach=False) as attached:
        module(x, x, x)
    assert not detached["MultiheadAttention"].summed.requires_grad

    def summed(x: Tensor, weight: Tensor) -> Tensor:
        parameters = {"out_proj.weight": weight}
        with record(module, maps=("summed",), detach=False) as recording:
            torch.func.functional_call(module, parameters, (x, x, x))
        return recording["MultiheadAttention"].summed

    loss = attached["MultiheadAttention"].summed.sum()
    gradient = torch.autograd.grad(loss, x)[0]
    assert gradient.abs().max() > 0
    weight = module.out_proj.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(summed, (x, weight))


def test_gradients_of_the_model_are_the_same_inside_the_block() -> None:
    model = encoder().train()
    for dropout in [m for m in model.modules() if isinstance(m, nn.Dropout)]:
        dropout.p = 0.0
    for layer in model.layers:
        layer.self_attn.dropout = 0.0
    x = torch.randn(1, 3, 16, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    with record(model, maps=None, detach=False):
        (found,) = torch.autograd.grad(model(x).square().sum(), x)
    assert_identical([found], [expected])


def test_inference_mode() -> None:
    model = encoder()
    with record(model, maps=None) as recording, torch.inference_mode():
        model(torch.randn(1, 3, 16))
    assert recording["layers.0.self_attn"].encoder.shape == (1, 3, 3)


def test_autocast_maps_are_float32_of_the_rounded_projections() -> None:
    model = encoder().float()
    x = torch.randn(2, 5, 16, dtype=torch.float32)
    with torch.no_grad():
        with record(model, maps=None) as exact:
            model(x)
        with torch.autocast("cpu", torch.bfloat16):
            with unfused(model):
                before = model(x)
            with record(model, maps=None) as recording:
                after = model(x)
    assert_identical([after], [before])
    for name in SUMMED:
        found, expected = (getattr(r["layers.0.self_attn"], name) for r in (recording, exact))
        assert found.dtype == torch.float32
        assert_close(found, expected, 2e-2, name)


@pytest.mark.parametrize("kernel", ["stock", "rbf", "implicit"])
def test_half_precision_maps_are_float32(kernel: str) -> None:
    model = encoder()
    if kernel != "stock":
        ikattn.convert(model, kernel)
    model = model.bfloat16()
    with torch.no_grad(), record(model, maps=None) as recording:
        model(torch.randn(2, 5, 16, dtype=torch.bfloat16))
    assert recording["layers.1.self_attn"].encoder.dtype == torch.float32


@pytest.mark.parametrize("in_place", [False, True])
def test_graph_compiled_before_is_recorded_too(in_place: bool) -> None:
    model = encoder(enable_nested_tensor=False)
    x = torch.randn(1, 3, 16)
    with torch.no_grad(), record(model) as expected:
        model(x)
    if in_place:
        model.compile(backend="eager")
        compiled: Any = model
    else:
        compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(x)
        with record(compiled) as recording:
            compiled(x)
    for found, name in zip(recording.names, expected.names, strict=True):
        assert_close(recording[found].summed, expected[name].summed, TOLERANCE)


# --- Threads


def run_in_threads(*functions: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_two_threads_record_two_models() -> None:
    models, found = [encoder(), encoder()], {}

    def work(number: int) -> None:
        for length in range(1, 6):
            x = torch.randn(number + 1, length, 16, dtype=torch.float64)
            with torch.no_grad(), record(models[number], maps=None) as recording:
                models[number](x)
            found[number, length] = recording["layers.1.self_attn"].encoder

    run_in_threads(lambda: work(0), lambda: work(1))
    for (number, length), encoder_map in found.items():
        assert encoder_map.shape == (number + 1, length, length)
    assert len(found) == 10


def test_one_model_is_run_by_several_threads() -> None:
    model = encoder()
    inputs = [torch.randn(1, length, 16) for length in range(1, 9)]
    expected = {}
    for x in inputs:
        with torch.no_grad(), record(model, maps=None) as recording:
            model(x)
        expected[x.size(1)] = recording["layers.1.self_attn"].encoder

    def work(share: list[Tensor]) -> None:
        with torch.no_grad():
            for x in share:
                model(x)

    with record(model, maps=None) as recording:
        run_in_threads(*(lambda s=inputs[start::4]: work(s) for start in range(4)))
    assert len(recording.batches) == 8
    for batch in recording.batches:
        found = batch["layers.1.self_attn"].encoder
        assert_close(found, expected.pop(found.size(1)), TOLERANCE)
    assert not expected


# --- No trace


def test_fused_layer_is_fused_again_after_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model = encoder(enable_nested_tensor=False)
    fused = []
    kernel = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(
        torch, "_transformer_encoder_layer_fwd", lambda *a: fused.append(1) or kernel(*a)
    )
    with torch.no_grad():
        with record(model):
            model(torch.randn(1, 3, 16))
        assert not fused
        model(torch.randn(1, 3, 16))
    assert fused


def test_no_hook_is_left() -> None:
    model = encoder()
    with torch.no_grad(), record(model, maps=None):
        assert hooks_of(model) > 0
        model(torch.randn(1, 3, 16))
    assert hooks_of(model) == 0
    with pytest.raises(ZeroDivisionError), record(model, maps=None):
        raise ZeroDivisionError
    assert hooks_of(model) == 0


def test_recording_keeps_neither_model_nor_inputs_alive() -> None:
    model, x = encoder(), torch.randn(1, 3, 16)
    seen = [weakref.ref(model), weakref.ref(x)]
    seen += [weakref.ref(module) for module in model.modules()]
    with torch.no_grad(), record(model, maps=None) as recording:
        model(x)
    del model, x
    gc.collect()
    assert not [reference() for reference in seen if reference() is not None]
    assert recording["layers.0.self_attn"].encoder.shape == (1, 3, 3)


def test_what_maps_are_made_of_is_let_go_layer_by_layer() -> None:
    model = encoder()
    weights: list[weakref.ref[Tensor]] = []

    def on_layer(number: int, layer: Layer, maps: Contributions) -> None:
        weights.append(weakref.ref(maps.weights))

    with torch.no_grad(), record(model, maps=("weights", "encoder"), on_layer=on_layer):
        model(torch.randn(1, 3, 16))
        assert [reference() for reference in weights] == [None, None]


# --- Bad input


def test_unknown_maps_are_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="'sumed'") as error, record(encoder(), maps=("sumed",)):
        pass
    assert "with_residual" in str(error.value)
    with pytest.raises(ValueError, match="at least one"), record(encoder(), maps=()):
        pass


def test_maps_that_a_layer_has_not_are_refused_before_anything_runs() -> None:
    reasons = {
        "with_norm": (encoder(norm_first=True), "before the attention"),
        "with_residual": (attention(), "not known"),
        "encoder": (nn.TransformerDecoderLayer(16, 4), "another attention"),
        "mixing_ratio": (nn.TransformerDecoderLayer(16, 4), "not among its keys"),
    }
    for name, (model, reason) in reasons.items():
        with pytest.raises(ValueError, match=reason) as error, record(model, maps=(name,)):
            pass
        assert name in str(error.value)
        assert hooks_of(model) == 0


def test_own_part_of_cross_attention_is_refused_when_it_shows() -> None:
    module = attention()
    x, y = torch.randn(3, 1, 16), torch.randn(4, 1, 16)
    with record(module, maps=("mixing_ratio",)):
        module(x, x, x)
        with pytest.raises(ValueError, match="not among its keys"):
            module(x, y, y)
    with record(module, maps=None) as recording:
        module(x, y, y)
    assert not recording["MultiheadAttention"].mixing_ratio


def test_models_that_cannot_be_recorded_are_named() -> None:
    class Own(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    with pytest.raises(TypeError, match="got str"), record("model"):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="none in Linear"), record(nn.Linear(2, 2)):
        pass
    with pytest.raises(NotImplementedError, match="forward of its own"), record(Own(16, 4)):
        pass
    adapted = attention()
    adapted.out_proj = nn.Bilinear(16, 16, 16)
    with pytest.raises(TypeError, match="Bilinear"), record(adapted):
        pass
    with pytest.raises(ValueError, match=r"layers='x\*'"), record(encoder(), layers="x*"):
        pass


def test_nothing_recorded_says_so(tmp_path: Path) -> None:
    with record(encoder()) as recording, torch.no_grad():
        encoder()(torch.randn(1, 3, 16))  # another model
    assert recording.batches == []
    with pytest.raises(LookupError, match="nothing was recorded: call the model inside"):
        recording["layers.0.self_attn"]
    with pytest.raises(LookupError, match="nothing was recorded"):
        recording.save(tmp_path / "maps.npz")
    with pytest.raises(LookupError, match="nothing was recorded"):
        ikattn.rollout(recording)
    assert not list(tmp_path.iterdir())


def test_a_compiled_model_goes_by_the_names_of_the_model_itself() -> None:
    model = encoder().eval()
    compiled = torch.compile(model)
    with torch.no_grad(), record(compiled, layers="layers.0.*") as recording:
        compiled(torch.randn(1, 3, 16))
    assert recording.names == ["layers.0.self_attn"]


def test_layers_are_selected_by_type_and_a_model_may_be_attention_itself() -> None:
    model = nn.ModuleList([encoder(), nn.MultiheadAttention(16, 4)])
    x = torch.randn(1, 3, 16)
    with record(model, layers=nn.TransformerEncoderLayer) as recording:
        model[0](x)
        model[1](x, x, x)
    assert recording.names
    assert all("layers" in name for name in recording.names)
    with record(model[1], layers=nn.MultiheadAttention) as recording:
        model[1](x, x, x)
    assert recording.names == ["MultiheadAttention"]
    with pytest.raises(ValueError, match="selects none"), record(model[1], layers="x"):
        pass


def test_unknown_layer_is_named_with_those_there_are() -> None:
    model = encoder()
    with torch.no_grad(), record(model) as recording:
        model(torch.randn(1, 3, 16))
    with pytest.raises(KeyError, match=r"layers\.1\.self_attn"):
        recording["layers.7"]
