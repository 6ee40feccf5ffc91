"""Mean weights of long sequences, which are made part by part, as if every call were long."""

from __future__ import annotations

import functools

import pytest
import torch

import ikattn
from attention_cases import (
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
    double_backward_case,
    explicit,
    make,
    run,
)
from tiers import each


@pytest.fixture
def every_call_is_large(monkeypatch):
    monkeypatch.setattr(ikattn.nn._mean_weights, "_LARGE", -1)
    monkeypatch.setattr(ikattn.nn._mean_weights, "_PART", 2 * N * S)  # two queries


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", ["dot", "rbf"])
def test_part_by_part_equals_all_at_once(kernel, mask, every_call_is_large):
    for options in OPTIONS:
        sizes = {"kdim": options["kdim"] or E, "vdim": options["vdim"] or E}
        arguments = arguments_of(mask, True, False, **sizes)
        module = make(kernel, **options)
        expected = run(module, arguments, functools.partial(explicit, module))
        assert_same(run(module, arguments), expected, f"{options}")


@pytest.mark.parametrize("mask", ["none", "bool padding", "both float"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("kernel", ["dot", "rbf"])
def test_double_backward_part_by_part(kernel, dropout, mask, every_call_is_large):
    call, inputs = double_backward_case(kernel, {"dropout": dropout}, mask)

    def call_of_one_seed(*tensors):
        torch.manual_seed(8)
        return call(*tensors)

    assert torch.autograd.gradgradcheck(call_of_one_seed, inputs, fast_mode=True)


@pytest.mark.parametrize("kernel", ["dot", "rbf"])
def test_part_by_part_a_query_that_sees_no_key_gets_zeros(kernel, every_call_is_large):
    arguments = arguments_of("both bool", True, False)
    arguments["attn_mask"][1] = True
    results = run(make(kernel), arguments)
    assert not results["weights"][:, 1].any()
    assert all(tensor.isfinite().all() for tensor in results.values())


@pytest.mark.parametrize("mask", ["none", "bool padding", "both float"])
@pytest.mark.parametrize("kernel", ["dot", "rbf"])
def test_part_by_part_dropout_is_that_of_all_at_once(
    kernel, mask, every_call_is_large, monkeypatch
):
    """Given what was drawn, which is the same in every pass."""
    module, arguments = make(kernel, dropout=0.4), arguments_of(mask, True, False)
    begin, passes = ikattn.nn._mean_weights._Dropout.begin, []

    def begin_and_keep(drop, device):
        draw, drawn = begin(drop, device), []
        passes.append(drawn)
        return lambda weights: drawn.append(draw(weights)) or drawn[-1]

    monkeypatch.setattr(ikattn.nn._mean_weights._Dropout, "begin", begin_and_keep)
    actual = run(module, arguments)
    forward, backward = passes
    assert all(torch.equal(a, b) for a, b in zip(forward, backward, strict=True))
    each = len(forward) // H
    heads = [torch.cat(forward[h * each : (h + 1) * each], 1) for h in range(H)]
    factors = torch.stack(heads, 1)  # [N, H, L, S]
    assert {round(x, 9) for x in factors.unique().tolist()} == {0, round(1 / 0.6, 9)}
    assert factors.mean() == pytest.approx(1, abs=0.3)

    monkeypatch.setattr(ikattn.nn._mean_weights, "_LARGE", 1 << 22)
    monkeypatch.setattr(ikattn.nn._softmax.F, "dropout", lambda weights, p: weights * factors)
    assert_same(actual, run(module, arguments))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"dropout": 0.3}], ids=str)
@pytest.mark.parametrize("mask", ["none", "bool padding", "float 2-D"])
@pytest.mark.parametrize("kernel", ["dot", "rbf"])
def test_part_by_part_under_autocast(kernel, mask, options, dtype, every_call_is_large):
    """The backward, outside, makes the weights of the forward again."""
    module, arguments = make(kernel, **options).float(), arguments_of(mask, True, False)
    arguments = {
        name: x.detach().float().requires_grad_() if x.is_floating_point() else x
        for name, x in arguments.items()
    }

    def gradients():
        torch.manual_seed(5)
        with torch.autocast("cpu", dtype):
            output, weights = module(**arguments)
        leaves = [*module.parameters(), *(x for x in arguments.values() if x.requires_grad)]
        loss = output.float().square().sum() + weights.float().square().sum()
        return [output, weights, *torch.autograd.grad(loss, leaves, allow_unused=True)]

    results = gradients()
    assert all(x is None or x.isfinite().all() for x in results)
    assert all(a is b or torch.equal(a, b) for a, b in zip(gradients(), results, strict=True))


def test_part_by_part_fake_tensors_and_other_default_devices(every_call_is_large):
    module, x = make("dot", dropout=0.4), batch(L, N, E)
    with torch.device("meta"):
        assert module(x, x, x)[1].device == x.device
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
        assert module(fake, fake, fake)[1].shape == (N, L, L)


