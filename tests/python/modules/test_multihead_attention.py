"""ikattn.MultiheadAttention against torch.nn.MultiheadAttention, and against the formulas."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import ikattn
from attention_cases import (
    E,
    H,
    L,
    N,
    S,
    batch,
    case,
    causal,
    each_kernel,
    each_weights,
    explicit,
    ignore,
    make,
    run,
)

each_order = pytest.mark.parametrize("batch_first", [False, True], ids=["seq first", "batch first"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each_kernel
def test_lower_precision_stays_near_float64(kernel, dtype):
    x = batch(L, N, E)
    module, padding = make(kernel), ignore(N, L)
    expected = module(x, x, x, padding)
    low = copy.deepcopy(module).to(dtype)
    x = x.to(dtype)
    for actual, wanted in zip(low(x, x, x, padding), expected, strict=True):
        assert actual.dtype == dtype
        tolerance = 10 * torch.finfo(dtype).eps * wanted.abs().max().item()
        torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=tolerance)


@each_order
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_projections_bias_may_be_of_another_type(dtype, batch_first):
    x = batch(N, L, E).to(dtype)
    stock = nn.MultiheadAttention(E, H, batch_first=True, dtype=dtype)
    stock.in_proj_bias = nn.Parameter(torch.randn(3 * E, dtype=torch.float64))
    expected = stock(x, x, x)[0]  # upstream takes it where the batch is the first axis
    expected.sum().backward()
    module = make("dot", batch_first=batch_first).to(dtype)
    module.load_state_dict(stock.state_dict())
    module.in_proj_bias = nn.Parameter(stock.in_proj_bias.detach().clone())
    x = x if batch_first else x.transpose(0, 1)
    actual = module(x, x, x)[0]
    actual.sum().backward()
    actual = actual if batch_first else actual.transpose(0, 1)
    tolerance = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    gradient = module.in_proj_bias.grad
    assert gradient.dtype == torch.float64
    torch.testing.assert_close(gradient, stock.in_proj_bias.grad, rtol=tolerance, atol=tolerance)


@each_kernel
def test_autocast_computes_in_bfloat16(kernel):
    x = 0.3 * batch(L, N, E, dtype=torch.float32)  # small angles, which bfloat16 resolves
    masks = {"key_padding_mask": torch.zeros(N, L), "attn_mask": causal(L).float()}
    module = make(kernel).float()
    expected, expected_weights = module(x, x, x, **masks)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, weights = module(x, x, x, **masks)
    assert output.dtype == weights.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=0.03)
    torch.testing.assert_close(weights.float(), expected_weights, rtol=0, atol=0.03)


@each_kernel
def test_the_causal_hint_with_appended_keys(kernel):
    """Upstream hides them from early queries when no weights are wanted; so does dot alone."""
    x = batch(L, N, E)
    arguments = {"query": x, "key": x, "value": x, "attn_mask": causal(L), "is_causal": True}
    module, stock = make(kernel, add_bias_kv=True), make("stock", add_bias_kv=True)
    without_weights, _ = module(**arguments, need_weights=False)
    if kernel == "dot":
        expected, _ = stock(**arguments, need_weights=False)
    else:
        expected, _ = explicit(module, **arguments)
    torch.testing.assert_close(without_weights, expected)
    torch.testing.assert_close(module(**arguments), explicit(module, **arguments))


@pytest.mark.parametrize("bool_mask", [True, False], ids=["bool", "float"])
@pytest.mark.parametrize("place", ["key_padding_mask", "attn_mask"])
@each_weights
@each_kernel
def test_a_query_that_sees_no_key_gets_zeros_and_clean_gradients(kernel, wanted, place, bool_mask):
    module = make(kernel, batch_first=True)
    x = batch(N, L, E).requires_grad_()
    mask = torch.zeros(N if place == "key_padding_mask" else L, L, dtype=torch.bool)
    mask[1] = True
    if not bool_mask:
        mask = torch.zeros(mask.shape).double().masked_fill(mask, -math.inf).requires_grad_()
    results = run(module, {"query": x, "key": x, "value": x, place: mask, **wanted})
    for name, tensor in results.items():
        assert tensor.isfinite().all(), name
    empty = (slice(None), 1) if place == "attn_mask" else 1
    nothing = module.out_proj.bias.expand_as(results["output"][empty])
    torch.testing.assert_close(results["output"][empty], nothing)
    if not bool_mask:
        assert not results[f"d{place}"][1].any()
    if "weights" in results:
        row = (..., 1, slice(None)) if place == "attn_mask" else 1
        assert not results["weights"][row].any()


@each_weights
@each_kernel
def test_nan_in_padding_never_leaks(kernel, wanted):
    module, padding = make(kernel, batch_first=True), ignore(N, S)
    padding[1, -1] = True
    query, memory = batch(N, L, E), torch.randn(N, S, E).double()
    expected = module(query, memory, memory, padding, **wanted)
    memory = memory.masked_fill(padding[..., None], math.nan)
    actual = module(query, memory, memory, padding, **wanted)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want)


@each_kernel
def test_nan_in_a_visible_key_shows(kernel):
    x = batch(L, N, E)
    x[0, 1, 0] = math.nan
    output, weights = make(kernel)(x, x, x)
    assert output[:, 1].isnan().all()
    assert weights[1].isnan().all()
    assert output[:, [0, 2]].isfinite().all()


@each_weights
def test_dot_dropout_draws_what_upstream_draws(wanted):
    _, arguments = case("two bool masks", False)
    results = []
    for kernel in ("dot", "stock"):
        module = make(kernel, dropout=0.4)
        torch.manual_seed(5)
        output, weights = module(**arguments, **wanted)
        results.append((output, weights, torch.rand(())))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@each_kernel
def test_weights_returned_in_training_are_those_used(kernel):
    x = batch(N, L, E)
    module = make(kernel, dropout=0.4, batch_first=True)
    torch.manual_seed(5)
    output, weights = module(x, x, x, average_attn_weights=False)
    torch.manual_seed(5)
    assert torch.equal(weights.mean(1), module(x, x, x)[1])
    assert (weights == 0).any()
    w, b = module.in_proj_weight.chunk(3)[2], module.in_proj_bias.chunk(3)[2]
    value = (x @ w.T + b).unflatten(-1, (H, -1)).transpose(1, 2)
    torch.testing.assert_close(
        module.out_proj((weights @ value).transpose(1, 2).flatten(2)), output
    )


@each_kernel
def test_dropout_is_new_at_every_call_and_off_in_eval(kernel):
    x = batch(L, N, E)
    module = make(kernel, dropout=0.4)
    assert not torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    module.eval()
    assert torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    torch.testing.assert_close(module(x, x, x)[0], make(kernel)(x, x, x)[0])


X, Y, Z = torch.zeros(L, N, E), torch.zeros(S, N, E), torch.zeros(N, L)
SQUARE = torch.zeros(L, L, dtype=torch.float64)


def unweighed(attn_mask, key_padding_mask=None, is_causal=False):
    masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask}
    return masks | {"is_causal": is_causal, "need_weights": False}


BAD_CALLS = {
    "4-D query": ({}, (X[None], X, X), {}),
    "2-D key": ({}, (X, Y[0], Y), {}),
    "3-D value, unbatched": ({}, (X[:, 0], Y[:, 0], Y), {}),
    "1-D padding": ({}, (X, Y, Y), {"key_padding_mask": torch.zeros(S)}),
    "2-D padding, unbatched": ({}, (X[:, 0], Y[:, 0], Y[:, 0]), {"key_padding_mask": Z}),
    "1-D mask": ({}, (X, Y, Y), {"attn_mask": torch.zeros(S)}),
    "3-D mask, unbatched": ({}, (X[:, 0],) * 3, {"attn_mask": torch.zeros(1, L, L)}),
    "size of query": ({}, (X[..., 1:], Y, Y), {}),
    "size of key and value": ({}, (X, Y[..., 1:], Y[..., 1:]), {}),
    "key unlike value": ({}, (X, Y, Y[1:]), {}),
    "key unlike value, batch first": ({"batch_first": True}, (X, Y, Y[:, 1:]), {}),
    "key unlike value, kdim": ({"kdim": E, "vdim": 5}, (X, Y, Y[1:, :, :5]), {}),
    "size of key, kdim": ({"kdim": 5}, (X, Y[..., :4], Y), {}),
    "size of value, vdim": ({"vdim": 5}, (X, Y, Y[..., :4]), {}),
    "batches": ({}, (X, Y[:, :1], Y[:, :1]), {}),
    "batches, batch first": ({"batch_first": True}, (X, Y[:1], Y[:1]), {}),
    "sizes of 2-D mask": ({}, (X, Y, Y), {"attn_mask": torch.zeros(L, L)}),
    "sizes of 3-D mask": ({}, (X, Y, Y), {"attn_mask": torch.zeros(N, L, S)}),
    "sizes of causal mask": ({}, (X, X, X), {"attn_mask": causal(L + 1), "is_causal": True}),
    "sizes of causal mask, padding": ({}, (X, X, X), unweighed(causal(L + 1), Z.bool(), True)),
    "double causal mask, padding": ({}, (X, X, X), unweighed(SQUARE, Z.double(), True)),
    "batch of padding": ({}, (X, Y, Y), {"key_padding_mask": torch.zeros(1, S)}),
    "length of padding": ({}, (X, Y, Y), {"key_padding_mask": torch.zeros(N, L)}),
    "length of padding, zero_attn": ({"add_zero_attn": True}, (X, Y, Y), {"key_padding_mask": Z}),
    "int padding": ({}, (X, Y, Y), {"key_padding_mask": torch.zeros(N, S, dtype=torch.int)}),
    "int mask": ({}, (X, Y, Y), {"attn_mask": torch.zeros(L, S, dtype=torch.int)}),
    "half mask": ({}, (X, X, X), unweighed(SQUARE.half())),
    "double mask and padding": ({}, (X, X, X), unweighed(SQUARE, Z.double())),
    "mask that is a list": ({}, (X, Y, Y), {"attn_mask": [[0.0] * S] * L}),
    "causal hint without mask": ({}, (X, X, X), {"is_causal": True}),
    "causal hint without mask, no weights": ({}, (X, X, X), unweighed(None, None, True)),
}


@each_kernel
@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_raise_what_upstream_raises(name, kernel):
    options, inputs, masks = BAD_CALLS[name]
    raised = []
    for module in (make(kernel, **options).float(), make("stock", **options).float()):
        with pytest.raises((AssertionError, RuntimeError, TypeError)) as caught:
            module(*inputs, **masks)
        raised.append((caught.type, str(caught.value)))
    assert raised[0] == raised[1]


def test_a_mask_that_a_hint_stands_for_is_on_the_device_of_the_query() -> None:
    with pytest.raises(RuntimeError, match="attn_mask must be on the device of query, cpu, got me"):
        make("implicit").float()(X, X, X, attn_mask=causal(L).float().to("meta"), is_causal=True)


@pytest.mark.parametrize(
    "call",
    [
        *(lambda kind, sizes=sizes: kind(*sizes) for sizes in ((0, 1), (4, 0), (5, 2), (-4, 2))),
        lambda kind: kind(E, H, dropout=1.5)(X, X, X),
    ],
    ids=["no size", "no head", "odd size", "negative size", "dropout"],
)
def test_bad_sizes_and_rates_raise_what_upstream_raises(call):
    raised = []
    for kind in (ikattn.MultiheadAttention, nn.MultiheadAttention):
        with pytest.raises((ValueError, AssertionError)) as caught:
            call(kind)
        raised.append((caught.type, str(caught.value)))
    assert raised[0] == raised[1]


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@each_weights
@each_kernel
def test_a_half_mask_beside_a_wider_one_has_the_type_of_their_sum(kernel, wanted, half):
    x, module, stock = batch(L, N, E).float(), make(kernel).float(), make("stock").float()
    attention = causal(L).float()
    padding = torch.arange(L) >= torch.tensor([L, 2, L - 1])[:, None]
    as_bias = torch.zeros(N, L).masked_fill(padding, -math.inf)
    expected = module(x, x, x, padding, attn_mask=attention, **wanted)
    for masks in (
        (padding, attention.to(half)),
        (as_bias, attention.to(half)),
        (as_bias.to(half), attention == -math.inf),
    ):
        found = module(x, x, x, masks[0], attn_mask=masks[1], **wanted)
        torch.testing.assert_close(found, expected)
        stock(x, x, x, masks[0], attn_mask=masks[1], **wanted)  # upstream takes it


@each_weights
@each_kernel
def test_dropout_of_everything_leaves_the_bias(kernel, wanted):
    x = batch(L, N, E).requires_grad_()
    module = make(kernel, dropout=1.0)
    output, weights = module(x, x, x, **wanted)
    assert torch.equal(output, module.out_proj.bias.expand_as(output))
    assert weights is None or not weights.any()
    output.sum().backward()
    assert not x.grad.any()


@each_weights
@each_kernel
@pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask"])
def test_masks_may_be_float32_or_of_the_querys_type(name, kernel, wanted):
    x, mask = batch(L, L, E), causal(L)
    module = make(kernel)
    expected = module(x, x, x, **{name: mask}, **wanted)
    for got, want in zip(module(x, x, x, **{name: mask.float()}, **wanted), expected, strict=True):
        assert want is None or (got.dtype == want.dtype and torch.equal(got, want))
    for other, words in ((torch.float16, "c10::Half"), (torch.bfloat16, "c10::BFloat16")):
        with pytest.raises(RuntimeError, match=f"bool or float or to match.*{words} and  query"):
            module(x, x, x, **{name: mask.to(other)}, **wanted)
        with torch.autocast("cpu", torch.bfloat16):
            module.float()(x.float(), x.float(), x.float(), **{name: mask.to(other)}, **wanted)
        module.double()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "softmax"}, "'dot', 'rbf', 'implicit'"),
        ({"p": 0.5}, "p must be a real number >= 1.*got 0.5"),
        ({"p": math.nan}, "p must be a real number"),
        ({"p": math.inf}, "p must be a real number"),
        ({"p": "two"}, "p must be a real number >= 1.*got 'two'"),
        ({"num_frequencies": 0}, "num_frequencies must be an integer >= 1, got 0"),
        ({"num_frequencies": 2.5}, "num_frequencies must be an integer >= 1, got 2.5"),
        (
            {"num_frequencies": "8", "spectral": "ikan"},
            "num_frequencies must be an integer >= 1, got '8'",
        ),
        ({"spectral": "fourier"}, "spectral must be one of 'direct'.*a function .*, got 'fourier'"),
    ],
)
def test_bad_options_say_what_was_expected_and_got(options, message):
    with pytest.raises(ValueError, match=message):
        ikattn.MultiheadAttention(E, H, **options)
