"""The contract of nn.MultiheadAttention, clause by clause.

Values and gradients by torch's own default tolerances; texts of errors by calling both.
"""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import warnings

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode

import ikattn
from attention_cases import (
    CASES,
    KERNELS,
    MASKS,
    WEIGHTS,
    E,
    H,
    L,
    N,
    S,
    arguments_of,
    assert_as_precise_as_upstream,
    batch,
    case,
    causal,
    double_backward_case,
    each_kernel,
    each_weights,
    explicit,
    function_of,
    kernel_options,
    make,
    run,
)
from ikattn.nn.functional import multi_head_attention_forward


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@each_weights
@pytest.mark.parametrize("mask", MASKS)
def test_dot_is_as_precise_as_upstream(mask, wanted, dtype):
    assert_as_precise_as_upstream(mask, wanted, dtype)


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


@pytest.mark.parametrize("mask", ["none", "bool padding", "both float"])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
@each_kernel
def test_double_backward(kernel, options, mask):
    call, inputs = double_backward_case(kernel, options, mask)
    # fast_mode: one random projection of the Jacobian of 500 and more numbers
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


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
def test_torch_fx_makes_the_nodes_and_errors_it_makes_for_upstream(kernel, model):
    nodes, raised = [], []
    for name in (kernel, "stock"):
        traced = fx.symbolic_trace(model(make(name)))
        nodes.append([(node.op, node.target) for node in traced.graph.nodes])
        with pytest.raises(fx.proxy.TraceError) as caught:
            fx.symbolic_trace(make(name))
        raised.append(str(caught.value))
    assert nodes[0] == nodes[1]
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


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        *itertools.product(KERNELS, ["in_proj_weight", "in_proj_bias", "out_proj.weight"]),
        ("implicit", "spectral.w1"),
    ],
)
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


@each_kernel
def test_hooks_run_once_each_in_order_and_can_change_what_passes(kernel):
    module, x, seen = make(kernel), batch(L, N, E).requires_grad_(), []
    plain = module(x, x, x)[0]
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs: (seen.append("pre"), ((args[0] * 2, *args[1:]), kwargs))[1],
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
