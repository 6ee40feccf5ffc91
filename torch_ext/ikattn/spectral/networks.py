"""The networks of the generators, whose parameters are stored flat, as those of ``Direct``."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from ikattn._heads import whole
from ikattn.spectral.direct import fill_uniform

SLOPE = 0.2  # slope of the leaky rectifiers, the authors'


class OddNetwork(nn.Module):
    """Three layers that map noise z to frequencies, odd in z: w = sign(z) net(|z|).

    Because w(-z) = -w(z), noise with a symmetric density gives frequencies with one. All layers are
    of size d. A generator of initial values is on the CPU.

    Source: "Implicit Kernel Attention", AAAI 2021; ``WNet`` of the authors' code.
    """

    def __init__(
        self,
        size: int,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.size = size
        self.weights = nn.Parameter(torch.empty(3 * size * size, device=device, dtype=dtype))
        self.biases = nn.Parameter(torch.empty(3 * size, device=device, dtype=dtype))
        self.reset_parameters(generator)

    def reset_parameters(
        self, generator: torch.Generator | None = None, *, published: bool = False
    ) -> None:
        """Draws weights that keep the mean square of standard normal z; biases become zero.

        Published ones are from U(-1/sqrt(d), 1/sqrt(d)), as in the authors' code, where the output
        is about a tenth as large as z.
        """
        bound = 1 / math.sqrt(self.size)
        bounds = [bound] * 3
        if not published:
            linear = math.sqrt(3) * bound
            rectified = linear * math.sqrt(2 / (1 + SLOPE**2))  # He et al., 2015
            bounds = [rectified, rectified, linear]
        with whole(self.weights) as weights:
            for weight, bound in zip(weights.chunk(3), bounds, strict=True):
                fill_uniform(weight, bound, generator)
        with torch.no_grad():
            self.biases.zero_()

    def forward(self, z: Tensor) -> Tensor:
        """Maps [..., d, M] to [..., d, M]."""
        weights = self.weights.view(3, self.size, self.size)
        biases = self.biases.view(3, self.size, 1)
        hidden = leaky_relu(weights[0] @ z.abs() + biases[0], SLOPE)
        hidden = leaky_relu(weights[1] @ hidden + biases[1], SLOPE)
        return z.sign() * (weights[2] @ hidden + biases[2])


class PosteriorNetwork(nn.Module):
    """Maps what was pooled from a head's queries and keys to the parameters of that head's noise.

    Source: "Implicit Kernel Attention", AAAI 2021; ``CopulaNet`` of the authors' code.
    """

    def __init__(
        self,
        inputs: int,
        size: int,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.inputs, self.size = inputs, size
        count = size * inputs + 3 * size * size
        self.weights = nn.Parameter(torch.empty(count, device=device, dtype=dtype))
        self.biases = nn.Parameter(torch.empty(4 * size, device=device, dtype=dtype))

    def reset_parameters(
        self,
        generator: torch.Generator | None = None,
        *,
        copula_bias: float = 0.0,
        published: bool = False,
    ) -> None:
        """Draws weights from U(-1/sqrt(d), 1/sqrt(d)); those of location and log scale become zero.

        So the noise starts as its prior, whatever the mean of the tokens, and the kernel as wide as
        that makes it. The authors' code (``published``) leaves the drawn weights everywhere.
        """
        size = self.size
        with whole(self.weights) as weights:
            fill_uniform(weights, 1 / math.sqrt(size), generator)
            if not published:
                weights[size * self.inputs :][: 2 * size * size].zero_()
        with whole(self.biases) as biases:
            biases.zero_()
            biases[3 * size :].fill_(copula_bias)

    def forward(self, pooled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps [B, H, inputs] to location, log scale, copula vector in (-1, 1): each [B, H, d]."""
        size = self.size
        first, rest = self.weights.split([size * self.inputs, 3 * size * size])
        of_hidden, of_outputs = self.biases.split([size, 3 * size])
        hidden = leaky_relu(pooled @ first.view(size, self.inputs).mT + of_hidden, SLOPE)
        outputs = hidden @ rest.view(3 * size, size).mT + of_outputs
        location, log_scale, copula = outputs.chunk(3, dim=-1)
        return location, log_scale, copula.tanh()
