"""NaN, infinity and numbers out of all proportion: seen, they show; hidden, they leave no trace."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor

import ikattn
from agreement import (
    assert_call_accurate,
    assert_close,
    assert_identical,
    assert_output_accurate,
    direction,
    gradients,
    in_float64,
)
from devices import on_test_device
from samples import DTYPES, Arguments, Sample, name_of, of_weights
from tiers import each

attention = on_test_device(ikattn.implicit_kernel_attention)
weights = on_test_device(ikattn.implicit_kernel_weights)
with_normalizer = on_test_device(torch.ops.ikattn.implicit_kernel_attention)
reference = ikattn.reference.implicit_kernel_attention

INF, NAN = float("inf"), float("nan")
FLOATS = DTYPES[:2]
# Padding may hold these. 1e18 is finite, but its square is the largest magnitude by far.
RUBBISH = {"NaN": NAN, "inf": INF, "-inf": -INF, "1e3": 1e3, "1e18": 1e18}

# Beyond one tile both ways; two heads of keys serve four of queries.
SHAPE = Sample("nan", B=2, H=4, G=2, L=70, S=140, d=9, d_v=7, frequencies="G")
HIDDEN_KEYS = torch.arange(140).remainder(7) == 3
HIDDEN_KEYS[100:] = True  # the last tile in full
WAYS_TO_HIDE = (
    *("bool mask", "float mask", "key bias", "key bias of each head", "causality"),
    "bool mask and causality",
)


def hide(way: str, arguments: Arguments) -> Arguments:
    """Hides keys. 70 causal queries see keys 0..69, of the last tile a part."""
    dtype = arguments["query"].dtype
    mask = torch.randn(70, 140, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.linspace(-1, 1, 4).unsqueeze(-1).expand(4, 140).to(dtype)
    sides: dict[str, Arguments] = {
        "bool mask": {"attn_mask": ~HIDDEN_KEYS},
        "float mask": {"attn_mask": mask.masked_fill(HIDDEN_KEYS, -INF)},
        "key bias": {"key_bias": torch.zeros_like(bias[0]).masked_fill(HIDDEN_KEYS, -INF)},
        "key bias of each head": {"key_bias": bias.masked_fill(HIDDEN_KEYS, -INF)},
        "causality": {"is_causal": True},
        "bool mask and causality": {"attn_mask": ~HIDDEN_KEYS, "is_causal": True},
    }
    return arguments | sides[way]


def hidden_keys(arguments: Arguments) -> Tensor:
    """Returns the keys that no query sees, by any of the ways above."""
    hidden = torch.arange(140) >= (70 if arguments["is_causal"] else 140)
    if arguments["attn_mask"] is not None or arguments["key_bias"] is not None:
        hidden = hidden | HIDDEN_KEYS
    return hidden


def with_rubbish(arguments: Arguments, rubbish: float) -> Arguments:
    """Sets hidden keys and values of a call to one number (in float16: the largest)."""
    hidden, largest = hidden_keys(arguments), torch.finfo(arguments["query"].dtype).max
    number = min(rubbish, largest) if abs(rubbish) < INF else rubbish
    names = ("key", "value")
    return arguments | {n: arguments[n].masked_fill(hidden.unsqueeze(-1), number) for n in names}


def parametrised_over_rubbish(dtypes: tuple[torch.dtype, ...]) -> pytest.MarkDecorator:
    rows = list(itertools.product(WAYS_TO_HIDE, RUBBISH.values()))
    return each(("way", "rubbish"), rows, {"dtype": dtypes})


def tolerance(dtype: torch.dtype) -> float:
    """Returns the tolerance of calls that may scale their exponents differently."""
    return {torch.float64: 1e-12, torch.float32: 3e-6}.get(dtype, 2e-2)


# --- Hidden -----------------------------------------------------------------------------------


@pytest.mark.operators
@parametrised_over_rubbish(DTYPES)
def test_hidden_keys_and_values_never_leak(way, rubbish, dtype):
    arguments = hide(way, SHAPE.arguments(dtype))
    clean, spoilt = (with_rubbish(arguments, number) for number in (0.0, rubbish))
    assert_close(attention(**spoilt), attention(**clean), tolerance(dtype))
    expected, found = gradients(attention, clean), gradients(attention, spoilt)
    for name, gradient in found.items():
        assert_close(gradient, expected[name], tolerance(dtype), name)
    for name in ("key", "value"):
        assert (found[name][:, :, hidden_keys(arguments)] == 0).all(), name


@pytest.mark.parametrize("average_heads", [False, True])
@pytest.mark.operators
@parametrised_over_rubbish(FLOATS)
def test_hidden_keys_never_leak_into_weights(way, rubbish, dtype, average_heads):
    arguments = hide(way, SHAPE.arguments(dtype))
    operator = functools.partial(weights, average_heads=average_heads)
    clean, spoilt = (of_weights(with_rubbish(arguments, number)) for number in (0.0, rubbish))
    found = operator(**spoilt)
    assert_close(found, operator(**clean), tolerance(dtype))
    assert (found[..., hidden_keys(arguments)] == 0).all()
    expected = gradients(operator, clean)
    for name, gradient in gradients(operator, spoilt).items():
        assert_close(gradient, expected[name], tolerance(dtype), name)


def second_derivatives(arguments: Arguments) -> list[Tensor]:
    names = ["query", "key", "value", "w1", "w2"]
    leaves = [arguments[name].detach().requires_grad_() for name in names]
    output = attention(**(arguments | dict(zip(names, leaves, strict=True))))
    first = torch.autograd.grad(output, leaves, direction(output), create_graph=True)
    return list(torch.autograd.grad(sum((g * direction(g)).sum() for g in first), leaves))


@pytest.mark.operators
@parametrised_over_rubbish((torch.float64,))
def test_hidden_keys_and_values_never_leak_into_second_derivatives(way, rubbish, dtype):
    arguments = hide(way, SHAPE.arguments(dtype))
    clean, spoilt = (second_derivatives(with_rubbish(arguments, x)) for x in (0.0, rubbish))
    for got, expected in zip(spoilt, clean, strict=True):
        assert_close(got, expected, 1e-11)


@pytest.mark.parametrize("rubbish", [NAN, INF], ids=str)
def test_queries_that_see_no_key_never_leak_into_second_derivatives(rubbish: float) -> None:
    arguments = Sample("blind", mask="L1").arguments()
    blind = ~arguments["attn_mask"].flatten()
    expected = second_derivatives(arguments)
    arguments["query"][:, :, blind] = rubbish
    for got, clean in zip(second_derivatives(arguments), expected, strict=True):
        assert_close(got, clean, 1e-11)


def split_call(dtype: torch.dtype, mask_kind: str, rubbish: float) -> tuple[Arguments, Arguments]:
    """Even queries see even keys, odd queries odd ones, of which one is spoilt: clean, spoilt."""
    arguments = Sample("split", B=1, H=2, L=70, S=140).arguments(dtype)
    sees = torch.arange(70).remainder(2).unsqueeze(-1) == torch.arange(140).remainder(2)
    if mask_kind == "bool":
        arguments["attn_mask"] = sees
    else:
        arguments["attn_mask"] = torch.zeros(70, 140, dtype=dtype).masked_fill(~sees, -INF)
    spoilt = arguments | {name: arguments[name].clone() for name in ("key", "value")}
    spoilt["key"][..., 67, :] = rubbish
    spoilt["value"][..., 67, :] = rubbish
    return arguments, spoilt


@pytest.mark.parametrize("mask_kind", ["bool", "float"])
@pytest.mark.parametrize("rubbish", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_spoilt_key_spoils_exactly_the_rows_that_see_it(dtype, rubbish, mask_kind):
    clean, spoilt = split_call(dtype, mask_kind, rubbish)
    output = attention(**spoilt)
    assert_close(output[:, :, ::2], attention(**clean)[:, :, ::2], tolerance(dtype))
    assert output[:, :, 1::2].isnan().all()
    found = weights(**of_weights(spoilt))
    assert_close(found[:, :, ::2], weights(**of_weights(clean))[:, :, ::2], tolerance(dtype))
    assert found[:, :, 1::2, 1::2].isnan().all()
    assert (found[:, :, 1::2, ::2] == 0).all()
    expected, found = gradients(attention, clean), gradients(attention, spoilt)
    for name in ("query", "key", "value"):
        assert_close(found[name][:, :, ::2], expected[name][:, :, ::2], tolerance(dtype), name)
        assert found[name][:, :, 1::2].isnan().any(), name
    if "attn_mask" in found:
        mask = found["attn_mask"][::2]
        assert_close(mask, expected["attn_mask"][::2], tolerance(dtype), "attn_mask")


@pytest.mark.parametrize("rubbish", [NAN, INF], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("masked", [False, True])
def test_a_spoilt_query_or_incoming_gradient_spoils_its_own_row_only(dtype, rubbish, masked):
    arguments = SHAPE.arguments(dtype)
    if masked:
        arguments["attn_mask"] = torch.zeros(70, arguments["key"].size(-2), dtype=dtype)
    spoilt = arguments | {"query": arguments["query"].clone()}
    spoilt["query"][1, 2, 33, 4] = rubbish
    output, expected = attention(**spoilt), attention(**arguments)
    others = torch.ones(2, 4, 70, dtype=torch.bool)
    others[1, 2, 33] = False
    assert_identical([output[others]], [expected[others]])
    assert output[~others].isnan().all()
    incoming = direction(expected)
    incoming[1, 2, 33, 4] = rubbish
    clean = gradients(attention, arguments)["query"]
    for call, coming in ((spoilt, None), (arguments, incoming)):
        found = gradients(attention, call, grad_output=coming)["query"]
        assert_identical([found[others]], [clean[others]])
        assert found[~others].isnan().all()


@pytest.mark.parametrize("form", ["folded", "general"])
@pytest.mark.parametrize("name", ["w1", "w2"])
def test_a_spoilt_frequency_spoils_its_own_head_only(name: str, form: str) -> None:
    arguments = Sample("spoilt frequency", H=3, mask="L1").arguments()
    mask = arguments["attn_mask"]
    if form == "general":
        arguments["attn_mask"] = torch.where(mask, 0.0, -torch.inf).double()
    spoilt = arguments | {name: arguments[name].clone()}
    spoilt[name][1, 2, 3] = NAN
    output, expected = attention(**spoilt), attention(**arguments)
    assert_identical([output[:, ::2]], [expected[:, ::2]])
    sees_a_key = mask.flatten()
    assert output[:, 1, sees_a_key].isnan().all()
    assert (output[:, 1, ~sees_a_key] == 0).all()


@pytest.mark.parametrize("mask_kind", ["bool", "float"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("rubbish", [1.0, NAN, INF], ids=str)
def test_rows_that_see_no_key_are_zero_and_have_no_gradient(rubbish, dtype, mask_kind):
    arguments = SHAPE.arguments(dtype)
    blind = torch.arange(70).remainder(9) == 4
    blind[64:] = True  # the last tile in full
    mask = ~blind.unsqueeze(-1)
    if mask_kind == "float":
        mask = torch.zeros(70, 1, dtype=dtype).masked_fill(~mask, -INF)
    arguments["attn_mask"] = mask.expand(70, 140)
    clean = arguments | {"query": arguments["query"].clone()}
    arguments["query"][:, :, blind] = rubbish
    output, log_normalizer = with_normalizer(**arguments)
    assert (output[:, :, blind] == 0).all()
    assert (log_normalizer[:, :, blind] == -INF).all()
    assert (weights(**of_weights(arguments))[:, :, blind] == 0).all()
    assert log_normalizer[:, :, ~blind].isfinite().all()
    assert_identical([output], [attention(**clean)])
    found, expected = gradients(attention, arguments), gradients(attention, clean)
    assert (found["query"][:, :, blind] == 0).all()
    assert_identical(found.values(), expected.values())
    of_found, of_clean = (gradients(weights, of_weights(x)) for x in (arguments, clean))
    for name, gradient in of_found.items():
        assert_close(gradient, of_clean[name], tolerance(dtype), name)


@pytest.mark.parametrize("average_heads", [False, True])
@pytest.mark.parametrize("way", ["mask", "bias", "dropout"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_weights_of_a_spoilt_row_are_nan_where_it_sees_and_keeps(dtype, way, average_heads):
    """NaN stands where its weight underflowed, too; dropped numbers are zero."""
    call = of_weights(SHAPE.arguments(dtype))
    logits = torch.tensor([0.0, -1000.0, -INF], dtype=dtype)[torch.arange(140) % 3]
    hides: Arguments = {"attn_mask": logits} if way == "mask" else {"key_bias": logits}
    if way == "dropout":
        hides = {"dropout_p": 0.5, "dropout_seed": torch.tensor([3, 4])}
    clean = call | {"query": call["query"].clone()}
    call["query"][:, :, 7] = NAN
    # Without a NaN every pair that is seen and kept has some weight where none underflows.
    near = {
        name: x.clamp_min(-1).where(x > -INF, -INF)
        if isinstance(x, Tensor) and x.dtype == dtype
        else x
        for name, x in hides.items()
    }
    counts = weights(**clean | near, average_heads=average_heads) != 0
    found = weights(**call | hides, average_heads=average_heads)
    assert 0 < counts[..., 7, :].sum() < counts[..., 7, :].numel()
    assert torch.equal(found[..., 7, :].isnan(), counts[..., 7, :])
    assert not found[..., torch.arange(70) != 7, :].isnan().any()
    assert (found[..., 7, :][~counts[..., 7, :]] == 0).all()


# --- Out of all proportion ----------------------------------------------------------------------

HUGE = {
    "causal": Sample("huge, causal", L=130, S=130, is_causal=True),
    "bool mask": Sample("huge, bool mask", L=66, S=130, mask="LS"),
    "float mask": Sample("huge, float mask", L=66, S=130, mask="BHLS", mask_kind="float with -inf"),
    "no mask": Sample("huge", L=66, S=130),
    "key bias": Sample("huge, bias", L=66, S=130, key_bias="BHS", mask="LS"),
}


def with_norms(sample: Sample, dtype: torch.dtype, spread: float) -> Arguments:
    """The call with magnitudes g between 0 and about `spread`, in random order."""
    arguments = sample.arguments(dtype)
    key = arguments["key"].double()
    order = torch.randperm(sample.S, generator=torch.Generator().manual_seed(2))
    wanted = torch.linspace(0, spread, sample.S, dtype=torch.float64)[order]
    norms = (wanted * 2 * sample.d**0.5).sqrt().unsqueeze(-1)
    key = key / key.norm(dim=-1, keepdim=True) * norms
    # Long keys need low frequencies, or their angles would have no accurate turn in float32.
    shrunk = {name: arguments[name] / max(1.0, spread**0.5) for name in ("w1", "w2")}
    return arguments | shrunk | {"key": key.to(dtype)}


@pytest.mark.parametrize("spread", [30.0, 70.0, 250.0, 2000.0, 20000.0])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("kind", HUGE)
def test_any_spread_of_norms_is_as_accurate_as_in_the_reference(kind, dtype, spread):
    arguments = with_norms(HUGE[kind], dtype, spread)
    output = attention(**arguments)
    assert output.isfinite().all()
    truth = in_float64(reference, arguments)
    if dtype == torch.float64:  # where g is rounded, its size times an ulp is the relative error
        assert_close(output, truth, max(1e-13, 1e-15 * spread))
    else:
        assert_output_accurate(output, reference(**arguments), truth)
        assert_call_accurate(attention, reference, arguments)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("size", [30.0, 1e3, 1e9, 1e18, NAN])
def test_one_enormous_or_spoilt_key_of_the_future_changes_no_earlier_row(size, dtype):
    arguments = Sample("enormous", L=130, S=130, is_causal=True).arguments(dtype)
    clean = attention(**arguments)[:, :, :100]
    clean_gradient = gradients(attention, arguments)["query"][:, :, :100]
    arguments["key"][:, :, 100] = size
    output, found = attention(**arguments), gradients(attention, arguments)["query"]
    assert_close(output[:, :, :100], clean, tolerance(dtype))
    assert_close(found[:, :, :100], clean_gradient, tolerance(dtype))
    if size != size:
        assert output[:, :, 100:].isnan().all()
        assert found[:, :, 100:].isnan().all()


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_one_enormous_key_takes_all_the_weight_where_it_is_seen(dtype: torch.dtype) -> None:
    arguments = Sample("enormous", L=130, S=130).arguments(dtype)
    arguments["key"][:, :, 100] = 1e3
    expected = arguments["value"][:, :, 100:101].expand(-1, -1, 130, -1)
    assert_close(attention(**arguments), expected, tolerance(dtype))
    for name, gradient in gradients(attention, arguments).items():
        assert gradient.isfinite().all(), name


@pytest.mark.parametrize("offset", [-1e4, -300.0, 300.0, 1e4])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_a_large_constant_in_bias_or_mask_cancels(dtype: torch.dtype, offset: float) -> None:
    arguments = SHAPE.arguments(dtype)
    constant = torch.full((1,), offset, dtype=dtype)
    expected = attention(**arguments)
    for name in ("key_bias", "attn_mask"):
        allowed = 1e-11 if dtype == torch.float64 else 1e-2 if name == "attn_mask" else 3e-6
        assert_close(attention(**(arguments | {name: constant})), expected, allowed, name)


@pytest.mark.parametrize("size", [1e3, 1e6])
def test_large_angles_are_as_accurate_as_their_turns(size: float) -> None:
    sample = Sample("large angles", B=1, L=66, S=70, p=None)
    arguments = sample.arguments()
    arguments |= {name: size * arguments[name] for name in ("w1", "w2")}
    assert_close(attention(**arguments), reference(**arguments), 1e-13 * size)
    single = attention(
        **sample.arguments(torch.float32) | {n: arguments[n].float() for n in ("w1", "w2")}
    )
    assert single.isfinite().all()
    limits = arguments["value"].float().abs().amax(2, keepdim=True)
    assert (single.abs() <= limits * (1 + 1e-5)).all()
    for dtype, beyond in ((torch.float32, 1e30), (torch.float64, 1e300)):
        arguments = Sample("beyond", p=None).arguments(dtype)
        arguments["query"] *= beyond  # any turn
        assert attention(**arguments).isfinite().all()


@pytest.mark.parametrize("eps", [1e-30, 1e-12, 1.0, 1e6])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_any_positive_eps_will_do(dtype: torch.dtype, eps: float) -> None:
    arguments = Sample("eps", L=66, S=70).arguments(dtype) | {"eps": eps}
    truth = in_float64(reference, arguments)
    assert_output_accurate(attention(**arguments), reference(**arguments), truth)
