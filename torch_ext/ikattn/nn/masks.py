"""The masks of nn.MultiheadAttention, checked as it does and put into one form.

Bool masks mean *ignore* where they are True; float masks are added to the logits. Sizes: N batch,
H heads, L queries, S keys.
"""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

# Added to a logit it leaves a weight of 0, whatever the type; common masks hold -1e4 and below.
_NEVER = -1000.0


class Masks(NamedTuple):
    """The masks of a call, each bool or float as the caller gave it."""

    padding: Tensor | None  # [N, S]
    attention: Tensor | None  # [L, S] or [N * H, L, S]; after four_axes [1, 1, L, S], [N, H, L, S]
    is_causal: bool = False  # query i sees keys 0..i, besides the above

    def four_axes(self, queries: Tensor, keys: Tensor) -> Masks:
        """Gives ``attention`` four axes, those of logits of queries and keys [N, H, ., d]."""
        if self.attention is None:
            return self
        batch, heads, length, _ = queries.shape
        axes = self.attention.dim()
        tail = (length, keys.size(2))
        expected = (batch * heads, *tail) if axes == 3 else tail
        if self.attention.shape != expected:
            raise RuntimeError(
                f"The shape of the {axes}D attn_mask is {self.attention.shape}, "
                f"but should be {expected}."
            )
        leading = (batch, heads) if axes == 3 else (1, 1)
        return self._replace(attention=self.attention.view(*leading, *tail))

    def for_logits_of(self, queries: Tensor) -> Masks:
        """Gives two masks their sum's type, and 16-bit ones that of the queries under autocast.

        A float mask, or the sum, must be of the queries' type or float32.
        """
        padding, attention = self.padding, self.attention
        if padding is not None and attention is not None:
            masks = (padding, attention)
            types = [queries.dtype if m.dtype == torch.bool else m.dtype for m in masks]
            both = torch.promote_types(*types)
            padding, attention = (m if m.dtype == torch.bool else m.to(both) for m in masks)
        return self._replace(
            padding=_for_logits_of(queries, padding), attention=_for_logits_of(queries, attention)
        )

    def check_unread(self, queries: Tensor) -> None:
        """Checks type and device of ``attention``, for which a hint stands, as if it were read."""
        self.for_logits_of(queries)
        if self.attention is not None and self.attention.device != queries.device:
            raise RuntimeError(
                f"attn_mask must be on the device of query, {queries.device}, "
                f"got {self.attention.device}"
            )

    def with_visible_key(self) -> Masks:
        """Adds a key at the end, which every query sees."""
        padding, attention = (None if mask is None else pad(mask, (0, 1)) for mask in self[:2])
        return self._replace(padding=padding, attention=attention)

    def check_padding(self, keys: Tensor) -> None:
        """Raises AssertionError unless ``padding`` is [N, S], those of keys [N, H, S, d]."""
        if self.padding is None:
            return
        for axis, size in enumerate((keys.size(0), keys.size(2))):
            if self.padding.size(axis) != size:
                raise AssertionError(
                    f"Expected key_padded_mask.shape[{axis}] to be {size}, "
                    f"but got {self.padding.size(axis)}"
                )


def check_types(key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> None:
    """Warns if the masks differ in type; each must be bool or floating point."""
    for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
        if mask is not None and not torch.is_floating_point(mask) and mask.dtype != torch.bool:
            raise AssertionError(f"only bool and floating types of {name} are supported")
    if (
        key_padding_mask is not None
        and attn_mask is not None
        and key_padding_mask.dtype != attn_mask.dtype
        and not torch.compiler.is_compiling()  # a warning would break the graph
    ):
        warnings.warn(
            "Support for mismatched key_padding_mask and attn_mask is deprecated. "
            "Use same type for both instead.",
            stacklevel=2,
        )


def check_hint(is_causal: bool, attn_mask: Tensor | None) -> None:
    """Raises RuntimeError for a hint about a mask that is not there."""
    if is_causal and attn_mask is None:
        raise RuntimeError(
            "Need attn_mask if specifying the is_causal hint. "
            "You may use the Transformer module method "
            "`generate_square_subsequent_mask` to create this mask."
        )


def _for_logits_of(queries: Tensor, mask: Tensor | None) -> Tensor | None:
    if mask is None or mask.dtype in (torch.bool, torch.float32, queries.dtype):
        return mask
    if mask.dtype != torch.float64 and torch.is_autocast_enabled(queries.device.type):
        return mask.to(queries.dtype)
    raise RuntimeError(
        "Expected attn_mask dtype to be bool or float or to match query dtype, but got "
        f"attn_mask.dtype: {_in_words_of_torch(mask)} and  "
        f"query.dtype: {_in_words_of_torch(queries)} instead."
    )


def _in_words_of_torch(x: Tensor) -> str:
    """Names the type of a tensor as torch's own errors print it, from C++."""
    names = {
        torch.float16: "c10::Half",
        torch.bfloat16: "c10::BFloat16",
        torch.float32: "float",
        torch.float64: "double",
    }
    return names.get(x.dtype, str(x.dtype))


def hidden(mask: Tensor) -> Tensor:
    """Returns a bool mask, True where ``mask`` hides."""
    return mask if mask.dtype == torch.bool else mask == -math.inf


def padded(mask: Tensor) -> Tensor:
    """Returns a bool mask, True where ``mask`` hides or, being finite, all but hides."""
    return mask if mask.dtype == torch.bool else mask <= _NEVER


def padding_of_queries(
    query: Tensor, key: Tensor, padding: Tensor | None, batch_first: bool
) -> Tensor | None:
    """Returns which queries are padding, bool [N, L], where what a call is given can tell.

    In self-attention they are the keys that are padding. As callers, checkpointing and mixed
    precision hand over copies, it is self-attention wherever the tokens that are not padding have
    the same values, sample by sample. ``padding`` is that of the keys, [N, S].
    """
    if padding is None or key is query:
        return None if padding is None else padded(padding)
    batch_and_length = query.shape[:2] if batch_first else query.shape[1::-1]
    if query.shape != key.shape or padding.shape != batch_and_length:
        return None
    away, differs = padded(padding), (query != key).any(-1)
    if not batch_first:
        differs = differs.T
    return away & ~(differs & ~away).any(1, keepdim=True)


def as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a mask to add to the logits; a bool one becomes 0 and -inf of type ``dtype``."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)


def as_visible(mask: Tensor) -> Tensor:
    """Returns a mask in the functional interface's polarity: bool, True = may attend, or float."""
    return ~mask if mask.dtype == torch.bool else mask
