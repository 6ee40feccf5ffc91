"""Calls and batches, modes, threads, waits and memory of ``record``, and bad input."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ikattn
from agreement import assert_close, assert_identical
from hand_written_blocks import Attention, B, Block, D, H, L
from ikattn import _memory
from ikattn.maps import Layer, Recording
from ikattn.maps.contribution_maps import Contributions
from ikattn.recorder import record
from ikattn.recorder.runs import following, residual_sum, transfers
from recorded_models import TOLERANCE, attention, encoder, recorded, run_in_threads

pytestmark = pytest.mark.usefixtures("float64_by_default")


def hooks_of(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


# --- Calls and batches


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_call_that_an_error_ends_is_forgotten_and_a_part_is_a_call(error: Any) -> None:
    model, stop = nn.Sequential(Block(), Block()).eval(), [True]

    def interrupt(module: nn.Module, args: Any) -> None:
        if stop.pop() if stop else False:
            raise error

    model[1].mlp.register_forward_pre_hook(interrupt)
    x = torch.randn(B, L, D)
    with torch.no_grad(), record(model) as recording:
        with pytest.raises(error):
            model(x)
        assert not torch.overrides._get_current_function_mode_stack()
        model(x)
        model[1](x)  # a part, called directly
    assert [list(batch) for batch in recording.batches] == [["0.attn", "1.attn"], ["1.attn"]]
    with pytest.raises(LookupError, match="2 forward calls"):
        recording["1.attn"]


def test_nested_recordings_each_get_every_call() -> None:
    model = encoder()
    with torch.no_grad(), record(model, maps=("summed",)) as outer:
        model(torch.randn(1, 3, 16))
        with record(model, maps=("value_norms",)) as inner:
            model(torch.randn(1, 3, 16))
            assert not torch.overrides._get_current_function_mode_stack()
        model(torch.randn(1, 3, 16))
    assert (len(outer.batches), len(inner.batches)) == (3, 1)
    assert inner["layers.0.self_attn"].summed is None
    assert hooks_of(model) == 0
    with pytest.raises(ZeroDivisionError), record(model):
        raise ZeroDivisionError
    assert hooks_of(model) == 0


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("0.layers.1.*", ["0.layers.1.self_attn"]),
        (["0.layers.1.self_attn"], ["0.layers.1.self_attn"]),
        (lambda name, module: "layers.1" in name, ["0.layers.1.self_attn"]),
        (nn.TransformerEncoderLayer, ["0.layers.0.self_attn", "0.layers.1.self_attn"]),
    ],
)
def test_layers_are_selected(layers: Any, expected: list[str]) -> None:
    model, x = nn.ModuleList([encoder(), attention()]), torch.randn(1, 3, 16)
    with torch.no_grad(), record(model, layers=layers) as recording:
        model[0](x)
        model[1](x, x, x)
    assert recording.names == expected


def test_a_model_may_be_attention_itself() -> None:
    module, x = attention(), torch.randn(1, 3, 16)
    with record(module, layers=nn.MultiheadAttention) as recording:
        module(x, x, x)
    assert recording.names == ["MultiheadAttention"]
    with pytest.raises(ValueError, match="selects none"), record(module, layers="x"):
        pass
    with (
        pytest.raises(TypeError, match=r"patterns and types, got \[0\]"),
        record(module, layers=[0]),
    ):
        pass


def test_a_module_of_several_places_is_recorded_once() -> None:
    shared, x = nn.MultiheadAttention(16, 4), torch.randn(3, 1, 16)
    model = nn.ModuleDict({"one": shared, "two": shared, "three": nn.MultiheadAttention(16, 4)})
    with record(model) as recording:
        for module in model.values():
            module(x, x, x)
    assert recording.names == ["one", "three"]


@torch.no_grad()
def test_what_replaces_sdpa_while_a_model_is_recorded_is_told_and_put_back() -> None:
    before, model = F.scaled_dot_product_attention, nn.Sequential(Block()).eval()
    with record(model), record(model) as inner:
        assert F.scaled_dot_product_attention is not before
        model(torch.randn(B, L, D))
    assert F.scaled_dot_product_attention is before
    assert inner.names == ["0.attn"]


def test_copies_within_the_block_are_copies_without_hooks() -> None:
    model, x = nn.Sequential(Block()).eval(), torch.randn(B, L, D)
    with torch.no_grad(), record(model) as recording:
        copied = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
        assert torch.equal(copied(x), loaded(x))
        assert recording.batches == []
        model(x)
    assert len(recording.batches) == 1


# --- Modes

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def unfused() -> nn.Module:
    return encoder(enable_nested_tensor=False)


def blocks() -> nn.Module:
    return nn.Sequential(Block(), Block()).eval()


class LowRank(nn.Module):
    """An out-projection with an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class OwnProduct(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


def hooked() -> nn.Module:
    layer = nn.Linear(16, 16)
    layer.register_forward_hook(lambda module, args, out: 2 * out)
    return layer


def summed(model: nn.Module, call: Callable[[], Any]) -> list[Tensor]:
    with record(model, "summed") as recording:
        call()
    assert len(recording.batches) == 1
    maps = [recording[name].summed for name in recording.names]
    return [each for each in maps if each is not None]


@pytest.mark.parametrize("make", [unfused, blocks])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_maps_are_the_same_in_every_grad_mode(make: Any, mode: Any) -> None:
    model = make()
    expected = summed(model, lambda: model(X))
    with mode():
        found = summed(model, lambda: model(X))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out", [LowRank, lambda: OwnProduct(16, 16), hooked, None])
def test_autocast_gives_the_maps_of_its_type(dtype: torch.dtype, out: Any) -> None:
    model = blocks()
    if out is not None:
        for block in model:
            block.attn.proj = out()
    model, x = model.float(), X.float()
    expected = summed(model, lambda: model(x))
    with torch.autocast("cpu", dtype):
        found = summed(model, lambda: model(x))
    for one, two in zip(found, expected, strict=True):
        assert (one - two).abs().max() < 0.03 * two.max()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("detach", [True, False])
def test_a_checkpointed_and_padded_step_has_the_gradients_of_the_plain_one(use_reentrant, detach):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=40)
    model = transformers.LlamaForCausalLM(config).train()
    options = {"use_reentrant": use_reentrant}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]])

    def step() -> list[Tensor]:
        model.zero_grad()
        loss = model(input_ids=ids, attention_mask=(ids > 0).long(), labels=ids, use_cache=False)
        loss.loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = step()
    with record(model, "summed", detach=detach) as recording:
        found = step()
    torch.testing.assert_close(found, expected)
    assert len(recording.batches) == 1


