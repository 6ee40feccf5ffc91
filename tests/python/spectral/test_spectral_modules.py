"""Sources of frequencies in attention modules: states, copies, devices, compilers, recording."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import ikattn
from attention_cases import E, H, L, N, batch, ignore, make
from ikattn.spectral import Direct, Ikan, Stationary
from ikattn.spectral.factory import SOURCES
from spectral_cases import M, perturbed
from tiers import each


@pytest.mark.parametrize("name", SOURCES)
def test_attention_uses_the_frequencies_of_its_source(name):
    module = make("implicit", spectral=name, num_frequencies=M, batch_first=True, p=2.0).eval()
    x = batch(N, L, E)
    output, weights = module(x, x, x)
    q, k, v = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in (q, k, v))
    w1, w2 = module.spectral(q, k, None)[:2]
    expected = ikattn.reference.implicit_kernel_attention(q, k, v, w1, w2)
    expected = module.out_proj(expected.transpose(1, 2).flatten(2))
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(weights.sum(-1), torch.ones(N, L, dtype=torch.float64))
    assert (w2 is None) == (name == "stationary")


def test_stationary_is_direct_with_one_set_of_frequencies():
    one = ikattn.MultiheadAttention(E, H, spectral="stationary", seed=1)
    other = ikattn.MultiheadAttention(E, H, stationary=True, seed=1)
    assert isinstance(one.spectral, Stationary)
    assert isinstance(other.spectral, Direct)
    assert torch.equal(one.spectral.w1, other.spectral.w1)
    assert one.state_dict().keys() == other.state_dict().keys()


def test_a_function_makes_the_source_with_options_of_its_own():
    def source(attention):
        return Stationary(attention.num_heads, attention.head_dim, M, initial="unit angle", seed=1)

    module = ikattn.MultiheadAttention(E, H, spectral=source)
    expected = Direct(H, E // H, M, stationary=True, initial="unit angle", seed=1)
    assert torch.equal(module.spectral.w1, expected.w1)
    assert ikattn.MultiheadAttention(E, H, spectral=lambda _: "ikan").spectral.regularizes
    with pytest.raises(ValueError, match=r"stationary=True is for 'direct', .* got it with a Ikan"):
        ikattn.MultiheadAttention(E, H, spectral=Ikan(H, E // H, M), stationary=True)


@pytest.mark.parametrize("name", ["ikan", "mikan"])
def test_the_whole_transformer_keeps_the_scale_of_frequencies(name):
    """nn.Transformer draws every parameter with more than one axis again."""
    layer = ikattn.convert(nn.TransformerEncoderLayer(E, H), spectral=name, seed=0)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    whole = nn.Transformer(E, H, custom_encoder=encoder, num_decoder_layers=1)
    kept = whole.encoder.layers[0].self_attn.spectral
    for (key, a), b in zip(
        kept.named_parameters(), layer.self_attn.spectral.parameters(), strict=True
    ):
        assert torch.equal(a, b), key


@pytest.mark.parametrize("name", ["ikan", "mikan"])
@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))],
    ids=["deepcopy", "pickle"],
)
def test_a_module_that_has_run_can_be_copied(name, clone):
    module = ikattn.MultiheadAttention(E, H, spectral=name, num_frequencies=M)
    x = batch(L, N, E, dtype=torch.float32)
    module(x, x, x)
    assert module.regularization.requires_grad
    twin = clone(module)
    assert twin.regularization is None
    assert torch.equal(twin.eval()(x, x, x)[0], module.eval()(x, x, x)[0])


@pytest.mark.parametrize("name", ["ikan", "mikan"])
def test_state_holds_parameters_alone_and_stock_checkpoints_load(name):
    options = {"spectral": name, "num_frequencies": M, "p": "learned"}
    module, twin = (ikattn.MultiheadAttention(E, H, **options).eval() for _ in range(2))
    assert set(module.state_dict()) == {key for key, _ in module.named_parameters()}
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file, weights_only=True))
    x = batch(L, N, E, dtype=torch.float32)
    assert torch.equal(twin(x, x, x)[0], module(x, x, x)[0])
    module.load_state_dict(nn.MultiheadAttention(E, H).state_dict(), strict=True)


@pytest.mark.parametrize("name", ["ikan", "mikan"])
def test_a_module_on_the_meta_device_runs_and_materialises(name):
    options = {"spectral": name, "num_frequencies": M, "seed": 3}
    module, x = ikattn.MultiheadAttention(E, H, **options, device="meta"), torch.empty(L, N, E)
    for training in (False, True):
        assert module.train(training)(*[x.to("meta")] * 3)[0].shape == x.shape
    module.to_empty(device="cpu").reset_parameters()
    same = ikattn.MultiheadAttention(E, H, **options)
    assert torch.equal(module.spectral.points, same.spectral.points)
    for a, b in zip(module.spectral.parameters(), same.spectral.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["ikan", "mikan"])
@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_loads_into_a_module_made_on_meta(name, assign):
    options = {"spectral": name, "num_frequencies": M}
    source = ikattn.MultiheadAttention(E, H, **options).eval()
    module = ikattn.MultiheadAttention(E, H, **options, device="meta").eval()
    if not assign:
        module.to_empty(device="cpu")
    module.load_state_dict(source.state_dict(), assign=assign)
    x = batch(L, N, E, dtype=torch.float32)
    assert torch.equal(module(x, x, x)[0], source(x, x, x)[0])
    assert torch.equal(module.double().spectral.points, source.double().spectral.points)


@each(("name",), [("ikan",), ("mikan",)], {"training": [False, True]})
def test_torch_compile_and_export_take_generators(name, training):
    torch._dynamo.reset()
    module = make("implicit", spectral=name, num_frequencies=M, batch_first=True, p="learned")
    module.train(training)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (5, 7):
        x, padding = batch(N, length, E), ignore(N, length)
        got = compiled(x, x, x, padding, need_weights=False)[0]
        got.sum().backward()
        found = ikattn.regularization_loss(module).detach()
        expected = module(x, x, x, padding, need_weights=False)[0]
        torch.testing.assert_close(found, ikattn.regularization_loss(module).detach())
        if not training:  # otherwise the draws differ
            torch.testing.assert_close(got, expected)
    if not training:
        program = torch.export.export(module, (x, x, x)).module()
        torch.testing.assert_close(program(x, x, x)[0], module(x, x, x)[0])


def test_autocast_does_not_round_frequencies():
    module = ikattn.MultiheadAttention(E, H, spectral="mikan", num_frequencies=M).eval()
    x = batch(L, N, E, dtype=torch.float32)
    seen = []
    module.spectral.register_forward_hook(lambda _, args, output: seen.append(output[0]))
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x, x, x)[0].isfinite().all()
    module(x, x, x)
    assert seen[0].dtype == torch.float32
    torch.testing.assert_close(seen[0], seen[1], rtol=0.1, atol=2e-3)


def test_recording_takes_the_frequencies_of_the_call():
    module = ikattn.MultiheadAttention(E, H, spectral="mikan", num_frequencies=M, p="learned")
    perturbed(module, 0.2).eval()
    x = batch(L, N, E, dtype=torch.float32)
    model = nn.Sequential()
    model.attention = module
    with torch.no_grad(), ikattn.record(module, maps=("per_head",)) as recording:
        module(x, x, x)
    _, weights = module(x, x, x, average_attn_weights=False)
    maps = recording.batches[0][recording.names[0]]
    v = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)[2]
    value = v.transpose(0, 1).unflatten(-1, (H, -1)).transpose(1, 2)
    expected = ikattn.contributions(
        weights, value, module.out_proj.weight, maps=("per_head",), per_head=True
    )
    torch.testing.assert_close(maps.per_head, expected.per_head, rtol=1e-4, atol=1e-5)
