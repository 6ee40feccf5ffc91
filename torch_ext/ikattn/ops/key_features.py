"""Keys kept in the form that implicit-kernel attention reads, for decoding.

Sizes as in ``ikattn.ops``: B batch, H query heads, G key/value heads, L queries, S keys kept, d
head size, d_v that of values, M frequencies; K is the heads of the frequencies, H or G.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ikattn._memory import takes_memory_for
from ikattn.ops.attention import attention_from_features, spectral_features
from ikattn.ops.magnitude import check_order, log_magnitude

__all__ = ["KeyFeatures"]

_FIRST_CAPACITY = 64  # tokens


class KeyFeatures:
    """Features and log magnitudes of keys, made once, for queries that come one after the other.

    In decoding every new query meets all keys before it. The features of a key cost as much as some
    forty pairs with it, so :func:`ikattn.implicit_kernel_attention`, which makes them in every
    call, is not the function for that. Here they are made when a key is appended, and a query then
    reads features and values once, as softmax attention reads keys and values. Features are made in
    float32 (float64 for float64 keys), under autocast too; 4 K (2 M) + 12 G bytes a token, and room
    for as many tokens again, for memory grows by doubling.

    Made under ``ikattn.deterministic("batch")``, a query's output has the same bits in chunks of
    any size and in any batch.

    Nothing has a gradient but key_bias and attn_mask: keys are appended as they are under
    ``torch.no_grad()``.

    Args:
        w1: Frequencies ``[H, d, M]`` or ``[G, d, M]``, which must stay as they are.
        w2: As w1; None: stationary.
        p: Order of the norm in a key's magnitude, a real number >= 1; None: no magnitude.
        magnitude_scale: Factor of ``|k|_p^2``, by default ``1 / (2 sqrt d)``.

    Raises:
        TypeError: Frequencies are not floating point.
        ValueError: p, magnitude_scale or the shape of the frequencies is wrong.

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
        _check_floating("KeyFeatures", w1=w1, w2=w2)
        if w2 is not None and w2.shape != w1.shape:
            raise ValueError(
                f"KeyFeatures: w2 must have the shape of w1, {list(w1.shape)}, got {list(w2.shape)}"
            )
        check_order("KeyFeatures", p)
        if magnitude_scale is not None and not math.isfinite(magnitude_scale):
            raise ValueError(f"KeyFeatures: magnitude_scale must be finite, got {magnitude_scale}")
        self.w1 = w1
        self.w2 = w2
        self.p = p
        self.magnitude_scale = magnitude_scale
        # Logits are then not relative to the largest, which a row may not see.
        self._batch_invariant = torch.ops.ikattn.deterministic() == "batch"
        self._length = 0
        self._frequencies: dict[
            tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor | None]
        ] = {}
        self._kept: _Kept | None = None

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
        return self._known().features[:, :, : self._length]

    @property
    def log_magnitudes(self) -> Tensor:
        """g_j = magnitude_scale ``|k_j|_p^2``, ``[B, G, S]``, in float64: a view.

        Raises:
            ValueError: No key was appended yet.
        """
        return self._known().magnitudes[:, :, : self._length]

    @takes_memory_for("the features of keys", function="KeyFeatures.append")
    def append(self, key: Tensor) -> None:
        """Keeps more keys, after those that are kept.

        Args:
            key: ``[B, G, new, d]``.

        Raises:
            RuntimeError: A gradient would be lost, or memory is not enough; nothing has changed.
            TypeError: key is not floating point.
            ValueError: The shape of key is not that of the keys before, or does not fit w1.
        """
        self._check_key(key)
        # Ordinary tensors, also from below inference_mode: a later call may write to them.
        with torch.inference_mode(False), torch.no_grad(), _as_they_are(key):
            heads, groups = self.w1.size(0), key.size(1)
            wide = key if key.dtype == torch.float64 else key.float()
            spread = wide if heads == groups else wide.repeat_interleave(heads // groups, 1)
            features = spectral_features(spread, *self._frequencies_for(heads, spread))
            magnitudes = log_magnitude(key.double(), self.p, self.magnitude_scale)
            kept = self._kept or _Kept.of(features[:, :, :0], magnitudes[:, :, :0])
            kept = kept.with_room(self._length, self._length + key.size(2))
            kept.write(self._length, features, magnitudes)
        self._kept = kept
        self._length += key.size(2)

    @takes_memory_for("logits and the output", function="KeyFeatures.attend")
    def attend(
        self,
        query: Tensor,
        value: Tensor,
        *,
        key_bias: Tensor | None = None,
        attn_mask: Tensor | None = None,
        causal_lower_right: bool = False,
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
            causal_lower_right: The queries are those of the last L keys: query i sees the keys up
                to number S - L + i, as with ``torch.nn.attention.bias.causal_lower_right``. The
                operators' ``is_causal`` is the other convention, keys up to number i. Combines
                with attn_mask.
            eps: Added to s^2; positive.

        Returns:
            ``[B, H, L, d_v]`` in the type of value. A row that sees no key is zero.

        Raises:
            RuntimeError, TypeError, ValueError: An argument has a wrong shape, type or value, or a
                gradient would be lost. Masks of 0 and 1 are no masks: ``mask.bool()`` is one.
        """
        self._refuse_gradients("attend", query, value)
        _check_floating("KeyFeatures.attend", query=query, value=value, key_bias=key_bias)
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            _check_floating("KeyFeatures.attend", "bool or floating point", attn_mask=attn_mask)
        kept, length = self._known(), self._length
        features = kept.features[:, :, :length]
        logits = (kept.magnitudes if self._batch_invariant else kept.logits)[:, :, None, :length]
        self._check_query(query, features.size(0), logits.size(1))
        heads, groups = query.size(1), logits.size(1)
        shape = (query.size(0), heads, query.size(2), length)
        spread = _to_heads(logits, heads)
        if key_bias is not None:
            bias = key_bias.reshape((1,) * max(0, 3 - key_bias.dim()) + tuple(key_bias.shape))
            of_heads = bias.size(1) if bias.dim() == 3 and bias.size(1) in (1, groups) else heads
            _check_broadcasts("key_bias", key_bias, (shape[0], of_heads, length))
            spread = _added(spread, _to_heads(bias.unsqueeze(-2), heads))
        if attn_mask is not None:
            _check_broadcasts("attn_mask", attn_mask, shape)
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            spread = _added(spread, attn_mask)
        elif attn_mask is not None:
            spread = torch.where(attn_mask, spread, -math.inf)
        if causal_lower_right and query.size(2) > 1:
            later = torch.ones(shape[2:], dtype=torch.bool, device=query.device)
            spread = spread.masked_fill(later.triu(length - query.size(2) + 1), -math.inf)
        with _as_they_are(query):
            wide = query.to(features.dtype)
            queries = spectral_features(wide, *self._frequencies_for(heads, wide))
            logits = spread.to(features.dtype)
            return attention_from_features(queries, features, logits, value, eps=eps)

    def crop(self, length: int) -> None:
        """Forgets all keys but the first ``length``; memory stays.

        Raises:
            ValueError: There are fewer.
        """
        if not 0 <= length <= self._length:
            raise ValueError(f"KeyFeatures.crop: length must be 0 to {self._length}, got {length}")
        if self._kept is not None and length < self._length:
            with torch.inference_mode(False), torch.no_grad():
                self._kept = self._kept.cropped(length)
        self._length = length

    def select(self, indices: Tensor) -> None:
        """Makes the batch items ``indices``, int64 ``[new B]``, the batch: to reorder beams.

        Raises:
            RuntimeError, IndexError: An index is out of range.
        """
        with torch.inference_mode(False), torch.no_grad():
            if self._kept is not None:
                self._kept = self._kept.select(indices)

    def _known(self) -> _Kept:
        if self._kept is None:
            raise ValueError("KeyFeatures: no key was appended yet")
        return self._kept

    def _refuse_gradients(self, method: str, *tensors: Tensor) -> None:
        inputs = (*tensors, self.w1, self.w2)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
            raise RuntimeError(
                f"KeyFeatures.{method}: no gradient would reach what requires one; call it under "
                "torch.no_grad(), or call ikattn.implicit_kernel_attention"
            )

    def _check_key(self, key: Tensor) -> None:
        heads, size, _ = self.w1.shape
        self._refuse_gradients("append", key)
        _check_floating("KeyFeatures.append", key=key)
        if key.dim() != 4 or key.size(3) != size or key.size(1) < 1 or heads % key.size(1):
            raise ValueError(
                f"KeyFeatures.append: key must have shape [B, G, new, d] with d = {size} and G a "
                f"divisor of the heads of w1, {heads}, got {list(key.shape)}"
            )
        if self._kept is not None:
            expected = (*self._kept.magnitudes.shape[:2], self._kept.features.dtype)
            found = (*key.shape[:2], torch.promote_types(key.dtype, torch.float32))
            if found != expected:
                raise ValueError(
                    "KeyFeatures.append: key must have batch size, heads and type of the keys "
                    f"before, {expected}, got {found}"
                )

    def _check_query(self, query: Tensor, batch: int, groups: int) -> None:
        own, size, _ = self.w1.shape
        if query.dim() != 4 or query.size(0) != batch or query.size(3) != size:
            raise ValueError(
                f"KeyFeatures.attend: query must have shape [B, H, L, d] with B = {batch} and d = "
                f"{size}, got {list(query.shape)}"
            )
        heads = query.size(1)
        if heads % groups or heads not in (own, heads // groups * own):
            raise ValueError(
                f"KeyFeatures.attend: query must have the heads of w1, {own}, or a multiple of "
                f"those of the keys, {groups}, got {heads}"
            )

    def _frequencies_for(self, heads: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """w1 and w2 for so many heads, of the type and on the device of a tensor; made once."""

        def prepared(w: Tensor) -> Tensor:
            return w.detach().to(like).repeat_interleave(heads // w.size(0), 0)

        key = (heads, like.dtype, like.device)
        if key not in self._frequencies:
            w2 = None if self.w2 is None else prepared(self.w2)
            self._frequencies[key] = (prepared(self.w1), w2)
        return self._frequencies[key]


class _Kept(NamedTuple):
    """Buffers of one capacity."""

    features: Tensor  # [B, K, capacity, 2 M]
    magnitudes: Tensor  # [B, G, capacity], float64
    reference: Tensor  # [B, G, 1], float64: the largest magnitude
    logits: Tensor  # [B, G, capacity], magnitudes - reference in the features' type

    @staticmethod
    def of(features: Tensor, magnitudes: Tensor) -> _Kept:
        """Without room, of the shapes of what is to come."""
        reference = magnitudes.new_full((*magnitudes.shape[:2], 1), -math.inf)
        return _Kept(features, magnitudes, reference, magnitudes.to(features.dtype))

    def with_room(self, used: int, needed: int) -> _Kept:
        """Buffers where ``needed`` tokens fit and that may be written to: these, or copies."""
        capacity = self.features.size(2)
        if capacity >= needed and not self.features.is_inference():
            return self
        if capacity < needed:
            capacity = max(needed, 2 * capacity, _FIRST_CAPACITY)

        def copied(kept: Tensor) -> Tensor:
            room = kept.new_empty((*kept.shape[:2], capacity, *kept.shape[3:]))
            room[:, :, :used] = kept[:, :, :used]
            return room

        features, magnitudes, logits = (copied(x) for x in (self[0], self[1], self[3]))
        return _Kept(features, magnitudes, self.reference.clone(), logits)

    def write(self, used: int, features: Tensor, magnitudes: Tensor) -> None:
        """Adds tokens after those used."""
        end = used + features.size(2)
        self.features[:, :, used:end] = features
        self.magnitudes[:, :, used:end] = magnitudes
        if not bool((magnitudes > self.reference).any()):
            self.logits[:, :, used:end] = magnitudes - self.reference
            return
        largest, logits = self._relative_to_largest(end)
        self.reference.copy_(largest)  # nothing that could fail from here on
        self.logits[:, :, :end].copy_(logits)

    def cropped(self, length: int) -> _Kept:
        """With the first tokens' own reference: beside a key that is gone they would round."""
        largest, logits = self._relative_to_largest(length)
        if torch.equal(largest, self.reference):
            return self
        kept = self.logits.clone()
        kept[:, :, :length] = logits
        return self._replace(reference=largest, logits=kept)

    def _relative_to_largest(self, end: int) -> tuple[Tensor, Tensor]:
        """The largest magnitude of the first tokens that is finite, and theirs less that."""
        known = self.magnitudes[:, :, :end]
        finite = known.nan_to_num(nan=-math.inf, posinf=-math.inf, neginf=-math.inf)
        none = finite.new_full((*finite.shape[:2], 1), -math.inf)
        largest = torch.cat([finite, none], -1).amax(-1, keepdim=True)
        return largest, known - largest.masked_fill(largest == -math.inf, 0.0)

    def select(self, indices: Tensor) -> _Kept:
        """The buffers of some batch items."""
        return _Kept(*(x.index_select(0, indices.to(x.device)) for x in self))


def _as_they_are(like: Tensor) -> AbstractContextManager[Any]:
    """No autocast: features of a lower precision would change weights by as much."""
    if not torch.is_autocast_enabled(like.device.type):
        return nullcontext()
    return torch.autocast(like.device.type, enabled=False)


def _check_floating(function: str, kind: str = "floating point", **tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None and not x.is_floating_point():
            raise TypeError(f"{function}: {name} must be {kind}, got {x.dtype}")


def _check_broadcasts(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    own = tuple(x.shape)
    fits = len(own) <= len(shape) and all(
        size in (1, of) for size, of in zip(own[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"KeyFeatures.attend: {name} must broadcast to {list(shape)}, got {list(own)}"
        )


def _added(logits: Tensor, bias: Tensor) -> Tensor:
    """Their sum; -inf in the bias hides a key whatever its logit is."""
    return torch.where(bias == -math.inf, -math.inf, logits + bias)


def _to_heads(x: Tensor, heads: int) -> Tensor:
    """x [B, heads or a divisor, L, S] with each head repeated for the query heads it serves."""
    own = x.size(1)
    return x if own in (1, heads) else x.repeat_interleave(heads // own, 1)
