"""ikattn.MultiheadAttention as a module: parameters, state, copies, hooks, compilers."""

from __future__ import annotations

import copy
import inspect
import io
import math
import pickle

import pytest
import torch
from torch import nn

import ikattn
from attention_cases import KERNELS, OPTIONS, E, H, L, N, batch, each_kernel, ignore, make


@pytest.mark.parametrize("options", [{}, {"kdim": 7}, {"add_bias_kv": True}, {"bias": False}])
@pytest.mark.parametrize("seed", [None, 7])
@each_kernel
def test_initial_values_and_random_stream_are_upstreams(kernel, seed, options):
    torch.manual_seed(6)
    stock = nn.MultiheadAttention(E, H, **options)
    after_stock = torch.get_rng_state()
    torch.manual_seed(6)
    ours = ikattn.MultiheadAttention(E, H, kernel=kernel, seed=seed, **options)
    after_ours = torch.get_rng_state()
    for name, parameter in stock.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name
    draws_more = kernel == "implicit" and seed is None
    assert torch.equal(after_ours, after_stock) == (not draws_more)
    torch.manual_seed(6)
    ours.reset_parameters()
    for name, parameter in stock.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name


@pytest.mark.parametrize(
    ("owner", "stock_owner", "names"),
    [
        (ikattn.MultiheadAttention, nn.MultiheadAttention, ("__init__", "forward", "merge_masks")),
        (ikattn.nn.functional, nn.functional, ("multi_head_attention_forward",)),
    ],
)
def test_signature_begins_with_upstreams(owner, stock_owner, names):
    for name in names:
        ours = inspect.signature(getattr(owner, name)).parameters
        stock = inspect.signature(getattr(stock_owner, name)).parameters
        assert list(ours)[: len(stock)] == list(stock)
        for argument, parameter in stock.items():
            assert ours[argument].default == parameter.default
            assert ours[argument].kind == parameter.kind
        new = list(ours.values())[len(stock) :]
        assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in new)


def assert_uniform(frequencies, bound):
    assert frequencies.abs().max() <= bound
    assert frequencies.abs().max() > 0.98 * bound
    assert abs(frequencies.mean()) < 0.05 * bound
    assert abs(frequencies.std() / (bound / math.sqrt(3)) - 1) < 0.05


def test_frequencies_are_uniform_and_reset():
    module = ikattn.MultiheadAttention(64, 4)
    first = [w.clone() for w in module.spectral.frequencies()]
    assert first[0].shape == (4, 16, 32)
    for w in first:
        assert_uniform(w, 1 / math.sqrt(4 * 32))
    module.reset_parameters()
    for w, before in zip(module.spectral.frequencies(), first, strict=True):
        assert_uniform(w, 1 / math.sqrt(4 * 32))
        assert not torch.equal(w, before)


def test_a_seed_fixes_frequencies_for_every_dtype():
    one = ikattn.MultiheadAttention(E, H, seed=3)
    two = ikattn.MultiheadAttention(E, H, seed=3, dtype=torch.float64)
    other = ikattn.MultiheadAttention(E, H, seed=4)
    for a, b, c in zip(*(m.spectral.frequencies() for m in (one, two, other)), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=0)
        assert not torch.equal(a, c)
    assert not torch.equal(one.spectral.w1, one.spectral.w2)


@each_kernel
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_checkpoints_pass_both_ways_and_keep_frequencies(kernel, options):
    stock, ours = make("stock", **options), make(kernel, **options)
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.add_(1.0)
    model, checkpoint = nn.Sequential(nn.Identity(), ours), nn.Sequential(nn.Identity(), stock)
    frequencies = [] if kernel != "implicit" else [w.clone() for w in ours.spectral.parameters()]
    model.load_state_dict(checkpoint.state_dict(), strict=True)
    for name, parameter in stock.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter)
    for before, after in zip(
        frequencies, [] if ours.spectral is None else ours.spectral.parameters(), strict=True
    ):
        assert torch.equal(before, after)
    back = make("stock", **options)
    names = ["spectral.w1", "spectral.w2"] if kernel == "implicit" else []
    assert back.load_state_dict(ours.state_dict(), strict=False) == ([], names)
    for name, tensor in stock.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)