@pytest.mark.parametrize("make", [unfused, blocks])
def test_a_transform_of_torch_func_is_named(make: Any) -> None:
    model = make()

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (X,)).sum()

    own = dict(model.named_parameters())
    for call in (lambda: torch.func.grad(loss)(own), lambda: torch.vmap(model)(X[None])):
        with record(model), pytest.raises(NotImplementedError, match=r"torch\.func"):
            call()
    summed(model, lambda: model(X))  # and nothing of them is left behind


@pytest.mark.parametrize("make", [unfused, blocks])
@pytest.mark.parametrize("warm", [False, True])
def test_a_compiled_model_is_recorded_by_its_original(make: Any, warm: bool) -> None:
    torch._dynamo.reset()
    model = make()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        if warm:
            compiled(X)
        expected = summed(model, lambda: model(X))
        for recorded in (model, compiled):
            found = summed(recorded, lambda: compiled(X))
            torch.testing.assert_close(found, expected)
        found = summed(model, lambda: torch.compile(model, backend="eager")(X))
        torch.testing.assert_close(found, expected)
        model.compile(backend="eager")
        if warm:
            model(X)
        torch.testing.assert_close(summed(model, lambda: model(X)), expected)
        with record(compiled) as of_compiled, record(model) as of_model:
            compiled(X)
    assert of_compiled.names == of_model.names


