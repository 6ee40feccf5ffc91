"""Laws that hold whatever the numbers are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import ikattn
from agreement import assert_close, assert_identical, direction, gradient_scales, gradients
from devices import on_test_device
from samples import BY_NAME, DTYPES, SAMPLES, TINY, Arguments, Sample, name_of, of_weights

attention = on_test_device(ikattn.implicit_kernel_attention)

# Sizes that leave the first tile in both directions, and every kind of side input.
PLAIN = Sample("laws", B=3, H=4, L=67, S=130, d=16, d_v=10, M=9, key_bias="BHS")
MASKED = Sample("laws, masked", B=3, H=4, L=67, S=130, M=9, mask="BHLS", mask_kind="float")
CAUSAL = Sample("laws, causal", B=2, H=2, L=130, S=131, is_causal=True)
GROUPED = Sample("laws, grouped", B=2, H=6, G=2, L=67, S=65, frequencies="G", key_bias="BGS")
BATCHED = Sample("laws, batched w", B=3, H=2, L=17, S=19, frequencies="BH", mask="B1LS")
VARIETY = (PLAIN, MASKED, CAUSAL, GROUPED, BATCHED)

TOLERANCE = 1e-13


def hidden(sample: Sample, letters: str, seed: int = 3) -> Tensor:
    """True where a pair is to be hidden."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(sample.shape(letters), generator=generator) < 0.4


def as_float_mask(hide: Tensor) -> Tensor:
    return torch.zeros(hide.shape, dtype=torch.float64).masked_fill(hide, -torch.inf)


def assert_same_call(first: Arguments, second: Arguments) -> None:
    """Output and the gradients in what both calls share, these relative to their first term."""
    assert_close(attention(**first), attention(**second), TOLERANCE)
    shared = ["query", "key", "value", "w1", "w2"]
    of_first, of_second = gradients(attention, first, shared), gradients(attention, second, shared)
    scales = gradient_scales(second, direction(attention(**second)))
    for name in shared:
        assert_close(of_first[name], of_second[name], TOLERANCE, name, scales[name])


@pytest.mark.parametrize("sample", [PLAIN, MASKED, GROUPED], ids=name_of)
def test_order_of_the_keys_does_not_matter(sample: Sample) -> None:
    arguments = sample.arguments()
    order = torch.randperm(sample.S, generator=torch.Generator().manual_seed(5))
    shuffled = {"key": arguments["key"][:, :, order], "value": arguments["value"][:, :, order]}
    for name in ("key_bias", "attn_mask"):
        if arguments[name] is not None:
            shuffled[name] = arguments[name][..., order]
    assert_close(attention(**arguments), attention(**(arguments | shuffled)), TOLERANCE)
    found, of_shuffled = gradients(attention, arguments), gradients(attention, arguments | shuffled)
    for name, gradient in found.items():
        axis = {"key": -2, "value": -2, "key_bias": -1, "attn_mask": -1}.get(name)
        expected = gradient if axis is None else gradient.index_select(axis, order)
        assert_close(of_shuffled[name], expected, TOLERANCE, name)


@pytest.mark.parametrize("sample", [PLAIN, MASKED, GROUPED, BATCHED], ids=name_of)
def test_order_of_the_queries_is_that_of_the_output(sample: Sample) -> None:
    arguments = sample.arguments()
    order = torch.randperm(sample.L, generator=torch.Generator().manual_seed(5))
    shuffled = {"query": arguments["query"][:, :, order]}
    if arguments["attn_mask"] is not None:
        shuffled["attn_mask"] = arguments["attn_mask"][:, :, order]
    output = attention(**arguments)
    assert_identical([attention(**(arguments | shuffled))], [output[:, :, order]])


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("sample", VARIETY, ids=name_of)
def test_a_batch_is_a_loop_over_its_items(sample: Sample, dtype: torch.dtype) -> None:
    arguments = sample.arguments(dtype)

    def item(b: int) -> Arguments:
        """The call on item b; what has no batch axis is shared."""
        batched = {"query", "key", "value", "key_bias", "attn_mask"}
        batched |= {"w1", "w2"} if sample.frequencies.startswith("B") else set()
        own = {n: arguments[n][b : b + 1] for n in batched if arguments[n] is not None}
        return arguments | own

    loop = torch.cat([attention(**item(b)) for b in range(sample.B)])
    assert_identical([attention(**arguments)], [loop])


