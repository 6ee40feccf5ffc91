"""What ``ikattn.record`` records of torch's own modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikattn
from agreement import assert_close, assert_identical
from ikattn.maps import Layer
from ikattn.maps.contribution_maps import NormStats
from ikattn.recorder import record
from ikattn.recorder.calls import attention_call
from recorded_models import SUMMED, TOLERANCE, attention, encoder, randomize

pytestmark = pytest.mark.usefixtures("float64_by_default")


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def vectors(weights: Tensor, value: Tensor, projection: Tensor) -> Tensor:
    """y_ij of each pair, [B, L, S, D], the slow way."""
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


def test_all_maps_are_those_that_each_layer_has() -> None:
    one_by_one = ("weights", "similarity", "magnitude", "value_norms", "per_head", *SUMMED)
    for norm_first, of_block in ((False, SUMMED), (True, ("summed", "with_residual", "encoder"))):
        model, x = encoder(norm_first=norm_first), torch.randn(2, 5, 16)
        with torch.no_grad(), record(model, maps="all") as recording:
            model(x)
        for name in recording.names:
            found = recording[name]
            made = {one for one in one_by_one if getattr(found, one) is not None}
            assert made == {*one_by_one[:5], *of_block}
            assert set(found.mixing_ratio) == set(of_block)
            assert found.alti is not None
        assert {*recording.maps} == {*made, "mixing_ratio", "alti"}
    message = r"no map 'with_norm': .* maps='all' takes of each layer"
    with pytest.raises(ValueError, match=message), record(model, maps=("all", "with_norm")):
        pass


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

    monkeypatch.setattr(attention_call, "MOST_WEIGHTS", 0)
    monkeypatch.setattr(attention_call, "contributions", refuse)
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


@pytest.mark.parametrize("kernel", ["stock", "dot", "implicit"])
def test_calls_without_keys_stay_what_they_are(kernel: str) -> None:
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    if kernel != "stock":
        module = ikattn.MultiheadAttention(16, 4, kernel=kernel, batch_first=True).eval()
    query, nothing = torch.randn(2, 3, 16), torch.randn(2, 0, 16)
    with torch.no_grad():
        expected = module(query, nothing, nothing)[0]
        with ikattn.record(module) as recording:
            found = module(query, nothing, nothing)[0]
    assert torch.equal(found, expected)
    assert recording[type(module).__name__].summed.shape == (2, 3, 0)


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


def test_pre_norm_layer_has_maps_with_the_layers_input_and_through_the_norm_that_reads_it() -> None:
    model = encoder(norm_first=True)
    x = torch.randn(2, 5, 16)
    with torch.no_grad(), record(model, maps=None) as recording:
        model(x)
    assert recording.maps == ("value_norms", "summed", "with_residual", "encoder", "mixing_ratio")
    found = recording["layers.0.self_attn"]
    layer = model.layers[0]
    with torch.no_grad():
        normed = layer.norm1(x)
        _, weights = layer.self_attn(normed, normed, normed, average_attn_weights=False)
        value = values_of(layer.self_attn, {"value": normed})
        y = with_own(vectors(weights, value, layer.self_attn.out_proj.weight), x)
        total = x + layer.self_attn(normed, normed, normed)[0]
    assert_close(found.with_residual, norms(y), TOLERANCE)
    assert found.with_norm is None
    y = (y - y.mean(-1, keepdim=True)) * layer.norm2.weight
    y = y / (total.var(-1, correction=0) + layer.norm2.eps).sqrt()[..., None, None]
    assert_close(found.encoder, norms(y), TOLERANCE)
    own = torch.diagonal(y, dim1=1, dim2=2).mT
    others = norms(y.sum(2) - own)
    assert_close(found.mixing_ratio["encoder"], others / (others + norms(own)), TOLERANCE)


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


class CrossAttention(nn.Module):
    """Of 16 features and 4 heads, by F.scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (randomize(nn.Linear(16, 16)) for _ in range(4))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (4, 4)).transpose(1, 2)

    def forward(self, x: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        memory = encoder_hidden_states
        query, key, value = (self.heads(y) for y in (self.q(x), self.k(memory), self.v(memory)))
        made = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return self.o(made.transpose(1, 2).flatten(2))


class CrossBlock(nn.Module):
    """A pre-norm block with cross-attention whose output is normed, or a quarter is added."""

    def __init__(self, norm: nn.Module | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = CrossAttention()
        self.between, self.last = norm, nn.Linear(16, 16)
        self.total = torch.empty(0)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        y = self.attention(self.norm1(x), encoder_hidden_states=memory)
        self.total = x = x + (0.25 * y if self.between is None else self.between(y))
        return x + self.last(self.norm2(x))


@pytest.mark.parametrize("between", [None, "norm"])
def test_cross_attention_goes_through_what_stands_before_the_sum(between: str | None) -> None:
    block = CrossBlock(None if between is None else randomize(nn.LayerNorm(16))).eval()
    x, memory = torch.randn(2, 3, 16), torch.randn(2, 5, 16)
    with torch.no_grad(), record(block, maps="all") as recording:
        block(x, memory)
    found = recording["attention"]
    with torch.no_grad():
        value = block.attention.heads(block.attention.v(memory))
        y = vectors(found.weights, value, block.attention.o.weight)
        if between is None:
            y = y * 0.25
        else:
            made = y.sum(2) + block.attention.o.bias
            y = through(y, block.between, made)
        y = through(y, block.norm2, block.total)
    assert_close(found.encoder, norms(y), TOLERANCE)
