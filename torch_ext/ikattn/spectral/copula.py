"""Gaussian marginals and the Gaussian copula that joins them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def correlation_factor(lower: Tensor) -> Tensor:
    """Makes the Cholesky factor of a correlation matrix of any numbers below the diagonal.

    The rows of I + (what is below the diagonal) are divided by their lengths, so that L L^T has a
    unit diagonal and is positive definite whatever the numbers (L L^T up to rounding).

    Args:
        lower: [..., H, H]; only what is below the diagonal is read. Its squares must not overflow.

    Returns:
        L, [..., H, H], lower triangular with a positive diagonal.

    Raises:
        ValueError: The matrices are not square.

    Example:
        >>> import torch
        >>> from ikattn.spectral.copula import correlation_factor
        >>> factor = correlation_factor(torch.randn(5, 3, 3))
        >>> torch.allclose((factor @ factor.mT).diagonal(dim1=-2, dim2=-1), torch.ones(5, 3))
        True
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
    """Computes the mean log-density of a Gaussian copula: -sum_h log L_hh, in nats.

    Args:
        factor: Cholesky factor L of the correlation matrix R, [..., H, H].

    Returns:
        [...]; zero if and only if R = I.
    """
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
        ``Mikan`` takes as its regulariser.

    Raises:
        ValueError: The diagonal of R is not 1, or it is not positive definite; its H is not that of
            scores; both of correlation and factor are given, or none.
        TypeError: R, or L, is of integers.

    Source: K. Song, Y. Jung, D. Kim, I. Moon, "Implicit Kernel Attention", AAAI 2021
    (arXiv 2006.06147), whose code has another formula in this place.

    Example:
        >>> import torch
        >>> from ikattn.spectral.copula import gaussian_copula_log_density
        >>> gaussian_copula_log_density(torch.randn(5, 3), torch.eye(3))
        tensor([0., 0., 0., 0., 0.])
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
    """Computes KL(N(location, exp(log_scale)^2) || N(0, prior_scale^2)) by element, in nats.

    Args:
        location, log_scale: Of the same shape.
        prior_scale: Standard deviation of the prior.

    Returns:
        Shaped like location.

    Raises:
        ValueError: prior_scale is not positive.

    Example:
        >>> import torch
        >>> from ikattn.spectral.copula import gaussian_kl
        >>> gaussian_kl(torch.tensor(2.0), torch.tensor(0.0))
        tensor(2.)
    """
    if not 0 < prior_scale < math.inf:
        raise ValueError(f"gaussian_kl: prior_scale must be positive, got {prior_scale}")
    log_ratio = log_scale - math.log(prior_scale)
    squares = (2 * log_ratio).exp() + (location / prior_scale).square()
    return (squares - 1) / 2 - log_ratio


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
    if factor.dim() < 2 or factor.size(-1) != factor.size(-2):
        raise ValueError(f"{name} must have shape [..., H, H], got {list(factor.shape)}")
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
    if correlation.dim() < 2 or correlation.size(-1) != correlation.size(-2):
        raise ValueError(f"{name} must have shape [..., H, H], got {list(correlation.shape)}")
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
