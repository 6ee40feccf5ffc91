"""Modules in which some heads compute softmax, beside others with the implicit kernel.

Sizes: H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Split(NamedTuple):
    """The heads of a module by what they compute, each ascending."""

    softmax: tuple[int, ...]
    implicit: tuple[int, ...]


class SoftmaxHeads(nn.Module):
    """A base of modules some of whose heads may compute softmax.

    Which ones is a buffer ``softmax_heads``, bool [H], saved with the module. Modules without such
    heads have none.
    """

    _split: Split | None = None  # the buffer's numbers, for which no call has to wait

    def keep_softmax(self, heads: Tensor | Sequence[int] | None) -> None:
        """Makes heads, bool [H], compute softmax; None: all have the module's kernel again."""
        if hasattr(self, "softmax_heads"):
            del self.softmax_heads
        self._split = None
        if heads is None:
            return
        mask = torch.as_tensor(heads)
        count = getattr(self, "num_heads", mask.numel())
        if mask.dtype != torch.bool or mask.shape != (count,):
            raise ValueError(
                f"keep_softmax: heads must be bool [{count}], got {mask.dtype} {list(mask.shape)}"
            )
        like = next(self.parameters()).device
        self.register_buffer("softmax_heads", mask.detach().to(like, copy=True))
        if not self.softmax_heads.is_meta:
            self.split_heads()

    def split_heads(self) -> Split | None:
        """Splits the heads by what they compute; None if all have the module's kernel."""
        if self._split is None:
            mask = getattr(self, "softmax_heads", None)
            if mask is None:
                return None
            flags = mask.tolist()
            softmax = tuple(head for head, kept in enumerate(flags) if kept)
            self._split = Split(softmax, tuple(h for h in range(len(flags)) if h not in softmax))
        return self._split if self._split.softmax else None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        name = f"{prefix}softmax_heads"
        if name in state_dict and getattr(self, "softmax_heads", None) is None:
            errors: list[str] = args[-1]
            errors.append(
                f"{name} is in the checkpoint: heads compute softmax there; call keep_softmax with "
                "it before"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._split = None


def by_heads(
    split: Split,
    softmax: Callable[[Tensor], tuple[Tensor, Tensor | None]],
    implicit: Callable[[Tensor], tuple[Tensor, Tensor | None]],
    device: torch.device,
) -> tuple[Tensor, Tensor | None]:
    """Joins output [B, H, L, d_v] and weights of all heads, from two functions of their numbers."""
    parts = [
        compute(torch.tensor(heads, device=device))
        for heads, compute in ((split.softmax, softmax), (split.implicit, implicit))
        if heads
    ]
    order = torch.tensor((*split.softmax, *split.implicit), device=device).argsort()
    outputs, weights = zip(*parts, strict=True)
    output = torch.cat(outputs, 1).index_select(1, order)
    if weights[0] is None:
        return output, None
    return output, torch.cat(weights, 1).index_select(1, order)
