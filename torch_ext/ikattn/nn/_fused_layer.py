"""Float masks on torch's fused inference path of ``nn.TransformerEncoderLayer``.

That path takes every mask for a bool one (pytorch#118628): -0.5 hides a pair as -inf does. It asks
the attention module for its mask last, and is handed one here whose layer is computed step by step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_COMPILED = (
    "a compiled encoder layer of torch takes the fused inference path, which hides keys and adds "
    "no other values of a float mask: before compiling call "
    "torch.backends.mha.set_fastpath_enabled(False)"
)


def has_values(mask: Tensor | None) -> bool:
    """Whether a mask adds anything but 0 and -inf.

    In a program of torch.compile, which cannot look while it is made, the answer is no, and the
    program raises RuntimeError where it is yes.
    """
    if mask is None or not mask.is_floating_point():
        return False
    values = ((mask != 0) & (mask != -math.inf)).any()
    if not torch.compiler.is_compiling():
        return bool(values)
    torch._assert_async(~values, _COMPILED)
    return False


class StepByStep(Tensor):
    """A mask that makes the fused layer of an attention the ordinary one, with these masks."""

    attention: nn.MultiheadAttention
    masks: tuple[Tensor | None, Tensor | None]

    @staticmethod
    def __new__(
        cls, attention: nn.MultiheadAttention, attn_mask: Tensor | None, padding: Tensor | None
    ) -> StepByStep:
        some = attn_mask if attn_mask is not None else padding
        assert some is not None
        mask: StepByStep = some.as_subclass(cls)
        mask.attention, mask.masks = attention, (attn_mask, padding)
        return mask

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is torch._transformer_encoder_layer_fwd:
            mask = next(x for x in args if isinstance(x, cls))
            return _layer(mask.attention, mask.masks, *args)
        return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _layer(
    attention: nn.MultiheadAttention, masks: tuple[Tensor | None, ...], x: Tensor, *given: Any
) -> Tensor:
    """Computes ``nn.TransformerEncoderLayer.forward`` from the fused function's arguments.

    After sizes and projections, which the attention has, they are use_gelu, norm_first, eps, and
    weights and biases of both norms and both linear modules.
    """
    attn_mask, padding = masks
    use_gelu, norm_first, eps, *weights = given[6:17]
    norm1, norm2, linear1, linear2 = (weights[i : i + 2] for i in range(0, 8, 2))

    def attend(x: Tensor) -> Tensor:
        return attention(x, x, x, padding, attn_mask=attn_mask, need_weights=False)[0]  # type: ignore[no-any-return]

    def feed(x: Tensor) -> Tensor:
        hidden = F.linear(x, *linear1)
        return F.linear(F.gelu(hidden) if use_gelu else hidden.relu(), *linear2)

    def norm(x: Tensor, own: list[Tensor]) -> Tensor:
        weight, bias = own
        return F.layer_norm(x, (x.size(-1),), weight, bias, eps)

    if norm_first:
        x = x + attend(norm(x, norm1))
        return x + feed(norm(x, norm2))
    x = norm(x + attend(x), norm1)
    return norm(x + feed(x), norm2)
