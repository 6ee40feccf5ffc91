"""Keys kept in the form that implicit-kernel attention reads, for decoding.

Sizes as in ``ikattn.ops``: B batch, H query heads, G key/value heads, L queries, S keys kept, d
head size, d_v that of values, M frequencies; K is the heads of the frequencies, H or G.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ikattn._memory import takes_memory_for
from ikattn._precision import without_autocast
from ikattn.ops._fixed_kernel import (
    FixedKernel,
    added,
    check_broadcasts,
    check_floating,
    to_heads,
    with_heads,
)
from ikattn.ops.attention import attention_from_features

_FIRST_CAPACITY = 64  # tokens


class KeyFeatures(FixedKernel):
    """Features and log magnitudes of keys, made once, for queries that come one after the other.

    In decoding every new query meets all keys before it, whose features
    :func:`ikattn.implicit_kernel_attention` makes in every call. Here they are made when a key is
    appended: in float32 (float64 for float64 keys), under autocast too; 4 K (2 M) + 12 G bytes a
    token, and room for as many tokens again, for memory grows by doubling. A copy, or what is
    unpickled, has buffers of its own, so that several answers may go on from one prompt.

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

    Source: K. Song et al., "Implicit Kernel Attention", AAAI 2021 (arXiv 2006.06147).

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
        super().__init__(w1, w2, p, magnitude_scale)
        # Logits are then not relative to the largest, which a row may not see.
        self._batch_invariant = torch.ops.ikattn.deterministic() == "batch"
        self._kept: _Kept | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, with their room for more keys; 0 before the first key."""
        return 0 if self._kept is None else sum(x.nbytes for x in self._kept)

    @property
    def features(self) -> Tensor:
        """phi(k), ``[B, K, S, 2 M]``, in float32, for float64 keys float64: a view.

        Before the first key it is a ValueError, and so are ``log_magnitudes``.
        """
        return self._known().features[:, :, : self._length]

    @property
    def log_magnitudes(self) -> Tensor:
        """g_j = magnitude_scale ``|k_j|_p^2``, ``[B, G, S]``, in float64: a view."""
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
        before = None
        if self._kept is not None:
            before = (*self._kept.magnitudes.shape[:2], self._kept.features.dtype)
        self._check_key("append", key, before)
        # Ordinary tensors, also from below inference_mode: a later call may write to them.
        with torch.inference_mode(False), torch.no_grad(), without_autocast(key.device):
            dtype = torch.promote_types(key.dtype, torch.float32)
            features, magnitudes = self._of_keys(key, dtype)
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
        """Attends from queries to all keys that are kept.

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
        self._refuse_gradients("attend", value)
        function = "KeyFeatures.attend"
        check_floating(function, value=value, key_bias=key_bias)
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            check_floating(function, "bool or floating point", attn_mask=attn_mask)
        kept, length = self._known(), self._length
        features = kept.features[:, :, :length]
        logits = (kept.magnitudes if self._batch_invariant else kept.logits)[:, :, None, :length]
        self._check_query("attend", query, features.size(0), logits.size(1))
        heads, groups = query.size(1), logits.size(1)
        shape = (query.size(0), heads, query.size(2), length)
        spread = to_heads(logits, heads)
        if key_bias is not None:
            bias, of_heads = with_heads(key_bias, heads, groups)
            check_broadcasts(function, "key_bias", key_bias, (shape[0], of_heads, length))
            spread = added(spread, to_heads(bias.unsqueeze(-2), heads))
        if attn_mask is not None:
            check_broadcasts(function, "attn_mask", attn_mask, shape)
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            spread = added(spread, attn_mask)
        elif attn_mask is not None:
            spread = torch.where(attn_mask, spread, -math.inf)
        if causal_lower_right and query.size(2) > 1:
            later = torch.ones(shape[2:], dtype=torch.bool, device=query.device)
            spread = spread.masked_fill(later.triu(length - query.size(2) + 1), -math.inf)
        with without_autocast(query.device):
            queries = self._of_queries(query, features.dtype)
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

    def _copied_buffers(self) -> dict[str, Any]:
        return {"_kept": self._kept and self._kept.copied(self._length)}

    def _known(self) -> _Kept:
        if self._kept is None:
            raise ValueError("KeyFeatures: no key was appended yet")
        return self._kept


