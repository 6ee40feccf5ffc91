"""Frequencies from a network of noise, the same for all inputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ikattn.spectral.copula import gaussian_kl
from ikattn.spectral.generator import Generator, GeneratorOptions


class Ikan(Generator):
    """Frequencies that a network makes of Gaussian noise: the paper's implicit spectral density.

    z ~ N(location, scale^2) for one half of the frequencies and N(-location, scale^2) for the
    other, a symmetric mixture; then w1 = gain net1(z), w2 = gain net2(z) with networks odd in z.
    Location, scale and gain are learned per head and dimension, and stored flat, [H * d]; the
    networks are shared by the heads.

    Args:
        num_heads, head_dim, num_frequencies, options: As for ``Generator``. The KL divergence from
            the prior is a sum over heads and dimensions, in nats.

    Raises:
        ValueError: num_frequencies is odd, or another option is out of range.

    Source: K. Song et al., "Implicit Kernel Attention", AAAI 2021 (arXiv 2006.06147), IKAN.

    Example:
        >>> import torch
        >>> from ikattn.spectral import Ikan
        >>> q = k = torch.randn(3, 2, 10, 4)
        >>> w1, w2, regularization = Ikan(num_heads=2, head_dim=4, num_frequencies=8)(q, k, None)
        >>> w1.shape, regularization.shape
        (torch.Size([2, 4, 8]), torch.Size([]))
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_frequencies: int,
        **options: Unpack[GeneratorOptions],
    ) -> None:
        super().__init__(num_heads, head_dim, num_frequencies, **options)
        self.location = nn.Parameter(torch.empty_like(self.gain))
        self.log_scale = nn.Parameter(torch.empty_like(self.gain))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the networks anew; z starts as its prior."""
        self._reset_networks(self._seeded())
        with torch.no_grad():
            self.location.zero_()
            self.log_scale.fill_(math.log(self.prior_scale))

    def forward(
        self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns w1 and w2 [H, d, M], which do not depend on the input, and the regulariser."""
        with self.without_autocast():
            shape = (self.num_heads, self.head_dim)
            location, log_scale = self.location.view(shape), self.log_scale.view(shape)
            z = self.about_halves(location) + log_scale.exp().unsqueeze(-1) * self.noise()
            divergence = gaussian_kl(location, log_scale, self.prior_scale).sum()
            return *self.to_frequencies(z), self.kl_weight * divergence
