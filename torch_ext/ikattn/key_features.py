"""Keys kept in the form that implicit-kernel attention reads, for decoding.

Sizes as in ``ikattn.ops``: B batch, H query heads, G key/value heads, L queries, S keys kept, d
head size, d_v that of values, M frequencies; K is the heads of the frequencies, H or G.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .ops import attention_from_features, spectral_features

__all__ = ["KeyFeatures"]

_FIRST_CAPACITY = 64  # tokens


class KeyFeatures:
    """Features and log magnitudes of keys, made once, for queries that come one after the other.

    In decoding every new query meets all keys before it. The features of a key cost as much as a
    hundred pairs with it, so :func:`ikattn.implicit_kernel_attention`, which makes them in every
    call, is not the function for that. Here they are made when a key is appended, and a query then
    reads features and values once, as softmax attention reads keys and values. Memory grows by
    doubling; a token takes 4 K (2 M) + 4 G bytes, half-precision keys as well, whose features are
    made in float32.

    There are no gradients: keys are appended as they are under ``torch.no_grad()``.

    Args:
        w1: Frequencies ``[H, d, M]`` or ``[G, d, M]``, which must stay as they are.
        w2: As w1; None: stationary.
        p: Order of the norm in a key's magnitude, a real number >= 1; None: no magnitude.
        magnitude_scale: Factor of ``|k|_p^2``, by default ``1 / (2 sqrt d)``.

    Raises:
        ValueError: p or the shape of the frequencies is wrong.

    Source: K. Song, Y. Jung, D. Kim, I. Moon, "Implicit Kernel Attention", AAAI 2021
    (arXiv 2006.06147).

    Example:
        >>> import torch, ikattn
        >>> q, k, v = (torch.randn(1, 2, 10, 8) for _ in range(3))
        >>> w1, w2 = (0.1 * torch.randn(2, 8, 16) for _ in range(2))
        >>> features, outputs = ikattn.KeyFeatures(w1, w2), []
        >>> for t in range(10):  # token by token
        ...     features.append(k[:, :, t : t + 1])
        ...     outputs.append(features.attend(q[:, :, t : t + 1], v[:, :, : t + 1]))
        >>> whole = ikattn.implicit_kernel_attention(q, k, v, w1, w2, is_causal=True)
        >>> torch.allclose(torch.cat(outputs, 2), whole, atol=1e-5)
        True
    """

    def __init__(
        self,
        w1: Tensor,
        w2: Tensor | None = None,
        *,
        p: float | None = 2.0,
        magnitude_scale: float | None = None,
    ) -> None:
        if w1.dim() != 3:
            raise ValueError(
                f"KeyFeatures: w1 must have shape [H, d, M] or [G, d, M], got {list(w1.shape)}; "
                "frequencies of each batch item cannot be kept"
            )
        if w2 is not None and w2.shape != w1.shape:
            raise ValueError(
                f"KeyFeatures: w2 must have the shape of w1, {list(w1.shape)}, got {list(w2.shape)}"
            )
        if p is not None and not 1 <= p < math.inf:
            raise ValueError(f"KeyFeatures: p must be a finite number >= 1 or None, got {p}")
        self.w1 = w1
        self.w2 = w2
        self.p = p
        self.magnitude_scale = magnitude_scale
        self._length = 0
        self._frequencies: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor | None]] = {}
        self._features: Tensor | None = None  # [B, K, capacity, 2 M]
        self._logits: Tensor | None = None  # [B, G, capacity]

    def __len__(self) -> int:
        """S, the keys kept."""
        return self._length

    def __repr__(self) -> str:
        heads, size, frequencies = self.w1.shape
        return (
            f"KeyFeatures({self._length} keys, {heads} heads of size {size}, "
            f"num_frequencies={frequencies}, p={self.p})"
        )

    @property
    def features(self) -> Tensor:
        """phi(k), ``[B, K, S, 2 M]``, in float32, for float64 keys float64: a view.

        Raises:
            ValueError: No key was appended yet.
        """
        return self._kept(self._features)[:, :, : self._length]

    @property
    def log_magnitudes(self) -> Tensor:
        """g_j = magnitude_scale ``|k_j|_p^2``, ``[B, G, S]``, of the same type: a view.

        Raises:
            ValueError: No key was appended yet.
        """
        return self._kept(self._logits)[:, :, : self._length]

    def append(self, key: Tensor) -> None:
        """Keeps more keys, after those that are kept.

        Args:
            key: ``[B, G, new, d]``.

        Raises:
            RuntimeError: A gradient would be lost, or memory is not enough; nothing has changed.
            ValueError: The shape of key is not that of the keys before, or does not fit w1.
        """
        self._check_key(key)
        # Ordinary tensors, also from below inference_mode: a later call may write to them.
        with torch.inference_mode(False), torch.no_grad():
            heads, groups = self.w1.size(0), key.size(1)
            wide = key if key.dtype == torch.float64 else key.float()
            spread = wide if heads == groups else wide.repeat_interleave(heads // groups, 1)
            features = spectral_features(spread, *self._frequencies_for(heads, spread))
            logits = self._log_magnitudes_of(wide)
            length = self._length + key.size(2)
            rooms = [
                _with_room(kept, new, self._length, length)
                for kept, new in ((self._features, features), (self._logits, logits))
            ]
            for room, new in zip(rooms, (features, logits), strict=True):
                room[:, :, self._length : length] = new
        self._features, self._logits = rooms
        self._length = length

    def attend(
        self,
        query: Tensor,
        value: Tensor,
        *,
        key_bias: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        eps: float = 1e-5,
    ) -> Tensor:
        """Attention of queries to all keys that are kept.

        Args:
            query: ``[B, H, L, d]``; meant for few, L up to 16 or so.
            value: ``[B, G, S, d_v]``, in any floating type, any strides.
            key_bias: Added to a key's logit, broadcastable to ``[B, H, S]`` or ``[B, G, S]``; -inf
                hides the key.
            attn_mask: Broadcastable to ``[B, H, L, S]``; bool, True = may attend, or floating
                point, added to the logit.
            is_causal: The queries are those of the last L keys: query i sees the keys up to number
                S - L + i. Combines with attn_mask.
            eps: Added to s^2; positive.

        Returns:
            ``[B, H, L, d_v]`` in the type of value. A row that sees no key is zero.

        Raises:
            RuntimeError, TypeError, ValueError: An argument has a wrong shape, type or value, or a
                gradient would be lost.
        """
        features, logits = self.features, self.log_magnitudes.unsqueeze(-2)
        self._refuse_gradients("attend", query, value)
        if query.dim() != 4 or query.size(3) != self.w1.size(1):
            raise ValueError(
                f"KeyFeatures.attend: query must have shape [B, H, L, d] with d = "
                f"{self.w1.size(1)}, got {list(query.shape)}"
            )
        heads, groups = query.size(1), logits.size(1)
        if heads % groups or heads not in (self.w1.size(0), heads // groups * self.w1.size(0)):
            raise ValueError(
                f"KeyFeatures.attend: query must have the heads of w1, {self.w1.size(0)}, or a "
                f"multiple of those of the keys, {groups}, got {heads}"
            )
        wide = query.to(features.dtype)
        spread = _to_heads(logits, heads)
        if key_bias is not None:
            spread = spread + _to_heads(_with_axes(key_bias, 3).unsqueeze(-2), heads)
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            spread = spread + attn_mask
        elif attn_mask is not None:
            spread = torch.where(attn_mask, spread, -math.inf)
        if is_causal and query.size(2) > 1:
            shape = (query.size(2), self._length)
            later = torch.ones(shape, dtype=torch.bool, device=query.device)
            later = later.triu(self._length - query.size(2) + 1)
            spread = spread.masked_fill(later, -math.inf)
        queries = spectral_features(wide, *self._frequencies_for(heads, wide))
        return attention_from_features(queries, features, spread.to(features.dtype), value, eps=eps)

    def crop(self, length: int) -> None:
        """Forgets all keys but the first ``length``; memory stays.

        Raises:
            ValueError: There are fewer.
        """
        if not 0 <= length <= self._length:
            raise ValueError(f"KeyFeatures.crop: length must be 0 to {self._length}, got {length}")
        self._length = length

    def select(self, indices: Tensor) -> None:
        """Makes the batch items ``indices``, int64 ``[new B]``, the batch: to reorder beams.

        Raises:
            RuntimeError, IndexError: An index is out of range.
        """
        if self._features is not None and self._logits is not None:
            self._features = self._features.index_select(0, indices)
            self._logits = self._logits.index_select(0, indices)

    def _kept(self, buffer: Tensor | None) -> Tensor:
        if buffer is None:
            raise ValueError("KeyFeatures: no key was appended yet")
        return buffer

    def _refuse_gradients(self, method: str, *tensors: Tensor) -> None:
        wanting = (x for x in (*tensors, self.w1, self.w2) if x is not None and x.requires_grad)
        if torch.is_grad_enabled() and any(True for _ in wanting):
            raise RuntimeError(
                f"KeyFeatures.{method}: no gradient would reach what requires one; call it under "
                "torch.no_grad(), or call ikattn.implicit_kernel_attention"
            )

    def _check_key(self, key: Tensor) -> None:
        heads, size, _ = self.w1.shape
        self._refuse_gradients("append", key)
        if key.dim() != 4 or key.size(3) != size or key.size(1) < 1 or heads % key.size(1):
            raise ValueError(
                f"KeyFeatures.append: key must have shape [B, G, new, d] with d = {size} and G a "
                f"divisor of the heads of w1, {heads}, got {list(key.shape)}"
            )
        if self._logits is not None and self._features is not None:
            expected = (*self._logits.shape[:2], self._features.dtype)
            found = (*key.shape[:2], torch.promote_types(key.dtype, torch.float32))
            if found != expected:
                raise ValueError(
                    "KeyFeatures.append: key must have batch size, heads and type of the keys "
                    f"before, {expected}, got {found}"
                )

    def _log_magnitudes_of(self, key: Tensor) -> Tensor:
        if self.p is None:
            return key.new_zeros(key.shape[:-1])
        scale = self.magnitude_scale
        if scale is None:
            scale = 1 / (2 * math.sqrt(key.size(-1)))
        norm: Tensor = torch.linalg.vector_norm(key, self.p, dim=-1)
        return norm.square() * scale

    def _frequencies_for(self, heads: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """w1 and w2 for so many heads, of the type and on the device of a tensor; made once."""

        def prepared(w: Tensor) -> Tensor:
            return w.detach().to(like).repeat_interleave(heads // w.size(0), 0)

        key = (heads, like.dtype)
        if key not in self._frequencies:
            w2 = None if self.w2 is None else prepared(self.w2)
            self._frequencies[key] = (prepared(self.w1), w2)
        return self._frequencies[key]


def _with_axes(x: Tensor, axes: int) -> Tensor:
    """x with axes of size 1 before it, so that it has so many."""
    return x.reshape((1,) * max(0, axes - x.dim()) + tuple(x.shape))


def _to_heads(x: Tensor, heads: int) -> Tensor:
    """x [B, heads or a divisor, L, S] with each head repeated for the query heads it serves."""
    own = x.size(1)
    return x if own in (1, heads) else x.repeat_interleave(heads // own, 1)


def _with_room(kept: Tensor | None, new: Tensor, used: int, needed: int) -> Tensor:
    """``kept`` [B, heads, capacity, ...] where ``needed`` tokens fit, else a larger copy of it."""
    if kept is not None and kept.size(2) >= needed:
        return kept
    capacity = max(needed, _FIRST_CAPACITY if kept is None else 2 * kept.size(2))
    room = new.new_empty((*new.shape[:2], capacity, *new.shape[3:]))
    if kept is not None:
        room[:, :, :used] = kept[:, :, :used]
    return room
