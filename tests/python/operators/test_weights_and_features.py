"""The weights as an operator, and the features the kernel is made of."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

import formula
import ikattn
from agreement import (
    FLOAT64_GRADIENT,
    assert_call_accurate,
    assert_close,
    assert_gradients_accurate,
    assert_identical,
    assert_output_accurate,
    direction,
    error,
    gradients,
    in_float64,
)
from samples import BY_NAME, DTYPES, LAYOUTS, SAMPLES, Sample, of_features, of_weights
from tiers import each_call

weights = ikattn.implicit_kernel_weights
reference_weights = ikattn.reference.implicit_kernel_weights
reference_features = ikattn.reference.spectral_features


FEATURE_SAMPLES = [
    Sample(f"features of {L} tokens, d {d}, M {M}, w [{form}]{kind}", **options)
    for L, d, M, form in (
        *((5, 8, 5, "H"), (65, 1, 33, "BH"), (64, 64, 64, "H"), (511, 13, 1, "1H")),
        *((513, 70, 65, "BH"), (1, 40, 32, "H"), (0, 8, 5, "H")),
    )
    for kind, options in (
        ("", {"L": L, "d": d, "M": M, "frequencies": form}),
        (", stationary", {"L": L, "d": d, "M": M, "frequencies": form, "stationary": True}),
    )
]
FEATURE_SAMPLES += [Sample(f"features, {layout}", H=3, L=9, layout=layout) for layout in LAYOUTS]
FEATURE_SAMPLES += [Sample("features of an empty batch", B=0)]


def formula_weights(hold_normalizer: bool = False, **arguments: Tensor) -> Tensor:
    return formula.weights(hold_normalizer, **arguments)


def formula_average(hold_normalizer: bool = False, **arguments: Tensor) -> Tensor:
    return formula.weights(hold_normalizer, **arguments).mean(1)


def assert_weights_accurate(sample: Sample, dtype: torch.dtype, average: bool) -> None:
    """The rule for gradients, of the weights per head or averaged."""
    arguments = of_weights(sample.arguments(dtype))
    operators = (weights, reference_weights)
    if average:
        operators = tuple(functools.partial(f, average_heads=True) for f in operators)
    by_formula = formula_average if average else formula_weights
    assert_call_accurate(*operators, arguments, by_formula)


# --- Weights --------------------------------------------------------------------------------------


@pytest.mark.operators
@each_call(SAMPLES, dtype=DTYPES)
def test_weights_are_as_accurate_as_the_references(sample: Sample, dtype: torch.dtype) -> None:
    arguments = of_weights(sample.arguments(dtype))
    found = weights(**arguments)
    assert found.shape == (sample.B, sample.H, sample.L, sample.S)
    assert_output_accurate(
        found, reference_weights(**arguments), in_float64(reference_weights, arguments)
    )


# The backward goes through 125 queries at a time where pairs are so many.
MANY_PAIRS = (
    Sample("many pairs, causal", L=130, S=2100, is_causal=True, key_bias="BHS"),
    Sample("many pairs, mask", L=130, S=2100, mask="LS", mask_kind="float with -inf"),
    Sample("many pairs, mask of rows", L=130, S=2100, mask="HL1", mask_kind="float"),
    Sample("many pairs, mask of keys", L=130, S=2100, mask="B11S", mask_kind="float"),
    Sample("many pairs, dropout", H=4, G=2, L=130, S=2100, dropout_p=0.25, frequencies="BG"),
)


@each_call(
    MANY_PAIRS, dtype=[torch.float32, torch.bfloat16], average={"per head": False, "averaged": True}
)
def test_gradients_of_many_weights_are_as_accurate_as_the_references(sample, dtype, average):
    assert_weights_accurate(sample, dtype, average)


# --- Features -------------------------------------------------------------------------------------


@each_call(FEATURE_SAMPLES, dtype=DTYPES)
def test_features_are_as_accurate_as_the_references(sample: Sample, dtype: torch.dtype) -> None:
    arguments = of_features(sample.arguments(dtype))
    found = ikattn.ops.spectral_features(**arguments)
    truth = reference_features(*(t if t is None else t.double() for t in arguments.values()))
    assert found.shape == (sample.B, sample.H, sample.L, 2 * sample.M)
    assert_output_accurate(found, reference_features(**arguments), truth)


@each_call(FEATURE_SAMPLES, dtype=DTYPES)
def test_gradients_of_the_features_are_as_accurate_as_the_references(sample, dtype):
    arguments = of_features(sample.arguments(dtype))
    names = [name for name, argument in arguments.items() if argument is not None]
    incoming = direction(ikattn.ops.spectral_features(**arguments))
    got = gradients(ikattn.ops.spectral_features, arguments, names, incoming)
    expected = gradients(reference_features, arguments, names, incoming)
    in_double = arguments | {name: arguments[name].double() for name in names}
    truth = gradients(reference_features, in_double, names, incoming.double())
    assert_gradients_accurate(got, expected, truth, dict.fromkeys(names, 0.0), dtype)


@pytest.mark.parametrize("per_sample", [False, True])
def test_frequency_gradients_that_do_not_fit_together(per_sample: bool) -> None:
    """Gradients of 512 tokens are summed in groups of 8 MiB: three here, that part a pair."""
    torch.manual_seed(0)
    sets = (7, 2) if per_sample else (2,)
    call = {"x": torch.randn(7, 2, 1100, 256, dtype=torch.float64)}
    call |= dict(zip(("w1", "w2"), 0.1 * torch.randn(2, *sets, 256, 256).double(), strict=True))
    functions = (ikattn.ops.spectral_features, ikattn.reference.spectral_features)
    got, expected = (gradients(function, call, list(call)) for function in functions)
    for name, gradient in got.items():
        assert_close(gradient, expected[name], 1e-12, name)


@pytest.mark.parametrize("wanted", ["x", "w1", "w2"])
def test_each_gradient_of_the_features_alone_is_what_it_is_among_all(wanted: str) -> None:
    arguments = of_features(FEATURE_SAMPLES[0].arguments())
    everything = gradients(ikattn.ops.spectral_features, arguments, ["x", "w1", "w2"])
    alone = gradients(ikattn.ops.spectral_features, arguments, [wanted])
    assert_identical(alone.values(), [everything[wanted]])


@pytest.mark.parametrize("stationary", [False, True])
def test_features_are_cosines_and_then_sines_of_turns(stationary: bool) -> None:
    x = torch.tensor([[[[0.25, 0.5]]]]).double()
    w1 = torch.tensor([[[1.0, 0.0, 2.0], [0.0, 0.5, 1.0]]]).double()  # 0.25, 0.25, 1 turns
    w2 = None if stationary else torch.zeros_like(w1)
    other = (1.0, 0.0) if not stationary else (0.0, 0.0)
    cosines = [2 * c if stationary else c + other[0] for c in (0.0, 0.0, 1.0)]
    sines = [2 * s if stationary else s + other[1] for s in (1.0, 1.0, 0.0)]
    expected = torch.tensor([[[cosines + sines]]]).double()
    assert_close(ikattn.ops.spectral_features(x, w1, w2), expected, 1e-15)


@pytest.mark.parametrize("stationary", [False, True])
def test_inner_products_of_features_are_the_similarity(stationary: bool) -> None:
    sample = Sample("inner products", L=67, S=65, d=13, M=33, stationary=stationary)
    arguments = sample.arguments()
    w1, w2 = arguments["w1"], arguments["w2"]
    phi_q, phi_k = (ikattn.ops.spectral_features(arguments[n], w1, w2) for n in ("query", "key"))
    s = phi_q @ phi_k.mT / (4 * sample.M)
    assert_close(s, formula.covariance(arguments["query"], arguments["key"], w1, w2), 1e-13)
    similarity, _ = ikattn.ops.similarity_and_magnitude(
        arguments["query"], arguments["key"], kernel="implicit", w1=w1, w2=w2, eps=1e-3
    )
    assert_close(similarity, s.square() + 1e-3, 1e-13)
    assert s.abs().max() <= 1 + 1e-12


def test_a_stationary_kernel_of_a_token_with_itself_is_one() -> None:
    arguments = Sample("itself", stationary=True).arguments()
    phi = ikattn.ops.spectral_features(arguments["query"], arguments["w1"])
    assert_close(phi.square().sum(-1), torch.full(phi.shape[:-1], 20.0).double(), 1e-14)


@pytest.mark.parametrize("size", [1e3, 1e6])
def test_large_angles_keep_the_accuracy_of_their_turns(size: float) -> None:
    """Exact turns in, exact to rounding out: 2 pi x.w is never formed before it is reduced."""
    x = torch.tensor([[[[size], [-size]]]]).double()
    w1 = torch.tensor([[[0.25, 1.0, 0.125]]]).double()
    turns = (x * w1).remainder(1.0)
    expected = 2 * torch.cat([torch.cos(2 * math.pi * turns), torch.sin(2 * math.pi * turns)], -1)
    assert_close(ikattn.ops.spectral_features(x, w1), expected, 1e-15)
    single = ikattn.ops.spectral_features(x.float(), w1.float())
    assert_close(single, expected, 5e-7)


def test_float64_gradient_rule_catches_an_error_of_one_part_in_a_billion() -> None:
    """The tests above compare by rules; this one shows that the rules can fail."""
    arguments = of_weights(BY_NAME["15 queries, 17 keys"].arguments())
    truth = gradients(reference_weights, arguments)

    def slightly_wrong(**call: Tensor) -> Tensor:
        return reference_weights(**call) * (1 + 1e-9)

    found = gradients(slightly_wrong, arguments)
    assert all(error(found[name], truth[name]) > FLOAT64_GRADIENT for name in truth)
    with pytest.raises(AssertionError, match="error"):
        assert_call_accurate(slightly_wrong, reference_weights, arguments, formula_weights)
