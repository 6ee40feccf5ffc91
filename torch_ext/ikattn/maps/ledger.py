"""The ledger of a layer: which factor of a contribution makes a token influential.

Symbols: B batch, H heads, L queries, S keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ikattn._memory import takes_memory_for
from ikattn.maps.contribution_maps import Contributions
from ikattn.maps.summary import without_padding

# Logarithms whose root mean square is below this many units in the last place of the ledger's dtype
# are rounding, not variation. A weight carries the rounding of a softmax, a few tens of units.
ROUNDING_ULPS = 64


@dataclass(frozen=True)
class LedgerFactors:
    """One number, or tensor of them, for each factor of a contribution.

    Attributes:
        similarity: Of query and key.
        magnitude: Of the key.
        value_norm: ``|f_h(x_j)|``.
        bias: What else is in the weight and not the same for the whole row: a float mask, a key
            bias, a position bias. 0 where there is none.
    """

    similarity: Tensor
    magnitude: Tensor
    value_norm: Tensor
    bias: Tensor

    def total(self) -> Tensor:
        """The sum of the four."""
        return self.similarity + self.magnitude + self.value_norm + self.bias


@dataclass(frozen=True)
class LedgerShares:
    """Shares of factors in the contributions of tokens. See :func:`ledger_shares`.

    Attributes:
        per_head: Shares ``[B, H]`` of all that varies in a head.
        per_token: Shares ``[B, S]`` of what a key's contributions deviate, all heads together.
        per_head_and_token: Shares ``[B, H, S]`` of what they deviate in a head.
        deviation: ``[B, H, S]``, the mean logarithm of how much larger each factor of a key is than
            the geometric mean of its row; the four add up to ``influence``.
        influence: ``[B, H, S]``, the same of the contribution: ``exp`` of it is how many times the
            geometric mean of its row a key contributes.
        variance: ``[B, H]``, the variance of the logarithm of the contribution within rows.
        pairs: int64 ``[B, H]``, how many pairs were counted.
        left_out: int64 ``[B, H]``, how many more have a weight, but a factor that is 0, subnormal,
            infinite or NaN, mostly because similarity or magnitude left the range of their dtype.
    """

    per_head: LedgerFactors
    per_token: LedgerFactors
    per_head_and_token: LedgerFactors
    deviation: LedgerFactors
    influence: Tensor
    variance: Tensor
    pairs: Tensor
    left_out: Tensor


@takes_memory_for("the factors of every pair and head")
def ledger_shares(contributions: Contributions) -> LedgerShares:
    r"""Shares of similarity, key magnitude and value norm in what tokens contribute.

    A contribution is a product, so its logarithm is a sum:

    .. math::
        \log c_{ij} = \log s_{ij} + \log m_j + \log n_j + b_{ij} - \log Z_i

    with similarity s, magnitude m, value norm n, bias b and row sum Z. Let :math:`\delta` be the
    deviation of a logarithm from its mean over the keys that query i sees: Z, the same for the
    whole row, is gone, and :math:`\delta c = \delta s + \delta m + \delta n + \delta b`, exactly.

    **Shares** split the variance of :math:`\log c` within rows. That of factor x, over a set of
    pairs (those of a head, of a key, of a key in a head), is

    .. math::
        \text{share}_x = \sum_{ij} \delta x_{ij}\, \delta c_{ij} \Big/ \sum_{ij} \delta c_{ij}^2 .

    The four add up to 1. Over a head this is covariance over variance, the Shapley value of each
    factor in the variance of their sum: no order of taking factors out is preferred. A share is
    negative where a factor works against the others, and then another one exceeds 1. A head's share
    is the mean of its tokens', weighted by how much they deviate. No factor's unit matters: shares
    stay the same if all magnitudes, or all value norms, or a query's similarities, are scaled.

    **Deviations** are signed: the mean of :math:`\delta x_{ij}` over the queries that see key j.
    The four add up to that of c, the key's influence.

    Pairs that are masked, padded or have weight 0 do not count. Where nothing varies (one visible
    key per row, or deviations within the rounding of the arrays) there is nothing to share: shares
    are 0. A key that no query sees has shares, deviations and influence 0. Computed in float64,
    without gradient.

    Args:
        contributions: With weights and similarity ``[B, H, L, S]``, magnitude and value_norms
            ``[B, H, S]``: one layer of a recording that keeps the ledger.

    Returns:
        A :class:`LedgerShares`, float64.

    Raises:
        ValueError: One of the four is missing, or their shapes do not fit together.

    Source: the product is that of K. Song et al., "Implicit Kernel Attention", AAAI 2021, and
    G. Kobayashi et al., "Attention is Not Only a Weight", EMNLP 2020; the split of its logarithm
    was derived for this project.

    Example:
        >>> import torch, ikattn
        >>> from ikattn.maps.ledger import ledger_shares
        >>> from ikattn.maps import Contributions
        >>> q, k = torch.randn(2, 1, 2, 6, 8, dtype=torch.float64)
        >>> similarity, magnitude = ikattn.ops.similarity_and_magnitude(q, k)
        >>> weights = (q @ k.mT / 8**0.5).softmax(-1)
        >>> ledger = Contributions(
        ...     weights=weights, similarity=similarity, magnitude=magnitude,
        ...     value_norms=torch.rand(1, 2, 6) + 0.1,
        ... )
        >>> shares = ledger_shares(ledger)
        >>> bool((shares.per_head.total() - 1).abs().max() < 1e-12)
        True
    """
    logs, visible, left_out, eps = _log_ledger(contributions)
    count = visible.sum(-1, keepdim=True).clamp_min(1)

    def deviations(x: Tensor) -> Tensor:
        """Returns deviations from the row's mean over visible keys, 0 elsewhere: [B, H, L, S]."""
        x = x.masked_fill(~visible, 0)
        return (x - x.sum(-1, keepdim=True) / count).masked_fill(~visible, 0)

    of_factors = {name: deviations(x) for name, x in logs.items()}
    total = sum(of_factors.values(), torch.zeros_like(of_factors["bias"]))
    # Sums over queries, [B, H, S]; over all else they are sums of these.
    seen_by = visible.sum(-2)
    energy = total.square().sum(-2)
    covariance = {name: (x * total).sum(-2) for name, x in of_factors.items()}
    rounding = (ROUNDING_ULPS * eps) ** 2

    def shares(over: int | None) -> LedgerFactors:
        pairs, below = seen_by, energy
        if over is not None:
            pairs, below = pairs.sum(over), below.sum(over)
        varies = below > rounding * pairs
        divisor = torch.where(varies, below, 1)

        def share(x: Tensor) -> Tensor:
            above = x if over is None else x.sum(over)
            return torch.where(varies, above / divisor, 0)

        return LedgerFactors(**{name: share(x) for name, x in covariance.items()})

    deviation = {name: x.sum(-2) / seen_by.clamp_min(1) for name, x in of_factors.items()}
    pairs = seen_by.sum(-1)
    return LedgerShares(
        per_head=shares(-1),
        per_token=shares(1),
        per_head_and_token=shares(None),
        deviation=LedgerFactors(**deviation),
        influence=total.sum(-2) / seen_by.clamp_min(1),
        variance=energy.sum(-1) / pairs.clamp_min(1),
        pairs=pairs,
        left_out=left_out,
    )


