"""Correlation matrices, their factors, and densities, against formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attention_cases import H
from ikattn.spectral import Ikan, Mikan
from ikattn.spectral.copula import correlation_factor, gaussian_copula_log_density, gaussian_kl
from spectral_cases import each_generator, generator, tokens


def random_correlation(heads: int) -> Tensor:
    torch.manual_seed(3)
    factor = correlation_factor(torch.randn(heads, heads, dtype=torch.float64))
    return factor @ factor.mT


def test_factor_gives_unit_diagonal_and_positive_definite_matrices():
    factor = correlation_factor(10 * torch.randn(50, H, H, dtype=torch.float64))
    correlation = factor @ factor.mT
    torch.testing.assert_close(
        correlation.diagonal(dim1=-2, dim2=-1), torch.ones(50, H, dtype=torch.float64)
    )
    assert torch.linalg.eigvalsh(correlation).min() > 0
    torch.testing.assert_close(torch.linalg.cholesky(correlation), factor)


def test_copula_density_is_the_joint_density_over_the_marginals():
    correlation = random_correlation(H)
    x = torch.randn(20, H, dtype=torch.float64)
    joint = torch.distributions.MultivariateNormal(x.new_zeros(H), correlation).log_prob(x)
    marginals = torch.distributions.Normal(0.0, 1.0).log_prob(x).sum(-1)
    torch.testing.assert_close(gaussian_copula_log_density(x, correlation), joint - marginals)


def test_mean_copula_density_is_the_regulariser():
    source = generator(Mikan)
    _, _, factor = source.infer(tokens(), tokens(seed=6))
    factor = factor[0, 0].detach()
    scores = torch.randn(200_000, H, dtype=torch.float64) @ factor.mT
    density = gaussian_copula_log_density(scores, factor @ factor.mT)
    expected = -torch.linalg.slogdet(factor @ factor.mT).logabsdet / 2
    assert expected > 0.1
    assert abs(density.mean() - expected) < 4 * density.std() / math.sqrt(len(density))


def test_divergence_is_torchs():
    location, log_scale = torch.randn(2, 30, dtype=torch.float64)
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(
        normal(location, log_scale.exp()), normal(0.0, 0.3)
    )
    torch.testing.assert_close(gaussian_kl(location, log_scale, 0.3), expected)


@pytest.mark.parametrize(
    ("correlation", "message"),
    [
        (torch.tensor([[1.0, 2.0], [2.0, 1.0]]), r"positive definite.*smallest eigenvalue is -1"),
        (torch.tensor([[2.0, 0.0], [0.0, 1.0]]), r"unit diagonal, got 2"),
        (torch.tensor([[1.0, 0.5], [0.0, 1.0]]), "symmetric"),
        (torch.tensor([[1.0, 0.5], [0.0, 1.0]]).bfloat16(), "symmetric"),
        (torch.tensor([[1.05, 0.2], [0.2, 1.0]]).bfloat16(), r"unit diagonal, got 1\.04688"),
        (torch.tensor([[1.0, 0.2], [0.2, 1.09]]).half(), r"unit diagonal, got 1\.08984"),
        (torch.tensor([[1.0, math.nan], [math.nan, 1.0]]), "finite"),
        (torch.ones(3, 2), r"\[\.\.\., H, H\], got \[3, 2\]"),
    ],
)
def test_what_is_no_correlation_matrix_is_refused(correlation, message):
    with pytest.raises(ValueError, match=message):
        gaussian_copula_log_density(torch.zeros(2), correlation)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_copula_density_in_every_type(dtype):
    correlation, scores = random_correlation(H).to(dtype), torch.randn(20, H).to(dtype)
    got = gaussian_copula_log_density(scores, correlation)
    assert got.dtype == dtype
    for seed in range(20):  # of lengths rounded to this type
        torch.manual_seed(seed)
        factor = correlation_factor(torch.randn(12, 12).to(dtype))
        assert gaussian_copula_log_density(torch.zeros(12), factor=factor).isfinite()
    torch.testing.assert_close(
        got, gaussian_copula_log_density(scores.double(), correlation.double()).to(dtype)
    )


def test_a_factor_keeps_what_a_nearly_singular_correlation_matrix_loses():
    factor = correlation_factor(torch.tensor([[0.0, 0.0], [1e4, 0.0]]))
    noise = torch.randn(5, 2, dtype=torch.float64)
    scores = noise @ factor.double().mT
    with pytest.raises(ValueError, match=r"positive definite.*pass factor"):
        gaussian_copula_log_density(scores, factor @ factor.mT)
    squares = (scores.square() - noise.square()).sum(-1)
    expected = squares / 2 - factor.diagonal().double().log().sum()
    torch.testing.assert_close(gaussian_copula_log_density(scores, factor=factor), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "expected one of correlation and factor, got none"),
        ({"correlation": torch.eye(2), "factor": torch.eye(2)}, "got both"),
        ({"factor": 2 * torch.eye(2)}, "factor must be lower triangular"),
        ({"factor": torch.eye(2).flip(0)}, "factor must be lower triangular"),
        ({"factor": torch.ones(2)}, r"factor must have shape \[\.\.\., H, H\], got \[2\]"),
    ],
)
def test_factors_of_correlation_matrices_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        gaussian_copula_log_density(torch.zeros(2), **arguments)


def test_shapes_and_types_are_named():
    with pytest.raises(ValueError, match=r"lower must have shape \[\.\.\., H, H\], got \[2, 3\]"):
        correlation_factor(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"scores must have shape .* H = 3, got \[5, 2\]"):
        gaussian_copula_log_density(torch.zeros(5, 2), torch.eye(3))
    with pytest.raises(ValueError, match="gaussian_kl: prior_scale must be positive, got 0"):
        gaussian_kl(torch.zeros(2), torch.zeros(2), prior_scale=0)
    matrices = torch.stack([torch.eye(2)] * 5 + [torch.ones(2, 2)]).view(2, 3, 2, 2)
    with pytest.raises(ValueError, match=r"of matrix \[1, 2\]"):
        gaussian_copula_log_density(torch.zeros(2), matrices)
    for name in ("correlation", "factor"):
        with pytest.raises(TypeError, match=r"floating point, got torch\.int64"):
            gaussian_copula_log_density(torch.zeros(2), **{name: torch.eye(2, dtype=torch.long)})
