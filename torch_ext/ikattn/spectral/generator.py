"""The base of generators of frequencies: sizes, noise, and fixed points for evaluation."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import Any, Literal, TypedDict, get_args

import torch
from torch import Tensor, nn

from ikattn.spectral.direct import Sized, unit_angle_scale
from ikattn.spectral.networks import OddNetwork

Evaluation = Literal["points", "mean", "random"]
EVALUATIONS = get_args(Evaluation)

_POINTS_SEED = 2021  # any: the points are the same in every module and process


class GeneratorOptions(TypedDict, total=False):
    """The options that all generators have."""

    stationary: bool
    evaluation: Evaluation
    prior_scale: float
    kl_weight: float
    seed: int | None
    device: torch.device | str | int | None
    dtype: torch.dtype | None


class Generator(Sized):
    """A base of generators: networks of noise z, half of it about +location, half about -location.

    The halves are drawn independently. Were the second the mirror image of the first, w would be
    mirrored too, and s(q, k), which does not change when w1 and w2 both change sign, would be a
    mean over M / 2 frequencies instead of M.

    Args:
        num_heads: H.
        head_dim: d, the head size of query and key.
        num_frequencies: M, per head; even.
        stationary: One network, w2 = w1, in place of two.
        evaluation: Noise in eval mode. "points": fixed draws, the same in every module. "mean":
            none, so z is +-location. "random": as in training.
        prior_scale: Standard deviation of the prior of z, N(0, prior_scale^2).
        kl_weight: Weight of the KL divergence from the prior in the regulariser.
        seed: If given, initial values are a function of it alone.
        device, dtype: Of the parameters.

    Raises:
        ValueError: An option is out of range.
    """

    regularizes = True

    # No buffer: loaders that make models on meta fill those that are in no checkpoint with anything
    points: Tensor
    network2: OddNetwork | None

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_frequencies: int,
        *,
        stationary: bool = False,
        evaluation: Evaluation = "points",
        prior_scale: float = 1.0,
        kl_weight: float = 0.1,
        seed: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, num_frequencies, seed)
        if num_frequencies % 2:
            raise ValueError(
                f"num_frequencies must be even and at least 2, one half each for +z and -z, got "
                f"{num_frequencies}"
            )
        if not _is_finite(prior_scale) or prior_scale <= 0:
            raise ValueError(f"prior_scale must be positive, got {prior_scale!r}")
        check_weight("kl_weight", kl_weight)
        self.evaluation = evaluation
        self.prior_scale = prior_scale
        self.kl_weight = kl_weight
        networks = [
            OddNetwork(head_dim, device, dtype, self._seeded()) for _ in range(2 - stationary)
        ]
        self.network1 = networks[0]
        self.network2 = None if stationary else networks[1]
        self.gain = nn.Parameter(torch.empty(num_heads * head_dim, device=device, dtype=dtype))
        self._fill_points()

    @property
    def stationary(self) -> bool:
        """Whether there is no second network."""
        return self.network2 is None

    @property
    def evaluation(self) -> Evaluation:
        """The noise in eval mode, "points", "mean" or "random"."""
        return self._evaluation

    @evaluation.setter
    def evaluation(self, evaluation: Evaluation) -> None:
        if evaluation not in EVALUATIONS:
            raise ValueError(f"evaluation must be one of {EVALUATIONS}, got {evaluation!r}")
        self._evaluation: Evaluation = evaluation

    def _reset_networks(self, generator: torch.Generator | None, published: bool = False) -> None:
        for network in (self.network1, self.network2):
            if network is not None:
                network.reset_parameters(generator, published=published)
        with torch.no_grad():
            self.gain.fill_(1.0 if published else unit_angle_scale(self.head_dim))

    def _fill_points(self) -> None:
        """Makes the points, in float64, for the device and type of the parameters.

        Pseudo-random: scrambled Sobol points, as many as frequencies, evaluated no better.
        """
        points = torch.empty(self._shape, dtype=torch.float64, device="cpu")
        if not self.gain.is_meta:
            points.normal_(generator=torch.Generator().manual_seed(_POINTS_SEED))
        self.points = points.to(device=self.gain.device, dtype=self.gain.dtype)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Moves the module, and the points with it."""
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._fill_points()
        return self

    def _seeded(self) -> torch.Generator | None:
        return None if self.seed is None else torch.Generator().manual_seed(self.seed)

    def noise(self, *batch: int) -> Tensor:
        """Draws standard normal noise ``[*batch, H, d, M]``; in eval mode, the fixed points."""
        dtype, device = self.gain.dtype, self.gain.device
        if self.training or self.evaluation == "random":
            drawn = torch.randn((*batch, *self._shape), dtype=dtype, device=device)
            return drawn if self.head_share is None else self.head_share.agreed(drawn)
        if self.evaluation == "mean":
            return torch.zeros(self._shape, dtype=dtype, device=device)
        # Parameters change without _apply: by load_state_dict(assign=True), functional_call, FSDP.
        if (self.points.dtype, self.points.device) != (dtype, device):
            if torch.compiler.is_compiling():
                return self.points.to(dtype=dtype, device=device)
            self._fill_points()
        return self.points

    def about_halves(self, location: Tensor) -> Tensor:
        """Turns locations [..., H, d] into those of every z, [..., H, d, M]: +, then -."""
        is_first = torch.arange(self.num_frequencies, device=location.device)
        is_first = is_first < self.num_frequencies // 2
        return location.unsqueeze(-1) * torch.where(is_first, 1.0, -1.0).to(location.dtype)

    def without_autocast(self) -> AbstractContextManager[None]:
        """Opens a context in which networks keep their type; the meta device has no autocast."""
        device = self.gain.device.type
        return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)

    def to_frequencies(self, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """Maps z [..., H, d, M] to w1 and w2 (None if stationary) of that shape."""
        gain = self.gain.view(self.num_heads, self.head_dim, 1)
        w1 = gain * self.network1(z)
        return w1, None if self.network2 is None else gain * self.network2(z)

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, "
            f"num_frequencies={self.num_frequencies}, evaluation={self.evaluation!r}"
        )


def check_weight(name: str, weight: float) -> None:
    """Raises ValueError for a weight of the regulariser that is negative or not finite."""
    if not _is_finite(weight) or weight < 0:
        raise ValueError(f"{name} must be a number >= 0, got {weight!r}")


def _is_finite(number: Any) -> bool:
    return isinstance(number, Real) and math.isfinite(number)
