"""Frequencies from noise, joint over heads, whose distribution is inferred from the input."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from ikattn.spectral.copula import correlation_factor, gaussian_kl, mutual_information
from ikattn.spectral.generator import Generator, GeneratorOptions, check_weight
from ikattn.spectral.networks import PosteriorNetwork
from ikattn.spectral.published import published_noise

# Off-diagonals of the factor before its rows are normalised are REACH tanh(a_h) tanh(a_h'): two
# heads can then correlate by up to 0.97; the authors' factor of 1 stops at 0.71.
REACH = 4.0
# tanh(0.3)^2 * REACH = 0.34: heads start out correlated by about 0.3. At 0, where the authors' code
# starts, the gradient of the correlations vanishes.
COPULA_BIAS = 0.3


class Mikan(Generator):
    """Frequencies of every head from noise that depends on the input, joint over heads by a copula.

    Queries and keys are averaged over their positions, padding left out, and a network gives each
    sample, head and dimension the location and scale of a Gaussian z, and each sample and dimension
    a correlation matrix R = L L^T of the heads, with unit diagonal. Then x = L e with e standard
    normal, u = Phi(x) is uniform in every head and has the Gaussian copula of R, and z = location +
    scale Phi^-1(u). As Phi^-1(Phi(x)) = x, the code goes from x to z directly, which keeps the
    tails. One half of the z has location, the other -location; networks odd in z make w1 and w2 of
    it. docs/guide/spectral.md has the regulariser: sums over heads and dimensions, in nats, and
    means over samples.

    It averages over whole sequences: causal attention raises an error. In the cross-attention of a
    decoder that must not look ahead, use ``pool="key"``.

    Args:
        num_heads, head_dim, num_frequencies, options: As for ``Generator``; ``kl_weight`` is the
            authors'.
        pool: "both": average queries and keys. "key": keys alone.
        copula_weight: Weight of the copula in the regulariser; the authors'.
        faithful: None, or "code": compute what the authors' code computes, draw for draw, its
            faults included: one sample only, no padding masks, heads not correlated, random in eval
            mode. docs/guide/spectral.md lists them. ``prior_scale`` is then its ``prior_var``, 0.1
            by default.

    Raises:
        ValueError: num_frequencies is odd, or another option is out of range.

    Source: K. Song et al., "Implicit Kernel Attention", AAAI 2021 (arXiv 2006.06147), MIKAN.

    Example:
        >>> import torch
        >>> from ikattn.spectral import Mikan
        >>> q = k = torch.randn(3, 2, 10, 4)
        >>> w1, w2, regularization = Mikan(num_heads=2, head_dim=4, num_frequencies=8)(q, k, None)
        >>> w1.shape, regularization.shape
        (torch.Size([3, 2, 4, 8]), torch.Size([]))
    """

    pools = True

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_frequencies: int,
        *,
        pool: Literal["both", "key"] = "both",
        copula_weight: float = 1.0,
        faithful: Literal["code"] | None = None,
        **options: Unpack[GeneratorOptions],
    ) -> None:
        if pool not in ("both", "key"):
            raise ValueError(f"pool must be 'both' or 'key', got {pool!r}")
        if faithful not in (None, "code"):
            raise ValueError(f"faithful must be None or 'code', got {faithful!r}")
        if faithful and (pool != "both" or options.get("stationary")):
            raise ValueError("faithful='code' needs pool='both' and stationary=False")
        if faithful and options.get("evaluation", "points") != "points":
            raise ValueError(
                "faithful='code' draws in evaluation as in training, and takes no other "
                f"evaluation, got {options['evaluation']!r}"
            )
        check_weight("copula_weight", copula_weight)
        if faithful:
            options.setdefault("prior_scale", 0.1)
        super().__init__(num_heads, head_dim, num_frequencies, **options)
        self.pool = pool
        self.copula_weight = copula_weight
        self.faithful = faithful
        inputs = head_dim if pool == "key" else 2 * head_dim
        placed = options.get("device"), options.get("dtype")
        self.posterior = PosteriorNetwork(inputs, head_dim, *placed)
        if faithful:
            self.gain.requires_grad_(False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the networks anew."""
        generator, published = self._seeded(), self.faithful is not None
        self._reset_networks(generator, published)
        copula_bias = 0.0 if published else COPULA_BIAS
        self.posterior.reset_parameters(generator, copula_bias=copula_bias, published=published)

    def infer(
        self,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Infers the distribution of z for some queries and keys.

        Args:
            query: [B, H, L, d].
            key: [B, H, S, d].
            key_padding_mask: [B, S] bool, True = leave out, or None.
            query_padding_mask: [B, L] bool, True = leave out, or None.

        Returns:
            Location and log scale [B, H, d], and the Cholesky factor [B, d, H, H] of the
            correlation matrix of the heads in each dimension.
        """
        location, log_scale, copula = self._posterior_of(
            query, key, key_padding_mask, query_padding_mask
        )
        a = copula.transpose(1, 2)  # [B, d, H]
        factor = correlation_factor(REACH * a.unsqueeze(-1) * a.unsqueeze(-2))
        return location, log_scale + math.log(self.prior_scale), factor

    def _posterior_of(self, query: Tensor, key: Tensor, *paddings: Tensor | None) -> Any:
        """Returns what the network makes of averages, with paddings of keys and queries."""
        pooled = average(key, paddings[0], self.gain.dtype)
        if self.pool == "both":
            pooled = torch.cat([average(query, paddings[1], self.gain.dtype), pooled], dim=-1)
        return self.posterior(pooled)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None,
        query_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns w1 and w2 [B, H, d, M] and the regulariser.

        Args:
            query: [B, H, L, d].
            key: [B, H, S, d].
            key_padding_mask: [B, S] bool, True = ignore the key, or None.
            query_padding_mask: [B, L] bool, True = leave the query out of the average, or None.

        Raises:
            ValueError: faithful="code" with more than one sample, or with padding.
        """
        with self.without_autocast():
            if self.faithful:
                return self._published(query, key, key_padding_mask)
            location, log_scale, factor = self.infer(
                query, key, key_padding_mask, query_padding_mask
            )
            noise = self.noise(query.size(0)).movedim(-2, -3)  # [B, d, H, M] or [d, H, M]
            scores = (factor @ noise).transpose(1, 2)
            z = self.about_halves(location) + log_scale.exp().unsqueeze(-1) * scores
            divergence = gaussian_kl(location, log_scale, self.prior_scale).sum((1, 2))
            dependence = mutual_information(factor).sum(-1)
            terms = self.kl_weight * divergence + self.copula_weight * dependence
            return *self.to_frequencies(z), terms.sum() / max(terms.size(0), 1)

    def _published(
        self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        if query.size(0) != 1 or key_padding_mask is not None:
            raise ValueError(
                "faithful='code' takes one sample without padding, as the authors' code; got "
                f"{query.size(0)} samples, key_padding_mask "
                f"{'None' if key_padding_mask is None else 'given'}"
            )
        location, log_scale, copula = self._posterior_of(query, key, None, None)
        z, divergence, entropy = published_noise(
            location, log_scale, copula, self.num_frequencies, self.prior_scale
        )
        terms = self.kl_weight * divergence + self.copula_weight * entropy
        return *self.to_frequencies(z), terms


def average(x: Tensor, padding: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Averages tokens [B, H, N, d] over N without padding [B, N]: [B, H, d], 0 of no tokens."""
    wide = torch.promote_types(dtype, torch.float32)  # in float16 a sum overflows
    if padding is None:
        return (x.sum(2, dtype=wide) / max(x.size(2), 1)).to(dtype)
    # selected away, not multiplied by 0, which would let NaN through
    kept = x.masked_fill(padding[:, None, :, None], 0.0)
    count = padding.logical_not().sum(1).clamp_min(1)
    return (kept.sum(2, dtype=wide) / count[:, None, None]).to(dtype)
