"""Kept features on a GPU, against the CPU in float64, and features and weights of 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ikattn
from gpu import DEVICE, is_on

if not is_on("decoding"):
    pytest.skip("the family decoding is off", allow_module_level=True)

B, H, G, S, SIZE, M = 2, 4, 2, 150, 16, 9
ROUNDING = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def drawn_frequencies(heads: int) -> list[Tensor]:
    return [0.1 * normal(heads, SIZE, M, seed=seed) for seed in (1, 2)]


def decoded(dtype: torch.dtype, heads: int, device: str, **options: Any) -> Tensor:
    """Five queries after the keys that were appended one by one at the end, in two chunks."""
    w1, w2 = (
        w.to(device, torch.promote_types(dtype, torch.float32)) for w in drawn_frequencies(heads)
    )
    query, key, value = (normal(B, n, k, SIZE, seed=k) for n, k in ((H, 5), (G, S), (G, S + 1)))
    query, key, value = (x.to(dtype).to(device) for x in (query, key, value[:, :, 1:]))
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    features = ikattn.KeyFeatures(w1, w2)
    for part in key.split([S - 3, 1, 1, 1], 2):
        features.append(part)
    return features.attend(query, value, **options).cpu()


def assert_as_on_the_cpu(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert float(error) <= ROUNDING[dtype]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal_lower_right": True},
    "hidden keys": {"key_bias": torch.where(torch.arange(S) % 3 == 0, -torch.inf, 0.5)},
    "mask": {"attn_mask": torch.arange(S) > 10 * torch.arange(5)[:, None], "eps": 0.1},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("heads", [G, H], ids=["shared features", "features of each head"])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_step_is_that_of_the_cpu(dtype: torch.dtype, heads: int, options: str) -> None:
    found = decoded(dtype, heads, DEVICE, **OPTIONS[options])
    assert found.dtype == dtype
    rounded = decoded(dtype, heads, "cpu", **OPTIONS[options]).double()
    assert_as_on_the_cpu(found, rounded, dtype)


def test_chunks_have_the_bits_of_steps_where_calls_are_batch_invariant() -> None:
    w1, w2 = (w.float().to(DEVICE) for w in drawn_frequencies(G))
    query, key, value = (normal(B, n, S, SIZE, seed=n).float().to(DEVICE) for n in (H, G, G))
    with ikattn.deterministic("batch"):
        features = ikattn.KeyFeatures(w1, w2)
        features.append(key[:, :, :-2])
        steps = []
        for t in (S - 2, S - 1):
            features.append(key[:, :, t : t + 1])
            steps.append(features.attend(query[:, :, t : t + 1], value[:, :, : t + 1]))
        chunk = features.attend(query[:, :, -2:], value, causal_lower_right=True)
    assert torch.equal(torch.cat(steps, 2), chunk)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("frequencies", [9, 64, 70])
def test_features_of_16_bits_are_rounded_once(dtype: torch.dtype, frequencies: int) -> None:
    x = normal(B, H, 70, SIZE).to(dtype)
    w1, w2 = 0.1 * normal(2, H, SIZE, frequencies, seed=1).float()
    expected = ikattn.ops.spectral_features(x.double(), w1.double(), w2.double())
    found = ikattn.ops.spectral_features(x.to(DEVICE), w1.to(DEVICE), w2.to(DEVICE)).cpu()
    assert float((found - expected).abs().max()) <= 2 * ROUNDING[dtype] + 1e-4
    assert found.dtype == dtype


@pytest.mark.parametrize("average_heads", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_weights_of_16_bits_add_up_to_one(dtype: torch.dtype, average_heads: bool) -> None:
    query, key = (normal(B, n, 70, SIZE, seed=n).to(dtype) for n in (H, G))
    w1, w2 = (w.float() for w in drawn_frequencies(G))
    bias = torch.zeros(70)
    bias[:3] = -torch.inf
    options: dict[str, Any] = {"average_heads": average_heads, "enable_gqa": True}

    def weights(device: str, compute: torch.dtype) -> Tensor:
        arguments = (x.to(device, compute) for x in (query, key))
        of_kernel = (x.to(device, torch.promote_types(compute, torch.float32)) for x in (w1, w2))
        return ikattn.implicit_kernel_weights(
            *arguments, *of_kernel, key_bias=bias.to(device), **options
        ).cpu()

    found, expected = weights(DEVICE, dtype), weights("cpu", torch.float64)
    assert float((found - expected).abs().max() / expected.max()) <= 2 * ROUNDING[dtype]
    assert not found[..., :3].any()
    sums = found.double().sum(-1)
    assert float((sums - 1).abs().max()) <= ROUNDING[dtype]
