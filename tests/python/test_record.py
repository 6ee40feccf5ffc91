"""``ikattn.record`` on torch's own modules: what it records, and that it leaves no trace."""

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
from ikattn.analysis import _attention_call
from ikattn.analysis.record import record
from ikattn.analysis.recording import Layer
from ikattn.contributions import Contributions, NormStats

TOLERANCE = 1e-12  # all of it in float64
SUMMED = ("summed", "with_residual", "with_norm", "encoder")

pytestmark = pytest.mark.usefixtures("in_float64")


def attention(kernel: str = "stock", **options: Any) -> nn.MultiheadAttention:
    """An attention module of 16 features and 4 heads whose biases are not zero."""
    if kernel == "stock":
        module: Any = nn.MultiheadAttention(16, 4, **options)
    else:
        p = 3.0 if kernel == "rbf" else 2.0
        module = ikattn.MultiheadAttention(16, 4, kernel=kernel, p=p, **options)
    return randomize(module).eval()


def randomize(module: Any) -> Any:
    """Biases and gammas are trivial after construction; here they are not."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1 and "spectral" not in name:
                parameter.add_(0.5 * torch.randn_like(parameter))
    return module


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def vectors(weights: Tensor, value: Tensor, projection: Tensor) -> Tensor:
    """y_ij of each pair, [B, T, S, D], the slow way."""
    transformed = torch.einsum(
        "bhsv,dhv->bhsd", value, projection.unflatten(1, (value.size(1), -1))
    )
    return torch.einsum("bhts,bhsd->btsd", weights, transformed)


def norms(y: Tensor) -> Tensor:
    return torch.linalg.vector_norm(y, dim=-1)


def with_own(y: Tensor, x: Tensor) -> Tensor:
    own = torch.eye(y.size(1), y.size(2))[None, :, :, None]
    return y + own * x.unsqueeze(2)


def through(y: Tensor, norm: nn.Module, norm_input: Tensor) -> Tensor:
    stats = NormStats.of(norm, norm_input)
    y = y - y.mean(-1, keepdim=True)
    return y * stats.weight / stats.scale[..., None, None]


class Probe:
    """The first input of every module that runs, by name, to compare with."""

    def __init__(self, model: nn.Module) -> None:
        self.inputs: dict[str, Tensor] = {}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._hook(name), with_kwargs=True)

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            found = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            if found:
                self.inputs[name] = found[0]

        return hook


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


# --- One attention module

CALLS: dict[str, Any] = {
    "plain": {},
    "batch first": {"module": {"batch_first": True}},
    "unbatched": {"batch": None},
    "unbatched, batch first": {"batch": None, "module": {"batch_first": True}},
    "no bias": {"module": {"bias": False}},
    "bool mask": {"call": {"attn_mask": causal(5)}},
    "float mask": {"call": {"attn_mask": torch.linspace(-1, 1, 25).view(5, 5).double()}},
    "mask per head": {"call": {"attn_mask": causal(5).expand(12, 5, 5)}},
    "is_causal": {"call": {"attn_mask": causal(5), "is_causal": True}},
    "cross": {"keys": 7},
    "sizes of key and value": {"keys": 7, "module": {"kdim": 6, "vdim": 10}},
    "bias_kv": {"module": {"add_bias_kv": True}},
    "zero attention": {"module": {"add_zero_attn": True, "add_bias_kv": True}},
    "padding": {"padding": True},
    "padding and mask": {"padding": True, "call": {"attn_mask": causal(5)}},
    "cross, padding": {"padding": True, "keys": 7, "module": {"batch_first": True}},
    "padding and bias_kv": {"padding": True, "module": {"add_bias_kv": True}},
}


def inputs_of(case: dict[str, Any], module: nn.MultiheadAttention) -> dict[str, Any]:
    """Arguments of forward, with values for every key."""
    batch, keys = case.get("batch", 3), case.get("keys")

    def tokens(length: int, size: int) -> Tensor:
        if batch is None:
            return torch.randn(length, size)
        first = (batch, length) if module.batch_first else (length, batch)
        return torch.randn(*first, size)

    query = tokens(5, 16)
    key = query if keys is None else tokens(keys, module.kdim)
    value = key if module._qkv_same_embed_dim else tokens(keys, module.vdim)
    arguments = {"query": query, "key": key, "value": value, **case.get("call", {})}
    if case.get("padding"):
        lengths = torch.tensor([5, 3, 1])
        arguments["key_padding_mask"] = torch.arange(keys or 5) >= lengths[:, None]
    return arguments


@pytest.mark.parametrize("kernel", ["stock", "dot", "rbf", "implicit"])
@pytest.mark.parametrize("case", CALLS.values(), ids=CALLS)
def test_weights_and_contributions_are_those_of_the_module(
    kernel: str, case: dict[str, Any]
) -> None:
    module = attention(kernel, **case.get("module", {}))
    arguments = inputs_of(case, module)
    if module.batch_first and arguments["query"].dim() == 2:
        arguments["key_padding_mask"] = None
    with torch.no_grad():
        output, weights = module(**arguments, average_attn_weights=False)
        with record(module, maps=("summed", "per_head", "value_norms", "weights")) as recording:
            recorded = module(**arguments)
        assert_identical(recorded, module(**arguments))

    found = recording[type(module).__name__]
    if weights.dim() == 3:
        weights = weights.unsqueeze(0)
    padding = arguments.get("key_padding_mask")
    is_self = arguments["query"] is arguments["key"]
    if padding is not None and is_self:
        weights = weights.masked_fill(padding[:, None, :, None], 0)
    assert_close(found.weights, weights, TOLERANCE, "weights")
    # The output is a sum of vectors, one for each pair, and theirs are the norms that were found.
    value = values_of(module, arguments)
    y = vectors(weights, value, module.out_proj.weight)
    total = y.sum(2)
    if module.out_proj.bias is not None:
        total = total + module.out_proj.bias
    expected = output.unsqueeze(0) if output.dim() == 2 else output
    if output.dim() == 3 and not module.batch_first:
        expected = output.transpose(0, 1)
    if padding is not None and is_self:
        total, expected = (x.masked_fill(padding.unsqueeze(-1), 0) for x in (total, expected))
    assert_close(total, expected, TOLERANCE, "output")
    assert_close(found.summed, norms(y), TOLERANCE, "summed")
    assert_close(found.per_head, weights * found.value_norms.unsqueeze(-2), TOLERANCE, "per_head")
    layer = recording.layers[type(module).__name__]
    assert (layer.kind, layer.heads, layer.block) == ("self" if is_self else "cross", 4, "none")


def values_of(module: nn.MultiheadAttention, arguments: dict[str, Any]) -> Tensor:
    """Values [B, H, S, d] with those that the module appends, padded ones zero."""
    value = arguments["value"]
    if value.dim() == 2:
        value = value.unsqueeze(0)
    elif not module.batch_first:
        value = value.transpose(0, 1)
    same = module._qkv_same_embed_dim
    weight = module.in_proj_weight.chunk(3)[2] if same else module.v_proj_weight
    bias = None if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[2]
    value = torch.nn.functional.linear(value, weight, bias)
    batch = value.size(0)
    if module.bias_v is not None:
        value = torch.cat([value, module.bias_v.expand(batch, 1, -1)], 1)
    if module.add_zero_attn:
        value = torch.cat([value, value.new_zeros(batch, 1, 16)], 1)
    return value.unflatten(-1, (4, -1)).transpose(1, 2).detach()


@pytest.mark.parametrize("kernel", ["stock", "rbf", "implicit"])
def test_ledger_makes_up_the_weights(kernel: str) -> None:
    module = attention(kernel, batch_first=True)
    x = torch.randn(2, 6, 16)
    with torch.no_grad(), record(module, maps="ledger") as recording:
        module(x, x, x, attn_mask=causal(6))
    found = recording[type(module).__name__]
    assert recording.maps == ("weights", "similarity", "magnitude", "value_norms", "per_head")
    product = found.similarity * found.magnitude.unsqueeze(-2)
    assert_close(product / product.sum(-1, keepdim=True), found.weights, TOLERANCE)
    assert_close(found.per_head, found.weights * found.value_norms.unsqueeze(-2), TOLERANCE)


@pytest.mark.parametrize("kernel", ["stock", "rbf", "implicit"])
def test_large_weights_are_never_held_and_maps_are_the_same(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = encoder()
    if kernel != "stock":
        ikattn.convert(model, kernel, p=3.0)
    x, padding = torch.randn(2, 5, 16), torch.arange(5) >= torch.tensor([[5], [3]])
    with torch.no_grad(), record(model, maps=None) as held:
        model(x, mask=causal(5), src_key_padding_mask=padding)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were held")

    monkeypatch.setattr(_attention_call, "MOST_WEIGHTS", 0)
    monkeypatch.setattr(_attention_call, "contributions", refuse)
    with torch.no_grad(), record(model, maps=None) as streamed:
        model(x, mask=causal(5), src_key_padding_mask=padding)
    for name in held.names:
        for map_name in ("value_norms", *SUMMED):
            one, other = (getattr(r[name], map_name) for r in (streamed, held))
            assert_close(one, other, TOLERANCE, map_name)


@pytest.mark.parametrize("kernel", ["stock", "implicit"])
def test_nan_in_padding_reaches_no_map(kernel: str) -> None:
    module = attention(kernel, batch_first=True)
    x, padding = torch.randn(1, 5, 16), torch.tensor([[False, False, False, True, True]])
    x[0, 3:] = torch.nan
    maps = ("summed", "per_head", "value_norms", "mixing_ratio", "ledger")
    with torch.no_grad(), record(module, maps=maps) as recording:
        module(x, x, x, key_padding_mask=padding, need_weights=False)
    found = recording[type(module).__name__]
    for name in (*recording.maps[:-1], "summed"):
        assert getattr(found, name).isfinite().all(), name
        assert (getattr(found, name)[..., 3:] == 0).all(), name
    assert found.mixing_ratio["summed"].isfinite().all()
    assert found.key_padding.equal(padding)
    assert found.query_padding.equal(padding)


def test_query_that_sees_no_key_has_zeros() -> None:
    module = attention(batch_first=True)
    x, mask = torch.randn(1, 3, 16), torch.zeros(3, 3, dtype=torch.bool)
    mask[1] = True
    with torch.no_grad(), record(module, maps=None) as recording:
        module(x, x, x, attn_mask=mask)
    assert (recording["MultiheadAttention"].summed[0, 1] == 0).all()


def test_training_records_weights_before_dropout() -> None:
    module = attention(dropout=0.5, batch_first=True)
    x = torch.randn(1, 4, 16)
    with record(module, maps=("weights",)) as recording:
        module(x, x, x)
        module.train()(x, x, x)
    evaluated, trained = (batch["MultiheadAttention"].weights for batch in recording.batches)
    assert_close(trained, evaluated, TOLERANCE)


def test_frequencies_drawn_anew_at_each_call_are_those_of_that_call() -> None:
    class Random(nn.Module):
        def forward(self, query: Tensor, key: Tensor, padding: Any) -> tuple[Tensor, Tensor]:
            return torch.randn(4, 4, 8), torch.randn(4, 4, 8)

    module = ikattn.MultiheadAttention(16, 4, batch_first=True, spectral=Random())
    x = torch.randn(1, 5, 16)
    with torch.no_grad(), record(module, maps=("weights",)) as recording:
        _, weights = module(x, x, x, average_attn_weights=False)
        after = torch.rand(3)
    torch.manual_seed(5)
    assert_close(recording["MultiheadAttention"].weights, weights, TOLERANCE)
    assert after.shape == (3,)


# --- Layers of torch.nn.Transformer


def encoder(norm_first: bool = False, batch_first: bool = True, **options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        16, 4, 32, batch_first=batch_first, norm_first=norm_first, activation="gelu"
    )
    if norm_first:
        options["enable_nested_tensor"] = False  # of which torch would warn that it cannot be
    return randomize(nn.TransformerEncoder(layer, 2, **options)).eval()


@pytest.mark.parametrize("batch_first", [True, False])
def test_every_map_of_a_post_norm_encoder(batch_first: bool) -> None:
    model = encoder(batch_first=batch_first, enable_nested_tensor=False)
    x = torch.randn(3, 5, 16)
    x = x if batch_first else x.transpose(0, 1)
    with torch.no_grad():
        before = model(x)
        with record(model, maps=None) as recording, record(model, maps="weights") as weights:
            after = model(x)
        assert_close(after, before, TOLERANCE)
        probe = Probe(model)
        model(x)
    assert recording.maps == ("value_norms", *SUMMED, "mixing_ratio")
    assert recording.names == ["layers.0.self_attn", "layers.1.self_attn"]
    for number, layer in enumerate(model.layers):
        name = f"layers.{number}.self_attn"
        given = {
            part: probe.inputs[f"layers.{number}.{part}"]
            for part in ("self_attn", "norm1", "norm2")
        }
        if not batch_first:
            given = {part: tensor.transpose(0, 1) for part, tensor in given.items()}
        residual = given["self_attn"]
        value = values_of(layer.self_attn, {"value": probe.inputs[name]})
        y = vectors(weights[name].weights, value, layer.self_attn.out_proj.weight)
        y = {"summed": y, "with_residual": with_own(y, residual)}
        total = y["with_residual"].sum(2) + layer.self_attn.out_proj.bias
        assert_close(total, given["norm1"], TOLERANCE, "input of the norm")
        y["with_norm"] = through(y["with_residual"], layer.norm1, given["norm1"])
        y["encoder"] = through(y["with_norm"], layer.norm2, given["norm2"])
        found = recording[name]
        for map_name, pairs in y.items():
            assert_close(getattr(found, map_name), norms(pairs), TOLERANCE, map_name)
            own = torch.diagonal(pairs, dim1=1, dim2=2).transpose(1, 2)
            others = norms(pairs.sum(2) - own)
            ratio = others / (others + norms(own))
            assert_close(found.mixing_ratio[map_name], ratio, TOLERANCE, map_name)
        assert recording.layers[name] == Layer(name, "self", "encoder", 4, "post", "torch")


def test_pre_norm_layer_has_the_map_with_the_layers_input() -> None:
    model = encoder(norm_first=True)
    x = torch.randn(2, 5, 16)
    with torch.no_grad(), record(model, maps=None) as recording:
        model(x)
    assert recording.maps == ("value_norms", "summed", "with_residual", "mixing_ratio")
    found = recording["layers.0.self_attn"]
    layer = model.layers[0]
    with torch.no_grad():
        normed = layer.norm1(x)
        _, weights = layer.self_attn(normed, normed, normed, average_attn_weights=False)
        value = values_of(layer.self_attn, {"value": normed})
        y = with_own(vectors(weights, value, layer.self_attn.out_proj.weight), x)
    assert_close(found.with_residual, norms(y), TOLERANCE)
    assert found.with_norm is None


def test_decoder_records_self_and_cross_attention_through_their_own_norms() -> None:
    layer = nn.TransformerDecoderLayer(16, 4, 32, batch_first=True)
    model = randomize(nn.TransformerDecoder(layer, 1)).eval()
    target, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    with torch.no_grad():
        before = model(target, memory, tgt_key_padding_mask=padding)
        with record(model, maps=None) as recording, record(model, maps="weights") as weights:
            after = model(target, memory, tgt_key_padding_mask=padding)
        assert_close(after, before, TOLERANCE)
        probe = Probe(model)
        model(target, memory, tgt_key_padding_mask=padding)
    own, cross = recording["layers.0.self_attn"], recording["layers.0.multihead_attn"]
    assert own.with_norm is not None
    assert own.encoder is None
    assert cross.with_residual is None
    assert not cross.mixing_ratio
    assert [layer.kind for layer in recording.layers.values()] == ["self", "cross"]
    assert {layer.side for layer in recording.layers.values()} == {"decoder"}
    block = model.layers[0]
    value = values_of(block.multihead_attn, {"value": memory})
    y = vectors(
        weights["layers.0.multihead_attn"].weights, value, block.multihead_attn.out_proj.weight
    )
    assert_close(cross.summed, norms(y), TOLERANCE)
    y = through(y, block.norm2, probe.inputs["layers.0.norm2"])
    assert_close(cross.with_norm, norms(y), TOLERANCE)
    y = through(y, block.norm3, probe.inputs["layers.0.norm3"])
    assert_close(cross.encoder, norms(y), TOLERANCE)
    # queries of the cross-attention are the tokens of the self-attention before it
    assert cross.query_padding.equal(padding)
    assert (cross.summed[1, 3:] == 0).all()


@pytest.mark.parametrize("kernel", ["stock", "implicit"])
@pytest.mark.parametrize("lengths", [[5, 3], [4, 3]], ids=["a full row", "no full row"])
def test_nested_tensors_change_neither_outputs_nor_maps(kernel: str, lengths: list[int]) -> None:
    model = encoder()
    if kernel != "stock":
        ikattn.convert(model, kernel)
        model.use_nested_tensor = True
    x, padding = torch.randn(2, 5, 16), torch.arange(5) >= torch.tensor(lengths)[:, None]
    with torch.no_grad():
        before = model(x, src_key_padding_mask=padding)
        with record(model, maps=None) as nested:
            after = model(x, src_key_padding_mask=padding)
        model.use_nested_tensor = False
        with record(model, maps=None) as padded:
            model(x, src_key_padding_mask=padding)
    assert (before[padding] == 0).all()  # it did nest
    assert_close(after, before, TOLERANCE)
    for name in nested.names:
        for map_name in SUMMED:
            one, other = (getattr(r[name], map_name) for r in (nested, padded))
            assert_close(one, other, TOLERANCE, map_name)
        assert nested[name].key_padding.equal(padding)
        assert nested[name].query_padding.equal(padding)


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


def test_half_precision_maps_are_float32() -> None:
    model = encoder().bfloat16()
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
