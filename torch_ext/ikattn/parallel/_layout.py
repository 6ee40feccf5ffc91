"""The tokens of a sequence that each rank holds."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

LayoutName: TypeAlias = Literal["zigzag", "contiguous"]


class Block(NamedTuple):
    """A part of the weights that one rank computes: its queries against keys of one rank."""

    queries: slice  # rows of the rank's own
    keys: slice  # rows of the other's
    is_causal: bool
    first_query: int  # in the whole sequence
    first_key: int


class Layout:
    """A sequence in equal chunks, and who of W ranks, its size, holds which.

    "contiguous": rank r holds chunk r of W. "zigzag": chunks r and 2W - 1 - r of 2W, so that every
    rank has as many pairs of a causal call.
    """

    def __init__(self, name: LayoutName, size: int) -> None:
        if name not in ("zigzag", "contiguous"):
            raise ValueError(
                f'context_parallel: layout must be "zigzag" or "contiguous", got {name!r}'
            )
        self.name, self.size = name, size
        self.count = 2 * size if name == "zigzag" else size

    def chunks(self, rank: int) -> list[int]:
        return [rank, self.count - 1 - rank] if self.name == "zigzag" else [rank]

    def owner(self, chunk: int) -> int:
        return min(chunk, self.count - 1 - chunk) if self.name == "zigzag" else chunk

    def shard(self, whole: Tensor, dim: int, rank: int) -> Tensor:
        length = whole.size(dim)
        if length % self.count != 0:
            raise ValueError(
                f"context_parallel: axis {dim} must have a multiple of {self.count} tokens, the "
                f"chunks of {self.size} ranks, got {length}; pad it, and hide the padding with a "
                "key_padding_mask"
            )
        chunks = whole.chunk(self.count, dim)
        return torch.cat([chunks[c] for c in self.chunks(rank)], dim)

    def unshard(self, parts: list[Tensor], dim: int) -> Tensor:
        """Returns the whole of what all ranks hold, in the order of tokens."""
        chunks: dict[int, Tensor] = {}
        for rank, part in enumerate(parts):
            numbers = self.chunks(rank)
            chunks.update(zip(numbers, part.chunk(len(numbers), dim), strict=True))
        return torch.cat([chunks[c] for c in range(self.count)], dim)

    def blocks(
        self, rank: int, other: int, queries: int, keys: int, *, is_causal: bool, apart: bool
    ) -> list[Block]:
        """Returns the pairs of a rank's queries with the keys of another rank that attention needs.

        ``apart``: a block has tokens of one chunk only, whose places are known.
        """
        own, others = self.chunks(rank), self.chunks(other)
        of_queries, of_keys = queries // len(own), keys // len(others)

        def block(a: range, b: range, causal: bool) -> Block:
            return Block(
                slice(a.start * of_queries, a.stop * of_queries),
                slice(b.start * of_keys, b.stop * of_keys),
                causal,
                own[a.start] * of_queries,
                others[b.start] * of_keys,
            )

        rows, columns = range(len(own)), range(len(others))
        if not apart and (not is_causal or rank == other):
            return [block(rows, columns, is_causal)]
        result: list[Block] = []
        for a in rows:
            seen = [b for b in columns if not is_causal or others[b] <= own[a]]
            if apart:
                for b in seen:
                    same = is_causal and others[b] == own[a]
                    result.append(block(range(a, a + 1), range(b, b + 1), same))
            elif seen:
                result.append(block(range(a, a + 1), range(len(seen)), False))
        if len(result) == 2 and not apart and result[0].keys == result[1].keys:
            return [block(rows, range(result[0].keys.stop // of_keys), False)]
        return result
