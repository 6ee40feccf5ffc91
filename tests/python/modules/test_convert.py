"""ikattn.convert: what it changes, and all that it must not."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from torch import nn

import ikattn
from attention_cases import E, H, L, N, each_kernel, make


def model_of_three():
    """Attention at "0", "1.inner" and "1.outer"."""
    block = nn.ModuleDict({"inner": make("stock"), "outer": make("stock")})
    return nn.ModuleList([make("stock"), block, nn.Linear(2, 2)])


def kernels_of(model):
    return [
        getattr(module, "kernel", "stock")
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
    ]


@each_kernel
def test_every_attention_module_is_converted_in_place(kernel):
    model = model_of_three()
    before = dict(model.named_parameters())
    assert ikattn.convert(model, kernel) is model
    assert kernels_of(model) == [kernel] * 3
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    new = [name for name in after if name not in before]
    assert len({float(after[name].detach().sum()) for name in new}) == len(new)
    assert len(new) == (6 if kernel == "implicit" else 0)
    assert all(".spectral." in name for name in new)


@each_kernel
def test_a_module_converts_itself_and_computes_what_a_new_one_does(kernel):
    x, module = torch.randn(L, N, E).double(), make("stock")
    converted = ikattn.convert(module, kernel, p=3.0, num_frequencies=7, seed=0)
    assert converted is module
    assert isinstance(converted, ikattn.MultiheadAttention)
    assert type(pickle.loads(pickle.dumps(converted))) is ikattn.MultiheadAttention
    assert torch.equal(converted(x, x, x)[0], make(kernel)(x, x, x)[0])


def test_an_optimiser_made_before_keeps_training_the_weights():
    model = make("stock")
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    ikattn.convert(model)
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(L, N, E).double()
    model(x, x, x)[0].square().sum().backward()
    optimiser.step()
    changed = {
        name for name, tensor in model.state_dict().items() if (tensor != before[name]).any()
    }
    assert changed == {name for name in before if "spectral" not in name}
    assert model.spectral.w1.grad.any()


def test_state_of_the_module_is_kept():
    module = make("stock", dropout=0.3, batch_first=True).to(torch.bfloat16).eval()
    module.in_proj_weight.requires_grad_(False)
    module.note = "kept"
    called = []
    handle = module.register_forward_hook(lambda *_: called.append("after"))
    module.out_proj.register_forward_pre_hook(lambda *_: called.append("within"))
    ikattn.convert(module)
    assert not any(part.training for part in module.modules())
    assert (module.dropout, module.batch_first, module.note) == (0.3, True, "kept")
    assert not module.in_proj_weight.requires_grad
    assert module.out_proj.weight.requires_grad
    assert module.spectral.w1.requires_grad
    assert {w.dtype for w in module.parameters()} == {torch.bfloat16}
    x = torch.randn(N, L, E, dtype=torch.bfloat16)
    module(x, x, x)
    assert called == ["within", "after"]
    handle.remove()
    module(x, x, x)
    assert called == ["within", "after", "within"]


def test_a_shared_module_stays_shared_and_a_meta_one_on_the_meta_device():
    layer = ikattn.convert(nn.TransformerEncoderLayer(E, H, 16, device="meta"))
    assert layer.self_attn.spectral.w1.is_meta
    shared = make("stock")
    model = nn.ModuleDict({"first": shared, "second": shared, "other": make("stock")})
    ikattn.convert(model, select="second")
    assert model["first"] is model["second"]
    assert model["first"].kernel == "implicit"
    assert type(model["other"]) is nn.MultiheadAttention


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        ("1.*", ["stock", "implicit", "implicit"]),
        (["0", "*.outer"], ["implicit", "stock", "implicit"]),
        (lambda name, module: name.endswith("inner"), ["stock", "implicit", "stock"]),
        (lambda name, module: module.embed_dim == E, ["implicit"] * 3),
        (nn.ModuleDict, ["stock", "implicit", "implicit"]),
        (nn.MultiheadAttention, ["implicit"] * 3),
        (["0", nn.ModuleDict], ["implicit"] * 3),
    ],
)
def test_modules_are_selected_by_pattern_or_predicate(select, expected):
    assert kernels_of(ikattn.convert(model_of_three(), select=select)) == expected


def test_a_seed_fixes_all_frequencies_and_leaves_the_random_stream():
    models = [model_of_three(), model_of_three()]
    state = torch.get_rng_state()
    for model in models:
        ikattn.convert(model, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    frequencies = [[w for n, w in m.named_parameters() if "spectral" in n] for m in models]
    assert all(torch.equal(a, b) for a, b in zip(*frequencies, strict=True))
    assert len({w.sum().item() for w in frequencies[0]}) == 6


def test_converting_twice_changes_nothing_and_to_another_kernel_changes_it():
    model = ikattn.convert(model_of_three())
    frequencies = model[0].spectral.w1
    assert ikattn.convert(model, num_frequencies=3)[0].spectral.w1 is frequencies
    assert len(model[0]._forward_pre_hooks) == 1
    ikattn.convert(model, "rbf", p=4.0)
    assert kernels_of(model) == ["rbf"] * 3
    assert model[0].p == 4.0
    assert len(model[0]._forward_pre_hooks) == 1
    ikattn.convert(model, "dot")
    assert len(model[0]._forward_pre_hooks) == 0
    assert model.state_dict().keys() == model_of_three().state_dict().keys()


def everything_in(model):
    """All that a model holds, by module; what cannot be compared is compared by name."""
    return [
        (
            name,
            type(module),
            {key: vars(module)[key] for key in vars(module) if not key.startswith("_")},
            {key: id(tensor) for key, tensor in module._parameters.items()},
            list(module._forward_pre_hooks.values()),
            list(module._modules),
        )
        for name, module in model.named_modules()
    ]


@each_kernel
def test_revert_leaves_nothing_of_convert(kernel):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 16, batch_first=True), 2)
    model.layers[0].self_attn.register_forward_pre_hook(print)
    before = everything_in(model)
    ikattn.convert(model, kernel)
    assert everything_in(model) != before
    assert ikattn.revert(model) is model
    assert everything_in(model) == before


def test_revert_keeps_what_training_made_of_the_weights():
    model = ikattn.convert(model_of_three())
    with torch.no_grad():
        model[0].in_proj_weight.add_(1.0)
    expected = make("stock")
    expected.load_state_dict({k: w for k, w in model[0].state_dict().items() if "spec" not in k})
    x = torch.randn(L, N, E).double()
    for got, want in zip(ikattn.revert(model)[0](x, x, x), expected(x, x, x), strict=True):
        assert torch.equal(got, want)
    pickle.loads(pickle.dumps(model))


def test_revert_of_selected_modules_leaves_encoders_that_need_it_without_nesting():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 16, batch_first=True), 2)
    ikattn.convert(model)
    ikattn.revert(model, select="layers.0.*")
    assert kernels_of(model) == ["stock", "implicit"]
    assert not model.use_nested_tensor
    ikattn.convert(model, "dot", select="layers.1.*")
    assert model.use_nested_tensor
    both = nn.ModuleList([model, copy.deepcopy(model)])
    ikattn.convert(both, select="0.*")
    assert [part.use_nested_tensor for part in both] == [False, True]


def test_revert_takes_modules_that_were_made_as_ours_and_leaves_derived_ones(caplog):
    class Derived(ikattn.MultiheadAttention):
        pass

    model = nn.ModuleList([make("rbf"), Derived(E, H)])
    ikattn.revert(model)
    assert type(model[0]) is nn.MultiheadAttention
    assert type(model[1]) is Derived
    assert "not reverted: 1 is a " in caplog.text


def test_the_report_tells_what_each_module_is():
    model = model_of_three()
    model.append(SomebodysAttention(E, H))
    model.append(model[0])
    ikattn.convert(model, select=["0", "1.inner"], p=None, num_frequencies=3)
    ikattn.convert(model[0], "rbf", p=3.0)
    report = ikattn.conversion_report(model)
    assert str(report).splitlines() == [
        "0 = 4    kernel='rbf', p=3.0",
        "1.inner  kernel='implicit', p=None, Direct",
        "1.outer  nn.MultiheadAttention",
        f"3        left alone: a {__name__}.SomebodysAttention",
    ]
    assert [len(part) for part in (report, report.converted, report.stock, report.left)] == [
        *(4, 2, 1, 1)
    ]
    assert ikattn.conversion_report(nn.Linear(1, 1)) == ()


class SomebodysAttention(nn.MultiheadAttention):
    pass


def test_what_others_changed_is_left_and_reported(caplog):
    model = model_of_three()
    model.append(SomebodysAttention(E, H))
    model[1]["inner"].forward = lambda *args, **kwargs: None
    torch.nn.utils.parametrizations.weight_norm(model[1]["outer"], "in_proj_weight")
    caplog.set_level(logging.INFO, logger="ikattn")
    ikattn.convert(model)
    assert kernels_of(model) == ["implicit", "stock", "stock", "stock"]
    info, warning = caplog.messages
    assert info == "kernel='implicit' now: 0"
    assert "1.inner is a torch.nn.modules.activation.MultiheadAttention with a forward" in warning
    assert "1.outer is a " in warning
    assert "SomebodysAttention" in warning


def test_nothing_to_change_and_what_is_no_model_or_selection_are_named():
    of_three, select = model_of_three(), r"select must be a predicate .*, got "
    for change in (ikattn.convert, ikattn.revert):
        with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got int"):
            change(3)
        once = (name for name in ["0"])  # can be read once
        for wrong, got in ((3, "3"), ([3], r"\[3"), (once, "<generator")):
            with pytest.raises(TypeError, match=select + got):
                change(of_three, select=wrong)
    with pytest.raises(ValueError, match="in this model of Linear, Sequential"):
        ikattn.convert(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"select='2' matches none .*: 0, 1\.inner, 1\.outer"):
        ikattn.convert(of_three, select="2")
    with pytest.raises(ValueError, match=r"nothing that can be converted.*SomebodysAttention"):
        ikattn.convert(SomebodysAttention(E, H))
    with pytest.raises(ValueError, match=r"nothing to revert: 0 is nn\.Multi.*; 1\.inner"):
        ikattn.revert(of_three)


def test_a_function_or_copies_of_a_module_are_the_sources_of_each_module() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(16, 4), nn.MultiheadAttention(24, 2)])
    asked: list[nn.Module] = []

    def source(module: nn.MultiheadAttention) -> nn.Module:
        asked.append(module)
        return ikattn.spectral.Mikan(module.num_heads, module.head_dim, 8, pool="key")

    ikattn.convert(model, spectral=source)
    assert asked == list(model)
    assert model[0].spectral is not model[1].spectral
    x = torch.randn(5, 2, 24)
    assert model[1](x, x, x)[0].shape == x.shape
    model, x = ikattn.convert(model_of_three(), spectral=Halves()), torch.randn(L, N, E).double()
    assert model[0](x, x, x)[0].shape == x.shape
    assert model[0].spectral.w is not model[1]["inner"].spectral.w  # each has a copy


def test_decoders_get_cross_attention_that_does_not_look_at_the_queries() -> None:
    options = {"spectral": "mikan", "num_frequencies": 8, "stationary": True, "seed": 3}
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, batch_first=True), 1)
    layer = ikattn.convert(decoder, **options).eval().layers[0]
    assert (layer.self_attn.spectral.pool, layer.multihead_attn.spectral.pool) == ("both", "key")
    assert layer.multihead_attn.spectral.stationary
    memory, target = torch.randn(2, 5, 16), torch.randn(2, 3, 16)
    padding = torch.tensor([[False, False, True], [False, False, False]])
    with torch.no_grad():
        for parameter in layer.multihead_attn.spectral.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        expected = decoder(target, memory, tgt_key_padding_mask=padding)
        target[padding] = 9.0
        got = decoder(target, memory, tgt_key_padding_mask=padding)
    torch.testing.assert_close(got[~padding], expected[~padding])


@pytest.mark.parametrize(
    "options", [{"kernel": "x"}, {"p": 0.0}, {"spectral": "x"}, {"num_frequencies": 0}], ids=str
)
def test_bad_options_change_nothing(options):
    model = model_of_three()
    with pytest.raises(ValueError, match="must be"):
        ikattn.convert(model, **options)
    assert kernels_of(model) == ["stock"] * 3


class Fails(Exception):
    pass


def fails_at_the_second():
    answers = iter([ikattn.spectral.Direct(H, E // H, 3, dtype=torch.float64)])

    def source(module):
        for answer in answers:
            return answer
        raise Fails

    return {"spectral": source}


@pytest.mark.parametrize("kernel", ["stock", "rbf"])
def test_what_fails_half_way_changes_nothing(kernel):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 16, batch_first=True), 2)
    if kernel != "stock":
        ikattn.convert(model, kernel)
    handle = model.layers[0].self_attn.register_forward_pre_hook(print)
    before = everything_in(model)
    with pytest.raises(Fails):
        ikattn.convert(model, **fails_at_the_second())
    assert everything_in(model) == before
    handle.remove()
    assert print not in model.layers[0].self_attn._forward_pre_hooks.values()
    ikattn.convert(model)
    assert kernels_of(model) == ["implicit"] * 2


@pytest.mark.parametrize("way", ["convert", "set_kernel"])
def test_frequencies_made_in_inference_mode_can_be_trained(way):
    module = make("stock" if way == "convert" else "dot")
    with torch.inference_mode():
        ikattn.convert(module) if way == "convert" else module.set_kernel("implicit")
    x = torch.randn(L, N, E).double()
    module(x, x, x)[0].sum().backward()
    assert module.spectral.w1.grad.any()


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.full((H, E // H, 2), 0.5, dtype=torch.float64))

    def forward(self, query, key, key_padding_mask):
        return self.w, None


def test_one_call_converts_every_kind_and_revert_undoes_it():
    """SigLIP pools by an nn.MultiheadAttention beside the attention of transformers."""
    transformers_models = pytest.importorskip("transformers_models")
    pytest.importorskip("transformers")
    pyg = pytest.importorskip("torch_geometric.nn")
    vision = transformers_models.build("siglip vision")
    model = nn.ModuleDict({"vision": vision, "graph": pyg.GATConv(4, 4), "own": make("stock")})
    model["own"].float()
    before, keys = everything_in(model), model.state_dict().keys()
    inputs = transformers_models.inputs_of("siglip vision")
    stock = vision(**inputs).last_hidden_state
    assert len(ikattn.conversion_report(model).stock) == 5
    ikattn.convert(model, seed=3, num_frequencies=5)
    report = ikattn.conversion_report(model)
    assert [found.kernel for found in report] == ["implicit"] * 5
    assert all(found.module.spectral.num_frequencies == 5 for found in report)
    assert not torch.equal(vision(**inputs).last_hidden_state, stock)
    ikattn.revert(model)
    assert model.state_dict().keys() == keys
    assert everything_in(model) == before
    assert vision.config._attn_implementation == "sdpa"
    torch.testing.assert_close(vision(**inputs).last_hidden_state, stock, rtol=0, atol=0)


def test_options_of_one_kind_are_refused_by_name_for_others():
    transformers_models = pytest.importorskip("transformers_models")
    pytest.importorskip("transformers")
    model = transformers_models.build("siglip vision")
    before = everything_in(model)
    for options, named in (
        ({"kernel": "rbf"}, "takes kernel = 'implicit', got 'rbf'"),
        ({"p": "learned"}, "takes p = a number or None, got 'learned'"),
        ({"spectral": Halves()}, r"takes spectral = one of .*, got Halves"),
        ({"select": "*.layers.0.*"}, "names 1 of the 2 attention modules of SiglipVision"),
    ):
        with pytest.raises(ValueError, match=named):
            ikattn.convert(model, **options)
    assert everything_in(model) == before
    ikattn.convert(model, "rbf", select=nn.MultiheadAttention)
    assert kernels_of(model) == ["rbf"]
    with pytest.raises(ValueError, match=r"sizes is for .*, got nn\.MultiheadAttention"):
        ikattn.convert(make("stock"), sizes=lambda module: (1, 1))


def test_a_conversion_that_changes_nothing_says_so(caplog):
    model = ikattn.convert(nn.TransformerEncoderLayer(16, 4))
    ikattn.convert(model, num_frequencies=4)
    assert caplog.messages == [
        "kernel='implicit' already, its options stay until revert: self_attn"
    ]
    assert model.self_attn.spectral.num_frequencies == 32
    assert "p='learned'" in repr(ikattn.MultiheadAttention(16, 4, p="learned"))
