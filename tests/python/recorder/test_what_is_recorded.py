"""Recordings of one attention: weights, keys, projections, gates of heads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ikattn
from agreement import assert_close, assert_identical
from hand_written_blocks import Attention, B, Block, D, H, L, LayerScale, vectors
from ikattn.recorder import record
from ikattn.recorder.calls import attention_call
from ikattn.recorder.calls.attention_call import AttentionCall
from recorded_models import (
    SUMMED,
    TOLERANCE,
    attention,
    encoder,
    pair_vectors,
    randomize,
    recorded,
    through_norm,
)

pytestmark = pytest.mark.usefixtures("float64_by_default")


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


# --- One module of torch or of ikattn

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
def test_weights_and_contributions_are_those_of_the_module(kernel, case):
    module = attention(kernel, **case.get("module", {}))
    arguments = inputs_of(case, module)
    if module.batch_first and arguments["query"].dim() == 2:
        arguments["key_padding_mask"] = None
    with torch.no_grad():
        output, weights = module(**arguments, average_attn_weights=False)
        with record(module, maps=("summed", "per_head", "value_norms", "weights")) as recording:
            inside = module(**arguments)
        assert_identical(inside, module(**arguments))

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
    y = pair_vectors(weights, value, module.out_proj.weight)
    total = y.sum(2)
    if module.out_proj.bias is not None:
        total = total + module.out_proj.bias
    expected = output.unsqueeze(0) if output.dim() == 2 else output
    if output.dim() == 3 and not module.batch_first:
        expected = output.transpose(0, 1)
    if padding is not None and is_self:
        total, expected = (x.masked_fill(padding.unsqueeze(-1), 0) for x in (total, expected))
    assert_close(total, expected, TOLERANCE, "output")
    assert_close(found.summed, y.norm(dim=-1), TOLERANCE, "summed")
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
        recording = recorded(model, x)
        for name in recording.names:
            found = recording[name]
            made = {one for one in one_by_one if getattr(found, one) is not None}
            assert made == {*one_by_one[:5], *of_block}
            assert set(found.mixing_ratio) == set(of_block)
            assert found.alti is not None
        assert {*recording.maps} == {*made, "mixing_ratio", "alti", "projection"}
    message = r"no map 'with_norm': .* maps='all' takes of each layer"
    with pytest.raises(ValueError, match=message), record(model, maps=("all", "with_norm")):
        pass


@pytest.mark.parametrize("kernel", ["stock", "rbf", "implicit"])
def test_large_weights_are_never_held_and_maps_are_the_same(kernel, monkeypatch):
    model = encoder() if kernel == "stock" else ikattn.convert(encoder(), kernel, p=3.0)
    x, padding = torch.randn(2, 5, 16), torch.arange(5) >= torch.tensor([[5], [3]])
    inputs = {"src": x, "mask": causal(5), "src_key_padding_mask": padding}
    held = recorded(model, inputs, None)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were held")

    monkeypatch.setattr(attention_call, "_FEW_WEIGHTS", 0)
    monkeypatch.setattr(attention_call, "contributions", refuse)
    streamed = recorded(model, inputs, None)
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
    recording = recorded(module, {"query": x, "key": x, "value": x, "attn_mask": mask}, None)
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
    torch.manual_seed(5)
    assert_close(recording["MultiheadAttention"].weights, weights, TOLERANCE)


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
    """Attention of 16 features and 4 heads, by F.scaled_dot_product_attention."""

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
    found = recorded(block, (x, memory))["attention"]
    with torch.no_grad():
        value = block.attention.heads(block.attention.v(memory))
        y = pair_vectors(found.weights, value, block.attention.o.weight)
        if between is None:
            y = y * 0.25
        else:
            made = y.sum(2) + block.attention.o.bias
            y = through_norm(y, block.between, made)
        y = through_norm(y, block.norm2, block.total)
    assert_close(found.encoder, y.norm(dim=-1), TOLERANCE)


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
        given: dict[str, Tensor] = {}
        for norm in ("norm2", "norm3"):
            module = getattr(model.layers[0], norm)
            module.register_forward_pre_hook(
                lambda _, args, norm=norm: given.update({norm: args[0]})
            )
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
    y = pair_vectors(
        weights["layers.0.multihead_attn"].weights, value, block.multihead_attn.out_proj.weight
    )
    assert_close(cross.summed, y.norm(dim=-1), TOLERANCE)
    y = through_norm(y, block.norm2, given["norm2"])
    assert_close(cross.with_norm, y.norm(dim=-1), TOLERANCE)
    y = through_norm(y, block.norm3, given["norm3"])
    assert_close(cross.encoder, y.norm(dim=-1), TOLERANCE)
    # queries of the cross-attention are the tokens of the self-attention before it
    assert cross.query_padding.equal(padding)
    assert (cross.summed[1, 3:] == 0).all()


# --- Whose keys they are


class Given(Attention):
    """Queries of its first input, or of its first tokens, and keys of the second, or of all."""

    def __init__(self, first: int | None = None) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        q = self.qkv(x[:, : self.first]).unflatten(-1, (3, H, -1))[:, :, 0]
        k, v = self.qkv(memory).unflatten(-1, (3, H, -1))[:, :, 1:].unbind(2)
        y = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)))
        return self.proj(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@torch.no_grad()
@pytest.mark.parametrize(
    ("first", "L_", "S"), [(1, 5, None), (3, 5, None), (None, 5, 5), (None, 5, 8), (None, 8, 5)]
)
def test_queries_that_are_not_among_their_keys_have_no_part_of_their_own(first, L_, S):
    attention = Given(first).eval()
    x, memory = torch.randn(B, L_, D), None if S is None else torch.randn(B, S, D)
    recording = recorded(attention, (x, memory))
    (layer,) = recording.layers.values()
    (maps,) = recording.batches[0].layers.values()
    assert layer.kind == "cross"
    assert maps.with_residual is None
    assert not maps.mixing_ratio
    assert maps.summed is not None
    assert maps.summed.shape == (B, first or L_, L_ if S is None else S)
    with record(attention, maps=["summed"]) as recording:
        attention(x, x)  # the same tensor twice
    (layer,) = recording.layers.values()
    assert layer.kind == ("cross" if first else "self")


@torch.no_grad()
def test_a_module_that_is_called_with_heads_has_the_keys_of_the_one_around_it() -> None:
    class Attend(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv, self.proj = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)
            self.attend = Attend()

        def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
            q, (k, v) = self.q(x), self.kv(x if context is None else context).chunk(2, -1)
            heads = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in (q, k, v))
            return self.proj(self.attend(*heads).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    model, x, context = Outer().eval(), torch.randn(B, L, D), torch.randn(B, L + 3, D)
    crossing = recorded(model, {"x": x, "context": context})
    assert crossing.layers["attend"].kind == "cross"
    assert recorded(model, x).layers["attend"].kind == "self"


@pytest.mark.parametrize(
    "kind", ["place", "same", "cache", "mask", "context", "normed context", "nested context"]
)
@torch.no_grad()
def test_whose_keys_they_are_is_told_by_what_is_projected(kind: str) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(D)
            self.q, self.k, self.v, self.proj = (nn.Linear(D, D) for _ in range(4))
            if kind == "nested context":
                for name in ("q", "k", "v", "proj"):
                    setattr(self, name, nn.Sequential(getattr(self, name)))

        def forward(self, x: Tensor, other: Tensor, value: Tensor | None = None) -> Tensor:
            if kind in ("place", "mask"):
                parts = self.q(x), self.k(x), self.v(x)
            elif kind == "same":  # with places in queries and keys, as DETR has it
                parts = self.q(x), self.k(other), self.v(value)
            else:
                other = self.norm(other) if kind == "normed context" else other
                parts = self.q(self.norm(x)), self.k(other), self.v(other)
            heads = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in parts)
            return self.proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    model, x, other = Own().eval(), torch.randn(B, L, D), torch.randn(B, L, D)
    if kind == "mask":
        x, other = torch.randn(B, D, D), torch.zeros(B, D, D)
    elif kind == "cache":
        other = torch.cat([torch.randn(B, 3, D), x], 1)
    given = (x, x, other) if kind == "same" else (x, other)
    (layer,) = recorded(model, given).layers.values()
    assert layer.kind == ("cross" if "context" in kind else "self")


# --- Out-projections, and what is between them and the heads


class Prepared(Attention):
    """A module between heads and out-projection changes nothing, or multiplies."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.between(self.heads(x)))  # type: ignore[no-any-return]