@pytest.mark.parametrize("shape", ["BHLS", "B1LS", "1H1S", "LS", "S", "BHL1"])
@pytest.mark.parametrize("sample", [PLAIN, CAUSAL], ids=name_of)
def test_a_bool_mask_is_a_float_mask_of_minus_infinity(sample: Sample, shape: str) -> None:
    hide = hidden(sample, shape)
    arguments = sample.arguments()
    first, second = arguments | {"attn_mask": ~hide}, arguments | {"attn_mask": as_float_mask(hide)}
    assert_same_call(first, second)


@pytest.mark.parametrize("length", [1, 16, 63, 64, 65, 130])
@pytest.mark.parametrize("keys", [1, 64, 65, 131])
def test_causal_is_the_lower_triangle(length: int, keys: int) -> None:
    arguments = Sample("lower triangle", L=length, S=keys).arguments()
    triangle = torch.ones(length, keys).tril().bool()
    assert_same_call(arguments | {"is_causal": True}, arguments | {"attn_mask": triangle})


@pytest.mark.parametrize("shape", ["BHLS", "LS", "B11S", "L1"])
def test_causal_and_a_mask_hide_what_either_hides(shape: str) -> None:
    arguments = CAUSAL.arguments()
    hide = hidden(CAUSAL, shape)
    either = ~hide & torch.ones(CAUSAL.L, CAUSAL.S).tril().bool()
    assert_same_call(
        arguments | {"attn_mask": ~hide}, arguments | {"is_causal": False, "attn_mask": either}
    )


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_mask_of_true_or_zeros_is_no_mask(is_causal: bool) -> None:
    arguments = PLAIN.arguments() | {"is_causal": is_causal}
    for mask in (torch.ones(67, 130, dtype=torch.bool), torch.zeros(67, 130).double()):
        assert_same_call(arguments, arguments | {"attn_mask": mask})


def test_a_constant_added_to_a_row_of_the_mask_changes_nothing() -> None:
    arguments = MASKED.arguments()
    constant = torch.linspace(-40, 40, MASKED.L, dtype=torch.float64).unsqueeze(-1)
    assert_same_call(arguments, arguments | {"attn_mask": arguments["attn_mask"] + constant})


@pytest.mark.parametrize("shape", ["S", "1", "HS", "1S", "H1", "BHS", "B1S", "BH1", "111"])
def test_key_bias_is_a_mask_of_one_row(shape: str) -> None:
    arguments = Sample(f"bias {shape}", B=3, H=4, L=67, S=70, key_bias=shape).arguments()
    bias = arguments.pop("key_bias")
    as_mask = bias.reshape((1,) * (3 - bias.dim()) + bias.shape).unsqueeze(-2)
    as_row = arguments | {"key_bias": None, "attn_mask": as_mask}
    as_bias = arguments | {"key_bias": bias}
    assert_same_call(as_bias, as_row)
    of_bias = gradients(attention, as_bias, ["key_bias"])["key_bias"]
    of_row = gradients(attention, as_row, ["attn_mask"])["attn_mask"]
    assert_close(of_bias, of_row.reshape(of_bias.shape), TOLERANCE, scale=1.0)


def test_key_bias_of_minus_infinity_hides_a_key() -> None:
    arguments = PLAIN.arguments()
    hide = hidden(PLAIN, "BHS")
    assert_same_call(
        arguments | {"key_bias": arguments["key_bias"].masked_fill(hide, -torch.inf)},
        arguments | {"attn_mask": ~hide.unsqueeze(-2)},
    )


def test_equal_keys_share_their_weight() -> None:
    arguments = PLAIN.arguments() | {"key_bias": None}
    doubled = {name: torch.cat([arguments[name]] * 2, 2) for name in ("key", "value")}
    assert_close(attention(**(arguments | doubled)), attention(**arguments), TOLERANCE)


