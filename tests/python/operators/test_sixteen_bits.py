"""Products of 16 bits where they are strained, and of float32 where torch allows them (medium)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import ikattn
from agreement import (
    assert_call_accurate,
    assert_close,
    assert_identical,
    assert_output_accurate,
    converted,
    direction,
    gradient_scales,
    gradients,
    in_float64,
)
from samples import SAMPLES, Arguments, Sample, name_of
from tiers import each_call

pytestmark = pytest.mark.operators

attention = ikattn.implicit_kernel_attention
reference = ikattn.reference.implicit_kernel_attention
# Both operands of a product are off by 2^-8 at most.
ROUNDINGS = 2 * 2**-8


# Large enough for products of 16 bits, with everything that a call may have.
LARGE = (
    Sample("plain", L=64, S=64, d=16, d_v=24, M=33),
    Sample("odd everywhere", B=2, L=75, S=71, d=13, d_v=35, M=9),
    Sample("one key", L=40, S=1, M=16),
    Sample("two panels of values", L=33, S=70, d_v=130, M=8),
    Sample("two panels of frequencies", L=65, S=66, d=70, d_v=70, M=100),
    Sample("no values", L=40, S=40, d_v=0, M=16),
    Sample("causal", B=2, L=150, S=150, is_causal=True, M=20),
    Sample("causal, more keys", L=70, S=141, is_causal=True, M=20),
    Sample("causal, padding mask", B=2, L=90, S=90, is_causal=True, mask="B11S", M=20),
    Sample("bool mask with empty rows", B=2, L=70, S=75, mask="BHLS", M=20),
    Sample("float mask", L=70, S=75, mask="LS", mask_kind="float", M=20),
    Sample("float mask with -inf", B=2, L=70, S=75, mask="B1LS", mask_kind="float with -inf", M=9),
    Sample("key bias", B=2, L=70, S=75, key_bias="BHS", M=20),
    Sample("large magnitudes", L=70, S=75, p=3.0, magnitude_scale=2.0, M=20),
    Sample("large magnitudes, causal", L=99, S=99, is_causal=True, magnitude_scale=2.0, M=20),
    Sample("stationary, no magnitude", L=70, S=75, stationary=True, p=None, M=20),
    Sample("dropout", B=2, L=70, S=75, dropout_p=0.3, M=20),
    Sample(
        "dropout, causal, float mask",
        L=90,
        S=90,
        dropout_p=0.5,
        is_causal=True,
        M=20,
        mask="LS",
        mask_kind="float",
    ),
    Sample("grouped, w [G]", H=6, G=2, L=70, S=75, frequencies="G", M=20),
    Sample("grouped, w [BH], many keys", B=2, H=4, G=2, L=40, S=300, frequencies="BH", M=20),
    Sample("several query blocks", H=1, L=260, S=200, M=20),
    Sample("heads inside", B=2, L=70, S=75, layout="heads inside", float32_sides=True, M=20),
)


@each_call(LARGE)
def test_outputs_and_gradients_are_as_accurate_as_the_references(sample: Sample) -> None:
    arguments = sample.arguments(torch.bfloat16)
    truth = in_float64(reference, arguments)
    assert_output_accurate(attention(**arguments), reference(**arguments), truth)
    assert_call_accurate(attention, reference, arguments)


# One head whose incoming gradients cancel, beside those of three.
@pytest.mark.parametrize("d", [3, 8])  # whose products are of float32, and of 16 bits
@pytest.mark.parametrize(
    ("seed", "heads", "length", "d_v"),
    [(1, 3, 257, 5), (63, 3, 257, 5), (109, 3, 257, 5), (8, 1, 97, 1)],
)
def test_gradients_are_accurate_where_features_and_weights_hardly_differ(
    seed, heads, length, d_v, d
):
    generator = torch.Generator().manual_seed(seed)
    query, key = (0.5 * torch.rand(1, heads, n, d, generator=generator) for n in (length, 16))
    value = torch.randn(1, heads, 16, d_v, generator=generator)
    w1, w2 = (0.2 * torch.randn(heads, d, 32, generator=generator) for _ in range(2))
    tokens = {"query": query.bfloat16(), "key": key.bfloat16(), "value": value.bfloat16()}
    none = {"key_bias": None, "attn_mask": None}
    assert_call_accurate(attention, reference, {**tokens, "w1": w1, "w2": w2, "p": 1.0, **none})


@pytest.fixture
def medium() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("medium")
@each_call([*LARGE, *SAMPLES])
def test_values_and_gradients_err_by_roundings_to_bfloat16(sample: Sample) -> None:
    arguments = sample.arguments(torch.float32)
    output = attention(**arguments)
    assert output.dtype == torch.float32
    assert_close(output, in_float64(reference, arguments), ROUNDINGS, "output")
    incoming = direction(output)
    truth = gradients(reference, converted(arguments, torch.float64), grad_output=incoming.double())
    scales = gradient_scales(arguments, incoming)
    for name, got in gradients(attention, arguments, grad_output=incoming).items():
        assert_close(got, truth[name], ROUNDINGS, name, scales[name])


@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
def test_the_setting_is_honoured_where_it_helps(dtype: torch.dtype) -> None:
    arguments = Sample("large enough", L=100, S=90, M=16).arguments(dtype)
    rounded = [attention(**arguments), *gradients(attention, arguments).values()]
    torch.set_float32_matmul_precision("highest")
    exact = [attention(**arguments), *gradients(attention, arguments).values()]
    if dtype == torch.float64 or torch.ops.ikattn.sixteen_bit_instructions() == "none":
        assert_identical(rounded, exact)
    else:
        assert not any(torch.equal(a, b) for a, b in zip(rounded, exact, strict=True))


@pytest.mark.usefixtures("medium")
def test_one_visible_key_gives_its_value() -> None:
    """Equal to the bits of bfloat16: rounded weights add up to their own sum."""
    query, key, value = (torch.randn(1, 2, n, 8) for n in (40, 1, 1))
    output = attention(query, key, value, *(torch.randn(2, 8, 16) for _ in range(2)))
    rounded = torch.ops.ikattn.sixteen_bit_instructions() in ("avx512_bf16", "amx")
    expected = value.bfloat16().float() if rounded else value
    assert_close(output, expected.expand_as(output), 1e-6)


@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("huge", [3.4e38, -3.4e38], ids=str)
def test_finite_values_beyond_bfloat16_stay_finite_and_hidden(huge: float) -> None:
    call: Arguments = {name: torch.randn(1, 1, 40, 8) for name in ("query", "key", "value")}
    call |= {name: 0.1 * torch.randn(1, 8, 16) for name in ("w1", "w2")}
    call["attn_mask"] = torch.ones(40, 40, dtype=torch.bool)
    call["attn_mask"][:, 19] = False
    expected = attention(**call)
    spoilt = call | {"value": call["value"].clone()}
    spoilt["value"][0, 0, 19] = huge
    assert torch.equal(attention(**spoilt), expected)
    names = ["query", "key", "value", "w1", "w2"]
    for gradient in gradients(attention, spoilt, names).values():
        assert gradient.isfinite().all()
    assert attention(**spoilt | {"attn_mask": None}).isfinite().all()


def many_rows(dtype: torch.dtype, S: int, seed: int) -> Arguments:
    """A call of 2048 rows that see S keys each."""
    torch.manual_seed(seed)
    call: Arguments = {
        "query": torch.randn(4, 8, 64, 64),
        "key": torch.randn(4, 8, S, 64),
        "value": torch.randn(4, 8, S, 64),
        "w1": 0.3 / 8 * torch.randn(8, 64, 64),
        "w2": 0.3 / 8 * torch.randn(8, 64, 64),
    }
    return {name: x.to(dtype) for name, x in call.items()}


@pytest.mark.parametrize("eps", [1e-5, 1e-8])
@pytest.mark.parametrize("S", [2, 4, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_few_keys_and_small_scores(dtype: torch.dtype, S: int, eps: float) -> None:
    for seed in range(4):
        call = many_rows(dtype, S, seed) | {"eps": eps}
        truth = in_float64(reference, call)
        assert_output_accurate(attention(**call), reference(**call), truth)


@pytest.mark.parametrize("S", [2, 3, 10, 33, 128, 300])
def test_outputs_in_bfloat16_err_by_their_own_rounding_alone(S: int) -> None:
    """Weights are not rounded: the root mean square of the error is the composition's."""
    for seed in range(2):
        call = many_rows(torch.bfloat16, S, seed)
        truth = in_float64(reference, call)
        found, expected = (
            (output.double() - truth).square().mean().sqrt().item()
            for output in (attention(**call), reference(**call))
        )
        assert found < 1.05 * expected


