"""The base of KeyFeatures and RecurrentState: a kernel that stays as it is, and its tokens.

Sizes as in ``ikattn.ops``: B batch, H query heads, G key/value heads, d head size, M frequencies; K
is the heads of the frequencies, H or G.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ikattn.ops.attention import spectral_features
from ikattn.ops.magnitude import check_order, log_magnitude


class FixedKernel:
    """Frequencies ``[K, d, M]`` and the magnitude of keys; errors name the class made of it."""

    def __init__(
        self, w1: Tensor, w2: Tensor | None, p: float | None, magnitude_scale: float | None
    ) -> None:
        name = type(self).__name__
        if w1.dim() != 3:
            raise ValueError(
                f"{name}: w1 must have shape [H, d, M] or [G, d, M], got {list(w1.shape)}; "
                "frequencies of each batch item cannot be kept"
            )
        check_floating(name, w1=w1, w2=w2)
        if w2 is not None and w2.shape != w1.shape:
            raise ValueError(
                f"{name}: w2 must have the shape of w1, {list(w1.shape)}, got {list(w2.shape)}"
            )
        check_order(name, p)
        if magnitude_scale is not None and not math.isfinite(magnitude_scale):
            raise ValueError(f"{name}: magnitude_scale must be finite, got {magnitude_scale}")
        self.w1 = w1
        self.w2 = w2
        self.p = p
        self.magnitude_scale = magnitude_scale
        self._length = 0  # of the tokens that came
        self._frequencies: dict[
            tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor | None]
        ] = {}

    def __len__(self) -> int:
        """Returns the number of keys that came, and were not cropped; hidden ones count, too."""
        return self._length

    def __repr__(self) -> str:
        heads, size, frequencies = self.w1.shape
        return (
            f"{type(self).__name__}({self._length} keys, {heads} heads of size {size}, "
            f"num_frequencies={frequencies}, p={self.p})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state of copies and pickles, with buffers of their own.

        Several branches may go on from one prompt, and calls write to buffers.
        """
        kept = {**vars(self), "w1": _as_leaf(self.w1), "w2": _as_leaf(self.w2), "_frequencies": {}}
        with torch.inference_mode(False), torch.no_grad():
            return {**kept, **self._copied_buffers()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes a state, in ordinary tensors also where it was copied or loaded in inference_mode.

        A call outside of that mode could not write to its tensors.
        """
        with torch.inference_mode(False), torch.no_grad():
            for name, x in state.items():
                is_inference = isinstance(x, Tensor) and x.is_inference()
                setattr(self, name, x.clone() if is_inference else x)

    def _copied_buffers(self) -> dict[str, Any]:
        """Returns copies of the attributes that hold what calls write to, by name."""
        raise NotImplementedError

    def _refuse_gradients(self, method: str, *tensors: Tensor) -> None:
        inputs = (*tensors, self.w1, self.w2)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
            raise RuntimeError(
                f"{type(self).__name__}.{method}: no gradient would reach what requires one; call "
                "it under torch.no_grad(), or call ikattn.implicit_kernel_attention"
            )

    def _check_key(
        self,
        method: str,
        key: Tensor,
        before: tuple[int, int, torch.dtype] | None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Checks keys; ``before`` has batch, heads and type of those before, ``dtype`` or wider."""
        heads, size, _ = self.w1.shape
        name = f"{type(self).__name__}.{method}"
        self._refuse_gradients(method, key)
        check_floating(name, key=key)
        if key.dim() != 4 or key.size(3) != size or key.size(1) < 1 or heads % key.size(1):
            raise ValueError(
                f"{name}: key must have shape [B, G, new, d] with d = {size} and G a divisor of "
                f"the heads of w1, {heads}, got {list(key.shape)}"
            )
        found = (*key.shape[:2], torch.promote_types(key.dtype, dtype))
        if before is not None and found != before:
            raise ValueError(
                f"{name}: key must have batch size, heads and type of the keys before, {before}, "
                f"got {found}"
            )

    def _check_query(self, method: str, query: Tensor, batch: int, groups: int) -> None:
        own, size, _ = self.w1.shape
        name = f"{type(self).__name__}.{method}"
        self._refuse_gradients(method, query)
        check_floating(name, query=query)
        if query.dim() != 4 or query.size(0) != batch or query.size(3) != size:
            raise ValueError(
                f"{name}: query must have shape [B, H, L, d] with B = {batch} and d = {size}, got "
                f"{list(query.shape)}"
            )
        heads = query.size(1)
        if heads % groups or heads not in (own, heads // groups * own):
            raise ValueError(
                f"{name}: query must have the heads of w1, {own}, or a multiple of those of the "
                f"keys, {groups}, got {heads}"
            )

    def _of_keys(self, key: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns features ``[B, K, S, 2 M]`` in ``dtype``, log magnitudes ``[B, G, S]``, wide."""
        heads, groups = self.w1.size(0), key.size(1)
        wide = key.to(dtype)
        spread = wide if heads == groups else wide.repeat_interleave(heads // groups, 1)
        features = spectral_features(spread, *self._frequencies_for(heads, spread))
        return features, log_magnitude(key.double(), self.p, self.magnitude_scale)

    def _of_queries(self, query: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns features ``[B, H, L, 2 M]``."""
        wide = query.to(dtype)
        return spectral_features(wide, *self._frequencies_for(query.size(1), wide))

    def _frequencies_for(self, heads: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns w1 and w2 for so many heads, like a tensor; made once."""

        def prepared(w: Tensor) -> Tensor:
            return w.detach().to(like).repeat_interleave(heads // w.size(0), 0)

        key = (heads, like.dtype, like.device)
        if key not in self._frequencies:
            w2 = None if self.w2 is None else prepared(self.w2)
            self._frequencies[key] = (prepared(self.w1), w2)
        return self._frequencies[key]


def _as_leaf(w: Tensor | None) -> Tensor | None:
    """Returns frequencies without their graph, which neither deepcopy nor pickle takes."""
    return w if w is None or w.is_leaf else w.detach().requires_grad_(w.requires_grad)


def check_floating(function: str, kind: str = "floating point", **tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None and not x.is_floating_point():
            raise TypeError(f"{function}: {name} must be {kind}, got {x.dtype}")


def check_broadcasts(function: str, name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    own = tuple(x.shape)
    fits = len(own) <= len(shape) and all(
        size in (1, of) for size, of in zip(own[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(f"{function}: {name} must broadcast to {list(shape)}, got {list(own)}")


def added(logits: Tensor, bias: Tensor) -> Tensor:
    """Adds a bias to logits; -inf in either hides a key, whatever the other is."""
    hidden = (bias == -math.inf) | (logits == -math.inf)
    return torch.where(hidden, -math.inf, logits + bias)


def to_heads(x: Tensor, heads: int) -> Tensor:
    """Repeats each head of x [B, heads or a divisor, ..] for the query heads it serves."""
    own = x.size(1)
    return x if own in (1, heads) else x.repeat_interleave(heads // own, 1)


def with_heads(bias: Tensor, heads: int, groups: int) -> tuple[Tensor, int]:
    """Returns a key bias with all three axes, and the number of heads that it has to have."""
    whole = bias.reshape((1,) * max(0, 3 - bias.dim()) + tuple(bias.shape))
    of_groups = whole.dim() == 3 and whole.size(1) in (1, groups)
    return whole, groups if of_groups else heads
