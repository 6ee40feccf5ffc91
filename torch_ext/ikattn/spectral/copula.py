"""Gaussian marginals and the Gaussian copula that joins them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def correlation_factor(lower: Tensor) -> Tensor:
    """Makes the Cholesky factor of a correlation matrix of any numbers below the diagonal.

    The rows of I + (what is below the diagonal of ``lower``, [..., H, H]) are divided by their
    lengths, so that L L^T has a unit diagonal and is positive definite whatever the numbers (L L^T
    up to rounding), whose squares must not overflow.
    """
    if lower.dim() < 2 or lower.size(-1) != lower.size(-2):
        raise ValueError(
            f"correlation_factor: lower must have shape [..., H, H], got {list(lower.shape)}"
        )
    identity = torch.eye(lower.size(-1), dtype=lower.dtype, device=lower.device)
    rows: Tensor = lower.tril(-1) + identity
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return rows / lengths


def mutual_information(factor: Tensor) -> Tensor:
    """Computes the mean log-density of a Gaussian copula from L: -sum_h log L_hh, in nats."""
    return -factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def gaussian_kl(location: Tensor, log_scale: Tensor, prior_scale: float = 1.0) -> Tensor:
    """Computes KL(N(location, exp(log_scale)^2) || N(0, prior_scale^2)) by element, in nats."""
    if not 0 < prior_scale < math.inf:
        raise ValueError(f"gaussian_kl: prior_scale must be positive, got {prior_scale}")
    log_ratio = log_scale - math.log(prior_scale)
    squares = (2 * log_ratio).exp() + (location / prior_scale).square()
    return (squares - 1) / 2 - log_ratio