class Copied(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


@torch.no_grad()
@pytest.mark.parametrize("check", ["rows", "all"])
@pytest.mark.parametrize(
    "between",
    [
        nn.Identity(),
        nn.Dropout(0.5),
        nn.Sequential(nn.Identity(), nn.Dropout(0.1)),
        Copied(),
        LayerScale(),
        nn.Sequential(LayerScale(), LayerScale()),
    ],
    ids=lambda between: type(between).__name__,
)
def test_what_mixes_no_heads_is_not_their_out_projection(between: nn.Module, check: Any) -> None:
    block = Block()
    block.attn = Prepared(between)
    model, x = nn.Sequential(block).eval(), torch.randn(B, L, D)
    with record(model, maps="all", check=check) as recording:
        for _ in range(2):
            model(x)
    factor = between(torch.ones(D))
    block.attn.proj.weight.mul_(factor)
    y = vectors(block.attn, block.ln_1(x))
    for batch in recording.batches:
        maps = batch.layers["0.attn"]
        assert_close(maps.summed, y.norm(dim=-1), 1e-12, "summed")
    y[:, range(L), range(L)] += x
    assert_close(recording.batches[1].layers["0.attn"].with_residual, y.norm(dim=-1), 1e-9)


@torch.no_grad()
def test_an_out_projection_of_zeros_is_one() -> None:
    class Cast(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.to(x.dtype))

    block = Block()
    block.attn.proj = Cast(D, D)
    nn.init.zeros_(block.attn.proj.weight)
    recording = recorded(nn.Sequential(block.eval()), torch.randn(B, L, D), "summed")
    assert not recording["0.attn"].summed.any()


@torch.no_grad()
def test_an_out_projection_may_change_between_calls() -> None:
    model = nn.Sequential(Block())
    x = torch.randn(B, L, D)
    with torch.no_grad(), record(model, maps=["summed"]) as recording:
        for call in range(6):
            model(x)
            if call % 3 == 2:  # in two ways, after calls in which it was known
                model[0].attn.proj.weight.data.mul_(1.5)
            elif call % 3 == 1:
                model[0].attn.proj.weight.mul_(2.0)
    maps = [next(iter(batch.layers.values())).summed for batch in recording.batches]
    for found, factor in zip(maps, (1, 1, 2, 3, 3, 6), strict=True):
        assert_close(found, factor * maps[0], 1e-9)


@torch.no_grad()
def test_an_out_projection_is_what_it_computes_not_its_weight() -> None:
    class Triple(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 3 * super().forward(x)

    x, found = torch.randn(B, L, D), []
    torch.manual_seed(0)
    model = nn.Sequential(Block()).eval()
    proj = model[0].attn.proj
    for change in (
        lambda: None,
        lambda: setattr(proj, "__class__", Triple),
        lambda: proj.register_forward_hook(lambda module, args, output: 2 * output),
    ):
        change()
        found.append(recorded(model, x, "summed", check="all")["0.attn"].summed)
    assert_close(found[1], 3 * found[0], 1e-12)
    assert_close(found[2], 6 * found[0], 1e-12)


@torch.no_grad()
def test_weights_of_eight_bits_and_other_parametrisations() -> None:
    import torch.nn.utils.prune

    x = torch.randn(B, L, D)
    model = nn.Sequential(Block()).eval()
    nn.utils.parametrizations.weight_norm(model[0].attn.proj)
    pruned = nn.Sequential(Block()).eval()
    torch.nn.utils.prune.l1_unstructured(pruned[0].attn.proj, "weight", 0.5)
    for changed in (model, pruned):
        found = recorded(changed, x, "summed", check="all")["0.attn"].summed
        assert_close(found, vectors(changed[0].attn, changed[0].ln_1(x)).norm(dim=-1), 1e-12)
    plain = nn.Sequential(Block()).float().eval()
    quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(plain), {nn.Linear})
    maps = [recorded(one, x.float(), "summed")["0.attn"].summed for one in (plain, quantised)]
    assert_close(maps[1], maps[0], 0.05)


def test_several_calls_of_one_module_are_one_map() -> None:
    class Images(Attention):
        """Each image's tokens by themselves, as vision towers of language models do."""

        def heads(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
            parts = zip(*(y.split([2, 3], 2) for y in (q, k, v)), strict=True)
            return torch.cat(
                [F.scaled_dot_product_attention(*part).transpose(1, 2) for part in parts], 1
            ).flatten(2)

    model, x = nn.Sequential(Images()).eval(), torch.randn(1, L, D)
    weights = recorded(model, x, ("weights", "summed"), check="all")["0"].weights
    assert weights.shape == (1, H, L, L)
    assert (weights[..., :2, 2:] == 0).all()
    assert (weights[..., 2:, :2] == 0).all()


def test_sinks_of_each_query_take_part_of_its_weights() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 5, 3).double()
    sinks = torch.randn(2, 4, 5, 1).double()
    call = AttentionCall(query, key, value, "self", sinks=sinks)
    logits = torch.cat([query @ key.mT / 3**0.5, sinks], -1)
    expected = logits.softmax(-1)[..., :-1]
    assert_close(call.weights, expected, 1e-12, "all")
    assert_close(call.item(1).narrow(2, 4).weights, expected[1:, :, 2:4], 1e-12, "some")


# --- Heads that a model multiplies, divides or subtracts


class Gated(nn.Module):
    """Attention whose merged heads ``[B, L, D]`` go through ``gate`` before the out-projection."""

    def __init__(self, gate: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.to_gate, self.to_heads = nn.Linear(D, D), nn.Linear(D, H)
        self.apply_gate = gate

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        merged = F.scaled_dot_product_attention(*self.heads(x), is_causal=True)
        return self.apply_gate(self, merged.transpose(1, 2).flatten(2), x)


class GatedBlock(nn.Module):
    def __init__(self, gate: Any) -> None:
        super().__init__()
        self.n1, self.n2, self.attn = nn.LayerNorm(D), nn.LayerNorm(D), Gated(gate)
        self.up, self.down = nn.Linear(D, 32), nn.Linear(32, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        return x + self.down(F.gelu(self.up(self.n2(x))))


def by_channel(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return m.o(y * torch.sigmoid(m.to_gate(x)))


def in_place(m: Any, y: Tensor, x: Tensor) -> Tensor:
    y *= F.softplus(m.to_gate(x))
    return m.o(y)


def by_head(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return m.o((y.view(B, L, H, -1) * m.to_heads(x).tanh().unsqueeze(-1)).view(B, L, D))


def by_norm_of_heads(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return m.o(F.rms_norm(y.view(B, L, H, -1), (D // H,)).flatten(2) * 0.3)


def by_norm_of_tokens(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return m.o((y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) / 2).type_as(y))


def differential(m: Any, y: Tensor, x: Tensor) -> Tensor:
    one, two = y.view(B, L, H, -1).chunk(2, 2)
    return F.linear((one - 0.7 * two).flatten(2), m.o.weight[:, : D // 2], m.o.bias)


def functional(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return F.linear(y, m.o.weight, m.o.bias)


def product(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return torch.sigmoid(m.to_gate(x)) * y @ m.o.weight.T


GATES = (by_channel, in_place, by_head, by_norm_of_heads, by_norm_of_tokens, differential)


def gated_vectors(attention: Gated, x: Tensor) -> Tensor:
    """Returns what every pair adds to the output, ``[B, L, S, D]``, without all other pairs.

    A gate that reads the heads, such as a norm's divisor, is that of all pairs.
    """
    q, k, v = attention.heads(x)
    hidden = torch.ones(L, L, dtype=torch.bool).triu(1)
    weights = (q @ k.mT / (D / H) ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    whole = (weights @ v).transpose(1, 2).flatten(2)

    def linear_part(heads: Tensor) -> Tensor:
        """The derivative of what the layer makes of its heads, its gate being fixed."""
        gate = attention.apply_gate
        if gate is by_norm_of_heads:
            rms = whole.view(B, L, H, -1).pow(2).mean(-1, keepdim=True)
            divisor = (rms + torch.finfo(x.dtype).eps).sqrt().expand(B, L, H, D // H).flatten(2)
            return attention.o(heads / divisor * 0.3) - attention.o.bias
        if gate is by_norm_of_tokens:
            divisor = (whole.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
            return attention.o(heads / divisor / 2) - attention.o.bias
        zero = gate(attention, torch.zeros_like(heads), x)
        return gate(attention, heads.clone(), x) - zero

    pairs = [
        linear_part((weights[..., j : j + 1] * v[:, :, j : j + 1]).transpose(1, 2).flatten(2))
        for j in range(L)
    ]
    return torch.stack(pairs, 2)


@pytest.mark.parametrize("gate", [*GATES, functional, product])
@torch.no_grad()
def test_maps_of_gated_heads_are_those_of_explicit_vectors(gate: Any) -> None:
    torch.manual_seed(0)
    block = GatedBlock(gate).double().eval()
    x = torch.randn(B, L, D, dtype=torch.float64)
    expected = block(x)
    with ikattn.record(block, "all", check="all") as recording:
        found = block(x)
    torch.testing.assert_close(found, expected)
    y = gated_vectors(block.attn, block.n1(x))
    maps = recording["attn"]
    assert_close(maps.summed, y.norm(dim=-1), 1e-9, "summed")
    if gate is product:  # the bias stands alone there, and so the sum is not looked for
        return
    assert (maps.per_head >= 0).all()
    own = torch.arange(L)
    y[:, own, own] += x
    assert_close(maps.with_residual, y.norm(dim=-1), 1e-9, "with_residual")
    assert recording.layers["attn"].block == "pre"
    others = y.sum(2) - y[:, own, own]
    ratio = others.norm(dim=-1) / (others.norm(dim=-1) + y[:, own, own].norm(dim=-1))
    assert_close(maps.mixing_ratio["with_residual"], ratio, 1e-9, "mixing_ratio")
    recording = recorded(block, x, "with_residual", reduce="diagonal")
    diagonal = y[:, own, own].norm(dim=-1)
    assert_close(recording["attn"].reduced["with_residual"], diagonal, 1e-9, "diagonal")


@torch.no_grad()
def test_gated_rows_are_the_same_among_many_and_few() -> None:
    """Rows are made some at a time, without the keys that causality hides from them."""
    torch.manual_seed(0)
    block = GatedBlock(by_channel).double().eval()
    x = torch.randn(1, 700, D, dtype=torch.float64)
    found = {}
    for name, tokens, queries in (("all", x, None), ("first", x[:, :90], None), ("last", x, [-1])):
        found[name] = recorded(block, tokens, queries=queries)["attn"]
    for name in ("per_head", "summed", "with_residual", "encoder", "alti", "projection"):
        whole, first, last = (getattr(maps, name) for maps in found.values())
        assert_close(whole[..., :90, :90], first, 1e-12, name)
        assert not whole[..., :90, 90:].any(), name
        assert_close(whole[..., -1:, :], last, 1e-12, name)


@torch.no_grad()
def test_a_gate_is_seen_in_every_call_and_in_half_precision() -> None:
    torch.manual_seed(0)
    block, x = GatedBlock(by_channel).eval(), torch.randn(3, B, L, D)
    with ikattn.record(block, "summed") as recording:
        for each in x:
            block(each)
    half = GatedBlock(by_channel).eval().bfloat16()
    half.load_state_dict(block.state_dict())
    for number, each in enumerate(x):
        expected = gated_vectors(block.attn, block.n1(each)).norm(dim=-1)
        found = recording.batches[number]["attn"].summed
        assert_close(found, expected, 1e-5, "summed")
        found = recorded(half, each.bfloat16(), "summed")["attn"].summed
        assert_close(found, expected, 0.05, "in bfloat16")


def added(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return m.o(y + x)


def by_einsum(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("bld,ed->ble", y, m.o.weight)


def reordered(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return m.o(y[:, torch.tensor([1, 0, 2, 3, 4])])


def twice(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return m.o(y) + m.to_gate(y)


def gated_by_heads(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return m.o(y * m.to_gate(y).sigmoid())


@pytest.mark.parametrize(
    ("gate", "reason"),
    [
        (added, "'add'"),
        (by_einsum, "'einsum'"),
        (reordered, "another order"),
        (twice, "no one out-projection"),
        (gated_by_heads, "no one out-projection"),
    ],
)
def test_what_is_no_multiple_of_heads_is_named(gate: Any, reason: str) -> None:
    block = GatedBlock(gate).eval()
    with ikattn.record(block), pytest.raises(RuntimeError, match=reason):
        block(torch.randn(B, L, D))
    block(torch.randn(B, L, D))
