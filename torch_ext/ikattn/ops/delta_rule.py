"""Gated delta rules and Mamba-2 as matrices: the weights with which a head takes its values.

A head keeps a state S ``[d, d_v]``. A token decays it and corrects what its key reads there::

    S_t = G_t S_(t-1) + k_t beta_t (v_t - (G_t S_(t-1))^T k_t)^T,    o_t = S_t^T q_t

with G_t = exp(g_t), a number or a diagonal ``[d]``. The outputs are linear in the values once all
else is known: o = M v with ``M = tril(q k^T) (I + stril(diag(beta) k k^T))^-1 diag(beta)``, each
product of a query or key i and a key j decayed from j to i. Mamba-2 writes beta_t v_t as it is and
corrects nothing, which leaves the first factor and the last, and adds a multiple of v_t to o_t. M
is made by chunks of tokens, as the state is: of ``[T, T]`` nothing is held but the rows that are
asked for.

Sizes: B batch, H heads, T tokens in n chunks of C, d head size of query and key.
Sources: S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks", ICLR 2025; T. Dao, A. Gu,
"Transformers are SSMs", ICML 2024.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64


class DeltaRule(NamedTuple):
    """The matrix M of a rule, chunk by chunk."""

    own: Tensor  # [B, H, n, C, C], weights of keys of the same chunk
    reads: Tensor  # [B, H, n, C, d], what each output takes from the state before its chunk
    writes: Tensor  # [B, H, n, d, C], what each value writes into the state after its chunk
    passes: Tensor  # [B, H, n, d, d], the state after a chunk by the state before it

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, decay: Tensor, beta: Tensor, erased: Tensor, own: Tensor
    ) -> DeltaRule:
        """Makes the chunks in float64, and returns them in the type of ``query``.

        Args:
            query: ``[B, H, T, d]``, normalised and scaled as the layer has it.
            key: ``[B, H, T, d]``, likewise.
            decay: g, ``[B, H, T]``, or ``[B, H, T, d]`` where each number of a key has its own.
            beta: ``[B, H, T]``, which part of a value is written.
            erased: ``[B, H, T]``, which part of what the key reads is erased: beta, or 0.
            own: ``[B, H, T]``, added to the weight of each token's own value.
        """
        T, C = query.size(2), max(1, min(CHUNK, query.size(2)))
        decay = decay if decay.dim() == 4 else decay.unsqueeze(-1)
        q, k, g, b, e, o = (
            pad(x.double(), (0, 0, 0, -T % C)).unflatten(2, (-1, C))
            for x in (query, key, decay, *(x.unsqueeze(-1) for x in (beta, erased, own)))
        )
        since = g.cumsum(-2)  # from the begin of the chunk
        identity = torch.eye(C, dtype=q.dtype, device=q.device)
        of_queries, of_keys = _decayed(q, k, since)
        system = identity + e * of_keys.tril(-1)
        solved = torch.linalg.solve_triangular(
            system,
            torch.cat([b * identity, e * k * since.exp()], -1),
            upper=False,
            unitriangular=True,
        )
        inverse, corrections = solved.split([C, k.size(-1)], -1)
        of_queries = of_queries.tril()
        last = since[..., -1:, :]
        kept = (k * (last - since).exp()).mT
        whole = last.squeeze(-2).exp().expand(*last.shape[:3], k.size(-1)).diag_embed()
        found = (
            of_queries @ inverse + o * identity,
            q * since.exp() - of_queries @ corrections,
            kept @ inverse,
            whole - kept @ corrections,
        )
        return cls(*(x.to(query.dtype) for x in found))

    def item(self, b: int) -> DeltaRule:
        return DeltaRule(*(x[b : b + 1] for x in self))

    def rows(self, start: int, end: int, S: int) -> Tensor:
        """Returns rows from ``start`` to before ``end`` of M, and its first S columns."""
        C, R = self.own.size(-1), end - start
        columns = [pad(x, (0, 0, R - x.size(2), 0)) for x in self._columns(start, end)][::-1]
        found = torch.cat([*columns, self.own.new_zeros(*self.own.shape[:2], R, 0)], -1)
        return pad(found, (0, max(0, S - len(columns) * C)))[..., :S]

    def _columns(self, start: int, end: int) -> Iterator[Tensor]:
        """Yields the rows' weights of each chunk of keys, from the last that they see."""
        C = self.own.size(-1)
        later = self.reads.flatten(2, 3)[:, :, :0]  # of rows in chunks after this one
        for chunk in range(-(-end // C) - 1 if end > start else -1, -1, -1):
            of_later = later @ self.writes[:, :, chunk]
            first, last = (min(max(x - chunk * C, 0), C) for x in (start, end))
            inside = self.own[:, :, chunk, first:last]
            yield torch.cat([inside, of_later], 2)
            reads = self.reads[:, :, chunk, first:last]
            later = torch.cat([reads, later @ self.passes[:, :, chunk]], 2)


def _decayed(q: Tensor, k: Tensor, since: Tensor) -> tuple[Tensor, Tensor]:
    """Returns q k^T and k k^T of chunks with decays from each key to the tokens after it."""
    C = since.size(-2)
    later = torch.ones(C, C, dtype=torch.bool, device=since.device).tril().unsqueeze(-1)

    def ratios(since: Tensor) -> Tensor:
        apart = since.unsqueeze(-2) - since.unsqueeze(-3)  # [.., C, C, 1 or d]
        return apart.masked_fill(~later, -torch.inf).exp()

    if since.size(-1) == 1:
        ratio = ratios(since).squeeze(-1)
        return (q @ k.mT) * ratio, (k @ k.mT) * ratio
    found = []
    for own_q, own_k, own in zip(*(x.split(1, 2) for x in (q, k, since)), strict=True):
        decayed = own_k.unsqueeze(-3) * ratios(own)  # of one chunk: all would not fit
        found.append([torch.einsum("...id,...ijd->...ij", x, decayed) for x in (own_q, own_k)])
    of_queries, of_keys = zip(*found, strict=True)
    return torch.cat(of_queries, 2), torch.cat(of_keys, 2)
