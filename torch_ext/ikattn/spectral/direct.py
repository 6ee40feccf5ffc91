"""Frequencies that are parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Direct(nn.Module):
    """Frequencies that are parameters: the paper's direct spectral density.

    The parameters ``w1`` and ``w2`` are stored flat, [H * d * M] in the order [H, d, M]. Code that
    initialises again every parameter with more than one axis (nn.Transformer, DETR and many models)
    would give frequencies of shape [H, d, M] another scale; it leaves flat ones alone. So do
    optimisers that decay, or orthogonalise, everything with more than one axis.

    Args:
        num_heads: H.
        head_dim: d, the head size of query and key.
        num_frequencies: M, per head.
        stationary: One set of frequencies, w2 = w1 (Bochner), in place of two (Yaglom).
        seed: If given, the initial frequencies are a function of it alone: the same on every device
            and, to rounding, in every dtype. Nothing is drawn from torch's default generator then.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ValueError: num_frequencies is less than 1.

    Source: K. Song, Y. Jung, D. Kim, I. Moon, "Implicit Kernel Attention", AAAI 2021
    (arXiv 2006.06147); the initial distribution is that of the authors' code.

    Example:
        >>> from ikattn.spectral import Direct
        >>> w1, w2 = Direct(num_heads=2, head_dim=4, num_frequencies=8).frequencies()
        >>> w1.shape, w2.shape
        (torch.Size([2, 4, 8]), torch.Size([2, 4, 8]))
    """

    w1: nn.Parameter
    w2: nn.Parameter | None

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_frequencies: int,
        *,
        stationary: bool = False,
        seed: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_frequencies < 1:
            raise ValueError(f"num_frequencies must be at least 1, got {num_frequencies}")
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_frequencies = num_frequencies
        self.seed = seed
        size = num_heads * head_dim * num_frequencies
        self.w1 = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        if stationary:
            self.register_parameter("w2", None)
        else:
            self.w2 = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    @property
    def stationary(self) -> bool:
        """Whether there is no w2."""
        return self.w2 is None

    def reset_parameters(self) -> None:
        """Draws the frequencies anew from U(-1/sqrt(H M), 1/sqrt(H M))."""
        bound = (self.num_heads * self.num_frequencies) ** -0.5
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        for parameter in self.parameters():
            fill_uniform(parameter, bound, generator)

    def frequencies(self) -> tuple[Tensor, Tensor | None]:
        """Returns w1 and w2 (None if stationary) as views of shape [H, d, M]."""
        shape = (self.num_heads, self.head_dim, self.num_frequencies)
        return self.w1.view(shape), None if self.w2 is None else self.w2.view(shape)

    def forward(
        self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns w1 and w2 of shape [H, d, M]; they do not depend on the input."""
        return self.frequencies()

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, "
            f"num_frequencies={self.num_frequencies}, stationary={self.stationary}"
        )


class Stationary(Direct):
    """Frequencies that are parameters, of a stationary kernel: w2 = w1 (Bochner).

    The parameter is ``w1`` alone, [H * d * M]; ``Direct(..., stationary=True)`` is the same.

    Args:
        num_heads, head_dim, num_frequencies, seed, device, dtype: As for ``Direct``.

    Raises:
        ValueError: num_frequencies is less than 1.

    Source: K. Song, Y. Jung, D. Kim, I. Moon, "Implicit Kernel Attention", AAAI 2021
    (arXiv 2006.06147).

    Example:
        >>> from ikattn.spectral import Stationary
        >>> w1, w2 = Stationary(num_heads=2, head_dim=4, num_frequencies=8).frequencies()
        >>> w1.shape, w2
        (torch.Size([2, 4, 8]), None)
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_frequencies: int,
        *,
        seed: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_heads,
            head_dim,
            num_frequencies,
            stationary=True,
            seed=seed,
            device=device,
            dtype=dtype,
        )


@torch.no_grad()
def fill_uniform(parameter: Tensor, bound: float, generator: torch.Generator | None) -> None:
    """Draws from U(-bound, bound); a generator gives every device and dtype the same numbers."""
    if generator is None:
        parameter.uniform_(-bound, bound)
    else:  # drawn on the CPU in float64, so that device and dtype change nothing
        drawn = torch.empty(parameter.shape, dtype=torch.float64, device="cpu")
        parameter.copy_(drawn.uniform_(-bound, bound, generator=generator))
