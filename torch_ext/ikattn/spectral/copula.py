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
    _check_square("correlation_factor: lower", lower)
    identity = torch.eye(lower.size(-1), dtype=lower.dtype, device=lower.device)
    rows: Tensor = lower.tril(-1) + identity
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return rows / lengths


def mutual_information(factor: Tensor) -> Tensor:
    """Computes the mean log-density of a Gaussian copula from L: -sum_h log L_hh, in nats."""
    return -factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def gaussian_copula_log_density(
    scores: Tensor, correlation: Tensor | None = None, *, factor: Tensor | None = None
) -> Tensor:
    r"""Computes the log-density of a Gaussian copula at normal scores of uniform variables.

    .. math::
        \log c(u) = -\tfrac12 \log\det R - \tfrac12 x^T (R^{-1} - I) x, \qquad x_h = \Phi^{-1}(u_h)

    Args:
        scores: x, [..., H].
        correlation: R, [..., H, H] with a unit diagonal.
        factor: In its place L, [..., H, H] lower triangular with rows of length 1, R = L L^T; what
            ``correlation_factor`` returns. Of a nearly singular R rounding may leave a matrix that
            is not positive definite; L keeps what R loses.

    Returns:
        [...], in nats, computed in float64 and rounded to the type of scores. Its mean over draws
        of the copula is ``-log det(R) / 2``, the mutual information of the variables, which is what
        ``Mikan`` takes as its regulariser. The authors' code has another formula in this place.
    """
    if (correlation is None) == (factor is None):
        raise ValueError(
            "gaussian_copula_log_density: expected one of correlation and factor, got "
            f"{'none' if factor is None else 'both'}"
        )
    if correlation is not None:
        _check_correlation(correlation)
        factor = torch.linalg.cholesky(correlation.double())
    else:
        assert factor is not None
        _check_factor(factor)
        factor = factor.double()
    if scores.dim() < 1 or scores.size(-1) != factor.size(-1):
        raise ValueError(
            f"gaussian_copula_log_density: scores must have shape [..., H] with H = "
            f"{factor.size(-1)}, got {list(scores.shape)}"
        )
    column = scores.double().unsqueeze(-1)
    whitened: Tensor = torch.linalg.solve_triangular(factor, column, upper=False)
    squares = (column.square() - whitened.square()).sum((-2, -1))
    return (mutual_information(factor) + squares / 2).to(scores.dtype)


def gaussian_kl(location: Tensor, log_scale: Tensor, prior_scale: float = 1.0) -> Tensor:
    """Computes KL(N(location, exp(log_scale)^2) || N(0, prior_scale^2)) by element, in nats."""
    if not 0 < prior_scale < math.inf:
        raise ValueError(f"gaussian_kl: prior_scale must be positive, got {prior_scale}")
    log_ratio = log_scale - math.log(prior_scale)
    squares = (2 * log_ratio).exp() + (location / prior_scale).square()
    return (squares - 1) / 2 - log_ratio


def _check_square(name: str, x: Tensor) -> None:
    if x.dim() < 2 or x.size(-1) != x.size(-2):
        raise ValueError(f"{name} must have shape [..., H, H], got {list(x.shape)}")


def _tolerance(dtype: torch.dtype) -> float:
    """Tells how far from 1 rounding may bring a length or a diagonal; in 16 bits by 1."""
    if not dtype.is_floating_point:
        raise TypeError(
            f"gaussian_copula_log_density: a correlation must be floating point, got {dtype}"
        )
    eps = torch.finfo(dtype).eps
    return 100 * eps if eps < 1e-5 else 2 * eps


def _check_factor(factor: Tensor) -> None:
    name = "gaussian_copula_log_density: factor"
    _check_square(name, factor)
    lower = factor.detach().double()
    tolerance = _tolerance(factor.dtype)
    lengths = torch.linalg.vector_norm(lower, dim=-1)
    is_unit = torch.allclose(lengths, torch.ones_like(lengths), rtol=0, atol=tolerance)
    if not is_unit or lower.triu(1).any() or not (lower.diagonal(dim1=-2, dim2=-1) > 0).all():
        raise ValueError(
            f"{name} must be lower triangular with a positive diagonal and rows of length 1"
        )


def _check_correlation(correlation: Tensor) -> None:
    name = "gaussian_copula_log_density: correlation"
    _check_square(name, correlation)
    matrix = correlation.detach()
    tolerance = _tolerance(matrix.dtype)
    if not matrix.isfinite().all():
        raise ValueError(f"{name} must be finite")
    if not torch.allclose(matrix, matrix.mT, rtol=0, atol=tolerance):
        raise ValueError(f"{name} must be symmetric")
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    farthest = diagonal.flatten()[(diagonal - 1).abs().argmax()].item() if matrix.numel() else 1.0
    if abs(farthest - 1) > tolerance:
        raise ValueError(f"{name} must have a unit diagonal, got {farthest:g} there")
    matrix = matrix.double()
    failed = torch.linalg.cholesky_ex(matrix).info
    if failed.any():
        index = [int(i) for i in failed.nonzero()[0]]
        smallest = torch.linalg.eigvalsh(matrix)[..., 0].min().item()
        where = f"matrix {index}" if index else "it"
        raise ValueError(
            f"{name} must be positive definite; of {where} the smallest eigenvalue is {smallest:g}"
            "; where rounding made it so, pass factor"
        )
