"""The contract of F.multi_head_attention_forward, beside the function of ikattn.nn."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from attention_cases import (
    CASES,
    MASKS,
    E,
    H,
    L,
    N,
    S,
    arguments_of,
    assert_same,
    case,
    each_kernel,
    each_weights,
    function_of,
    kernel_options,
    leaf,
    make,
    run,
)
from ikattn.nn.functional import multi_head_attention_forward


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
def test_static_keys_and_values_of_no_samples(kernel):
    module = make(kernel)
    query, static = torch.randn(3, 0, E, dtype=torch.float64), leaf(0, S, E // H)
    forward = function_of(module, multi_head_attention_forward, **kernel_options(module))
    output, weights = forward(query, query, query, static_k=static, static_v=static)
    assert output.shape == (3, 0, E)
    assert weights.shape == (0, 3, S)


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
BIAS, STATIC, LONGER = torch.zeros(1, 1, E), *(torch.zeros(N * H, n, E // H) for n in (S, S + 1))


def separate(**columns):
    weights = {f"{name}_proj_weight": torch.zeros(E, n) for name, n in columns.items()}
    return {"use_separate_proj_weight": True, **weights}


# name: arguments that replace those of a good call, beside those of test_multihead_attention.py
BAD_FUNCTION_CALLS = {
    "embed_dim": {"embed_dim_to_check": E + 1},
    "heads": {"num_heads": 5},
    "key unlike value, separate": {"value": Y[1:], "use_separate_proj_weight": True},
    "no in_proj_weight": {"in_proj_weight": None},
    "no q_proj_weight": separate(),
    "no k_proj_weight": separate(q=E),
    "no v_proj_weight": separate(q=E, k=E),
    "size of k_proj_weight": separate(q=E, k=E - 1, v=E),
    "bias_k alone": {"bias_k": BIAS},
    "bias_v alone": {"bias_v": BIAS},
    "bias and static_k": {"bias_k": BIAS, "bias_v": BIAS, "static_k": STATIC},
    "bias and static_v": {"bias_k": BIAS, "bias_v": BIAS, "static_v": STATIC},
    "batch of static_k": {"static_k": torch.zeros(N, S, E // H)},
    "size of static_k": {"static_k": torch.zeros(N * H, S, E)},
    "batch of static_v": {"static_v": torch.zeros(N, S, E // H)},
    "size of static_v": {"static_v": torch.zeros(N * H, S, E)},
    "int padding of wrong axes": {"key_padding_mask": torch.zeros(S, dtype=torch.int)},
    "padding unlike static": {
        "key_padding_mask": torch.zeros(N, S),
        "static_k": LONGER,
        "static_v": LONGER,
    },
}
UNLIKE_STATICS = {
    "static_k longer than value": {"static_k": LONGER},
    "static_v longer than key": {"static_v": LONGER},
    "static_k longer than static_v": {
        "static_k": LONGER,
        "static_v": STATIC[:, 1:],
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
