"""The authors' own code in place of a copula, for comparison with it.

It differs from the paper: the heads' noise is not correlated (each is scaled by a row sum), the
factor's rows have not unit length, exp(logvar) serves as a standard deviation, noise is cut off at
two standard deviations, and the "entropy" is not that of a copula.

Source: github.com/aailabkaist/Implicit-Kernel-Attention, commit 0c380abd, ``MHA.py``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence


def published_noise(
    location: Tensor, log_scale: Tensor, copula: Tensor, num_frequencies: int, prior_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws z [1, H, d, M] as the authors' code, in its order.

    Location, log scale (without the prior's) and copula vector in (-1, 1) are [1, H, d].
    ``prior_scale`` is the code's ``prior_var``. Beside z stand the sum of KL divergences and the
    sum called entropy.
    """
    standard = Normal(location.new_zeros(()), location.new_ones(()))
    mean = location.transpose(1, 2).unsqueeze(-1)  # [1, d, H, 1]
    scale = (log_scale + math.log(prior_scale)).exp().transpose(1, 2).unsqueeze(-1)
    a = copula.transpose(1, 2)[0]  # [d, H]
    row_sums = (a.unsqueeze(-1) * a.unsqueeze(-2)).tril(-1).sum(-1, keepdim=True) + 1
    shape = (*a.shape, num_frequencies // 2)
    halves, uniforms = [], []
    for sign in (1, -1):
        noise = torch.randn(shape, dtype=location.dtype, device=location.device)
        uniform = standard.cdf((row_sums * noise).clamp(-2.0, 2.0))
        halves.append(Normal(sign * mean, scale).icdf(uniform))
        uniforms.append(uniform)
    u = torch.cat(uniforms)
    entropy = -(u * (u + 1e-5).log()).sum()
    prior = Normal(location.new_zeros(()), location.new_tensor(prior_scale))
    divergence = kl_divergence(Normal(mean, scale), prior).sum()
    return torch.cat(halves, -1).transpose(1, 2), divergence, entropy
