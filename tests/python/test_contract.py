"""The contract of nn.MultiheadAttention and F.multi_head_attention_forward, clause by clause.

Values and gradients by torch's own default tolerances; texts of errors by calling both.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode

import ikattn
from attention_cases import (
    CASES,
    KERNELS,
    MASKS,
    OPTIONS,
    E,
    H,
    L,
    N,
    S,
    arguments_of,
    assert_as_precise_as_upstream,
    assert_same,
    batch,
    case,
    causal,
    double_backward_case,
    explicit,
    leaf,
    make,
    run,
)
from ikattn.functional import multi_head_attention_forward

each_kernel = pytest.mark.parametrize("kernel", KERNELS)

WEIGHTS = {
    "no weights": {"need_weights": False},
    "mean weights": {},
    "weights per head": {"average_attn_weights": False},
}
each_weights = pytest.mark.parametrize("wanted", WEIGHTS.values(), ids=WEIGHTS.keys())


@each_weights
@pytest.mark.parametrize("mask", MASKS)
def test_dot_equals_upstream_for_every_combination_of_options(mask, wanted):
    for options, is_batched, batch_first in itertools.product(OPTIONS, *[(True, False)] * 2):
        sizes = {"kdim": options["kdim"] or E, "vdim": options["vdim"] or E}
        arguments = arguments_of(mask, is_batched, batch_first, **sizes) | wanted
        options = {**options, "batch_first": batch_first}
        ours, stock = make("dot", **options), make("stock", **options)
        assert_same(run(ours, arguments), run(stock, arguments), f"{options}, {is_batched=}")


@pytest.mark.parametrize("mask", MASKS)
@each_kernel
def test_every_kernel_equals_its_formula_for_every_combination_of_options(kernel, mask):
    for options, is_batched, batch_first in itertools.product(OPTIONS, *[(True, False)] * 2):
        sizes = {"kdim": options["kdim"] or E, "vdim": options["vdim"] or E}
        arguments = arguments_of(mask, is_batched, batch_first, **sizes)
        module = make(kernel, **options, batch_first=batch_first)
        expected = run(module, arguments, functools.partial(explicit, module))
        assert_same(run(module, arguments), expected, f"{options}, {is_batched=}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@each_weights
@pytest.mark.parametrize("mask", MASKS)
def test_dot_is_as_precise_as_upstream(mask, wanted, dtype):
    assert_as_precise_as_upstream(mask, wanted, dtype)


@each_weights
@each_kernel
def test_heads_of_size_one(kernel, wanted):
    torch.manual_seed(0)
    x = torch.randn(L, N, E)
    ours = ikattn.MultiheadAttention(E, E, kernel=kernel, p=2.0)
    output, weights = ours(x, x, x, **wanted)
    assert output.shape == x.shape
    if weights is not None:
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    if kernel == "implicit":
        return
    stock = nn.MultiheadAttention(E, E)
    stock.load_state_dict(ours.state_dict())
    for got, want in zip((output, weights), stock(x, x, x, **wanted), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("sizes", [(0, L, S), (N, 0, S), (0, 0, S)])
@each_weights
@pytest.mark.parametrize("mask", MASKS)
@each_kernel
def test_empty_batches_and_queries_give_upstreams_shapes_and_gradients(kernel, mask, wanted, sizes):
    arguments = arguments_of(mask, True, True, sizes) | wanted
    module, stock = make(kernel, batch_first=True), make("stock", batch_first=True)
    results = run(module, arguments)
    if sizes[0] == 0 and mask not in ("none", "bool 2-D", "float 2-D") and "need_weights" in wanted:
        # of these upstream says that it cannot reshape 0 elements
        expected = run(module, arguments, functools.partial(explicit, module))
    else:
        expected = run(stock, arguments)
    for name, tensor in expected.items():
        assert results[name].shape == tensor.shape
        torch.testing.assert_close(results[name], tensor)


# The function


def test_the_functions_signature_is_upstreams_with_keywords_after_it():
    ours = inspect.signature(multi_head_attention_forward).parameters
    stock = inspect.signature(F.multi_head_attention_forward).parameters
    assert list(ours)[: len(stock)] == list(stock)
    for name, parameter in stock.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind)
    new = list(ours.values())[len(stock) :]
    assert [parameter.name for parameter in new] == ["kernel", "p", "w1", "w2"]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in new)


def function_of(module, function, **new):
    """``function`` with the parameters of ``module``, called like its forward."""

    def forward(query, key, value, **arguments):
        separate = {}
        if not module._qkv_same_embed_dim:
            separate = {f"{x}_proj_weight": getattr(module, f"{x}_proj_weight") for x in "qkv"}
            separate["use_separate_proj_weight"] = True
        return function(
            query,
            key,
            value,
            module.embed_dim,
            module.num_heads,
            module.in_proj_weight,
            module.in_proj_bias,
            module.bias_k,
            module.bias_v,
            module.add_zero_attn,
            module.dropout,
            module.out_proj.weight,
            module.out_proj.bias,
            training=module.training,
            **separate,
            **arguments,
            **new,
        )

    return forward


def kernel_options(module):
    if module.kernel != "implicit":
        return {"kernel": module.kernel, "p": module.p}
    w1, w2 = module.spectral.frequencies()
    return {"kernel": "implicit", "p": module.p, "w1": w1, "w2": w2}


@each_weights
@pytest.mark.parametrize("name", CASES)
def test_the_function_equals_upstreams(name, wanted):
    options, arguments = case(name, False)
    module = make("stock", **options)
    actual = run(module, arguments | wanted, function_of(module, multi_head_attention_forward))
    expected = function_of(module, F.multi_head_attention_forward)
    assert_same(actual, run(module, arguments | wanted, expected))


@each_weights
@pytest.mark.parametrize("name", CASES)
@each_kernel
def test_the_function_equals_the_module(name, kernel, wanted):
    options, arguments = case(name, False)
    module = make(kernel, **options)
    forward = function_of(module, multi_head_attention_forward, **kernel_options(module))
    assert_same(run(module, arguments | wanted, forward), run(module, arguments | wanted))


STATICS = [("static_k",), ("static_v",), ("static_k", "static_v")]


@each_weights
@pytest.mark.parametrize("zero_attn", [False, True])
@pytest.mark.parametrize("statics", STATICS, ids="+".join)
@pytest.mark.parametrize("mask", MASKS)
def test_static_keys_and_values_equal_upstreams(mask, statics, zero_attn, wanted):
    module = make("stock", add_zero_attn=zero_attn)
    arguments = arguments_of(mask, True, False) | wanted
    arguments |= {name: leaf(N * H, S, E // H) for name in statics}
    results = [
        run(module, arguments, function_of(module, function))
        for function in (multi_head_attention_forward, F.multi_head_attention_forward)
    ]
    assert_same(*results)


@each_kernel
def test_static_keys_and_values_take_the_place_of_projected_ones(kernel):
    module = make(kernel)
    arguments = arguments_of("both bool", True, False)
    forward = function_of(module, multi_head_attention_forward, **kernel_options(module))
    _, w_k, w_v = module.in_proj_weight.chunk(3)
    _, b_k, b_v = module.in_proj_bias.chunk(3)
    heads = {
        name: (arguments[given] @ w.T + b).view(S, N * H, E // H).transpose(0, 1)
        for name, given, w, b in (("static_k", "key", w_k, b_k), ("static_v", "value", w_v, b_v))
    }
    other = arguments | {name: torch.randn(S, N, E).double() for name in ("key", "value")}
    for got, want in zip(forward(**other, **heads), forward(**arguments), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("training", [True, False])
def test_the_function_drops_what_upstream_drops(training):
    module = make("stock", dropout=0.4).train(training)
    arguments = arguments_of("both float", True, False)
    results = []
    for function in (multi_head_attention_forward, F.multi_head_attention_forward):
        torch.manual_seed(5)
        results.append(run(module, arguments, function_of(module, function)))
    assert_same(*results)


X, Y, W = torch.zeros(L, N, E), torch.zeros(S, N, E), torch.zeros(H, E // H, 2)
# name: arguments that replace those of a good call
BAD_FUNCTION_CALLS = {
    "embed_dim": {"embed_dim_to_check": E + 1},
    "heads": {"num_heads": 5},
    "4-D query": {"query": X[None]},
    "2-D key": {"key": Y[0]},
    "key unlike value": {"value": Y[1:]},
    "key unlike value, separate": {"value": Y[1:], "use_separate_proj_weight": True},
    "no in_proj_weight": {"in_proj_weight": None},
    "no q_proj_weight": {"use_separate_proj_weight": True},
    "no k_proj_weight": {"use_separate_proj_weight": True, "q_proj_weight": torch.zeros(E, E)},
    "no v_proj_weight": {
        "use_separate_proj_weight": True,
        "q_proj_weight": torch.zeros(E, E),
        "k_proj_weight": torch.zeros(E, E),
    },
    "size of k_proj_weight": {
        "use_separate_proj_weight": True,
        "q_proj_weight": torch.zeros(E, E),
        "k_proj_weight": torch.zeros(E, E - 1),
        "v_proj_weight": torch.zeros(E, E),
    },
    "bias_k alone": {"bias_k": torch.zeros(1, 1, E)},
    "bias_v alone": {"bias_v": torch.zeros(1, 1, E)},
    "bias and static_k": {
        "bias_k": torch.zeros(1, 1, E),
        "bias_v": torch.zeros(1, 1, E),
        "static_k": torch.zeros(N * H, S, E // H),
    },
    "bias and static_v": {
        "bias_k": torch.zeros(1, 1, E),
        "bias_v": torch.zeros(1, 1, E),
        "static_v": torch.zeros(N * H, S, E // H),
    },
    "batch of static_k": {"static_k": torch.zeros(N, S, E // H)},
    "size of static_k": {"static_k": torch.zeros(N * H, S, E)},
    "batch of static_v": {"static_v": torch.zeros(N, S, E // H)},
    "size of static_v": {"static_v": torch.zeros(N * H, S, E)},
    "2-D mask": {"attn_mask": torch.zeros(S, L)},
    "3-D mask": {"attn_mask": torch.zeros(H, L, S)},
    "int mask": {"attn_mask": torch.zeros(L, S, dtype=torch.int)},
    "int padding": {"key_padding_mask": torch.zeros(N, S, dtype=torch.int)},
    "int padding of wrong axes": {"key_padding_mask": torch.zeros(S, dtype=torch.int)},
    "padding": {"key_padding_mask": torch.zeros(N, L)},
    "padding unlike static": {
        "key_padding_mask": torch.zeros(N, S),
        "static_k": torch.zeros(N * H, S + 1, E // H),
        "static_v": torch.zeros(N * H, S + 1, E // H),
    },
    "hint without mask": {"is_causal": True},
    "batches": {"key": Y[:, 1:], "value": Y[:, 1:]},
}
UNLIKE_STATICS = {
    "static_k longer than value": {"static_k": torch.zeros(N * H, S + 1, E // H)},
    "static_v longer than key": {"static_v": torch.zeros(N * H, S + 1, E // H)},
    "static_k longer than static_v": {
        "static_k": torch.zeros(N * H, S + 1, E // H),
        "static_v": torch.zeros(N * H, S - 1, E // H),
        "add_zero_attn": True,
        "key_padding_mask": torch.zeros(N, S + 1),
    },
}
BAD_FUNCTION_CALLS |= {
    f"{name}{', weights wanted' if wanted else ''}": statics | {"need_weights": wanted}
    for name, statics in UNLIKE_STATICS.items()
    for wanted in (False, True)
}


def good_call():
    arguments = {"query": X, "key": Y, "value": Y, "embed_dim_to_check": E, "num_heads": H}
    arguments |= {"in_proj_weight": torch.zeros(3 * E, E), "in_proj_bias": torch.zeros(3 * E)}
    arguments |= {"bias_k": None, "bias_v": None, "add_zero_attn": False, "dropout_p": 0.0}
    return arguments | {"out_proj_weight": torch.zeros(E, E), "out_proj_bias": torch.zeros(E)}


@each_kernel
@pytest.mark.parametrize("name", BAD_FUNCTION_CALLS)
def test_the_function_raises_what_upstream_raises(name, kernel):
    arguments = good_call() | BAD_FUNCTION_CALLS[name]
    options = {"kernel": kernel, "w1": W if kernel == "implicit" else None}
    raised = []
    for function in (
        functools.partial(multi_head_attention_forward, **options),
        F.multi_head_attention_forward,
    ):
        with pytest.raises((AssertionError, RuntimeError)) as caught:
            function(**arguments)
        raised.append((caught.type, str(caught.value)))
    assert raised[0] == raised[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "softmax"}, r"kernel must be one of \('dot', 'rbf', 'implicit'\), got"),
        ({"kernel": "rbf", "p": 0.5}, "p must be a real number >= 1.*got 0.5"),
        ({"kernel": "rbf", "p": "learned"}, "p must be a real number >= 1.*got 'learned'"),
        ({"kernel": "implicit"}, "expected w1.*got kernel='implicit' with w1 missing, w2 missing"),
        ({"kernel": "rbf", "w1": W}, "got kernel='rbf' with w1 given, w2 missing"),
        ({"kernel": "dot", "w2": W}, "got kernel='dot' with w1 missing, w2 given"),
    ],
)
def test_the_functions_new_options_say_what_was_expected_and_got(options, message):
    with pytest.raises(ValueError, match=message):
        multi_head_attention_forward(**good_call(), **options)


class Logged(torch.Tensor):
    """Remembers which functions it was given to."""

    seen: list[object]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_the_function_can_be_overridden_by_subclasses_of_tensor():
    Logged.seen = []
    arguments = good_call()
    arguments["query"] = arguments["query"].as_subclass(Logged)
    output, _ = multi_head_attention_forward(**arguments)
    assert Logged.seen[0] is multi_head_attention_forward
    assert isinstance(output, Logged)


# Warnings


@each_kernel
def test_mismatched_masks_warn_once_per_call(kernel):
    _, arguments = case("bool padding, float mask", False)
    module = make(kernel)
    forward = function_of(module, multi_head_attention_forward, **kernel_options(module))
    for call in (module, forward):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(**arguments)
        texts = [str(w.message) for w in caught]
        assert texts == [
            "Support for mismatched key_padding_mask and attn_mask is deprecated. "
            "Use same type for both instead."
        ]
        assert caught[0].category is UserWarning


@each_kernel
def test_good_calls_do_not_warn(kernel):
    for name in CASES:
        if name in ("bool padding, float mask", "float padding, bool mask"):
            continue
        options, arguments = case(name, True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            make(kernel, **options)(**arguments)


# Gradients of gradients


@pytest.mark.parametrize("mask", ["none", "bool padding", "both float"])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
@each_kernel
def test_double_backward(kernel, options, mask):
    call, inputs = double_backward_case(kernel, options, mask)
    # fast_mode: one random projection of the Jacobian of 500 and more numbers
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


# Modules among others


class Block(nn.Module):
    """A residual block, as models call attention."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.norm = nn.LayerNorm(E, dtype=torch.float64)

    def forward(self, x, mask):
        return self.norm(x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0])


