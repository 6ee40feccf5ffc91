"""Decoding in constant memory: a state of one size that holds any number of keys and values.

Sizes as in ``ikattn.ops``: B batch, H query heads, G key/value heads, L queries, d head size, d_v
that of values, M frequencies; K is the heads of the frequencies, H or G. E = M (2 M + 1) + 1
entries, as of :func:`ikattn.ops.key_moments`.
"""

from __future__ import annotations

import math
from typing import Any

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
from ikattn.ops.moments import (
    attention_from_moments,
    causal_attention_from_moments,
    key_moments,
    merge_moments,
    no_moments,
)

_LEAST_EPS = 1e-6  # whose share of a sum float32 still holds to some per cent


class RecurrentState(FixedKernel):
    """All that queries need to know of the keys and values before them, in constant memory.

    A state is ``B K E (d_v + 1)`` numbers. The squared similarity is a polynomial in the features
    of a key, so that what a query makes of all keys is linear in sums over them
    (:func:`ikattn.ops.key_moments`). A new key adds to the sums; neither memory nor the time of a
    token grows with their number. Sums are relative to exp of the largest log magnitude so far, and
    rescaled when a larger one comes.

    Keys can be hidden when they come, and never leave: no sliding window, no mask that differs by
    query but :meth:`extend`'s causal one, no way back by a token. docs/guide/decoding.md has times
    and memory beside those of :class:`ikattn.KeyFeatures`, and the errors of sums in float32. Sums
    are made in float64 by default, under autocast too.

    Nothing has a gradient: call it under ``torch.no_grad()``.

    Args:
        w1, w2, p, magnitude_scale: As for :class:`ikattn.KeyFeatures`.
        dtype: Of the sums: float64, or float32, which is float64 for float64 keys all the same.

    Raises:
        TypeError: Frequencies are not floating point.
        ValueError: p, magnitude_scale, dtype or the shape of the frequencies is wrong.

    Source: K. Song et al., "Implicit Kernel Attention", AAAI 2021 (arXiv 2006.06147).

    Example:
        >>> import torch, ikattn
        >>> q, k, v = (torch.randn(1, 2, 10, 8) for _ in range(3))
        >>> w1, w2 = (0.1 * torch.randn(2, 8, 4) for _ in range(2))
        >>> state, outputs = ikattn.RecurrentState(w1, w2), []
        >>> for t in range(10):  # token by token
        ...     state.update(k[:, :, t : t + 1], v[:, :, t : t + 1])
        ...     outputs.append(state.attend(q[:, :, t : t + 1]))
        >>> whole = ikattn.implicit_kernel_attention(q, k, v, w1, w2, is_causal=True)
        >>> torch.allclose(torch.cat(outputs, 2), whole, atol=1e-5)
        True
        >>> state.nbytes  # of 10 tokens, as of a million
        5344
    """

    def __init__(
        self,
        w1: Tensor,
        w2: Tensor | None = None,
        *,
        p: float | None = 2.0,
        magnitude_scale: float | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__(w1, w2, p, magnitude_scale)
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"RecurrentState: dtype must be float32 or float64, got {dtype}")
        self.dtype = dtype
        self._groups = 0  # G
        self._moments: Tensor | None = None  # [B, K, E, d_v + 1]
        self._reference: Tensor | None = None  # [B, K]
        self._forgets = False  # whether a token had a gate

    @property
    def nbytes(self) -> int:
        """Bytes of the sums; 0 before the first key."""
        return sum(x.nbytes for x in (self._moments, self._reference) if x is not None)

    @property
    def moments(self) -> Tensor:
        """The sums ``[B, K, E, d_v + 1]``; those of :func:`ikattn.ops.key_moments`.

        They are the state's own, which ``update`` writes to; clone what is to stay. Before the
        first key they are a ValueError.
        """
        return self._known()[0]

    @property
    def reference(self) -> Tensor:
        """Logarithms of the factors that the sums lack, float64 ``[B, K]``; as ``moments``."""
        return self._known()[1]

    @takes_memory_for("moments of keys", function="RecurrentState.update")
    def update(
        self,
        key: Tensor,
        value: Tensor,
        key_bias: Tensor | None = None,
        *,
        log_decay: Tensor | None = None,
    ) -> None:
        """Adds keys and values.

        Args:
            key: ``[B, G, new, d]``.
            value: ``[B, G, new, d_v]``, in any floating type.
            key_bias: Added to a key's logit, broadcastable to ``[B, K, new]`` or ``[B, G, new]``;
                -inf hides the key, whatever it holds.
            log_decay: Logarithms of forget gates, broadcastable as key_bias. The gate of a token
                multiplies the weights of all keys before it, as in
                :func:`ikattn.implicit_kernel_attention`; -inf forgets them.

        Raises:
            RuntimeError: A gradient would be lost, or memory is not enough; nothing has changed.
            TypeError: An argument is not floating point.
            ValueError: A shape is wrong, or not that of the tokens before.
        """
        self._check_tokens("update", key, value, key_bias, log_decay)
        # Ordinary tensors, also from below inference_mode.
        with torch.inference_mode(False), torch.no_grad(), without_autocast(key.device):
            features, logits = self._keys_of(key, key_bias)
            kept = None if self._moments is None else self._known()
            if log_decay is not None:
                decay = self._decay_of(log_decay, key)
                later = torch.cat([decay[..., 1:], torch.zeros_like(decay[..., :1])], -1)
                logits = added(logits, later.flip(-1).cumsum(-1).flip(-1))
                if kept is not None:
                    kept = _forgotten(*kept, decay.sum(-1))
            if kept is None:
                kept = key_moments(features, logits, value)
            else:
                torch.ops.ikattn.add_key_moments_(*kept, features, logits, value)
            self._moments, self._reference = kept
        self._length += key.size(2)
        self._groups = key.size(1)
        self._forgets = self._forgets or log_decay is not None

    @takes_memory_for("features and the output", function="RecurrentState.attend")
    def attend(self, query: Tensor, *, eps: float = 1e-5) -> Tensor:
        """Attends from queries to all keys that came.

        Args:
            query: ``[B, H, L, d]``.
            eps: Added to the squared similarity; positive, at least 1e-6 unless sums are float64.

        Returns:
            ``[B, H, L, d_v]`` in the type of query. A query for which no key is visible gets zero.

        Raises:
            RuntimeError, TypeError, ValueError: An argument has a wrong shape, type or value, or a
                gradient would be lost.
        """
        self._check_eps("attend", eps)
        moments, reference = self._known()
        self._check_query("attend", query, moments.size(0), self._groups)
        with without_autocast(query.device):
            features = self._of_queries(query, moments.dtype)
            output, _ = attention_from_moments(features, moments, reference, eps=eps)
        return output.to(query.dtype)

    @takes_memory_for("features and the output", function="RecurrentState.extend")
    def extend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_bias: Tensor | None = None,
        *,
        log_decay: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        """Attends causally from new tokens, which are added: a prompt, or a part of one.

        A query sees all keys before and the new ones up to its own.

        Args:
            query: ``[B, H, new, d]``.
            key: As of :meth:`update`, as value, key_bias and log_decay.
            value: ``[B, G, new, d_v]``.
            key_bias, log_decay: Broadcastable to ``[B, K, new]`` or ``[B, G, new]``.
            eps: As of :meth:`attend`.

        Returns:
            ``[B, H, new, d_v]`` in the type of query.

        Raises:
            RuntimeError, TypeError, ValueError: As of :meth:`update` and :meth:`attend`.
        """
        if query.dim() != 4 or key.dim() != 4 or query.size(2) != key.size(2):
            raise ValueError(
                "RecurrentState.extend: query and key must be of as many tokens, got "
                f"{list(query.shape)} and {list(key.shape)}"
            )
        # all that may be wrong, before anything changes
        self._check_eps("extend", eps)
        self._check_tokens("extend", key, value, key_bias, log_decay)
        self._check_query("extend", query, key.size(0), key.size(1))
        if key.size(2) == 1:  # written in place
            self.update(key, value, key_bias, log_decay=log_decay)
            return self.attend(query, eps=eps)
        # Ordinary tensors, also from below inference_mode.
        with torch.inference_mode(False), torch.no_grad(), without_autocast(key.device):
            features, logits = self._keys_of(key, key_bias)
            is_first, whole = self._moments is None, None
            before = no_moments(features, value.size(3)) if is_first else self._known()
            queries, sums = self._of_queries(query, features.dtype), before[0].dtype
            if log_decay is not None and key.size(2) > 0:
                decay = self._decay_of(log_decay, key)
                if bool((decay == -math.inf).any()):
                    return self._one_by_one((query, key, value, key_bias), decay, eps)
                total = decay.cumsum(-1)
                logits, whole = added(logits, -total), total[..., -1]
                # in float64, for sums of such logits cancel
                queries, features, before = (
                    queries.double(),
                    features.double(),
                    (before[0].double(), before[1]),
                )
            output, _, moments, reference = causal_attention_from_moments(
                queries, features, logits, value, *before, eps=eps
            )
            self._moments = moments.to(sums)
            self._reference = reference if whole is None else reference + whole
        self._length += key.size(2)
        self._groups = key.size(1)
        self._forgets = self._forgets or log_decay is not None
        return output.to(query.dtype)

    def reorder(self, indices: Tensor) -> None:
        """Makes the batch items ``indices``, int64 ``[new B]``, the batch: to reorder beams.

        Raises:
            RuntimeError, IndexError: An index is out of range.
        """
        if self._moments is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            new = [x.index_select(0, indices.to(x.device)) for x in self._known()]
        self._moments, self._reference = new

    def merge(self, other: RecurrentState) -> None:
        """Adds the keys of another state of the same kernel: of a part of the tokens.

        Raises:
            ValueError: Kernels, batch sizes, heads or types of the two differ, or the other one has
                gates, which would have to be on these keys, too.
        """
        _check_same_kernel(self, other)
        if other._forgets:
            raise ValueError("RecurrentState.merge: other must be of tokens without log_decay")
        if other._moments is None:
            return
        if self._moments is None:
            if other.dtype != self.dtype:
                raise ValueError(
                    f"RecurrentState.merge: other must have sums in {self.dtype}, got {other.dtype}"
                )
            self.load_state_dict(other.state_dict())
            return
        own, others = self._known(), other._known()
        kinds = [
            (moments.shape, moments.dtype, moments.device, state._groups)
            for (moments, _), state in ((own, self), (others, other))
        ]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"RecurrentState.merge: other must have moments as these, {kinds[0]}, got "
                f"{kinds[1]}"
            )
        with torch.inference_mode(False), torch.no_grad():
            self._moments, self._reference = merge_moments(*own, *others)
        self._length += other._length

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums over keys: tensors ``moments`` and ``reference``, and integers.

        Tensors are copies. Frequencies are not in it; ``torch.save(state, ..)`` saves them, too.
        """
        copies = {name.removeprefix("_"): x for name, x in self._copied_buffers().items()}
        own = {"length": self._length, "groups": self._groups, "forgets": self._forgets}
        return {**copies, **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes what :meth:`state_dict` gave, of the same kernel, the state.

        Raises:
            KeyError: An entry is missing.
            ValueError: Shapes are those of another kernel.
        """
        moments, reference = state["moments"], state["reference"]
        length, groups = int(state["length"]), int(state["groups"])
        heads, _, frequencies = self.w1.shape
        entries = frequencies * (2 * frequencies + 1) + 1
        if moments is not None:  # written in place from here on
            fits = moments.dim() == 4 and moments.shape[1:3] == (heads, entries)
            fits = fits and reference.shape == moments.shape[:2]
            if not fits or reference.dtype != torch.float64:
                raise ValueError(
                    "RecurrentState.load_state_dict: moments must have shape [B, K, E, d_v + 1] "
                    f"with K = {heads} and E = {entries}, and reference [B, K] in float64, got "
                    f"{list(moments.shape)} and {list(reference.shape)} in {reference.dtype}"
                )
            if groups < 1 or heads % groups != 0:
                raise ValueError(
                    "RecurrentState.load_state_dict: groups must divide the heads of w1, "
                    f"{heads}, got {groups}"
                )
            with torch.inference_mode(False), torch.no_grad():
                moments, reference = moments.clone(), reference.clone()
        self._moments, self._reference = moments, reference
        self._length, self._groups = length, groups
        self._forgets = bool(state.get("forgets", False))

    def to(self, device: torch.device | str) -> RecurrentState:
        """Moves sums and frequencies; returns the state itself."""
        w2 = None if self.w2 is None else self.w2.to(device)
        w1 = self.w1.to(device)
        kept = [None if x is None else x.to(device) for x in (self._moments, self._reference)]
        self.w1, self.w2 = w1, w2
        self._moments, self._reference = kept
        self._frequencies.clear()
        return self

    def _copied_buffers(self) -> dict[str, Any]:
        buffers = {"_moments": self._moments, "_reference": self._reference}
        return {name: None if x is None else x.clone() for name, x in buffers.items()}

    def _known(self) -> tuple[Tensor, Tensor]:
        if self._moments is None or self._reference is None:
            raise ValueError("RecurrentState: no key came yet")
        return self._moments, self._reference

    def _one_by_one(self, tokens: tuple[Any, ...], decay: Tensor, eps: float) -> Tensor:
        """Extends by tokens of which some forget all that was before; all of them or none."""
        before = {**self._copied_buffers(), "_length": self._length, "_groups": self._groups}
        try:
            outputs = [
                self.extend(*(_token(x, t) for x in tokens), log_decay=gate, eps=eps)
                for t, gate in enumerate(decay.split(1, -1))
            ]
        except BaseException:
            vars(self).update(before)
            raise
        return torch.cat(outputs, 2)

    def _decay_of(self, log_decay: Tensor, key: Tensor) -> Tensor:
        """Returns logarithms of gates for each head of the sums, [B, K, new] in float64."""
        heads = self.w1.size(0)
        whole, _ = with_heads(log_decay.double(), heads, key.size(1))
        return to_heads(whole, heads).expand(key.size(0), heads, key.size(2))

    def _keys_of(self, key: Tensor, key_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns features and logits for each head of the sums."""
        features, logits = self._of_keys(key, torch.promote_types(key.dtype, self.dtype))
        if key_bias is not None:
            bias, heads = with_heads(key_bias, self.w1.size(0), key.size(1))
            logits = added(to_heads(logits, heads), to_heads(bias, heads))
        return features, to_heads(logits, self.w1.size(0)).expand(features.shape[:3])

    def _check_eps(self, method: str, eps: float) -> None:
        dtype = self.dtype if self._moments is None else self._moments.dtype
        if dtype == torch.float32 and eps < _LEAST_EPS:
            raise ValueError(
                f"RecurrentState.{method}: eps must be at least {_LEAST_EPS} for sums in float32, "
                f"whose rounding is larger, got {eps}; dtype=torch.float64 takes less"
            )

    def _check_tokens(
        self,
        method: str,
        key: Tensor,
        value: Tensor,
        key_bias: Tensor | None,
        log_decay: Tensor | None,
    ) -> None:
        name, before = f"RecurrentState.{method}", None
        width = value.size(3) if value.dim() == 4 else -1
        if self._moments is not None:
            before = (self._moments.size(0), self._groups, self._moments.dtype)
            width = self._moments.size(3) - 1
        self._check_key(method, key, before, self.dtype)
        self._refuse_gradients(method, value)
        biases = {"key_bias": key_bias, "log_decay": log_decay}
        check_floating(name, value=value, key_bias=key_bias, log_decay=log_decay)
        if tuple(value.shape) != (*key.shape[:3], width):
            raise ValueError(
                f"{name}: value must have shape [B, G, new, d_v] as key, {list(key.shape[:3])}, "
                f"and the values before, got {list(value.shape)}"
            )
        for argument, x in biases.items():
            if x is not None:
                self._refuse_gradients(method, x)
                _, heads = with_heads(x, self.w1.size(0), key.size(1))
                check_broadcasts(name, argument, x, (key.size(0), heads, key.size(2)))


def _token(x: Any, t: int) -> Any:
    """Returns token t of query, key or value [.., new, d] or of a bias [.., new or 1]."""
    if x is None or x.dim() == 4:
        return x if x is None else x[:, :, t : t + 1]
    return x[..., t : t + 1] if x.dim() and x.size(-1) > 1 else x


def _forgotten(moments: Tensor, reference: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Returns sums times exp of ``decay`` [B, K], and sums of no key where that is 0."""
    closed = decay == -math.inf
    if bool(closed.any()):
        moments = moments.masked_fill(closed[..., None, None], 0.0)
    return moments, reference + decay


def _check_same_kernel(own: RecurrentState, other: RecurrentState) -> None:
    def is_same(one: Tensor | None, two: Tensor | None) -> bool:
        if one is None or two is None:
            return one is two
        return one.shape == two.shape and torch.equal(one, two.to(one))

    numbers = [(x.p, x.magnitude_scale) for x in (own, other)]
    if numbers[0] != numbers[1] or not is_same(own.w1, other.w1) or not is_same(own.w2, other.w2):
        raise ValueError(
            "RecurrentState.merge: other must have the same frequencies, p and magnitude_scale"
        )