def test_the_first_compilation_of_a_process_within_the_block_is_refused() -> None:
    code = (
        "import torch, ikattn\n"
        "model = torch.nn.Sequential(torch.nn.TransformerEncoderLayer(8, 2, 8)).eval()\n"
        "with ikattn.record(model):\n"
        "    torch.compile(model, backend='eager')(torch.randn(2, 3, 8))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "call torch.compile before the block" in done.stderr


def test_compiled_code_is_off_until_the_last_of_overlapping_recordings_ends() -> None:
    compiled = torch.compile(lambda x: torch.compiler.is_compiling(), backend="eager")
    assert compiled(X)
    first, second = unfused(), unfused()
    inside, over = threading.Event(), threading.Event()

    def other() -> None:
        with record(second):
            inside.set()
            over.wait(20)

    thread = threading.Thread(target=other)
    with record(first):
        thread.start()
        assert inside.wait(20)
    assert not compiled(X)
    over.set()
    thread.join()
    assert compiled(X)


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


@pytest.mark.parametrize("kernel", ["stock", "rbf", "implicit"])
def test_half_precision_maps_are_float32(kernel: str) -> None:
    model = encoder() if kernel == "stock" else ikattn.convert(encoder(), kernel)
    recording = recorded(model.bfloat16(), torch.randn(2, 5, 16, dtype=torch.bfloat16), None)
    assert recording["layers.1.self_attn"].encoder.dtype == torch.float32


# --- Threads


def test_one_model_is_run_by_several_threads() -> None:
    model = encoder()
    inputs = [torch.randn(1, length, 16) for length in range(1, 9)]
    expected = {}
    for x in inputs:
        expected[x.size(1)] = recorded(model, x, None)["layers.1.self_attn"].encoder

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


def test_recording_keeps_neither_model_nor_inputs_alive() -> None:
    model, x = encoder(), torch.randn(1, 3, 16)
    seen = [weakref.ref(model), weakref.ref(x)]
    seen += [weakref.ref(module) for module in model.modules()]
    recording = recorded(model, x, None)
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


# --- Under a default device other than that of the maps

ON_CPU = ("summed", "weights", "value_norms", "mixing_ratio", "with_residual")
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
    return ikattn.load_maps(path)["self_attn"].summed


@pytest.fixture(scope="module")
def recording() -> Recording:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    return recorded(layer, torch.randn(2, 5, 16), ON_CPU)


@pytest.mark.parametrize("name", ACTS)
def test_maps_stay_on_their_own_device(name: str, recording: Recording, tmp_path: Path) -> None:
    with torch.device("meta"):
        found = ACTS[name](recording, tmp_path)
    if isinstance(found, Tensor):
        assert found.device.type == "cpu"


def test_recording_under_a_default_device() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    with torch.device("meta"):
        recording = recorded(layer, x)
    assert recording["self_attn"].with_norm.device.type == "cpu"


@pytest.mark.parametrize("kernel", ["dot", "rbf", "implicit"])
def test_modules_under_a_default_device(kernel: str) -> None:
    attention = ikattn.MultiheadAttention(16, 4, kernel=kernel, batch_first=True)  # type: ignore[arg-type]
    x, padding = torch.randn(2, 5, 16), torch.zeros(2, 5, dtype=torch.bool)
    with torch.device("meta"):
        output, weights = attention(x, x, x, key_padding_mask=padding)
        output.sum().backward()
    assert (output.device.type, weights.device.type) == ("cpu", "cpu")


# --- Waits: numbers that are looked at when a call has ended


class OnItsWay(transfers.Arrival):
    """Copies that are there once somebody waits for them."""

    def __init__(self) -> None:
        self.is_there = False

    def is_over(self) -> bool:
        return self.is_there

    def wait(self) -> None:
        self.is_there = True


@pytest.fixture(params=[False, True], ids=["on a CPU", "as on a GPU"])
def waits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether numbers are looked at when a call has ended, as on a GPU, which is imitated."""
    if request.param:
        for module in (residual_sum, following):
            monkeypatch.setattr(module, "takes_waiting", lambda x: True)
        monkeypatch.setattr(transfers.Transfers, "arrival", lambda self: OnItsWay())
    return bool(request.param)


class Changing(nn.Module):
    """Two layers of torch, the second of which may add something more to its sum."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, H, 32, 0.0, batch_first=True, norm_first=norm_first)
        self.blocks = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
        self.more = 0.0
        self.blocks[1].norm1.register_forward_pre_hook(lambda norm, args: (args[0] + self.more,))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


MADE = ("summed", "with_norm", "encoder")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_wrong_call_is_told_and_the_others_are_kept(mode: Any, waits: bool) -> None:
    model, x = Changing().eval(), torch.randn(B, L, D)
    wrong = pytest.raises(RuntimeError, match=r"blocks\.1\.self_attn does not add up: its output")
    with mode(), record(model, maps=MADE) as recording:
        model(x)
        model.more = 0.1
        with wrong:
            model(x)
            len(recording.batches)
        model.more = 0.0
        model(x)
    assert len(recording.batches) == 2
    for name, maps in recording.batches[0].items():
        for each in MADE:
            assert torch.equal(getattr(maps, each), getattr(recording.batches[1][name], each))
    model.more = 0.1
    with wrong, record(model, maps=MADE) as recording:
        model(x)  # nobody looks before the recording ends
    assert recording.batches == []


def test_an_error_of_the_callers_is_not_hidden_by_one_of_the_maps(waits: bool) -> None:
    model, x = Changing().eval(), torch.randn(B, L, D)

    def fail() -> None:
        for model.more in (0.0, 0.1)[: 1 + waits]:
            model(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), record(model, maps=MADE) as recording:
        fail()
    assert len(recording.batches) == 1


def test_a_residual_that_changes_within_inference_is_found_out(waits: bool) -> None:
    layer = nn.TransformerEncoderLayer(D, H, 32, 0.0, batch_first=True, norm_first=True).eval()
    x, spoils = torch.randn(B, L, D), [False]

    def spoil(module: nn.Module, args: Any, output: Any) -> None:
        if spoils[0]:  # what the block adds its output to
            given.mul_(2)

    with torch.inference_mode(), record(layer, maps=("summed", "with_residual")) as recording:
        given = x.clone()
        layer.self_attn.register_forward_hook(spoil)
        layer(given)
        spoils[0] = True
        found_out = pytest.raises((RuntimeError, ValueError), match=r"does not add up|no map")
        with found_out:
            layer(given)
            len(recording.batches)


def test_batches_are_there_where_somebody_looks_and_in_copies(waits: bool) -> None:
    model, x = Changing().eval(), torch.randn(B, L, D)
    with record(model) as recording:
        model(x)
        assert recording.names == ["blocks.0.self_attn", "blocks.1.self_attn"]
        for copied in (pickle.loads(pickle.dumps(recording)), copy.deepcopy(recording)):
            assert len(copied.batches) == 1
        assert recording["blocks.0.self_attn"].summed is not None
        model(x)
    assert len(recording.batches) == 2


def test_on_layer_gets_layers_once_they_have_been_looked_at(waits: bool) -> None:
    model, x, seen = Changing().eval(), torch.randn(B, L, D), []

    def note(number: int, layer: Layer, maps: Contributions) -> None:
        assert maps.summed.shape == (B, L, L)
        seen.append((number, layer.name))

    with record(model, maps=MADE, on_layer=note) as recording:
        model(x)
        assert seen == [(0, "blocks.0.self_attn"), (0, "blocks.1.self_attn")]
        model.more = 0.1
        with pytest.raises(RuntimeError, match=r"blocks\.1\.self_attn does not add up"):
            model(x)
    assert seen[2:] == [(1, "blocks.0.self_attn")]
    assert recording.batches == []
    with pytest.raises(LookupError, match="on_layer"):
        recording["blocks.0.self_attn"]


def test_a_sum_that_dropout_hides_in_training_is_no_error(waits: bool) -> None:
    class Dropping(nn.TransformerEncoderLayer):
        def _sa_block(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            made = self.self_attn(x, x, x, need_weights=False)[0]
            return F.dropout(made, 0.5, self.training)

    model, x = Dropping(D, H, 32, 0.0, batch_first=True).eval(), torch.randn(B, L, D)
    with record(model, maps=("summed",)) as recording:
        model(x)
        model.train()
        for _ in range(3):
            model(x)
        assert len(recording.batches) == 4


def test_a_scale_that_changes_between_calls_is_found_every_time() -> None:
    model, scale = nn.Sequential(Block()).eval(), [1.0]
    x = torch.randn(B, L, D)
    model[0].attn.register_forward_hook(lambda module, args, out: scale[0] * out)
    with torch.no_grad(), record(model, maps=("with_residual",)) as recording:
        for scale[0] in (1.0, 1.0, 0.5, 1.0):
            model(x)
    first, *others = (batch["0.attn"].with_residual for batch in recording.batches)
    assert [torch.allclose(each, first) for each in others] == [True, False, True]


@pytest.mark.parametrize("check", ["rows", "all"])
def test_what_a_model_writes_over_later_was_right(check: str, waits: bool) -> None:
    class WritesOver(Attention):
        def forward(self, x: Tensor) -> Tensor:
            heads = self.heads(x)
            made: Tensor = self.proj(heads)
            heads.zero_()
            return made

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.norm = WritesOver(), nn.LayerNorm(D)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.norm(x + self.attn(x))
            self.norm.weight.zero_()  # as where the next layer's are loaded
            return made

    model = Model().eval()
    recording = recorded(model, torch.randn(1, 1, D), "summed", check=check)
    assert recording.batches[0]["attn"].summed is not None


@torch.no_grad()
def test_a_norm_that_changes_is_followed_as_before(waits: bool) -> None:
    """Maps through it that were not asked for by name are left out, where nothing waits."""
    model, x = Changing(norm_first=True).eval(), torch.randn(B, L, D)
    norm, name = model.blocks[0].norm2, "blocks.0.self_attn"
    with record(model, maps=None) as recording:
        model(x)
        forward = norm.forward
        norm.forward = lambda x: forward(x) + 1
        model(x)
        if waits:
            with pytest.raises(RuntimeError, match=r"blocks\.0\.self_attn does not add up"):
                len(recording.batches)
            model(x)
        assert recording.batches[0][name].encoder is not None
        assert recording.batches[-1][name].encoder is None


# --- Room for maps

MAP = 2 * 8 * 8 * 8  # bytes of a map of two sequences of eight tokens in float64


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many bytes are free."""
    return lambda count: monkeypatch.setattr(_memory, "free_memory", lambda device: count)


def run(maps: Any = "summed", **options: Any) -> int:
    return len(recorded(encoder(), torch.randn(2, 8, 16), maps, **options).batches)


def test_sizes_and_ways_out_are_told_before_any_map_is_made(free: Any) -> None:
    free(2 * MAP - 1)
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


def test_unknown_layer_is_named_with_those_there_are() -> None:
    with pytest.raises(KeyError, match=r"layers\.1\.self_attn"):
        recorded(encoder(), torch.randn(1, 3, 16), "summed")["layers.7"]