def test_frequencies_of_another_number_of_heads_or_size_and_a_part_of_them_are_errors(tmp_path):
    of_less = make("implicit", num_frequencies=8).state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for spectral\.w1"):
        make("implicit").load_state_dict(of_less)
    del of_less["spectral.w2"]
    with pytest.raises(RuntimeError, match=r"Missing key.*spectral\.w2"):
        make("implicit", num_frequencies=8).load_state_dict(of_less)
    module, other = (ikattn.MultiheadAttention(E, heads) for heads in (H, H // 2))
    before = other.spectral.w1.clone()
    torch.save(nn.Sequential(module).state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    message = rf"spectral\.w1.*\[H, d, M\] = \[{H}, {E // H}, 32\].*\[{H // 2}, {2 * E // H}, 32\]"
    with pytest.raises(RuntimeError, match=message):
        nn.Sequential(other).load_state_dict(state)
    assert torch.equal(other.spectral.w1, before)
    nn.Sequential(other).load_state_dict(dict(state))  # without metadata: nothing to compare
    assert torch.equal(other.spectral.w1, module.spectral.w1)
    twin = ikattn.MultiheadAttention(E, H)
    nn.Sequential(twin).load_state_dict(state)
    assert torch.equal(twin.spectral.w1, module.spectral.w1)
    for w in ("w1", "w2"):
        del state[f"0.spectral.{w}"]
    nn.Sequential(ikattn.MultiheadAttention(E, H, num_frequencies=8)).load_state_dict(state)


def test_a_checkpoint_of_another_kernel_is_an_error():
    learned = make("implicit", p="learned").state_dict()
    for module, names in (
        (make("dot"), ["magnitude.raw", "spectral.w1", "spectral.w2"]),
        (make("rbf", p="learned"), ["spectral.w1", "spectral.w2"]),
        (make("implicit"), ["magnitude.raw"]),
    ):
        for model, prefix in ((module, ""), (nn.Sequential(module), "0.")):
            state = {prefix + name: x for name, x in learned.items()}
            with pytest.raises(RuntimeError, match="Unexpected key") as raised:
                model.load_state_dict(state)
            assert all(f'"{prefix}{name}"' in str(raised.value) for name in names)
            unexpected = model.load_state_dict(state, strict=False).unexpected_keys
            assert sorted(unexpected) == sorted(prefix + name for name in names)


def saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), saved_and_loaded],
    ids=["deepcopy", "pickle", "torch.save"],
)
@each_kernel
def test_copies_compute_the_same_with_parameters_of_their_own(kernel, clone):
    x, module = batch(L, N, E), make(kernel)
    twin = clone(module)
    assert torch.equal(twin(x, x, x)[0], module(x, x, x)[0])
    assert len(twin._forward_pre_hooks) == len(module._forward_pre_hooks)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert all(parameter.any() for parameter in module.parameters())


@each_kernel
def test_meta_device_materialises(kernel):
    module = ikattn.MultiheadAttention(E, H, kernel=kernel, device="meta", seed=3)
    assert all(parameter.is_meta for parameter in module.parameters())
    module.to_empty(device="cpu").reset_parameters()
    x = batch(L, N, E, dtype=torch.float32)
    assert module(x, x, x)[0].isfinite().all()
    if kernel == "implicit":
        assert torch.equal(module.spectral.w1, ikattn.MultiheadAttention(E, H, seed=3).spectral.w1)
        module = ikattn.MultiheadAttention(E, H, device="meta")
        stock = torch.nn.MultiheadAttention(E, H).state_dict()
        with pytest.raises(RuntimeError, match=r'Missing key.*"spectral\.w1", "spectral\.w2"'):
            module.load_state_dict(stock, assign=True)
        loaded = module.load_state_dict(stock, assign=True, strict=False)
        assert loaded.missing_keys == ["spectral.w1", "spectral.w2"]
        module.spectral.to_empty(device="cpu").reset_parameters()
        assert module(x, x, x)[0].isfinite().all()