@pytest.mark.parametrize("frequencies", ["H", "G", "BH", "BG", "1H"])
def test_grouped_heads_are_repeated_heads(frequencies: str) -> None:
    sample = Sample("repeated", B=2, H=6, G=2, L=67, S=65, frequencies=frequencies, key_bias="BGS")
    arguments = sample.arguments()
    repeated = {n: arguments[n].repeat_interleave(3, 1) for n in ("key", "value", "key_bias")}
    if frequencies.endswith("G"):
        repeated |= {n: arguments[n].repeat_interleave(3, -3) for n in ("w1", "w2")}
    spelled_out = arguments | repeated | {"enable_gqa": False}
    assert_close(attention(**arguments), attention(**spelled_out), TOLERANCE)
    grouped, separate = gradients(attention, arguments), gradients(attention, spelled_out)
    for name, gradient in grouped.items():
        axis = 1 if name in ("query", "key", "value", "key_bias") else -3
        groups = gradient.shape[axis]
        summed = separate[name].unflatten(axis, (groups, -1)).sum(axis + (axis > 0))
        assert_close(gradient, summed, TOLERANCE, name)


def test_enable_gqa_changes_nothing_where_heads_are_equal() -> None:
    arguments = PLAIN.arguments()
    assert torch.equal(attention(**arguments), attention(**(arguments | {"enable_gqa": True})))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_stationary_is_two_equal_frequencies(dtype: torch.dtype) -> None:
    arguments = Sample("stationary law", L=67, S=130, M=33, stationary=True).arguments(dtype)
    twice = arguments | {"w2": arguments["w1"]}
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5}.get(dtype, 1e-2)
    assert_close(attention(**arguments), attention(**twice), tolerance)
    if dtype == torch.float64:
        once, halves = gradients(attention, arguments), gradients(attention, twice)
        assert_close(once["w1"], halves["w1"] + halves["w2"], tolerance)
        assert_close(once["key"], halves["key"], tolerance)


def test_exchanging_the_two_frequencies_changes_nothing() -> None:
    arguments = PLAIN.arguments()
    exchanged = arguments | {"w1": arguments["w2"], "w2": arguments["w1"]}
    assert_close(attention(**arguments), attention(**exchanged), TOLERANCE)
    found, swapped = gradients(attention, arguments), gradients(attention, exchanged)
    assert_close(found["w1"], swapped["w2"], TOLERANCE)
    assert_close(found["query"], swapped["query"], TOLERANCE)


def test_a_stationary_kernel_without_magnitude_does_not_see_translations() -> None:
    arguments = Sample("translation", L=67, S=130, stationary=True, p=None).arguments()
    step = torch.linspace(-3, 3, 8, dtype=torch.float64)
    moved = {"query": arguments["query"] + step, "key": arguments["key"] + step}
    assert_close(attention(**arguments), attention(**(arguments | moved)), 1e-12)
    other = Sample("translation, not stationary", L=67, S=130, p=None).arguments()
    moved = {"query": other["query"] + step, "key": other["key"] + step}
    assert (attention(**other) - attention(**(other | moved))).abs().max() > 1e-3


def test_a_constant_value_comes_out_as_it_went_in() -> None:
    arguments = MASKED.arguments()
    arguments["value"] = torch.full_like(arguments["value"], 2.5)
    assert_close(attention(**arguments), torch.full((3, 4, 67, 6), 2.5).double(), 1e-14)


def test_output_is_linear_in_the_value() -> None:
    first, second = PLAIN.arguments(), PLAIN.arguments()
    second["value"] = second["value"].flip(2)
    both = first | {"value": 2 * first["value"] - 3 * second["value"]}
    assert_close(attention(**both), 2 * attention(**first) - 3 * attention(**second), TOLERANCE)


def test_a_lone_key_gives_its_value_and_no_other_gradient() -> None:
    arguments = Sample("a lone key", L=130, S=1).arguments()
    assert_close(attention(**arguments), arguments["value"].expand(-1, -1, 130, -1), 1e-15)
    for name, gradient in gradients(attention, arguments).items():
        if name != "value":
            assert gradient.abs().max() < 1e-10, name


def test_weights_of_the_product_of_similarity_and_magnitude() -> None:
    sample = Sample("product", L=67, S=65, d=13, p=1.8)
    arguments = sample.arguments()
    for p in (None, 1.0, 1.8, 2.0, 3.0):
        for w2 in (arguments["w2"], None):
            frequencies = {"w1": arguments["w1"], "w2": w2}
            similarity, magnitude = ikattn.ops.similarity_and_magnitude(
                arguments["query"], arguments["key"], kernel="implicit", p=p, **frequencies
            )
            weights = similarity * magnitude.unsqueeze(-2)
            expected = ikattn.implicit_kernel_weights(
                **(of_weights(arguments) | frequencies | {"p": p})
            )
            assert_close(weights / weights.sum(-1, keepdim=True), expected, TOLERANCE)


