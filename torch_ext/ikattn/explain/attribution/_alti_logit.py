"""ALTI-Logit: what attention writes into a logit, layer by layer, followed back to the input.

Sizes: B batch, H query heads, L = S tokens, n rows that the logit reads, d_v head size of value, D
model size.
Source: J. Ferrando, G. I. Gállego, I. Tsiamas, M. R. Costa-jussà, "Explaining How Transformers Use
Context to Build Predictions", ACL 2023.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ikattn.recorder.runs.run import Run

__all__ = ["Writings"]


class Writings:
    """What each layer's attention writes into a logit directly, and ALTI's map of the layer.

    Args:
        gradient: ``[B, L, D]``, of the logit in the residual stream after the last block.
    """

    def __init__(self, gradient: Tensor) -> None:
        self._gradient = gradient
        self._layers: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def note(self, run: Run) -> None:
        """Takes up a layer's attention.

        Raises:
            ValueError: Its block does not add to a residual stream.
        """
        block = run.plan.parts.block
        if run.attention.kind != "self" or block != "pre":
            raise ValueError(
                'attribute: "alti_logit" needs self-attention whose block adds to a residual '
                f"stream (pre-norm), got {run.name}, {run.attention.kind}-attention whose block "
                f'is {block!r}: take "decompx"'
            )
        assert run.projection is not None
        assert run.maps is not None
        assert run.maps.alti is not None
        call, around = run.attention, run.around
        value = call.value
        u = self._gradient.to(value.dtype)
        rows = u.ne(0).any(-1).any(0).nonzero()[:, 0]
        u = u[:, rows]
        if isinstance(around.scale, Tensor):
            u = u * around.scale.to(u.dtype)
        elif around.scale is not None:
            u = u * around.scale
        if around.output_norm is not None:
            stats = around.output_norm
            u = u * stats.weight.to(u.dtype) / stats.scale.to(u.dtype)[:, rows].unsqueeze(-1)
            u = u - u.mean(-1, keepdim=True) if stats.centered else u
        heads = (u @ run.projection.weight.to(u.dtype)).unflatten(-1, (call.query.size(1), -1))
        heads = heads.transpose(1, 2)  # [B, H, n, d_v]
        value = value.repeat_interleave(call.query.size(1) // value.size(1), 1)
        weights = call.weights[:, :, rows]
        pairs = weights * (heads @ value.nan_to_num(0.0).mT)  # [B, H, n, S]
        self._layers.append((pairs.sum((1, 2)), run.maps.alti.to(u.device)))

    def followed_back(self) -> Tensor:
        """What each token of the input wrote, ``[B, S]``."""
        written, _ = self._layers[-1]
        for below, map_ in reversed(self._layers[:-1]):
            written = below + (self._of_tokens(written, map_).unsqueeze(1) @ map_.to(written))[:, 0]
        return self._of_tokens(written, self._layers[0][1])

    @staticmethod
    def _of_tokens(written: Tensor, map_: Tensor) -> Tensor:
        """What the layer's tokens wrote, without keys that stand before them, such as a prefix."""
        L, S = map_.shape[-2:]
        return written[:, S - L :]
