"""The magnitude of keys, with a given and with a learned order of the norm."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from ikattn._heads import HeadShare, local
from ikattn._precision import widened


def check_order(function: str, p: object) -> None:
    """Raises ValueError unless p is an order of a norm, or None."""
    if p is None or (isinstance(p, Real) and 1 <= float(p) < math.inf):
        return
    raise ValueError(f"{function}: p must be a finite number >= 1 or None, got {p}")


def log_magnitude(key: Tensor, p: float | None, scale: float | None = None) -> Tensor:
    """Computes g = scale ``|k|_p^2`` of keys [.., d]; 0 for p = None.

    Without a scale it is 1 / (2 sqrt d).
    """
    if p is None:
        return key.new_zeros(key.shape[:-1])
    norm: Tensor
    if p in (1.0, 2.0) or key.size(-1) == 0:
        norm = torch.linalg.vector_norm(key, p, dim=-1)
    else:  # over the largest element, a constant, powers stay in range
        largest = key.detach().abs().amax(-1, keepdim=True)
        unit = torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))
        norm = torch.linalg.vector_norm(key / unit, p, dim=-1) * unit.squeeze(-1)
    return norm.square() * (1 / (2 * math.sqrt(key.size(-1))) if scale is None else scale)


class LearnedOrder(nn.Module):
    """The magnitude g = |k|_p^2 / (2 sqrt d) of keys with a learned order p per head.

    p = 1 + softplus(raw): always above 1, where it is a norm. |0|_p has gradient 0.

    Args:
        num_heads: H.
        p: The first order, above 1.
        device, dtype: Of the parameter.

    Raises:
        ValueError: p <= 1.

    Source: K. Song et al., "Implicit Kernel Attention", AAAI 2021, where p is chosen by hand.

    Example:
        >>> import torch
        >>> from ikattn.ops.magnitude import LearnedOrder
        >>> magnitude = LearnedOrder(num_heads=2)
        >>> magnitude.p
        tensor([2., 2.], grad_fn=<AddBackward0>)
        >>> magnitude(torch.randn(3, 2, 10, 4)).shape
        torch.Size([3, 2, 10])
    """

    head_share: HeadShare | None = None  # the heads of this rank, where raw is sharded

    def __init__(
        self,
        num_heads: int,
        p: float = 2.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 < p < math.inf:
            raise ValueError(f"the first value of a learned p must be above 1, got {p}")
        self.first = p
        self.raw = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    @property
    def p(self) -> Tensor:
        """The orders, [H]; of this rank's heads where tensor parallelism shares them out."""
        return 1 + softplus(self.raw if self.head_share is None else local(self.raw))

    def reset_parameters(self) -> None:
        """Makes every order the first one again."""
        with torch.no_grad():
            self.raw.fill_(math.log(math.expm1(self.first - 1)))

    def forward(self, key: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Computes g [B, H, S], in float32 at least, of keys [B, H, S, d].

        Hidden keys, bool [B, S], have g = 0, whatever they hold, even NaN.
        """
        wide = widened(key)
        if hidden is not None:
            wide = wide.masked_fill(hidden[:, None, :, None], 0.0)
        p = self.p.to(wide.dtype)[:, None]
        logarithm, empty = _log_of_powers(wide, p)
        squared = (2 / p * logarithm).exp()
        return squared.masked_fill(empty, 0.0) / (2 * math.sqrt(key.size(-1)))

    def of_edges(self, target: Tensor, source: Tensor, to: Tensor, of: Tensor) -> Tensor:
        """Computes g of the concatenations [target || source] of edges, without making any.

        Targets are [N_q, H, d], sources [N_k, H, d], and ``to`` and ``of`` [E] say which of them
        each edge has. The result [E, H] is in float32 at least.
        """
        p = self.p.to(target.dtype if target.dtype == torch.float64 else torch.float32)
        logarithms, empties = [], []
        for nodes, index in ((target, to), (source, of)):
            logarithm, empty = _log_of_powers(nodes.to(p.dtype), p)
            logarithms.append(logarithm.masked_fill(empty, -math.inf).index_select(0, index))
            empties.append(empty.index_select(0, index))
        both = empties[0] & empties[1]
        logarithm = torch.logaddexp(*(x.masked_fill(both, 0.0) for x in logarithms))
        squared = (2 / p * logarithm).exp().masked_fill(both, 0.0)
        return squared / (2 * math.sqrt(2 * target.size(-1)))

    def extra_repr(self) -> str:
        return f"num_heads={self.raw.numel()}"


def _log_of_powers(x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Computes log sum |x|^p over the last axis, and where x is zero, with ones in its place.

    |x|_p = exp(log / p) does not overflow so. Zeros are selected away; p is broadcast to [..].
    """
    zero = x == 0
    empty = zero.all(-1, keepdim=True)
    logarithms = x.abs().masked_fill(zero, 1.0).log()
    powers = (p.unsqueeze(-1) * logarithms).masked_fill(zero & ~empty, -math.inf)
    return powers.logsumexp(-1), empty.squeeze(-1)
