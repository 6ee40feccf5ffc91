"""Values and gradients against the float64 reference and the authors' own numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ikattn
from operator_samples import (
    DTYPES,
    SAMPLES,
    Options,
    Sample,
    assert_error_within,
    differentiable,
    error,
    widened,
)

every_sample = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])

GOLDEN = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "golden" / "ika_official"
needs_golden = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="the authors' numbers (shared/data/golden) are not here"
)


def with_gradients(
    function: Any, tensors: list[Tensor], opts: Options, direction: Tensor
) -> list[Tensor]:
    output = function(*tensors, **opts)
    inputs = differentiable(tensors, opts)
    gradients = torch.autograd.grad(output, inputs, direction.to(output.dtype))
    return [output.detach(), *gradients]


@every_dtype
@every_sample
def test_attention_is_as_accurate_as_its_plain_composition(
    sample: Sample, dtype: torch.dtype
) -> None:
    tensors, opts = sample.make(dtype)
    direction = torch.randn(sample.B, sample.H, sample.L, sample.d_v).to(dtype)
    ours = with_gradients(ikattn.implicit_kernel_attention, tensors, opts, direction)
    plain = with_gradients(ikattn.reference.implicit_kernel_attention, tensors, opts, direction)
    wide = widened(tensors, opts)
    truth = with_gradients(ikattn.reference.implicit_kernel_attention, *wide, direction)
    assert_error_within(2, ours[0], plain[0], truth[0])
    for ours_i, plain_i, truth_i in zip(ours[1:], plain[1:], truth[1:], strict=True):
        assert_error_within(5, ours_i, plain_i, truth_i)


@pytest.mark.parametrize("average_heads", [False, True])
@every_sample
def test_weights_equal_their_plain_composition(sample: Sample, average_heads: bool) -> None:
    (query, key, _, *spectrum), opts = sample.make()
    weights = ikattn.implicit_kernel_weights(
        query, key, *spectrum, **opts, average_heads=average_heads
    )
    plain = ikattn.reference.implicit_kernel_weights(
        query, key, *spectrum, **opts, average_heads=average_heads
    )
    assert error(weights, plain) < 1e-12
    direction = torch.randn_like(plain)
    inputs = differentiable([query, key, *spectrum], opts)
    for ours, expected in zip(
        torch.autograd.grad(weights, inputs, direction),
        torch.autograd.grad(plain, inputs, direction),
        strict=True,
    ):
        assert error(ours, expected) < 1e-11


@every_dtype
@every_sample
def test_features_are_as_accurate_as_their_plain_composition(
    sample: Sample, dtype: torch.dtype
) -> None:
    if sample.frequency_heads not in (None, sample.H):
        sample = Sample("features", H=sample.G, G=sample.G)
    (x, _, _, *spectrum), _ = sample.make(dtype)
    direction = torch.randn(sample.B, sample.H, sample.L, 2 * sample.M).to(dtype)
    tensors = [x, *spectrum]
    ours = with_gradients(ikattn.spectral_features, tensors, {}, direction)
    plain = with_gradients(ikattn.reference.spectral_features, tensors, {}, direction)
    wide, _ = widened(tensors, {})
    truth = with_gradients(ikattn.reference.spectral_features, wide, {}, direction)
    assert_error_within(2, ours[0], plain[0], truth[0])
    for ours_i, plain_i, truth_i in zip(ours[1:], plain[1:], truth[1:], strict=True):
        assert_error_within(5, ours_i, plain_i, truth_i)


@pytest.mark.parametrize("wanted", range(5))
def test_one_gradient_alone_is_the_same_as_among_all(wanted: int) -> None:
    tensors, opts = Sample("alone", L=70, S=70).make()
    everything = torch.autograd.grad(
        ikattn.implicit_kernel_attention(*tensors, **opts).square().sum(), tensors
    )
    frozen = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(tensors)]
    output = ikattn.implicit_kernel_attention(*frozen, **opts)
    (alone,) = torch.autograd.grad(output.square().sum(), [frozen[wanted]])
    assert torch.equal(alone, everything[wanted])


@pytest.mark.parametrize(("B", "L", "S"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty_inputs_give_empty_or_zero_outputs_and_gradients(B: int, L: int, S: int) -> None:
    tensors, opts = Sample("empty", B=B, L=L, S=S).make()
    output = ikattn.implicit_kernel_attention(*tensors, **opts)
    assert output.shape == (B, 4, L, 16)
    assert not output.any()
    for gradient in torch.autograd.grad(output.sum(), tensors):
        assert torch.equal(gradient, torch.zeros_like(gradient)) or L > 0 < S
    assert ikattn.implicit_kernel_weights(*tensors[:2], tensors[3]).shape == (B, 4, L, S)
    assert ikattn.spectral_features(tensors[0], tensors[3]).shape == (B, 4, L, 64)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0])
def test_magnitude_has_no_gradient_at_a_zero_key(p: float) -> None:
    tensors, _ = Sample("zero keys").make()
    key = tensors[1].detach().clone()
    key[:, :, ::2] = 0
    tensors[1] = key.requires_grad_()
    output = ikattn.implicit_kernel_attention(*tensors, p=p)
    (with_magnitude,) = torch.autograd.grad(output.sum(), [key], retain_graph=True)
    expected = ikattn.reference.implicit_kernel_attention(*tensors, p=p)
    (plain,) = torch.autograd.grad(expected.sum(), [key])
    assert torch.isfinite(with_magnitude).all()
    assert error(with_magnitude, plain) < 1e-12


@pytest.mark.parametrize("form", ["plain", "causal", "bool", "float"])
def test_magnitudes_that_span_hundreds_of_nats_stay_exact(form: str) -> None:
    tensors, _ = Sample("wide", L=80, S=80).make(torch.float32)
    opts: Options = {"magnitude_scale": 5.0, "is_causal": form == "causal"}
    if form == "bool":
        opts["attn_mask"] = torch.rand(80, 80) > 0.5
    if form == "float":
        opts["attn_mask"] = 30 * torch.randn(80, 80)
    direction = torch.randn(2, 4, 80, 16)
    ours = with_gradients(ikattn.implicit_kernel_attention, tensors, opts, direction)
    plain = with_gradients(ikattn.reference.implicit_kernel_attention, tensors, opts, direction)
    truth = with_gradients(
        ikattn.reference.implicit_kernel_attention, *widened(tensors, opts), direction
    )
    assert_error_within(2, ours[0], plain[0], truth[0])
    for ours_i, plain_i, truth_i in zip(ours[1:], plain[1:], truth[1:], strict=True):
        assert_error_within(5, ours_i, plain_i, truth_i)


def golden_cases() -> list[tuple[str, str]]:
    if not GOLDEN.is_dir():
        return [("none", "official")]
    names = sorted(path.name for path in GOLDEN.glob("[dx]*.npz"))
    return [(name, mode) for name in names for mode in ("official", "paper")]


@needs_golden
@pytest.mark.parametrize(("name", "mode"), golden_cases())
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)], ids=["f64", "f32"]
)
def test_numbers_of_the_authors_own_code(
    name: str, mode: str, dtype: torch.dtype, tolerance: float
) -> None:
    arrays = np.load(GOLDEN / name)

    def read(key: str) -> Tensor:
        tensor = torch.from_numpy(arrays[key].astype(np.float64))
        if key in ("w1", "w2") or key.endswith(("dw1", "dw2")):
            return tensor.transpose(-3, -2)  # theirs are [d, H, M]
        if tensor.dim() == 3:
            return tensor.unflatten(-1, (int(arrays["H"]), -1)).transpose(1, 2)
        return tensor

    names = ["query", "key", "value", "w1", "w2"]
    inputs = [read(key).to(dtype).requires_grad_() for key in names]
    output = ikattn.implicit_kernel_attention(
        *inputs,
        p=float(arrays["p"]),
        magnitude_scale=1 / float(arrays[f"{mode}_norm_divisor"]),
        eps=float(arrays["eps"]) if "eps" in arrays else 1e-5,
    )
    gradients = torch.autograd.grad(output, inputs, read("g").to(dtype))
    results = dict(zip([f"d{key}" for key in names], gradients, strict=True), out=output)
    expected = {key: read(f"{mode}_{key}") for key in results if f"{mode}_{key}" in arrays}
    assert expected
    # With one key every gradient but value's is zero, the difference of terms as large as these:
    terms = read("g").abs().max() * read("value").abs().max()
    for key, truth in expected.items():
        scale = max(truth.abs().max(), terms if arrays["query"].shape[1] == 1 else 0)
        assert (results[key].double() - truth).abs().max() < tolerance * scale, key
