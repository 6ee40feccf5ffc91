"""Frequencies that are parameters."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any, Literal, TypedDict, get_args

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ikattn._heads import HeadShare, local, whole

Initial = Literal["paper", "unit angle"]


def unit_angle_scale(head_dim: int) -> float:
    """Returns the deviation of frequencies with which kernels start best, 1 / (2 pi sqrt(d)).

    The angle 2 pi x.w of a token is then as large as x's root mean square, in radians, at every
    head size. docs/guide/spectral.md compares it with others.
    """
    return 1 / (2 * math.pi * math.sqrt(head_dim))


def checked_size(name: str, size: int) -> int:
    """Returns a size as an int, whatever integer it was given as."""
    if not isinstance(size, Integral) or size < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {size!r}")
    return int(size)


def checked_seed(seed: int | None) -> int | None:
    """Returns a seed as an int, whatever integer it was given as."""
    if seed is None:
        return None
    if not isinstance(seed, Integral) or not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must be an integer of 64 bits or None, got {seed!r}")
    return int(seed)


class Sized(nn.Module):
    """A base of sources: H heads of size d, M frequencies for each, and a seed.

    Raises:
        ValueError: A size is no integer or less than 1, or seed no integer of 64 bits.
    """

    head_share: HeadShare | None = None  # the heads of this rank, where ranks share them out

    def __init__(
        self, num_heads: int, head_dim: int, num_frequencies: int, seed: int | None
    ) -> None:
        super().__init__()
        self.num_heads = checked_size("num_heads", num_heads)
        self.head_dim = checked_size("head_dim", head_dim)
        self.num_frequencies = checked_size("num_frequencies", num_frequencies)
        self.seed = checked_seed(seed)

    @property
    def _shape(self) -> tuple[int, int, int]:
        """H, d and M."""
        return self.num_heads, self.head_dim, self.num_frequencies


class Direct(Sized):
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
        initial: "paper": from U(-1/sqrt(HM), 1/sqrt(HM)), as the authors. "unit angle": uniform
            with standard deviation 1 / (2 pi sqrt(d)); docs/guide/spectral.md compares them.
        seed: If given, the initial frequencies are a function of it alone: the same on every device
            and, to rounding, in every dtype. Nothing is drawn from torch's default generator then.
        device, dtype: Of the parameters.

    Raises:
        ValueError: A size is less than 1, initial is unknown, or seed no integer of 64 bits.

    Source: K. Song et al., "Implicit Kernel Attention", AAAI 2021; the initial distribution
    is that of the authors' code.

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
        initial: Initial = "paper",
        seed: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, num_frequencies, seed)
        if initial not in get_args(Initial):
            raise ValueError(f"initial must be one of {get_args(Initial)}, got {initial!r}")
        self.initial = initial
        size = math.prod(self._shape)
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
        """Draws the frequencies anew."""
        bound = (self.num_heads * self.num_frequencies) ** -0.5
        if self.initial == "unit angle":
            bound = math.sqrt(3) * unit_angle_scale(self.head_dim)
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        for parameter in self.parameters():
            with whole(parameter) as values:
                fill_uniform(values, bound, generator)

    def frequencies(self) -> tuple[Tensor, Tensor | None]:
        """Returns w1 and w2 (None if stationary) as views of shape [H, d, M].

        H is the number of this rank's heads where tensor parallelism shares them out.
        """
        heads = self.num_heads if self.head_share is None else self.head_share.own_heads
        shape = (heads, self.head_dim, self.num_frequencies)
        return local(self.w1).view(shape), None if self.w2 is None else local(self.w2).view(shape)

    def forward(
        self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns w1 and w2 of shape [H, d, M]; they do not depend on the input."""
        w1, w2 = self.frequencies()
        is_recorded = torch.compiler.is_compiling() or torch._C._is_tracing()
        # detach() would end forward-mode differentiation
        has_duals = torch.autograd.forward_ad._current_level >= 0
        if is_recorded or torch.is_grad_enabled() or has_duals:
            return w1, w2
        # Views of parameters require grad even here, without a gradient function, which hooks on
        # modules (torch's ModuleTracker) take for an error.
        return w1.detach(), None if w2 is None else w2.detach()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Notes [H, d, M] in the metadata: flat frequencies look the same for any H."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if metadata is not None:
            metadata["shape"] = list(self._shape)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *lists: Any
    ) -> None:
        # other tools' checkpoints have no metadata; where w1 was taken out, it tells nothing
        shape, w1 = local_metadata.get("shape", self._shape), state_dict.get(f"{prefix}w1")
        if w1 is not None and w1.numel() == math.prod(shape) and tuple(shape) != self._shape:
            lists[-1].append(  # of errors
                f"size mismatch for {prefix}w1: copying frequencies of shape [H, d, M] = "
                f"{list(shape)}, H the number of heads, from checkpoint, the shape in current "
                f"model is {list(self._shape)}."
            )
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *lists)

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, "
            f"num_frequencies={self.num_frequencies}, stationary={self.stationary}"
        )


class _Options(TypedDict, total=False):
    initial: Initial
    seed: int | None
    device: torch.device | str | int | None
    dtype: torch.dtype | None


class Stationary(Direct):
    """Frequencies that are parameters, of a stationary kernel: w2 = w1 (Bochner).

    The parameter is ``w1`` alone, [H * d * M]; ``Direct(..., stationary=True)`` is the same.

    Args:
        num_heads, head_dim, num_frequencies, initial, seed, device, dtype: As for ``Direct``.

    Raises:
        ValueError: As ``Direct``.

    Source: K. Song et al., "Implicit Kernel Attention", AAAI 2021 (arXiv 2006.06147).

    Example:
        >>> from ikattn.spectral import Stationary
        >>> w1, w2 = Stationary(num_heads=2, head_dim=4, num_frequencies=8).frequencies()
        >>> w1.shape, w2
        (torch.Size([2, 4, 8]), None)
    """

    def __init__(
        self, num_heads: int, head_dim: int, num_frequencies: int, **options: Unpack[_Options]
    ) -> None:
        super().__init__(num_heads, head_dim, num_frequencies, stationary=True, **options)


@torch.no_grad()
def fill_uniform(parameter: Tensor, bound: float, generator: torch.Generator | None) -> None:
    """Draws from U(-bound, bound); a generator gives every device and dtype the same numbers."""
    if generator is None:
        parameter.uniform_(-bound, bound)
    else:  # drawn on the CPU in float64, so that device and dtype change nothing
        drawn = torch.empty(parameter.shape, dtype=torch.float64, device="cpu")
        parameter.copy_(drawn.uniform_(-bound, bound, generator=generator))
