"""Correlation matrices, their factors, and densities, against formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch

from attention_cases import H
from ikattn.spectral import Ikan, Mikan
from ikattn.spectral.copula import correlation_factor, gaussian_kl, mutual_information
from spectral_cases import each_generator, generator, tokens


def test_factor_gives_unit_diagonal_and_positive_definite_matrices():
    factor = correlation_factor(10 * torch.randn(50, H, H, dtype=torch.float64))
    correlation = factor @ factor.mT
    torch.testing.assert_close(
        correlation.diagonal(dim1=-2, dim2=-1), torch.ones(50, H, dtype=torch.float64)
    )
    assert torch.linalg.eigvalsh(correlation).min() > 0
    torch.testing.assert_close(torch.linalg.cholesky(correlation), factor)


def test_mean_density_of_a_copula_is_the_regulariser():
    source = generator(Mikan)
    _, _, factor = source.infer(tokens(), tokens(seed=6))
    factor = factor[0, 0].detach()
    correlation = factor @ factor.mT
    scores = torch.randn(200_000, H, dtype=torch.float64) @ factor.mT
    joint = torch.distributions.MultivariateNormal(scores.new_zeros(H), correlation)
    marginals = torch.distributions.Normal(0.0, 1.0).log_prob(scores).sum(-1)
    density = joint.log_prob(scores) - marginals
    found = mutual_information(factor)
    assert found > 0.1
    assert abs(density.mean() - found) < 4 * density.std() / math.sqrt(len(density))


def test_divergence_is_torchs():
    location, log_scale = torch.randn(2, 30, dtype=torch.float64)
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(
        normal(location, log_scale.exp()), normal(0.0, 0.3)
    )
    torch.testing.assert_close(gaussian_kl(location, log_scale, 0.3), expected)


@each_generator
def test_densities_of_frequencies_are_symmetric(kind):
    source = kind(2, 3, 40_000, dtype=torch.float64, seed=1).train()
    with torch.no_grad():
        biases = source.location if kind is Ikan else source.posterior.biases[3:6]
        biases.fill_(0.9)  # far from zero, so that the halves differ
        torch.manual_seed(1)
        q = torch.zeros(1, 2, 4, 3, dtype=torch.float64)
        w1 = source(q, q, None)[0].view(2, 3, -1)
    for w in w1.flatten(0, 1):
        assert w[:20_000].mean().abs() > 0.1 * w.std()  # one half alone is not
        assert w.mean().abs() < 0.03 * w.std()
        low, high = torch.quantile(w, torch.tensor([0.1, 0.9], dtype=torch.float64))
        assert (low + high).abs() < 0.05 * w.std()


def test_shapes_and_scales_are_named():
    with pytest.raises(ValueError, match=r"lower must have shape \[\.\.\., H, H\], got \[2, 3\]"):
        correlation_factor(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="gaussian_kl: prior_scale must be positive, got 0"):
        gaussian_kl(torch.zeros(2), torch.zeros(2), prior_scale=0)