class _Kept(NamedTuple):
    """Buffers of one capacity."""

    features: Tensor  # [B, K, capacity, 2 M]
    magnitudes: Tensor  # [B, G, capacity], float64
    reference: Tensor  # [B, G, 1], float64: the largest magnitude
    logits: Tensor  # [B, G, capacity], magnitudes - reference in the features' type

    @staticmethod
    def of(features: Tensor, magnitudes: Tensor) -> _Kept:
        """Makes buffers without room, of the shapes of keys to come."""
        reference = magnitudes.new_full((*magnitudes.shape[:2], 1), -math.inf)
        return _Kept(features, magnitudes, reference, magnitudes.to(features.dtype))

    def with_room(self, used: int, needed: int) -> _Kept:
        """Buffers where ``needed`` tokens fit and that may be written to: these, or copies."""
        capacity = self.features.size(2)
        if capacity >= needed and not self.features.is_inference():
            return self
        if capacity < needed:
            capacity = max(needed, 2 * capacity, _FIRST_CAPACITY)
        return self.copied(used, capacity)

    def copied(self, used: int, capacity: int | None = None) -> _Kept:
        """Copies the tokens used, by default without room for more."""

        def copied(kept: Tensor) -> Tensor:
            room = kept.new_empty((*kept.shape[:2], capacity or used, *kept.shape[3:]))
            room[:, :, :used] = kept[:, :, :used]
            return room

        features, magnitudes, logits = (copied(x) for x in (self[0], self[1], self[3]))
        return _Kept(features, magnitudes, self.reference.clone(), logits)

    def write(self, used: int, features: Tensor, magnitudes: Tensor) -> None:
        """Adds tokens after those used."""
        end = used + features.size(2)
        self.features[:, :, used:end] = features
        self.magnitudes[:, :, used:end] = magnitudes
        # On other devices the host would wait for the answer: they make all logits again.
        is_cpu = magnitudes.device.type == "cpu"
        if is_cpu and not bool((magnitudes > self.reference).any()):
            self.logits[:, :, used:end] = magnitudes - self.reference
            return
        largest = torch.maximum(self.reference, _largest_finite(magnitudes))
        logits = _relative_to(largest, self.magnitudes[:, :, :end])
        self.reference.copy_(largest)  # nothing that could fail from here on
        self.logits[:, :, :end].copy_(logits)

    def cropped(self, length: int) -> _Kept:
        """Returns buffers with the first tokens' own reference, beside which they do not round."""
        largest = _largest_finite(self.magnitudes[:, :, :length])
        if torch.equal(largest, self.reference):
            return self
        kept = self.logits.clone()
        kept[:, :, :length] = _relative_to(largest, self.magnitudes[:, :, :length])
        return self._replace(reference=largest, logits=kept)

    def select(self, indices: Tensor) -> _Kept:
        return _Kept(*(x.index_select(0, indices.to(x.device)) for x in self))


def _largest_finite(magnitudes: Tensor) -> Tensor:
    """Returns the largest magnitude that is finite, ``[B, G, 1]``; -inf where none is."""
    finite = magnitudes.nan_to_num(nan=-math.inf, posinf=-math.inf, neginf=-math.inf)
    none = finite.new_full((*finite.shape[:2], 1), -math.inf)
    return torch.cat([finite, none], -1).amax(-1, keepdim=True)


def _relative_to(largest: Tensor, magnitudes: Tensor) -> Tensor:
    """Magnitudes less the largest, if there is one."""
    return magnitudes - largest.masked_fill(largest == -math.inf, 0.0)