@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("S", [1, 10, 128])
def test_medium_lets_weights_of_bfloat16_calls_be_rounded(S: int) -> None:
    call = many_rows(torch.bfloat16, S, 0)
    output, truth = attention(**call), in_float64(reference, call)
    assert_close(output, truth, ROUNDINGS, "output")
    if S == 1:
        assert torch.equal(output, call["value"].expand_as(output))
    elif torch.ops.ikattn.sixteen_bit_instructions() in ("avx512_bf16", "amx"):
        torch.set_float32_matmul_precision("highest")
        assert not torch.equal(output, attention(**call))


def test_small_values_behind_small_weights_are_not_lost() -> None:
    """A causal row of weights e^-48 of the largest, of values that are small, too."""
    torch.manual_seed(0)
    tokens = {name: torch.randn(1, 1, 80, 8).bfloat16() for name in ("query", "key")}
    value = (1e-16 * torch.randn(1, 1, 80, 8)).bfloat16()
    call: Arguments = {**tokens, "value": value, "w1": torch.randn(1, 8, 16), "p": None}
    call |= {"key_bias": torch.linspace(0, 48, 80), "is_causal": True}
    output, truth = attention(**call), in_float64(reference, call)
    for row in range(80):  # the rows differ by much
        assert_close(output[:, :, row], truth[:, :, row], ROUNDINGS, f"row {row}")