def test_part_by_part_dropout_follows_the_seed(every_call_is_large):
    module, x = make("dot", dropout=0.4), batch(L, N, E)

    def weights(seed):
        torch.manual_seed(seed)
        return module(x, x, x)[1]

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    assert torch.equal(module.eval()(x, x, x)[1], weights(3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_part_by_part_is_as_precise_as_upstream(dtype, monkeypatch):
    for threshold in (1 << 22, -1):
        monkeypatch.setattr(ikattn.nn._mean_weights, "_LARGE", threshold)
        assert_as_precise_as_upstream("both float", {}, dtype)


@pytest.mark.parametrize("transform", ["vmap", "jvp"])
def test_transforms_take_calls_of_every_size(transform, every_call_is_large):
    module, x = make("dot"), batch(L, N, E)

    def call(x):
        return module(x, x, x)[1]

    if transform == "vmap":
        stacked = torch.func.vmap(call)(torch.stack([x, 2 * x]))
        torch.testing.assert_close(stacked, torch.stack([call(x), call(2 * x)]))
    else:
        direction = torch.ones_like(x)
        _, along = torch.func.jvp(call, (x,), (direction,))
        step = 1e-6 * direction
        torch.testing.assert_close(along, (call(x + step) - call(x - step)) / 2e-6)


@pytest.mark.parametrize("mask", ["none", "both float"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("kernel", ["dot", "rbf"])
def test_part_by_part_batched_gradients(kernel, dropout, mask, every_call_is_large):
    module, arguments = make(kernel, dropout=dropout), arguments_of(mask, True, False)
    results = module(**arguments)
    leaves = [*module.parameters(), *(x for x in arguments.values() if x.requires_grad)]
    incoming = [torch.randn(3, *x.shape, dtype=x.dtype) for x in results]
    batched = torch.autograd.grad(
        results, leaves, incoming, is_grads_batched=True, retain_graph=True
    )
    for index in range(3):
        one = torch.autograd.grad(results, leaves, [g[index] for g in incoming], retain_graph=True)
        for got, expected in zip(batched, one, strict=True):
            torch.testing.assert_close(got[index], expected)


def test_part_by_part_batched_gradients_of_the_values_alone(every_call_is_large):
    module, arguments = make("dot").requires_grad_(False), arguments_of("none", True, False)
    for name in ("query", "key"):
        arguments[name] = arguments[name].detach()
    output, _ = module(**arguments)
    incoming = torch.randn(2, *output.shape, dtype=output.dtype)
    value = arguments["value"]
    (batched,) = torch.autograd.grad(
        output, value, incoming, is_grads_batched=True, retain_graph=True
    )
    for index in range(2):
        (one,) = torch.autograd.grad(output, value, incoming[index], retain_graph=True)
        torch.testing.assert_close(batched[index], one)


# --- Under a compiler -----------------------------------------------------------------------------


@each(
    ("mask",),
    [(mask,) for mask in ("none", "bool padding", "both float", "bool 3-D")],
    {"kernel": ["dot", "rbf"]},
)
def test_a_compiled_call_by_parts_equals_the_eager_one(kernel, mask, every_call_is_large):
    arguments = arguments_of(mask, True, False)
    module = make(kernel)
    expected = run(module, arguments)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    found = run(module, arguments, lambda **call: compiled(**call))
    assert_same(found, expected, f"{mask}")
    assert "softmax_mean_weights" in graph_of(module, arguments)


def graph_of(module, arguments):
    """Returns the graph that a compiler is shown of a call."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph.print_readable(print_output=False))
        return graph

    torch._dynamo.reset()
    torch.compile(module, backend=backend, fullgraph=True)(**arguments)
    return "".join(graphs)


def test_compiled_dropout_by_parts_is_the_same_in_both_passes(every_call_is_large):
    torch._dynamo.reset()
    module = make("dot", dropout=0.4)
    x = batch(L, N, E).requires_grad_()
    compiled = torch.compile(module, fullgraph=True)

    def gradient(point):
        torch.manual_seed(3)
        output, weights = compiled(point, point, point)
        loss = output.square().sum() + weights.square().sum()
        return loss, torch.autograd.grad(loss, point)[0]

    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    _, found = gradient(x)
    step = 1e-6 * direction
    ahead, behind = (gradient((x + s).detach().requires_grad_())[0] for s in (step, -step))
    assert ((ahead - behind) / 2e-6).item() == pytest.approx((found * direction).sum().item(), 1e-4)
    torch.manual_seed(4)
    other = compiled(x, x, x)[1]
    assert not torch.equal(other, compiled(x, x, x)[1])


@pytest.mark.parametrize("options", [{}, {"dropout": 0.3}], ids=str)
def test_compiled_by_parts_under_autocast(options, every_call_is_large):
    module, x = make("dot", **options).float(), batch(L, N, E).float().requires_grad_()

    def results(call):
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16):
            output, weights = call(x, x, x)
        loss = output.float().square().sum() + weights.float().square().sum()
        return [output, weights, torch.autograd.grad(loss, x)[0]]

    torch._dynamo.reset()
    compiled = results(torch.compile(module, fullgraph=True))
    assert all(value.isfinite().all() for value in compiled)
    if not options:
        for got, expected in zip(compiled, results(module), strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_an_exported_program_knows_torchs_operators_only(every_call_is_large):
    module, x = make("dot"), batch(L, N, E)
    program = torch.export.export(module, (x, x, x))
    assert "ikattn" not in str(program.graph)
    torch.testing.assert_close(program.module()(x, x, x), module(x, x, x))


@pytest.mark.parametrize("wanted", ["query", "value"])
def test_opcheck(wanted):
    x = {name: torch.randn(2, 3, 5, 4) for name in ("query", "key", "value")}
    x[wanted].requires_grad_()
    for biases in ([], [torch.randn(2, 1, 1, 5), torch.randn(5, 5).expand(1, 1, 5, 5)]):
        for p, seed in ((0.0, None), (0.25, torch.tensor(7))):
            arguments = (*x.values(), biases, p, seed, None)
            torch.library.opcheck(torch.ops.ikattn.softmax_mean_weights.default, arguments)