@each_kernel
def test_out_proj_is_called_as_a_module_and_weights_are_read_at_call_time(kernel):
    x, module = batch(L, N, E), make(kernel)
    seen = []
    module.out_proj.register_forward_hook(lambda _, args, output: seen.append(args[0].shape))
    before = module(x, x, x)[0]
    assert seen == [(L, N, E)]
    module.in_proj_weight = nn.Parameter(module.in_proj_weight * 2)
    assert not torch.allclose(module(x, x, x)[0], before)


@each_kernel
def test_upstream_may_be_replaced_by_this_module(kernel, monkeypatch):
    x, module = batch(L, N, E), make(kernel)
    expected = module(x, x, x)[0]

    def forbidden(*args, **kwargs):
        raise RecursionError

    monkeypatch.setattr(nn, "MultiheadAttention", ikattn.MultiheadAttention)
    monkeypatch.setattr(nn.functional, "multi_head_attention_forward", forbidden)
    assert torch.equal(module(x, x, x)[0], expected)
    assert make(kernel).kernel == kernel


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    "weight_norm", [torch.nn.utils.weight_norm, torch.nn.utils.parametrizations.weight_norm]
)
@each_kernel
def test_weight_norm_old_and_new_applies(kernel, weight_norm):
    x, module = batch(L, N, E), make(kernel)
    expected = module(x, x, x)[0]
    weight_norm(module, "in_proj_weight")
    torch.testing.assert_close(module(x, x, x)[0], expected)
    module(x, x, x)[0].sum().backward()
    assert all(w.grad is not None for w in module.parameters())


class Constant(nn.Module):
    """A spectral source that makes frequencies of its input: shape [N, H, d, M]."""

    def forward(self, query, key, key_padding_mask):
        assert key_padding_mask.dtype == torch.bool
        kept = key.masked_fill(key_padding_mask[:, None, :, None], 0.0)
        return 0.1 * query.mean(2).unsqueeze(-1), 0.1 * kept.mean(2).unsqueeze(-1)


def test_frequencies_may_come_from_any_module():
    x = batch(L, N, E)
    module = make("implicit", spectral=Constant())
    output, _ = module(x, x, x, ignore(N, L))
    alone, _ = module(x[:, 1:2], x[:, 1:2], x[:, 1:2], torch.zeros(1, L, dtype=torch.bool))
    assert output.shape == x.shape
    assert alone.isfinite().all()
    module.load_state_dict(make("stock").state_dict())


def test_torchscript_is_refused_with_the_way_out():
    with pytest.raises(RuntimeError, match=r"torch\.export\.export"):
        torch.jit.script(make("implicit"))
    with pytest.raises(RuntimeError, match=r"torch\.export\.export"):
        torch.jit.script(nn.Sequential(make("implicit")))


# torch.jit says that it is deprecated, and that it fixes shapes.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kernel", KERNELS)
def test_torch_jit_trace_takes_the_module(kernel):
    module, x, y = make(kernel).eval(), batch(L, N, E), 2 * batch(L, N, E)
    traced = torch.jit.trace(module, (x, x, x))
    for expected, found in zip(module(y, y, y), traced(y, y, y), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "options",
    [{"spectral": "dirct"}, {"num_frequencies": -3}, {"seed": "a"}, {"seed": 1.5}],
    ids=str,
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_bad_options_are_found_whatever_the_kernel(kernel, options):
    (name,) = options
    with pytest.raises(
        ValueError, match=f"^{name} must be .*, got {next(iter(options.values()))!r}"
    ):
        ikattn.MultiheadAttention(E, H, kernel=kernel, **options)