@each_kernel
def test_torch_fx_takes_the_module_for_a_leaf(kernel):
    block = Block(make(kernel))
    traced = fx.symbolic_trace(block)
    (node,) = [node for node in traced.graph.nodes if node.op == "call_module"][:1]
    assert node.target == "attention"
    assert traced.attention is block.attention
    x, mask = batch(L, N, E), causal(L)
    torch.testing.assert_close(traced(x, mask), block(x, mask))
    assert torch.equal(pickle.loads(pickle.dumps(traced))(x, mask), traced(x, mask))


class LearnedQueries(nn.Module):
    """Attention whose query is the module's own."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.query = nn.Parameter(batch(L, 1, E))

    def forward(self, x):
        return self.attention(self.query, x, x, need_weights=False)[0]


@each_kernel
@pytest.mark.parametrize("model", [Block, LearnedQueries])
def test_torch_fx_makes_the_nodes_it_makes_for_upstream(kernel, model):
    nodes = [
        [(node.op, node.target) for node in fx.symbolic_trace(model(make(name))).graph.nodes]
        for name in (kernel, "stock")
    ]
    assert nodes[0] == nodes[1]


@each_kernel
def test_torch_fx_cannot_trace_the_module_itself_as_upstreams(kernel):
    raised = []
    for name in (kernel, "stock"):
        with pytest.raises(fx.proxy.TraceError) as caught:
            fx.symbolic_trace(make(name))
        raised.append(str(caught.value))
    assert raised[0] == raised[1]


@pytest.mark.parametrize("tracing_mode", ["real", "symbolic"])
@pytest.mark.parametrize("pre_dispatch", [False, True])
@each_kernel
def test_make_fx_traces_the_operators(kernel, pre_dispatch, tracing_mode):
    module, x = make(kernel), batch(L, N, E)

    def call(x, parameters):
        return torch.func.functional_call(module, parameters, (x, x, x))[0]

    parameters = dict(module.named_parameters())
    trace = make_fx(call, tracing_mode=tracing_mode, pre_dispatch=pre_dispatch)
    traced = trace(x, parameters)
    torch.testing.assert_close(traced(2 * x, parameters), call(2 * x, parameters))


@pytest.mark.parametrize("spectral", ["direct", "stationary", "ikan", "mikan"])
def test_module_trackers_take_the_module_without_grad(spectral):
    module, x = make("implicit", spectral=spectral, num_frequencies=4).eval(), batch(L, N, E)
    expected = module(x, x, x)[0]
    with torch.no_grad(), FlopCounterMode(display=False):
        torch.testing.assert_close(module(x, x, x)[0], expected)


def test_tangents_of_frequencies_pass_without_grad():
    module, x = make("implicit"), batch(L, N, E)

    def call(w1):
        return torch.func.functional_call(module, {"spectral.w1": w1}, (x, x, x))[0]

    w1 = module.spectral.w1.detach()
    _, expected = torch.func.jvp(call, (w1,), (torch.ones_like(w1),))
    with torch.no_grad():
        _, tangent = torch.func.jvp(call, (w1,), (torch.ones_like(w1),))
    assert torch.equal(tangent, expected)


@pytest.mark.parametrize("register", ["register_forward_pre_hook", "register_forward_hook"])
def test_torch_fx_refuses_hooks_that_would_run_twice(register):
    block = Block(make("implicit"))
    getattr(block.attention, register)(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"hooks of 'attention'.*is_leaf_module"):
        fx.symbolic_trace(block)

    class Tracer(fx.Tracer):
        def is_leaf_module(self, module, name):
            return isinstance(module, nn.MultiheadAttention) or super().is_leaf_module(module, name)

    graph = Tracer().trace(block)
    assert "attention" in [node.target for node in graph.nodes]


@each_kernel
def test_torch_fx_records_the_function_as_one_node(kernel):
    module = make(kernel)

    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.holder = module

        def forward(self, x):
            options = kernel_options(module)
            forward = function_of(module, multi_head_attention_forward, **options)
            return forward(x, x, x)[0]

    traced = fx.symbolic_trace(Functional())
    assert multi_head_attention_forward in [node.target for node in traced.graph.nodes]
    x = batch(L, N, E)
    torch.testing.assert_close(traced(x), module(x, x, x)[0])


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x

    def right_inverse(self, x):
        return x / 2


@pytest.mark.parametrize("name", ["in_proj_weight", "in_proj_bias", "out_proj.weight"])
@each_kernel
def test_parametrized_weights_are_the_ones_used(kernel, name):
    module, x = make(kernel), batch(L, N, E)
    expected = module(x, x, x)[0]
    owner, _, attribute = name.rpartition(".")
    part = module.get_submodule(owner)
    parametrize.register_parametrization(part, attribute, Doubled())
    torch.testing.assert_close(module(x, x, x)[0], expected)
    with torch.no_grad():
        part.parametrizations[attribute].original.zero_()
    assert not torch.allclose(module(x, x, x)[0], expected)
    assert isinstance(module, ikattn.MultiheadAttention)
    torch.testing.assert_close(copy.deepcopy(module)(x, x, x)[0], module(x, x, x)[0])
    parametrize.remove_parametrizations(part, attribute)
    assert type(module) is ikattn.MultiheadAttention


def test_parametrized_frequencies_are_the_ones_used():
    module, x = make("implicit"), batch(L, N, E)
    expected = module(x, x, x)[0]
    parametrize.register_parametrization(module.spectral, "w1", Doubled())
    torch.testing.assert_close(module(x, x, x)[0], expected)


@each_kernel
def test_hooks_run_once_each_in_order_and_can_change_what_passes(kernel):
    module, x, seen = make(kernel), batch(L, N, E).requires_grad_(), []
    plain = module(x, x, x)[0]
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs: (
                seen.append("pre"),
                ((args[0] * 2, *args[1:]), kwargs),
            )[1],
            with_kwargs=True,
        ),
        module.register_forward_hook(
            lambda _, args, output: (seen.append("post"), (output[0] + 1, None))[1]
        ),
        module.register_full_backward_hook(lambda *_: seen.append("backward")),
    ]
    output, weights = module(x, x, x)
    assert weights is None
    for handle in handles[:2]:
        handle.remove()
    torch.testing.assert_close(output, module(2 * x, x, x)[0] + 1)
    output.sum().backward()
    assert seen == ["pre", "post", "backward"]
    handles[2].remove()
    torch.testing.assert_close(module(x, x, x)[0], plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("options", [{}, {"kdim": 3, "add_bias_kv": True}, {"bias": False}])
@each_kernel
def test_factory_arguments_reach_every_parameter(kernel, options, device, dtype):
    ours = ikattn.MultiheadAttention(E, H, device=device, dtype=dtype, kernel=kernel, **options)
    stock = nn.MultiheadAttention(E, H, device=device, dtype=dtype, **options)
    assert {(w.device.type, w.dtype) for w in ours.parameters()} == {(device, dtype)}
    assert [n for n, _ in ours.named_parameters() if "spectral" not in n] == [
        n for n, _ in stock.named_parameters()
    ]


@each_kernel
def test_meta_modules_give_meta_outputs_of_upstreams_shapes(kernel):
    ours = ikattn.MultiheadAttention(E, H, device="meta", kernel=kernel)
    stock = nn.MultiheadAttention(E, H, device="meta")
    x = torch.empty(L, N, E, device="meta")
    for wanted in WEIGHTS.values():
        for got, want in zip(ours(x, x, x, **wanted), stock(x, x, x, **wanted), strict=True):
            if want is None:
                assert got is None
            else:
                assert (got.device, got.shape, got.dtype) == (want.device, want.shape, want.dtype)


@each_kernel
def test_modules_pickled_before_the_kernel_was_known_and_after_agree(kernel):
    """A pickle holds the class by name and the attributes; nothing else is needed."""
    module, x = make(kernel, add_bias_kv=True, kdim=7, dropout=0.3).eval(), batch(L, N, E)
    memory = batch(S, N, 7), batch(S, N, E)
    twin = pickle.loads(pickle.dumps(module))
    assert vars(twin).keys() == vars(module).keys()
    assert not twin.training
    torch.testing.assert_close(twin(x, *memory), module(x, *memory))
    assert repr(twin) == repr(module)


@each_kernel
def test_state_of_every_form_passes_both_ways(kernel):
    for options in OPTIONS:
        ours, stock = make(kernel, **options), make("stock", **options)
        with torch.no_grad():
            for parameter in stock.parameters():
                parameter.add_(1.0)
        ours.load_state_dict(stock.state_dict(), strict=True)
        back = make("stock", **options)
        result = back.load_state_dict(ours.state_dict(), strict=kernel != "implicit")
        assert not result.missing_keys
        assert all(name.startswith("spectral.") for name in result.unexpected_keys)
        for name, tensor in stock.state_dict().items():
            assert torch.equal(back.state_dict()[name], tensor)


@each_kernel
def test_torchscript_is_refused_in_a_sentence_that_names_torch_export(kernel):
    with pytest.raises(RuntimeError, match=r"cannot compile ikattn.*use torch\.export\.export"):
        torch.jit.script(make(kernel))