def _log_ledger(
    contributions: Contributions,
) -> tuple[dict[str, Tensor], Tensor, Tensor, float]:
    """The logarithms of the factors, float64, the bias with -log Z_i in it; which pairs count.

    Returns logs [B, H, L, S] (anything where not visible), visible [B, H, L, S], the number of
    pairs left out [B, H], and eps of the coarsest dtype.
    """
    weights, similarity, magnitude, value_norms = _checked_ledger(contributions)
    eps = max(torch.finfo(x.dtype).eps for x in (weights, similarity, magnitude, value_norms))
    weights = without_padding(
        weights, contributions.query_padding, contributions.key_padding, "ledger_shares"
    )
    of_keys = _in_range(magnitude) & _in_range(value_norms)
    has_weight = weights != 0
    visible = _in_range(weights) & _in_range(similarity) & of_keys.unsqueeze(-2)
    weights, similarity, magnitude, value_norms = (
        x.detach().double() for x in (weights, similarity, magnitude, value_norms)
    )
    logs = {
        "similarity": similarity.log(),
        "magnitude": magnitude.log().unsqueeze(-2).expand_as(weights),
        "value_norm": value_norms.log().unsqueeze(-2).expand_as(weights),
    }
    logs["bias"] = weights.log() - logs["similarity"] - logs["magnitude"]
    return logs, visible, (has_weight & ~visible).sum((-1, -2)), eps


def _in_range(factor: Tensor) -> Tensor:
    """Tells which entries have an exact logarithm: subnormal numbers have lost their digits."""
    return (factor >= torch.finfo(factor.dtype).tiny) & factor.isfinite()


def _checked_ledger(contributions: Contributions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """weights, similarity, magnitude and value norms, if they are there and fit."""
    weights = contributions.weights
    if weights is None or weights.dim() != 4:
        raise ValueError(
            "ledger_shares: contributions.weights must have shape [B, H, L, S], "
            f"got {None if weights is None else list(weights.shape)}"
        )
    B, H, L, S = weights.shape
    found = [weights]
    for name, shape in (
        ("similarity", [B, H, L, S]),
        ("magnitude", [B, H, S]),
        ("value_norms", [B, H, S]),
    ):
        factor: Tensor | None = getattr(contributions, name)
        if factor is None or list(factor.shape) != shape:
            raise ValueError(
                f"ledger_shares: contributions.{name} must have shape {shape} as its weights do, "
                f"got {None if factor is None else list(factor.shape)}"
                + (": record with the ledger" if factor is None else "")
            )
        found.append(factor)
    return found[0], found[1], found[2], found[3]