@pytest.mark.parametrize("kernel", ["dot", "rbf"])
def test_p_2_makes_softmax_attention_of_rbf_similarity_and_magnitude(kernel: str) -> None:
    arguments = Sample("dot", L=67, S=65, d=13, d_v=65).arguments()
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    similarity, magnitude = ikattn.ops.similarity_and_magnitude(query, key, kernel=kernel)
    weights = similarity * magnitude.unsqueeze(-2)
    expected = scaled_dot_product_attention(query, key, value)
    assert_close(weights / weights.sum(-1, keepdim=True) @ value, expected, TOLERANCE)


@pytest.mark.parametrize("p", [1.0, 1.8, 3.0])
def test_rbf_with_another_p_is_softmax_attention_with_the_norms_exchanged(p: float) -> None:
    """exp(-|q - k|_2^2 / c) exp(|k|_p^2 / c), where c = 2 sqrt(d), is exp((2 q.k + gap) / c) but
    for a factor of the row, with gap = |k|_p^2 - |k|_2^2."""
    arguments = Sample("rbf", L=67, S=65, d=16, d_v=65).arguments()
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    similarity, magnitude = ikattn.ops.similarity_and_magnitude(query, key, kernel="rbf", p=p)
    weights = similarity * magnitude.unsqueeze(-2)
    squares = [key.abs().pow(order).sum(-1).pow(2 / order) for order in (p, 2.0)]
    gap = ((squares[0] - squares[1]) / 8).unsqueeze(-2)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=gap.expand(-1, -1, 67, -1))
    assert_close(weights / weights.sum(-1, keepdim=True) @ value, expected, TOLERANCE)


def test_magnitude_is_of_the_norm_of_the_key() -> None:
    key = torch.tensor([[[[3.0, -4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]]]).double()
    for p, norm in ((1.0, 7.0), (2.0, 5.0), (3.0, 91 ** (1 / 3))):
        _, magnitude = ikattn.ops.similarity_and_magnitude(key, key, kernel="rbf", p=p)
        expected = torch.tensor([[[math.exp(norm**2 / 4), 1.0]]], dtype=torch.float64)
        assert_close(magnitude, expected, 1e-13)
    _, none = ikattn.ops.similarity_and_magnitude(key, key, kernel="rbf", p=None)
    assert torch.equal(none, torch.ones_like(none))


def test_dot_ignores_p() -> None:
    arguments = BY_NAME["15 queries, 17 keys"].arguments()
    query, key = arguments["query"], arguments["key"]
    for default, cubic in zip(
        ikattn.ops.similarity_and_magnitude(query, key),
        ikattn.ops.similarity_and_magnitude(query, key, p=3.0),
        strict=True,
    ):
        assert torch.equal(default, cubic)


def test_samples_have_distinct_names() -> None:
    assert len(BY_NAME) == len(SAMPLES) + len(TINY)


@pytest.mark.parametrize("p", [1.5, 20.0, 200.0, 1000.0])
def test_large_orders_stay_in_range_in_every_composition(p: float) -> None:
    torch.manual_seed(0)
    q, k, v = (2 * torch.randn(1, 2, 9, 8) for _ in range(3))
    w1, w2 = (0.3 * torch.randn(2, 8, 5) for _ in range(2))

    def attend(key: Tensor) -> Tensor:
        return ikattn.implicit_kernel_attention(q, key, v, w1, w2, p=p)

    expected = attend(k)
    assert expected.isfinite().all()
    output, tangent = torch.func.jvp(attend, (k,), (torch.ones_like(k),))
    torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4)
    assert tangent.isfinite().all()
    leaf = k.clone().requires_grad_()
    composed = torch.autograd.grad(attend(leaf).sum(), leaf, create_graph=True)[0]
    fused = torch.autograd.grad(attend(leaf).sum(), leaf)[0]
    torch.testing.assert_close(composed.detach(), fused, rtol=1e-2, atol=1e-3)
    features = ikattn.KeyFeatures(w1, w2, p=p)
    features.append(k)
    torch.testing.assert_close(features.attend(q, v), expected, rtol=1e-3, atol=1e-4)
